/* info: what this build and this machine offer. */
#include <stdio.h>

#include "cli.h"
#include "core/dtype.h"
#include "core/workers.h"

static const char *chosen_kernel(void) {
    ra_kernel_info k;
    for (int i = 0; ra_kernel_list(i, &k); i++)
        if (k.available) return k.name;
    return "none";
}

ra_status command_info(const settings *s, bool *check_failed) {
    (void)check_failed;
    ra_kernel_info k;
    const char *dtype = ra_dtype_name(ra_recommended_dtype(RA_DEVICE_CPU));
    if (s->json) {
        json_t *kernels = json_array();
        for (int i = 0; ra_kernel_list(i, &k); i++)
            json_array_append_new(kernels,
                                  json_pack("{s:s, s:b, s:s}", "name", k.name, "available", k.available, "reason", k.reason));
        return print_json(s,
                          json_pack("{s:s, s:s, s:i, s:s, s:o, s:[], s:[s, s], s:s}", "version", ra_version(), "cpu_features",
                                    ra_cpu_features(), "cores", ra_usable_cores(), "kernel", chosen_kernel(), "kernels",
                                    kernels, "gpus", "transports", "self", "threads", "recommended_dtype", dtype));
    }
    printf("ringattn          %s\n", ra_version());
    printf("CPU features      %s (%d cores to use)\n", ra_cpu_features(), ra_usable_cores());
    printf("kernel            %s\n", chosen_kernel());
    for (int i = 0; ra_kernel_list(i, &k); i++) printf("  %-15s %s\n", k.name, k.available ? "available" : k.reason);
    printf("GPUs              none (this build has no CUDA kernels)\n");
    printf("transports        self, threads (this build has neither mpi nor nccl)\n");
    printf("recommended dtype %s\n", dtype);
    return RA_OK;
}
