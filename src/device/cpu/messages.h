/* Between a rank's tensors and messages, and between messages: the only copies that a ring makes. See ra_device_ops. */
#ifndef RA_DEVICE_CPU_MESSAGES_H
#define RA_DEVICE_CPU_MESSAGES_H

#include "device/device.h"

/* A queue of NULL: by the calling thread alone. */
ra_status ra_cpu_pack(const ra_queue *queue, ra_dtype dtype, const ra_box *box, ra_tensor from, char *packed);
ra_status ra_cpu_unpack_add(const ra_queue *queue, ra_dtype dtype, const ra_box *box, const char *packed, ra_tensor sums,
                            ra_tensor result);
ra_status ra_cpu_add(const ra_queue *queue, ra_dtype dtype, char *sums, const char *more, int64_t count);
ra_status ra_cpu_zero(const ra_queue *queue, void *memory, int64_t bytes);
ra_status ra_cpu_merge_states(const ra_queue *queue, const ra_problem *problem, char *mine, const char *theirs);
ra_status ra_cpu_merge_sums(const ra_queue *queue, const ra_problem *problem, char *mine, const char *theirs);

#endif
