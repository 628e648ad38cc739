/* verify: the case that the options describe, or random ones, against the float64 reference. */
#include <stdio.h>
#include <string.h>

#include "cli.h"
#include "core/dtype.h"
#include "core/philox.h"
#include "core/size.h"
#include "core/status.h"
#include "group.h"
#include "progress.h"
#include "verify.h"

#define RANDOM_CASES 40

/* A stream of random numbers for one case. */
typedef struct dice {
    uint64_t seed;
    uint32_t drawn, number;
} dice;

/* 0..sides - 1. The second word is for more sides than the first has values. */
static int64_t roll(dice *d, int64_t sides) {
    const ra_philox p = ra_philox4x32(d->seed, d->drawn++, d->number, 0, 0x63617365u);
    const uint64_t high = sides > UINT32_MAX ? (uint64_t)p.word[1] << 32 : 0;
    return (int64_t)((high | p.word[0]) % (uint64_t)sides);
}

static int64_t pick(dice *d, const int64_t *values, int64_t count) { return values[roll(d, count)]; }

static void draw_pattern(dice *d, settings *c) {
    int64_t n = ra_max(1, c->seq.values[0]);
    bool dense = c->given[OPT_LIKE] && c->like == LIKE_DENSE;
    if (!c->given[OPT_SEGMENT_LENGTHS] && !c->given[OPT_DILATION_RATES] && !dense) {
        c->segment_lengths.count = c->dilation_rates.count = 1 + roll(d, 3);
        for (int64_t i = 0; i < c->segment_lengths.count; i++) {
            c->segment_lengths.values[i] = roll(d, 3) == 0 ? 0 : 1 + roll(d, n + n / 4 + 1);
            c->dilation_rates.values[i] = 1 + roll(d, 5);
        }
    }
    if (!c->given[OPT_COMBINE] && !c->given[OPT_LIKE]) c->combine = (int)roll(d, 2);
    if (!c->given[OPT_OFFSET] && !c->given[OPT_LIKE]) c->offset = (int)roll(d, 4);
    if (!c->given[OPT_DILATE_QUERIES]) c->dilate_queries = (int)roll(d, 2);
    if (!c->given[OPT_CAUSAL]) c->causal = roll(d, 2) != 0;
    if (!c->given[OPT_WINDOW] && roll(d, 4) == 0) {
        c->window[0] = roll(d, n) - 1;
        c->window[1] = roll(d, n) - 1;
    }
    if (!c->given[OPT_KEY_RANGE] && roll(d, 4) == 0) {
        c->given[OPT_KEY_RANGE] = true;
        c->key_range[0] = roll(d, c->seq.values[0] + 1);
        c->key_range[1] = c->key_range[0] + roll(d, c->seq.values[0] - c->key_range[0] + 1);
    }
    if (!c->given[OPT_DROPOUT] && roll(d, 5) == 0) c->dropout = 0.25;
}

static void draw_shape(dice *d, settings *c) {
    static const int64_t dims[] = {1, 3, 8, 16, 20, 32, 64, 80, 128};
    if (!c->given[OPT_SEQ]) c->seq = (int_list){{roll(d, 8) == 0 ? roll(d, 4) : roll(d, 160)}, 1};
    if (!c->given[OPT_SEQ_Q] && roll(d, 3) == 0) c->seq_q = roll(d, 160);
    if (!c->given[OPT_BATCH]) c->batch = 1 + roll(d, 2);
    if (!c->given[OPT_HEADS] && !c->given[OPT_KV_HEADS]) {
        c->kv_heads = 1 + roll(d, 3);
        c->heads = c->kv_heads * (1 + roll(d, 3));
    }
    if (!c->given[OPT_HEAD_DIM]) c->head_dim = pick(d, dims, sizeof dims / sizeof *dims);
}

