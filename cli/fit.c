#include "fit.h"

#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>

#include "cli.h"
#include "core/size.h"
#include "core/status.h"

#define LONGEST ((int64_t)1 << 40)
#define NEAR 0.99 /* lengths this close count as equal: then the faster setting wins */

/* The shortest sequence that the options allow. */
static int64_t shortest(const settings *s) { return ra_max(1, ra_max(s->key_range[0], s->key_range[1])); }

static void set_length(const settings *s, description *d, int64_t seq) {
    d->desc.seq_k = seq;
    d->desc.seq_q = s->seq_q >= 0 ? s->seq_q : seq;
    for (int64_t b = 0; d->key_range && s->key_range[1] < 0 && b < d->desc.batch; b++) d->key_range[d->desc.batch + b] = seq;
}

/* Memory that a sequence of this length takes on the first rank, from which the others differ little; INT64_MAX where there
 * is no such sequence (beyond 64-bit sizes, or shorter than a key range). */
static ra_status bytes_at(const settings *s, description *d, int64_t seq, int ranks, bool backward, int64_t *bytes) {
    set_length(s, d, seq);
    *bytes = INT64_MAX;
    if (ra_attention_desc_check(&d->desc) != RA_OK) return RA_OK;
    ra_rank_summary r = {.struct_size = sizeof r};
    RA_TRY(ra_plan_summary(&d->desc, 0, ranks, &r));
    *bytes = summary_bytes(&r, backward);
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
 * proportional guesses come close soon; every fourth guess halves the interval, in case they do not. */
static ra_status longest(const settings *s, description *d, int ranks, bool backward, int64_t *seq) {
    int64_t low = 0, high = LONGEST, bytes, guess = shortest(s);
    for (int rounds = 0; high - low > ra_max(1, low >> 12); rounds++) {
        RA_TRY(bytes_at(s, d, guess, ranks, backward, &bytes));
        bool yes = bytes <= s->memory_limit;
        *(yes ? &low : &high) = guess;
        if (!yes && guess == shortest(s)) break;
        double rule = (double)guess * ((double)s->memory_limit / (double)ra_max(1, bytes));
        if (bytes == INT64_MAX || rounds % 4 == 3) rule = (double)low + (double)(high - low) / 2;
        else if (yes) rule *= 1.0001; /* beyond it, so that the next one closes the interval */
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
    RA_TRY(machine_predict(m, &d->desc, ranks, &p));
    f->seconds = p.forward + (backward ? p.backward : 0);
    f->layout = d->desc.layout;
    f->bucket = d->desc.bucket;
    return RA_OK;
}

ra_status fit(const settings *s, const machine *m, int ranks, bool backward, fit_result *best) {
    static const int64_t buckets[] = {16384, 4096, 1024, 256, 64, 16}; /* of equally fast ones the largest */
    enum { BUCKETS = sizeof buckets / sizeof *buckets };
    description d;
    settings open = *s;
    open.memory_limit = 0; /* else the library would shrink buckets to make anything fit */
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
        return ra_fail(RA_NOMEM, "not even one token fits into --memory-limit %s on %d ranks",
                       show_bytes((double)s->memory_limit), ranks);
    best->seq = 0;
    for (int i = 0; i < count; i++)
        if ((double)tried[i].seq >= NEAR * (double)most && (best->seq == 0 || tried[i].seconds < best->seconds))
            *best = tried[i];
    return RA_OK;
}

/* ------------------------------------------------------------------------------------------------------------- text */

typedef struct writer {
    char *text;
    int used;
} writer;

static void put(writer *w, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void put(writer *w, const char *format, ...) {
    va_list args;
    va_start(args, format);
    if (w->used < FIT_TEXT) w->used += vsnprintf(w->text + w->used, (size_t)(FIT_TEXT - w->used), format, args);
    va_end(args);
}

static void put_list(writer *w, const int_list *list, const char *separator) {
    for (int64_t i = 0; i < list->count; i++) put(w, "%s%lld", i ? separator : "", (long long)list->values[i]);
}

static const char *enumerator(ra_layout layout) {
    return layout == RA_LAYOUT_ZIGZAG    ? "RA_LAYOUT_ZIGZAG"
           : layout == RA_LAYOUT_STRIPED ? "RA_LAYOUT_STRIPED"
                                         : "RA_LAYOUT_CONTIGUOUS";
}

/* A range for each batch entry, all the same; the text does not grow with their number. */
static void put_key_range(writer *w, long long begin, long long end, int64_t batch) {
    put(w, "static int64_t key_begin[%lld], key_end[%lld];\n", (long long)batch, (long long)batch);
    put(w, "for (int b = 0; b < %lld; b++) key_begin[b] = %lld, key_end[b] = %lld;\n", (long long)batch, begin, end);
    put(w, "desc.key_begin = key_begin; desc.key_end = key_end;\n");
}

void fit_text(const settings *s, const fit_result *f, int ranks, const char *schedule, char *c, char *cli, char *python) {
    static const char *const dtypes[] = {"RA_F32", "RA_BF16", "RA_F16", "RA_F64"};
    bool dense = s->segment_lengths.count == 1 && s->segment_lengths.values[0] == 0 && s->dilation_rates.values[0] == 1;
    long long kv_heads = (long long)(s->kv_heads ? s->kv_heads : s->heads);
    char dtype[16], layout[16];
    snprintf(dtype, sizeof dtype, "%s", option_word(OPT_DTYPE, s->dtype));
    snprintf(layout, sizeof layout, "%s", option_word(OPT_LAYOUT, 1 + (int)f->layout));
    writer w = {c, 0};
    long long queries = (long long)(s->seq_q >= 0 ? s->seq_q : f->seq);
    put(&w, "desc.batch = %lld; desc.seq_q = %lld; desc.seq_k = %lld;\n", (long long)s->batch, queries, (long long)f->seq);
    put(&w, "desc.heads = %lld; desc.kv_heads = %lld; desc.head_dim = %lld;\n", (long long)s->heads, kv_heads,
        (long long)s->head_dim);
    if (!dense) {
        put(&w, "desc.segment_lengths = (int64_t[]){");
        put_list(&w, &s->segment_lengths, ", ");
        put(&w, "}; desc.dilation_rates = (int64_t[]){");
        put_list(&w, &s->dilation_rates, ", ");
        put(&w, "}; desc.branches = %lld;\n", (long long)s->segment_lengths.count);
    }
    static const char *const combines[] = {"RA_COMBINE_HEADS", "RA_COMBINE_MIX"};
    static const char *const offsets[] = {"RA_OFFSET_BRANCH", "RA_OFFSET_HEAD", "RA_OFFSET_HEAD_BLOCK", "RA_OFFSET_RESIDUE"};
    bool window = s->window[0] >= 0 || s->window[1] >= 0;
    long long left = (long long)s->window[0], right = (long long)s->window[1];
    bool ranged = s->given[OPT_KEY_RANGE];
    long long key_begin = (long long)s->key_range[0], key_end = (long long)(s->key_range[1] < 0 ? f->seq : s->key_range[1]);
    char upper[16] = "";
    for (int i = 0; schedule[i] && i < 15; i++) upper[i] = (char)toupper((unsigned char)schedule[i]);
    if (s->combine || s->offset) put(&w, "desc.combine = %s; desc.offset = %s;\n", combines[s->combine], offsets[s->offset]);
    if (!s->dilate_queries) put(&w, "desc.dilate_queries = false;\n");
    if (s->causal) put(&w, "desc.causal = true;\n");
    if (window) put(&w, "desc.window_left = %lld; desc.window_right = %lld;\n", left, right);
    if (ranged && s->batch > 0) put_key_range(&w, key_begin, key_end, s->batch);
    if (s->given[OPT_SCALE]) put(&w, "desc.scale = %.17g;\n", s->scale);
    if (s->dropout > 0) put(&w, "desc.dropout = %.17g; desc.seed = %lluu;\n", s->dropout, (unsigned long long)s->seed);
    if (s->query_placement) put(&w, "desc.query_placement = RA_REPLICATED;\n");
    if (s->threads) put(&w, "desc.threads = %lld;\n", (long long)s->threads);
    if (s->kernel) put(&w, "desc.kernel = \"%s\";\n", option_word(OPT_KERNEL, s->kernel));
    if (s->checksum) put(&w, "desc.checksum = true;\n");
    if (s->device == DEVICE_CUDA) put(&w, "desc.device = RA_DEVICE_CUDA;%s\n", s->offload ? " desc.offload = true;" : "");
    put(&w, "desc.dtype = %s; desc.layout = %s; desc.schedule = RA_SCHEDULE_%s; desc.bucket = %lld;", dtypes[s->dtype],
        enumerator(f->layout), upper, (long long)f->bucket);

    w = (writer){cli, 0};
    put(&w, "ringattn bench --ring-size %d --batch %lld --seq %lld --heads %lld --kv-heads %lld --head-dim %lld", ranks,
        (long long)s->batch, (long long)f->seq, (long long)s->heads, kv_heads, (long long)s->head_dim);
    if (s->seq_q >= 0) put(&w, " --seq-q %lld", queries);
    if (!dense) {
        put(&w, " --segment-lengths ");
        put_list(&w, &s->segment_lengths, ",");
        put(&w, " --dilation-rates ");
        put_list(&w, &s->dilation_rates, ",");
    }
    if (s->combine || s->offset) {
        put(&w, " --combine %s", option_word(OPT_COMBINE, s->combine));
        put(&w, " --offset %s", option_word(OPT_OFFSET, s->offset));
    }
    if (!s->dilate_queries) put(&w, " --dilate-queries no");
    if (window) put(&w, " --window %lld,%lld", left, right);
    if (ranged) put(&w, " --key-range %lld:%lld", key_begin, key_end);
    if (s->given[OPT_SCALE]) put(&w, " --scale %.17g", s->scale);
    if (s->dropout > 0) put(&w, " --dropout %.17g --seed %llu", s->dropout, (unsigned long long)s->seed);
    if (s->query_placement) put(&w, " --query-placement replicated");
    put(&w, "%s --dtype %s --layout %s --schedule %s", s->causal ? " --causal" : "", dtype, layout, schedule);
    if (f->bucket) put(&w, " --bucket %lld", (long long)f->bucket);
    if (s->threads) put(&w, " --threads %lld", (long long)s->threads);
    if (s->kernel) put(&w, " --kernel %s", option_word(OPT_KERNEL, s->kernel));
    if (s->checksum) put(&w, " --checksum");
    if (s->device == DEVICE_CUDA) put(&w, " --device cuda%s", s->offload ? " --offload" : "");

    w = (writer){python, 0};
    put(&w, "ringattn.attention(query, key, value, ");
    if (!dense) {
        put(&w, "segment_lengths=[");
        put_list(&w, &s->segment_lengths, ", ");
        put(&w, "], dilation_rates=[");
        put_list(&w, &s->dilation_rates, ", ");
        put(&w, "], ");
    }
    if (s->combine || s->offset) {
        put(&w, "combine=\"%s\", ", option_word(OPT_COMBINE, s->combine));
        put(&w, "offset=\"%s\", ", option_word(OPT_OFFSET, s->offset));
    }
    if (!s->dilate_queries) put(&w, "dilate_queries=False, ");
    if (window) put(&w, "window=(%lld, %lld), ", left, right);
    if (ranged) put(&w, "key_range=(%lld, %lld), ", key_begin, key_end);
    if (s->given[OPT_SCALE]) put(&w, "scale=%.17g, ", s->scale);
    if (s->dropout > 0) put(&w, "dropout_p=%.17g, seed=%llu, ", s->dropout, (unsigned long long)s->seed);
    if (s->query_placement) put(&w, "query_placement=\"replicated\", ");
    put(&w, "%sgroup=group, layout=\"%s\", schedule=\"%s\"", s->causal ? "is_causal=True, " : "", layout, schedule);
    if (f->bucket) put(&w, ", bucket=%lld", (long long)f->bucket);
    if (s->threads) put(&w, ", threads=%lld", (long long)s->threads);
    if (s->kernel) put(&w, ", kernel=\"%s\"", option_word(OPT_KERNEL, s->kernel));
    put(&w, ")");
}
