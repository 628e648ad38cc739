/* Digests of outputs and gradients over a grid of small problems, one line each: what tools/bits.sh compares between two builds.
 * It sees only the public header, so that it compiles against either. usage: bits [EVERY]   runs one case in EVERY */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ringattn.h"

enum { MOST_RANKS = 5, TENSORS = 10 };

/* Every element is a finite number near 1 in magnitude, whatever its type: the bits are drawn, not the value. */
static uint64_t draw(uint64_t *state) {
    uint64_t z = *state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static void fill(void *data, int64_t count, ra_dtype dtype, uint64_t seed) {
    for (int64_t i = 0; i < count; i++) {
        const uint64_t bits = draw(&seed);
        const double value = (double)(int64_t)bits * 0x1p-63;
        if (dtype == RA_F64) ((double *)data)[i] = value;
        else if (dtype == RA_F32) ((float *)data)[i] = (float)value;
        else if (dtype == RA_BF16) ((uint16_t *)data)[i] = (uint16_t)((bits & 0x807f) | (uint64_t)(124 + (bits >> 32) % 3) << 7);
        else ((uint16_t *)data)[i] = (uint16_t)((bits & 0x83ff) | (uint64_t)(12 + (bits >> 32) % 3) << 10);
    }
}

static uint64_t digest(uint64_t hash, const void *data, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i++) hash = (hash ^ ((const unsigned char *)data)[i]) * 0x100000001b3u;
    return hash;
}

/* One rank of a problem, on a thread of its own. */
typedef struct rank {
    const ra_attention_desc *desc;
    ra_comm *comm;
    uint64_t forward, backward;
    char error[256];
} rank;

static void *play(void *arg) {
    rank *r = arg;
    const ra_attention_desc *d = r->desc;
    const int me = ra_comm_rank(r->comm), ranks = ra_comm_size(r->comm);
    const bool replicated = d->query_placement == RA_REPLICATED;
    ra_shard queries, keys;
    ra_shard_rows(d, me, ranks, &queries, &keys);
    const int64_t rows_q = replicated ? d->seq_q : queries.count, size = (int64_t)ra_dtype_size(d->dtype);
    const int64_t q = d->batch * rows_q * d->heads, k = d->batch * keys.count * d->kv_heads, lse_size = d->dtype == RA_F64 ? 8 : 4;
    enum { Q, K, V, OUT, DOUT, DQ, DK, DV, LSE, DLSE };
    const int64_t counts[TENSORS] = {q * d->head_dim, k * d->head_dim, k * d->head_dim, q * d->head_dim, q * d->head_dim,
                                     q * d->head_dim, k * d->head_dim, k * d->head_dim, q,               q};
    void *data[TENSORS];
    for (int i = 0; i < TENSORS; i++) {
        const bool of_queries = i != K && i != V && i != DK && i != DV;
        const ra_dtype dtype = i < LSE ? d->dtype : d->dtype == RA_F64 ? RA_F64 : RA_F32;
        data[i] = malloc((size_t)(counts[i] * (i < LSE ? size : lse_size) + 1));
        fill(data[i], counts[i], dtype, (uint64_t)(17 * i) + (of_queries && replicated ? 0 : 1000 * (uint64_t)me));
    }
    ra_tensor t[TENSORS];
    for (int i = 0; i < LSE; i++)
        t[i] = i == K || i == V || i == DK || i == DV ? ra_tensor_bnhd(data[i], keys.count, d->kv_heads, d->head_dim)
                                                     : ra_tensor_bnhd(data[i], rows_q, d->heads, d->head_dim);
    for (int i = LSE; i < TENSORS; i++) t[i] = ra_tensor_lse(data[i], rows_q, d->heads);
    ra_plan *plan = NULL;
    ra_status status = ra_plan_create(r->comm, d, &plan);
    if (status == RA_OK)
        status = ra_forward(plan, &(ra_forward_args){.q = t[Q], .k = t[K], .v = t[V], .out = t[OUT], .lse = t[LSE]});
    r->forward = digest(digest(0xcbf29ce484222325u, data[OUT], counts[OUT] * size), data[LSE], q * lse_size);
    if (status == RA_OK)
        status = ra_backward(plan, &(ra_backward_args){.q = t[Q],
                                                       .k = t[K],
                                                       .v = t[V],
                                                       .out = t[OUT],
                                                       .lse = t[LSE],
                                                       .dout = t[DOUT],
                                                       .dlse = t[DLSE],
                                                       .dq = t[DQ],
                                                       .dk = t[DK],
                                                       .dv = t[DV]});
    r->backward = 0xcbf29ce484222325u;
    for (int i = DQ; i <= DV; i++) r->backward = digest(r->backward, data[i], counts[i] * size);
    if (status != RA_OK) snprintf(r->error, sizeof r->error, "%s", ra_last_error());
    ra_plan_destroy(plan);
    for (int i = 0; i < TENSORS; i++) free(data[i]);
    return NULL;
}

