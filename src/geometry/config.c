#include "geometry/config.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "core/dtype.h"
#include "core/status.h"

/* Raised only when a field changes its meaning. */
#define DESC_VERSION 1u

void ra_attention_desc_init(ra_attention_desc *desc) {
    if (!desc) return;
    *desc = (ra_attention_desc){.struct_size = (uint32_t)sizeof *desc,
                                .version = DESC_VERSION,
                                .dtype = RA_F32,
                                .batch = 1,
                                .dilate_queries = true,
                                .window_left = -1,
                                .window_right = -1,
                                .scale = (double)NAN};
}

static ra_status check_range(const char *field, int64_t value, int64_t low, int64_t high) {
    if (value >= low && value <= high) return RA_OK;
    return ra_fail(RA_INVALID, "%s is %" PRId64 ", which is not in %" PRId64 "..%" PRId64, field, value, low, high);
}

static ra_status check_enum(const char *field, unsigned value, unsigned count) {
    if (value < count) return RA_OK;
    return ra_fail(RA_INVALID, "%s has the unknown value %u", field, value);
}

static ra_status check_shape(const ra_attention_desc *d, int64_t kv_heads) {
    RA_TRY(check_enum("dtype", (unsigned)d->dtype, 4));
    RA_TRY(check_range("batch", d->batch, 0, RA_MAX_SIZE));
    RA_TRY(check_range("seq_q", d->seq_q, 0, RA_MAX_SIZE));
    RA_TRY(check_range("seq_k", d->seq_k, 0, RA_MAX_SIZE));
    RA_TRY(check_range("heads", d->heads, 1, (int64_t)1 << 30));
    RA_TRY(check_range("kv_heads", kv_heads, 1, d->heads));
    if (d->heads % kv_heads != 0)
        return ra_fail(RA_INVALID, "heads is %" PRId64 ", which is not a multiple of kv_heads %" PRId64, d->heads, kv_heads);
    RA_TRY(check_range("head_dim", d->head_dim, 1, RA_MAX_HEAD_DIM));
    int64_t rows = ra_max(d->seq_q, d->seq_k), bytes;
    if (!ra_mul(rows, d->heads, &bytes) || !ra_mul(bytes, d->head_dim, &bytes) || !ra_mul(bytes, d->batch, &bytes) ||
        !ra_mul(bytes, 8, &bytes))
        return ra_fail(RA_INVALID, "batch x seq x heads x head_dim is too large for 64-bit sizes");
    return RA_OK;
}

static ra_status check_pattern(const ra_attention_desc *d, int64_t kv_heads) {
    RA_TRY(check_range("branches", d->branches, 0, RA_MAX_BRANCHES));
    if (d->branches > 0 && (!d->segment_lengths || !d->dilation_rates))
        return ra_fail(RA_INVALID, "branches is %" PRId64 " but %s is NULL", d->branches,
                       d->segment_lengths ? "dilation_rates" : "segment_lengths");
    RA_TRY(check_enum("combine", (unsigned)d->combine, 2));
    RA_TRY(check_enum("offset", (unsigned)d->offset, 4));
    for (int64_t i = 0; i < d->branches; i++) {
        RA_TRY(check_range("segment_lengths", d->segment_lengths[i], 0, RA_MAX_SIZE));
        RA_TRY(check_range("dilation_rates", d->dilation_rates[i], 1, RA_MAX_SIZE));
    }
    if (d->combine == RA_COMBINE_HEADS && kv_heads < d->branches)
        return ra_fail(RA_INVALID,
                       "combine heads deals %" PRId64 " KV heads to %" PRId64
                       " branches, and every branch needs one: use at least as many heads, or combine mix",
                       kv_heads, d->branches);
    RA_TRY(check_range("window_left", d->window_left, -1, RA_MAX_SIZE));
    RA_TRY(check_range("window_right", d->window_right, -1, RA_MAX_SIZE));
    for (int64_t b = 0; b < d->batch && (d->key_begin || d->key_end); b++) {
        int64_t begin = d->key_begin ? d->key_begin[b] : 0, end = d->key_end ? d->key_end[b] : d->seq_k;
        if (begin < 0 || end > d->seq_k || begin > end)
            return ra_fail(RA_INVALID, "key range %" PRId64 ":%" PRId64 " of batch entry %" PRId64 " is not within 0:%" PRId64,
                           begin, end, b, d->seq_k);
    }
    return RA_OK;
}

