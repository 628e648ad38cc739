/* What libringattn_cuda.so offers to the library, which loads it on demand (loader.c). Nothing here needs CUDA's headers.
 * Functions return RA_OK, or a status while `error` says which call failed and why. Work is enqueued on `stream` (a
 * cudaStream_t; NULL: the default stream) of the current device; it neither waits nor allocates. Tensors are device memory,
 * everything else host memory, which is read before a function returns.
 *
 * Another module may take its place: tests have one whose device is the CPU. What both sides assume about structs and functions
 * is in layout.h, and a module that assumes something else is refused. */
#ifndef RA_DEVICE_CUDA_BACKEND_H
#define RA_DEVICE_CUDA_BACKEND_H

#include "core/box.h"
#include "core/shared.h"
#include "device/kernel.h"
#include "ringattn_cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ra_cuda_error {
    char text[256];
} ra_cuda_error;

/* The kernels, as --kernel and reports name them. */
#define RA_CUDA_ANY NULL      /* the fastest that takes the step */
#define RA_CUDA_SM90A "sm90a" /* Hopper's */
#define RA_CUDA_SM80 "sm80"   /* the general ones: float32 too, any strides */
#define RA_CUDA_F32 "f32"     /* the one of them for float32; not to be asked for */
#define RA_CUDA_FEW "few"     /* Hopper's for few query rows; not to be asked for */

