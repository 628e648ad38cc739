/* Forward attention by AMX: tiles of query rows, whose strips (amx_strip.inc.h) walk over chunks of packed keys.
 *
 * Needs   LIMBS, element and FAMILY (amx.inc.h).
 * Gives   FAMILY(forward) and FAMILY(forward_scratch).
 */
#include "device/cpu/amx/amx_strip.inc.h"
#include "device/cpu/panels.h"

enum { SUMMED = 131072 /* elements of acc of a tile at most (times `trade`) */ };
#ifndef CHUNK /* a test sets smaller ones */
enum {
    CHUNK = LIMBS == 1 ? 262144 : 65536, /* elements of K (and of V) that strips walk over in turn, in L2 */
    PANEL = 32768,    /* elements of K that a tile packs for others at a time: few, so that nobody waits long */
    SHARED = 1 << 20, /* elements of K of a slab at most that are packed once for all tiles: they stay in L3 */
};
#endif

/* Are there too many keys to pack them once for all tiles? Then each tile packs them for its own rows. The more rows it has,
 * the more one packing serves: with bf16 a tile has twice as many, and a chunk half as many keys, so both fit the cache. */
INLINE bool packs_alone(const ra_problem *problem) { return problem->keys > SHARED / padded(problem->head_dim); }
INLINE int64_t trade(const ra_problem *problem) { return LIMBS == 1 && packs_alone(problem) ? 2 : 1; }

/* Rows of a tile at most, and keys of a chunk: whole blocks. */
INLINE int64_t most_rows(const ra_problem *problem) {
    return ra_min(QUERIES, SUMMED * trade(problem) / padded(problem->head_dim));
}
INLINE int64_t chunk_keys(const ra_problem *problem) {
    const int64_t width = padded(problem->head_dim);
    return ra_max(1, CHUNK / trade(problem) / width / width) * width;
}

/* Lays the arrays out behind the space itself; with base NULL only tells how long all of it is. */
static int64_t forward_arrays(const ra_problem *problem, char *base, forward_space *f) {
    const int64_t width = padded(problem->head_dim), rows = ra_cpu_tile_rows(problem, STRIP, most_rows(problem));
    const int64_t keys = known_keys(problem, width, chunk_keys(problem));
    char *at = base;
    ra_carve(&at, (int64_t)sizeof *f);
    f->own_k = ra_carve(&at, keys * width * LIMBS * 2);
    f->own_v = ra_carve(&at, keys * width * LIMBS * 2);
    f->q = ra_carve(&at, rows * width * LIMBS * 2);
    f->acc = ra_carve(&at, rows * width * (int64_t)sizeof(float));
    f->all_sums = ra_carve(&at, rows * (int64_t)sizeof(vec));
    return at - base;
}

/* ------------------------------------------------------------------------------------------------------------ keys */

/* What tiles of a slab share (panels.h), in the scratch before the workers' own:
 *
 *     slot 1 | slot 0 | worker 0 | worker 1          slot: marks | K | V
 *
 * Slabs of one tile need none. Others have at least two tiles, dealt in order: workers that keep in step are in workers / 2 + 1
 * slabs at most. Hence the number of slots. */
typedef struct slots {
    int64_t count;
    int64_t keys, panels; /* of each */
    int64_t bytes;
} slots;

/* Keys of a panel. */
INLINE int64_t panel_keys(int64_t width) { return ra_max(1, PANEL / width / width) * width; }

static slots slots_of(const ra_problem *problem, int64_t workers) {
    const int64_t width = padded(problem->head_dim);
    if (problem->keys <= 0 || packs_alone(problem) || ra_sat_mul(problem->rows_q, problem->heads / problem->kv_heads) <= STRIP)
        return (slots){0};
    slots s = {.count = workers / 2 + 1, .keys = ra_ceil_div(problem->keys, width) * width};
    s.panels = ra_ceil_div(s.keys, panel_keys(width));
    s.bytes = ra_round_up(ra_slot_bytes(s.panels), 64) + 2 * s.keys * width * LIMBS * 2;
    return s;
}

/* How a tile gets its packed keys. */
typedef struct packing {
    forward_space *f;
    const ra_slab *slab;
    int64_t low, high; /* the keys that rows of the slab meet: the others are packed as zeros, by whichever tile */
    ra_slot *slot;     /* NULL: the tile packs for itself, chunk by chunk */
    uint16_t *k, *v;   /* the slot's */
} packing;

