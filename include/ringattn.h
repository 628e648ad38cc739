/* ringattn: exact ring attention with dilation, for very long sequences.
 *
 * Attention is defined on global positions; ranks, layout, schedule, transport, bucket, kernel, threads change rounding only.
 *
 * Tiers, from simple to advanced:
 *   1. ra_attention()                              one call, one process
 *   2. ra_comm_*, ra_plan_create, ra_forward, ...  ranks, shards and plans
 *   3. ra_comm_custom, ra_set_allocator, ...       your own transport, allocator, logger, tracer
 *
 * Conventions. Every function that can fail returns ra_status; ra_last_error() holds one sentence about the latest failure on
 * the calling thread. Handles are opaque; distinct handles may be used from distinct threads at the same time, one handle only
 * from one thread at a time. Sizes are int64_t. The library writes nothing to stdout and installs no signal
 * handler. */
#ifndef RINGATTN_H
#define RINGATTN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define RA_VERSION_MAJOR 0
#define RA_VERSION_MINOR 2
#define RA_VERSION_PATCH 0
#define RA_VERSION_STRING "0.2.0"

#if defined(__GNUC__)
#define RA_API __attribute__((visibility("default")))
#else
#define RA_API
#endif

/* ------------------------------------------------------------------------------------------------ status and errors */

/* Values never change; new ones are only added. */
typedef enum ra_status {
    RA_OK = 0,
    RA_INVALID = 1,       /* an argument is wrong; nothing was touched */
    RA_NOMEM = 2,         /* an allocation failed, or the plan exceeds memory_limit */
    RA_IO = 3,            /* a file could not be read or written, or is malformed */
    RA_PEER_LOST = 4,     /* a rank died or left */
    RA_TIMEOUT = 5,       /* a rank stayed silent, or ranks waited for each other, for longer than the timeout */
    RA_DISAGREE = 6,      /* ranks hold different configurations */
    RA_PROTOCOL = 7,      /* a message was short, long, repeated or damaged */
    RA_NOT_AVAILABLE = 8, /* this build or machine lacks the kernel, device or transport */
    RA_ABORTED = 9,       /* the communicator was aborted; sticky */
    RA_DEVICE = 10,       /* a device call failed */
    RA_INTERNAL = 11      /* a bug in ringattn */
} ra_status;

/* The name of a status ("RA_INVALID"); never NULL. */
RA_API const char *ra_status_name(ra_status status);
/* One sentence about the latest failure on this thread; "" if there was none. Valid until the next call on this thread. */
RA_API const char *ra_last_error(void);
/* RA_VERSION_STRING of the library that is running. */
RA_API const char *ra_version(void);

/* -------------------------------------------------------------------------------------------------------- descriptor */

typedef enum ra_dtype { RA_F32 = 0, RA_BF16 = 1, RA_F16 = 2, RA_F64 = 3 } ra_dtype;
typedef enum ra_combine { RA_COMBINE_HEADS = 0, RA_COMBINE_MIX = 1 } ra_combine;
typedef enum ra_offset { RA_OFFSET_BRANCH = 0, RA_OFFSET_HEAD = 1, RA_OFFSET_HEAD_BLOCK = 2, RA_OFFSET_RESIDUE = 3 } ra_offset;
typedef enum ra_layout { RA_LAYOUT_CONTIGUOUS = 0, RA_LAYOUT_ZIGZAG = 1, RA_LAYOUT_STRIPED = 2 } ra_layout;
typedef enum ra_placement { RA_SHARDED = 0, RA_REPLICATED = 1 } ra_placement;
typedef enum ra_schedule {
    RA_SCHEDULE_AUTO = 0,
    RA_SCHEDULE_RING = 1,
    RA_SCHEDULE_GATHER = 2,
    RA_SCHEDULE_MERGE = 3
} ra_schedule;
typedef enum ra_device { RA_DEVICE_CPU = 0, RA_DEVICE_CUDA = 1 } ra_device;

/* What is computed. Fill with ra_attention_desc_init, then set what differs from the defaults. Arrays are copied by whoever
 * takes the descriptor and need to live only for the call. */
