/* Forward attention by AMX: a strip of 32 query rows walks over packed keys, 32 of them a step.
 *
 * Needs   LIMBS and element (amx.inc.h).
 * Gives   forward_strip, and the space that it works in.
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

enum { STRIP = SQUARE };
#ifndef QUERIES /* a test sets a smaller one */
enum { QUERIES = 2048 /* rows of a tile at most */ };
#endif

#define ROOM 8          /* 2^-ROOM is the weight of a maximum: not so small that products with small values are subnormal */
#define HEAVY (1 << 30) /* the bit that floats have from 2 on */

typedef struct forward_space {
    _Alignas(64) float s[2][4 * SUMS];                   /* scores of this step and of the next */
    _Alignas(64) uint16_t p[2][MAX_DIM / SQUARE * STEP]; /* weights of this block and of the one before: A's tiles */
    _Alignas(64) float partial[4 * SUMS];                /* debt */
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

/* Where columns [column, column + 16) of row r of acc lie. */
INLINE float *acc_at(const forward_space *f, int64_t r, int64_t column, int64_t width) {
    return f->acc + r / STRIP * STRIP * width + column / 16 * 2 * SUMS + r % STRIP * 16;
}

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
