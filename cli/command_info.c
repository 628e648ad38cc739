/* info: what this build and this machine offer. */
#include <stdio.h>
#include <string.h>

#include "cli.h"
#include "core/dtype.h"
#include "core/status.h"
#include "core/workers.h"
#include "ringattn_cuda.h"
#include "ringattn_mpi.h"

static const char *const mpis[] = {"openmpi", "mpich"};
enum { MPI_COUNT = sizeof mpis / sizeof *mpis };

/* The kernel of a usual call: on the CPU, in the recommended type. "none" where there is no such, as the last error says. */
static const char *chosen_kernel(void) {
    ra_attention_desc desc;
    ra_comm *comm = NULL;
    ra_plan *plan = NULL;
    static char name[32];
    ra_attention_desc_init(&desc);
    desc.dtype = ra_recommended_dtype(RA_DEVICE_CPU);
    desc.seq_q = desc.seq_k = 1024;
    desc.heads = 1;
    desc.head_dim = 64;
    ra_status status = ra_comm_self(&comm);
    if (status == RA_OK) status = ra_plan_create(comm, &desc, &plan);
    snprintf(name, sizeof name, "%s", status == RA_OK ? ra_plan_kernel(plan) : "none");
    ra_plan_destroy(plan);
    ra_comm_destroy(comm);
    return name;
}

/* The GPU of that number. Not RA_OK: there is none, or none that can be used. */
static ra_status describe_gpu(int number, ra_cuda_device *gpu) {
    int gpus;
    RA_TRY(ra_cuda_count(&gpus));
    if (number > 0 && number >= gpus) return RA_NOT_AVAILABLE;
    if (gpus > 0) RA_TRY(ra_cuda_use(number));
    return ra_cuda_probe(gpu);
}

static ra_status report_json(const settings *s, const char *dtype) {
    ra_kernel_info k;
    json_t *kernels = json_array(), *mpi = json_array(), *transports = json_pack("[s, s]", "self", "threads");
    for (int i = 0; ra_kernel_list(i, &k); i++)
        json_array_append_new(kernels,
                              json_pack("{s:s, s:b, s:s}", "name", k.name, "available", k.available, "reason", k.reason));
    bool any = false;
    for (int i = 0; i < MPI_COUNT; i++) {
        char text[256];
        bool found = ra_mpi_version(mpis[i], text, sizeof text);
        any = any || found;
        json_array_append_new(mpi, json_pack("{s:s, s:b, s:s}", "implementation", mpis[i], "available", found,
                                             found ? "version" : "reason", text));
    }
    if (any) json_array_append_new(transports, json_string("mpi"));
    ra_cuda_device gpu;
    json_t *gpus = json_array();
    for (int i = 0; describe_gpu(i, &gpu) == RA_OK; i++)
        json_array_append_new(gpus, json_pack("{s:s, s:i, s:i, s:i, s:I}", "name", gpu.name, "major", (int)gpu.major, "minor",
                                              (int)gpu.minor, "processors", (int)gpu.processors, "memory_bytes",
                                              (json_int_t)gpu.memory));
    return print_json(s, json_pack("{s:s, s:s, s:i, s:s, s:o, s:o, s:o, s:o, s:s}", "version", ra_version(), "cpu_features",
                                   ra_cpu_features(), "cores", ra_usable_cores(), "kernel", chosen_kernel(), "kernels", kernels,
                                   "gpus", gpus, "transports", transports, "mpi", mpi, "recommended_dtype", dtype));
}

ra_status command_info(const settings *s, bool *check_failed) {
    (void)check_failed;
    ra_kernel_info k;
    const char *dtype = ra_dtype_name(ra_recommended_dtype(RA_DEVICE_CPU));
    if (s->json) return report_json(s, dtype);
    printf("ringattn          %s\n", ra_version());
    printf("CPU features      %s (%d cores to use)\n", ra_cpu_features(), ra_usable_cores());
    const char *kernel = chosen_kernel();
    printf("kernel            %s%s%s\n", kernel, strcmp(kernel, "none") == 0 ? ": " : "",
           strcmp(kernel, "none") == 0 ? ra_last_error() : "");
    for (int i = 0; ra_kernel_list(i, &k); i++) printf("  %-15s %s\n", k.name, k.available ? "available" : k.reason);
    ra_cuda_device gpu;
    if (describe_gpu(0, &gpu) != RA_OK) printf("GPUs              none: %s\n", ra_last_error());
    for (int i = 0; describe_gpu(i, &gpu) == RA_OK; i++)
        printf("%-17s %s, compute capability %d.%d, %s\n", i ? "" : "GPUs", gpu.name, gpu.major, gpu.minor,
               show_bytes((double)gpu.memory));
    printf("transports        self, threads; mpi through\n");
    for (int i = 0; i < MPI_COUNT; i++) {
        char text[256];
        ra_mpi_version(mpis[i], text, sizeof text);
        printf("  %-15s %s\n", mpis[i], text);
    }
    printf("recommended dtype %s\n", dtype);
    return RA_OK;
}