typedef struct ra_attention_desc {
    uint32_t struct_size; /* set by init; a program that was compiled with another size is refused */
    uint32_t version;     /* set by init */

    ra_dtype dtype;   /* of q, k, v, out; default RA_F32 */
    int64_t batch;    /* default 1 */
    int64_t seq_q;    /* global number of queries */
    int64_t seq_k;    /* global number of keys */
    int64_t heads;    /* query heads; a multiple of kv_heads */
    int64_t kv_heads; /* 0: the same as heads */
    int64_t head_dim; /* 1..256 */

    const int64_t *segment_lengths; /* [branches], 0 = the whole sequence; NULL with branches 0: dense */
    const int64_t *dilation_rates;  /* [branches] */
    int64_t branches;
    ra_combine combine;
    ra_offset offset;
    bool dilate_queries; /* default true */

    bool causal;
    int64_t window_left;      /* -1: no limit (default) */
    int64_t window_right;     /* -1: no limit (default) */
    const int64_t *key_begin; /* [batch] or NULL: 0 */
    const int64_t *key_end;   /* [batch] or NULL: seq_k */

    double scale;   /* NaN (default): 1/sqrt(head_dim) */
    double dropout; /* 0 <= dropout < 1 */
    uint64_t seed;

    ra_layout layout;
    ra_placement query_placement;
    ra_schedule schedule;
    int64_t bucket;       /* K/V rows of a bucket; 0 (default): chosen */
    int64_t memory_limit; /* bytes a rank may hold, shards and workspace; 0 (default): none */

    ra_device device;
    const char *kernel; /* "scalar", "avx2", ...; NULL (default): the best here, or RINGATTN_KERNEL */
    int32_t threads;    /* worker threads of this rank; 0 (default): the machine's share */
    bool checksum;      /* CRC32C over payloads */
    bool offload;       /* CUDA, one rank: tensors lie in pinned host memory, and blocks of at most `bucket` rows pass through
                           the device; memory_limit then limits the device's memory */

    /* Room kept for features to come; anything but the default is RA_NOT_AVAILABLE. */
    const int64_t *cu_seqlens;
    double softcap;
    const float *sinks;
} ra_attention_desc;

RA_API void ra_attention_desc_init(ra_attention_desc *desc); /* does nothing for NULL */
/* Checks every field and every combination; RA_INVALID names the field. */
RA_API ra_status ra_attention_desc_check(const ra_attention_desc *desc);

/* Bytes of one element; 0 for an unknown dtype. */
RA_API size_t ra_dtype_size(ra_dtype dtype);
/* The dtype that runs fastest on this machine's best kernel at usual accuracy. */
RA_API ra_dtype ra_recommended_dtype(ra_device device);

/* ------------------------------------------------------------------------------------------------------------ shards */

/* An arithmetic progression of global rows: start, start + step, ... (count of them). */
typedef struct ra_rows {
    int64_t start, step, count;
} ra_rows;

/* The rows of a rank, ascending: rows[0], then rows[1] (zigzag; count 0 elsewhere). A rank's tensors hold them in this
 * order. */
typedef struct ra_shard {
    int64_t count; /* all rows of the rank */
    ra_rows rows[2];
} ra_shard;

/* Which rows of the queries (and of out, dout, dq) and of the keys (k, v, dk, dv) rank `rank` of `ranks` holds. Either result
 * may be NULL. */
RA_API ra_status ra_shard_rows(const ra_attention_desc *desc, int rank, int ranks, ra_shard *queries, ra_shard *keys);

/* ----------------------------------------------------------------------------------------------------- communicators */

/* A rank's end of a group of ranks, and what the rank keeps between calls: buffer pool, plan cache, worker threads.
 * After a failure that involves peers the communicator is broken: every later call on it returns that error. */
typedef struct ra_comm ra_comm;

/* One rank: this process. */
RA_API ra_status ra_comm_self(ra_comm **comm);
/* `ranks` handles (at most 512) in one process; each belongs to one thread of the caller. Destroy each of them, in any order,
 * from any thread. */
RA_API ra_status ra_comm_threads(int ranks, ra_comm **comms);

/* For ra_comm_ops.flags: the ops are called only from inside the caller's own calls of the library. Without this flag a thread
 * of the library calls them too, a few times a second, to send heartbeats while the rank computes or is busy elsewhere. With it
 * there are no such heartbeats, and the peers wait for this rank as long as the start timeout before they count it as lost. */
#define RA_COMM_CALLER_THREAD 1u

/* A caller's own transport. Point-to-point, nonblocking, matched by (peer, tag) in posting order. Calls come from one thread at
 * a time, not always the same. A request is finished by the first call that reports done = 1 or an error; the library never
 * touches it again. */
