/* Rows without any key. Where heads have one branch each, the classes are counted one by one in closed form. In `mix` a row is
 * a hole only if every branch leaves it out, and branches overlap in ways that have no simple closed form; but the pattern
 * repeats, so one period of it is walked instead of all rows. */
#include "geometry/count.h"
#include "plan/summary.h"

#define WALK_LIMIT ((int64_t)1 << 16) /* positions walked one by one: some milliseconds */

/* Whether the query at x has a key in the class, in batch entry b. */
static bool has_key(const ra_config *c, const ra_class *class, int64_t b, int64_t x) {
    if (class->segment > 0 && x < 0) return false;
    int64_t origin = class->segment > 0 ? x / class->segment * class->segment : 0;
    bool on_lattice = class->residue || !c->dilate_queries || ra_mod(x - origin - class->offset, class->rate) == 0;
    if (!on_lattice) return false;
    ra_span self = {x, 1, 1};
    ra_span keys = ra_lattice_keys(c, class, origin);
    if (c->has_key_range) keys = ra_span_clip(keys, c->key_begin[b], c->key_end[b]);
    return class->residue ? ra_count_covered_residue(self, keys, class->rate, c->left, c->right) > 0
                          : ra_count_covered(self, keys, c->left, c->right) > 0;
}

static bool serves(const ra_class *class, int64_t head) {
    ra_span h = class->heads;
    return head >= h.start && head <= ra_span_last(h) && (head - h.start) % h.step == 0;
}

/* Whether all KV heads have the same pattern. */
static bool heads_alike(const ra_config *c) { return c->offset == RA_OFFSET_BRANCH || c->offset == RA_OFFSET_RESIDUE; }

/* KV heads that have a key for the query at x. */
static int64_t heads_with_key(const ra_route *route, int64_t b, int64_t x) {
    const ra_config *c = route->config;
    int64_t heads = 0, different = heads_alike(c) ? 1 : c->kv_heads;
    for (int64_t g = 0; g < different; g++) {
        bool any = false;
        for (int64_t i = 0; i < route->rings.class_count && !any; i++)
            any = serves(&route->rings.classes[i], g) && has_key(c, &route->rings.classes[i], b, x);
        heads += any;
    }
    return heads * (c->kv_heads / different);
}

/* After this many positions the pattern repeats, for on-lattice queries that meet at least themselves. */
static int64_t period_of(const ra_route *route) {
    int64_t period = 1;
    for (int64_t i = 0; i < route->rings.class_count; i++) {
        const ra_class *class = &route->rings.classes[i];
        int64_t own = class->segment == 0 || class->segment % class->rate == 0 ? class->rate : class->segment;
        period = ra_sat_mul(period / ra_gcd(period, own), own);
        if (period > WALK_LIMIT) return INT64_MAX;
    }
    return period;
}

static int64_t covered_mix(const ra_route *route, const ra_view *view) {
    const ra_config *c = route->config;
    ra_shard shard = ra_shard_of(c->layout, view->rank, route->ranks, c->seq_q);
    int64_t group = c->heads / c->kv_heads, covered = 0, shift = ra_query_shift(c);
    int64_t work = (heads_alike(c) ? 1 : c->kv_heads) * route->rings.class_count; /* of one position */
    bool periodic = c->dilate_queries && !c->has_key_range && shift >= 0;
    int64_t period = periodic ? period_of(route) : INT64_MAX;
    bool walk_rows = period > shard.count; /* the rows are fewer than the positions of a period */
    int64_t looks = walk_rows ? ra_sat_mul(shard.count, c->batch) : period;
    if (ra_sat_mul(looks, work) > WALK_LIMIT) return -1;
    for (int run = 0; run < 2; run++) {
        ra_span rows = {shard.rows[run].start + shift, shard.rows[run].step, shard.rows[run].count};
        if (walk_rows) {
            for (int64_t b = 0; b < c->batch; b++)
                for (int64_t i = 0; i < rows.count; i++)
                    covered += group * heads_with_key(route, b, rows.start + i * rows.step);
            continue;
        }
        for (int64_t x = 0; x < period && rows.count > 0; x++) {
            ra_span alike = {x, period, (c->seq_k - 1 - x) / period + 1};
            int64_t count = x < c->seq_k ? ra_span_intersect(rows, alike).count : 0;
            if (count > 0) covered += c->batch * group * count * heads_with_key(route, 0, x);
        }
    }
    return covered;
}

int64_t ra_covered_rows(const ra_route *route, const ra_view *view) {
    const ra_config *c = route->config;
    if (c->seq_k == 0) return 0;
    if (c->combine == RA_COMBINE_MIX && c->branches > 1) return covered_mix(route, view);
    return ra_count_over_rings(route, view->rank, true);
}