static void run(const char *name, const ra_attention_desc *desc, ra_comm **comms, int ranks) {
    rank all[MOST_RANKS];
    pthread_t threads[MOST_RANKS];
    for (int i = 0; i < ranks; i++) {
        all[i] = (rank){.desc = desc, .comm = comms[i]};
        pthread_create(&threads[i], NULL, play, &all[i]);
    }
    uint64_t forward = 0, backward = 0;
    const char *error = "";
    for (int i = 0; i < ranks; i++) {
        pthread_join(threads[i], NULL);
        forward = digest(forward, &all[i].forward, sizeof forward);
        backward = digest(backward, &all[i].backward, sizeof backward);
        if (*all[i].error) error = all[i].error;
    }
    printf("%s: out, lse %016llx dq, dk, dv %016llx%s%s\n", name, (unsigned long long)forward, (unsigned long long)backward,
           *error ? " failed: " : "", error);
}

/* --------------------------------------------------------------------------------------------------------- the grid */

static const int64_t segments[] = {48, 96, 0}, rates[] = {1, 2, 4}, sparse_rates[] = {2, 4, 8}, begins[] = {5, 0};
static int64_t ends[2];

typedef struct pattern {
    const char *name;
    void (*set)(ra_attention_desc *desc);
} pattern;

static void branches(ra_attention_desc *d, const int64_t *rate, ra_combine combine, ra_offset offset) {
    d->segment_lengths = segments;
    d->dilation_rates = rate;
    d->branches = 3;
    d->combine = combine;
    d->offset = offset;
}

static void dense(ra_attention_desc *d) { (void)d; }
static void causal(ra_attention_desc *d) { d->causal = true; }
static void window(ra_attention_desc *d) { d->causal = true, d->window_left = 37; }
static void ranges(ra_attention_desc *d) { ends[0] = d->seq_k, ends[1] = d->seq_k / 2, d->key_begin = begins, d->key_end = ends; }
static void grouped(ra_attention_desc *d) { d->kv_heads = 3, d->causal = true; }
static void dropout(ra_attention_desc *d) { d->dropout = 0.3, d->seed = 99, branches(d, rates, RA_COMBINE_HEADS, RA_OFFSET_HEAD); }
static void dilated(ra_attention_desc *d) { branches(d, rates, RA_COMBINE_HEADS, RA_OFFSET_BRANCH), d->causal = true; }
static void every_query(ra_attention_desc *d) { dilated(d), d->dilate_queries = false; }
static void mix(ra_attention_desc *d) { branches(d, rates, RA_COMBINE_MIX, RA_OFFSET_BRANCH), d->causal = true; }
static void sparse_mix(ra_attention_desc *d) { branches(d, sparse_rates, RA_COMBINE_MIX, RA_OFFSET_HEAD_BLOCK); }
static void residue(ra_attention_desc *d) { branches(d, rates, RA_COMBINE_HEADS, RA_OFFSET_RESIDUE), d->window_left = 60; }

