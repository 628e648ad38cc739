/* Calls whose tensors lie in pinned host memory and pass through the device in blocks (plan/blocks.h). */
#ifndef RA_RING_OFFLOAD_H
#define RA_RING_OFFLOAD_H

#include "ring/pass.h"

/* What a communicator keeps for such calls: the queue of their copies. Made if *offload is NULL; closing waits for the copies,
 * and is safe for NULL. */
ra_status ra_offload_open(const ra_copy_ops *copies, ra_offload **offload);
void ra_offload_close(ra_offload *offload);

/* Arguments have been checked. */
ra_status ra_offload_forward(ra_plan *plan, const ra_forward_args *args);
ra_status ra_offload_backward(ra_plan *plan, const ra_backward_args *args);

#endif