typedef struct ra_comm_ops {
    uint32_t struct_size; /* sizeof(ra_comm_ops) */
    uint32_t flags;       /* 0 or RA_COMM_CALLER_THREAD */
    /* Starts receiving at most `bytes` into buf. */
    ra_status (*post_recv)(void *ctx, int peer, uint64_t tag, void *buf, size_t bytes, void **request);
    /* Starts sending; buf stays untouched until the request is done. */
    ra_status (*post_send)(void *ctx, int peer, uint64_t tag, const void *buf, size_t bytes, void **request);
    /* Waits at most `seconds` (0: only looks). Sets *done, and for a receive *received, the bytes that came. */
    ra_status (*wait)(void *ctx, void *request, double seconds, int *done, size_t *received);
    /* Gives up a request. Returns RA_OK if its buffer may be freed; after any other status the buffer is never freed. */
    ra_status (*cancel)(void *ctx, void *request);
    /* Tells the peers to give up, without waiting for them; may be NULL. */
    void (*abort)(void *ctx, ra_status status);
    /* Frees ctx. Never waits for peers; may be NULL. */
    void (*destroy)(void *ctx);
} ra_comm_ops;
RA_API ra_status ra_comm_custom(const ra_comm_ops *ops, void *ctx, int rank, int ranks, ra_comm **comm);

/* One rank of a group played alone: what its peers would send is made by the caller instead, so that a job too large for one
 * machine can be measured and checked rank by rank. What it would send is counted and dropped, and gradients that peers would
 * send count as zero: out, lse and dq are those of the whole job, and dk and dv hold this rank's share. Sharded queries only.
 * make_row writes the head_dim elements of a row of k (value false) or v (value true), from several threads at once. */
typedef struct ra_solo_ops {
    uint32_t struct_size; /* sizeof(ra_solo_ops) */
    void (*make_row)(void *ctx, bool value, int64_t batch, int64_t key, int64_t kv_head, void *elements);
    void *ctx;
} ra_solo_ops;
RA_API ra_status ra_comm_solo(int rank, int ranks, const ra_solo_ops *ops, ra_comm **comm);

RA_API int ra_comm_rank(const ra_comm *comm);
RA_API int ra_comm_size(const ra_comm *comm);
/* "self", "threads", "mpi", "custom", ... */
RA_API const char *ra_comm_transport(const ra_comm *comm);
/* Seconds of silence before a peer counts as lost (default 60), and seconds for every rank to arrive (default 600). */
RA_API ra_status ra_comm_set_timeout(ra_comm *comm, double timeout, double start_timeout);
/* The longest that ra_plan_create, ra_forward, ra_backward and ra_comm_allgather may take on this rank, in seconds, even if all
 * peers are alive; 0 (default): no limit. A longer call fails with RA_TIMEOUT on all ranks, and the error says what each rank
 * was doing. Use it where a rank may never make the call that the others wait in. */
RA_API ra_status ra_comm_set_call_timeout(ra_comm *comm, double seconds);
/* Every rank contributes `bytes` bytes (the same number everywhere) and gets those of all ranks, in rank order: `all` has room
 * for ranks * bytes. It returns when every rank has called it; with 0 bytes it is a barrier. */
RA_API ra_status ra_comm_allgather(ra_comm *comm, const void *mine, void *all, int64_t bytes);
/* Breaks the communicator here and tells the peers, which fail with the same reason. Never waits. Any thread may call it, also
 * while another one is in a call on the communicator. */
RA_API void ra_comm_abort(ra_comm *comm, ra_status status, const char *reason);
/* Frees the communicator in bounded time; safe after errors and for NULL; ra_last_error() stays. Destroy its plans first. In a
 * forked child, which has none of the communicator's threads, this and ra_comm_abort do nothing, and calls that set a timeout,
 * plan, compute or gather are RA_INVALID. */
RA_API void ra_comm_destroy(ra_comm *comm);

/* ------------------------------------------------------------------------------------------------------------- plans */

typedef struct ra_plan ra_plan;

/* Plans the attention of `desc` over the ranks of comm, and checks that all ranks plan the same (RA_DISAGREE names two ranks,
 * the field and both values). On a GPU it also reserves the workspace of the forward pass; the first call that needs another
 * one allocates it. Every rank calls it. comm caches plans: a repeated call is a lookup. */
RA_API ra_status ra_plan_create(ra_comm *comm, const ra_attention_desc *desc, ra_plan **plan);
/* Gives the plan back to comm's cache; safe for NULL. */
RA_API void ra_plan_destroy(ra_plan *plan);

