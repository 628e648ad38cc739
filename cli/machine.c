/* An alpha-beta model. A rank's time is the larger of computing and exchanging (hops times alpha, bytes over bandwidth),
 * because the one hides behind the other; the first exchange of a bucket has nothing to hide behind.
 *
 * Computing takes as long as all attended pairs do at the machine's rate, and some keys more for every visit of a query row:
 * its first keys fill a pipeline, and where it has a running state (a ring, offload) that is read and written, and becomes a
 * result in the end. */
#include "machine.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli.h"
#include "core/dtype.h"
#include "core/size.h"
#include "core/status.h"

/* One H200. Long sequences give the rates, segments of 512 to 2048 rows the keys of a visit (bench/results/h200.md), two ranks
 * that share the GPU those of a state, mixed branches those of its begin and end, a rank of 2^24 dilated rows the time of a
 * row. */
#define H200                                                                                                                   \
    .flops = {0, 5.7e14, 5.7e14, 0}, .backward_share = 0.81, .wide_share = {1.25, 1.17}, .visit_keys = {200, 350},        \
    .state_keys = {500, 550}, .end_keys = {470, 0}, .row_seconds = {0, 1.2e-9}, .host_bytes_per_second = 5.5e10

/* Rates are useful flop/s of attention itself, not peaks. The laptop: two AVX2 cores; its link is a copy between threads. */
static const machine presets[] = {
    {.name = "laptop",
     .basis = "rates as measured on two AVX2 cores",
     .flops = {4e10, 4e10, 4e10, 4e9},
     .backward_share = 0.8,
     .wide_share = {1, 1},
     .ranks_per_node = 1024,
     .inside = {2e-6, 8e9},
     .between = {2e-6, 8e9}},
    {.name = "h200",
     .basis = "rates as measured on one H200, which all ranks share",
     H200,
     .ranks_per_node = 1024,
     .inside = {2e-5, 9.5e11},
     .between = {2e-5, 9.5e11},
     .shared = true},
    {.name = "h200x8",
     .basis = "rates as measured on one H200; links not measured: NVLink at 80 % of its data sheet",
     H200,
     .ranks_per_node = 1024,
     .inside = {2e-5, 3.6e11},
     .between = {2e-5, 3.6e11}},
    {.name = "h200x64",
     .basis = "rates as measured on one H200; links not measured: nodes of 8, NVLink and 400 Gb/s a GPU, 80 % of data sheets",
     H200,
     .ranks_per_node = 8,
     .inside = {2e-5, 3.6e11},
     .between = {5e-5, 4e10}},
};
enum { PRESETS = sizeof presets / sizeof *presets };

/* ------------------------------------------------------------------------------------------------------------------ files */

static json_t *find(json_t *root, const char *path) {
    char part[32];
    json_t *at = root;
    for (const char *p = path; *p && at; p += *p == '.') {
        int length = (int)strcspn(p, ".");
        snprintf(part, sizeof part, "%.*s", length, p);
        at = json_object_get(at, part);
        p += length;
    }
    return at;
}

static ra_status positive(json_t *root, const char *path, const char *file, double *value) {
    json_t *at = find(root, path);
    if (!json_is_number(at) || !(json_number_value(at) > 0))
        return ra_fail(RA_IO, "%s: %s is missing, or is not a number above 0", file, path);
    *value = json_number_value(at);
    return RA_OK;
}

/* One that may be missing. */
static ra_status optional(json_t *root, const char *path, const char *file, double *value) {
    json_t *at = find(root, path);
    if (!at) return RA_OK;
    if (!json_is_number(at) || !(json_number_value(at) >= 0))
        return ra_fail(RA_IO, "%s: %s is not a number from 0 on", file, path);
    *value = json_number_value(at);
    return RA_OK;
}

