/* Cases: defaults, random descriptors with a taste for edges, and one line of text for each. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support.h"

#define COUNT(array) ((int64_t)(sizeof(array) / sizeof *(array)))

void test_case_init(test_case *c) {
    memset(c, 0, sizeof *c);
    ra_attention_desc_init(&c->desc);
    c->desc.batch = 1;
    c->desc.seq_q = c->desc.seq_k = 16;
    c->desc.heads = c->desc.kv_heads = 2;
    c->desc.head_dim = 8;
    c->desc.schedule = RA_SCHEDULE_RING;
    c->desc.threads = 1;
    c->ranks = 1;
    c->transport = TEST_THREADS;
    c->backward = true;
    c->amplitude = 1;
    c->data_seed = 1;
    test_case_link(c);
}

void test_case_link(test_case *c) {
    c->desc.segment_lengths = c->desc.branches ? c->segment_lengths : NULL;
    c->desc.dilation_rates = c->desc.branches ? c->dilation_rates : NULL;
    c->desc.key_begin = c->key_range ? c->key_begin : NULL;
    c->desc.key_end = c->key_range ? c->key_end : NULL;
}

static int64_t random_length(test_rng *rng, int64_t max) {
    static const int64_t edges[] = {0,  1,  2,  3,  5,  7,  8,  11, 13,  16,  17,  23, 31,
                                    32, 33, 37, 48, 61, 64, 65, 97, 127, 128, 131, 251};
    int64_t n = rng_chance(rng, 70) ? rng_pick(rng, edges, COUNT(edges)) : rng_below(rng, max + 1);
    return n > max ? max - rng_below(rng, max < 4 ? 1 : 4) : n;
}

static int64_t random_segment(test_rng *rng, int64_t n) {
    static const int64_t edges[] = {0, 1, 2, 3, 4, 5, 7, 8, 12, 16, 24, 32};
    switch (rng_below(rng, 8)) {
    case 0: return 0;
    case 1: return n + rng_below(rng, 3); /* one segment, more or less */
    case 2: return n + 1 + rng_below(rng, 2 * n + 2);
    case 3: return 1 + rng_below(rng, n + 1);
    default: return rng_pick(rng, edges, COUNT(edges));
    }
}

static int64_t random_rate(test_rng *rng, int64_t w) {
    static const int64_t edges[] = {1, 1, 2, 2, 3, 4, 5, 7, 8};
    return rng_chance(rng, 10) ? w + 1 + rng_below(rng, 3) : rng_pick(rng, edges, COUNT(edges));
}

void test_case_random(test_case *c, test_rng *rng, int64_t max_seq, int max_ranks) {
    static const int64_t dims[] = {1, 2, 3, 4, 5, 7, 8, 8, 16, 17, 24, 32, 33, 64};
    static const int64_t dtypes[] = {RA_F32, RA_F32, RA_F64, RA_BF16, RA_F16};
    static const int64_t buckets[] = {0, 0, 1, 5, 16};
    test_case_init(c);
    ra_attention_desc *desc = &c->desc;

    desc->dtype = (ra_dtype)rng_pick(rng, dtypes, COUNT(dtypes));
    desc->batch = rng_chance(rng, 3) ? 0 : 1 + rng_below(rng, 3);
    desc->seq_k = random_length(rng, max_seq);
    desc->seq_q = rng_chance(rng, 60) ? desc->seq_k : random_length(rng, max_seq);
    desc->kv_heads = 1 + rng_below(rng, 4);
    desc->heads = desc->kv_heads * (1 + rng_below(rng, 3));
    desc->head_dim = rng_pick(rng, dims, COUNT(dims));

    desc->branches = rng_below(rng, 4);
    for (int64_t n = 0; n < desc->branches; n++) {
        c->segment_lengths[n] = random_segment(rng, desc->seq_k);
        c->dilation_rates[n] = random_rate(rng, c->segment_lengths[n]);
    }
    desc->combine = rng_chance(rng, 50) ? RA_COMBINE_MIX : RA_COMBINE_HEADS;
    if (desc->combine == RA_COMBINE_HEADS && desc->kv_heads < desc->branches) {
        desc->heads = desc->heads / desc->kv_heads * desc->branches;
        desc->kv_heads = desc->branches;
    }
    desc->offset = (ra_offset)rng_below(rng, 4);
    desc->dilate_queries = rng_chance(rng, 50);

    desc->causal = rng_chance(rng, 40);
    if (rng_chance(rng, 30)) {
        int64_t widest = desc->seq_k + 3;
        desc->window_left = rng_chance(rng, 20) ? -1 : rng_below(rng, rng_chance(rng, 50) ? 4 : widest);
        desc->window_right = rng_chance(rng, 20) ? -1 : rng_below(rng, rng_chance(rng, 50) ? 4 : widest);
    }
    c->key_range = rng_chance(rng, 25) && desc->batch > 0;
    for (int64_t b = 0; c->key_range && b < desc->batch; b++) {
        c->key_begin[b] = rng_chance(rng, 40) ? 0 : rng_below(rng, desc->seq_k + 1);
        c->key_end[b] = c->key_begin[b] + rng_below(rng, desc->seq_k - c->key_begin[b] + 1);
    }
    if (rng_chance(rng, 20)) desc->scale = rng_chance(rng, 30) ? -0.3 : 0.7;
    if (rng_chance(rng, 20)) desc->dropout = rng_chance(rng, 30) ? 0.9 : 0.25;
    desc->seed = rng_next(rng);

    desc->layout = (ra_layout)rng_below(rng, 3);
    desc->bucket = rng_pick(rng, buckets, COUNT(buckets));
    desc->threads = rng_chance(rng, 80) ? 1 : 2;
    desc->checksum = rng_chance(rng, 10);
    c->ranks = (int)(1 + rng_below(rng, max_ranks));
    c->transport = c->ranks == 1 && rng_chance(rng, 50) ? TEST_SELF : rng_chance(rng, 50) ? TEST_THREADS : TEST_CUSTOM;
    c->strides = (test_strides)rng_below(rng, TEST_STRIDES);
    c->dlse = rng_chance(rng, 30);
    c->amplitude = rng_chance(rng, 15) && isnan(desc->scale) ? 3 : 1; /* scores of tens at most */
    c->data_seed = rng_next(rng);
    test_case_link(c);
}