static const pattern patterns[] = {{"dense", dense},     {"causal", causal},   {"window", window},
                                   {"ranges", ranges},   {"grouped", grouped}, {"dropout", dropout},
                                   {"dilated", dilated}, {"all queries", every_query}, {"mix", mix},
                                   {"sparse mix", sparse_mix}, {"residue", residue}};

static const char *const dtypes[] = {"f32", "bf16", "f16", "f64"};
static const char *const layouts[] = {"contiguous", "zigzag", "striped"};
static const char *const schedules[] = {"auto", "ring", "gather", "merge"};

static long every = 1, cases;

static void one(const pattern *p, ra_attention_desc d, ra_comm **comms, int ranks) {
    if (cases++ % every != 0) return;
    char name[200];
    p->set(&d);
    snprintf(name, sizeof name, "%s, %s, %s, p = %d, n = %lld, D = %lld, %s, %s%s", p->name, dtypes[d.dtype], d.kernel, ranks,
             (long long)d.seq_k, (long long)d.head_dim, layouts[d.layout], schedules[d.schedule],
             d.query_placement == RA_REPLICATED ? ", replicated" : "");
    run(name, &d, comms, ranks);
}

/* Every way to spread the problem over the ranks. */
static void spread(const pattern *p, ra_attention_desc d, ra_comm **comms, int ranks) {
    for (int layout = 0; layout < 3; layout++) {
        d.layout = (ra_layout)layout;
        for (int schedule = RA_SCHEDULE_RING; schedule <= RA_SCHEDULE_GATHER; schedule++) {
            d.schedule = (ra_schedule)schedule;
            one(p, d, comms, ranks);
            if (ranks == 1) return;
        }
    }
    d.layout = RA_LAYOUT_CONTIGUOUS;
    d.query_placement = RA_REPLICATED;
    for (int schedule = RA_SCHEDULE_RING; schedule <= RA_SCHEDULE_MERGE; schedule++) {
        d.schedule = (ra_schedule)schedule;
        one(p, d, comms, ranks);
    }
}

int main(int argc, char **argv) {
    if (argc > 1) every = strtol(argv[1], NULL, 10);
    if (every < 1) return fprintf(stderr, "bits: one case in %s is no number of cases; give 1 or more\n", argv[1]), 2;
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (int ranks = 1; ranks <= MOST_RANKS; ranks++) {
        ra_comm *comms[MOST_RANKS];
        if (ra_comm_threads(ranks, comms) != RA_OK) return fprintf(stderr, "%s\n", ra_last_error()), 1;
        ra_kernel_info info;
        for (int index = 0; ra_kernel_list(index, &info); index++) {
            if (!info.available) continue;
            for (int dtype = 0; dtype < 4; dtype++) {
                if (dtype == RA_F64 && strcmp(info.name, "scalar") != 0) continue;
                for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++) {
                    ra_attention_desc d;
                    ra_attention_desc_init(&d);
                    d.dtype = (ra_dtype)dtype;
                    d.kernel = info.name;
                    d.batch = 2;
                    d.seq_q = d.seq_k = 190;
                    d.heads = d.kv_heads = 6;
                    d.head_dim = i % 2 ? 40 : 64;
                    d.bucket = 16;
                    d.threads = 2;
                    spread(&patterns[i], d, comms, ranks);
                    if (ranks > 2 || i % 2 || strcmp(info.name, "scalar") == 0) continue;
                    d.batch = 1; /* whole tiles, and the last of them cut */
                    d.seq_q = d.seq_k = 1100;
                    d.bucket = 256;
                    d.layout = RA_LAYOUT_ZIGZAG;
                    d.schedule = RA_SCHEDULE_RING;
                    if (patterns[i].set != ranges) one(&patterns[i], d, comms, ranks);
                }
            }
        }
        for (int i = 0; i < ranks; i++) ra_comm_destroy(comms[i]);
    }
    return 0;
}
