/* Items that were joined: the same pairs meet as before, and what should be joined is. */
#include <string.h>

#include "geometry/join.h"
#include "support.h"

enum { ROWS = 64, KEYS = 32, KEEP = 8 };

/* How often each query row meets each key of each of the two tensors. */
typedef struct meetings {
    int count[2][ROWS][KEYS];
} meetings;

static void meet(const ra_problem *p, const ra_item *items, int64_t count, meetings *m) {
    memset(m, 0, sizeof *m);
    for (const ra_item *item = items; item < items + count; item++)
        for (int64_t r = 0; r < item->loop[0].repeat; r++)
            for (int64_t a = 0; a < item->q.count; a++) {
                int64_t begin, end, row = item->q.row + a * item->q.row_step + r * item->loop[0].q_row;
                ra_key_interval(p, 0, item->q.pos + a * item->q.pos_step + r * item->loop[0].q_pos,
                                item->k.pos + r * item->loop[0].k_pos, item->k.pos_step, item->k.count, &begin, &end);
                for (int64_t c = ra_max(0, begin); c < ra_min(end, item->k.count); c++)
                    m->count[item->k_view.data != NULL][row][item->k.row + c * item->k.row_step + r * item->loop[0].k_row]++;
            }
}

static const ra_problem causal = {.batch = 1, .heads = 1, .kv_heads = 1, .head_dim = 1, .left = RA_NO_LIMIT, .right = 0};

static ra_item item_of(int64_t row, int64_t pos, int64_t count, int64_t key_pos, int64_t keys) {
    return (ra_item){.heads = {0, 1, 1},
                     .q = {row, 1, pos, 1, count},
                     .k = {0, 1, key_pos, 1, keys},
                     .loop = {{.repeat = 1}, {.repeat = 1}},
                     .rate = 1};
}

/* What random items give: runs of queries in any order, masks of both sides, two tensors of keys, key ranges. */
static void the_same_pairs_meet(void **state) {
    (void)state;
    test_rng rng = {test_seed(71)};
    static char other;
    int64_t fewer = 0;
    for (int n = 0; n < 20000; n++) {
        ra_problem p = causal;
        int64_t begin = rng_below(&rng, 20), end = 20 + rng_below(&rng, 60);
        p.left = rng_below(&rng, 2) ? RA_NO_LIMIT : rng_below(&rng, 60);
        p.right = rng_below(&rng, 3) ? rng_below(&rng, 30) : RA_NO_LIMIT;
        if (rng_below(&rng, 4) == 0) p.key_begin = &begin, p.key_end = &end;
        ra_item items[KEEP];
        int64_t count = 0, row = 0, step = 1 + rng_below(&rng, 2);
        const int64_t key_pos = rng_below(&rng, 60), keys = 1 + rng_below(&rng, 12);
        while (count < KEEP && row + 8 * step < ROWS) {
            ra_item item = item_of(row, rng_below(&rng, 90), 1 + rng_below(&rng, 6), key_pos, keys);
            item.q.row_step = item.q.pos_step = step;
            if (rng_below(&rng, 8) == 0) item.k_view.data = &other;
            if (rng_below(&rng, 8) == 0) item.k.pos += 3;
            if (count > 0 && rng_below(&rng, 3) == 0) { /* more keys for the last queries of the item before */
                item.q = items[count - 1].q;
                const int64_t left_out = rng_below(&rng, item.q.count);
                item.q.row += left_out * step, item.q.pos += left_out * step, item.q.count -= left_out;
                item.k.row = items[count - 1].k.count;
                item.k.pos = rng_below(&rng, 2) ? items[count - 1].k.pos + item.k.row : rng_below(&rng, 60);
                if (rng_below(&rng, 3) == 0) item.q.pos += 7, item.k.pos += 7;
                items[count++] = item;
                continue;
            }
            row += item.q.count * step + (rng_below(&rng, 5) == 0);
            if (rng_below(&rng, 6) == 0 && row + 16 * step < ROWS) { /* a loop, over rows further on and other keys */
                item.loop[0] = (ra_item_loop){.repeat = 2, .q_row = item.q.count * step, .q_pos = 5, .k_row = keys, .k_pos = 9};
                row += item.q.count * step;
            }
            items[count++] = item;
        }
        static meetings before, after;
        meet(&p, items, count, &before);
        int64_t left = ra_join_items(&p, items, count);
        assert_in_range(left, 1, count);
        meet(&p, items, left, &after);
        assert_memory_equal(&before, &after, sizeof before);
        fewer += left < count;
    }
    assert_true(fewer > 1000);
}