static ra_status read_fields(json_t *root, const char *file, machine *m) {
    static const char *const rates[] = {"flops.f32", "flops.bf16", "flops.f16", "flops.f64"};
    double ranks;
    for (int i = 0; i < 4; i++) RA_TRY(positive(root, rates[i], file, &m->flops[i]));
    RA_TRY(positive(root, "backward_share", file, &m->backward_share));
    RA_TRY(positive(root, "ranks_per_node", file, &ranks));
    RA_TRY(positive(root, "inside.seconds", file, &m->inside.seconds));
    RA_TRY(positive(root, "inside.bytes_per_second", file, &m->inside.bytes_per_second));
    RA_TRY(positive(root, "between.seconds", file, &m->between.seconds));
    RA_TRY(positive(root, "between.bytes_per_second", file, &m->between.bytes_per_second));
    m->wide_share[0] = m->wide_share[1] = 1;
    RA_TRY(optional(root, "visit_keys", file, &m->visit_keys[0]));
    RA_TRY(optional(root, "state_keys", file, &m->state_keys[0]));
    RA_TRY(optional(root, "end_keys", file, &m->end_keys[0]));
    RA_TRY(optional(root, "row_seconds", file, &m->row_seconds[0]));
    RA_TRY(optional(root, "host_bytes_per_second", file, &m->host_bytes_per_second));
    m->visit_keys[1] = m->visit_keys[0];
    m->state_keys[1] = m->state_keys[0];
    m->end_keys[1] = m->end_keys[0];
    m->row_seconds[1] = m->row_seconds[0];
    m->ranks_per_node = ranks < 1e9 ? (int64_t)ranks : 1000000000;
    if (m->ranks_per_node < 1) return ra_fail(RA_IO, "%s: ranks_per_node is below 1", file);
    return RA_OK;
}

const char *machine_names(void) { return "laptop h200 h200x8 h200x64"; }

ra_status machine_find(const char *name, machine *m) {
    for (int i = 0; i < PRESETS; i++)
        if (strcmp(name, presets[i].name) == 0) {
            *m = presets[i];
            return RA_OK;
        }
    bool looks_like_file = strchr(name, '.') || strchr(name, '/') || access(name, F_OK) == 0;
    if (!looks_like_file)
        return ra_fail(RA_INVALID, "--machine %.60s is none of laptop, h200, h200x8, h200x64, nor a JSON file", name);
    json_error_t error;
    json_t *root = json_load_file(name, JSON_REJECT_DUPLICATES, &error);
    if (!root) return ra_fail(RA_IO, "%s: %s", name, error.text);
    *m = (machine){.basis = "rates and links from a file"};
    json_t *title = json_object_get(root, "name");
    snprintf(m->name, sizeof m->name, "%s", json_is_string(title) ? json_string_value(title) : name);
    ra_status status = read_fields(root, name, m);
    json_decref(root);
    return status;
}

ra_status machine_suits(const machine *m, const ra_attention_desc *desc) {
    if (m->flops[desc->dtype] > 0) return RA_OK;
    return ra_fail(RA_NOT_AVAILABLE, "--machine %s has no measured rate for %s: try --dtype bf16", m->name,
                   ra_dtype_name(desc->dtype));
}

/* ------------------------------------------------------------------------------------------------------------- predicting */

/* As many keys as the visits of query rows cost. A row that meets its keys at once is visited once, others for each bucket; the
 * two runs of a zigzag shard share a bucket. Of the pairs, rows with a state have their share. */
static double keys_of_visits(const machine *m, const ra_attention_desc *desc, int ranks, const ra_rank_summary *r,
                             bool backward) {
    const double rows = (double)desc->batch * (double)r->rows_q * (double)desc->heads;
    const double used = rows - (r->holes > 0 ? (double)r->holes : 0);
    const double carried = fmin(used, (double)r->state_rows), share = used > 0 ? carried / used : 0;
    const double bucket = (double)r->bucket / (desc->layout == RA_LAYOUT_ZIGZAG && ranks > 1 ? 2 : 1);
    const double visits = fmax(carried, bucket > 0 ? share * (double)r->pairs / bucket : 0);
    return (used - carried) * m->visit_keys[backward] + visits * (m->visit_keys[backward] + m->state_keys[backward]) +
           carried * m->end_keys[backward];
}

static double compute_seconds(const machine *m, const ra_attention_desc *desc, int ranks, const ra_rank_summary *r,
                              bool backward) {
    const double wide = desc->head_dim > 64 ? m->wide_share[backward] : 1;
    const double rate = m->flops[desc->dtype] * (backward ? m->backward_share : 1) * wide;
    const double keys = (double)r->pairs + keys_of_visits(m, desc, ranks, r, backward);
    return keys * (backward ? 10 : 4) * (double)desc->head_dim / rate +
           (double)desc->batch * (double)r->rows_q * m->row_seconds[backward];
}

