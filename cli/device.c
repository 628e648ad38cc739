#include "device.h"

#include "cli.h"
#include "core/status.h"
#include "ringattn_cuda.h"

/* One of the two is NULL. */
typedef struct pass_args {
    const ra_forward_args *forward;
    const ra_backward_args *backward;
} pass_args;

static ra_status run(ra_plan *plan, pass_args args) {
    return args.forward ? ra_forward(plan, args.forward) : ra_backward(plan, args.backward);
}

/* The device's own clock, so that neither the call nor the wait for its end counts. */
static ra_status run_on_gpu(ra_plan *plan, void *stream, pass_args args, double *seconds) {
    void *start = NULL, *end = NULL;
    ra_status status = ra_cuda_mark(stream, &start);
    if (status == RA_OK) status = run(plan, args);
    if (status == RA_OK) status = ra_cuda_mark(stream, &end);
    if (status == RA_OK) status = ra_cuda_between(start, end, seconds);
    ra_cuda_forget(start);
    ra_cuda_forget(end);
    return status;
}

static ra_status run_timed(ra_plan *plan, const shard *s, pass_args args, double *seconds) {
    if (s->desc->device == RA_DEVICE_CUDA) return run_on_gpu(plan, s->stream, args, seconds);
    double start = now();
    RA_TRY(run(plan, args));
    *seconds = now() - start;
    return RA_OK;
}

ra_status device_forward(ra_plan *plan, const shard *s, double *seconds) {
    ra_forward_args args = shard_forward_args(s);
    return run_timed(plan, s, (pass_args){.forward = &args}, seconds);
}

ra_status device_backward(ra_plan *plan, const shard *s, double *seconds) {
    ra_backward_args args = shard_backward_args(s);
    return run_timed(plan, s, (pass_args){.backward = &args}, seconds);
}
