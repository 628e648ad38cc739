/* A small ring of GPUs played by hand: RANKS ranks of ROWS rows, which travel in two buckets. */
#ifndef RA_TESTS_DEVICE_HAND_H
#define RA_TESTS_DEVICE_HAND_H

#include <stdio.h>

#include "core/clock.h"
#include "device_case.h"
#include "ringattn_cuda.h"

enum { ROWS = 16, HEADS = 2, DIM = 16, NUMBERS = ROWS * HEADS * DIM, RANKS = 3 };

typedef struct hand {
    test_ring ring;
    void *streams[RANKS];
    float q[RANKS][NUMBERS], out[RANKS][NUMBERS];
    ra_status status[RANKS];
    char error[RANKS][512];
    double seconds[RANKS]; /* of plan and calls */
    int calls;
    bool checksum; /* the lane is staged, then */
    int gpus;      /* among which the ranks are dealt */
} hand;

/* A ring that is to make one call. */
static inline void hand_init(hand *h) {
    *h = (hand){.calls = 1, .gpus = 1};
    test_rng rng = {test_seed(54)};
    for (int rank = 0; rank < RANKS; rank++) {
        h->streams[rank] = &h->out[rank];
        for (int i = 0; i < NUMBERS; i++) h->q[rank][i] = (float)rng_normal(&rng);
    }
}

static inline void hand_open(hand *h, test_transport transport) {
    hand_init(h);
    test_ring_open(&h->ring, RANKS, transport);
}

static inline void hand_call(void *arg, int rank) {
    hand *h = arg;
    ra_attention_desc desc;
    ra_attention_desc_init(&desc);
    desc.batch = 1;
    desc.seq_q = desc.seq_k = ROWS * RANKS;
    desc.heads = HEADS;
    desc.head_dim = DIM;
    desc.bucket = ROWS / 2;
    desc.schedule = RA_SCHEDULE_RING;
    desc.device = RA_DEVICE_CUDA;
    desc.checksum = h->checksum;
    ra_plan *plan = NULL;
    const double begin = ra_seconds();
    ra_status status = ra_cuda_use(rank % h->gpus);
    if (status == RA_OK) status = ra_plan_create(h->ring.comms[rank], &desc, &plan);
    const ra_tensor q = ra_tensor_bnhd(h->q[rank], ROWS, HEADS, DIM);
    const ra_forward_args args = {
        .q = q, .k = q, .v = q, .out = ra_tensor_bnhd(h->out[rank], ROWS, HEADS, DIM), .stream = h->streams[rank]};
    for (int i = 0; i < h->calls && status == RA_OK; i++) status = ra_forward(plan, &args);
    h->seconds[rank] = ra_seconds() - begin;
    h->status[rank] = status;
    snprintf(h->error[rank], sizeof h->error[rank], "%s", ra_last_error());
    ra_plan_destroy(plan);
}

/* What was enqueued is done, and no stream has failed. */
static inline void hand_synchronize(const hand *h) {
    for (int rank = 0; rank < RANKS; rank++) assert_int_equal(ra_cuda_synchronize(h->streams[rank]), RA_OK);
}

#endif
