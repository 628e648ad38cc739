/* All that may happen to memory, in one interface that every device fills. Plan and ring see a device only through it: neither
 * touches a byte of a tensor, or asks which device it has.
 *
 * A pass is begin, steps, end. Between them memory holds the running state of rows and the sums of gradients, in a form of the
 * device's own: the ring reserves as many bytes as the device says, and sends such a block to a peer unread. */
#ifndef RA_DEVICE_DEVICE_H
#define RA_DEVICE_DEVICE_H

#include "core/box.h"
#include "core/pool.h"
#include "core/shared.h"
#include "core/workers.h"
#include "device/kernel.h"

/* Where the work of a call runs, in order. */
typedef struct ra_queue {
    ra_workers *workers;     /* CPU: all work is done when a function returns */
    void *stream;            /* CUDA (a cudaStream_t): work is enqueued, and may still run after the call */
    void (*poll)(void *arg); /* called often while the caller's thread computes; NULL: there are no transfers */
    void *poll_arg;
} ra_queue;

/* What a pass works on: the rows of one rank. */
typedef struct ra_pass_shape {
    const ra_problem *problem;
    int64_t rows_k;
    const ra_used_rows *used_q, *used_k; /* items of steps meet no other rows; */
    const ra_used_rows *all_q, *all_k;   /* those of forward_home and backward_home do */
    bool parted;                         /* items at home have rows of their own: forward_home, backward_home */
    bool single;                         /* every row is met by one item of one step (ra_forward_step, ra_backward_step) */
    bool direct;                         /* ra_kernel.direct: gradients of a single pass need no room for sums */
    bool travels;                        /* the state (backward: dq) of all rows lies in one block that peers exchange */
    bool halves;                         /* sums of 16-bit types share the memory of their results (ra_device_ops) */
} ra_pass_shape;

/* The caller fills the fields before `step`; the device fills the others, beginning with forward_lay (backward_lay). */
typedef struct ra_forward_pass {
    const ra_kernel *kernel;
    ra_pass_shape shape;
    ra_queue queue;
    ra_tensor q, out, lse; /* lse.data may be NULL */
    char *state;           /* forward_bytes */
    char *travelling;      /* travelling_bytes */
    char *scratch;         /* of the kernel */
    ra_forward_step step;
} ra_forward_pass;

typedef struct ra_backward_pass {
    const ra_kernel *kernel;
    ra_pass_shape shape;
    ra_queue queue;
    ra_tensor q, out, lse, dout, dlse; /* dlse.data may be NULL */
    ra_tensor dq, dk, dv;              /* results */
    char *state;                       /* backward_bytes */
    char *travelling;
    char *scratch;
    ra_backward_step step;
    ra_tensor dk_sums, dv_sums; /* of this rank's own keys: its items add to them */
    int64_t sums_size;          /* of an element of them */
    ra_backward_rows rows;
} ra_backward_pass;

/* A message of an exchange between devices. */
typedef struct ra_net_message {
    void *memory; /* of the device */
    int64_t bytes;
    int32_t peer;
    bool receiving;
} ra_net_message;

enum { RA_NET_NAME_BYTES = 128 }; /* of what names a group of ranks */

/* Messages between devices of any hosts, by a library that comes with the device (NCCL; ring/lane_nccl.c). Nothing here waits:
 * what takes time is begun, and `poll` says whether it is done. A group is used by one thread at a time; only `abort` may come
 * from another one. */
typedef struct ra_net_ops {
    /* Loads the library; where there is none, it refuses. */
    ra_status (*load)(int64_t *version);
    /* "2.28.3" */
    void (*version_text)(int64_t version, char text[32]);
    /* Names a group to come: one rank does that, and tells the others. */
    ra_status (*name)(char name[RA_NET_NAME_BYTES]);
    /* Begins to join it. *group is NULL if that fails. */
    ra_status (*join)(const char name[RA_NET_NAME_BYTES], int rank, int ranks, void **group);
    /* Is what was begun last done? Fails if anything of the group has. */
    ra_status (*poll)(void *group, bool *done);
    /* Begins to enqueue messages, which then run beside each other. */
    ra_status (*exchange)(void *group, const ra_queue *queue, const ra_net_message *messages, int64_t count);
    /* Begins to leave in peace: done when all that was sent is on its way. Then `close` frees the group. */
    ra_status (*leave)(void *group);
    void (*close)(void *group);
    /* Ends all that the group does on the device, and frees it. May take long. */
    void (*abort)(void *group);
} ra_net_ops;

