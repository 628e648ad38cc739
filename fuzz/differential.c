/* Any bytes as a small problem: the ring, forward and backward, against the float64 reference. */
#include <stdlib.h>

#include "make_desc.h"
#include "verify.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    bytes b = {data, size};
    made_desc made;
    static settings s;
    verdict v;
    make_desc(&b, false, 40, &made);
    made.desc.dropout = take(&b, 1) % 4 == 3 ? 0.3 : 0;
    made.desc.seed = (uint64_t)take(&b, 2);
    made.desc.threads = 1 + (int32_t)(take(&b, 1) % 2);
    int ranks = 1 + (int)(take(&b, 1) % 6);
    if (ra_attention_desc_check(&made.desc) != RA_OK) return 0;
    if (made.desc.kv_heads == 0) made.desc.kv_heads = made.desc.heads;
    s = (settings){.timeout = 20, .start_timeout = 20, .seed = (uint64_t)take(&b, 2)};
    ra_status status = verify_case(&s, &made.desc, ranks, "", &v);
    if (status != RA_OK && status != RA_NOT_AVAILABLE) abort();
    if (status == RA_OK && v.failed) abort();
    return 0;
}