static ra_status check_numbers(const ra_attention_desc *d) {
    if (isinf(d->scale)) return ra_fail(RA_INVALID, "scale is not finite");
    if (d->dtype != RA_F64 && fabs(d->scale) > (double)FLT_MAX)
        return ra_fail(RA_INVALID, "scale is %g, beyond the range of float, in which %s is computed", d->scale,
                       ra_dtype_name(d->dtype));
    if (!(d->dropout >= 0 && d->dropout < 1)) return ra_fail(RA_INVALID, "dropout is %g, which is not in [0, 1)", d->dropout);
    return RA_OK;
}

static ra_status check_execution(const ra_attention_desc *d) {
    RA_TRY(check_enum("layout", (unsigned)d->layout, 3));
    RA_TRY(check_enum("query_placement", (unsigned)d->query_placement, 2));
    RA_TRY(check_enum("schedule", (unsigned)d->schedule, 4));
    RA_TRY(check_enum("device", (unsigned)d->device, 2));
    RA_TRY(check_range("bucket", d->bucket, 0, RA_MAX_SIZE));
    RA_TRY(check_range("memory_limit", d->memory_limit, 0, INT64_MAX));
    RA_TRY(check_range("threads", d->threads, 0, 4096));
    if (d->kernel && strlen(d->kernel) >= sizeof((ra_config *)0)->kernel)
        return ra_fail(RA_NOT_AVAILABLE, "there is no kernel named '%.40s'", d->kernel);
    if (d->schedule == RA_SCHEDULE_MERGE && d->query_placement != RA_REPLICATED)
        return ra_fail(RA_INVALID, "schedule merge, which never moves K and V, needs query_placement replicated");
    if (d->offload && d->device != RA_DEVICE_CUDA) return ra_fail(RA_INVALID, "offload needs device CUDA");
    if (d->cu_seqlens) return ra_fail(RA_NOT_AVAILABLE, "cu_seqlens (packed documents) is not available in this version");
    if (d->softcap != 0) return ra_fail(RA_NOT_AVAILABLE, "softcap is not available in this version");
    if (d->sinks) return ra_fail(RA_NOT_AVAILABLE, "sinks are not available in this version");
    return RA_OK;
}

ra_status ra_attention_desc_check(const ra_attention_desc *desc) {
    if (!desc) return ra_fail(RA_INVALID, "desc is NULL");
    if (desc->struct_size != sizeof *desc || desc->version != DESC_VERSION)
        return ra_fail(RA_INVALID,
                       "desc has struct_size %u and version %u, this library knows %zu and %u: call ra_attention_desc_init",
                       desc->struct_size, desc->version, sizeof *desc, DESC_VERSION);
    int64_t kv_heads = desc->kv_heads ? desc->kv_heads : desc->heads;
    RA_TRY(check_shape(desc, kv_heads));
    RA_TRY(check_pattern(desc, kv_heads));
    RA_TRY(check_numbers(desc));
    return check_execution(desc);
}

static int64_t limit(int64_t window) { return window < 0 ? RA_NO_LIMIT : window; }

