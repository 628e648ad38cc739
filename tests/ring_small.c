/* Every small shape: n = 0 .. 3wp for small w and r on 1 to 8 ranks, against the reference, forward and backward, bytes and
 * counts included. All other choices (layout, offset, holes, masks, buckets, grouped heads, unequal lengths) turn like the
 * wheels of an odometer from case to case; with RINGATTN_LONG=1 every shape meets every layout, offset and mask. */
#include <stdlib.h>
#include <string.h>

#include "support.h"

/* The wheels. Lengths without common factors keep them from turning in step with the shapes. */
static void set_modes(test_case *c, int64_t turn, int64_t w, int64_t r) {
    static const int64_t buckets[] = {0, 1, 5, 2, 3};
    ra_attention_desc *desc = &c->desc;
    desc->layout = (ra_layout)(turn % 3);
    desc->offset = (ra_offset)(turn / 3 % 4);
    int64_t mask = turn / 12 % 5;
    desc->causal = mask == 1 || mask == 4;
    if (mask == 2) {
        desc->window_left = turn % 4;
        desc->window_right = turn % 3;
    }
    if (mask == 4) desc->window_left = 1 + turn % 5;
    if (mask == 3) {
        c->key_range = true;
        c->key_begin[0] = desc->seq_k / 4;
        c->key_end[0] = desc->seq_k - desc->seq_k / 5;
    }
    desc->dilate_queries = turn / 7 % 2;
    desc->bucket = buckets[turn / 11 % 5];
    desc->combine = turn / 13 % 2 ? RA_COMBINE_MIX : RA_COMBINE_HEADS;
    if (turn / 17 % 2) {
        desc->branches = 2;
        c->segment_lengths[1] = 2 * w + 1;
        c->dilation_rates[1] = r + 1;
    }
    desc->kv_heads = 2;
    desc->heads = 2 * (1 + turn / 19 % 2);
    desc->head_dim = 1 + turn % 4;
    desc->dtype = turn / 23 % 4 == 3 ? RA_F64 : RA_F32;
    c->strides = (test_strides)(turn / 29 % TEST_STRIDES);
    c->data_seed = (uint64_t)turn + 1;
    test_case_link(c);
}

static void set_shape(test_case *c, int64_t n, int64_t other, int64_t w, int64_t r, int ranks) {
    test_case_init(c);
    c->ranks = ranks;
    c->desc.seq_k = n;
    c->desc.seq_q = other < 0 ? n : other;
    c->desc.branches = 1;
    c->segment_lengths[0] = w;
    c->dilation_rates[0] = r;
}

static void every_small_shape(void **state) {
    static const int64_t segments[] = {1, 2, 3, 5}, rates[] = {1, 2, 3, 4};
    int ranks = *(int *)*state;
    int64_t turn = ranks * 1009, cases = 0, combinations = test_long() ? 60 : 1;
    test_ring rings[2];
    test_ring_open(&rings[0], ranks, TEST_THREADS);
    test_ring_open(&rings[1], ranks, TEST_CUSTOM);
    for (size_t wi = 0; wi < 4; wi++) {
        for (size_t ri = 0; ri < 4; ri++) {
            int64_t w = segments[wi], r = rates[ri], longest = 3 * w * ranks;
            for (int64_t n = 0; n <= longest; n++) {
                /* Long sequences of many ranks are thinned out in the fast run, ends and multiples of w kept. */
                if (!test_long() && longest > 40 && n > 8 && n < longest - 2 && n % w != 0 && (n + ranks) % 3 != 0) continue;
                for (int64_t combination = 0; combination < combinations; combination++, turn++, cases++) {
                    /* One case in five has more or fewer queries than keys. */
                    int64_t other = turn % 5 ? -1 : turn % 2 ? (turn * 7) % (n + 4) : n + turn % (w + 3);
                    test_case c;
                    set_shape(&c, n, other, w, r, ranks);
                    set_modes(&c, turn, w, r);
                    c.transport = turn / 31 % 2 ? TEST_CUSTOM : TEST_THREADS;
                    test_case_holds_on(&rings[c.transport == TEST_CUSTOM], &c);
                }
            }
        }
    }
    test_ring_close(&rings[0]);
    test_ring_close(&rings[1]);
    print_message("%lld cases\n", (long long)cases);
}

int main(void) {
    static int ranks[] = {1, 2, 3, 4, 5, 6, 7, 8};
#define ON(p)                                                                                                                  \
    { "every small shape is right on " #p " ranks", every_small_shape, NULL, NULL, &ranks[p - 1] }
    const struct CMUnitTest tests[] = {ON(1), ON(2), ON(3), ON(4), ON(5), ON(6), ON(7), ON(8)};
    return cmocka_run_group_tests_name("small shapes", tests, NULL, test_print_worst);
}
