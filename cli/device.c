#include "device.h"

#include "cli.h"
#include "core/status.h"
#include "ringattn_cuda.h"

/* The device's own clock, so that neither the call nor the wait for its end counts. */
static ra_status forward_on_gpu(ra_plan *plan, const ra_forward_args *args, double *seconds) {
    void *start = NULL, *end = NULL;
    ra_status status = ra_cuda_mark(NULL, &start);
    if (status == RA_OK) status = ra_forward(plan, args);
    if (status == RA_OK) status = ra_cuda_mark(NULL, &end);
    if (status == RA_OK) status = ra_cuda_between(start, end, seconds);
    ra_cuda_forget(start);
    ra_cuda_forget(end);
    return status;
}

ra_status device_forward(ra_plan *plan, const shard *s, double *seconds) {
    ra_forward_args args = shard_forward_args(s);
    if (s->desc->device == RA_DEVICE_CUDA) return forward_on_gpu(plan, &args, seconds);
    double start = now();
    RA_TRY(ra_forward(plan, &args));
    *seconds = now() - start;
    return RA_OK;
}
