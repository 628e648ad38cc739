/* An alpha-beta model. A rank's time is the larger of computing (attended pairs over its measured rate) and exchanging (hops
 * times alpha, bytes over bandwidth), because the one hides behind the other; the first exchange of a bucket has nothing to
 * hide behind. */
#include "machine.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "core/size.h"
#include "core/status.h"

/* Rates are useful flop/s of attention itself, not peaks: two AVX2 cores. The link is a copy between threads. */
static const machine presets[] = {
    {"laptop", {4e10, 4e10, 4e10, 4e9}, 0.8, 1024, {2e-6, 8e9}, {2e-6, 8e9}},
};

/* Machines on which no ring has been measured yet, so that there is nothing to predict from. */
static const char *const to_come[] = {"h200x8", "h200x64"};

static ra_status positive(json_t *root, const char *path, const char *file, double *value) {
    char part[32];
    json_t *at = root;
    for (const char *p = path; *p && at; p += *p == '.') {
        int length = (int)strcspn(p, ".");
        snprintf(part, sizeof part, "%.*s", length, p);
        at = json_object_get(at, part);
        p += length;
    }
    if (!json_is_number(at) || !(json_number_value(at) > 0))
        return ra_fail(RA_IO, "%s: %s is missing, or is not a number above 0", file, path);
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
    m->ranks_per_node = ranks < 1e9 ? (int64_t)ranks : 1000000000;
    if (m->ranks_per_node < 1) return ra_fail(RA_IO, "%s: ranks_per_node is below 1", file);
    return RA_OK;
}

const char *machine_names(void) { return "laptop"; }

ra_status machine_find(const char *name, machine *m) {
    for (size_t i = 0; i < sizeof presets / sizeof *presets; i++)
        if (strcmp(name, presets[i].name) == 0) {
            *m = presets[i];
            return RA_OK;
        }
    for (size_t i = 0; i < sizeof to_come / sizeof *to_come; i++)
        if (strcmp(name, to_come[i]) == 0)
            return ra_fail(RA_NOT_AVAILABLE,
                           "--machine %s is not available: no ring of GPUs has been measured yet; a JSON file describes "
                           "any machine",
                           name);
    bool looks_like_file = strchr(name, '.') || strchr(name, '/') || access(name, F_OK) == 0;
    if (!looks_like_file)
        return ra_fail(RA_INVALID, "--machine %.60s is neither laptop nor a JSON file", name);
    json_error_t error;
    json_t *root = json_load_file(name, JSON_REJECT_DUPLICATES, &error);
    if (!root) return ra_fail(RA_IO, "%s: %s", name, error.text);
    memset(m, 0, sizeof *m);
    json_t *title = json_object_get(root, "name");
    snprintf(m->name, sizeof m->name, "%s", json_is_string(title) ? json_string_value(title) : name);
    ra_status status = read_fields(root, name, m);
    json_decref(root);
    return status;
}

double machine_rank_seconds(const machine *m, const ra_attention_desc *desc, int ranks, const ra_rank_summary *r,
                            bool backward) {
    double rate = m->flops[desc->dtype] * (backward ? m->backward_share : 1);
    double compute = (double)r->pairs * (backward ? 10 : 4) * (double)desc->head_dim / rate;
    const machine_link *link = ranks > m->ranks_per_node ? &m->between : &m->inside; /* a ring is as fast as its slowest link */
    double bytes = (double)(backward ? r->bytes_sent_backward : r->bytes_sent);
    double exchange = (double)r->hops * link->seconds + bytes / link->bytes_per_second;
    double first = r->hops > 0 ? exchange / (double)r->hops : 0;
    return (compute > exchange ? compute : exchange) + (compute < first ? compute : first);
}

ra_status machine_predict(const machine *m, const ra_attention_desc *desc, int ranks, machine_prediction *p) {
    int64_t looks = ra_min(ranks, ranks > 64 ? 4 : 16); /* the first and the last rank among them */
    *p = (machine_prediction){0};
    for (int64_t i = 0; i < looks; i++) {
        int rank = looks > 1 ? (int)(i * (ranks - 1) / (looks - 1)) : 0;
        ra_rank_summary r = {.struct_size = sizeof r};
        RA_TRY(ra_plan_summary(desc, rank, ranks, &r));
        double forward = machine_rank_seconds(m, desc, ranks, &r, false),
               backward = machine_rank_seconds(m, desc, ranks, &r, true);
        p->forward = forward > p->forward ? forward : p->forward;
        p->backward = backward > p->backward ? backward : p->backward;
        p->pairs += (double)r.pairs / (double)looks;
    }
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
        if (weak_share > 0) {
            d.seq_q = d.seq_k = weak_share * ranks;
            d.key_begin = d.key_end = NULL;
        }
        RA_TRY(machine_predict(m, &d, ranks, &p));
        double seconds = (forward ? p.forward : 0) + (backward ? p.backward : 0), rate = seconds > 0 ? p.pairs / seconds : 0;
        if (i == 0) rate_alone = rate;
        rows[i] = (machine_scaling){ranks, d.seq_k, seconds, rate_alone > 0 ? rate / rate_alone : 1};
    }
    return RA_OK;
}
