/* Forward attention by AMX: a strip of 32 query rows walks over the keys, 32 of them a step.
 *
 * Needs   LIMBS, element and FAMILY (amx.inc.h).
 * Gives   FAMILY(forward) and FAMILY(forward_scratch).
 *
 *       tile unit     S(0) | S(1)      | S(2) PV..  | S(3) PV..  |        S = Q across(K),   PV: acc += P along(V)
 *       vector unit        | P = 2^S(0)| P = 2^S(1) | P = 2^S(2) |
 *
 * In each step the tile unit computes the scores of the next step and adds the values of the block before to 32 columns of acc,
 * while the vector unit turns the scores of this step into weights. A block has as many keys as acc has columns (the head
 * dimension), so that every step has one such piece to add, and all of a step's data stays in L1: only K and V stream past.
 *
 * Weights are powers of two: P = 2^(x - base), x = scale * log2(e) * q.k, with an integer base for every row. It is ROOM above
 * the first step's maximum, and stays until two weights of a step add up to 2: then they are computed again with a new base,
 * and the row's sums are scaled by a power of two, which is exact.
 */
#include "device/cpu/amx/amx_products.inc.h"
#include "device/cpu/panels.h"

enum {
    STRIP = SQUARE,
    SUMMED = 131072, /* elements of acc of a tile at most (times `trade`) */
};
#ifndef QUERIES /* a test sets smaller ones */
enum {
    QUERIES = 2048,                       /* rows of a tile at most */
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

#define ROOM 8          /* 2^-ROOM is the weight of a maximum: not so small that products with small values are subnormal */
#define HEAVY (1 << 30) /* the bit that floats have from 2 on */

typedef struct forward_space {
    _Alignas(64) float s[2][4 * SUMS];                   /* scores of this step and of the next */
    _Alignas(64) uint16_t p[2][MAX_DIM / SQUARE * STEP]; /* weights of this block and of the one before: A's tiles */
    _Alignas(64) float partial[4 * SUMS];                   /* debt */
    vec sums[2][STRIP];                                  /* of the weights of a strip's rows, before a step and after it */
    _Alignas(64) uint16_t rows[LIMBS * SQUARE * MAX_DIM];
    const uint16_t *k, *v;   /* the packed keys of a chunk */
    uint16_t *own_k, *own_v; /* of a tile that packs for itself alone; this and what follows: forward_arrays */
    uint16_t *q;
    float *acc;          /* tiles of C: [strip][32 columns] */
    vec *all_sums;       /* of the weights of each row, by lanes: reduced once, at the end */
    float base[QUERIES]; /* -inf: none yet */
    double l[QUERIES];   /* what the sums do not hold: the state that came in */
    int64_t begin[QUERIES], end[QUERIES];
    float shrink[STRIP];         /* what acc is to be multiplied by when the block is done */
    bool fresh[QUERIES / STRIP]; /* acc of a strip holds nothing yet */
} forward_space;

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

/* Where columns [column, column + 16) of row r of acc lie. */
INLINE float *acc_at(const forward_space *f, int64_t r, int64_t column, int64_t width) {
    return f->acc + r / STRIP * STRIP * width + column / 16 * 2 * SUMS + r % STRIP * 16;
}

/* ---------------------------------------------------------------------------------------------------------- strips */

/* What is prefetched while strips walk over a chunk: keys of the next one, and rows that are soon read, or written. These lie
 * apart, and often no cache has them. */
typedef struct ahead {
    const ra_forward_step *step;
    const ra_slab *slab;
    const uint16_t *k, *v;    /* of the slab's key 0, if they are packed; NULL: they are fetched from where they lie */
    int64_t next, end, share; /* the next key to prefetch, the end, and how many per step */
    int64_t row, last;        /* the next row of the slab, and the end */
    bool load;                /* they are loaded: from q, too */
} ahead;

/* A strip on its way through the packed keys. */
typedef struct strip {
    forward_space *f;
    int64_t row;   /* first */
    int64_t depth; /* of the head dimension, in squares: also the steps of a block */
    int64_t first; /* key of packed column 0 */
    int64_t from;  /* packed square of step 0: a multiple of depth */
    int64_t steps;
    int64_t begin, end; /* packed columns that every row meets */
    float scale;        /* of scores, to base 2 */
    bool shrunk;        /* some row's shrink is not 1 */
    bool fresh;         /* forward_space */
    debt owed;
    ahead *ahead;
} strip;

/* Weighing of a step: row i has its scores of 16 keys at scores + 16 i, of the next 16 two tiles on, and its weights at weights
 * + 32 i. */
typedef struct forward_work {
    strip *t;
    int64_t step;
    const float *scores, *base;
    uint16_t *weights;
    vec *before, *after; /* sums of the weights of each row, without this step and with it */
    vec scale;
    vec left;  /* weights of the row that is half done */
    ivec seen; /* bits of all sums of two weights */
} forward_work;

/* Which of the keys of the step row i meets: a bit each. */
INLINE uint32_t met_of(const forward_work *w, int64_t i) {
    const strip *t = w->t;
    const int64_t r = t->row + i, column = t->first + (t->from + w->step) * SQUARE;
    const int64_t begin = ra_max(0, ra_min(SQUARE, t->f->begin[r] - column)),
                  end = ra_max(0, ra_min(SQUARE, t->f->end[r] - column));
    return (uint32_t)((UINT64_C(1) << end) - 1) & ~(uint32_t)((UINT64_C(1) << begin) - 1);
}

/* The base of a row of which these are the highest scores so far, by lanes. */
INLINE float base_above(const strip *t, vec scores) { return rintf(VEC_HIGHEST(scores) * t->scale) + ROOM; }

/* A weight of row i is too heavy, or there is no base yet: takes a new base, and rescales all that depends on the old one. acc
 * is scaled later, since it still lacks the block before. */
static void renew_base(const forward_work *w, int64_t i) {
    strip *t = w->t;
    forward_space *f = t->f;
    const int64_t r = t->row + i;
    const float *s = w->scores + i * 16;
    const uint32_t met = met_of(w, i);
    const float old = f->base[r],
                base = base_above(t, VEC_MAX(VEC_ONLY(met, load(s)), VEC_ONLY(met >> 16, load(s + 2 * SUMS))));
    if (!(base > old)) return;
    f->base[r] = base;
    if (old == -INFINITY) return; /* nothing depends on it */
    const vec shrink = VEC_SCALE(splat(1), splat(old - base));
    f->shrink[i] *= shrink[0];
    w->before[i] *= shrink;
    f->l[r] *= (double)shrink[0];
    for (int64_t earlier = w->step % t->depth; earlier > 0; earlier--) {
        for (int64_t limb = 0; limb < LIMBS; limb++) {
            uint16_t *p = w->weights - earlier * STEP + limb * 2 * TILE + i * 32;
            for (int c = 0; c < SQUARE; c++) p[c] = ra_f32_to_bf16(ra_bf16_to_f32(p[c]) * shrink[0]);
        }
    }
    t->shrunk = true;
}

/* The first bases, where every row meets all keys of step 0. Its scores are there. */
static void first_bases(strip *t) {
    float *base = t->f->base + t->row;
    for (int64_t i = 0; i < STRIP; i++) {
        const float *s = t->f->s[0] + i * 16;
        if (base[i] == -INFINITY) base[i] = base_above(t, VEC_MAX(load(s), load(s + 2 * SUMS)));
    }
}

/* Weights of row i, of the keys that it meets; returns the sums of two. */
INLINE vec weigh_met(const forward_work *w, int64_t i) {
    const float *s = w->scores + i * 16;
    const vec base = splat(w->base[i]);
    const uint32_t met = met_of(w, i);
    const vec p0 = power_of_two(VEC_ONLY(met, load(s) * w->scale - base)),
              p1 = power_of_two(VEC_ONLY(met >> 16, load(s + 2 * SUMS) * w->scale - base));
    store_pairs(w->weights + i * 32, limbs_of(p0), limbs_of(p1));
    return p0 + p1;
}

/* Is a weight of a row, by its first limb, 1 or more? If not, no sum of two is heavy. (A NaN may pass: then the row's sum is
 * NaN, too, and the strip is given up.) */
INLINE bool heavy_row(const uint16_t *weights) {
    return VEC_ANY_HAS((ivec)(*(const halves_any *)weights + (uint16_t)0x0080), (int32_t)0xc000c000);
}

/* The rows of a step that need care: for their masks, or for new bases. */
static __attribute__((noinline, cold)) void weigh_carefully(const forward_work w, const bool weighed) {
    for (int64_t i = 0; i < STRIP; i++) {
        if (weighed && !heavy_row(w.weights + i * 32)) continue;
        vec sum = weigh_met(&w, i);
        if (VEC_ANY_HAS(sum, HEAVY)) {
            renew_base(&w, i);
            sum = weigh_met(&w, i);
        }
        w.after[i] = w.before[i] + sum;
    }
}

/* Half a row of a step whose rows meet all of its keys. */
enum { FORWARD_UNITS = 2 * STRIP };
INLINE void weigh_half(forward_work *w, int64_t unit) {
    const int64_t i = unit / 2;
    const vec p = power_of_two(load(w->scores + i * 16 + unit % 2 * 2 * SUMS) * w->scale - splat(w->base[i]));
    if (unit % 2 == 0) {
        w->left = p;
        return;
    }
    const vec sum = w->left + p;
    store_pairs(w->weights + i * 32, limbs_of(w->left), limbs_of(p));
    w->after[i] = w->before[i] + sum;
    w->seen |= (ivec)sum;
}

DEFINE_PRODUCT_WITH_WORK(multiply_and_weigh, TILE_LOAD, forward_work, weigh_half)
DEFINE_PRODUCT(multiply, TILE_LOAD)

/* The operands of a step's scores, and of a piece of a block's values, `deep` steps of it. */
#define SCORES_OF(t, step, depth)                                                                                              \
    (t)->f->s[(step)&1], (t)->f->q + (t)->row / SQUARE *(depth)*STEP, (t)->f->k + ((t)->from + (step)) * (depth)*STEP, STEP,   \
        depth
#define VALUES_OF(t, block, piece, depth, deep)                                                                                \
    (t)->f->acc + (t)->row *SQUARE *(depth) + (piece)*4 * SUMS, (t)->f->p[(block)&1],                                          \
        (t)->f->v + ((t)->from + (block) * (depth) + (piece)) * (depth)*STEP, STEP, deep

/* Scales the rows of acc that wait for it, now that no block is missing. (What a fresh acc holds will be overwritten.) */
static void shrink_rows(strip *t) {
    const int64_t width = t->depth * SQUARE;
    for (int64_t i = 0; i < STRIP; i++) {
        for (int64_t d = 0; d < width && t->f->shrink[i] != 1; d += 16) {
            float *acc = acc_at(t->f, t->row + i, d, width);
            store(acc, load(acc) * splat(t->f->shrink[i]));
        }
        t->f->shrink[i] = 1;
    }
    t->shrunk = false;
}

INLINE void fetch_bytes(const void *from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)from + i, 0, 2);
}

