/* A plan: everything about a configuration that can be known before the tensors are. */
#ifndef RA_PLAN_PLAN_H
#define RA_PLAN_PLAN_H

#include "device/device.h"
#include "geometry/used.h"
#include "plan/blocks.h"
#include "plan/messages.h"

/* What one rank does, for any rank of any group: the route seen from the rank. */
typedef struct ra_view {
    int rank, ranks;
    ra_own_channel *own; /* by round */
    int64_t own_count;
    int32_t *local; /* rings with this rank as the only member */
    int64_t local_count;
    int64_t rows_q, rows_k;
    int64_t keys;         /* ra_most_keys */
    bool single;          /* every query row meets at most one item: no state is needed */
    bool single_backward; /* so does every key, and all keys are at home: items share no sums */
    ra_used_rows used_q, used_k;
    /* Some rows meet everything at home, each in one item, and the others are few sets: those of rings with other members. Then
     * a device may compute the first without a state. */
    bool parted;
    ra_used_rows shared_q, shared_k;
    ra_message_bounds bounds;
    int64_t local_items;
} ra_view;
ra_status ra_view_create(ra_arena *arena, const ra_route *route, int rank, ra_view *view);

/* Bytes of a call's workspace, in the order in which it is laid out; each on a 64-byte boundary. */
typedef struct ra_workspace {
    int64_t state;            /* the device's: running states, sums of gradients */
    int64_t scratch;          /* the kernel's */
    int64_t kv[2];            /* messages of K and V: ring: of this hop and the next; gather: in and out */
    int64_t grad[3], grad_in; /* messages of dK and dV: computed here, arriving */
    int64_t grad_home[2];     /* those that come home at even and odd hops, where they have room of their own */
    int64_t queries[2];       /* offload: two blocks of each tensor of queries; kv and grad have two of K and V, and of sums */
    int64_t travelling;       /* replicated queries: one message of the state, or of dq; there are two */
    int64_t total;
} ra_workspace;

/* Bytes of the messages in it. */
static inline int64_t ra_frames_bytes(const ra_workspace *w) {
    return w->total - ra_round_up(w->state, 64) - ra_round_up(w->scratch, 64);
}

/* Integers, and the kernel that they were worked out for. */
struct ra_plan {
    ra_arena arena;
    ra_config config;
    ra_route route;
    ra_view view;
    ra_problem problem;
    const ra_kernel *kernel;
    const char *no_backward; /* why there is no backward pass; NULL: there is one */
    int threads;
    ra_schedule schedule;
    char reason[160];
    ra_workspace forward, backward;
    ra_blocks blocks[2]; /* offload: of forward, of backward */
};

/* The configuration made concrete for `ranks`: schedule, bucket and the reasons for them. */
typedef struct ra_choice {
    ra_schedule schedule;
    int64_t bucket;
    char reason[160];
} ra_choice;
ra_status ra_choose(const ra_config *config, int ranks, ra_choice *choice);
/* The smallest bucket for which rereading the running state costs under 5 %, as far as a shard has room for it. */
int64_t ra_usual_bucket(const ra_config *config, int ranks);

/* Threads a rank uses when the configuration leaves it open. */
int ra_default_threads(const ra_config *config, int ranks);
/* What a device is told of a pass of the view's rank. */
ra_pass_shape ra_shape_of(const ra_config *config, const ra_view *view, const ra_problem *problem, const ra_kernel *kernel,
                          bool backward);
ra_workspace ra_workspace_of(const ra_config *config, const ra_view *view, const ra_kernel *kernel, int threads, bool backward);
/* Offload: cuts both passes into blocks that fit the memory limit, and lays out their workspaces. */
ra_status ra_plan_offload(ra_plan *plan, int ranks);
ra_problem ra_problem_of(const ra_config *config, const ra_view *view);

/* Queries are replicated over several ranks: their states are merged. */
static inline bool ra_merges(const ra_config *config, int ranks) { return config->placement == RA_REPLICATED && ranks > 1; }

/* Makes the plan of a rank; to be cleared whether that works or not. */
ra_status ra_plan_fill(ra_plan *plan, const ra_attention_desc *desc, int rank, int ranks);
void ra_plan_clear(ra_plan *plan);

#endif
