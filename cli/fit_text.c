/* What plan --fit found, as text to copy. */
#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>

#include "fit.h"

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

static void put_list(writer *w, const char *before, const int_list *list, const char *separator) {
    put(w, "%s", before);
    for (int64_t i = 0; i < list->count; i++) put(w, "%s%lld", i ? separator : "", (long long)list->values[i]);
}

static bool is_dense(const settings *s) {
    return s->segment_lengths.count == 1 && s->segment_lengths.values[0] == 0 && s->dilation_rates.values[0] == 1;
}

static bool is_offset(const settings *s) { return s->combine || s->offset; }

static bool is_windowed(const settings *s) { return s->window[0] >= 0 || s->window[1] >= 0; }

static long long kv_heads(const settings *s) { return (long long)(s->kv_heads ? s->kv_heads : s->heads); }

static long long key_end(const fit_case *f) { return (long long)(f->s->key_range[1] < 0 ? f->found->seq : f->s->key_range[1]); }

static const char *layout_of(const fit_case *f) { return option_word(OPT_LAYOUT, 1 + (int)f->found->layout); }

/* ---------------------------------------------------------------------------------------------------------------- C */

static const char *enumerator(ra_layout layout) {
    return layout == RA_LAYOUT_ZIGZAG    ? "RA_LAYOUT_ZIGZAG"
           : layout == RA_LAYOUT_STRIPED ? "RA_LAYOUT_STRIPED"
                                         : "RA_LAYOUT_CONTIGUOUS";
}

/* A range for each batch entry, all the same; the text does not grow with their number. */
static void put_key_range(writer *w, long long begin, long long end, long long batch) {
    put(w, "static int64_t key_begin[%lld], key_end[%lld];\n", batch, batch);
    put(w, "for (int b = 0; b < %lld; b++) key_begin[b] = %lld, key_end[b] = %lld;\n", batch, begin, end);
    put(w, "desc.key_begin = key_begin; desc.key_end = key_end;\n");
}

void fit_as_c(const fit_case *f, char *text) {
    static const char *const dtypes[] = {"RA_F32", "RA_BF16", "RA_F16", "RA_F64"};
    static const char *const combines[] = {"RA_COMBINE_HEADS", "RA_COMBINE_MIX"};
    static const char *const offsets[] = {"RA_OFFSET_BRANCH", "RA_OFFSET_HEAD", "RA_OFFSET_HEAD_BLOCK", "RA_OFFSET_RESIDUE"};
    const settings *s = f->s;
    const long long batch = (long long)s->batch, seq = (long long)f->found->seq;
    writer w = {text, 0};
    put(&w, "desc.batch = %lld; desc.seq_q = %lld; desc.seq_k = %lld;\n", batch, s->seq_q < 0 ? seq : (long long)s->seq_q,
        seq);
    put(&w, "desc.heads = %lld; desc.kv_heads = %lld; desc.head_dim = %lld;\n", (long long)s->heads, kv_heads(s),
        (long long)s->head_dim);
    if (!is_dense(s)) {
        put_list(&w, "desc.segment_lengths = (int64_t[]){", &s->segment_lengths, ", ");
        put_list(&w, "}; desc.dilation_rates = (int64_t[]){", &s->dilation_rates, ", ");
        put(&w, "}; desc.branches = %lld;\n", (long long)s->segment_lengths.count);
    }
    if (is_offset(s)) put(&w, "desc.combine = %s; desc.offset = %s;\n", combines[s->combine], offsets[s->offset]);
    if (!s->dilate_queries) put(&w, "desc.dilate_queries = false;\n");
    if (s->causal) put(&w, "desc.causal = true;\n");
    if (is_windowed(s))
        put(&w, "desc.window_left = %lld; desc.window_right = %lld;\n", (long long)s->window[0], (long long)s->window[1]);
    if (s->given[OPT_KEY_RANGE] && batch > 0) put_key_range(&w, (long long)s->key_range[0], key_end(f), batch);
    if (s->given[OPT_SCALE]) put(&w, "desc.scale = %.17g;\n", s->scale);
    if (s->dropout > 0) put(&w, "desc.dropout = %.17g; desc.seed = %lluu;\n", s->dropout, (unsigned long long)s->seed);
    if (s->query_placement) put(&w, "desc.query_placement = RA_REPLICATED;\n");
    if (s->threads) put(&w, "desc.threads = %lld;\n", (long long)s->threads);
    if (s->kernel) put(&w, "desc.kernel = \"%s\";\n", option_word(OPT_KERNEL, s->kernel));
    if (s->checksum) put(&w, "desc.checksum = true;\n");
    if (s->device == DEVICE_CUDA) put(&w, "desc.device = RA_DEVICE_CUDA;%s\n", s->offload ? " desc.offload = true;" : "");
    if (s->offload) put(&w, "desc.memory_limit = %lld;\n", (long long)s->memory_limit); /* blocks are cut to it */
    put(&w, "desc.dtype = %s; desc.layout = %s; desc.schedule = RA_SCHEDULE_", dtypes[s->dtype], enumerator(f->found->layout));
    for (const char *c = f->schedule; *c; c++) put(&w, "%c", toupper((unsigned char)*c));
    put(&w, "; desc.bucket = %lld;", (long long)f->found->bucket);
}

