/* A descriptor made of any bytes. */
#ifndef FUZZ_MAKE_DESC_H
#define FUZZ_MAKE_DESC_H

#include <string.h>

#include "ringattn.h"

/* Reads numbers off the input; past the end all are 0. */
typedef struct bytes {
    const uint8_t *at;
    size_t left;
} bytes;

static inline int64_t take(bytes *b, size_t size) {
    uint64_t value = 0;
    size_t n = size < b->left ? size : b->left;
    memcpy(&value, b->at, n);
    b->at += n;
    b->left -= n;
    return (int64_t)value;
}

/* A wild number one time in eight (if wanted), else one in the range in which most of the code runs. */
static inline int64_t number(bytes *b, bool wild, int64_t usual) {
    int64_t kind = take(b, 1);
    return wild && kind % 8 == 7 ? take(b, 8) : take(b, 2) % (usual + 1);
}

typedef struct made_desc {
    ra_attention_desc desc;
    int64_t segments[4], rates[4], ranges[8];
} made_desc;

/* longest: of sequences, as a rule. */
static inline void make_desc(bytes *b, bool wild, int64_t longest, made_desc *made) {
    ra_attention_desc *desc = &made->desc;
    ra_attention_desc_init(desc);
    desc->dtype = (ra_dtype)(take(b, 1) % (4 + wild));
    desc->batch = number(b, wild, 2);
    desc->seq_k = number(b, wild, longest);
    desc->seq_q = take(b, 1) % 3 ? desc->seq_k : number(b, wild, longest);
    desc->kv_heads = number(b, wild, 4);
    desc->heads = take(b, 1) % 4 ? (int64_t)((uint64_t)desc->kv_heads * (uint64_t)(1 + take(b, 1) % 3)) : number(b, wild, 8);
    desc->head_dim = number(b, wild, 32);
    desc->branches = take(b, 1) % 5;
    for (int i = 0; i < 4; i++) {
        made->segments[i] = number(b, wild, 100);
        made->rates[i] = number(b, wild, 6);
    }
    desc->segment_lengths = made->segments;
    desc->dilation_rates = made->rates;
    desc->combine = (ra_combine)(take(b, 1) % 3);
    desc->offset = (ra_offset)(take(b, 1) % 5);
    desc->dilate_queries = take(b, 1) & 1;
    desc->causal = take(b, 1) & 1;
    if (take(b, 1) & 1) {
        desc->window_left = (int64_t)((uint64_t)number(b, wild, 100) - 1);
        desc->window_right = (int64_t)((uint64_t)number(b, wild, 100) - 1);
    }
    if ((take(b, 1) & 1) && desc->batch >= 0 && desc->batch <= 4) {
        for (int i = 0; i < 8; i++) made->ranges[i] = number(b, wild, longest);
        desc->key_begin = made->ranges;
        desc->key_end = made->ranges + 4;
    } else if (desc->batch > 4) desc->batch = 4; /* arrays of the plan grow with the batch */
    desc->layout = (ra_layout)(take(b, 1) % 4);
    desc->query_placement = (ra_placement)(take(b, 1) % 8 == 7);
    desc->schedule = (ra_schedule)(take(b, 1) % 5);
    desc->bucket = number(b, wild, 64);
    desc->threads = 1;
}

#endif
