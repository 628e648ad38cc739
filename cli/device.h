/* Forward of a rank's tensors wherever the descriptor says: on the CPU where they lie, or on a GPU, by way of device memory. */
#ifndef CLI_DEVICE_H
#define CLI_DEVICE_H

#include "shard.h"

/* *seconds: of the computation alone, without the way to the device and back. */
ra_status device_forward(ra_plan *plan, const shard *s, double *seconds);

#endif
