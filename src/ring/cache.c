/* Plans of a communicator: made, agreed on with every rank, and kept. */
#include "ring/cache.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "core/alloc.h"
#include "core/fields.h"
#include "core/status.h"
#include "ring/agree.h"
#include "ring/lane.h"

static void free_entry(ra_entry *entry) {
    ra_plan_clear(&entry->plan);
    ra_arena_free(&entry->arena);
    ra_free(entry, sizeof *entry);
}

void ra_cache_clear(ra_comm *comm) {
    while (comm->plans) {
        ra_entry *entry = comm->plans;
        comm->plans = entry->next;
        free_entry(entry);
    }
    comm->plan_count = 0;
}

/* Finds an idle plan and takes it out of the list. */
static ra_entry *take_cached(ra_comm *comm, const char *key, int64_t key_bytes) {
    for (ra_entry **at = &comm->plans; *at; at = &(*at)->next) {
        ra_entry *entry = *at;
        if (entry->taken || entry->key_bytes != key_bytes || memcmp(entry->key, key, (size_t)key_bytes) != 0) continue;
        *at = entry->next;
        return entry;
    }
    return NULL;
}

/* Drops the idle plan that was used longest ago when there are too many. */
static void bound_cache(ra_comm *comm) {
    if (comm->plan_count <= RA_CACHE_ENTRIES) return;
    ra_entry **oldest = NULL;
    for (ra_entry **at = &comm->plans; *at; at = &(*at)->next)
        if (!(*at)->taken) oldest = at;
    if (!oldest) return;
    ra_entry *entry = *oldest;
    *oldest = entry->next;
    comm->plan_count--;
    free_entry(entry);
}

/* Lists of messages, items and transfers of the largest step. */
static void make_room(ra_entry *entry) {
    const ra_view *view = &entry->plan.view;
    ra_messages *lists[] = {&entry->held, &entry->coming, &entry->previous, &entry->home, &entry->late_home};
    for (int i = 0; i < 5; i++) ra_messages_create(&entry->arena, view->own, view->own_count, lists[i]);
    const ra_blocks *blocks = entry->plan.blocks;
    const int64_t items = ra_max(view->local_items + view->bounds.step_items, ra_max(blocks[0].items, blocks[1].items));
    entry->items = ra_arena_take(&entry->arena, items + 1, sizeof(ra_item));
    entry->met = ra_arena_take(&entry->arena, blocks[1].count, sizeof *entry->met);
    const int64_t messages = entry->transfers_most = view->bounds.transfers + 4;
    entry->transfers = ra_arena_take(&entry->arena, messages, sizeof(ra_transfer));
    if (!entry->plan.kernel->device->copies || view->ranks == 1) return;
    entry->parcels = ra_arena_take(&entry->arena, messages, sizeof(ra_parcel));
    entry->before = ra_arena_take(&entry->arena, messages, sizeof(ra_parcel));
    entry->receipts = ra_arena_take(&entry->arena, messages, sizeof(ra_transfer));
    entry->exchange = ra_arena_take(&entry->arena, messages, sizeof(ra_net_message));
}

static ra_status make_entry(ra_comm *comm, const ra_attention_desc *desc, const char *key, int64_t key_bytes,
                            int64_t shared_bytes, ra_entry **result) {
    ra_entry *entry = ra_calloc(sizeof *entry);
    if (!entry) return ra_fail(RA_NOMEM, "no memory for a plan");
    entry->comm = comm;
    ra_status status = ra_plan_fill(&entry->plan, desc, comm->rank, comm->ranks);
    if (status == RA_OK) {
        make_room(entry);
        entry->frames_most[0] = ra_frames_bytes(&entry->plan.forward);
        entry->frames_most[1] = ra_frames_bytes(&entry->plan.backward);
        entry->key = ra_arena_take(&entry->arena, key_bytes, 1);
        status = entry->arena.failed ? ra_fail(RA_NOMEM, "no memory for the plan of rank %d", comm->rank) : RA_OK;
    }
    if (status == RA_OK) status = ra_call_reserve(entry);
    if (status != RA_OK) {
        free_entry(entry);
        return status;
    }
    memcpy(entry->key, key, (size_t)key_bytes);
    entry->key_bytes = key_bytes;
    entry->shared_bytes = shared_bytes;
    const int64_t chosen[] = {entry->plan.schedule, entry->plan.route.bucket};
    entry->digest = ra_fnv(ra_fnv(RA_FNV_START, key, shared_bytes), chosen, sizeof chosen);
    *result = entry;
    return RA_OK;
}

