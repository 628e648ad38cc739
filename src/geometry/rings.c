#include "geometry/rings.h"

#include <stdlib.h>

#include "core/status.h"

typedef struct builder {
    ra_arena *arena;
    const ra_config *config;
    int rank, ranks;
    ra_run *key_runs, *query_runs;
    int64_t key_run_count, query_run_count;
    int64_t *cuts; /* positions where a run of keys or queries begins or ends; ascending */
    int64_t cut_count;
    ra_part *sources, *targets; /* the ring being made */
    int64_t colours;            /* rounds of one branch */
    ra_rings *out;
} builder;

/* -------------------------------------------------------------------------------------------------------- one ring */

/* The part of a run that lies on a lattice; count 0 if none does. */
static ra_part part_of(const ra_run *run, ra_span lattice, int64_t shift) {
    ra_span span = ra_span_intersect(run->span, lattice);
    int64_t step = run->span.step;
    ra_part part = {.rank = run->rank, .row_shift = shift / step * run->row_step};
    part.rows = (ra_item_rows){.row = run->row + (span.start - run->span.start) / step * run->row_step,
                               .row_step = span.step / step * run->row_step,
                               .pos = span.start,
                               .pos_step = span.step,
                               .count = span.count};
    return part;
}

/* The first run that ends after `position`; runs ascend by position. */
static int64_t first_run(const ra_run *runs, int64_t count, int64_t position) {
    int64_t low = 0, high = count;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (runs[middle].span.start + runs[middle].span.count > position) high = middle;
        else low = middle + 1;
    }
    return low;
}

static int64_t collect(const builder *b, const ra_run *runs, int64_t run_count, ra_span lattice, int64_t shift,
                       ra_part *parts) {
    int64_t count = 0;
    if (lattice.count == 0) return 0;
    bool striped = b->config->layout == RA_LAYOUT_STRIPED;
    int64_t end = ra_span_last(lattice) + 1;
    for (int64_t i = striped ? 0 : first_run(runs, run_count, lattice.start); i < run_count; i++) {
        if (runs[i].span.count == 0) continue;
        if (!striped && runs[i].span.start >= end) break;
        ra_part part = part_of(&runs[i], lattice, shift);
        if (part.rows.count > 0) parts[count++] = part;
    }
    return count;
}

