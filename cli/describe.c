/* From settings to a checked descriptor. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "cli.h"
#include "core/alloc.h"
#include "core/size.h"
#include "core/status.h"
#include "core/workers.h"
#include "io/path.h"
#include "ringattn_cuda.h"

/* ---------------------------------------------------------------------------------------------------------- --like */

static ra_status imply(settings *s, option_id id, int *field, int value) {
    if (s->given[id] && *field != value) {
        char like[32];
        snprintf(like, sizeof like, "%s", option_word(OPT_LIKE, s->like));
        return ra_fail(RA_INVALID, "--like %s means --%s %s, which contradicts the value given", like, options[id].name,
                       option_word(id, value));
    }
    *field = value;
    return RA_OK;
}

static ra_status apply_like(settings *s) {
    if (!s->given[OPT_LIKE]) return RA_OK;
    switch ((like_choice)s->like) {
    case LIKE_DENSE:
        if (s->segment_lengths.count != 1 || s->segment_lengths.values[0] != 0 || s->dilation_rates.values[0] != 1)
            return ra_fail(RA_INVALID,
                           "--like dense means --segment-lengths 0 --dilation-rates 1, which contradicts those given");
        return RA_OK;
    case LIKE_FKODOM:
        RA_TRY(imply(s, OPT_COMBINE, &s->combine, RA_COMBINE_HEADS));
        return imply(s, OPT_OFFSET, &s->offset, RA_OFFSET_BRANCH);
    case LIKE_LONGNET:
        RA_TRY(imply(s, OPT_COMBINE, &s->combine, RA_COMBINE_MIX));
        return imply(s, OPT_OFFSET, &s->offset, RA_OFFSET_HEAD);
    case LIKE_TORCHSCALE:
        RA_TRY(imply(s, OPT_COMBINE, &s->combine, RA_COMBINE_MIX));
        return imply(s, OPT_OFFSET, &s->offset, RA_OFFSET_HEAD_BLOCK);
    case LIKE_STRIDED: return imply(s, OPT_OFFSET, &s->offset, RA_OFFSET_RESIDUE);
    }
    return RA_OK;
}

/* ----------------------------------------------------------------------------------------------------------- checks */

static ra_status need(const settings *s, const option_id *ids, int count) {
    for (int i = 0; i < count; i++)
        if (!s->given[ids[i]])
            return ra_fail(RA_INVALID, "%s needs --%s %s", commands[s->command].name, options[ids[i]].name,
                           options[ids[i]].value);
    return RA_OK;
}

static ra_status check_needed(const settings *s) {
    static const option_id for_run[] = {OPT_Q, OPT_K, OPT_V, OPT_OUT};
    static const option_id for_grad[] = {OPT_Q, OPT_K, OPT_V, OPT_DOUT, OPT_DQ, OPT_DK, OPT_DV};
    static const option_id for_why[] = {OPT_QUERY, OPT_KEY};
    switch (s->command) {
    case CMD_RUN: return need(s, for_run, 4);
    case CMD_GRAD: return need(s, for_grad, 7);
    case CMD_WHY: return need(s, for_why, 2);
    default: return RA_OK;
    }
}

/* Is there any file for which these options would do? Tried on a shape that suits every pattern. */
static ra_status check_for_any_file(const settings *s) {
    description d = {.desc = {.batch = 1, .heads = LIST_MAX, .kv_heads = LIST_MAX, .head_dim = 64}};
    d.desc.seq_q = d.desc.seq_k = ra_max(1, ra_max(s->key_range[0], s->key_range[1]));
    d.desc.dtype = s->given[OPT_DTYPE] ? (ra_dtype)s->dtype : RA_F32;
    settings plain = *s;
    if (plain.layout == LAYOUT_AUTO) plain.layout = 1 + (int)RA_LAYOUT_CONTIGUOUS;
    plain.offload = false; /* check_available looks at it */
    ra_status status = describe_files(&plain, 1, &d);
    description_free(&d);
    return status == RA_IO ? RA_INVALID : status;
}

static ra_status check_available(const settings *s) {
    if (s->device == DEVICE_CUDA && ra_cuda_probe(NULL) != RA_OK)
        return ra_fail_context(RA_NOT_AVAILABLE, "--device cuda is not available: ");
    if (s->offload && s->device != DEVICE_CUDA)
        return ra_fail(RA_NOT_AVAILABLE, "--offload is not available here: it needs --device cuda");
    if (s->offload && s->ring_size > 1)
        return ra_fail(RA_NOT_AVAILABLE, "--offload is for one rank, and --ring-size is %lld", (long long)s->ring_size);
    if (s->transport == TRANSPORT_NCCL && s->device != DEVICE_CUDA)
        return ra_fail(RA_NOT_AVAILABLE, "--transport nccl is not available: NCCL is for GPUs, and needs --device cuda");
    return RA_OK;
}