static void draw_execution(dice *d, settings *c) {
    static const int64_t rings[] = {1, 2, 3, 4, 5, 7, 8}, buckets[] = {0, 0, 1, 5, 32},
                         dtypes[] = {RA_F32, RA_F32, RA_BF16, RA_F16, RA_F64},
                         schedules[] = {RA_SCHEDULE_AUTO, RA_SCHEDULE_RING, RA_SCHEDULE_RING, RA_SCHEDULE_GATHER};
    const bool alone = c->offload || c->transport == TRANSPORT_SELF;
    if (!c->given[OPT_RING_SIZE] && !alone) c->ring_size = pick(d, rings, 7);
    if (!c->given[OPT_LAYOUT]) c->layout = 1 + (int)roll(d, 3);
    if (!c->given[OPT_QUERY_PLACEMENT] && !c->offload) c->query_placement = roll(d, 4) == 0 ? RA_REPLICATED : RA_SHARDED;
    /* auto gathers sequences as short as these, and merges where queries are replicated */
    if (!c->given[OPT_SCHEDULE] && !c->offload) c->schedule = (int)pick(d, schedules, 4);
    if (!c->given[OPT_BUCKET]) c->bucket = pick(d, buckets, 5);
    if (!c->given[OPT_DTYPE]) c->dtype = (int)pick(d, dtypes, c->device == DEVICE_CUDA ? 4 : 5); /* GPUs compute no f64 */
    if (!c->given[OPT_THREADS]) c->threads = 1 + roll(d, 2);
}

/* Random settings around those that are given; drawn again until they make sense together. */
static ra_status draw_case(const settings *s, uint32_t number, settings *c, description *desc) {
    ra_status status = RA_INVALID;
    for (uint32_t attempt = 0; attempt < 200 && status == RA_INVALID; attempt++) {
        dice d = {s->seed, attempt * 1000, number};
        *c = *s;
        draw_shape(&d, c);
        draw_execution(&d, c);
        draw_pattern(&d, c);
        c->seed = s->seed + number;
        status = describe(c, c->seq.values[0], (int)c->ring_size, desc);
    }
    return status;
}

static void print_case(int64_t number, const settings *c, const ra_attention_desc *d, const verdict *v) {
    char layout[16];
    snprintf(layout, sizeof layout, "%s", option_word(OPT_LAYOUT, 1 + (int)d->layout));
    printf("%4lld  [%lld, %lld x %lld, %lld/%lld, %lld] %s ring %lld %-10s", (long long)number, (long long)d->batch,
           (long long)d->seq_q, (long long)d->seq_k, (long long)d->heads, (long long)d->kv_heads, (long long)d->head_dim,
           ra_dtype_name(d->dtype), (long long)c->ring_size, layout);
    for (int t = 0; t < VERIFY_TENSORS; t++) {
        if (v->checked[t]) printf("  %s %.1e", verify_names[t], v->error[t]);
        else printf("  %s  -     ", verify_names[t]);
    }
    printf("  %s\n", v->failed ? "FAILED" : "ok");
    fflush(stdout);
}

/* The command line that repeats a failed case. */
static void print_repeat(const settings *c, const ra_attention_desc *d) {
    printf("      again: ringattn verify --batch %lld --seq %lld --seq-q %lld --heads %lld --kv-heads %lld --head-dim %lld "
           "--segment-lengths ",
           (long long)d->batch, (long long)d->seq_k, (long long)d->seq_q, (long long)d->heads, (long long)d->kv_heads,
           (long long)d->head_dim);
    for (int64_t i = 0; i < d->branches; i++) printf("%s%lld", i ? "," : "", (long long)d->segment_lengths[i]);
    printf(" --dilation-rates ");
    for (int64_t i = 0; i < d->branches; i++) printf("%s%lld", i ? "," : "", (long long)d->dilation_rates[i]);
    printf(" --combine %s", option_word(OPT_COMBINE, c->combine));
    printf(" --offset %s", option_word(OPT_OFFSET, c->offset));
    printf(" --dilate-queries %s%s", option_word(OPT_DILATE_QUERIES, c->dilate_queries), c->causal ? " --causal" : "");
    if (c->window[0] >= 0 || c->window[1] >= 0) printf(" --window %lld,%lld", (long long)c->window[0], (long long)c->window[1]);
    if (d->key_begin) printf(" --key-range %lld:%lld", (long long)d->key_begin[0], (long long)d->key_end[0]);
    if (c->given[OPT_SCALE]) printf(" --scale %.17g", c->scale);
    printf(" --dropout %.17g --seed %llu --ring-size %lld", c->dropout, (unsigned long long)c->seed, (long long)c->ring_size);
    printf(" --layout %s", option_word(OPT_LAYOUT, 1 + (int)d->layout));
    if (c->bucket) printf(" --bucket %lld", (long long)c->bucket);
    if (c->query_placement) printf(" --query-placement %s", option_word(OPT_QUERY_PLACEMENT, c->query_placement));
    if (c->schedule) printf(" --schedule %s", option_word(OPT_SCHEDULE, c->schedule));
    if (c->device) printf(" --device %s%s", option_word(OPT_DEVICE, c->device), c->offload ? " --offload" : "");
    if (c->kernel) printf(" --kernel %s", option_word(OPT_KERNEL, c->kernel));
    printf(" --dtype %s --threads %d\n", ra_dtype_name(d->dtype), (int)d->threads);
}