static packing packing_of(forward_space *f, const ra_forward_step *step, const ra_slab *slab, bool alone) {
    const slots s = slots_of(slab->problem, ra_workers_count(step->workers));
    packing p = {.f = f, .slab = slab};
    ra_slab_hull(slab, 0, ra_slab_rows(slab), &p.low, &p.high);
    if (alone || s.count == 0 || slab->k.count > s.keys) return p;
    char *at = (char *)step->scratch - (slab->number % s.count + 1) * s.bytes;
    ra_slot *slot = ra_carve(&at, ra_slot_bytes(s.panels));
    if (!ra_slot_enter(slot, slab)) return p;
    p.slot = slot;
    p.k = ra_carve(&at, s.keys * padded(slab->problem->head_dim) * LIMBS * 2);
    p.v = (uint16_t *)(void *)at;
    return p;
}

/* Keys [from, end), which begin a block, to k and v. K: [keys/32] squares. V: [blocks][32 columns][steps of the block], in
 * the order in which they are read. */
static void pack_keys(const packing *p, uint16_t *k, uint16_t *v, int64_t from, int64_t end) {
    const ra_slab *slab = p->slab;
    const int64_t width = padded(slab->problem->head_dim);
    for (int64_t c = from; c < end; c += SQUARE) {
        const int64_t block = (c - from) / width * width, step = (c - from - block) / SQUARE;
        fetch_keys(slab, c + SQUARE, ra_min(c + 2 * SQUARE, end));
        pack_across(k + (c - from) * width * LIMBS, take_keys(p->f->rows, slab, &slab->item->k_view, c, p->low, p->high),
                    width);
        pack_along(v + block * width * LIMBS + step * STEP,
                   take_keys(p->f->rows, slab, &slab->item->v_view, c, p->low, p->high), width, width / SQUARE * STEP);
    }
}

static void pack_panel(void *arg, int64_t panel) {
    const packing *p = arg;
    const int64_t width = padded(p->slab->problem->head_dim), size = LIMBS * width, keys = panel_keys(width);
    const int64_t from = ra_max(panel * keys, p->low / width * width), end = ra_min((panel + 1) * keys, p->high);
    pack_keys(p, p->k + from * size, p->v + from * size, from, end);
}

/* Points f->k and f->v at key `first`, and packs keys [from, last) if nobody else has. `end`: of the tile's keys. */
static void bring_chunk(packing *p, int64_t first, int64_t from, int64_t last, int64_t end) {
    forward_space *f = p->f;
    const int64_t width = padded(p->slab->problem->head_dim), size = LIMBS * width, keys = panel_keys(width);
    if (p->slot) {
        ra_panels_take(p->slot, p->slab, from / keys, ra_ceil_div(last, keys), ra_ceil_div(end, keys), pack_panel, p);
        f->k = p->k + first * size;
        f->v = p->v + first * size;
        return;
    }
    f->k = f->own_k;
    f->v = f->own_v;
    pack_keys(p, f->own_k + (from - first) * size, f->own_v + (from - first) * size, from, last);
}

/* Keys [next, end) are those of the next chunk, and the tile has this many rows. */
static ahead ahead_of(const ra_forward_step *step, const packing *p, int64_t next, int64_t end, int64_t rows) {
    const int64_t keys = panel_keys(padded(p->slab->problem->head_dim));
    ahead a = {.step = step, .slab = p->slab, .next = next, .end = end, .share = ra_ceil_div(STRIP * SQUARE, rows)};
    int64_t panel = next / keys;
    while (p->slot && panel * keys < end && ra_panel_packed(p->slot, p->slab, panel)) panel++;
    if (panel * keys >= end) a.k = p->k, a.v = p->v;
    return a;
}

/* ----------------------------------------------------------------------------------------------------------- tiles */

/* Row i of the tile, of which a state came in: its maximum becomes an integer to base 2. False: it is empty. */
static bool load_state(forward_space *f, const ra_forward_step *step, const ra_slab *slab, int64_t i, int64_t r) {
    const int64_t dim = slab->problem->head_dim, width = padded(dim);
    const float top = ((const float *)step->m.data)[ra_slab_at(slab, &step->m, r)],
                l = ((const float *)step->l.data)[ra_slab_at(slab, &step->l, r)];
    if (ra_state_empty((double)top, (double)l)) return false;
    const double m = (double)top * LOG2_E, base = rint(m), off = m - base;
    /* 1 for a state that this kernel wrote: no step adds an error of its own */
    const float factor = fabs(off) < 1e-6 * fmax(1, fabs(m)) ? 1 : (float)exp2(off);
    float acc[MAX_DIM];
    ra_sums_load(acc, ra_sums_of_state(step, slab, r), dim);
    f->base[i] = (float)base;
    f->l[i] = (double)l * (double)factor;
    int64_t d = 0;
    for (; d + 16 <= dim; d += 16) store(acc_at(f, i, d, width), load(acc + d) * splat(factor));
    for (; d < dim; d++) acc_at(f, i, d / 16 * 16, width)[d % 16] = acc[d] * factor;
    return true;
}