/* --transport self is one rank. */
static ra_status check_self(const settings *s) {
    if (s->ring_size > 1)
        return ra_fail(RA_INVALID, "--transport self is one rank, which contradicts --ring-size %lld", (long long)s->ring_size);
    for (int64_t i = 0; s->given[OPT_RING_SIZES] && i < s->ring_sizes.count; i++)
        if (s->ring_sizes.values[i] > 1)
            return ra_fail(RA_INVALID, "--transport self is one rank, which contradicts the %lld of --ring-sizes",
                           (long long)s->ring_sizes.values[i]);
    return RA_OK;
}

static ra_status check_svg(const char *path) {
    const char *dot = strrchr(ra_path_name(path), '.');
    if (!dot || strcasecmp(dot, ".svg") == 0) return RA_OK;
    return ra_fail(RA_INVALID, "--svg %s does not end in .svg: only SVG files are drawn", path);
}

ra_status settings_check(settings *s) {
    if (!option_belongs(OPT_RING_SIZE, s->command)) return RA_OK;
    RA_TRY(check_needed(s));
    if (s->segment_lengths.count != s->dilation_rates.count)
        return ra_fail(RA_INVALID,
                       "--segment-lengths has %lld entries and --dilation-rates %lld; each branch needs one of each",
                       (long long)s->segment_lengths.count, (long long)s->dilation_rates.count);
    if (s->command != CMD_MEMORY && s->seq.count != 1)
        return ra_fail(RA_INVALID, "--seq takes one length; only memory takes a list");
    if (s->rank >= s->ring_size)
        return ra_fail(RA_INVALID, "--rank %lld is not a rank of --ring-size %lld", (long long)s->rank,
                       (long long)s->ring_size);
    if (s->given[OPT_RANK] && s->query_placement == RA_REPLICATED)
        return ra_fail(RA_INVALID, "--rank needs --query-placement sharded");
    if (s->transport == TRANSPORT_SELF) RA_TRY(check_self(s));
    if (s->transport == TRANSPORT_SELF && !s->given[OPT_RING_SIZES]) s->ring_sizes = (int_list){{1}, 1};
    if (s->fit && !s->given[OPT_MEMORY_LIMIT]) return ra_fail(RA_INVALID, "plan --fit needs --memory-limit BYTES");
    if (s->batch == 0 && (s->command == CMD_WHY || s->command == CMD_DRAW))
        return ra_fail(RA_INVALID, "--batch is 0; %s needs a batch entry to look at", commands[s->command].name);
    if (s->command == CMD_MEMORY && s->given[OPT_RING_SIZE]) {
        if (s->given[OPT_RING_SIZES]) return ra_fail(RA_INVALID, "--ring-size contradicts --ring-sizes; give one of them");
        s->ring_sizes = (int_list){{1, s->ring_size}, s->ring_size > 1 ? 2 : 1};
    }
    if (s->trace && (s->command == CMD_PLAN || s->command == CMD_WHY || s->command == CMD_DRAW))
        return ra_fail(RA_INVALID, "--trace: %s computes nothing that could be traced", commands[s->command].name);
    if (s->svg) RA_TRY(check_svg(s->svg));
    if (s->given[OPT_RANK] && !s->given[OPT_REPEAT]) s->repeat = 1; /* a rank of a large job takes long enough */
    RA_TRY(apply_like(s));
    if (s->command == CMD_RUN || s->command == CMD_GRAD) RA_TRY(check_for_any_file(s));
    return check_available(s);
}

/* ------------------------------------------------------------------------------------------------------- descriptors */

/* A plan is quick whatever the sizes; ranges of a batch are looked at one by one. */
#define RANGES_MAX (1 << 20)

static ra_status set_key_range(const settings *s, description *d) {
    ra_attention_desc *desc = &d->desc;
    if (!s->given[OPT_KEY_RANGE] || desc->batch == 0) return RA_OK;
    int64_t end = s->key_range[1] < 0 ? desc->seq_k : s->key_range[1];
    if (s->key_range[0] > end || end > desc->seq_k)
        return ra_fail(RA_INVALID, "--key-range %lld:%lld is not within the %lld keys", (long long)s->key_range[0],
                       (long long)end, (long long)desc->seq_k);
    bool computes = s->command != CMD_PLAN && s->command != CMD_WHY && s->command != CMD_DRAW;
    if (!computes && desc->batch > RANGES_MAX)
        return ra_fail(RA_INVALID, "--batch is %lld; with --key-range %s takes at most %d batch entries",
                       (long long)desc->batch, commands[s->command].name, RANGES_MAX);
    d->key_range = desc->batch < INT64_MAX / 16 ? ra_alloc(desc->batch * 16) : NULL;
    if (!d->key_range) return ra_fail(RA_NOMEM, "no memory for the key ranges of %lld batch entries", (long long)desc->batch);
    for (int64_t b = 0; b < desc->batch; b++) {
        d->key_range[b] = s->key_range[0];
        d->key_range[desc->batch + b] = end;
    }
    desc->key_begin = d->key_range;
    desc->key_end = d->key_range + desc->batch;
    return RA_OK;
}