/* Ranks of a causal zigzag ring: both runs meet the first keys of an earlier rank, the later run meets both of a later rank
 * (here as rows of one tensor). */
static void the_runs_of_a_zigzag_rank_are_joined(void **state) {
    (void)state;
    ra_item earlier[] = {item_of(0, 16, 8, 0, 8), item_of(8, 40, 8, 0, 8)};
    assert_int_equal(ra_join_items(&causal, earlier, 2), 1);
    assert_int_equal(earlier[0].q.count, 16);
    ra_item own[] = {item_of(0, 16, 8, 16, 8), item_of(8, 40, 8, 16, 8), item_of(8, 40, 8, 40, 8)};
    own[2].k.row = 8;
    assert_int_equal(ra_join_items(&causal, own, 3), 1);
    assert_int_equal(own[0].q.pos, 16); /* the run under the diagonal stays where it is */
    assert_int_equal(own[0].q.count, 16);
    assert_int_equal(own[0].k.count, 16);
    ra_item later[] = {item_of(8, 40, 8, 8, 8), item_of(8, 40, 8, 24, 8)};
    later[1].k.row = 8;
    assert_int_equal(ra_join_items(&causal, later, 2), 1);
    assert_int_equal(later[0].k.count, 16);
}

/* Two runs of queries before the same keys, or behind the same queries two runs of keys. */
static void pair_of(bool queries, ra_item items[2]) {
    items[0] = queries ? item_of(0, 16, 8, 0, 8) : item_of(8, 40, 8, 8, 8);
    items[1] = queries ? item_of(8, 40, 8, 0, 8) : item_of(8, 40, 8, 24, 8);
    if (!queries) items[1].k.row = 8;
}

static int64_t joined(ra_problem p, const ra_item *a, const ra_item *b) {
    ra_item items[] = {*a, *b};
    return ra_join_items(&p, items, 2);
}

/* Either of the two may hold anything that the other does not. */
static void what_differs_is_not_joined(void **state) {
    (void)state;
    static char other;
    for (int queries = 0; queries < 2; queries++)
        for (int n = 0; n < 2; n++) {
            ra_item x[2];
            pair_of(queries, x);
            assert_int_equal(joined(causal, &x[0], &x[1]), 1);
            const ra_item kept = x[n];
#define DIFFERS(field, value)                                                                                                  \
    do {                                                                                                                       \
        x[n].field = value;                                                                                                    \
        assert_int_equal(joined(causal, &x[0], &x[1]), 2);                                                                     \
        x[n] = kept;                                                                                                           \
    } while (0)
            DIFFERS(branch, 1);
            DIFFERS(rate, 2);
            DIFFERS(heads.start, 1);
            DIFFERS(heads.step, 2);
            DIFFERS(heads.count, 2);
            DIFFERS(loop[0].repeat, 2);
            DIFFERS(loop[1].repeat, 2);
            DIFFERS(q.row, kept.q.row + 1);
            DIFFERS(q.row_step, 2);
            DIFFERS(q.pos_step, 2);
            DIFFERS(k.row, kept.k.row + 1);
            DIFFERS(k.row_step, 2);
            DIFFERS(k.pos_step, 2);
            DIFFERS(k_view.data, &other);
            DIFFERS(k_view.batch, 1);
            DIFFERS(k_view.row, 1);
            DIFFERS(k_view.head, 1);
            DIFFERS(v_view.data, &other);
            DIFFERS(dk_view.data, &other);
            DIFFERS(dv_view.data, &other);
            DIFFERS(dk_result.data, &other);
            DIFFERS(dv_result.data, &other);
            if (!queries || n == 1) DIFFERS(fresh, true);
            if (queries) DIFFERS(k.count, 7);
            if (queries) DIFFERS(k.pos, 1);
            if (!queries) DIFFERS(q.count, 7);
#undef DIFFERS
        }
}

