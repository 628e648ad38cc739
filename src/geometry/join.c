/* Two runs of queries that follow each other in memory do not in their positions, and an item has one progression of those. But
 * positions only say what the mask lets through. So queries that see all keys where they are may be moved to where they
 * continue the other run, if they see all keys from there too:
 *
 *     positions   keys 0..7 |           | run a 16..23 |                      | run b 56..63
 *     joined      keys 0..7 |           | run a 16..23 | run b as if at 24..31
 */
#include "geometry/join.h"

static bool same_rows(const ra_item_rows *a, const ra_item_rows *b) {
    return a->row == b->row && a->row_step == b->row_step && a->pos == b->pos && a->pos_step == b->pos_step &&
           a->count == b->count;
}

static bool same_view(const ra_tensor *a, const ra_tensor *b) {
    return a->data == b->data && a->batch == b->batch && a->row == b->row && a->head == b->head;
}

static bool same_keys(const ra_item *a, const ra_item *b) {
    return same_rows(&a->k, &b->k) && same_view(&a->k_view, &b->k_view) && same_view(&a->v_view, &b->v_view) &&
           same_view(&a->dk_view, &b->dk_view) && same_view(&a->dv_view, &b->dv_view) &&
           same_view(&a->dk_result, &b->dk_result) && same_view(&a->dv_result, &b->dv_result);
}

static bool repeats(const ra_item *item) { return item->loop[0].repeat > 1 || item->loop[1].repeat > 1; }

/* Do the queries of `item`, moved to begin at `pos`, see all of its keys? */
static bool sees_all(const ra_problem *p, const ra_item *item, int64_t pos) {
    const ra_item_rows *q = &item->q, *k = &item->k;
    const int64_t last = pos + (q->count - 1) * q->pos_step, last_key = k->pos + (k->count - 1) * k->pos_step;
    return (p->left == RA_NO_LIMIT || last - p->left <= k->pos) && (p->right == RA_NO_LIMIT || last_key <= pos + p->right);
}

/* Dropout draws by position. */
static bool joinable(const ra_problem *p, const ra_item *a, const ra_item *b) {
    return p->dropout == 0 && a->branch == b->branch && a->rate == b->rate && a->heads.start == b->heads.start &&
           a->heads.step == b->heads.step && a->heads.count == b->heads.count && !repeats(a) && !repeats(b) && same_keys(a, b) &&
           a->q.row_step == b->q.row_step && a->q.pos_step == b->q.pos_step &&
           b->q.row == a->q.row + a->q.count * a->q.row_step;
}

/* Adds the queries of b to those of a, if b follows a. */
static bool join(const ra_problem *p, ra_item *a, const ra_item *b) {
    if (!joinable(p, a, b)) return false;
    const int64_t behind_a = a->q.pos + a->q.count * a->q.pos_step, before_b = b->q.pos - a->q.count * a->q.pos_step;
    if (sees_all(p, a, a->q.pos) && sees_all(p, a, before_b)) a->q.pos = before_b;
    else if (!sees_all(p, b, b->q.pos) || !sees_all(p, b, behind_a)) return false;
    a->q.count += b->q.count;
    return true;
}

/* Items of the same keys come close to each other. */
#define NEAR 16

int64_t ra_join_items(const ra_problem *problem, ra_item *items, int64_t count) {
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i++) {
        bool joined = false;
        for (int64_t j = ra_max(0, kept - NEAR); j < kept && !joined; j++) joined = join(problem, &items[j], &items[i]);
        if (!joined) items[kept++] = items[i];
    }
    return kept;
}