/* The states of the rows of a strip that begins at row i of the tile. Where all are empty its acc is fresh. */
static void load_states(forward_space *f, const ra_forward_step *step, const ra_slab *slab, int64_t begin, int64_t i,
                        int64_t rows) {
    const int64_t dim = slab->problem->head_dim, width = padded(dim);
    uint32_t loaded = 0;
    for (int64_t n = 0; n < rows && !step->single; n++)
        loaded |= (uint32_t)load_state(f, step, slab, i + n, begin + i + n) << n;
    f->fresh[i / STRIP] = !loaded;
    if (!loaded || (loaded == UINT32_MAX && dim == width)) return;
    for (int64_t n = 0; n < STRIP; n++) /* what no state was loaded to */
        for (int64_t d = loaded >> n & 1 ? dim : 0; d < width; d++) acc_at(f, i + n, d / 16 * 16, width)[d % 16] = 0;
}

/* The strip that begins at row `row` of the tile [begin, end). */
static void load_strip(forward_space *f, const ra_forward_step *step, const ra_slab *slab, int64_t begin, int64_t end,
                       int64_t row) {
    const int64_t first = begin + row, rows = ra_min(STRIP, end - first);
    int64_t low, high;
    const bool alike = ra_slab_alike(slab, first, first + rows, &low, &high);
    for (int64_t i = row; i < row + STRIP; i++) {
        f->all_sums[i] = splat(0);
        f->l[i] = 0;
        f->base[i] = -INFINITY;
        f->begin[i] = low;
        f->end[i] = high;
        /* Rows that fill up the last strip meet what the last row meets; their results go nowhere. */
        if (!alike) ra_slab_interval(slab, ra_min(begin + i, end - 1), &f->begin[i], &f->end[i]);
    }
    load_states(f, step, slab, begin, row, rows);
    pack_rows(f->q + row * padded(slab->problem->head_dim) * LIMBS, take_queries(f->rows, slab, &step->q, first, end),
              padded(slab->problem->head_dim));
}

/* Writes rows [row, row + rows) of the tile that begins at `begin`. False, and nothing written, if they are not finite, or have
 * vast scores. */
static bool store_rows(forward_space *f, const ra_forward_step *step, const ra_slab *slab, int64_t begin, int64_t row,
                       int64_t rows) {
    const int64_t dim = slab->problem->head_dim, width = padded(dim);
    if (f->fresh[row / STRIP]) memset(f->acc + row * width, 0, (size_t)(STRIP * width) * sizeof(float));
    /* Lines that held the halves of a state are in the caches. */
    const bool streamed = !step->halves && results_streamed(slab->problem, slab->q.row_step * step->out.row);
    bool finite = all_finite(f->acc + row * width, STRIP * width);
    for (int64_t i = row; i < row + rows; i++) {
        f->l[i] += (double)sum_of(f->all_sums[i]);
        finite &= isfinite(f->l[i]) && f->base[i] < INFINITY && !ra_vast(f->base[i]);
        finite &= f->base[i] != -INFINITY || f->begin[i] >= f->end[i]; /* a finite score may be infinite to base 2 */
    }
    for (int64_t i = row; finite && i < row + rows; i++) {
        const int64_t r = begin + i;
        const bool empty = f->l[i] == 0;
        const double m = (double)f->base[i] * LN_2;
        const float factor = !step->closes ? 1 : empty ? 0 : (float)(1 / f->l[i]);
        float line[MAX_DIM];
        for (int64_t d = 0; d < width; d += 16) store(line + d, load(acc_at(f, i, d, width)) * splat(factor));
        if (!step->closes) {
            ra_sums_store(ra_sums_of_state(step, slab, r), line, dim);
            ((float *)step->m.data)[ra_slab_at(slab, &step->m, r)] = empty ? -INFINITY : (float)m;
            ((float *)step->l.data)[ra_slab_at(slab, &step->l, r)] = (float)f->l[i];
            continue;
        }
        element *out = (element *)step->out.data + ra_slab_at(slab, &step->out, r);
        int64_t d = 0;
        for (; d + 32 <= dim; d += 32) put_result(out + d, load(line + d), load(line + d + 16), streamed);
        for (; d < dim; d++) out[d] = element_of(line[d]);
        if (step->lse.data)
            ((float *)step->lse.data)[ra_slab_at(slab, &step->lse, r)] = empty ? -INFINITY : (float)(m + log(f->l[i]));
    }
    return finite;
}