static int compare_ranks(const void *a, const void *b) {
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

static int32_t member_of(const ra_ring *ring, int32_t rank) {
    const int32_t *found = bsearch(&rank, ring->members, (size_t)ring->member_count, sizeof rank, compare_ranks);
    return found ? (int32_t)(found - ring->members) : -1;
}

int32_t ra_first_target(const ra_ring *ring, int rank) {
    const int32_t member = member_of(ring, rank);
    return member < 0 ? -1 : ring->first_target[member];
}

int64_t ra_targets_of(const ra_ring *ring, int rank) {
    int64_t count = 0;
    for (int32_t t = ra_first_target(ring, rank); t >= 0; t = ring->next_target[t]) count++;
    return count;
}

/* Threads each member's targets, in their order, so that nobody searches all of them for one member's. */
static bool link_targets(ra_arena *arena, ra_ring *ring) {
    ring->first_target = ra_arena_take(arena, ring->member_count, sizeof(int32_t));
    ring->next_target = ra_arena_take(arena, ring->target_count, sizeof(int32_t));
    if (arena->failed) return false;
    for (int64_t i = 0; i < ring->member_count; i++) ring->first_target[i] = -1;
    for (int64_t i = ring->target_count - 1; i >= 0; i--) {
        int32_t *first = &ring->first_target[ring->targets[i].member];
        ring->next_target[i] = *first;
        *first = (int32_t)i;
    }
    return true;
}

/* Copies the parts whose position is `residue` (mod modulus), finds the members, and appends the ring. */
static bool append_ring(builder *b, ra_ring ring, int64_t sources, int64_t targets, int64_t modulus, int64_t residue) {
    ra_rings *out = b->out;
    void *vector = out->rings;
    if (!ra_arena_grow(b->arena, &vector, out->count, &out->capacity, sizeof(ra_ring))) return false;
    out->rings = vector;
    ring.sources = ra_arena_take(b->arena, sources, sizeof(ra_part));
    ring.targets = ra_arena_take(b->arena, targets, sizeof(ra_part));
    ring.members = ra_arena_take(b->arena, sources + targets, sizeof(int32_t));
    if (b->arena->failed) return false;
    int64_t seen = 0;
    for (int64_t i = 0; i < sources; i++)
        if (ra_mod(b->sources[i].rows.pos, modulus) == residue) ring.sources[ring.source_count++] = b->sources[i];
    for (int64_t i = 0; i < targets; i++)
        if (ra_mod(b->targets[i].rows.pos, modulus) == residue) ring.targets[ring.target_count++] = b->targets[i];
    if (ring.source_count == 0 || ring.target_count == 0) return true;
    for (int64_t i = 0; i < ring.source_count; i++) ring.members[seen++] = ring.sources[i].rank;
    for (int64_t i = 0; i < ring.target_count; i++) ring.members[seen++] = ring.targets[i].rank;
    qsort(ring.members, (size_t)seen, sizeof(int32_t), compare_ranks);
    for (int64_t i = 0; i < seen; i++)
        if (i == 0 || ring.members[i] != ring.members[i - 1]) ring.members[ring.member_count++] = ring.members[i];
    for (int64_t i = 0; i < ring.source_count; i++) ring.sources[i].member = member_of(&ring, ring.sources[i].rank);
    for (int64_t i = 0; i < ring.target_count; i++) ring.targets[i].member = member_of(&ring, ring.targets[i].rank);
    if (!link_targets(b->arena, &ring)) return false;
    out->rings[out->count++] = ring;
    return true;
}

/* The ring of the segment at `origin` and its repeats. Rings of different `colour`, in [0, colours), go in different rounds. */
static bool add_ring(builder *b, int32_t class_index, int64_t origin, int64_t repeat, int64_t shift, int64_t colour) {
    const ra_class *class = &b->out->classes[class_index];
    int64_t sources = collect(b, b->key_runs, b->key_run_count, ra_lattice_keys(b->config, class, origin), shift, b->sources);
    int64_t targets =
        sources ? collect(b, b->query_runs, b->query_run_count, ra_lattice_queries(b->config, class, origin), shift, b->targets)
                : 0;
    if (sources == 0 || targets == 0) return true;
    /* In `mix` every branch has all the heads, so branches take turns; in `heads` they share the buckets. */
    int64_t branch = b->config->combine == RA_COMBINE_MIX ? class->branch : 0;
    ra_ring ring = {.class_index = class_index,
                    .round = (int32_t)(branch * b->colours + colour),
                    .repeat = repeat,
                    .shift = shift,
                    .origin = origin};
    /* Stripes share residues modulo r only if they agree modulo gcd(p, r): others are in different rings. */
    int64_t modulus = 1;
    if (class->residue && b->config->layout == RA_LAYOUT_STRIPED) modulus = ra_gcd(b->ranks, class->rate);
    for (int64_t residue = 0; residue < modulus; residue++)
        if (!append_ring(b, ring, sources, targets, modulus, residue)) return false;
    return true;
}

/* ----------------------------------------------------------------------------------------------- segments of a class */

/* Runs of consecutive rows: segments between two cuts are alike, segments with a cut inside stand alone. Even segments go
 * before odd ones: in one round, neighbours would chain all ranks together. */
static bool add_consecutive(builder *b, int32_t class_index, int64_t first, int64_t end) {
    int64_t w = b->out->classes[class_index].segment, cut = 0;
    for (int64_t s = first; s < end;) {
        while (cut < b->cut_count && b->cuts[cut] <= s * w) cut++;
        int64_t stop = cut < b->cut_count ? ra_min(end, b->cuts[cut] / w) : end;
        if (stop > s) {
            if (!add_ring(b, class_index, s * w, stop - s, w, s % 2)) return false;
            s = stop;
        } else {
            if (!add_ring(b, class_index, s * w, 1, w, s % 2)) return false;
            s++;
        }
    }
    return true;
}

/* Stripes: every period-th segment is alike, except one in which the queries begin or the keys end. */
static bool add_striped(builder *b, int32_t class_index, int64_t first, int64_t end) {
    int64_t w = b->out->classes[class_index].segment;
    if (first < end && ra_query_shift(b->config) > first * w) {
        if (!add_ring(b, class_index, first * w, 1, 0, b->ranks)) return false;
        first++;
    }
    if (first < end && b->config->seq_k < end * w) {
        end--;
        if (!add_ring(b, class_index, end * w, 1, 0, b->ranks + 1)) return false;
    }
    int64_t period = b->ranks / ra_gcd(w, b->ranks);
    for (int64_t phase = 0; phase < period && first + phase < end; phase++)
        if (!add_ring(b, class_index, (first + phase) * w, (end - first - phase - 1) / period + 1, period * w, phase))
            return false;
    return true;
}

static bool add_class(builder *b, int32_t class_index) {
    const ra_config *c = b->config;
    int64_t w = b->out->classes[class_index].segment;
    if (c->batch == 0 || c->seq_k == 0 || c->seq_q == 0) return true; /* nothing to compute, so nothing to send */
    if (w == 0 || w >= c->seq_k) { /* one segment; queries at negative positions belong to it only if it has no ends */
        return add_ring(b, class_index, 0, 1, 0, 0);
    }
    int64_t first = ra_max(0, ra_query_shift(c)) / w, end = (c->seq_k - 1) / w + 1;
    return c->layout == RA_LAYOUT_STRIPED ? add_striped(b, class_index, first, end)
                                          : add_consecutive(b, class_index, first, end);
}

/* ------------------------------------------------------------------------------------------------------------- all */

static int compare_positions(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* Replicated queries: of the keys only those of this rank, and all queries, as one run, or, beside striped keys, as one run for
 * each stripe, so that queries and keys have the same step. */
static void make_replicated(builder *b) {
    const ra_config *c = b->config;
    for (int64_t i = 0; i < b->key_run_count; i++)
        if (b->key_runs[i].rank != b->rank) b->key_runs[i].span.count = 0;
    b->query_run_count = c->layout == RA_LAYOUT_STRIPED ? b->ranks : 1;
    ra_runs(RA_LAYOUT_STRIPED, (int)b->query_run_count, c->seq_q, ra_query_shift(c), b->query_runs);
    for (int64_t i = 0; i < b->query_run_count; i++) {
        b->query_runs[i].rank = b->rank;
        b->query_runs[i].row = i;
        b->query_runs[i].row_step = b->query_run_count;
    }
}

static bool prepare(builder *b) {
    const ra_config *c = b->config;
    b->key_run_count = b->query_run_count = ra_run_count(c->layout, b->ranks);
    b->key_runs = ra_arena_take(b->arena, b->key_run_count, sizeof(ra_run));
    b->query_runs = ra_arena_take(b->arena, b->query_run_count, sizeof(ra_run));
    b->sources = ra_arena_take(b->arena, b->key_run_count, sizeof(ra_part));
    b->targets = ra_arena_take(b->arena, b->query_run_count, sizeof(ra_part));
    b->cuts = ra_arena_take(b->arena, b->key_run_count + b->query_run_count + 2, sizeof(int64_t));
    b->out->classes = ra_arena_take(b->arena, ra_class_bound(c), sizeof(ra_class));
    if (b->arena->failed) return false;
    ra_runs(c->layout, b->ranks, c->seq_k, 0, b->key_runs);
    ra_runs(c->layout, b->ranks, c->seq_q, ra_query_shift(c), b->query_runs);
    if (c->placement == RA_REPLICATED) make_replicated(b);
    for (int64_t i = 0; i < b->key_run_count; i++) b->cuts[b->cut_count++] = b->key_runs[i].span.start;
    for (int64_t i = 0; i < b->query_run_count; i++) b->cuts[b->cut_count++] = b->query_runs[i].span.start;
    b->cuts[b->cut_count++] = c->seq_k;
    qsort(b->cuts, (size_t)b->cut_count, sizeof(int64_t), compare_positions);
    b->out->class_count = ra_classes(c, b->out->classes);
    b->colours = c->layout == RA_LAYOUT_STRIPED ? b->ranks + 2 : 2;
    b->out->rounds = b->colours * (c->combine == RA_COMBINE_MIX ? c->branches : 1);
    return true;
}

static bool list_by_rank(ra_arena *arena, int ranks, ra_rings *rings) {
    int64_t total = 0;
    for (int64_t i = 0; i < rings->count; i++) total += rings->rings[i].member_count;
    rings->first_of_rank = ra_arena_take(arena, (int64_t)ranks + 2, sizeof(int64_t));
    rings->by_rank = ra_arena_take(arena, total, sizeof(int32_t));
    if (arena->failed) return false;
    int64_t *start = rings->first_of_rank + 1; /* filling moves every start to the next one */
    for (int64_t i = 0; i < rings->count; i++)
        for (int64_t m = 0; m < rings->rings[i].member_count; m++) start[rings->rings[i].members[m] + 1]++;
    for (int rank = 0; rank < ranks; rank++) start[rank + 1] += start[rank];
    for (int64_t i = 0; i < rings->count; i++)
        for (int64_t m = 0; m < rings->rings[i].member_count; m++)
            rings->by_rank[start[rings->rings[i].members[m]]++] = (int32_t)i;
    return true;
}

ra_status ra_rings_create(ra_arena *arena, const ra_config *config, int rank, int ranks, ra_rings *rings) {
    *rings = (ra_rings){0};
    builder b = {.arena = arena, .config = config, .rank = rank, .ranks = ranks, .out = rings};
    bool ok = prepare(&b);
    for (int64_t i = 0; ok && i < rings->class_count; i++) ok = add_class(&b, (int32_t)i);
    ok = ok && list_by_rank(arena, ranks, rings);
    return ok ? RA_OK : ra_fail(RA_NOMEM, "no memory for the plan's rings");
}
