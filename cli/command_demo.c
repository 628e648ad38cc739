/* demo: a tour that checks itself. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "cli.h"
#include "core/size.h"
#include "core/status.h"
#include "draw.h"
#include "measure.h"
#include "verify.h"

typedef struct demo {
    settings base;
    bool quiet, colour;
    int checks, failed;
    json_t *results;
} demo;

static void title(const demo *d, const char *text) {
    if (d->quiet) return;
    printf(d->colour ? "\n\033[1m%s\033[0m\n" : "\n%s\n", text);
}

/* Every statement of the tour is checked; what does not hold is said and counted. */
static void check(demo *d, bool holds, const char *what) {
    d->checks++;
    json_object_set_new(d->results, what, json_boolean(holds));
    if (holds) return;
    d->failed++;
    if (!d->quiet) printf(d->colour ? "\033[31m  FAILED: %s\033[0m\n" : "  FAILED: %s\n", what);
}

static settings variant(const demo *d, int64_t seq, int64_t heads, int64_t head_dim) {
    settings s = d->base;
    s.seq = (int_list){{seq}, 1};
    s.heads = s.kv_heads = heads;
    s.head_dim = head_dim;
    return s;
}

static void dilate(settings *s, const int64_t *segments, const int64_t *rates, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        s->segment_lengths.values[i] = segments[i];
        s->dilation_rates.values[i] = rates[i];
    }
    s->segment_lengths.count = s->dilation_rates.count = count;
}

/* ------------------------------------------------------------------------------------------------------------ pattern */

static ra_status show_pattern(demo *d) {
    settings s = variant(d, 32, 2, 8);
    description desc;
    s.schedule = RA_SCHEDULE_RING;
    dilate(&s, (int64_t[]){8, 32}, (int64_t[]){1, 4}, 2);
    s.combine = RA_COMBINE_MIX;
    s.causal = true;
    s.dilate_queries = 0;
    title(d, "1. The pattern: segments of 8, and every 4th key of the whole, causal, on a ring of 4 ranks");
    RA_TRY(describe(&s, 32, 4, &desc));
    ra_status status = d->quiet ? RA_OK : draw_terminal(&desc.desc, 4, 0, d->colour, stdout);
    description_free(&desc);
    return status;
}

/* ---------------------------------------------------------------------------------------------------------- exactness */

static ra_status show_exactness(demo *d) {
    settings s = variant(d, 509, 6, 32);
    dilate(&s, (int64_t[]){64, 128, 0}, (int64_t[]){1, 2, 4}, 3);
    s.causal = true;
    s.schedule = RA_SCHEDULE_RING;
    title(d, "2. Rings of 1 to 8 compute one function: errors against float64, of forward and backward");
    if (!d->quiet)
        printf("  %4s  %-10s  %5s  %8s  %8s  %8s  %8s  %8s\n", "ring", "layout", "dtype", "out", "lse", "dq", "dk", "dv");
    for (int ranks = 1; ranks <= 8; ranks++) {
        description desc;
        verdict v;
        char what[64];
        s.layout = 1 + (ranks - 1) % 3;
        s.dtype = ranks == 8 ? RA_BF16 : RA_F32;
        RA_TRY(describe(&s, 509, ranks, &desc));
        ra_status status = verify_case(&s, &desc.desc, ranks, "demo", &v);
        description_free(&desc);
        RA_TRY(status);
        if (!d->quiet) {
            printf("  %4d  %-10s", ranks, option_word(OPT_LAYOUT, s.layout));
            printf("  %5s", option_word(OPT_DTYPE, s.dtype));
            for (int t = 0; t < VERIFY_TENSORS; t++) printf("  %8.1e", v.error[t]);
            printf("  %s\n", v.failed ? "" : "ok");
        }
        snprintf(what, sizeof what, "ring of %d agrees with float64", ranks);
        check(d, !v.failed, what);
    }
    return RA_OK;
}

/* ------------------------------------------------------------------------------------------------------------- memory */

static void bar(double share) {
    int length = (int)lround(share * 40);
    for (int i = 0; i < 40; i++) fputs(i < length ? "#" : " ", stdout);
}

static ra_status show_memory(demo *d) {
    settings s = variant(d, 4096, 4, 64);
    int64_t alone = 0;
    s.bucket = 64;
    s.causal = true;
    s.schedule = RA_SCHEDULE_RING;
    title(d, "3. Memory of a rank falls with the ring: 4096 tokens, measured peak of tensors and workspace");
    for (int ranks = 1; ranks <= 8; ranks *= 2) {
        description desc;
        measurement m;
        RA_TRY(describe(&s, 4096, ranks, &desc));
        ra_status status = measure(&s, &desc.desc, ranks, PASS_FWD, 0, 1, "demo", &m);
        description_free(&desc);
        RA_TRY(status);
        if (ranks == 1) alone = m.peak_bytes;
        if (!d->quiet) {
            printf("  ring of %d  %10s  ", ranks, show_bytes((double)m.peak_bytes));
            bar((double)m.peak_bytes / (double)alone);
            printf("  %.0f %%\n", 100 * (double)m.peak_bytes / (double)alone);
        }
        char what[64];
        snprintf(what, sizeof what, "ring of %d holds what was planned", ranks);
        check(d, m.peak_bytes == m.planned_bytes, what);
        snprintf(what, sizeof what, "ring of %d saves memory", ranks);
        if (ranks > 1) check(d, (double)m.peak_bytes < (double)alone * (1.0 / ranks + 0.12), what);
    }
    return RA_OK;
}

