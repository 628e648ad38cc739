/* The one list of kernels, best first: dispatch, `info`, tests and benchmarks all walk it. */
#include "core/status.h"
#include "kernels/cpu/cpu.h"

#include <stdlib.h>
#include <string.h>

static const char *always(void) { return NULL; }
static const char *anything(const ra_problem *problem) {
    (void)problem;
    return NULL;
}

#ifdef RA_HAVE_CUDA_KERNELS
extern const ra_kernel ra_kernel_cuda;
#endif

static const ra_kernel scalar = {
    .name = "scalar",
    .device = RA_DEVICE_CPU,
    .unavailable = always,
    .unsupported = anything,
    .forward_scratch = ra_scalar_forward_scratch,
    .backward_scratch = ra_scalar_backward_scratch,
    .forward = ra_scalar_forward,
    .backward = ra_scalar_backward,
};

static const ra_kernel *const kernels[] = {
#ifdef RA_HAVE_CUDA_KERNELS
    &ra_kernel_cuda,
#endif
    &scalar,
};
enum { KERNELS = sizeof kernels / sizeof *kernels };

static ra_status find_named(const char *name, const char *source, ra_device device, const ra_problem *problem,
                            const ra_kernel **kernel) {
    for (int i = 0; i < KERNELS; i++) {
        const ra_kernel *k = kernels[i];
        if (strcmp(k->name, name) != 0) continue;
        if (k->device != device)
            return ra_fail(RA_NOT_AVAILABLE, "kernel '%s'%s runs on the %s, and the tensors are on the other device", name, source,
                           k->device == RA_DEVICE_CUDA ? "GPU" : "CPU");
        const char *reason = k->unavailable();
        if (!reason) reason = k->unsupported(problem);
        if (reason) return ra_fail(RA_NOT_AVAILABLE, "kernel '%s'%s cannot be used: %s", name, source, reason);
        *kernel = k;
        return RA_OK;
    }
    return ra_fail(RA_NOT_AVAILABLE, "this build has no kernel '%s'%s", name, source);
}

static bool named(const char *name) { return name && *name && strcmp(name, "auto") != 0; }

/* The environment chooses among the kernels of a device; it does not forbid the other device. */
static bool of_other_device(const char *name, ra_device device) {
    for (int i = 0; i < KERNELS; i++)
        if (strcmp(kernels[i]->name, name) == 0) return kernels[i]->device != device;
    return false;
}

ra_status ra_kernel_find(const char *name, ra_device device, const ra_problem *problem, const ra_kernel **kernel) {
    if (named(name)) return find_named(name, "", device, problem, kernel);
    name = getenv("RINGATTN_KERNEL");
    if (named(name) && !of_other_device(name, device)) return find_named(name, " (from RINGATTN_KERNEL)", device, problem, kernel);
    for (int i = 0; i < KERNELS; i++) {
        if (kernels[i]->device != device || kernels[i]->unavailable() || kernels[i]->unsupported(problem)) continue;
        *kernel = kernels[i];
        return RA_OK;
    }
    for (int i = 0; i < KERNELS; i++) {
        if (kernels[i]->device != device) continue;
        const char *reason = kernels[i]->unavailable();
        if (!reason) reason = kernels[i]->unsupported(problem);
        return ra_fail(RA_NOT_AVAILABLE, "kernel '%s' cannot be used: %s", kernels[i]->name, reason);
    }
    return ra_fail(RA_NOT_AVAILABLE, "this build has no kernels for the %s", device == RA_DEVICE_CUDA ? "GPU" : "CPU");
}

bool ra_kernel_list(int index, ra_kernel_info *info) {
    if (index < 0 || index >= KERNELS) return false;
    const char *reason = kernels[index]->unavailable();
    *info = (ra_kernel_info){.name = kernels[index]->name, .available = !reason, .reason = reason ? reason : ""};
    return true;
}

ra_dtype ra_recommended_dtype(ra_device device) { return device == RA_DEVICE_CUDA ? RA_BF16 : RA_F32; }
