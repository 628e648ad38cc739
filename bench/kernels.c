/* Times every kernel of the table on one rank, without plan or ring, and then whole calls at n = 1:
 *
 *     bench_kernels [n [threads [kernel [dtype]]]]        BENCH_SECONDS: for each pass of a case (1)
 *
 * GFLOP/s of useful work (4 D a pair forward, 10 D backward), best of several runs. With one thread, time is the processor's,
 * so that a busy machine does not count. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core/alloc.h"
#include "core/dtype.h"
#include "core/philox.h"
#include "device/kernel.h"
#include "device/rows.h"

/* Seconds for each pass of a case. */
static double budget(void) {
    const char *seconds = getenv("BENCH_SECONDS");
    return seconds ? strtod(seconds, NULL) : 1.0;
}

static clockid_t bench_clock = CLOCK_MONOTONIC;

static double now(void) {
    struct timespec t;
    clock_gettime(bench_clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void *noise(ra_dtype dtype, int64_t count, uint64_t seed) {
    void *data = ra_alloc(count * (int64_t)ra_dtype_size(dtype));
    for (int64_t i = 0; i < count; i++) {
        const ra_philox word = ra_philox4x32(seed, (uint32_t)i, 0, 0, 0);
        const float x = ((float)(word.word[0] >> 8) / 8388608.0f - 1) + ((float)(word.word[1] >> 8) / 8388608.0f - 1);
        if (dtype == RA_F32) ((float *)data)[i] = x;
        else if (dtype == RA_BF16) ((uint16_t *)data)[i] = ra_f32_to_bf16(x);
        else ((uint16_t *)data)[i] = ra_f32_to_f16(x);
    }
    return data;
}

typedef struct bench_case {
    ra_dtype dtype;
    int64_t n, heads, dim;
    bool causal;
    int64_t segment, rate; /* 0, 1: dense */
} bench_case;

static void run(const ra_kernel *kernel, ra_workers *workers, const bench_case *c) {
    const int64_t elements = c->n * c->heads * c->dim, rows = c->n * c->heads;
    const ra_dtype dtype = c->dtype;
    ra_problem problem = {.dtype = dtype,
                          .batch = 1,
                          .heads = c->heads,
                          .kv_heads = c->heads,
                          .head_dim = c->dim,
                          .rows_q = c->n,
                          .keys = (c->segment ? c->segment : c->n) / c->rate,
                          .scale = 1 / sqrt((double)c->dim),
                          .left = RA_NO_LIMIT,
                          .right = c->causal ? 0 : RA_NO_LIMIT};
    void *q = noise(dtype, elements, 1), *k = noise(dtype, elements, 2), *v = noise(dtype, elements, 3),
         *dout = noise(dtype, elements, 4);
    void *out = ra_alloc(elements * 4), *lse = ra_alloc(rows * 4), *delta = ra_alloc(rows * 4);
    float *dq = ra_calloc(elements * 4), *dk = ra_calloc(elements * 4), *dv = ra_calloc(elements * 4);
    const int64_t w = c->segment ? c->segment : c->n, r = c->rate;
    ra_item item = {.heads = {0, 1, c->heads},
                    .q = {0, r, 0, r, w / r},
                    .k = {0, r, 0, r, w / r},
                    .rate = r,
                    .loop = {{c->n / w, w, w, w, w, w}, {1, 0, 0, 0, 0, 0}}};
    item.k_view = ra_tensor_bnhd(k, c->n, c->heads, c->dim);
    item.v_view = ra_tensor_bnhd(v, c->n, c->heads, c->dim);
    item.dk_view = ra_tensor_bnhd(dk, c->n, c->heads, c->dim);
    item.dv_view = ra_tensor_bnhd(dv, c->n, c->heads, c->dim);
    const double m = (double)(w / r), pairs = (double)c->heads * (double)(c->n / w) * (c->causal ? m * (m + 1) / 2 : m * m);
    const int64_t bytes = ra_max(kernel->forward_scratch(&problem, ra_workers_count(workers)),
                                 kernel->backward_scratch(&problem, ra_workers_count(workers)));
    void *scratch = ra_alloc(bytes);
    ra_forward_step forward = {.problem = &problem,
                               .items = &item,
                               .item_count = 1,
                               .single = true,
                               .closes = true,
                               .workers = workers,
                               .q = ra_tensor_bnhd(q, c->n, c->heads, c->dim),
                               .out = ra_tensor_bnhd(out, c->n, c->heads, c->dim),
                               .lse = ra_tensor_lse(lse, c->n, c->heads),
                               .scratch = scratch};
    ra_backward_step backward = {.problem = &problem,
                                 .items = &item,
                                 .item_count = 1,
                                 .workers = workers,
                                 .q = forward.q,
                                 .dout = ra_tensor_bnhd(dout, c->n, c->heads, c->dim),
                                 .lse = forward.lse,
                                 .delta = ra_tensor_lse(delta, c->n, c->heads),
                                 .dq_acc = ra_tensor_bnhd(dq, c->n, c->heads, c->dim),
                                 .scratch = scratch};
    double best[2] = {1e30, 1e30};
    ra_rows_fill(&problem, workers, &(ra_used_rows){0}, true, forward.out, forward.lse, forward.lse, forward.lse);
    for (double start = now(), t; now() - start < budget();) {
        t = now();
        kernel->forward(&forward);
        best[0] = fmin(best[0], now() - t);
    }
    ra_rows_delta(&problem, workers, &(ra_used_rows){0}, backward.dout, forward.out, (ra_tensor){0}, backward.delta,
                  problem.rows_q, problem.heads);
    for (double start = now(), t; now() - start < budget();) {
        t = now();
        kernel->backward(&backward);
        best[1] = fmin(best[1], now() - t);
    }
    printf("%-7s %-4s n %6lld h %2lld d %3lld %-6s w %5lld r %lld  threads %d  fwd %8.1f  bwd %8.1f GFLOP/s\n", kernel->name,
           ra_dtype_name(dtype), (long long)c->n, (long long)c->heads, (long long)c->dim, c->causal ? "causal" : "full",
           (long long)c->segment, (long long)r, ra_workers_count(workers), 4e-9 * pairs * (double)c->dim / best[0],
           10e-9 * pairs * (double)c->dim / best[1]);
    fflush(stdout);
    ra_free(scratch, bytes);
    void *all[] = {q, k, v, dout, out, lse, delta, dq, dk, dv};
    for (int i = 0; i < 10; i++)
        ra_free(all[i], i < 4 ? elements * (int64_t)ra_dtype_size(dtype) : i == 5 || i == 6 ? rows * 4 : elements * 4);
}

/* One query of `heads` heads against n keys: what a token costs in decoding. GB/s of K and V read. */
static void decode(const ra_kernel *kernel, ra_workers *workers, ra_dtype dtype, int64_t n, int64_t heads, int64_t kv_heads,
                   int64_t dim) {
    const int64_t elements = n * kv_heads * dim, size = (int64_t)ra_dtype_size(dtype);
    ra_problem problem = {.dtype = dtype,
                          .batch = 1,
                          .heads = heads,
                          .kv_heads = kv_heads,
                          .head_dim = dim,
                          .rows_q = 1,
                          .keys = n,
                          .scale = 1 / sqrt((double)dim),
                          .left = RA_NO_LIMIT,
                          .right = RA_NO_LIMIT};
    void *q = noise(dtype, heads * dim, 1), *k = noise(dtype, elements, 2), *v = noise(dtype, elements, 3),
         *out = ra_alloc(heads * dim * 4);
    ra_item item = {.heads = {0, 1, kv_heads},
                    .q = {0, 1, n - 1, 1, 1},
                    .k = {0, 1, 0, 1, n},
                    .rate = 1,
                    .loop = {{1, 0, 0, 0, 0, 0}, {1, 0, 0, 0, 0, 0}},
                    .k_view = ra_tensor_bnhd(k, n, kv_heads, dim),
                    .v_view = ra_tensor_bnhd(v, n, kv_heads, dim)};
    const int64_t bytes = kernel->forward_scratch(&problem, ra_workers_count(workers));
    ra_forward_step step = {.problem = &problem,
                            .items = &item,
                            .item_count = 1,
                            .single = true,
                            .closes = true,
                            .workers = workers,
                            .q = ra_tensor_bnhd(q, 1, heads, dim),
                            .out = ra_tensor_bnhd(out, 1, heads, dim),
                            .scratch = ra_alloc(bytes)};
    double best = 1e30;
    for (double start = now(), t; now() - start < budget();) {
        t = now();
        kernel->forward(&step);
        best = fmin(best, now() - t);
    }
    printf("%-7s %-4s decode, keys %lld h %lld/%lld d %lld  threads %d  %8.1f us  %6.1f GB/s\n", kernel->name,
           ra_dtype_name(dtype), (long long)n, (long long)heads, (long long)kv_heads, (long long)dim, ra_workers_count(workers),
           1e6 * best, 2e-9 * (double)(elements * size) / best);
    fflush(stdout);
    ra_free(step.scratch, bytes);
    ra_free(q, heads * dim * size);
    ra_free(k, elements * size);
    ra_free(v, elements * size);
    ra_free(out, heads * dim * 4);
}

/* Whole calls of the library at n = 1: through a plan, and by ra_attention, which makes and drops one. Smallest of many. */
static int overhead(int threads) {
    float x[64] = {0}, out[64], lse[1];
    ra_attention_desc desc;
    ra_attention_desc_init(&desc);
    desc.seq_q = desc.seq_k = desc.heads = desc.kv_heads = 1;
    desc.head_dim = 64;
    desc.threads = threads;
    const ra_tensor in = ra_tensor_bnhd(x, 1, 1, 64);
    const ra_forward_args args = {
        .q = in, .k = in, .v = in, .out = ra_tensor_bnhd(out, 1, 1, 64), .lse = ra_tensor_lse(lse, 1, 1)};
    ra_comm *comm;
    ra_plan *plan;
    if (ra_comm_self(&comm) != RA_OK) return 1;
    if (ra_plan_create(comm, &desc, &plan) != RA_OK) return 1;
    double best[2] = {1e30, 1e30};
    for (int i = 0; i < 20000; i++) {
        double t = now();
        if (ra_forward(plan, &args) != RA_OK) return 1;
        best[0] = fmin(best[0], now() - t);
        t = now();
        if (ra_attention(&desc, &args) != RA_OK) return 1;
        best[1] = fmin(best[1], now() - t);
    }
    ra_plan_destroy(plan);
    ra_comm_destroy(comm);
    printf("call at n = 1, threads %d: ra_forward %.2f us, ra_attention %.2f us\n", threads, 1e6 * best[0], 1e6 * best[1]);
    return 0;
}

int main(int argc, char **argv) {
    const int64_t n = argc > 1 ? strtoll(argv[1], NULL, 10) : 4096;
    const int threads = argc > 2 ? (int)strtol(argv[2], NULL, 10) : 1;
    const char *only = argc > 3 ? argv[3] : NULL, *type = argc > 4 ? argv[4] : NULL;
    ra_workers *workers;
    if (n < 1 || threads < 1 || ra_workers_create(threads, &workers) != RA_OK) return 1;
    if (threads == 1) bench_clock = CLOCK_THREAD_CPUTIME_ID;
    const int64_t w = 4096;
    const bench_case cases[] = {
        {RA_F32, n, 1, 64, false, 0, 1},
        {RA_F32, n, 1, 64, true, 0, 1},
        {RA_F32, n, 1, 128, false, 0, 1},
        {RA_F32, n, 1, 128, true, 0, 1},
        {RA_F32, ra_round_up(4 * n, w), 1, 64, false, w, 4},
        {RA_BF16, n, 1, 64, false, 0, 1},
        {RA_BF16, n, 1, 64, true, 0, 1},
        {RA_BF16, n, 1, 128, false, 0, 1},
        {RA_BF16, n, 1, 128, true, 0, 1},
        {RA_BF16, ra_round_up(4 * n, w), 1, 64, false, w, 4},
        {RA_F16, n, 1, 64, false, 0, 1},
        {RA_F16, n, 1, 128, false, 0, 1},
    };
    ra_kernel_info info;
    for (int i = 0; ra_kernel_list(i, &info); i++) {
        if (!info.available || (only && strcmp(only, info.name) != 0)) continue;
        for (size_t j = 0; j < sizeof cases / sizeof *cases; j++) {
            const ra_problem problem = {
                .dtype = cases[j].dtype, .batch = 1, .heads = 1, .kv_heads = 1, .head_dim = cases[j].dim};
            const ra_kernel *kernel;
            if (type && strcmp(type, ra_dtype_name(cases[j].dtype)) != 0) continue;
            if (ra_kernel_find(info.name, RA_DEVICE_CPU, &problem, &kernel) != RA_OK) continue;
            run(kernel, workers, &cases[j]);
            const bool last = j + 1 == sizeof cases / sizeof *cases || cases[j + 1].dtype != cases[j].dtype;
            if (last) decode(kernel, workers, cases[j].dtype, 64 * n, 1, 1, 64);
            if (last) decode(kernel, workers, cases[j].dtype, 8 * n, 32, 8, 128);
        }
    }
    ra_workers_destroy(workers);
    return overhead(threads);
}
