#include "rule.h"

#include <stdio.h>

#include "core/size.h"

int64_t rule_branches(const ra_attention_desc *d) { return d->branches ? d->branches : 1; }
int64_t rule_segment(const ra_attention_desc *d, int64_t branch) { return d->branches ? d->segment_lengths[branch] : 0; }
int64_t rule_rate(const ra_attention_desc *d, int64_t branch) { return d->branches ? d->dilation_rates[branch] : 1; }

static int64_t kv_heads(const ra_attention_desc *d) { return d->kv_heads ? d->kv_heads : d->heads; }
static int64_t kv_head(const ra_attention_desc *d, int64_t head) { return head / (d->heads / kv_heads(d)); }
static int64_t position(const ra_attention_desc *d, int64_t query) { return query + d->seq_k - d->seq_q; }

/* combine heads: KV heads in contiguous groups, the larger ones first. */
static int64_t first_kv_head(const ra_attention_desc *d, int64_t branch) {
    int64_t each = kv_heads(d) / rule_branches(d), more = kv_heads(d) % rule_branches(d);
    return branch * each + ra_min(branch, more);
}

int64_t rule_first_head(const ra_attention_desc *d, int64_t branch) {
    return d->combine == RA_COMBINE_MIX ? 0 : first_kv_head(d, branch) * (d->heads / kv_heads(d));
}

static int64_t lattice_offset(const ra_attention_desc *d, int64_t head, int64_t branch) {
    int64_t rate = rule_rate(d, branch), g = kv_head(d, head);
    switch (d->offset) {
    case RA_OFFSET_HEAD: return g % rate;
    case RA_OFFSET_HEAD_BLOCK: return g / ra_ceil_div(kv_heads(d), rate);
    default: return branch % rate;
    }
}

/* The place of a position in its segment. */
static int64_t place(const ra_attention_desc *d, int64_t x, int64_t branch) {
    int64_t w = rule_segment(d, branch);
    return w == 0 ? x : ra_mod(x, w);
}

rule rule_of(const ra_attention_desc *d, int64_t query, int64_t key, int64_t head, int64_t branch) {
    int64_t x = position(d, query), w = rule_segment(d, branch), r = rule_rate(d, branch), g = kv_head(d, head);
    if (d->combine == RA_COMBINE_HEADS && (g < first_kv_head(d, branch) || g >= first_kv_head(d, branch + 1)))
        return RULE_OTHER_BRANCH;
    if (w > 0 && x < 0) return RULE_BEFORE_START;
    if (w > 0 && x / w != key / w) return RULE_OTHER_SEGMENT;
    if (d->offset == RA_OFFSET_RESIDUE) {
        if (ra_mod(place(d, x, branch) - place(d, key, branch), r) != 0) return RULE_OTHER_RESIDUE;
    } else {
        int64_t o = lattice_offset(d, head, branch);
        if (d->dilate_queries && ra_mod(place(d, x, branch), r) != o) return RULE_QUERY_OFF;
        if (place(d, key, branch) % r != o) return RULE_KEY_OFF;
    }
    if (d->causal && key > x) return RULE_CAUSAL;
    if (d->window_left >= 0 && key < x - d->window_left) return RULE_WINDOW;
    if (d->window_right >= 0 && key > x + d->window_right) return RULE_WINDOW;
    if (d->key_begin && (key < d->key_begin[0] || key >= d->key_end[0])) return RULE_KEY_RANGE;
    return RULE_ATTENDED;
}

const char *rule_name(rule r) {
    static const char *const names[] = {
        "attended",        "other-branch",  "before-start", "other-segment", "query-off-lattice",
        "key-off-lattice", "other-residue", "causal",       "window",        "key-range"};
    return names[r];
}

void rule_sentence(const ra_attention_desc *d, int64_t query, int64_t key, int64_t head, int64_t branch, char *text,
                   size_t size) {
    long long x = (long long)position(d, query), y = (long long)key, w = (long long)rule_segment(d, branch);
    long long r = (long long)rule_rate(d, branch);
    switch (rule_of(d, query, key, head, branch)) {
    case RULE_ATTENDED: snprintf(text, size, "attended"); break;
    case RULE_OTHER_BRANCH: snprintf(text, size, "not this head's branch (combine heads)"); break;
    case RULE_BEFORE_START: snprintf(text, size, "the query's position %lld lies before the first segment", x); break;
    case RULE_OTHER_SEGMENT:
        snprintf(text, size, "position %lld is in segment %lld, the key in segment %lld", x, x / w, y / w);
        break;
    case RULE_QUERY_OFF:
        snprintf(text, size, "the query is off the lattice: place %lld of its segment is not %lld modulo %lld",
                 (long long)place(d, x, branch), (long long)lattice_offset(d, head, branch), r);
        break;
    case RULE_KEY_OFF:
        snprintf(text, size, "the key is off the lattice: place %lld of its segment is not %lld modulo %lld",
                 (long long)place(d, key, branch), (long long)lattice_offset(d, head, branch), r);
        break;
    case RULE_OTHER_RESIDUE: snprintf(text, size, "query and key have different residues modulo %lld", r); break;
    case RULE_CAUSAL: snprintf(text, size, "causal: key %lld comes after position %lld", y, x); break;
    case RULE_WINDOW: snprintf(text, size, "key %lld is outside the window of position %lld", y, x); break;
    case RULE_KEY_RANGE: snprintf(text, size, "key %lld is outside the key range", y); break;
    }
}
