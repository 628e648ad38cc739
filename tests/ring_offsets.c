/* Tensors whose rows lie further apart than 32 bits can count, in bytes or in elements: the same bits as tensors without
 * gaps. The gaps are address space that nobody touches. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "ringattn.h"

enum { N = 6, HEADS = 2, DIM = 16, ROW = HEADS * DIM, MOST = 2, TENSORS = 9 };
enum { Q, K, V, DOUT, INPUTS, OUT = INPUTS, DQ, DK, DV, LSE };

static const int64_t far_apart =
    ((int64_t)3 << 29) + 64; /* floats: more than 6 GiB a row, more than 2^32 elements from the third row on */

typedef struct rank {
    ra_comm *comm;
    ra_status status;
    char sentence[256];
    float *data[TENSORS];
    int64_t row; /* floats from a row to the next */
    pthread_t thread;
} rank;

static float value_of(int tensor, int64_t position, int64_t element) {
    return (float)((position * 131 + element * 17 + tensor * 29) % 23 - 11) / 8;
}

static ra_tensor tensor_of(const rank *r, int which) {
    if (which == LSE) return ra_tensor_lse(r->data[LSE], N, HEADS);
    return (ra_tensor){.data = r->data[which], .batch = N * r->row, .row = r->row, .head = DIM};
}

static ra_status passes(rank *r) {
    ra_attention_desc desc;
    ra_plan *plan;
    ra_shard rows;
    ra_attention_desc_init(&desc);
    desc.seq_q = desc.seq_k = N;
    desc.heads = HEADS;
    desc.head_dim = DIM;
    desc.causal = true;
    desc.threads = 1;
    desc.schedule = RA_SCHEDULE_RING;
    ra_status status = ra_shard_rows(&desc, ra_comm_rank(r->comm), ra_comm_size(r->comm), &rows, NULL);
    if (status == RA_OK) status = ra_plan_create(r->comm, &desc, &plan);
    if (status != RA_OK) return status;
    for (int which = 0; which < INPUTS; which++)
        for (int64_t i = 0; i < rows.count; i++)
            for (int e = 0; e < ROW; e++) r->data[which][i * r->row + e] = value_of(which, rows.rows[0].start + i, e);
    ra_forward_args forward = {
        .q = tensor_of(r, Q), .k = tensor_of(r, K), .v = tensor_of(r, V), .out = tensor_of(r, OUT), .lse = tensor_of(r, LSE)};
    ra_backward_args backward = {.q = forward.q,
                                 .k = forward.k,
                                 .v = forward.v,
                                 .out = forward.out,
                                 .lse = forward.lse,
                                 .dout = tensor_of(r, DOUT),
                                 .dq = tensor_of(r, DQ),
                                 .dk = tensor_of(r, DK),
                                 .dv = tensor_of(r, DV)};
    status = ra_forward(plan, &forward);
    if (status == RA_OK) status = ra_backward(plan, &backward);
    ra_plan_destroy(plan);
    return status;
}

static void *rank_main(void *arg) {
    rank *r = arg;
    r->status = passes(r);
    if (r->status != RA_OK) snprintf(r->sentence, sizeof r->sentence, "%s", ra_last_error());
    return NULL;
}

static size_t bytes_of(int64_t row) { return (size_t)(N * row) * sizeof(float); }

static void run(rank *ranks, int count, int64_t row) {
    ra_comm *comms[MOST];
    assert_int_equal(ra_comm_threads(count, comms), RA_OK);
    for (int i = 0; i < count; i++) {
        ranks[i] = (rank){.comm = comms[i], .row = row};
        for (int which = 0; which < TENSORS; which++) {
            void *memory =
                mmap(NULL, bytes_of(row), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (memory == MAP_FAILED) {
                print_message("skipped: no address space for gaps of %zu GiB\n", bytes_of(row) >> 30);
                skip();
            }
            ranks[i].data[which] = memory;
        }
    }
    for (int i = 0; i < count; i++) assert_int_equal(pthread_create(&ranks[i].thread, NULL, rank_main, &ranks[i]), 0);
    for (int i = 0; i < count; i++) pthread_join(ranks[i].thread, NULL);
    for (int i = 0; i < count; i++) {
        if (ranks[i].status != RA_OK) fail_msg("rank %d: %s", i, ranks[i].sentence);
        ra_comm_destroy(comms[i]);
    }
}

static void release(rank *ranks, int count) {
    for (int i = 0; i < count; i++)
        for (int which = 0; which < TENSORS; which++) munmap(ranks[i].data[which], bytes_of(ranks[i].row));
}

static void rows_beyond_32_bits_give_the_bits_of_rows_side_by_side(void **state) {
    (void)state;
    for (int count = 1; count <= MOST; count++) {
        rank near[MOST], far[MOST];
        run(near, count, ROW);
        run(far, count, far_apart);
        for (int i = 0; i < count; i++) {
            assert_memory_equal(near[i].data[LSE], far[i].data[LSE], sizeof(float) * N * HEADS);
            for (int which = OUT; which < LSE; which++)
                for (int64_t n = 0; n < N; n++)
                    assert_memory_equal(near[i].data[which] + n * ROW, far[i].data[which] + n * far_apart, sizeof(float) * ROW);
        }
        release(near, count);
        release(far, count);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(rows_beyond_32_bits_give_the_bits_of_rows_side_by_side)};
    return cmocka_run_group_tests_name("ring_offsets", tests, NULL, NULL);
}