/* -------------------------------------------------------------------------------------------------------------- bytes */

static ra_status show_bytes_sent(demo *d) {
    static const struct {
        const char *what;
        int64_t segment, rate;
        bool causal;
    } cases[] = {{"dense", 0, 1, false},
                 {"dense, causal", 0, 1, true},
                 {"segments of 512, every 2nd", 512, 2, false},
                 {"segments of 128 (inside a rank)", 128, 1, false}};
    enum { n = 1024, p = 8, h = 2, dim = 16, e = 4 };
    const int64_t expected[] = {2 * (p - 1) * (n / p) * h * dim * e, -1, 2 * (512 - n / p) / 2 * h * dim * e, 0};
    title(d, "4. Bytes that a rank sends, 1024 tokens on a ring of 8: counted, and by the plan");
    for (int i = 0; i < 4; i++) {
        settings s = variant(d, n, h, dim);
        description desc;
        measurement m;
        plan_totals totals = {0};
        dilate(&s, &cases[i].segment, &cases[i].rate, 1);
        s.causal = cases[i].causal;
        s.schedule = RA_SCHEDULE_RING;
        RA_TRY(describe(&s, n, p, &desc));
        ra_status status = measure(&s, &desc.desc, p, PASS_FWD, 0, 1, "demo", &m);
        if (status == RA_OK) status = plan_sum(&desc.desc, p, false, &totals);
        description_free(&desc);
        RA_TRY(status);
        int64_t mean = m.forward.bytes_sent_total / p;
        if (!d->quiet)
            printf("  %-32s %10s at most, %10s on average\n", cases[i].what, show_bytes((double)m.forward.bytes_sent),
                   show_bytes((double)mean));
        char what[96];
        snprintf(what, sizeof what, "%s sends what was planned", cases[i].what);
        check(d, m.forward.bytes_sent == totals.bytes_sent_max && m.forward.bytes_sent_total == totals.bytes_sent_total, what);
        snprintf(what, sizeof what, "%s sends what the formula says", cases[i].what);
        if (expected[i] >= 0) check(d, mean == expected[i], what);
    }
    return RA_OK;
}

/* ----------------------------------------------------------------------------------------------------- a billion tokens */

static ra_status show_billion(demo *d) {
    settings s = variant(d, 1000000000, 12, 64);
    description desc;
    plan_totals totals;
    dilate(&s, (int64_t[]){2048, 4096, 8192}, (int64_t[]){1, 2, 4}, 3);
    s.dtype = RA_BF16;
    s.memory_limit = 0; /* it is not run */
    title(d, "5. A plan for 1,000,000,000 tokens on 64 ranks (12 heads of 64, bf16, segments 2048,4096,8192, rates 1,2,4)");
    RA_TRY(describe(&s, 1000000000, 64, &desc));
    double start = now();
    ra_status status = plan_sum(&desc.desc, 64, false, &totals);
    double seconds = now() - start;
    description_free(&desc);
    RA_TRY(status);
    if (!d->quiet) {
        printf("  planned in %s: a rank holds %s, sends %s at most, and the ring attends to %s pairs\n", show_seconds(seconds),
               show_bytes((double)totals.forward_max), show_bytes((double)totals.bytes_sent_max),
               show_count((double)totals.pairs));
        printf("  balance %.4f; %.1f %% of the rows have no key, as LongNet-style dilation has it\n", totals.balance,
               100 * totals.hole_share);
    }
    check(d, seconds < 0.5, "a billion tokens are planned at once");
    check(d, totals.pairs > 0 && totals.balance > 0.99, "a billion tokens are dealt evenly");
    return RA_OK;
}

ra_status command_demo(const settings *s, bool *check_failed) {
    demo d = {.base = *s, .quiet = s->json, .colour = wants_colour(), .results = json_object()};
    double start = now();
    if (!d.quiet) printf("ringattn %s: exact ring attention with dilation\n", ra_version());
    ra_status status = show_pattern(&d);
    if (status == RA_OK) status = show_exactness(&d);
    if (status == RA_OK) status = show_memory(&d);
    if (status == RA_OK) status = show_bytes_sent(&d);
    if (status == RA_OK) status = show_billion(&d);
    *check_failed = d.failed > 0;
    if (status != RA_OK) {
        json_decref(d.results);
        return status;
    }
    if (s->json)
        return print_json(s, json_pack("{s:i, s:i, s:f, s:o}", "checks", d.checks, "failed", d.failed, "seconds", now() - start,
                                       "results", d.results));
    json_decref(d.results);
    printf("\n%s: %d of %d checks hold, in %s\n", d.failed ? "SOMETHING IS OFF" : "All is well", d.checks - d.failed, d.checks,
           show_seconds(now() - start));
    return RA_OK;
}
