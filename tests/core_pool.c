/* The allocator that can be replaced, and the pool on top of it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "core/alloc.h"
#include "core/pool.h"
#include "core/status.h"

/* An allocator that counts, and fails where told. */
typedef struct counter {
    int64_t live_blocks, live_bytes, calls;
    int64_t fail_at; /* this call and, if fail_on, all later ones; 0: none */
    int fail_on;
} counter;

static void *counting_alloc(void *ctx, size_t bytes, size_t align) {
    counter *c = ctx;
    c->calls++;
    if (c->fail_at && (c->calls == c->fail_at || (c->fail_on && c->calls > c->fail_at))) return NULL;
    void *ptr = aligned_alloc(align, (bytes + align - 1) / align * align);
    if (!ptr) return NULL;
    memset(ptr, 0xa5, bytes);
    c->live_blocks++;
    c->live_bytes += (int64_t)bytes;
    return ptr;
}

static void counting_free(void *ctx, void *ptr, size_t bytes) {
    counter *c = ctx;
    c->live_blocks--;
    c->live_bytes -= (int64_t)bytes;
    free(ptr);
}

static void count_with(counter *c) {
    *c = (counter){0};
    ra_set_allocator(&(ra_allocator){counting_alloc, counting_free, c});
}

static int restore_allocator(void **state) {
    (void)state;
    ra_set_allocator(NULL);
    return 0;
}

static void blocks_are_aligned_distinct_and_freed_with_the_size_they_had(void **state) {
    (void)state;
    counter c;
    for (int replaced = 0; replaced < 2; replaced++) {
        if (replaced) count_with(&c);
        void *blocks[130];
        for (int64_t i = 0; i < 130; i++) {
            blocks[i] = ra_alloc(i);
            assert_non_null(blocks[i]);
            assert_int_equal((uintptr_t)blocks[i] % RA_ALIGN, 0);
            memset(blocks[i], (int)i, (size_t)i);
            if (i > 0) assert_ptr_not_equal(blocks[i], blocks[i - 1]);
        }
        for (int64_t i = 0; i < 130; i++) {
            for (int64_t j = 0; j < i; j++) assert_int_equal(((unsigned char *)blocks[i])[j], (unsigned char)i);
            ra_free(blocks[i], i);
        }
    }
    assert_int_equal(c.calls, 130);
    assert_int_equal(c.live_blocks, 0);
    assert_int_equal(c.live_bytes, 0);
    ra_free(NULL, 8);
}

static void zeroed_blocks_are_zero_whatever_the_allocator_returns(void **state) {
    (void)state;
    counter c;
    count_with(&c);
    unsigned char *block = ra_calloc(1000);
    for (int i = 0; i < 1000; i++) assert_int_equal(block[i], 0);
    ra_free(block, 1000);
    assert_int_equal(c.live_bytes, 0);
}

static void absurd_sizes_give_no_memory_and_no_crash(void **state) {
    (void)state;
    assert_null(ra_alloc(-1));
    assert_null(ra_alloc(INT64_MAX));
    assert_null(ra_calloc(INT64_MAX - 10));
    assert_null(ra_alloc(INT64_C(1) << 60));
}

static void an_allocator_with_a_missing_function_restores_the_default(void **state) {
    (void)state;
    counter c;
    count_with(&c);
    ra_set_allocator(&(ra_allocator){NULL, NULL, NULL});
    ra_free(ra_alloc(10), 10);
    assert_int_equal(c.calls, 0);
}