ra_status ra_config_create(ra_arena *arena, const ra_attention_desc *desc, ra_config *config) {
    RA_TRY(ra_attention_desc_check(desc));
    ra_config c = {
        .dtype = desc->dtype,
        .batch = desc->batch,
        .seq_q = desc->seq_q,
        .seq_k = desc->seq_k,
        .heads = desc->heads,
        .kv_heads = desc->kv_heads ? desc->kv_heads : desc->heads,
        .head_dim = desc->head_dim,
        .branches = ra_max(1, desc->branches),
        .combine = desc->combine,
        .offset = desc->offset,
        .dilate_queries = desc->dilate_queries,
        .left = limit(desc->window_left),
        .right = limit(desc->window_right),
        .has_key_range = desc->key_begin || desc->key_end,
        .scale = isnan(desc->scale) ? 1.0 / sqrt((double)desc->head_dim) : desc->scale,
        .dropout = desc->dropout,
        .seed = desc->seed,
        .layout = desc->layout,
        .placement = desc->query_placement,
        .schedule = desc->schedule,
        .bucket = desc->bucket,
        .memory_limit = desc->memory_limit,
        .device = desc->device,
        .threads = desc->threads,
        .checksum = desc->checksum,
        .offload = desc->offload,
    };
    if (c.offload) c.layout = RA_LAYOUT_CONTIGUOUS, c.placement = RA_SHARDED; /* all the same on one rank */
    if (desc->causal) c.right = 0; /* causal is a window with right = 0 */
    if (desc->kernel && strcmp(desc->kernel, "auto") != 0) snprintf(c.kernel, sizeof c.kernel, "%s", desc->kernel);
    c.segment = ra_arena_take(arena, c.branches, sizeof(int64_t));
    c.rate = ra_arena_take(arena, c.branches, sizeof(int64_t));
    if (c.has_key_range) {
        c.key_begin = ra_arena_take(arena, c.batch, sizeof(int64_t));
        c.key_end = ra_arena_take(arena, c.batch, sizeof(int64_t));
    }
    if (arena->failed) return ra_fail(RA_NOMEM, "no memory for the configuration");
    for (int64_t i = 0; i < c.branches; i++) {
        c.segment[i] = desc->branches ? desc->segment_lengths[i] : 0;
        c.rate[i] = desc->branches ? desc->dilation_rates[i] : 1;
    }
    for (int64_t b = 0; c.has_key_range && b < c.batch; b++) {
        c.key_begin[b] = desc->key_begin ? desc->key_begin[b] : 0;
        c.key_end[b] = desc->key_end ? desc->key_end[b] : c.seq_k;
    }
    *config = c;
    return RA_OK;
}

/* ---------------------------------------------------------------------------------------------------------- as text */

typedef struct text_writer {
    char *text;
    int64_t bytes, length;
} text_writer;

static void put(text_writer *w, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void put(text_writer *w, const char *format, ...) {
    va_list args;
    va_start(args, format);
    int64_t room = ra_max(0, w->bytes - w->length);
    int n = vsnprintf(room > 0 ? w->text + w->length : NULL, (size_t)room, format, args);
    va_end(args);
    if (n > 0) w->length += n;
}

static void put_list(text_writer *w, const char *name, const int64_t *values, int64_t count) {
    put(w, "%s=", name);
    for (int64_t i = 0; i < count; i++) put(w, i ? ",%" PRId64 : "%" PRId64, values[i]);
    put(w, "\n");
}

/* Kernel and threads are left out: each rank may choose its own, and they change rounding at most. */
int64_t ra_config_text(const ra_config *c, char *text, int64_t bytes) {
    text_writer w = {text, bytes, 0};
    if (bytes > 0) text[0] = '\0';
    put(&w, "version=%s\ndtype=%s\n", RA_VERSION_STRING, ra_dtype_name(c->dtype));
    put(&w, "batch=%" PRId64 "\nseq_q=%" PRId64 "\nseq_k=%" PRId64 "\n", c->batch, c->seq_q, c->seq_k);
    put(&w, "heads=%" PRId64 "\nkv_heads=%" PRId64 "\nhead_dim=%" PRId64 "\n", c->heads, c->kv_heads, c->head_dim);
    put_list(&w, "segment_lengths", c->segment, c->branches);
    put_list(&w, "dilation_rates", c->rate, c->branches);
    put(&w, "combine=%d\noffset=%d\ndilate_queries=%d\n", (int)c->combine, (int)c->offset, c->dilate_queries);
    put(&w, "window_left=%" PRId64 "\nwindow_right=%" PRId64 "\n", c->left == RA_NO_LIMIT ? -1 : c->left,
        c->right == RA_NO_LIMIT ? -1 : c->right);
    if (c->has_key_range) {
        put_list(&w, "key_begin", c->key_begin, c->batch);
        put_list(&w, "key_end", c->key_end, c->batch);
    } else {
        put(&w, "key_begin=none\nkey_end=none\n"); /* so that this field is named where only some ranks have key ranges */
    }
    put(&w, "scale=%a\ndropout=%a\nseed=%" PRIu64 "\n", c->scale, c->dropout, c->seed);
    put(&w, "layout=%d\nquery_placement=%d\nschedule=%d\nbucket=%" PRId64 "\n", (int)c->layout, (int)c->placement,
        (int)c->schedule, c->bucket);
    put(&w, "memory_limit=%" PRId64 "\ndevice=%d\nchecksum=%d\noffload=%d\n", c->memory_limit, (int)c->device, c->checksum,
        c->offload);
    return w.length;
}