/* The state of row r, and if it is to be loaded the row of q. */
static __attribute__((noinline)) void fetch_query(const ra_forward_step *step, const ra_slab *slab, int64_t r, bool load) {
    const int64_t dim = slab->problem->head_dim;
    if (load) fetch_row(&step->q, ra_slab_at(slab, &step->q, r), dim);
    if (step->single) return;
    const ra_sums acc = ra_sums_of_state(step, slab, r);
    if (acc.whole) {
        fetch_bytes(acc.whole, dim * (int64_t)sizeof(float));
    } else {
        fetch_bytes(acc.upper, dim * (int64_t)sizeof *acc.upper);
        fetch_bytes(acc.lower, dim * (int64_t)sizeof *acc.lower);
    }
    __builtin_prefetch((const float *)step->m.data + ra_slab_at(slab, &step->m, r), 0, 2);
    __builtin_prefetch((const float *)step->l.data + ra_slab_at(slab, &step->l, r), 0, 2);
}

/* Every step prefetches some of the next chunk's keys, some rows, and its share of the next strip's acc. */
INLINE void fetch_ahead(strip *t, int64_t step, int64_t depth) {
    ahead *a = t->ahead;
    const int64_t end = ra_min(a->next + a->share, a->end), size = LIMBS * depth * SQUARE;
    if (!a->k) fetch_keys(a->slab, a->next, end);
    for (int64_t i = a->next * size; a->k && i < end * size; i += 32) {
        __builtin_prefetch(a->k + i, 0, 2);
        __builtin_prefetch(a->v + i, 0, 2);
    }
    a->next = end;
    const int64_t last = ra_min(a->row + (t->steps < STRIP ? ra_ceil_div(STRIP, t->steps) : 1), a->last);
    for (; a->row < last; a->row++) fetch_query(a->step, a->slab, a->row, a->load);
    const int64_t sums = STRIP * SQUARE * depth, share = ra_round_up(ra_ceil_div(sums, t->steps), 16);
    const float *next = t->f->acc + (t->row + STRIP) * SQUARE * depth;
    for (int64_t i = step * share; i < ra_min((step + 1) * share, sums); i += 16) __builtin_prefetch(next + i, 1, 2);
}