static ra_status find_or_make(ra_comm *comm, const ra_attention_desc *desc, const char *key, int64_t key_bytes,
                              int64_t shared_bytes, ra_entry **result) {
    ra_entry *entry = take_cached(comm, key, key_bytes);
    if (entry) {
        comm->cache_hits++;
    } else {
        comm->cache_misses++;
        RA_TRY(make_entry(comm, desc, key, key_bytes, shared_bytes, &entry));
        comm->plan_count++;
    }
    entry->taken = true;
    entry->next = comm->plans;
    comm->plans = entry;
    bound_cache(comm);
    *result = entry;
    return RA_OK;
}

ra_status ra_plan_create(ra_comm *comm, const ra_attention_desc *desc, ra_plan **plan) {
    if (!plan) return ra_fail(RA_INVALID, "plan is NULL");
    *plan = NULL;
    if (!comm) return ra_fail(RA_INVALID, "comm is NULL");
    RA_TRY(ra_comm_usable(comm));
    if (ra_link_is_solo(comm->link) && desc && desc->query_placement == RA_REPLICATED)
        return ra_fail(RA_NOT_AVAILABLE, "a rank that runs alone (ra_comm_solo) needs query_placement sharded");
    const ra_device_ops *device = desc ? ra_device_of(desc->device) : NULL;
    if (ra_link_is_solo(comm->link) && device && device->memory && !comm->device_maker)
        return ra_fail(RA_NOT_AVAILABLE, "a rank that runs alone (ra_comm_solo) on a %s needs ra_comm_set_cuda_maker",
                       device->name);
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
        snprintf(key + shared, (size_t)(length - shared), "%s/%d", config.kernel, config.threads); /* each rank's own choice */
    }
    /* Every rank takes part in the agreement whatever became of its own plan, so that nobody waits for one that failed. */
    ra_entry *made = NULL;
    if (status == RA_OK) status = find_or_make(comm, desc, key, length, shared, &made);
    bool alone = comm->ranks == 1 || ra_link_is_solo(comm->link); /* nobody to agree with */
    if (status == RA_OK && !alone) ra_link_set_checksum(comm->link, config.checksum);
    if (config.placement == RA_REPLICATED && comm->merging && !ra_lane_undecided(comm, device ? device->copies : NULL)) {
        /* Headers of the merge will show any difference; only a failure must be told now. */
        if (status != RA_OK && !alone) ra_link_abort(comm->link, status, ra_last_error());
    } else if (!alone) {
        if (status == RA_OK) {
            /* What was chosen is shared too: it overwrites the part that is not. */
            shared += snprintf(key + shared, (size_t)(length - shared), "chosen schedule=%d\nchosen bucket=%" PRId64 "\n",
                               (int)made->plan.schedule, made->plan.route.bucket);
        }
        const bool planned = status == RA_OK;
        int64_t none[2] = {0, 0};
        status = ra_agree(comm, status, planned ? key : "", planned ? shared : 0, planned ? made->frames_most : none);
        if (status == RA_OK) status = ra_call_prepare(made, false);
        comm->merging = status == RA_OK && config.placement == RA_REPLICATED;
    }
    ra_arena_free(&arena);
    if (status != RA_OK) {
        if (made) made->taken = false;
        return status;
    }
    *plan = &made->plan;
    return RA_OK;
}

void ra_plan_destroy(ra_plan *plan) {
    if (plan) ra_entry_of(plan)->taken = false;
}

/* ----------------------------------------------------------------------------------------------------- statistics */

ra_status ra_comm_stats(const ra_comm *comm, ra_stats_data *stats) {
    if (!comm) return ra_fail(RA_INVALID, "comm is NULL");
    if (!stats) return ra_fail(RA_INVALID, "stats is NULL");
    if (stats->struct_size < sizeof *stats)
        return ra_fail(RA_INVALID, "stats.struct_size is %u; set it to sizeof(ra_stats_data), which is %zu", stats->struct_size,
                       sizeof *stats);
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
    const ra_entry *entry = (const ra_entry *)(const void *)plan;
    RA_TRY(ra_comm_stats(entry->comm, stats));
    stats->steps = entry->stats.steps;
    stats->bytes_sent = entry->stats.bytes_sent;
    stats->bytes_received = entry->stats.bytes_received;
    stats->compute_seconds = entry->stats.compute_seconds;
    stats->wait_seconds = entry->stats.wait_seconds;
    return RA_OK;
}
