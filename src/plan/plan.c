/* Plans: making them, agreeing on them, keeping them. */
#include "plan/plan.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "core/alloc.h"
#include "core/dtype.h"
#include "core/fields.h"
#include "core/status.h"
#include "ring/agree.h"
#include "ring/call.h"
#include "ring/ring.h"
#include "plan/summary.h"

/* ----------------------------------------------------------------------------------------------------------- making */

void ra_plan_free(ra_plan *plan) {
    ra_arena_free(&plan->arena);
    ra_free(plan, sizeof *plan);
}

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
        if (plan->config.placement == RA_REPLICATED && rank != plan->view.rank) continue; /* nothing to choose together */
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
    if (c->device != RA_DEVICE_CPU && ranks > 1)
        return ra_fail(RA_NOT_AVAILABLE, "a ring of GPUs is not available in this version: device cuda is for one rank");
    for (int64_t bucket = choice.bucket;; bucket = ra_max(1, bucket / 2)) { /* 0: all at once */
        RA_TRY(ra_route_create(&plan->arena, c, rank, ranks, bucket, &plan->route));
        RA_TRY(ra_view_create(&plan->arena, &plan->route, rank, &plan->view));
        plan->problem = ra_problem_of(c, &plan->view);
        RA_TRY(ra_kernel_find(c->kernel[0] ? c->kernel : NULL, c->device, &plan->problem, &plan->kernel));
        plan->forward = ra_workspace_of(c, &plan->view, plan->kernel, plan->threads, false);
        plan->backward = ra_workspace_of(c, &plan->view, plan->kernel, plan->threads, true);
        if (c->memory_limit == 0) return RA_OK;
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
            return ra_fail(RA_NOMEM, "a rank needs %" PRId64 " bytes, more than the memory_limit of %" PRId64, bytes,
                           c->memory_limit);
        snprintf(plan->reason, sizeof plan->reason, "ring; bucket %" PRId64 " to stay within the memory limit",
                 ra_max(1, bucket / 2));
    }
}

/* What steps reuse: lists of messages, items and transfers of the largest step. */
static ra_status make_room(ra_plan *plan) {
    const ra_view *view = &plan->view;
    ra_messages *lists[] = {&plan->held, &plan->next_held, &plan->previous, &plan->mine};
    for (int i = 0; i < 4; i++) ra_messages_create(&plan->arena, view->own, view->own_count, lists[i]);
    plan->items = ra_arena_take(&plan->arena, view->local_items + view->bounds.step_items + 1, sizeof(ra_item));
    plan->transfers = ra_arena_take(&plan->arena, view->bounds.transfers + 4, sizeof(ra_transfer));
    return plan->arena.failed ? ra_fail(RA_NOMEM, "no memory for the plan of rank %d", view->rank) : RA_OK;
}

ra_status ra_plan_make(const ra_attention_desc *desc, int rank, int ranks, ra_plan **result) {
    ra_plan *plan = ra_calloc(sizeof *plan);
    if (!plan) return ra_fail(RA_NOMEM, "no memory for a plan");
    ra_status status = ra_config_create(&plan->arena, desc, &plan->config);
    if (status == RA_OK) status = make_route(plan, rank, ranks);
    if (status == RA_OK) status = make_room(plan);
    if (status != RA_OK) {
        ra_plan_free(plan);
        return status;
    }
    *result = plan;
    return RA_OK;
}

/* ------------------------------------------------------------------------------------------------------------ cache */

void ra_plan_cache_clear(ra_comm *comm) {
    while (comm->plans) {
        ra_plan *plan = comm->plans;
        comm->plans = plan->next;
        ra_plan_free(plan);
    }
    comm->plan_count = 0;
}

/* Finds an idle plan and takes it out of the list. */
static ra_plan *take_cached(ra_comm *comm, const char *key, int64_t key_bytes) {
    for (ra_plan **at = &comm->plans; *at; at = &(*at)->next) {
        ra_plan *plan = *at;
        if (plan->taken || plan->key_bytes != key_bytes || memcmp(plan->key, key, (size_t)key_bytes) != 0) continue;
        *at = plan->next;
        return plan;
    }
    return NULL;
}

/* Drops the idle plan that was used longest ago when there are too many. */
static void bound_cache(ra_comm *comm) {
    if (comm->plan_count <= RA_CACHE_ENTRIES) return;
    ra_plan **oldest = NULL;
    for (ra_plan **at = &comm->plans; *at; at = &(*at)->next)
        if (!(*at)->taken) oldest = at;
    if (!oldest) return;
    ra_plan *plan = *oldest;
    *oldest = plan->next;
    comm->plan_count--;
    ra_plan_free(plan);
}

static ra_status find_or_make(ra_comm *comm, const ra_attention_desc *desc, const char *key, int64_t key_bytes,
                              int64_t shared_bytes, ra_plan **result) {
    ra_plan *plan = take_cached(comm, key, key_bytes);
    if (plan) {
        comm->cache_hits++;
    } else {
        comm->cache_misses++;
        RA_TRY(ra_plan_make(desc, ra_comm_rank(comm), ra_comm_size(comm), &plan));
        ra_status status = ra_call_reserve(comm, plan);
        plan->key = ra_arena_take(&plan->arena, key_bytes, 1);
        if (status == RA_OK && !plan->key) status = ra_fail(RA_NOMEM, "no memory for a plan");
        if (status != RA_OK) {
            ra_plan_free(plan);
            return status;
        }
        memcpy(plan->key, key, (size_t)key_bytes);
        plan->key_bytes = key_bytes;
        plan->shared_bytes = shared_bytes;
        plan->digest = ra_fnv(RA_FNV_START, key, shared_bytes);
        const int64_t chosen[] = {plan->schedule, plan->route.bucket};
        plan->digest = ra_fnv(plan->digest, chosen, sizeof chosen);
        plan->comm = comm;
        comm->plan_count++;
    }
    plan->taken = true;
    plan->next = comm->plans;
    comm->plans = plan;
    bound_cache(comm);
    *result = plan;
    return RA_OK;
}

