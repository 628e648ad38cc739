/* What the configuration leaves open: schedule and bucket. Chosen from the configuration and the number of ranks alone, so that every
 * rank chooses the same. */
#include <inttypes.h>
#include <stdio.h>

#include "core/dtype.h"
#include "core/status.h"
#include "ring/plan.h"

/* A bucket of n rows rereads and rewrites the running state of every query once: 8*D bytes against 4*D*n flops. That costs under 5 % from
 * n = 40 * flops per byte on, which is about 400 for f32 on a CPU core, four times as much for 16-bit types on matrix units, and about
 * 5000 on a GPU. */
static int64_t usual_bucket(const ra_config *c) {
    if (c->device == RA_DEVICE_CUDA) return 8192;
    return c->dtype == RA_BF16 || c->dtype == RA_F16 ? 2048 : 512;
}

ra_status ra_choose(const ra_config *c, int ranks, ra_choice *choice) {
    *choice = (ra_choice){.schedule = RA_SCHEDULE_RING};
    if (c->placement == RA_REPLICATED && ranks > 1)
        return ra_fail(RA_NOT_AVAILABLE, "query_placement replicated is not available in this version");
    if (c->schedule == RA_SCHEDULE_GATHER || c->schedule == RA_SCHEDULE_MERGE)
        return ra_fail(RA_NOT_AVAILABLE, "schedule %s is not available in this version",
                       c->schedule == RA_SCHEDULE_GATHER ? "gather" : "merge");
    const char *why = ranks == 1 ? "one rank: nothing to exchange" : c->schedule == RA_SCHEDULE_RING ? "ring as asked for" : "ring: the memory-minimal way";
    if (c->bucket > 0) {
        choice->bucket = c->bucket;
        snprintf(choice->reason, sizeof choice->reason, "%s; bucket %" PRId64 " as asked for", why, c->bucket);
        return RA_OK;
    }
    choice->bucket = usual_bucket(c);
    snprintf(choice->reason, sizeof choice->reason, "%s; bucket %" PRId64 ": state traffic under 5 %%", why, choice->bucket);
    return RA_OK;
}