/* What one rank of a plan does and needs. Exact, and computed without running anything. */
typedef struct ra_rank_summary {
    uint32_t struct_size; /* sizeof(ra_rank_summary), set by the caller */
    int32_t rank;
    int64_t rows_q, rows_k; /* local rows */
    int64_t pairs; /* attended (query, key, query head) triples over the batch; each branch of `mix` counts; INT64_MAX: more */
    int64_t holes; /* (query row, query head) pairs over the batch without any key; -1: too long to count (mixed branches) */
    int64_t bytes_sent; /* payload, forward */
    int64_t bytes_sent_backward;
    int64_t hops;                 /* steps in which this rank receives, forward; offload: stages */
    int64_t items;                /* work items; independent of the sequence length */
    int64_t shard_bytes;          /* q, k, v, out, lse; offload: 0, since they lie in host memory */
    int64_t shard_bytes_backward; /* dout, dq, dk, dv more */
    int64_t workspace_bytes;      /* forward */
    int64_t workspace_bytes_backward;
    ra_schedule schedule; /* what is chosen where the descriptor leaves a choice, the same on every rank, and why */
    int64_t bucket;
    char reason[160];
    int64_t state_rows; /* (query row, query head) pairs over the batch that a GPU gives a running state; others meet all of
                           their keys at once */
} ra_rank_summary;

/* The summary of any rank of any group size, without a communicator. */
RA_API ra_status ra_plan_summary(const ra_attention_desc *desc, int rank, int ranks, ra_rank_summary *summary);
/* The summaries of all ranks, faster than one by one. The caller has set struct_size in each of the `ranks`
 * entries. */
RA_API ra_status ra_plan_summaries(const ra_attention_desc *desc, int ranks, ra_rank_summary *summaries);

/* Where and when a query meets a key: the key's rank sends it round in buckets, one hop a step. */
typedef struct ra_meeting {
    uint32_t struct_size; /* sizeof(ra_meeting), set by the caller */
    int32_t query_rank, key_rank;
    int64_t round, bucket; /* in which the key travels */
    int64_t hop;           /* hops from the key's rank to the query's; 0: it need not travel */
    int64_t step;          /* of the query's rank, from 0 */
} ra_meeting;

/* Only for pairs that the pattern attends to in this branch, else RA_INVALID. Window and key range are ignored. */
RA_API ra_status ra_plan_meeting(const ra_attention_desc *desc, int ranks, int64_t query, int64_t key, int64_t head,
                                 int64_t branch, ra_meeting *meeting);

/* RA_OK if ra_backward can run this plan; RA_NOT_AVAILABLE, with the reason, if its kernel has no gradients for it. */
RA_API ra_status ra_plan_check_backward(const ra_plan *plan);
/* Bytes of workspace that the plan has reserved for forward and for backward on this rank. */
RA_API int64_t ra_plan_workspace(const ra_plan *plan, bool backward);
/* What was chosen where the descriptor left a choice. */
RA_API ra_schedule ra_plan_schedule(const ra_plan *plan);
RA_API int64_t ra_plan_bucket(const ra_plan *plan);
RA_API const char *ra_plan_kernel(const ra_plan *plan);
RA_API const char *ra_plan_reason(const ra_plan *plan);
/* Prints the plan of this rank for people into buf (always terminated when bytes > 0); returns the length of the whole text. */
RA_API int64_t ra_plan_report(const ra_plan *plan, char *buf, size_t bytes);

/* --------------------------------------------------------------------------------------------------------- computing */

/* A rank's rows of one tensor: element (b, row, head, d) lies at data + (b*batch + row*this.row + head*this.head + d) elements.
 * lse tensors are read the same way without d. */
typedef struct ra_tensor {
    void *data;
    int64_t batch, row, head; /* strides in elements */
} ra_tensor;

/* The tensor of a C-order array [B, rows, heads, dim]. */
RA_API ra_tensor ra_tensor_bnhd(void *data, int64_t rows, int64_t heads, int64_t dim);
/* The tensor of a C-order array lse [B, heads, rows]. */
RA_API ra_tensor ra_tensor_lse(void *data, int64_t rows, int64_t heads);

typedef struct ra_forward_args {
    ra_tensor q, k, v; /* inputs */
    ra_tensor out;     /* output, like q */
    ra_tensor lse;     /* output, float (double for RA_F64); data NULL: not wanted */
    void *stream;      /* CUDA: the stream to run on; CPU: NULL */
} ra_forward_args;

