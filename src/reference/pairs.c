/* Which query meets which key: the definition, read aloud. */
#include <math.h>

#include "reference/reference.h"

static int64_t floor_div(int64_t a, int64_t b) {
    int64_t q = a / b;
    return a % b != 0 && (a < 0) != (b < 0) ? q - 1 : q;
}

static int64_t floor_mod(int64_t a, int64_t b) { return a - floor_div(a, b) * b; }

static int64_t kv_heads(const ra_attention_desc *desc) { return desc->kv_heads ? desc->kv_heads : desc->heads; }

static int64_t segment_length(const ra_attention_desc *desc, int64_t branch) {
    return desc->branches ? desc->segment_lengths[branch] : 0;
}

static int64_t dilation_rate(const ra_attention_desc *desc, int64_t branch) {
    return desc->branches ? desc->dilation_rates[branch] : 1;
}

static int64_t position(const ra_attention_desc *desc, int64_t i) { return i + (desc->seq_k - desc->seq_q); }

int64_t ref_branches(const ra_attention_desc *desc) { return desc->branches ? desc->branches : 1; }

int64_t ref_kv_head(const ra_attention_desc *desc, int64_t head) { return head / (desc->heads / kv_heads(desc)); }

/* KV heads are dealt in contiguous runs: the first Hk mod G branches get one more. */
static int64_t branch_of_kv_head(const ra_attention_desc *desc, int64_t kv_head) {
    int64_t groups = ref_branches(desc), total = kv_heads(desc), first = 0;
    for (int64_t group = 0; group < groups; group++) {
        int64_t size = total / groups + (group < total % groups ? 1 : 0);
        if (kv_head < first + size) return group;
        first += size;
    }
    return -1;
}

static int64_t lattice_offset(const ra_attention_desc *desc, int64_t kv_head, int64_t branch) {
    int64_t r = dilation_rate(desc, branch);
    switch (desc->offset) {
    case RA_OFFSET_BRANCH: return branch % r;
    case RA_OFFSET_HEAD: return kv_head % r;
    case RA_OFFSET_HEAD_BLOCK: return kv_head / ((kv_heads(desc) + r - 1) / r);
    case RA_OFFSET_RESIDUE: break;
    }
    return -1;
}

bool ref_attended(const ra_attention_desc *desc, int64_t batch, int64_t i, int64_t y, int64_t head, int64_t branch) {
    int64_t kv_head = ref_kv_head(desc, head);
    if (desc->combine == RA_COMBINE_HEADS && branch_of_kv_head(desc, kv_head) != branch) return false;

    int64_t x = position(desc, i), w = segment_length(desc, branch), r = dilation_rate(desc, branch);
    int64_t tx = x, ty = y;
    if (w > 0) {
        if (x < 0) return false;
        if (floor_div(x, w) != floor_div(y, w)) return false;
        tx = floor_mod(x, w);
        ty = floor_mod(y, w);
    }
    if (desc->offset == RA_OFFSET_RESIDUE) {
        if (floor_mod(ty, r) != floor_mod(tx, r)) return false;
    } else {
        int64_t o = lattice_offset(desc, kv_head, branch);
        if (floor_mod(ty, r) != o) return false;
        if (desc->dilate_queries && floor_mod(tx, r) != o) return false;
    }
    if (desc->causal && y > x) return false;
    if (desc->window_left >= 0 && y < x - desc->window_left) return false;
    if (desc->window_right >= 0 && y > x + desc->window_right) return false;
    if (desc->key_begin && y < desc->key_begin[batch]) return false;
    if (desc->key_end && y >= desc->key_end[batch]) return false;
    return y >= 0 && y < desc->seq_k;
}

void ref_key_hull(const ra_attention_desc *desc, int64_t i, int64_t branch, int64_t *lo, int64_t *hi) {
    int64_t w = segment_length(desc, branch), x = position(desc, i);
    *lo = 0;
    *hi = desc->seq_k;
    if (w > 0) {
        *lo = x < 0 ? 0 : x - x % w;
        if (x < 0) *hi = 0;
        if (x >= 0 && *hi - *lo > w) *hi = *lo + w;
    }
}

void ref_query_hull(const ra_attention_desc *desc, int64_t y, int64_t branch, int64_t *lo, int64_t *hi) {
    int64_t w = segment_length(desc, branch), shift = desc->seq_k - desc->seq_q;
    *lo = 0;
    *hi = desc->seq_q;
    if (w > 0) {
        int64_t start = y - y % w - shift; /* as a query index */
        if (start > *lo) *lo = start;
        if (*hi - start > w) *hi = start + w;
    }
}

/* Philox4x32 with 10 rounds (Salmon et al., 2011): multiply, cross over, bump the key by the Weyl constants. */
static uint32_t philox_word(uint64_t seed, const uint32_t counter[4], int64_t which) {
    uint64_t c[4] = {counter[0], counter[1], counter[2], counter[3]};
    uint64_t key[2] = {seed & UINT32_MAX, seed >> 32};
    for (int round = 0; round < 10; round++) {
        uint64_t first = 0xD2511F53u * c[0], second = 0xCD9E8D57u * c[2];
        uint64_t next[4] = {(second >> 32) ^ c[1] ^ key[0], second & UINT32_MAX, (first >> 32) ^ c[3] ^ key[1],
                            first & UINT32_MAX};
        for (int n = 0; n < 4; n++) c[n] = next[n];
        key[0] = (key[0] + 0x9E3779B9u) & UINT32_MAX;
        key[1] = (key[1] + 0xBB67AE85u) & UINT32_MAX;
    }
    return (uint32_t)c[which];
}

/* The place of a key on its lattice is its number among the lattice points of its segment, t = o + place * r. */
bool ref_kept(const ra_attention_desc *desc, int64_t batch, int64_t i, int64_t y, int64_t head, int64_t branch) {
    if (!(desc->dropout > 0)) return true;
    int64_t w = segment_length(desc, branch), x = position(desc, i);
    int64_t place = (w > 0 ? y % w : y) / dilation_rate(desc, branch);
    int64_t quad = place >> 2;
    uint64_t high_x = ((uint64_t)x >> 32) & 0xfff, high_quad = ((uint64_t)quad >> 32) & 0xfff;
    uint32_t counter[4] = {(uint32_t)((uint64_t)x & UINT32_MAX), (uint32_t)((uint64_t)quad & UINT32_MAX),
                           (uint32_t)(batch * desc->heads + head),
                           (uint32_t)((uint64_t)branch + 256 * (high_x + 4096 * high_quad))};
    return (double)philox_word(desc->seed, counter, place & 3) >= floor(desc->dropout * 4294967296.0);
}
