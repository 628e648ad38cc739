/* Any bytes as a small problem: the ring, forward and backward, against the float64 reference. */
#include <stdlib.h>

#include "make_desc.h"
#include "turns.h"
#include "verify.h"

/* A fuzzer breeds whatever runs through more code more often, which here would be whatever is large: what makes a run long is
 * not for it to choose but drawn from a hash of the input. */
static bool draw(uint64_t *hash, uint64_t one_in) {
    *hash = (*hash ^ (*hash >> 29)) * 0xBF58476D1CE4E5B9u;
    return (*hash >> 33) % one_in == 0;
}

/* Most inputs are small enough for thousands of runs a second; a few have rows enough for several tiles, or wide heads. */
static void make_small(bytes *b, made_desc *made) {
    ra_attention_desc *desc = &made->desc;
    uint64_t hash = 0xCBF29CE484222325u;
    for (size_t i = 0; i < b->left; i++) hash = (hash ^ b->at[i]) * 0x100000001B3u;
    make_desc(b, false, draw(&hash, 128) ? 80 : 9, made);
    int64_t group = desc->kv_heads > 0 ? desc->heads / desc->kv_heads : 1;
    if (group > 2 && !draw(&hash, 16)) group = 2;
    if (desc->kv_heads > 2 && !draw(&hash, 16)) desc->kv_heads = 2;
    desc->heads = group * desc->kv_heads;
    if (desc->head_dim > 3 && !draw(&hash, 32)) desc->head_dim = 1 + desc->head_dim % 3;
    if (desc->batch > 1 && !draw(&hash, 16)) desc->batch = 1;
    if (desc->branches > 2 && !draw(&hash, 8)) desc->branches = 2;
    if (desc->dtype == RA_F64 && !draw(&hash, 4)) desc->dtype = RA_F32;
    desc->dropout = take(b, 1) % 4 == 3 ? 0.3 : 0;
    desc->seed = (uint64_t)take(b, 2);
    desc->checksum = take(b, 1) % 8 == 7;
    if (draw(&hash, 16)) desc->kernel = "scalar";
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    bytes b = {data, size};
    made_desc made;
    static settings s;
    verdict v;
    group g;
    ra_comm *comms[TURNS_RANKS];
    make_small(&b, &made);
    int ranks = 1 + (int)(take(&b, 1) % TURNS_RANKS);
    if (ra_attention_desc_check(&made.desc) != RA_OK) return -1; /* the fuzzer of descriptors has those */
    if (made.desc.kv_heads == 0) made.desc.kv_heads = made.desc.heads;
    s.seed = (uint64_t)take(&b, 2);
    if (turns_open(ranks, comms, &g) != RA_OK) abort();
    ra_status status = verify_on(&g, &s, &made.desc, "", &v);
    turns_close(&g);
    if (status != RA_OK && status != RA_NOT_AVAILABLE) abort();
    if (status == RA_OK && v.failed) abort();
    return 0;
}