/* Every rank calls it with the same plan. Calls are numbered: if two ranks use different plans in the same call, all ranks fail
 * with RA_DISAGREE, which names both. Returns when out and lse are written (CPU) or enqueued (CUDA). After an error the outputs
 * are unspecified. Here and in ra_backward, outputs may overlap neither inputs nor each other: they are written while inputs
 * are read. */
RA_API ra_status ra_forward(ra_plan *plan, const ra_forward_args *args);

typedef struct ra_backward_args {
    ra_tensor q, k, v, out, lse, dout; /* inputs; out and lse as ra_forward wrote them */
    ra_tensor dlse;                    /* optional input (data NULL: zero), like lse */
    ra_tensor dq, dk, dv;              /* outputs */
    void *stream;
} ra_backward_args;

RA_API ra_status ra_backward(ra_plan *plan, const ra_backward_args *args);

/* One call, one process: plan, forward, done. */
RA_API ra_status ra_attention(const ra_attention_desc *desc, const ra_forward_args *args);

/* -------------------------------------------------------------------------------------------------------- statistics */

typedef struct ra_stats_data {
    uint32_t struct_size;                                   /* sizeof(ra_stats_data), set by the caller */
    int64_t steps;                                          /* of the latest ra_forward or ra_backward */
    int64_t bytes_sent, bytes_received;                     /* payload, latest call */
    double compute_seconds, wait_seconds;                   /* latest call */
    int64_t pool_in_use, pool_peak, pool_hits, pool_misses; /* bytes, bytes, requests, requests */
    int64_t cache_hits, cache_misses, cache_entries;        /* of the plan cache */
} ra_stats_data;

RA_API ra_status ra_stats(const ra_plan *plan, ra_stats_data *stats);
/* The pool and cache counters alone. */
RA_API ra_status ra_comm_stats(const ra_comm *comm, ra_stats_data *stats);

/* What a rank did from `begin` to `end` (seconds of CLOCK_MONOTONIC). Computing and waiting follow each other and never
 * overlap; sends and receives go on at the same time, each from when it was posted to when it was known to be
 * done. */
typedef enum ra_activity { RA_COMPUTE = 0, RA_WAIT = 1, RA_SEND = 2, RA_RECEIVE = 3 } ra_activity;
typedef struct ra_trace_event {
    ra_activity activity;
    int32_t rank, peer; /* peer -1: none */
    int64_t step;       /* of the call, from 0 */
    int64_t bytes;      /* payload of a send or receive; items of a computation */
    double begin, end;
    const char *phase; /* "forward", "backward" */
} ra_trace_event;
/* From now on calls `event` for every activity, on the thread that makes the call; NULL stops it. */
RA_API ra_status ra_comm_set_tracer(ra_comm *comm, void (*event)(void *ctx, const ra_trace_event *event), void *ctx);

/* ------------------------------------------------------------------------------------------- replaceable environment */

/* The allocator of everything that the library allocates. Set it before any other call, from one thread. NULL, or one
 * with a NULL function, restores the default. align is a power of two; free gets what alloc returned, with its size. They
 * may be called with a lock of the library held, and must wait for no thread that is in a call. */
typedef struct ra_allocator {
    void *(*alloc)(void *ctx, size_t bytes, size_t align);
    void (*free)(void *ctx, void *ptr, size_t bytes);
    void *ctx;
} ra_allocator;
RA_API void ra_set_allocator(const ra_allocator *allocator);

typedef enum ra_log_level { RA_LOG_NONE = 0, RA_LOG_WARN = 1, RA_LOG_INFO = 2, RA_LOG_TRACE = 3 } ra_log_level;
/* Where log lines go (default: stderr, at the level of RINGATTN_DEBUG, which is warn unless it is set). A communicator that
 * breaks leaves one post-mortem for each rank, a text of several lines: RA_LOG_WARN if communication failed, RA_LOG_INFO if a
 * rank gave up. */
RA_API void ra_set_logger(void (*log)(void *ctx, ra_log_level level, const char *line), void *ctx, ra_log_level level);

/* --------------------------------------------------------------------------------------------------------- machine */

/* Kernels of this build, best first, whether this machine can run each, and why not. False past the end; info may be NULL. */
typedef struct ra_kernel_info {
    const char *name;
    bool available;
    const char *reason; /* "" when available */
} ra_kernel_info;
RA_API bool ra_kernel_list(int index, ra_kernel_info *info);
/* The CPU's relevant features as one line ("avx2 avx512f amx-bf16"); never NULL. */
RA_API const char *ra_cpu_features(void);

#ifdef __cplusplus
}
#endif
#endif