/* Everything but shape, dtype and layout. */
static void set_options(const settings *s, int ranks, ra_attention_desc *desc) {
    desc->segment_lengths = s->segment_lengths.values;
    desc->dilation_rates = s->dilation_rates.values;
    desc->branches = s->segment_lengths.count;
    desc->combine = (ra_combine)s->combine;
    desc->offset = (ra_offset)s->offset;
    desc->dilate_queries = s->dilate_queries;
    desc->causal = s->causal;
    desc->window_left = s->window[0];
    desc->window_right = s->window[1];
    desc->scale = s->scale;
    desc->dropout = s->dropout;
    desc->seed = s->seed;
    desc->layout = s->layout == LAYOUT_AUTO ? RA_LAYOUT_CONTIGUOUS : (ra_layout)(s->layout - 1);
    desc->query_placement = (ra_placement)s->query_placement;
    desc->schedule = (ra_schedule)s->schedule;
    desc->bucket = s->bucket;
    desc->memory_limit = s->memory_limit;
    desc->kernel = NULL;
    if (s->kernel != 0) {
        static _Thread_local char kernel[32];
        snprintf(kernel, sizeof kernel, "%s", option_word(OPT_KERNEL, s->kernel));
        desc->kernel = kernel;
    }
    desc->threads = (int32_t)(s->threads ? s->threads : ra_max(1, ra_usable_cores() / ranks));
    desc->device =
        s->device == DEVICE_CUDA ? RA_DEVICE_CUDA : RA_DEVICE_CPU; /* auto: files and generated data lie in host memory */
    desc->checksum = s->checksum;
    desc->offload = s->offload;
}

/* Checks the descriptor; a type that no GPU computes is said by the names of the options. */
static ra_status check(const ra_attention_desc *desc) {
    RA_TRY(ra_attention_desc_check(desc));
    if (desc->device != RA_DEVICE_CUDA || desc->dtype != RA_F64) return RA_OK;
    return ra_fail(RA_NOT_AVAILABLE, "--dtype f64 is not available with --device cuda: GPUs compute f32, bf16 and f16 only");
}

/* The layout that deals pairs most evenly; contiguous unless another is clearly better, since it moves least. */
static ra_status choose_layout(ra_attention_desc *desc, int ranks) {
    static const ra_layout candidates[] = {RA_LAYOUT_CONTIGUOUS, RA_LAYOUT_ZIGZAG, RA_LAYOUT_STRIPED};
    double best = 0;
    ra_layout chosen = RA_LAYOUT_CONTIGUOUS;
    for (int i = 0; i < 3 && ranks > 1; i++) {
        plan_totals totals;
        ra_attention_desc trial = *desc;
        trial.layout = candidates[i];
        trial.memory_limit = 0; /* what counts against it depends on the layout */
        RA_TRY(plan_sum(&trial, ranks, false, &totals));
        if (totals.balance > best * 1.02) {
            best = totals.balance;
            chosen = candidates[i];
        }
    }
    desc->layout = chosen;
    return RA_OK;
}

ra_status describe(const settings *s, int64_t seq, int ranks, description *d) {
    d->key_range = NULL;
    ra_attention_desc_init(&d->desc);
    d->desc.batch = s->batch;
    d->desc.seq_k = seq;
    d->desc.seq_q = s->seq_q >= 0 ? s->seq_q : seq;
    d->desc.heads = s->heads;
    d->desc.kv_heads = s->kv_heads ? s->kv_heads : s->heads;
    d->desc.head_dim = s->head_dim;
    d->desc.dtype = (ra_dtype)s->dtype;
    set_options(s, ranks, &d->desc);
    RA_TRY(set_key_range(s, d));
    ra_status status = check(&d->desc);
    if (status == RA_OK && s->given[OPT_LAYOUT] && s->layout == LAYOUT_AUTO) status = choose_layout(&d->desc, ranks);
    if (status != RA_OK) description_free(d);
    return status;
}

