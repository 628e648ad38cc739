/* The one list of kernels, best first: dispatch, `info`, tests and benchmarks all walk it. */
#include "core/cpu.h"
#include "core/status.h"
#include "device/cpu/cpu.h"
#include "device/cpu/device.h"

#include <stdlib.h>
#include <string.h>

/* -------------------------------------------------------------------------------------------- what runs where, and why not */

static const char *always(void) { return NULL; }

#ifdef RA_HAVE_X86_KERNELS
static const char *need_avx2(void) {
    const ra_cpu *cpu = ra_cpu_get();
    return cpu->avx2 && cpu->fma && cpu->f16c ? NULL : "this processor lacks AVX2, FMA or F16C";
}
static const char *need_avx512(void) {
    const ra_cpu *cpu = ra_cpu_get();
    return cpu->avx512f && cpu->avx512bw && cpu->avx512dq && cpu->avx512vl ? need_avx2()
                                                                           : "this processor lacks AVX-512 (F, BW, DQ, VL)";
}
static const char *need_amx(void) {
    const ra_cpu *cpu = ra_cpu_get();
    return cpu->amx_tile && cpu->amx_bf16 && cpu->avx512_bf16
               ? need_avx512()
               : "this processor lacks AMX, or the system does not let us use it";
}
#else
static const char *elsewhere_x86(void) { return "it needs an x86-64 processor"; }
#endif

#ifdef RA_HAVE_ARM_KERNELS
static const char *need_neon(void) { return ra_cpu_get()->neon ? NULL : "this processor lacks NEON"; }
#else
static const char *elsewhere_arm(void) { return "it needs an aarch64 processor"; }
#endif

static const char *anything(const ra_problem *problem) {
    (void)problem;
    return NULL;
}
static const char *at_most_32_bits(const ra_problem *problem) {
    return problem->dtype == RA_F64 ? "f64 is computed by the scalar kernel alone" : NULL;
}

/* ----------------------------------------------------------------------------------------------------------- the list */

#define CPU_KERNEL(name_, functions, unavailable_, unsupported_)                                                               \
    static const ra_kernel kernel_##name_ = {                                                                                  \
        .name = #name_,                                                                                                        \
        .device = &ra_cpu_device,                                                                                              \
        .unavailable = unavailable_,                                                                                           \
        .unsupported = unsupported_,                                                                                           \
        .forward_scratch = ra_##functions##_forward_scratch,                                                                   \
        .backward_scratch = ra_##functions##_backward_scratch,                                                                 \
        .forward = ra_##functions##_forward,                                                                                   \
        .backward_unsupported = anything,                                                                                      \
        .backward_begin = ra_cpu_backward_begin,                                                                               \
        .backward_end = ra_cpu_backward_end,                                                                                   \
        .backward = ra_##functions##_backward,                                                                                 \
    };

/* A kernel of another processor stays in the list, so that whoever asks for it learns why it is not here. */
#ifdef RA_HAVE_X86_KERNELS
CPU_KERNEL(amx, amx, need_amx, at_most_32_bits)
CPU_KERNEL(avx512, avx512, need_avx512, at_most_32_bits)
CPU_KERNEL(avx2, avx2, need_avx2, at_most_32_bits)
#else
CPU_KERNEL(amx, scalar, elsewhere_x86, at_most_32_bits)
CPU_KERNEL(avx512, scalar, elsewhere_x86, at_most_32_bits)
CPU_KERNEL(avx2, scalar, elsewhere_x86, at_most_32_bits)
#endif
#ifdef RA_HAVE_ARM_KERNELS
CPU_KERNEL(neon, neon, need_neon, at_most_32_bits)
#else
CPU_KERNEL(neon, scalar, elsewhere_arm, at_most_32_bits)
#endif
CPU_KERNEL(scalar, scalar, always, anything)

extern const ra_kernel ra_kernel_cuda, ra_kernel_sm90a, ra_kernel_sm80; /* in a module that may be missing */

