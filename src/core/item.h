/* Work items: the words in which the plan tells kernels what to compute.
 *
 * A step is a list of work items. An item says that, for a set of KV heads, a progression of query rows meets a progression of
 * keys, repeated by at most two loops (segments, residues):
 *
 *     for i0 in 0 .. loop[0].repeat-1
 *       for i1 in 0 .. loop[1].repeat-1
 *         for each batch entry b, for each KV head index h in 0 .. heads.count-1, for each query head u of its group
 *           for a in 0 .. q.count-1
 *             query row  q.row + a*q.row_step + i0*loop[0].q_row + i1*loop[1].q_row   (of this rank's q, out, state)
 *             position x q.pos + a*q.pos_step + i0*loop[0].q_pos + i1*loop[1].q_pos
 *             for c in 0 .. k.count-1
 *               key row    k.row + c*k.row_step + i0*loop[0].k_row + i1*loop[1].k_row  (of the item's k and v views)
 *               position y k.pos + c*k.pos_step + i0*loop[0].k_pos + i1*loop[1].k_pos
 *               attended iff x - left <= y <= x + right and key_begin[b] <= y < key_end[b]
 *
 * Turns of the loops meet distinct query rows and distinct key rows, so they may run at the same time.
 * Steps are positive, so the attended keys of a query are always an interval of c: ra_key_interval. The KV head of index h is
 * heads.start + h*heads.step; the k and v views take the index h, not the head.
 */
#ifndef RA_CORE_ITEM_H
#define RA_CORE_ITEM_H

#include "core/mask.h"
#include "core/size.h"
#include "core/span.h"
#include "ringattn.h"

typedef struct ra_item_rows {
    int64_t row, row_step; /* in the local tensor */
    int64_t pos, pos_step; /* global positions */
    int64_t count;
} ra_item_rows;

typedef struct ra_item_loop {
    int64_t repeat; /* >= 1 */
    int64_t q_row, q_pos, k_row, k_pos;
    int64_t origin; /* shift of ra_item.origin */
} ra_item_loop;

typedef struct ra_item {
    int64_t branch;
    ra_span heads; /* KV heads */
    ra_item_rows q, k;
    ra_item_loop loop[2];
    int64_t origin, rate;           /* the lattice place of key y, for dropout: floor((y - origin) / rate) */
    ra_tensor k_view, v_view;       /* head stride is per head index */
    ra_tensor dk_view, dv_view;     /* backward: f32 (f64) sums, addressed like k_view; added to, unless fresh */
    ra_tensor dk_result, dv_result; /* of a single backward step: the problem's dtype, addressed like k_view */
    bool fresh;                     /* its sums hold anything, and become what it gives: it is the first item of its keys,
                                     * and a query meets each of them. Where ra_device_ops.begins only */
} ra_item;

/* What all items of a call share. */
typedef struct ra_problem {
    ra_dtype dtype;
    int64_t batch, heads, kv_heads, head_dim;
    int64_t rows_q; /* local query rows */
    int64_t keys;   /* most keys of one iteration of an item's loops, which CPU kernels make room for; 0: unknown. Items that
                     * were joined for a GPU may have more */
    double scale;
    int64_t left, right;                /* window, causal folded in; RA_NO_LIMIT */
    const int64_t *key_begin, *key_end; /* [batch] or NULL */
    double dropout;
    uint64_t seed;
} ra_problem;

/* A set of rows of a tensor: each of `rows` in each of `heads` (of queries: query heads, of keys: KV heads). */
typedef struct ra_used {
    ra_span rows, heads;
} ra_used;

/* The used rows of a tensor: those that take part in anything. count 0: all rows count as used. Sets may overlap. */
typedef struct ra_used_rows {
    ra_used *sets;
    int64_t count;
    int64_t modulus; /* used rows of a head are congruent modulo this */
    bool keeps;      /* the other rows have results that somebody else makes, and stay as they are */
} ra_used_rows;

/* (row, head) pairs of the sets; a pair that is in several sets counts once for each. */
static inline int64_t ra_used_count(const ra_used *sets, int64_t count) {
    int64_t rows = 0;
    for (int64_t i = 0; i < count; i++) rows += sets[i].rows.count * sets[i].heads.count;
    return rows;
}

/* The keys c in [*begin, *end) that a query at x attends to among kpos + c*kstep, c < count, in batch entry b. */
static inline void ra_key_interval(const ra_problem *p, int64_t b, int64_t x, int64_t kpos, int64_t kstep, int64_t count,
                                   int64_t *begin, int64_t *end) {
    int64_t lo, hi;
    ra_mask_keys(p->left, p->right, x, x, kpos, kstep, count, &lo, &hi);
    if (p->key_begin) lo = ra_max(lo, ra_ceil_div(p->key_begin[b] - kpos, kstep));
    if (p->key_end) hi = ra_min(hi, ra_ceil_div(p->key_end[b] - kpos, kstep));
    *begin = lo;
    *end = ra_max(lo, hi);
}

/* Does every query of an item meet a key, and every key a query? May be false when true. */
static inline bool ra_item_whole(const ra_problem *p, const ra_item *item) {
    if (item->q.count <= 0 || item->k.count <= 0 || p->key_begin || p->key_end) return false;
    if (!ra_mask_limits(p->left, p->right)) return true;
    for (int i = 0; i < 2; i++)
        if (item->loop[i].repeat > 1 && item->loop[i].q_pos != item->loop[i].k_pos) return false;
    /* A window at least as wide as a step has no gaps, so only the ends can miss. Seen from keys, the limits change places. */
    const ra_item_rows *sides[2] = {&item->q, &item->k};
    for (int i = 0; i < 2; i++) {
        const ra_item_rows *own = sides[i], *other = sides[1 - i];
        ra_problem seen = *p;
        if (i) seen.left = p->right, seen.right = p->left;
        if (seen.left != RA_NO_LIMIT && seen.right != RA_NO_LIMIT && seen.left + seen.right < other->pos_step - 1) return false;
        for (int64_t at = 0; at < own->count; at += ra_max(1, own->count - 1)) {
            int64_t begin, end;
            ra_key_interval(&seen, 0, own->pos + at * own->pos_step, other->pos, other->pos_step, other->count, &begin, &end);
            if (begin >= ra_min(end, other->count)) return false;
        }
    }
    return true;
}

#endif