static const char *list_text(const int64_t *values, int64_t count, char *buf, size_t bytes) {
    size_t used = 0;
    buf[0] = 0;
    for (int64_t n = 0; n < count && used < bytes; n++) {
        used += (size_t)snprintf(buf + used, bytes - used, "%s%lld", n ? "," : "", (long long)values[n]);
    }
    return buf;
}

const char *test_case_text(const test_case *c, char *buf, size_t bytes) {
    static const char *const dtypes[] = {"f32", "bf16", "f16", "f64"}, *const offsets[] = {"branch", "head", "head-block",
                                                                                           "residue"};
    static const char *const layouts[] = {"contiguous", "zigzag", "striped"}, *const transports[] = {"self", "threads",
                                                                                                     "custom"};
    static const char *const schedules[] = {"auto", "ring", "gather", "merge"}, *const strides[] = {"bnhd", "bhnd", "padded"};
    const ra_attention_desc *d = &c->desc;
    char w[128], r[128], begin[128], end[128];
    snprintf(buf, bytes,
             "%s B=%lld Nq=%lld Nk=%lld Hq=%lld Hk=%lld D=%lld w=[%s] r=[%s] %s offset=%s dilate_queries=%d causal=%d "
             "window=%lld,%lld "
             "keys=[%s)[%s) scale=%g dropout=%g seed=%llu p=%d %s %s schedule=%s bucket=%lld threads=%d checksum=%d %s %s "
             "backward=%d dlse=%d amplitude=%g data=%llu",
             dtypes[d->dtype], (long long)d->batch, (long long)d->seq_q, (long long)d->seq_k, (long long)d->heads,
             (long long)d->kv_heads, (long long)d->head_dim, list_text(c->segment_lengths, d->branches, w, sizeof w),
             list_text(c->dilation_rates, d->branches, r, sizeof r), d->combine == RA_COMBINE_MIX ? "mix" : "heads",
             offsets[d->offset], d->dilate_queries, d->causal, (long long)d->window_left, (long long)d->window_right,
             list_text(c->key_begin, c->key_range ? d->batch : 0, begin, sizeof begin),
             list_text(c->key_end, c->key_range ? d->batch : 0, end, sizeof end), d->scale, d->dropout,
             (unsigned long long)d->seed, c->ranks, layouts[d->layout],
             d->query_placement == RA_REPLICATED ? "replicated" : "sharded", schedules[d->schedule], (long long)d->bucket,
             d->threads, d->checksum, transports[c->transport], strides[c->strides], c->backward, c->dlse, c->amplitude,
             (unsigned long long)c->data_seed);
    return buf;
}

bool test_long(void) {
    const char *value = getenv("RINGATTN_LONG");
    return value && value[0] && strcmp(value, "0") != 0;
}

int64_t test_cases(int64_t fast, int64_t slow) {
    int64_t usual = test_long() ? slow : fast;
    const char *percent = getenv("RINGATTN_EFFORT");
    if (!percent || atoll(percent) <= 0) return usual;
    return usual * atoll(percent) / 100 > 0 ? usual * atoll(percent) / 100 : 1;
}

uint64_t test_seed(uint64_t seed) {
    const char *value = getenv("RINGATTN_SEED");
    return value ? seed * 1000003u + strtoull(value, NULL, 0) : seed;
}
