#include "geometry/shard.h"

#include "core/status.h"

/* The i-th of `parts` consecutive pieces whose lengths differ by at most one, longer ones first. */
static ra_span piece(int64_t rows, int64_t parts, int64_t i) {
    int64_t length = rows / parts, longer = rows % parts;
    return (ra_span){i * length + ra_min(i, longer), 1, length + (i < longer)};
}

static ra_span stripe(int64_t rows, int64_t ranks, int64_t i) {
    return (ra_span){i, ranks, i < rows ? (rows - i - 1) / ranks + 1 : 0};
}

/* One rank has all rows in order, whatever the layout: one run, not the two of zigzag. */
static ra_layout among(int ranks, ra_layout layout) { return ranks == 1 ? RA_LAYOUT_CONTIGUOUS : layout; }

int64_t ra_run_count(ra_layout layout, int ranks) {
    return among(ranks, layout) == RA_LAYOUT_ZIGZAG ? 2 * (int64_t)ranks : ranks;
}

void ra_runs(ra_layout layout, int ranks, int64_t rows, int64_t shift, ra_run *runs) {
    layout = among(ranks, layout);
    int64_t count = ra_run_count(layout, ranks);
    for (int64_t i = 0; i < count; i++) {
        ra_run *run = &runs[i];
        bool late = i >= ranks; /* zigzag: the second run of its rank */
        run->rank = (int32_t)(late ? count - 1 - i : i);
        run->span = layout == RA_LAYOUT_STRIPED ? stripe(rows, ranks, i) : piece(rows, count, i);
        run->row = late ? runs[run->rank].span.count : 0;
        run->row_step = 1;
        run->span.start += shift;
    }
}

ra_shard ra_shard_of(ra_layout layout, int rank, int ranks, int64_t rows) {
    ra_shard shard = {.rows = {{0, 1, 0}, {0, 1, 0}}};
    ra_span spans[2] = {{0, 1, 0}, {0, 1, 0}};
    layout = among(ranks, layout);
    if (layout == RA_LAYOUT_STRIPED) spans[0] = stripe(rows, ranks, rank);
    if (layout == RA_LAYOUT_CONTIGUOUS) spans[0] = piece(rows, ranks, rank);
    if (layout == RA_LAYOUT_ZIGZAG) {
        spans[0] = piece(rows, 2 * (int64_t)ranks, rank);
        spans[1] = piece(rows, 2 * (int64_t)ranks, 2 * (int64_t)ranks - 1 - rank);
    }
    for (int i = 0; i < 2; i++) shard.rows[i] = (ra_rows){spans[i].start, spans[i].step, spans[i].count};
    shard.count = spans[0].count + spans[1].count;
    return shard;
}

ra_status ra_shard_rows(const ra_attention_desc *desc, int rank, int ranks, ra_shard *queries, ra_shard *keys) {
    RA_TRY(ra_attention_desc_check(desc));
    if (ranks < 1 || ranks > RA_MAX_RANKS)
        return ra_fail(RA_INVALID, "ranks is %d, which is not in 1..%d", ranks, RA_MAX_RANKS);
    if (rank < 0 || rank >= ranks) return ra_fail(RA_INVALID, "rank is %d, which is not in 0..%d", rank, ranks - 1);
    bool replicated = desc->query_placement == RA_REPLICATED;
    if (queries)
        *queries = replicated ? ra_shard_of(RA_LAYOUT_CONTIGUOUS, 0, 1, desc->seq_q)
                              : ra_shard_of(desc->layout, rank, ranks, desc->seq_q);
    if (keys) *keys = ra_shard_of(desc->layout, rank, ranks, desc->seq_k);
    return RA_OK;
}
