/* Passes over a rank's tensors where they lie, on the CPU or on a GPU, and how long it took. */
#ifndef CLI_DEVICE_H
#define CLI_DEVICE_H

#include "shard.h"

/* *seconds: of the computation alone. Complete when it returns. */
ra_status device_forward(ra_plan *plan, const shard *s, double *seconds);
ra_status device_backward(ra_plan *plan, const shard *s, double *seconds);

#endif
