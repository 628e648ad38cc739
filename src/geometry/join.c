/* Two runs that follow each other in memory do not in their positions, and an item has one progression of those. But positions
 * only say what the mask lets through. So queries that see all keys where they are may be moved to where they continue the
 * other run, if they see all keys from there too:
 *
 *     positions   keys 0..7 |           | run a 16..23 |                      | run b 56..63
 *     joined      keys 0..7 |           | run a 16..23 | run b as if at 24..31
 *
 * Keys are moved likewise, or together with their queries: then the three items of a rank that meets itself are one triangle.
 */
#include "geometry/join.h"

static bool same_rows(const ra_item_rows *a, const ra_item_rows *b) {
    return a->row == b->row && a->row_step == b->row_step && a->pos == b->pos && a->pos_step == b->pos_step &&
           a->count == b->count;
}

/* Do the rows of b continue those of a in memory, with the same steps? */
static bool follows(const ra_item_rows *a, const ra_item_rows *b) {
    return b->row_step == a->row_step && b->pos_step == a->pos_step && b->row == a->row + a->count * a->row_step;
}

static int64_t pos_of(const ra_item_rows *rows, int64_t i) { return rows->pos + i * rows->pos_step; }

static bool same_view(const ra_tensor *a, const ra_tensor *b) {
    return a->data == b->data && a->batch == b->batch && a->row == b->row && a->head == b->head;
}

static bool same_tensors(const ra_item *a, const ra_item *b) {
    return same_view(&a->k_view, &b->k_view) && same_view(&a->v_view, &b->v_view) && same_view(&a->dk_view, &b->dk_view) &&
           same_view(&a->dv_view, &b->dv_view) && same_view(&a->dk_result, &b->dk_result) &&
           same_view(&a->dv_result, &b->dv_result);
}

static bool repeats(const ra_item *item) { return item->loop[0].repeat > 1 || item->loop[1].repeat > 1; }

/* Dropout draws by position. */
static bool joinable(const ra_problem *p, const ra_item *a, const ra_item *b) {
    return p->dropout == 0 && a->branch == b->branch && a->rate == b->rate && a->heads.start == b->heads.start &&
           a->heads.step == b->heads.step && a->heads.count == b->heads.count && !repeats(a) && !repeats(b) &&
           same_tensors(a, b);
}

/* Do the queries of `item`, moved to begin at `pos`, see all of its keys, moved to begin at `key_pos`? */
static bool sees_all(const ra_problem *p, const ra_item *item, int64_t pos, int64_t key_pos) {
    const int64_t last = pos + (item->q.count - 1) * item->q.pos_step;
    const int64_t last_key = key_pos + (item->k.count - 1) * item->k.pos_step;
    return (p->left == RA_NO_LIMIT || last - p->left <= key_pos) && (p->right == RA_NO_LIMIT || last_key <= pos + p->right);
}

/* Adds the queries of b to those of a, if they follow and both meet the same keys, which a may be the first to do. */
static bool join_queries(const ra_problem *p, ra_item *a, const ra_item *b) {
    if (b->fresh || !follows(&a->q, &b->q) || !same_rows(&a->k, &b->k)) return false;
    const int64_t keys = a->k.pos, behind_a = pos_of(&a->q, a->q.count), before_b = pos_of(&b->q, -a->q.count);
    if (sees_all(p, a, a->q.pos, keys) && sees_all(p, a, before_b, keys)) a->q.pos = before_b;
    else if (!sees_all(p, b, b->q.pos, keys) || !sees_all(p, b, behind_a, keys)) return false;
    a->q.count += b->q.count;
    return true;
}

/* Adds the keys of b to those of a, if they follow and the queries of b are the last of a's, of which the others see none of
 * them. Key ranges are positions. */
static bool join_keys(const ra_problem *p, ra_item *a, const ra_item *b) {
    const int64_t before = a->q.count - b->q.count; /* queries of a that are not of b */
    if (p->key_begin || p->key_end || !follows(&a->k, &b->k) || before < 0 || a->q.row_step != b->q.row_step ||
        a->q.pos_step != b->q.pos_step || b->q.row != a->q.row + before * a->q.row_step || a->fresh != b->fresh)
        return false;
    const int64_t pos = pos_of(&a->q, before), key_pos = pos_of(&a->k, a->k.count);
    if (before > 0 && (p->right == RA_NO_LIMIT || pos_of(&a->q, before - 1) + p->right >= key_pos)) return false;
    const bool moved_together = pos - b->q.pos == key_pos - b->k.pos;
    if (!moved_together && (!sees_all(p, b, b->q.pos, b->k.pos) || !sees_all(p, b, pos, key_pos))) return false;
    a->k.count += b->k.count;
    return true;
}

static bool join(const ra_problem *p, ra_item *a, const ra_item *b) {
    return joinable(p, a, b) && (join_queries(p, a, b) || join_keys(p, a, b));
}

/* Items of the same keys, or queries, come close to each other. */
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