static void the_pool_reuses_a_block_and_counts_it(void **state) {
    (void)state;
    ra_pool *pool = ra_pool_create();
    void *a, *b, *again;
    assert_int_equal(ra_pool_take(pool, 1000, &a), RA_OK);
    assert_int_equal(ra_pool_take(pool, 500, &b), RA_OK);
    ra_pool_counts counts = ra_pool_read(pool);
    assert_int_equal(counts.in_use, 1500);
    assert_int_equal(counts.peak, 1500);
    assert_int_equal(counts.misses, 2);
    assert_int_equal(counts.hits, 0);

    ra_pool_give(pool, a);
    counts = ra_pool_read(pool);
    assert_int_equal(counts.in_use, 500);
    assert_int_equal(counts.idle, 1000);
    assert_int_equal(counts.peak, 1500);

    assert_int_equal(ra_pool_take(pool, 1000, &again), RA_OK);
    assert_ptr_equal(again, a);
    counts = ra_pool_read(pool);
    assert_int_equal(counts.hits, 1);
    assert_int_equal(counts.idle, 0);
    assert_int_equal(counts.in_use, 1500);

    ra_pool_give(pool, again);
    ra_pool_give(pool, b);
    ra_pool_give(pool, NULL);
    counts = ra_pool_read(pool);
    assert_int_equal(counts.in_use, 0);
    assert_int_equal(counts.idle, 1500);
    ra_pool_destroy(pool);
}

static void the_pool_takes_the_smallest_idle_block_that_is_large_enough(void **state) {
    (void)state;
    ra_pool *pool = ra_pool_create();
    void *large, *near, *exact, *got;
    ra_pool_take(pool, 100000, &large);
    ra_pool_take(pool, 1100, &near);
    ra_pool_take(pool, 1000, &exact);
    ra_pool_give(pool, exact);
    ra_pool_give(pool, near);
    ra_pool_give(pool, large);
    ra_pool_take(pool, 1000, &got);
    assert_ptr_equal(got, exact);
    ra_pool_take(pool, 1000, &got);
    assert_ptr_equal(got, near);
    ra_pool_take(pool, 1000, &got);
    assert_ptr_equal(got, large);
    assert_int_equal(ra_pool_read(pool).in_use, 102100);
    assert_int_equal(ra_pool_read(pool).hits, 3);
    ra_pool_give(pool, exact);
    ra_pool_give(pool, near);
    ra_pool_give(pool, large);
    assert_int_equal(ra_pool_take(pool, 200000, &got), RA_OK); /* larger than all: they make room for it */
    assert_int_equal(ra_pool_read(pool).idle, 0);
    ra_pool_give(pool, got);
    ra_pool_destroy(pool);
}

static void idle_memory_stays_within_twice_of_what_was_ever_taken(void **state) {
    (void)state;
    counter c;
    count_with(&c);
    ra_pool *pool = ra_pool_create();
    for (int64_t bytes = 100000; bytes > 20000; bytes -= bytes / 3) {
        void *block;
        assert_int_equal(ra_pool_take(pool, bytes, &block), RA_OK);
        ra_pool_give(pool, block);
        assert_true(ra_pool_read(pool).idle <= 200000);
        assert_true(c.live_bytes < 202000); /* the blocks' own records included */
    }
    ra_pool_trim(pool);
    assert_int_equal(ra_pool_read(pool).idle, 0);
    assert_true(c.live_bytes < 1000);
    ra_pool_destroy(pool);
    assert_int_equal(c.live_blocks, 0);
}

static void idle_blocks_are_freed_before_a_larger_one_is_made(void **state) {
    (void)state;
    counter c;
    count_with(&c);
    ra_pool *pool = ra_pool_create();
    void *block;
    ra_pool_take(pool, 1000, &block);
    ra_pool_give(pool, block);
    int64_t before = c.live_bytes;
    assert_int_equal(ra_pool_take(pool, 5000, &block), RA_OK);
    assert_int_equal(ra_pool_read(pool).idle, 0);
    assert_int_equal(c.live_bytes, before + 4000);
    ra_pool_give(pool, block);
    ra_pool_destroy(pool);
    assert_int_equal(c.live_blocks, 0);
}

