/* Any bytes as a small problem: the ring, forward and backward, against the float64 reference. */
#include <stdlib.h>

#include "make_desc.h"
#include "turns.h"
#include "verify.h"

/* Small enough for a thousand runs a second; one in 32 is longer, and has rows enough for several tiles. */
static void make_small(bytes *b, made_desc *made) {
    ra_attention_desc *desc = &made->desc;
    bool large = take(b, 1) % 32 == 31;
    make_desc(b, false, large ? 80 : 12, made);
    if (!large) {
        desc->head_dim = desc->head_dim > 3 && take(b, 1) % 8 ? 1 + desc->head_dim % 3 : desc->head_dim;
        int64_t group = desc->kv_heads > 0 ? desc->heads / desc->kv_heads : 1;
        desc->kv_heads = desc->kv_heads > 2 && take(b, 1) % 4 ? 2 : desc->kv_heads;
        desc->heads = group * desc->kv_heads;
    }
    desc->dropout = take(b, 1) % 4 == 3 ? 0.3 : 0;
    desc->seed = (uint64_t)take(b, 2);
    desc->checksum = take(b, 1) % 8 == 7;
    if (take(b, 1) % 4 == 3) desc->kernel = "scalar";
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
