/* Times calls over a few problems: what tools/speed.sh compares between two builds. It sees only the public header, so that it
 * compiles against either. usage: speed   prints its cases, a line each, and "."; then, for each number of a case that it reads,
 * one call of it: "forward_ms backward_ms" of the rank that was last. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ringattn.h"

enum { MOST_RANKS = 4 };

typedef struct problem {
    const char *name;
    int ranks, threads; /* of each rank */
    ra_dtype dtype;
    int64_t seq, heads, head_dim;
    bool causal, dilated;
} problem;

/* Buckets are given, since what `auto` takes is a choice of each version. */
static const problem problems[] = {
    {"f32, D = 64, full", 1, 1, RA_F32, 4096, 2, 64, false, false},
    {"bf16, D = 128, causal", 1, 1, RA_BF16, 8192, 2, 128, true, false},
    {"bf16, D = 64, dilated, 4 threads", 1, 4, RA_BF16, 32768, 6, 64, false, true},
    {"bf16, D = 128, full, 4 threads", 1, 4, RA_BF16, 8192, 4, 128, false, false},
    {"f32, D = 64, full, ring of 4", 4, 1, RA_F32, 8192, 4, 64, false, false},
    {"bf16, D = 128, causal zigzag, ring of 4", 4, 1, RA_BF16, 16384, 4, 128, true, false},
    {"bf16, D = 64, dilated, ring of 4", 4, 1, RA_BF16, 32768, 6, 64, true, true},
};
enum { PROBLEMS = sizeof problems / sizeof *problems, BUCKET = 2048 };

/* One rank of a problem: its tensors, its plan, and how long its last call took. */
typedef struct rank {
    const problem *problem;
    ra_comm *comm;
    ra_plan *plan;
    ra_forward_args forward;
    ra_backward_args backward;
    pthread_barrier_t *start;
    double seconds[2];
} rank;

typedef struct ring {
    pthread_barrier_t start;
    rank ranks[MOST_RANKS];
} ring;

static void fail(const char *what) {
    fprintf(stderr, "speed: %s: %s\n", what, ra_last_error());
    exit(1);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static ra_tensor tensor(const problem *p, int64_t rows) {
    const int64_t count = rows * p->heads * p->head_dim;
    void *data = malloc((size_t)(count * (int64_t)ra_dtype_size(p->dtype)));
    uint64_t state = 7;
    for (int64_t i = 0; data && i < count; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        const float x = (float)(int64_t)state * 0x1p-63f;
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        if (p->dtype == RA_F32) ((float *)data)[i] = x;
        else ((uint16_t *)data)[i] = (uint16_t)(bits >> 16);
    }
    if (!data) fail("no memory");
    return ra_tensor_bnhd(data, rows, p->heads, p->head_dim);
}

static void describe(const problem *p, ra_attention_desc *d) {
    static const int64_t segments[] = {2048, 4096, 8192}, rates[] = {1, 2, 4};
    ra_attention_desc_init(d);
    d->dtype = p->dtype;
    d->seq_q = d->seq_k = p->seq;
    d->heads = d->kv_heads = p->heads;
    d->head_dim = p->head_dim;
    d->causal = p->causal;
    d->threads = p->threads;
    if (p->dilated) d->segment_lengths = segments, d->dilation_rates = rates, d->branches = 3;
    if (p->ranks == 1) return;
    d->layout = p->causal ? RA_LAYOUT_ZIGZAG : RA_LAYOUT_CONTIGUOUS;
    d->schedule = RA_SCHEDULE_RING;
    d->bucket = BUCKET;
}

static void *play(void *arg) {
    rank *r = arg;
    for (int pass = 0; pass < 2; pass++) {
        pthread_barrier_wait(r->start);
        const double begin = now();
        if ((pass ? ra_backward(r->plan, &r->backward) : ra_forward(r->plan, &r->forward)) != RA_OK) fail("a call");
        r->seconds[pass] = now() - begin;
    }
    return NULL;
}

static void *make_plan(void *arg) {
    rank *r = arg;
    const problem *p = r->problem;
    ra_attention_desc d;
    describe(p, &d);
    if (ra_plan_create(r->comm, &d, &r->plan) != RA_OK) fail(p->name);
    ra_shard queries, keys;
    ra_shard_rows(&d, ra_comm_rank(r->comm), p->ranks, &queries, &keys);
    const int64_t rows = queries.count;
    float *lse = malloc((size_t)(rows * p->heads) * sizeof *lse);
    if (!lse) fail("no memory");
    ra_forward_args f = {.q = tensor(p, rows), .k = tensor(p, rows), .v = tensor(p, rows), .out = tensor(p, rows)};
    f.lse = ra_tensor_lse(lse, rows, p->heads);
    r->forward = f;
    r->backward = (ra_backward_args){.q = f.q, .k = f.k, .v = f.v, .out = f.out, .lse = f.lse, .dout = tensor(p, rows)};
    r->backward.dq = tensor(p, rows), r->backward.dk = tensor(p, rows), r->backward.dv = tensor(p, rows);
    return NULL;
}

static void together(ring *ring, void *(*work)(void *)) {
    const int ranks = ring->ranks[0].problem->ranks;
    pthread_t threads[MOST_RANKS];
    for (int i = 0; i < ranks; i++)
        if (pthread_create(&threads[i], NULL, work, &ring->ranks[i]) != 0) fail("no thread");
    for (int i = 0; i < ranks; i++) pthread_join(threads[i], NULL);
}

static ring *open_ring(const problem *p) {
    ring *ring = calloc(1, sizeof *ring);
    ra_comm *comms[MOST_RANKS];
    if (!ring || ra_comm_threads(p->ranks, comms) != RA_OK) fail(p->name);
    pthread_barrier_init(&ring->start, NULL, (unsigned)p->ranks);
    for (int i = 0; i < p->ranks; i++) ring->ranks[i] = (rank){.problem = p, .comm = comms[i], .start = &ring->start};
    together(ring, make_plan);
    return ring;
}

int main(void) {
    static ring *rings[PROBLEMS];
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (int i = 0; i < PROBLEMS; i++) puts(problems[i].name);
    puts(".");
    for (int i; scanf("%d", &i) == 1 && i >= 0 && i < PROBLEMS;) {
        if (!rings[i]) rings[i] = open_ring(&problems[i]);
        together(rings[i], play);
        double most[2] = {0, 0};
        for (int pass = 0; pass < 2; pass++)
            for (int r = 0; r < problems[i].ranks; r++)
                if (rings[i]->ranks[r].seconds[pass] > most[pass]) most[pass] = rings[i]->ranks[r].seconds[pass];
        printf("%.6f %.6f\n", 1e3 * most[0], 1e3 * most[1]);
    }
    return 0;
}