static void every_failing_allocation_is_no_memory_and_leaks_nothing(void **state) {
    (void)state;
    for (int64_t n = 1; n <= 5; n++) {
        counter c;
        count_with(&c);
        c.fail_at = n;
        c.fail_on = 1;
        ra_pool *pool = ra_pool_create();
        assert_int_equal(pool == NULL, n == 1);
        if (pool) {
            void *a = NULL, *b = NULL;
            assert_int_equal(ra_pool_take(pool, 100, &a), n <= 3 ? RA_NOMEM : RA_OK);
            assert_int_equal(a == NULL, n <= 3);
            assert_int_equal(ra_pool_take(pool, 200, &b), RA_NOMEM);
            assert_null(b);
            assert_string_equal(ra_last_error(), "no memory for a workspace of 200 bytes");
            ra_pool_give(pool, a);
        }
        ra_pool_destroy(pool);
        assert_int_equal(c.live_blocks, 0);
    }
}

static void a_workspace_too_large_for_any_machine_is_no_memory(void **state) {
    (void)state;
    ra_pool *pool = ra_pool_create();
    void *block;
    assert_int_equal(ra_pool_take(pool, INT64_MAX, &block), RA_NOMEM);
    assert_null(block);
    assert_int_equal(ra_pool_read(pool).in_use, 0);
    ra_pool_destroy(pool);
}

static void blocks_still_taken_outlive_the_pool(void **state) {
    (void)state;
    counter c;
    count_with(&c);
    ra_pool *pool = ra_pool_create();
    char *block;
    ra_pool_take(pool, 300, (void **)&block);
    ra_pool_destroy(pool);
    assert_int_equal(c.live_blocks, 1);
    memset(block, 1, 300); /* a late message arrives */
    ra_free(block, 300);
    assert_int_equal(c.live_bytes, 0);
}

/* Work of a stream goes on after its block was given back, so that only work behind it may have the block. */
static void a_block_of_a_stream_serves_that_stream_alone(void **state) {
    (void)state;
    ra_pool *pool = ra_pool_create();
    int stream, other;
    void *first, *second, *again;
    assert_int_equal(ra_pool_reserve(pool, 100), RA_OK);
    assert_int_equal(ra_pool_take_for(pool, 100, &stream, &first), RA_OK);
    assert_int_equal(ra_pool_read(pool).misses, 1); /* what was reserved serves anybody */
    ra_pool_give(pool, first);
    assert_int_equal(ra_pool_take_for(pool, 100, &other, &second), RA_OK);
    assert_true(second != first);
    assert_int_equal(ra_pool_take_for(pool, 100, &stream, &again), RA_OK);
    assert_true(again == first);
    assert_int_equal(ra_pool_read(pool).misses, 2);
    ra_pool_give(pool, second);
    ra_pool_give(pool, again);
    assert_int_equal(ra_pool_take_for(pool, 200, &stream, &again), RA_OK); /* frees its own small one, not the other's */
    assert_int_equal(ra_pool_read(pool).idle, 100);
    ra_pool_give(pool, again);
    ra_pool_destroy(pool);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(blocks_are_aligned_distinct_and_freed_with_the_size_they_had, restore_allocator),
        cmocka_unit_test_teardown(zeroed_blocks_are_zero_whatever_the_allocator_returns, restore_allocator),
        cmocka_unit_test(absurd_sizes_give_no_memory_and_no_crash),
        cmocka_unit_test_teardown(an_allocator_with_a_missing_function_restores_the_default, restore_allocator),
        cmocka_unit_test(the_pool_reuses_a_block_and_counts_it),
        cmocka_unit_test(the_pool_takes_the_smallest_idle_block_that_is_large_enough),
        cmocka_unit_test_teardown(idle_memory_stays_within_twice_of_what_was_ever_taken, restore_allocator),
        cmocka_unit_test_teardown(idle_blocks_are_freed_before_a_larger_one_is_made, restore_allocator),
        cmocka_unit_test_teardown(every_failing_allocation_is_no_memory_and_leaks_nothing, restore_allocator),
        cmocka_unit_test(a_workspace_too_large_for_any_machine_is_no_memory),
        cmocka_unit_test_teardown(blocks_still_taken_outlive_the_pool, restore_allocator),
        cmocka_unit_test(a_block_of_a_stream_serves_that_stream_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