ra_status ra_plan_create(ra_comm *comm, const ra_attention_desc *desc, ra_plan **plan) {
    if (!plan) return ra_fail(RA_INVALID, "plan is NULL");
    *plan = NULL;
    if (!comm) return ra_fail(RA_INVALID, "comm is NULL");
    RA_TRY(ra_comm_usable(comm));
    if (comm->solo.make_row && desc && desc->query_placement == RA_REPLICATED)
        return ra_fail(RA_NOT_AVAILABLE, "a rank played alone needs sharded queries");
    ra_arena arena = {0};
    ra_config config = {0};
    char *key = NULL;
    int64_t shared = 0, length = 0;
    ra_status status = ra_config_create(&arena, desc, &config);
    if (status == RA_OK) {
        shared = ra_config_text(&config, NULL, 0);
        length = shared + 80; /* room for what is chosen, too */
        key = ra_arena_take(&arena, length, 1);
        if (!key) status = ra_fail(RA_NOMEM, "no memory for a plan");
    }
    if (status == RA_OK) {
        ra_config_text(&config, key, length);
        snprintf(key + shared, (size_t)(length - shared), "%s/%d", config.kernel, config.threads); /* this rank's own affair */
    }
    /* Every rank takes part in the agreement whatever became of its own plan, so that nobody waits for one that failed. */
    ra_plan *made = NULL;
    if (status == RA_OK) status = find_or_make(comm, desc, key, length, shared, &made);
    bool alone = ra_comm_size(comm) == 1 || comm->solo.make_row;
    if (status == RA_OK && !alone) ra_link_set_checksum(comm->link, config.checksum);
    if (config.placement == RA_REPLICATED &&
        comm->merging) { /* the headers of the merge tell; only a failure must be told now */
        if (status != RA_OK && !alone) ra_link_abort(comm->link, status, ra_last_error());
    } else if (!alone) {
        if (status == RA_OK) {
            /* What was chosen takes the place of this rank's own affairs. */
            shared += snprintf(key + shared, (size_t)(length - shared), "chosen schedule=%d\nchosen bucket=%" PRId64 "\n",
                               (int)made->schedule, made->route.bucket);
        }
        status = ra_agree(comm, status, status == RA_OK ? key : "", status == RA_OK ? shared : 0);
        comm->merging = status == RA_OK && config.placement == RA_REPLICATED;
    }
    ra_arena_free(&arena);
    if (status != RA_OK) {
        ra_plan_destroy(made);
        return status;
    }
    *plan = made;
    return RA_OK;
}

void ra_plan_destroy(ra_plan *plan) {
    if (!plan) return;
    plan->taken = false;
}

/* ---------------------------------------------------------------------------------------------------------- asking */

ra_status ra_plan_check_backward(const ra_plan *plan) {
    if (!plan) return ra_fail(RA_INVALID, "plan is NULL");
    const char *reason = plan->kernel->backward_unsupported(&plan->problem);
    return reason ? ra_fail(RA_NOT_AVAILABLE, "kernel '%s' cannot compute gradients: %s", plan->kernel->name, reason) : RA_OK;
}

int64_t ra_plan_workspace(const ra_plan *plan, bool backward) {
    if (!plan) return 0;
    return backward ? plan->backward.total : plan->forward.total;
}
ra_schedule ra_plan_schedule(const ra_plan *plan) { return plan ? plan->schedule : RA_SCHEDULE_AUTO; }
int64_t ra_plan_bucket(const ra_plan *plan) { return plan ? plan->route.bucket : 0; }
const char *ra_plan_kernel(const ra_plan *plan) { return plan ? plan->kernel->name : ""; }
const char *ra_plan_reason(const ra_plan *plan) { return plan ? plan->reason : ""; }

ra_status ra_comm_stats(const ra_comm *comm, ra_stats_data *stats) {
    if (!comm) return ra_fail(RA_INVALID, "comm is NULL");
    if (!stats) return ra_fail(RA_INVALID, "stats is NULL");
    if (stats->struct_size < sizeof *stats)
        return ra_fail(RA_INVALID, "stats has struct_size %u, this library knows %zu", stats->struct_size, sizeof *stats);
    ra_pool_counts pool = ra_pool_read(comm->pool);
    if (comm->device_pool) {
        ra_pool_counts device = ra_pool_read(comm->device_pool);
        pool.in_use += device.in_use;
        pool.peak += device.peak;
        pool.hits += device.hits;
        pool.misses += device.misses;
    }
    *stats =
        (ra_stats_data){.struct_size = stats->struct_size, /* a later header's struct is larger; its known part is filled */
                        .pool_in_use = pool.in_use,
                        .pool_peak = pool.peak,
                        .pool_hits = pool.hits,
                        .pool_misses = pool.misses,
                        .cache_hits = comm->cache_hits,
                        .cache_misses = comm->cache_misses,
                        .cache_entries = comm->plan_count};
    return RA_OK;
}

ra_status ra_stats(const ra_plan *plan, ra_stats_data *stats) {
    if (!plan) return ra_fail(RA_INVALID, "plan is NULL");
    RA_TRY(ra_comm_stats(plan->comm, stats));
    stats->steps = plan->stats.steps;
    stats->bytes_sent = plan->stats.bytes_sent;
    stats->bytes_received = plan->stats.bytes_received;
    stats->compute_seconds = plan->stats.compute_seconds;
    stats->wait_seconds = plan->stats.wait_seconds;
    return RA_OK;
}
