#include "fit.h"

#include "cli.h"
#include "core/size.h"
#include "core/status.h"

#define LONGEST ((int64_t)1 << 40)
#define MOST_BLOCKS 256 /* of offload: the time of a plan grows with their square */
#define NEAR 0.99 /* lengths this close count as equal: then the faster setting wins */

/* The shortest sequence that the options allow. */
static int64_t shortest(const settings *s) { return ra_max(1, ra_max(s->key_range[0], s->key_range[1])); }

static void set_length(const settings *s, description *d, int64_t seq) {
    d->desc.seq_k = seq;
    d->desc.seq_q = s->seq_q >= 0 ? s->seq_q : seq;
    for (int64_t b = 0; d->key_range && s->key_range[1] < 0 && b < d->desc.batch; b++) d->key_range[d->desc.batch + b] = seq;
}

/* Is this no answer about the length, but a failure? What cannot be done at the shortest length cannot be done at all; a longer
 * one may only be more than a kernel's rows or a plan's blocks take. Offloaded blocks shrink until they fit, or none does. */
static bool fails(const settings *s, int64_t seq, ra_status status) {
    if (status == RA_NOT_AVAILABLE || status == RA_INVALID) return seq == shortest(s);
    return status != RA_OK && !(status == RA_NOMEM && s->offload);
}

/* Memory that a sequence of this length takes on the first rank, from which the others differ little; INT64_MAX where there
 * is no such sequence (beyond 64-bit sizes, what a kernel takes or MOST_BLOCKS, or shorter than a key range). */
static ra_status bytes_at(const settings *s, description *d, int64_t seq, int ranks, bool backward, int64_t *bytes) {
    set_length(s, d, seq);
    *bytes = INT64_MAX;
    if (ra_attention_desc_check(&d->desc) != RA_OK) return RA_OK;
    ra_rank_summary r = {.struct_size = sizeof r};
    const ra_status status = ra_plan_summary(&d->desc, 0, ranks, &r);
    if (fails(s, seq, status)) return status;
    const bool blocks = s->offload && status == RA_OK && r.bucket > 0;
    const bool too_many = blocks && ra_ceil_div(ra_max(d->desc.seq_q, seq), r.bucket) > MOST_BLOCKS;
    if (status == RA_OK && !too_many) *bytes = summary_bytes(&r, backward);
    return RA_OK;
}

/* Of long sequences only lengths are tried at which every rank holds whole segments: then a row meets its keys in one place and
 * needs no running state. */
static int64_t rounded(const settings *s, int ranks, int64_t seq) {
    int64_t segment = 0, unit;
    for (int64_t i = 0; i < s->segment_lengths.count; i++) segment = ra_max(segment, s->segment_lengths.values[i]);
    if (segment == 0) segment = 512; /* dense: any round number */
    if (!ra_mul(2 * ranks, segment, &unit) || unit > seq / 64) return seq;
    return seq - seq % unit;
}

/* The longest sequence for this layout and bucket; 0 if none. Memory grows nearly in proportion to the length, so
 * proportional guesses come close soon; every fourth guess halves the interval, in case they do not. That of offloaded blocks
 * does not grow, since they shrink: there lengths are doubled, and then the interval is halved. */
static ra_status longest(const settings *s, description *d, int ranks, bool backward, int64_t *seq) {
    int64_t low = 0, high = LONGEST, bytes, guess = shortest(s);
    for (int rounds = 0; high - low > ra_max(1, low >> 12); rounds++) {
        RA_TRY(bytes_at(s, d, guess, ranks, backward, &bytes));
        bool yes = bytes <= s->memory_limit;
        *(yes ? &low : &high) = guess;
        if (!yes && guess == shortest(s)) break;
        double rule = (double)guess * ((double)s->memory_limit / (double)ra_max(1, bytes));
        if (bytes == INT64_MAX || s->offload || rounds % 4 == 3) rule = (double)low + (double)(high - low) / 2;
        else if (yes) rule *= 1.0001; /* beyond it, so that the next one closes the interval */
        if (s->offload && rule > 2 * (double)low) rule = 2 * (double)low;
        guess = rule >= (double)high ? high - 1 : (int64_t)rule;
        guess = rounded(s, ranks, guess);
        if (guess <= low && rounded(s, ranks, high - 1) <= low) break;
        if (guess <= low) guess = low + (high - low) / 2;
        guess = ra_max(low + 1, rounded(s, ranks, guess));
    }
    *seq = low;
    return RA_OK;
}

static ra_status try_setting(const settings *s, const machine *m, description *d, int ranks, bool backward, fit_result *f) {
    machine_prediction p;
    RA_TRY(longest(s, d, ranks, backward, &f->seq));
    if (f->seq == 0) return RA_OK;
    for (;;) { /* another rank may need a little more */
        plan_totals totals;
        set_length(s, d, f->seq);
        RA_TRY(plan_sum(&d->desc, ranks, backward, &totals));
        f->memory_bytes = backward ? totals.backward_max : totals.forward_max;
        if (f->memory_bytes <= s->memory_limit) break;
        int64_t shorter = (int64_t)((double)f->seq * ((double)s->memory_limit / (double)f->memory_bytes));
        f->seq = rounded(s, ranks, ra_min(shorter, f->seq - 1));
        if (f->seq < shortest(s)) f->seq = 0;
        if (f->seq == 0) return RA_OK;
    }
    f->layout = d->desc.layout;
    f->bucket = d->desc.bucket;
    f->seconds = 0;
    if (ranks == 1) return RA_OK; /* the only setting: there is nothing to compare, and many blocks take seconds to plan */
    RA_TRY(machine_predict(m, &d->desc, ranks, &p));
    f->seconds = p.forward + (backward ? p.backward : 0);
    return RA_OK;
}

ra_status fit(const settings *s, const machine *m, int ranks, bool backward, fit_result *best) {
    static const int64_t buckets[] = {16384, 4096, 1024, 256, 64, 16}; /* of equally fast ones the largest */
    enum { BUCKETS = sizeof buckets / sizeof *buckets };
    description d;
    settings open = *s;
    if (!s->offload) open.memory_limit = 0; /* else the library would shrink buckets to make anything fit */
    RA_TRY(describe(&open, shortest(s), ranks, &d));
    fit_result tried[3 * BUCKETS];
    int count = 0;
    ra_status status = RA_OK;
    for (int layout = 0; layout < (ranks == 1 || s->layout != LAYOUT_AUTO ? 1 : 3); layout++)
        for (int bucket = 0; bucket < (ranks == 1 || s->bucket ? 1 : BUCKETS) && status == RA_OK; bucket++) {
            if (ranks > 1 && s->layout == LAYOUT_AUTO) d.desc.layout = (ra_layout)layout;
            d.desc.bucket = s->bucket ? s->bucket : ranks == 1 ? 0 : buckets[bucket];
            status = try_setting(s, m, &d, ranks, backward, &tried[count++]);
        }
    description_free(&d);
    RA_TRY(status);
    int64_t most = 0;
    for (int i = 0; i < count; i++) most = ra_max(most, tried[i].seq);
    if (most == 0)
        return ra_fail(RA_NOMEM, "not even one token fits into --memory-limit %s with --ring-size %d",
                       show_bytes((double)s->memory_limit), ranks);
    best->seq = 0;
    for (int i = 0; i < count; i++)
        if ((double)tried[i].seq >= NEAR * (double)most && (best->seq == 0 || tried[i].seconds < best->seconds))
            *best = tried[i];
    return RA_OK;
}
