/* Plans: everything about a configuration that can be known before the tensors are. */
#include "plan/plan.h"

#include <inttypes.h>
#include <stdio.h>

#include "core/dtype.h"
#include "core/status.h"

void ra_plan_clear(ra_plan *plan) { ra_arena_free(&plan->arena); }

/* Bytes a rank holds in one pass, shards included. */
static int64_t held_bytes(const ra_config *c, const ra_view *view, int64_t workspace) {
    int64_t size = (int64_t)ra_dtype_size(c->dtype);
    int64_t q = c->batch * view->rows_q * c->heads, k = c->batch * view->rows_k * c->kv_heads;
    return ra_sat_add((2 * q + 2 * k) * c->head_dim * size + q * ra_state_size(c->dtype), workspace);
}

/* The most that any rank holds in forward. Looked at only for a memory limit: all ranks must come to the same bucket. */
static ra_status most_held(const ra_plan *plan, int64_t *most) {
    *most = 0;
    ra_arena arena = {0};
    ra_status status = RA_OK;
    for (int rank = 0; rank < plan->route.ranks && status == RA_OK; rank++) {
        if (plan->config.placement == RA_REPLICATED && rank != plan->view.rank) continue; /* each chooses for itself */
        ra_view view;
        status = ra_view_create(&arena, &plan->route, rank, &view);
        if (status == RA_OK)
            *most = ra_max(*most, held_bytes(&plan->config, &view,
                                             ra_workspace_of(&plan->config, &view, plan->kernel, plan->threads, false).total));
        ra_arena_free(&arena);
    }
    return status;
}

/* The route with the chosen bucket; with a memory limit, an open bucket is halved until every rank fits. */
static ra_status make_route(ra_plan *plan, int rank, int ranks) {
    ra_config *c = &plan->config;
    ra_choice choice;
    RA_TRY(ra_choose(c, ranks, &choice));
    plan->schedule = choice.schedule;
    snprintf(plan->reason, sizeof plan->reason, "%s", choice.reason);
    plan->threads = ra_default_threads(c, ranks);
    for (int64_t bucket = choice.bucket;; bucket = ra_max(1, bucket / 2)) { /* 0: all at once */
        RA_TRY(ra_route_create(&plan->arena, c, rank, ranks, bucket, &plan->route));
        RA_TRY(ra_view_create(&plan->arena, &plan->route, rank, &plan->view));
        plan->problem = ra_problem_of(c, &plan->view);
        RA_TRY(ra_kernel_find(c->kernel[0] ? c->kernel : NULL, c->device, &plan->problem, &plan->kernel));
        plan->no_backward = plan->kernel->backward_unsupported(&plan->problem);
        plan->forward = ra_workspace_of(c, &plan->view, plan->kernel, plan->threads, false);
        plan->backward = ra_workspace_of(c, &plan->view, plan->kernel, plan->threads, true);
        if (c->memory_limit == 0 || c->offload) return RA_OK;
        int64_t bytes;
        RA_TRY(most_held(plan, &bytes));
        if (bytes <= c->memory_limit) return RA_OK;
        if (choice.schedule == RA_SCHEDULE_GATHER && c->schedule == RA_SCHEDULE_AUTO) { /* the ring needs less */
            plan->schedule = choice.schedule = RA_SCHEDULE_RING;
            bucket = c->bucket > 0 ? c->bucket : ra_usual_bucket(c, ranks);
            snprintf(plan->reason, sizeof plan->reason, "ring; bucket %" PRId64 ": a gather would exceed the memory limit",
                     bucket);
            bucket *= 2; /* halved before the next look */
            continue;
        }
        if (c->bucket > 0 || bucket <= 1)
            return ra_fail(RA_NOMEM, "a rank needs %" PRId64 " bytes, and memory_limit allows %" PRId64, bytes,
                           c->memory_limit);
        snprintf(plan->reason, sizeof plan->reason, "ring; bucket %" PRId64 " to stay within the memory limit",
                 ra_max(1, bucket / 2));
    }
}

ra_status ra_plan_fill(ra_plan *plan, const ra_attention_desc *desc, int rank, int ranks) {
    RA_TRY(ra_config_create(&plan->arena, desc, &plan->config));
    RA_TRY(make_route(plan, rank, ranks));
    return plan->config.offload ? ra_plan_offload(plan, ranks) : RA_OK;
}

/* ---------------------------------------------------------------------------------------------------------- asking */

ra_status ra_plan_check_backward(const ra_plan *plan) {
    if (!plan) return ra_fail(RA_INVALID, "plan is NULL");
    const char *reason = plan->no_backward;
    return reason ? ra_fail(RA_NOT_AVAILABLE, "kernel '%s' cannot compute gradients: %s", plan->kernel->name, reason) : RA_OK;
}

int64_t ra_plan_workspace(const ra_plan *plan, bool backward) {
    if (!plan) return 0;
    return backward ? plan->backward.total : plan->forward.total;
}
ra_schedule ra_plan_schedule(const ra_plan *plan) { return plan ? plan->schedule : RA_SCHEDULE_AUTO; }
int64_t ra_plan_bucket(const ra_plan *plan) {
    if (!plan) return 0;
    return plan->config.offload ? plan->blocks[0].rows : plan->route.bucket;
}
const char *ra_plan_kernel(const ra_plan *plan) { return plan ? plan->kernel->name : ""; }
const char *ra_plan_reason(const ra_plan *plan) { return plan ? plan->reason : ""; }