/* A strip is loaded before it walks over the first chunk, and stored behind the last: so the rows of a state that it reads and
 * writes are fetched during the walk before. */
static void forward_tile(const ra_forward_step *step, const ra_slab *slab, int64_t begin, int64_t end, void *scratch) {
    forward_space *f = scratch;
    const ra_problem *problem = slab->problem;
    const int64_t rows = end - begin, width = padded(problem->head_dim), chunk = chunk_keys(problem);
    forward_arrays(problem, scratch, f);
    for (int64_t r = begin; r < ra_min(begin + STRIP, end); r++) fetch_query(step, slab, r, true);
    int64_t low, high;
    ra_slab_hull(slab, begin, end, &low, &high);
    if (low >= high) low = high = 0; /* no key, and one empty chunk */
    packing p = packing_of(f, step, slab, rows == ra_slab_rows(slab));
    uint64_t bad = 0; /* strips, not tiles, are given up: which rows a tile holds depends on the number of workers */
    TILES_ON();
    /* Blocks begin at multiples of their length, whatever the tile: so a row's sums do not depend on the rows beside it. */
    const int64_t start = low / chunk * chunk;
    for (int64_t first = start; first == start || first < high; first += chunk) {
        const int64_t last = ra_min(first + chunk, high);
        const bool opens = first == start, closes = last == high;
        bring_chunk(&p, first, ra_max(first, low / width * width), last, high);
        ahead a = ahead_of(step, &p, last, ra_min(last + chunk, high), rows);
        for (int64_t row = 0; row < rows; row += STRIP) {
            if (opens) load_strip(f, step, slab, begin, end, row);
            a.load = opens; /* the next strip; or this one is to be stored */
            a.row = begin + row + (opens ? STRIP : 0);
            a.last = opens || closes ? ra_min(a.row + STRIP, end) : 0;
            forward_strip(f, problem, row, first, last, &a);
            if (closes && !store_rows(f, step, slab, begin, row, ra_min(STRIP, rows - row)))
                bad |= UINT64_C(1) << row / STRIP;
        }
    }
    TILES_OFF();
    if (p.slot) ra_slot_leave(p.slot);
    RESULTS_END();
    for (int64_t row = 0; bad && row < rows; row += STRIP)
        if (bad >> row / STRIP & 1)
            ra_scalar_forward_tile(step, slab, begin + row, begin + ra_min(row + STRIP, rows), scratch);
}

/* Bytes of a worker. */
static int64_t own_scratch(const ra_problem *problem) {
    forward_space space;
    return ra_max(forward_arrays(problem, NULL, &space), ra_scalar_forward_scratch(problem, 1));
}

int64_t FAMILY(forward_scratch)(const ra_problem *problem, int workers) {
    if (left_to_avx512(problem)) return ra_avx512_forward_scratch(problem, workers);
    const slots s = slots_of(problem, workers);
    return workers * own_scratch(problem) + s.count * s.bytes;
}

ra_status FAMILY(forward)(const ra_forward_step *step) {
    const ra_problem *problem = step->problem;
    if (left_to_avx512(problem)) return ra_avx512_forward(step);
    const slots s = slots_of(problem, ra_workers_count(step->workers));
    char *at = step->scratch;
    for (int64_t i = 0; i < s.count; i++, at += s.bytes) ra_slot_clear((ra_slot *)(void *)at, s.panels);
    ra_forward_step behind = *step;
    behind.scratch = at;
    /* One chunk of keys, shared and in the cache: larger tiles would not make it cheaper. */
    const bool light = s.count > 0 && problem->keys <= chunk_keys(problem);
    const ra_forward_tiles tiles = {
        .tile = forward_tile, .rows = most_rows(problem), .unit = STRIP, .scratch = own_scratch(problem), .light = light};
    return ra_cpu_forward(&behind, &tiles);
}
