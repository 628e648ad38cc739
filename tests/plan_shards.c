/* Which rows a rank holds, against the table of layouts read literally. */
#include <string.h>

#include "support.h"

/* The rank that holds row x of n, by definition. */
static int owner(ra_layout layout, int ranks, int64_t n, int64_t x) {
    if (layout == RA_LAYOUT_STRIPED) return (int)(x % ranks);
    int64_t runs = layout == RA_LAYOUT_ZIGZAG ? 2 * ranks : ranks, start = 0;
    for (int64_t run = 0; run < runs; run++) {
        int64_t length = n / runs + (run < n % runs ? 1 : 0);
        if (x < start + length) return (int)(run < ranks ? run : 2 * ranks - 1 - run);
        start += length;
    }
    return -1;
}

static void shard_holds(const ra_shard *shard, ra_layout layout, int rank, int ranks, int64_t n) {
    int64_t seen = 0, last = -1;
    for (int part = 0; part < 2; part++) {
        const ra_rows *rows = &shard->rows[part];
        assert_true(rows->count >= 0);
        for (int64_t r = 0; r < rows->count; r++) {
            int64_t x = rows->start + r * rows->step;
            assert_true(x > last && x < n);
            assert_int_equal(owner(layout, ranks, n, x), rank);
            last = x;
            seen++;
        }
    }
    assert_int_equal(seen, shard->count);
    int64_t want = 0;
    for (int64_t x = 0; x < n; x++) want += owner(layout, ranks, n, x) == rank;
    assert_int_equal(seen, want);
}

static void every_row_belongs_to_the_rank_that_the_layout_says(void **state) {
    (void)state;
    for (int layout = 0; layout < 3; layout++) {
        for (int ranks = 1; ranks <= 9; ranks++) {
            for (int64_t n = 0; n <= 45; n++) {
                test_case c;
                test_case_init(&c);
                c.desc.layout = (ra_layout)layout;
                c.desc.seq_k = n;
                c.desc.seq_q = (n * 5) % 23;
                for (int rank = 0; rank < ranks; rank++) {
                    ra_shard queries, keys, alone;
                    assert_int_equal(ra_shard_rows(&c.desc, rank, ranks, &queries, &keys), RA_OK);
                    shard_holds(&keys, c.desc.layout, rank, ranks, n);
                    shard_holds(&queries, c.desc.layout, rank, ranks, c.desc.seq_q);
                    assert_int_equal(ra_shard_rows(&c.desc, rank, ranks, NULL, &alone), RA_OK);
                    assert_int_equal(alone.count, keys.count);
                    assert_int_equal(ra_shard_rows(&c.desc, rank, ranks, &alone, NULL), RA_OK);
                    assert_int_equal(alone.count, queries.count);
                }
            }
        }
    }
}

static void replicated_queries_are_all_of_them(void **state) {
    (void)state;
    test_case c;
    test_case_init(&c);
    c.desc.query_placement = RA_REPLICATED;
    c.desc.schedule = RA_SCHEDULE_AUTO;
    for (int rank = 0; rank < 3; rank++) {
        ra_shard queries, keys;
        assert_int_equal(ra_shard_rows(&c.desc, rank, 3, &queries, &keys), RA_OK);
        assert_int_equal(queries.count, c.desc.seq_q);
        assert_int_equal(queries.rows[0].start, 0);
        assert_int_equal(queries.rows[0].step, 1);
        assert_int_equal(queries.rows[0].count, c.desc.seq_q);
        shard_holds(&keys, c.desc.layout, rank, 3, c.desc.seq_k);
    }
}

static void one_rank_has_one_run_whatever_the_layout(void **state) {
    (void)state;
    for (int layout = 0; layout < 3; layout++) {
        ra_attention_desc desc;
        ra_attention_desc_init(&desc);
        desc.batch = desc.heads = desc.head_dim = 1;
        desc.seq_q = desc.seq_k = 7;
        desc.layout = (ra_layout)layout;
        ra_shard queries, keys;
        assert_int_equal(ra_shard_rows(&desc, 0, 1, &queries, &keys), RA_OK);
        assert_int_equal(queries.rows[0].count, 7);
        assert_int_equal(queries.rows[1].count, 0);
        assert_memory_equal(&queries, &keys, sizeof keys);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_row_belongs_to_the_rank_that_the_layout_says),
        cmocka_unit_test(one_rank_has_one_run_whatever_the_layout),
        cmocka_unit_test(replicated_queries_are_all_of_them),
    };
    return cmocka_run_group_tests_name("shards", tests, NULL, NULL);
}