/* Seconds of all copies between host and device, and of those that nothing hides: the first block in, and the last out. */
static double offload_seconds(const machine *m, const ra_attention_desc *desc, const ra_rank_summary *r, bool backward,
                              double *bare) {
    const double size = (double)ra_dtype_size(desc->dtype), sum = size < 4 ? 4 : size;
    const double rows = (double)ra_min(ra_max(desc->seq_q, desc->seq_k), ra_max(1, r->bucket));
    const double blocks = (double)desc->seq_q / rows;
    const double q = (double)desc->batch * (double)desc->heads * (double)desc->head_dim,
                 k = (double)desc->batch * (double)(desc->kv_heads ? desc->kv_heads : desc->heads) * (double)desc->head_dim;
    const double of_queries = rows * q * size * (backward ? 4 : 2), of_keys = rows * k * 2 * (size + (backward ? 2 * sum : 0));
    *bare = 0;
    if (m->host_bytes_per_second == 0) return 0;
    *bare = (of_queries + of_keys) / m->host_bytes_per_second;
    return (blocks * of_queries + (double)r->hops * of_keys) / m->host_bytes_per_second;
}

static double exchange_seconds(const machine *m, const ra_attention_desc *desc, int ranks, const ra_rank_summary *r,
                               bool backward, double *bare) {
    if (desc->offload) return offload_seconds(m, desc, r, backward, bare);
    const machine_link *link = ranks > m->ranks_per_node ? &m->between : &m->inside; /* a ring is as fast as its slowest link */
    const double bytes = (double)(backward ? r->bytes_sent_backward : r->bytes_sent);
    const double all = (double)r->hops * link->seconds + bytes / link->bytes_per_second;
    *bare = r->hops > 0 ? all / (double)r->hops : 0;
    return all;
}

double machine_rank_seconds(const machine *m, const ra_attention_desc *desc, int ranks, const ra_rank_summary *r,
                            bool backward) {
    if (summary_uncounted(r)) return (double)NAN;
    double bare, compute = compute_seconds(m, desc, ranks, r, backward),
                 exchange = exchange_seconds(m, desc, ranks, r, backward, &bare);
    return fmax(compute, exchange) + fmin(compute, bare);
}

/* The larger of two times; what is unknown could be any. */
static double longer(double a, double b) { return isnan(a) || a >= b ? a : b; }

void machine_predict_from(const machine *m, const ra_attention_desc *desc, int ranks, const ra_rank_summary *all,
                          machine_prediction *p) {
    *p = (machine_prediction){0};
    double *passes[2] = {&p->forward, &p->backward}, computing[2] = {0, 0};
    for (int i = 0; i < ranks; i++) {
        for (int backward = 0; backward < 2; backward++) {
            *passes[backward] = longer(*passes[backward], machine_rank_seconds(m, desc, ranks, &all[i], backward));
            computing[backward] += compute_seconds(m, desc, ranks, &all[i], backward);
        }
        p->pairs += (double)all[i].pairs / ranks;
    }
    /* On one device ranks take turns, and what one of them waits for, the others hide. */
    for (int backward = 0; backward < 2 && m->shared; backward++)
        *passes[backward] = longer(*passes[backward], computing[backward]);
}

ra_status machine_predict(const machine *m, const ra_attention_desc *desc, int ranks, machine_prediction *p) {
    ra_rank_summary *all;
    RA_TRY(plan_ranks(desc, ranks, &all));
    machine_predict_from(m, desc, ranks, all, p);
    free(all);
    return RA_OK;
}

ra_status machine_scale(const machine *m, const ra_attention_desc *desc, bool forward, bool backward, int64_t weak_share,
                        machine_scaling *rows) {
    double rate_alone = 0;
    for (int i = 0; i < MACHINE_SCALING_ROWS; i++) {
        int ranks = 1 << i;
        ra_attention_desc d = *desc;
        machine_prediction p;
        d.memory_limit = 0;
        d.offload = desc->offload && ranks == 1;
        if (weak_share > 0) {
            d.seq_q = d.seq_k = weak_share * ranks;
            d.key_begin = d.key_end = NULL;
        }
        if (ra_attention_desc_check(&d) != RA_OK) { /* it has grown beyond any sequence */
            rows[i] = (machine_scaling){ranks, d.seq_k, (double)NAN, (double)NAN};
            continue;
        }
        const ra_status status = machine_predict(m, &d, ranks, &p);
        if (status == RA_NOT_AVAILABLE) { /* so few ranks hold more rows than the device takes */
            if (i == 0) rate_alone = (double)NAN;
            rows[i] = (machine_scaling){ranks, d.seq_k, (double)NAN, (double)NAN};
            continue;
        }
        RA_TRY(status);
        double seconds = (forward ? p.forward : 0) + (backward ? p.backward : 0), rate = seconds == 0 ? 0 : p.pairs / seconds;
        if (i == 0) rate_alone = rate;
        rows[i] = (machine_scaling){ranks, d.seq_k, seconds, rate_alone == 0 ? 1 : rate / rate_alone};
    }
    return RA_OK;
}