INLINE void walk(strip *t, const int64_t depth) {
    forward_space *f = t->f;
    multiply(&t->owed, SCORES_OF(t, 0, depth), false, NO_WORK);
    settle(&t->owed);
    if (t->begin <= t->from * SQUARE && t->end >= (t->from + 1) * SQUARE) first_bases(t);
    memcpy(f->sums[0], f->all_sums + t->row, sizeof f->sums[0]);
    for (int64_t step = 0; step < t->steps; step++) {
        const int64_t block = step / depth, piece = step % depth, column = (t->from + step) * SQUARE;
        const bool scores = step + 1 < t->steps, values = block > 0, add = block > 1 || !t->fresh;
        const bool plain = t->begin <= column && t->end >= column + SQUARE && (scores || values);
        forward_work work = {.t = t,
                             .step = step,
                             .scores = f->s[step & 1],
                             .base = f->base + t->row,
                             .weights = f->p[block & 1] + piece * STEP,
                             .before = f->sums[step & 1],
                             .after = f->sums[~step & 1],
                             .scale = splat(t->scale)};
        fetch_ahead(t, step, depth);
        if (plain && scores && values) {
            multiply_and_weigh(&t->owed, SCORES_OF(t, step + 1, depth), false, &work, 0, FORWARD_UNITS / 2);
            multiply_and_weigh_adding(&t->owed, VALUES_OF(t, block - 1, piece, depth, depth), add, &work, FORWARD_UNITS / 2,
                               FORWARD_UNITS);
        } else if (plain && scores) {
            multiply_and_weigh(&t->owed, SCORES_OF(t, step + 1, depth), false, &work, 0, FORWARD_UNITS);
        } else if (plain) {
            multiply_and_weigh_adding(&t->owed, VALUES_OF(t, block - 1, piece, depth, depth), add, &work, 0, FORWARD_UNITS);
        } else {
            if (scores) multiply(&t->owed, SCORES_OF(t, step + 1, depth), false, NO_WORK);
            if (values) multiply(&t->owed, VALUES_OF(t, block - 1, piece, depth, depth), add, NO_WORK);
        }
        if (!values) settle(&t->owed);
        if (!plain || VEC_ANY_HAS(work.seen, HEAVY)) weigh_carefully(work, plain);
        if (piece + 1 < depth && scores) continue;
        for (int64_t rest = piece + 1; values && rest < depth; rest++)
            multiply(&t->owed, VALUES_OF(t, block - 1, rest, depth, depth), add, NO_WORK);
        if (t->shrunk) {
            settle(&t->owed);
            shrink_rows(t);
        }
    }
    const int64_t block = (t->steps - 1) / depth;
    for (int64_t piece = 0; piece < depth; piece++)
        multiply(&t->owed, VALUES_OF(t, block, piece, depth, t->steps - block * depth), block > 0 || !t->fresh, NO_WORK);
    settle(&t->owed);
    memcpy(f->all_sums + t->row, f->sums[t->steps & 1], sizeof f->sums[0]);
}