ra_status describe_files(const settings *s, int ranks, description *d) {
    ra_attention_desc shape = d->desc;
    d->key_range = NULL;
    ra_attention_desc_init(&d->desc);
    d->desc.batch = shape.batch;
    d->desc.seq_q = shape.seq_q;
    d->desc.seq_k = shape.seq_k;
    d->desc.heads = shape.heads;
    d->desc.kv_heads = shape.kv_heads;
    d->desc.head_dim = shape.head_dim;
    d->desc.dtype = shape.dtype;
    set_options(s, ranks, &d->desc);
    ra_status status = set_key_range(s, d);
    if (status == RA_OK) status = check(&d->desc);
    if (status == RA_OK && s->layout == LAYOUT_AUTO) status = choose_layout(&d->desc, ranks);
    if (status != RA_OK) description_free(d);
    return status == RA_INVALID ? RA_IO : status;
}

void description_free(description *d) {
    if (d->key_range) ra_free(d->key_range, d->desc.batch * 16);
    d->key_range = NULL;
    d->desc.key_begin = d->desc.key_end = NULL;
}

/* ------------------------------------------------------------------------------------------------------------- plans */

int64_t summary_bytes(const ra_rank_summary *r, bool backward) {
    int64_t forward = ra_sat_add(r->shard_bytes, r->workspace_bytes);
    if (!backward) return forward;
    int64_t both = ra_sat_add(ra_sat_add(r->shard_bytes, r->shard_bytes_backward),
                              ra_max(r->workspace_bytes, r->workspace_bytes_backward));
    return both;
}

void plan_add(plan_totals *t, const ra_rank_summary *r, bool backward) {
    t->ranks++;
    t->pairs = ra_sat_add(t->pairs, r->pairs);
    t->pairs_sum += summary_uncounted(r) ? (double)NAN : (double)r->pairs;
    t->holes = t->holes < 0 || r->holes < 0 ? -1 : ra_sat_add(t->holes, r->holes);
    t->pairs_max = ra_max(t->pairs_max, r->pairs);
    t->bytes_sent_max = ra_max(t->bytes_sent_max, r->bytes_sent);
    t->bytes_sent_total = ra_sat_add(t->bytes_sent_total, r->bytes_sent);
    t->bytes_sent_max_backward = ra_max(t->bytes_sent_max_backward, r->bytes_sent_backward);
    t->bytes_sent_total_backward = ra_sat_add(t->bytes_sent_total_backward, r->bytes_sent_backward);
    t->forward_max = ra_max(t->forward_max, summary_bytes(r, false));
    t->backward_max = ra_max(t->backward_max, summary_bytes(r, true));
    t->workspace_max = ra_max(t->workspace_max, ra_max(r->workspace_bytes, backward ? r->workspace_bytes_backward : 0));
}

void plan_finish(plan_totals *t, const ra_attention_desc *desc) {
    double rows = (double)desc->batch * (double)desc->seq_q * (double)desc->heads;
    if (desc->query_placement == RA_REPLICATED) rows *= (double)t->ranks; /* every rank counts its own copy */
    t->hole_share = t->holes < 0 ? (double)NAN : rows > 0 ? (double)t->holes / rows : 0;
    t->balance = t->pairs_max > 0 ? t->pairs_sum / (double)t->ranks / (double)t->pairs_max : 1;
}

ra_status plan_ranks(const ra_attention_desc *desc, int ranks, ra_rank_summary **all) {
    *all = calloc((size_t)ranks, sizeof **all);
    if (!*all) return ra_fail(RA_NOMEM, "no memory for %d ranks", ranks);
    for (int i = 0; i < ranks; i++) (*all)[i].struct_size = sizeof **all;
    ra_status status = ra_plan_summaries(desc, ranks, *all);
    if (status == RA_OK) return RA_OK;
    free(*all);
    *all = NULL;
    return status;
}

ra_status plan_sum(const ra_attention_desc *desc, int ranks, bool backward, plan_totals *t) {
    ra_rank_summary *all;
    memset(t, 0, sizeof *t);
    RA_TRY(plan_ranks(desc, ranks, &all));
    for (int rank = 0; rank < ranks; rank++) plan_add(t, &all[rank], backward);
    plan_finish(t, desc);
    free(all);
    return RA_OK;
}

ra_status over_memory_limit(const settings *s) {
    return ra_fail_context(RA_NOMEM, "--memory-limit %s: ", show_bytes((double)s->memory_limit));
}

ra_status check_memory_limit(const settings *s, const ra_attention_desc *desc, int ranks, bool backward) {
    plan_totals totals;
    if (!s->given[OPT_MEMORY_LIMIT]) return RA_OK;
    ra_status status = plan_sum(desc, ranks, backward, &totals);
    if (status == RA_NOMEM) return over_memory_limit(s);
    RA_TRY(status);
    int64_t needed = backward ? totals.backward_max : totals.forward_max;
    if (needed <= s->memory_limit) return RA_OK;
    return ra_fail(
        RA_NOMEM,
        "a rank needs %s for shards and workspace, more than --memory-limit %s: a larger --ring-size or a smaller --bucket "
        "needs less",
        show_bytes((double)needed), show_bytes((double)s->memory_limit));
}