static double largest(const double *values, int count) {
    double most = 0;
    for (int i = 0; i < count; i++) most = values[i] > most ? values[i] : most;
    return most;
}

static bool describes_case(const settings *s) {
    for (int id = OPT_BATCH; id <= OPT_DTYPE; id++)
        if (s->given[id] && id != OPT_SEED) return true;
    return false;
}

static ra_status report_json(const settings *s, int64_t cases, int64_t failed, const verdict *worst, const double *of_bound,
                             bool sampled) {
    json_t *errors = json_object(), *shares = json_object();
    for (int t = 0; t < VERIFY_TENSORS; t++) {
        json_object_set_new(errors, verify_names[t], worst->checked[t] ? json_number(worst->error[t]) : json_null());
        json_object_set_new(shares, verify_names[t], worst->checked[t] ? json_number(of_bound[t]) : json_null());
    }
    return print_json(s, json_pack("{s:I, s:I, s:o, s:o, s:b}", "cases", (json_int_t)cases, "failed", (json_int_t)failed,
                                   "worst", errors, "worst_of_bound", shares, "sampled", sampled));
}

ra_status command_verify(const settings *s, bool *check_failed) {
    static settings base, c;
    bool described = describes_case(s) && !s->given[OPT_CASES];
    int64_t cases = s->given[OPT_CASES] ? s->cases : described ? 1 : RANDOM_CASES, failed = 0;
    int ranks;
    verdict worst = {0};
    double of_bound[VERIFY_TENSORS] = {0};
    bool sampled = false;
    RA_TRY(group_ranks(s, &ranks));
    base = *s;
    base.ring_size = ranks;
    base.given[OPT_RING_SIZE] = s->given[OPT_RING_SIZE] || group_launched(s);
    for (int64_t i = 0; i < cases; i++) {
        description d;
        verdict v;
        c = base;
        RA_TRY(described ? describe(&c, c.seq.values[0], ranks, &d) : draw_case(&base, (uint32_t)i, &c, &d));
        ra_status status = verify_case(&c, &d.desc, (int)c.ring_size, "verify", &v);
        if (status == RA_OK && !s->json) print_case(i + 1, &c, &d.desc, &v);
        if (status == RA_OK && !s->json && v.failed) print_repeat(&c, &d.desc);
        description_free(&d);
        RA_TRY(status);
        failed += v.failed;
        sampled = sampled || v.sampled_rows > 0;
        for (int t = 0; t < VERIFY_TENSORS; t++) {
            if (!v.checked[t]) continue;
            worst.checked[t] = true;
            if (v.error[t] > worst.error[t]) worst.error[t] = v.error[t];
            if (v.error[t] / v.bound[t] > of_bound[t]) of_bound[t] = v.error[t] / v.bound[t];
        }
    }
    *check_failed = failed > 0;
    if (s->json) return report_json(s, cases, failed, &worst, of_bound, sampled);
    if (sampled) printf("(this case is large: rows of every tensor were sampled)\n");
    printf("%lld of %lld cases within the bounds; the largest error is %.0f %% of its bound\n", (long long)(cases - failed),
           (long long)cases, 100 * largest(of_bound, VERIFY_TENSORS));
    return RA_OK;
}