/* The functions, each ra_cuda_backend_<name> in the module: one list from which they are declared, loaded and compared. */
/* clang-format off */
#define RA_CUDA_FUNCTIONS(X)                                                                                                   \
    /* The facts of layout.h, as the module was compiled: at most `capacity` bytes with the final 0. Returns their length. */  \
    X(int64_t, layout, (char *text, int64_t capacity))                                                                         \
    /* How many GPUs there are; makes one the calling thread's current device; which one is that? */                           \
    X(ra_status, count, (int *gpus, ra_cuda_error *error))                                                                     \
    X(ra_status, use, (int gpu, ra_cuda_error *error))                                                                         \
    X(ra_status, current, (int *gpu, ra_cuda_error *error))                                                                    \
    /* From now on copies from another GPU to the current one go straight, if they can. */                                     \
    X(ra_status, reach, (int gpu, ra_cuda_error *error))                                                                       \
    /* RA_OK when the current device can run the kernels; RA_NOT_AVAILABLE says why not. device may be NULL. */                \
    X(ra_status, probe, (ra_cuda_device *device, ra_cuda_error *error))                                                        \
    /* NULL if the wanted kernel computes this problem on the current device, else why not. */                                 \
    X(const char *, unsupported, (const ra_problem *problem, const char *wanted, bool backward))                               \
    /* Device bytes of a step's scratch. */                                                                                    \
    X(int64_t, scratch, (const ra_problem *problem, bool backward))                                                            \
    /* One step. When `single`, forward fills the rows that no item meets too: out = 0, lse = -inf. RA_NOT_AVAILABLE: the */   \
    /* wanted kernel does not take the step. *path, if not NULL, is set to the name of the kernel that ran (static). */        \
    X(ra_status, forward, (const ra_forward_step *step, const char *wanted, const char **path, ra_cuda_error *error))          \
    /* The same; of the rows of items it writes all, whether they attend to anything or not. */                                \
    X(ra_status, backward, (const ra_backward_step *step, const char *wanted, const char **path, ra_cuda_error *error))        \
    /* What device/rows.h does on the CPU. `gaps`: the rows that are not used, instead of those that are. */                   \
    X(ra_status, fill, (const ra_forward_step *step, ra_cuda_error *error))                                                    \
    X(ra_status, finish, (const ra_forward_step *step, ra_cuda_error *error))                                                  \
    X(ra_status, zero, (const ra_problem *problem, const ra_used_rows *used, bool gaps, ra_tensor tensor, int64_t size,        \
                        int64_t rows, int64_t heads, void *stream, ra_cuda_error *error))                                      \
    X(ra_status, delta, (const ra_problem *problem, const ra_used_rows *used, ra_tensor dout, ra_tensor out, ra_tensor dlse,   \
                         ra_tensor delta, void *stream, ra_cuda_error *error))                                                 \
    X(ra_status, convert, (const ra_problem *problem, const ra_used_rows *used, ra_tensor to, ra_tensor from, int64_t rows,    \
                           int64_t heads, void *stream, ra_cuda_error *error))                                                 \
    /* Every number becomes NaN. */                                                                                            \
    X(ra_status, spoil, (const ra_problem *problem, ra_tensor tensor, int64_t rows, int64_t heads, void *stream,               \
                         ra_cuda_error *error))                                                                                \
    /* Messages: what ra_device_ops has. Sums and states are float32. */                                                       \
    X(ra_status, clear, (void *memory, int64_t bytes, void *stream, ra_cuda_error *error))                                     \
    X(ra_status, pack, (ra_dtype dtype, const ra_box *box, ra_tensor from, void *packed, void *stream, ra_cuda_error *error))  \
    X(ra_status, unpack_add, (const ra_box *box, const void *packed, ra_tensor sums, void *stream, ra_cuda_error *error))      \
    X(ra_status, add, (void *sums, const void *more, int64_t count, void *stream, ra_cuda_error *error))                       \
    X(ra_status, merge_states, (const ra_problem *problem, void *mine, const void *theirs, void *stream,                       \
                                ra_cuda_error *error))                                                                         \
    /* ra_cuda_generate. */                                                                                                    \
    X(ra_status, generate, (const ra_generated *tensor, const ra_row_set *rows, ra_tensor to, void *stream,                    \
                            ra_cuda_error *error))                                                                             \
    /* Device memory; may be called while a stream is being captured. `free` waits for the work that uses it. */               \
    X(ra_status, alloc, (int64_t bytes, void **memory, ra_cuda_error *error))                                                  \
    X(void, free, (void *memory))                                                                                              \
    /* Is the stream being captured into a graph? */                                                                           \
    X(bool, capturing, (void *stream))                                                                                         \
    /* Host memory to and from which copies run beside everything else. */                                                     \
    X(ra_status, pin, (int64_t bytes, void **memory, ra_cuda_error *error))                                                    \
    X(void, unpin, (void *memory))                                                                                             \
    /* A stream of its own, in order with no other; the second kind's work goes first wherever the device has a choice.        \
     * `close_stream` does not wait. */                                                                                        \
    X(ra_status, open_stream, (void **stream, ra_cuda_error *error))                                                           \
    X(ra_status, open_first_stream, (void **stream, ra_cuda_error *error))                                                     \
    X(void, close_stream, (void *stream))                                                                                      \
    /* Either end may be host memory; pageable host memory makes it wait. */                                                   \
    X(ra_status, copy, (void *to, const void *from, int64_t bytes, void *stream, ra_cuda_error *error))                        \
    X(ra_status, synchronize, (void *stream, ra_cuda_error *error))                                                            \
    /* Records an event; *event is created if NULL, and if it is `timed`, which takes longer, there are seconds between it */  \
    /* and another; waits for the second. */                                                                                   \
    X(ra_status, mark, (void *stream, bool timed, void **event, ra_cuda_error *error))                                         \
    X(ra_status, between, (void *start, void *end, double *seconds, ra_cuda_error *error))                                     \
    X(void, forget, (void *event))                                                                                             \
    /* What is enqueued from now on runs after the event as it was recorded last. Has that happened? */                        \
    X(ra_status, wait, (void *stream, void *event, ra_cuda_error *error))                                                      \
    X(ra_status, passed, (void *event, bool *passed, ra_cuda_error *error))                                                    \
    /* The file of the NCCL that goes with this device; NULL: none does. */                                                   \
    X(const char *, nccl, (void))                                                                                              \
    /* Between processes: see ra_copy_ops. A handle has RA_HANDLE_BYTES. */                                                    \
    X(ra_status, export, (void *memory, char *handle, ra_cuda_error *error))                                                   \
    X(ra_status, import, (const char *handle, void **memory, ra_cuda_error *error))                                            \
    X(void, release, (void *memory))                                                                                           \
    X(ra_status, share, (void *counters, int64_t bytes, ra_cuda_error *error))                                                 \
    X(void, unshare, (void *counters))                                                                                         \
    X(ra_status, raise, (void *stream, uint64_t *counter, uint64_t value, ra_cuda_error *error))                               \
    X(ra_status, await, (void *stream, uint64_t *counter, uint64_t value, ra_cuda_error *error))
/* clang-format on */

#define X(result, name, arguments) RA_API result ra_cuda_backend_##name arguments;
RA_CUDA_FUNCTIONS(X)
#undef X

#ifdef __cplusplus
}
#endif
#endif
