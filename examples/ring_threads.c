/* A ring of four ranks in one process, forward and backward: each rank is a thread with its own shard, its own communicator and
 * its own plan. The loss is the sum of all outputs, so that dv of a key is the sum of the weights that all queries give it. */
#include <math.h>
#include <pthread.h>
#include <ringattn.h>
#include <stdio.h>
#include <stdlib.h>

enum { RANKS = 4, N = 1000, HEADS = 2, DIM = 16 };

typedef struct rank {
    ra_comm *comm;
    ra_status status;
    char error[256];
    double dv_sum; /* over this rank's keys */
    long long sent;
} rank;

static ra_attention_desc describe(void) {
    static const int64_t segments[] = {100, 0}, rates[] = {1, 5};
    ra_attention_desc desc;
    ra_attention_desc_init(&desc);
    desc.seq_q = desc.seq_k = N;
    desc.heads = HEADS;
    desc.head_dim = DIM;
    desc.segment_lengths = segments; /* the first head: segments of 100; the second: every fifth row of the whole */
    desc.dilation_rates = rates;
    desc.branches = 2;
    desc.dilate_queries = false;
    desc.layout = RA_LAYOUT_STRIPED;
    desc.schedule = RA_SCHEDULE_RING;
    return desc;
}

static void *run(void *arg) {
    rank *me = arg;
    ra_attention_desc desc = describe();
    ra_shard rows = {0}; /* the same for queries and keys: there are as many */
    ra_plan *plan = NULL;
    float *memory = NULL;
    me->status = ra_shard_rows(&desc, ra_comm_rank(me->comm), RANKS, &rows, NULL);
    if (me->status == RA_OK) me->status = ra_plan_create(me->comm, &desc, &plan);
    size_t one = (size_t)(rows.count * HEADS * DIM);
    if (me->status == RA_OK) memory = malloc((8 * one + (size_t)(rows.count * HEADS)) * sizeof *memory);
    if (me->status == RA_OK && !memory) {
        me->status = RA_NOMEM;
        ra_comm_abort(me->comm, RA_NOMEM, "no memory for the tensors"); /* the others would wait for this rank */
    }
    if (memory) {
        float *t[8]; /* q, k, v, out, dout, dq, dk, dv */
        for (size_t i = 0; i < 8; i++) t[i] = memory + i * one;
        for (size_t i = 0; i < one; i++) {
            for (int j = 0; j < 3; j++) t[j][i] = sinf((float)i * (0.37f + 0.1f * (float)j) + (float)rows.rows[0].start);
            t[4][i] = 1;
        }
#define TENSOR(i) ra_tensor_bnhd(t[i], rows.count, HEADS, DIM)
        ra_tensor lse = ra_tensor_lse(memory + 8 * one, rows.count, HEADS);
        me->status =
            ra_forward(plan, &(ra_forward_args){.q = TENSOR(0), .k = TENSOR(1), .v = TENSOR(2), .out = TENSOR(3), .lse = lse});
        if (me->status == RA_OK)
            me->status = ra_backward(plan, &(ra_backward_args){.q = TENSOR(0),
                                                               .k = TENSOR(1),
                                                               .v = TENSOR(2),
                                                               .out = TENSOR(3),
                                                               .lse = lse,
                                                               .dout = TENSOR(4),
                                                               .dq = TENSOR(5),
                                                               .dk = TENSOR(6),
                                                               .dv = TENSOR(7)});
        for (size_t i = 0; i < one; i++) me->dv_sum += (double)t[7][i];
        ra_stats_data stats = {.struct_size = sizeof stats};
        if (me->status == RA_OK && ra_stats(plan, &stats) == RA_OK) me->sent = (long long)stats.bytes_sent;
    }
    if (me->status != RA_OK) snprintf(me->error, sizeof me->error, "%s", ra_last_error());
    free(memory);
    ra_plan_destroy(plan);
    return NULL;
}

int main(void) {
    ra_comm *comms[RANKS];
    rank ranks[RANKS] = {0};
    pthread_t threads[RANKS];
    if (ra_comm_threads(RANKS, comms) != RA_OK) {
        fprintf(stderr, "%s\n", ra_last_error());
        return 1;
    }
    for (int i = 0; i < RANKS; i++) {
        ranks[i].comm = comms[i];
        if (pthread_create(&threads[i], NULL, run, &ranks[i]) != 0) return 1;
    }
    double sum = 0;
    int failed = 0;
    for (int i = 0; i < RANKS; i++) {
        pthread_join(threads[i], NULL);
        if (ranks[i].status == RA_OK) printf("rank %d sent %lld bytes in backward\n", i, ranks[i].sent);
        else fprintf(stderr, "rank %d: %s\n", i, ranks[i].error);
        failed |= ranks[i].status != RA_OK;
        sum += ranks[i].dv_sum;
    }
    for (int i = 0; i < RANKS; i++) ra_comm_destroy(comms[i]);
    /* Every query of every head gives away a weight of 1 in each of DIM columns. */
    double expected = (double)N * HEADS * DIM;
    printf("all weights together: %.3f of %.0f\n", sum, expected);
    return failed || fabs(sum - expected) > 1e-3 * expected;
}