/* Sums of keys that begin with the first of two runs of queries begin with both, and so do those of two runs of keys. */
static void what_begins_with_one_item_begins_with_the_joined_one(void **state) {
    (void)state;
    for (int queries = 0; queries < 2; queries++)
        for (int fresh = 0; fresh < 2; fresh++) {
            ra_item x[2];
            pair_of(queries, x);
            x[0].fresh = fresh;
            x[1].fresh = fresh && !queries;
            assert_int_equal(ra_join_items(&causal, x, 2), 1);
            assert_int_equal(x[0].fresh, fresh);
        }
}

/* Dropout draws by position, and key ranges are positions, so that keys stay where they are. */
static void what_goes_by_position_is_not_moved(void **state) {
    (void)state;
    const int64_t place = 10;
    ra_problem drops = causal, begins = causal, ends = causal;
    drops.dropout = 0.5, begins.key_begin = &place, ends.key_end = &place;
    for (int queries = 0; queries < 2; queries++) {
        ra_item x[2];
        pair_of(queries, x);
        assert_int_equal(joined(drops, &x[0], &x[1]), 2);
        assert_int_equal(joined(begins, &x[0], &x[1]), queries ? 1 : 2);
        assert_int_equal(joined(ends, &x[0], &x[1]), queries ? 1 : 2);
    }
}

/* The first of two runs of queries is moved where the second one cannot be; up to the last position that still sees all. */
static void either_run_of_queries_may_be_moved(void **state) {
    (void)state;
    ra_problem window = causal;
    window.left = 26;                                /* of the second run 32..39 the first three see key 8 */
    for (int64_t first = 16; first <= 26; first++) { /* the first run sees all of 8..15 where it is, and as if at 24..31 */
        ra_item items[] = {item_of(0, first, 8, 8, 8), item_of(8, 32, 8, 8, 8)};
        assert_int_equal(ra_join_items(&window, items, 2), 1);
        assert_int_equal(items[0].q.pos, 24);
        assert_int_equal(items[0].q.count, 16);
    }
    window.left = 22; /* before the second one it does not: its last query 31 is 23 away */
    const ra_item runs[] = {item_of(0, 16, 8, 8, 8), item_of(8, 32, 8, 8, 8)};
    assert_int_equal(joined(window, &runs[0], &runs[1]), 2);
    window.left = 23;
    assert_int_equal(joined(window, &runs[0], &runs[1]), 1);
    /* Nor may the second one move, unless its first query sees the last key: 30 sees 30. */
    const ra_item diagonal = item_of(0, 23, 8, 23, 8), late = item_of(8, 30, 8, 23, 8), early = item_of(8, 29, 8, 23, 8);
    assert_int_equal(joined(causal, &diagonal, &late), 1);
    assert_int_equal(joined(causal, &diagonal, &early), 2);
}

/* Queries of the second item that the first has not would be lost. */
static void keys_of_more_queries_are_not_joined(void **state) {
    (void)state;
    ra_item few = item_of(8, 40, 8, 8, 8), many = item_of(4, 36, 12, 24, 8);
    many.k.row = 8;
    assert_int_equal(joined(causal, &few, &many), 2);
}

static void what_comes_between_does_not_matter(void **state) {
    (void)state;
    ra_item items[KEEP];
    pair_of(true, items);
    items[KEEP - 1] = items[1];
    for (int i = 1; i < KEEP - 1; i++) items[i] = item_of(100 * i, 16, 8, 0, 8);
    assert_int_equal(ra_join_items(&causal, items, KEEP), KEEP - 1);
    assert_int_equal(items[0].q.count, 16);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_same_pairs_meet),
        cmocka_unit_test(the_runs_of_a_zigzag_rank_are_joined),
        cmocka_unit_test(what_differs_is_not_joined),
        cmocka_unit_test(what_begins_with_one_item_begins_with_the_joined_one),
        cmocka_unit_test(what_goes_by_position_is_not_moved),
        cmocka_unit_test(either_run_of_queries_may_be_moved),
        cmocka_unit_test(keys_of_more_queries_are_not_joined),
        cmocka_unit_test(what_comes_between_does_not_matter),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