static const ra_kernel *const kernels[] = {
    &ra_kernel_cuda, &ra_kernel_sm90a, &ra_kernel_sm80, &kernel_amx, &kernel_avx512, &kernel_avx2, &kernel_neon, &kernel_scalar,
};
enum { KERNELS = sizeof kernels / sizeof *kernels };

const ra_device_ops *ra_device_of(ra_device kind) {
    for (int i = 0; i < KERNELS; i++)
        if (kernels[i]->device->kind == kind) return kernels[i]->device;
    return NULL;
}

bool ra_kernel_list(int index, ra_kernel_info *info) {
    if (index < 0 || index >= KERNELS) return false;
    if (!info) return true;
    const char *reason = kernels[index]->unavailable();
    *info = (ra_kernel_info){.name = kernels[index]->name, .available = !reason, .reason = reason ? reason : ""};
    return true;
}

/* 16 bits where there are matrix units for them. */
ra_dtype ra_recommended_dtype(ra_device device) {
    return device == RA_DEVICE_CUDA || !kernel_amx.unavailable() ? RA_BF16 : RA_F32;
}

/* ----------------------------------------------------------------------------------------------------------- choosing */

static const char *why_not(const ra_kernel *kernel, const ra_problem *problem) {
    const char *reason = kernel->unavailable();
    return reason ? reason : kernel->unsupported(problem);
}

static const ra_kernel *by_name(const char *name) {
    for (int i = 0; i < KERNELS; i++)
        if (strcmp(kernels[i]->name, name) == 0) return kernels[i];
    return NULL;
}

static ra_status find_named(const char *name, ra_device device, const ra_problem *problem, const ra_kernel **kernel) {
    const ra_kernel *k = by_name(name);
    if (!k) return ra_fail(RA_NOT_AVAILABLE, "this build has no kernel '%s'", name);
    if (k->device->kind != device)
        return ra_fail(RA_NOT_AVAILABLE, "kernel '%s' needs tensors on the %s", name,
                       k->device->name);
    const char *reason = why_not(k, problem);
    if (reason) return ra_fail(RA_NOT_AVAILABLE, "kernel '%s' cannot be used: %s", name, reason);
    *kernel = k;
    return RA_OK;
}

/* RINGATTN_KERNEL holds for a whole program: it must name a kernel that can run here, but problems of the other device, and
 * those that the kernel does not compute, go to the best of the others. */
static ra_status find_preferred(const char *name, ra_device device, const ra_problem *problem, const ra_kernel **kernel) {
    const ra_kernel *k = by_name(name);
    if (!k) return ra_fail(RA_NOT_AVAILABLE, "RINGATTN_KERNEL: this build has no kernel '%s'", name);
    if (k->unavailable())
        return ra_fail(RA_NOT_AVAILABLE, "RINGATTN_KERNEL: kernel '%s' cannot be used: %s", name, k->unavailable());
    *kernel = k->device->kind == device && !k->unsupported(problem) ? k : NULL;
    return RA_OK;
}

static bool is_named(const char *name) { return name && *name && strcmp(name, "auto") != 0; }

ra_status ra_kernel_find(const char *name, ra_device device, const ra_problem *problem, const ra_kernel **kernel) {
    *kernel = NULL;
    if (is_named(name)) return find_named(name, device, problem, kernel);
    const char *preferred = getenv("RINGATTN_KERNEL");
    if (is_named(preferred)) {
        RA_TRY(find_preferred(preferred, device, problem, kernel));
        if (*kernel) return RA_OK;
    }
    const ra_kernel *last = NULL;
    for (int i = 0; i < KERNELS; i++) {
        if (kernels[i]->device->kind != device) continue;
        last = kernels[i];
        if (why_not(last, problem)) continue;
        *kernel = last;
        return RA_OK;
    }
    if (!last)
        return ra_fail(RA_NOT_AVAILABLE, "this build has no kernels for the GPU");
    return ra_fail(RA_NOT_AVAILABLE, "kernel '%s' cannot be used: %s", last->name, why_not(last, problem));
}
