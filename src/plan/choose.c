/* What the configuration leaves open: schedule and bucket. Chosen from the configuration and the number of ranks alone, so that
 * every rank chooses the same. */
#include <inttypes.h>
#include <stdio.h>

#include "plan/plan.h"

/* Does a query meet only about half of a bucket at a time? In a zigzag half of it comes from either run of a shard, and each
 * half is a piece of its own, met by itself; of stripes a causal mask hides half. */
static bool meets_half(const ra_config *c, int ranks) {
    return ranks > 1 && (c->layout == RA_LAYOUT_ZIGZAG || (c->layout == RA_LAYOUT_STRIPED && c->right != RA_NO_LIMIT));
}

/* The device's own choice; 0: it has none. */
static int64_t device_bucket(const ra_config *c, int ranks) {
    const ra_device_ops *device = ra_device_of(c->device);
    return device ? device->usual_bucket * (meets_half(c, ranks) ? 2 : 1) : 0;
}

/* What is fast: a bucket of n rows rereads and rewrites the running state of every query once, 8*D bytes against 4*D*n flops,
 * and queries are packed again. That costs under 5 % from about 400 rows on with vector units, from 4096 in f32 and 8192 in 16
 * bits with matrix units, and on a GPU from about 7000 that a query meets at a time. What CPUs the other ranks have is not
 * known here, so a bucket is a quarter of a shard between those bounds (in 16 bits at least 2048, where matrix units lose a
 * tenth). */
static int64_t fast_bucket(const ra_config *c, int ranks) {
    const int64_t own = device_bucket(c, ranks);
    if (own) return own;
    const bool halves = c->dtype == RA_BF16 || c->dtype == RA_F16;
    const int64_t least = halves ? 2048 : 512, most = halves ? 8192 : 4096;
    const int64_t quarter = c->seq_k / ranks / 4 / least * least; /* whole blocks of every kernel */
    return ra_max(least, ra_min(quarter, most));
}

/* Who asks for a ring by name wants to save memory: the buckets in flight would outweigh a short shard. */
#define SMALL_SHARD 8192

static bool asked_small(const ra_config *c, int ranks) {
    return c->schedule == RA_SCHEDULE_RING && ranks > 1 && !device_bucket(c, ranks) &&
           ra_ceil_div(c->seq_k, ranks) <= SMALL_SHARD;
}

int64_t ra_usual_bucket(const ra_config *c, int ranks) {
    if (!asked_small(c, ranks)) return fast_bucket(c, ranks);
    return ra_max(32, ra_round_up(ra_ceil_div(ra_ceil_div(c->seq_k, ranks), 16), 32));
}

/* Below this many tokens the exchange of a gather costs less than the latency of p - 1 hops. */
#define GATHER_BELOW 32768

static const char *const names[] = {"auto", "ring", "gather", "merge"};

ra_status ra_choose(const ra_config *c, int ranks, ra_choice *choice) {
    *choice = (ra_choice){.schedule = c->schedule};
    char *reason = choice->reason;
    size_t room = sizeof choice->reason;
    if (ranks == 1) {
        choice->schedule = c->schedule == RA_SCHEDULE_AUTO ? RA_SCHEDULE_RING : c->schedule;
        choice->bucket = c->bucket > 0 ? c->bucket : ra_usual_bucket(c, ranks);
        snprintf(reason, room, "one rank: nothing to exchange");
        return RA_OK;
    }
    if (c->placement == RA_REPLICATED) {
        bool asked = c->schedule != RA_SCHEDULE_AUTO;
        if (!asked) choice->schedule = RA_SCHEDULE_MERGE;
        snprintf(reason, room, "replicated queries: K and V do not move, states are merged %s%s",
                 choice->schedule == RA_SCHEDULE_MERGE  ? "by a tree"
                 : choice->schedule == RA_SCHEDULE_RING ? "along the ring"
                                                        : "at rank 0",
                 asked ? ", as asked for" : "");
        return RA_OK;
    }
    if (c->schedule == RA_SCHEDULE_AUTO)
        choice->schedule = ra_max(c->seq_q, c->seq_k) < GATHER_BELOW ? RA_SCHEDULE_GATHER : RA_SCHEDULE_RING;
    const char *why = c->schedule != RA_SCHEDULE_AUTO          ? "as asked for"
                      : choice->schedule == RA_SCHEDULE_GATHER ? "a short sequence, one exchange is quicker than p - 1 hops"
                                                               : "needs least memory";
    const char *name = names[choice->schedule];
    if (choice->schedule == RA_SCHEDULE_GATHER) { /* everything at once: bucket 0 */
        snprintf(reason, room, "%s: %s", name, why);
        return RA_OK;
    }
    choice->bucket = c->bucket > 0 ? c->bucket : ra_usual_bucket(c, ranks);
    snprintf(reason, room, "%s: %s; bucket %" PRId64 ": %s", name, why, choice->bucket,
             c->bucket > 0             ? "as asked for"
             : asked_small(c, ranks) ? "a sixteenth of a shard, to save memory"
                                     : "rereading the running state costs little");
    return RA_OK;
}