/* The common head dimensions have code of their own, in functions of their own: compilers take long over large ones. */
static __attribute__((noinline)) void walk_1(strip *t) { walk(t, 1); }
static __attribute__((noinline)) void walk_2(strip *t) { walk(t, 2); }
static __attribute__((noinline)) void walk_4(strip *t) { walk(t, 4); }
static __attribute__((noinline)) void walk_any(strip *t) { walk(t, t->depth); }

/* Rows [row, row + STRIP) against the packed keys [first, last). */
static void forward_strip(forward_space *f, const ra_problem *problem, int64_t row, int64_t first, int64_t last, ahead *a) {
    const int64_t depth = padded(problem->head_dim) / SQUARE;
    strip t = {.f = f,
               .owed = {.partial = f->partial},
               .row = row,
               .depth = depth,
               .first = first,
               .end = last - first,
               .scale = (float)(problem->scale * LOG2_E),
               .fresh = f->fresh[row / STRIP],
               .ahead = a};
    int64_t low = last, high = first;
    for (int64_t r = row; r < row + STRIP; r++) {
        t.begin = ra_max(t.begin, f->begin[r] - first);
        t.end = ra_min(t.end, f->end[r] - first);
        f->shrink[r - row] = 1;
        if (f->begin[r] >= f->end[r]) continue;
        low = ra_min(low, f->begin[r]);
        high = ra_max(high, f->end[r]);
    }
    low = ra_max(low, first) - first;
    high = ra_min(high, last) - first;
    if (low >= high) return;
    f->fresh[row / STRIP] = false;
    t.from = low / (depth * SQUARE) * depth;
    t.steps = ra_ceil_div(high, SQUARE) - t.from;
    switch (UNROLL_STEPS ? depth : 0) {
    case 1: walk_1(&t); break;
    case 2: walk_2(&t); break;
    case 4: walk_4(&t); break;
    default: walk_any(&t);
    }
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