/* ----------------------------------------------------------------------------------------------------- command line */

void fit_as_command(const fit_case *f, char *text) {
    const settings *s = f->s;
    writer w = {text, 0};
    put(&w, "ringattn bench --ring-size %d --batch %lld --seq %lld --heads %lld --kv-heads %lld --head-dim %lld", f->ranks,
        (long long)s->batch, (long long)f->found->seq, (long long)s->heads, kv_heads(s), (long long)s->head_dim);
    if (f->backward) put(&w, " --pass both");
    if (s->seq_q >= 0) put(&w, " --seq-q %lld", (long long)s->seq_q);
    if (!is_dense(s)) {
        put_list(&w, " --segment-lengths ", &s->segment_lengths, ",");
        put_list(&w, " --dilation-rates ", &s->dilation_rates, ",");
    }
    if (is_offset(s)) {
        put(&w, " --combine %s", option_word(OPT_COMBINE, s->combine));
        put(&w, " --offset %s", option_word(OPT_OFFSET, s->offset));
    }
    if (!s->dilate_queries) put(&w, " --dilate-queries no");
    if (is_windowed(s)) put(&w, " --window %lld,%lld", (long long)s->window[0], (long long)s->window[1]);
    if (s->given[OPT_KEY_RANGE]) put(&w, " --key-range %lld:%lld", (long long)s->key_range[0], key_end(f));
    if (s->given[OPT_SCALE]) put(&w, " --scale %.17g", s->scale);
    if (s->dropout > 0) put(&w, " --dropout %.17g --seed %llu", s->dropout, (unsigned long long)s->seed);
    if (s->query_placement) put(&w, " --query-placement replicated");
    put(&w, "%s --dtype %s", s->causal ? " --causal" : "", option_word(OPT_DTYPE, s->dtype));
    put(&w, " --layout %s --schedule %s", layout_of(f), f->schedule);
    if (f->found->bucket) put(&w, " --bucket %lld", (long long)f->found->bucket);
    if (s->threads) put(&w, " --threads %lld", (long long)s->threads);
    if (s->kernel) put(&w, " --kernel %s", option_word(OPT_KERNEL, s->kernel));
    if (s->checksum) put(&w, " --checksum");
    if (s->device == DEVICE_CUDA) put(&w, " --device cuda%s", s->offload ? " --offload" : "");
    if (s->offload) put(&w, " --memory-limit %lld", (long long)s->memory_limit); /* blocks are cut to it */
}

/* ----------------------------------------------------------------------------------------------------------- Python */

void fit_as_python(const fit_case *f, char *text) {
    const settings *s = f->s;
    writer w = {text, 0};
    if (s->offload) {
        put(&w, "# Python has no offload: use C or the command line");
        return;
    }
    put(&w, "ringattn.attention(query, key, value, ");
    if (!is_dense(s)) {
        put_list(&w, "segment_lengths=[", &s->segment_lengths, ", ");
        put_list(&w, "], dilation_rates=[", &s->dilation_rates, ", ");
        put(&w, "], ");
    }
    if (is_offset(s)) {
        put(&w, "combine=\"%s\", ", option_word(OPT_COMBINE, s->combine));
        put(&w, "offset=\"%s\", ", option_word(OPT_OFFSET, s->offset));
    }
    if (!s->dilate_queries) put(&w, "dilate_queries=False, ");
    if (is_windowed(s)) put(&w, "window=(%lld, %lld), ", (long long)s->window[0], (long long)s->window[1]);
    if (s->given[OPT_KEY_RANGE]) put(&w, "key_range=(%lld, %lld), ", (long long)s->key_range[0], key_end(f));
    if (s->given[OPT_SCALE]) put(&w, "scale=%.17g, ", s->scale);
    if (s->dropout > 0) put(&w, "dropout_p=%.17g, seed=%llu, ", s->dropout, (unsigned long long)s->seed);
    if (s->query_placement) put(&w, "query_placement=\"replicated\", ");
    put(&w, "%sgroup=group, layout=\"%s\", schedule=\"%s\"", s->causal ? "is_causal=True, " : "", layout_of(f), f->schedule);
    if (f->found->bucket) put(&w, ", bucket=%lld", (long long)f->found->bucket);
    if (s->threads) put(&w, ", threads=%lld", (long long)s->threads);
    if (s->kernel) put(&w, ", kernel=\"%s\"", option_word(OPT_KERNEL, s->kernel));
    put(&w, ")");
}