/* How payload gets to and from memory that is the device's own, beside what a call computes (ring/lane.h). */
typedef struct ra_copy_ops {
    /* Which of several devices is the calling thread's? From now on copies to it from another one go straight, if they can. */
    ra_status (*current)(int *number);
    ra_status (*reach)(int number);
    const ra_memory *pinned; /* host memory to and from which copies are asynchronous */
    /* A queue of its own, beside the calls'. Where the device has to choose, its work goes first. */
    ra_status (*open)(ra_queue *queue);
    void (*close)(ra_queue *queue);
    ra_status (*copy)(const ra_queue *queue, void *to, const void *from, int64_t bytes);
    /* Records the moment when all that the queue was given so far is done. *moment is created if NULL, else recorded anew. */
    ra_status (*record)(const ra_queue *queue, void **moment);
    /* What the queue is given from now on runs after a recorded moment. */
    ra_status (*wait)(const ra_queue *queue, void *moment);
    /* Has the moment come? Never waits. */
    ra_status (*passed)(void *moment, bool *passed);
    void (*forget)(void *moment);

    /* Between processes of one host (ring/lane_ipc.c); wherever that cannot be done, one of these refuses. A handle names a
     * block of the device's memory to another process, which reads it where `import` says, until it says `release`. */
    ra_status (*export)(void *memory, char handle[RA_HANDLE_BYTES]);
    ra_status (*import)(const char handle[RA_HANDLE_BYTES], void **memory);
    void (*release)(void *memory);
    /* Makes counters in memory of the host known to the device, until it is told to `unshare`. */
    ra_status (*share)(void *counters, int64_t bytes);
    void (*unshare)(void *counters);
    /* Sets a counter to `value` when all that the queue was given so far is done. */
    ra_status (*raise)(const ra_queue *queue, uint64_t *counter, uint64_t value);
    /* What the queue is given from now on runs once the counter is `value` or more, whoever writes to it. */
    ra_status (*await)(const ra_queue *queue, uint64_t *counter, uint64_t value);

    const ra_net_ops *net; /* between hosts */
} ra_copy_ops;

/* A pass: lay gives the state its place in memory, without touching it; begin gets the items of the first step (of a single
 * pass: all items); a step adds what its items give, if it has any, and in forward is told whether it is the last. */
struct ra_device_ops {
    ra_device kind;
    const char *name; /* "CPU", "GPU" */

    /* Rows of a bucket that suit it, where a query meets all of them at once; 0: as the plan sees fit. */
    int64_t usual_bucket;
    bool by_workers; /* computes on the threads of ra_queue.workers */
    bool fills;      /* a single forward step fills the rows that no item of it meets, so that a single pass has one step */
    bool joins;      /* takes few large items rather than many small ones: ra_join_items */
    bool begins;     /* a backward step takes items that are fresh, whose sums nobody has zeroed */
    bool halves;     /* sums of 16-bit types that do not travel lie in halves: see ra_forward_step */

    /* Memory of its own, which holds workspaces, and how payload gets there; both NULL: it uses host memory. */
    const ra_memory *memory;
    const ra_copy_ops *copies;
    ra_status (*zero)(const ra_queue *queue, void *memory, int64_t bytes);

    /* Order. The owner of work that is still running after the call returns (a stream); NULL: none is. */
    const void *(*owner)(const ra_queue *queue);
    /* Is the queue being captured (CUDA graph), to run later, perhaps often? Then its memory must never serve another call. */
    bool (*recording)(const ra_queue *queue);

    /* Passes. Bytes are multiples of 64. */
    int64_t (*forward_bytes)(const ra_pass_shape *shape);
    int64_t (*backward_bytes)(const ra_pass_shape *shape);
    int64_t (*travelling_bytes)(const ra_problem *problem, bool backward);
    void (*forward_lay)(ra_forward_pass *pass);
    void (*backward_lay)(ra_backward_pass *pass);
    ra_status (*forward_begin)(ra_forward_pass *pass, const ra_item *items, int64_t count);
    ra_status (*forward_step)(ra_forward_pass *pass, const ra_item *items, int64_t count, bool last);
    ra_status (*forward_end)(ra_forward_pass *pass);
    ra_status (*backward_begin)(ra_backward_pass *pass, const ra_item *items, int64_t count);
    ra_status (*backward_step)(ra_backward_pass *pass, const ra_item *items, int64_t count);
    ra_status (*backward_end)(ra_backward_pass *pass);
    /* After begin, in a parted pass: items whose rows no step meets, as one single step. NULL: no pass is parted. */
    ra_status (*forward_home)(ra_forward_pass *pass, const ra_item *items, int64_t count);
    ra_status (*backward_home)(ra_backward_pass *pass, const ra_item *items, int64_t count);
    /* The call failed: makes its results NaN, since enqueued work goes on and may look like a result. NULL: work ends with the
     * call, which returns the failure. */
    ra_status (*forward_spoil)(const ra_forward_pass *pass);
    ra_status (*backward_spoil)(const ra_backward_pass *pass);

    /* Messages: rows of k or v (of `dtype`) and of sums of gradients (of its state type). unpack_add adds to
     * the sums of a pass; of sums in halves, `result` holds the upper ones. */
    ra_status (*pack)(const ra_queue *queue, ra_dtype dtype, const ra_box *box, ra_tensor from, char *packed);
    ra_status (*unpack_add)(const ra_queue *queue, ra_dtype dtype, const ra_box *box, const char *packed, ra_tensor sums,
                            ra_tensor result);
    /* Results from sums; NULL where there is no memory of its own. */
    ra_status (*convert)(const ra_queue *queue, const ra_problem *problem, ra_tensor to, ra_tensor sums, int64_t rows,
                         int64_t heads);
    ra_status (*add)(const ra_queue *queue, ra_dtype dtype, char *sums, const char *more, int64_t count);
    /* mine += theirs: travelling blocks of forward, of backward. */
    ra_status (*merge_states)(const ra_queue *queue, const ra_problem *problem, char *mine, const char *theirs);
    ra_status (*merge_sums)(const ra_queue *queue, const ra_problem *problem, char *mine, const char *theirs);
};

/* NULL: this build has no kernels for it. */
const ra_device_ops *ra_device_of(ra_device kind);

#endif
