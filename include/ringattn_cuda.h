/* ringattn on NVIDIA GPUs: is there one, and device memory for programs that do not use CUDA themselves.
 *
 * Programs that do use CUDA need nothing from here: set ra_attention_desc.device to RA_DEVICE_CUDA and pass device pointers and
 * a cudaStream_t to ra_forward and ra_backward. The CUDA part is a shared object of its own, loaded by the first call that
 * needs it; without it, or without a usable GPU, calls return RA_NOT_AVAILABLE and ra_last_error() says why. Every call
 * concerns the calling thread's current device. A communicator keeps to the device of its first plan: plans and calls that find
 * another one current are RA_INVALID.
 *
 * ra_forward and ra_backward enqueue their work on the stream and return. They allocate only in the first call of each and when
 * a further stream or a capture needs a workspace of its own. Calls on several streams may overlap. At one rank they never
 * wait, and can be captured into a graph, which then keeps the call's workspace for as long as the process lives.
 *
 * With ra_attention_desc.offload tensors lie in pinned host memory instead, from and to which the call copies blocks of them.
 * It cannot be captured.
 *
 * With several ranks a call returns after its last exchange of messages, while the device may still compute. Ranks of one
 * process (ra_comm_threads), on one GPU or one each, copy straight from each other's workspaces, and each needs a stream of its
 * own: the same for two of them is RA_INVALID. Between processes messages go by CUDA IPC, by NCCL, or staged in pinned host
 * memory, as many bytes as the messages take in the workspace. Results of a call that fails become NaN, in order with the
 * stream.
 */
#ifndef RINGATTN_CUDA_H
#define RINGATTN_CUDA_H

#include "ringattn.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ra_cuda_device {
    char name[96];
    int32_t major, minor; /* compute capability */
    int32_t processors;
    int64_t memory; /* bytes in all */
} ra_cuda_device;

/* count: how many GPUs this process sees. use: makes one of them the calling thread's current device. current: the number of
 * that device. */
RA_API ra_status ra_cuda_count(int *gpus);
RA_API ra_status ra_cuda_use(int gpu);
RA_API ra_status ra_cuda_current(int *gpu);

/* Describes the current device (device may be NULL). RA_NOT_AVAILABLE: no CUDA part, no driver, no GPU, or one before
 * Ampere. */
RA_API ra_status ra_cuda_probe(ra_cuda_device *device);

/* Device memory. RA_NOMEM when there is none. Free is safe for NULL. */
RA_API ra_status ra_cuda_alloc(int64_t bytes, void **memory);
RA_API void ra_cuda_free(void *memory);
/* Pinned host memory: copies to and from it run while kernels compute. The tensors of ra_attention_desc.offload lie there. */
RA_API ra_status ra_cuda_pin(int64_t bytes, void **memory);
RA_API void ra_cuda_unpin(void *memory);
/* Copies to, from or within device memory, in order with the stream (NULL: the default stream). */
RA_API ra_status ra_cuda_copy(void *to, const void *from, int64_t bytes, void *stream);
/* A new stream, which waits for no other. Ranks of one process need one each. Closing it does not wait for its work, and is
 * safe for NULL. */
RA_API ra_status ra_cuda_open_stream(void **stream);
RA_API void ra_cuda_close_stream(void *stream);
/* Waits for all work on the stream. */
RA_API ra_status ra_cuda_synchronize(void *stream);

/* Marks a moment on the stream. *event is NULL before the first call, which makes it; ra_cuda_forget frees it. */
RA_API ra_status ra_cuda_mark(void *stream, void **event);
/* What is enqueued on the stream from now on runs after the marked moment. Nobody waits here, and the event may be marked again
 * at once. */
RA_API ra_status ra_cuda_wait(void *stream, void *event);
/* Seconds from one marked moment to a later one; waits for the later one. */
RA_API ra_status ra_cuda_between(void *start, void *end, double *seconds);
RA_API void ra_cuda_forget(void *event);

/* Rows of some heads of a tensor, of all its batch entries: `rows`, and the same `repeat_step` rows later, `repeats` in all. */
typedef struct ra_row_set {
    ra_rows heads, rows;
    int64_t repeats, repeat_step;
} ra_row_set;

/* For a rank that is played alone (ra_comm_solo) on a GPU: enqueues on `stream` what writes these rows of k (value false) or v
 * (value true) to device memory without gaps, [batch][head][repeat][row][head_dim]. Set it before the first plan on a GPU. */
typedef ra_status (*ra_cuda_maker)(void *ctx, bool value, const ra_row_set *rows, void *elements, void *stream);
RA_API ra_status ra_comm_set_cuda_maker(ra_comm *comm, ra_cuda_maker maker, void *ctx);

/* A C-order tensor [batch, rows, heads, head_dim] of which anybody can make any row anywhere: an element is a function of seed,
 * tensor and its index alone. The numbers are about normal, with mean 0 and variance 1. */
typedef struct ra_generated {
    uint64_t seed;
    int64_t tensor; /* which of the seed's */
    int64_t batch, rows, heads, head_dim;
    ra_dtype dtype;
} ra_generated;
/* Writes rows of it to device memory, in order with the stream: to row repeat * rows.count + i of head h of `to` goes row i of
 * that repeat, of the h-th of the heads. f32, bf16 and f16. */
RA_API ra_status ra_cuda_generate(const ra_generated *tensor, const ra_row_set *rows, ra_tensor to, void *stream);

/* Which kernel the latest step on this thread ran: "sm90a", "sm80", "f32", "few" (Hopper, few query rows), or ""
 * before the first. */
RA_API const char *ra_cuda_last_path(void);

#ifdef __cplusplus
}
#endif
#endif
