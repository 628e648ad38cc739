#include "plan/blocks.h"

#include "core/status.h"

static ra_span rows_of(const ra_blocks *b, int block, int64_t rows) {
    const ra_rows first = ra_shard_of(RA_LAYOUT_CONTIGUOUS, block, b->count, rows).rows[0];
    return (ra_span){first.start, first.step, first.count};
}

ra_span ra_block_queries(const ra_blocks *b, int block) { return rows_of(b, block, b->route.config->seq_q); }
ra_span ra_block_keys(const ra_blocks *b, int block) { return rows_of(b, block, b->route.config->seq_k); }

/* Of the block of queries that has most. */
static int64_t most_items(const ra_blocks *b) {
    const ra_rings *rings = &b->route.rings;
    int64_t most = 0;
    for (int block = 0; block < b->count; block++) {
        const ra_ring_list own = ra_rings_of(rings, block);
        int64_t targets = 0;
        for (int64_t i = 0; i < own.count; i++) targets += ra_targets_of(&rings->rings[own.list[i]], block);
        most = ra_max(most, targets * RA_ITEMS_MAX);
    }
    return most;
}

/* In a contiguous layout a rank has one part of a ring at most, and parts are in the order of ranks. */
static const ra_part *part_of(const ra_part *parts, int64_t count, int rank) {
    int64_t low = 0, high = count;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (parts[middle].rank < rank) low = middle + 1;
        else high = middle;
    }
    return low < count && parts[low].rank == rank ? &parts[low] : NULL;
}

int64_t ra_block_items(const ra_blocks *b, int queries, int keys, ra_item *items) {
    const ra_ring_list own = ra_rings_of(&b->route.rings, queries);
    int64_t count = 0;
    for (int64_t i = 0; i < own.count; i++) {
        const ra_ring *ring = &b->route.rings.rings[own.list[i]];
        const ra_part *source = part_of(ring->sources, ring->source_count, keys),
                      *target = part_of(ring->targets, ring->target_count, queries);
        if (!source || !target) continue;
        const ra_piece whole = {.ring = own.list[i],
                                .source = (int32_t)(source - ring->sources),
                                .repeats = ring->repeat,
                                .rows = source->rows.count};
        count += ra_items(&b->route, &whole, target, false, items + count);
    }
    return count;
}

static bool count_visits(ra_arena *arena, ra_blocks *b) {
    b->items = most_items(b);
    ra_item *items = ra_arena_take(arena, b->items, sizeof(ra_item));
    b->visits = ra_arena_take(arena, b->count, sizeof(int32_t));
    if (arena->failed) return false;
    for (int queries = 0; queries < b->count; queries++)
        for (int keys = 0; keys < b->count; keys++) b->visits[keys] += ra_block_items(b, queries, keys, items) > 0;
    return true;
}

ra_status ra_blocks_create(ra_arena *arena, const ra_config *c, int64_t rows, ra_blocks *b) {
    const int64_t count = ra_max(1, ra_ceil_div(ra_max(c->seq_q, c->seq_k), rows));
    if (count > RA_MAX_BLOCKS)
        return ra_fail(RA_INVALID, "offload in blocks of %lld rows takes %lld of them, more than %d: use a larger bucket",
                       (long long)rows, (long long)count, RA_MAX_BLOCKS);
    *b = (ra_blocks){.count = (int)count, .rows = rows};
    RA_TRY(ra_route_create(arena, c, 0, b->count, 0, &b->route));
    b->rows_q = ra_block_queries(b, 0).count;
    b->rows_k = ra_block_keys(b, 0).count;
    return count_visits(arena, b) ? RA_OK : ra_fail(RA_NOMEM, "no memory for %d blocks", b->count);
}
