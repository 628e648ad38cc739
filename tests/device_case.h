/* Random cases for a GPU, which the stand-in module of the tests plays. */
#ifndef RA_TESTS_DEVICE_CASE_H
#define RA_TESTS_DEVICE_CASE_H

#include "support.h"

static inline void device_case_random(test_case *c, test_rng *rng, int64_t max_seq, int max_ranks) {
    test_case_random(c, rng, max_seq, max_ranks);
    c->desc.device = RA_DEVICE_CUDA;
    c->desc.kernel = NULL; /* those that are drawn compute on the CPU */
    if (c->desc.dtype == RA_F64) c->desc.dtype = RA_F32;
}

/* The same messages went, whatever carried them. */
static inline void device_same_bytes(const test_case *c, const test_result *a, const test_result *b) {
    for (int rank = 0; rank < c->ranks; rank++) {
        assert_int_equal(a->forward[rank].bytes_sent, b->forward[rank].bytes_sent);
        assert_int_equal(a->forward[rank].bytes_received, b->forward[rank].bytes_received);
        assert_int_equal(a->backward[rank].bytes_sent, b->backward[rank].bytes_sent);
    }
}

#endif
