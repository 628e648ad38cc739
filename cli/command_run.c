/* run and grad: attention of files.
 *
 * Inputs are mapped. Where a file's dtype is the one computed and a rank's rows are one progression of the file's rows, the
 * rank reads them where they lie; otherwise it copies its own rows. Outputs are mapped in the same way. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli.h"
#include "core/dtype.h"
#include "core/size.h"
#include "core/status.h"
#include "files.h"
#include "device.h"
#include "group.h"
#include "measure.h"
#include "shard.h"

/* What a rank reports of its call. */
typedef struct rank_result {
    double seconds, wait;
    int64_t bytes_sent, workspace, bucket;
    ra_schedule schedule;
    char kernel[16];
} rank_result;

typedef struct job {
    const settings *s;
    description d;
    file_set files;
    bool backward;
    bool placed[TENSOR_COUNT]; /* read or written in the file itself */
    rank_result *results;
} job;

static const ra_attention_desc *desc_of(const job *j) { return &j->d.desc; }

/* ----------------------------------------------------------------------------------------------------------- planning */

/* Which tensors stay in their files; the same decision on every rank. */
static void choose_placement(job *j, int ranks) {
    const ra_attention_desc *desc = desc_of(j);
    bool one_progression = desc->layout != RA_LAYOUT_ZIGZAG || ranks == 1;
    for (int id = 0; id < TENSOR_COUNT; id++) {
        const file_tensor *f = &j->files.tensors[id];
        bool shared = desc->query_placement == RA_REPLICATED && ranks > 1 && tensor_has_queries((tensor_id)id) && f->output;
        j->placed[id] = f->used && desc->device == RA_DEVICE_CPU && one_progression && !shared &&
                        f->array.dtype == tensor_dtype(desc, (tensor_id)id) &&
                        f->array.offset % (int64_t)ra_dtype_size(f->array.dtype) == 0;
    }
}

static bool tensor_needed(const job *j, tensor_id id) {
    if (id <= T_OUT) return true;
    return j->backward || (id == T_LSE && j->files.tensors[T_LSE].used);
}

/* Bytes of a rank's tensors that are in memory, or (placed) in files. */
static ra_status tensor_bytes(const job *j, int rank, int ranks, bool placed, int64_t *bytes) {
    const ra_attention_desc *desc = desc_of(j);
    ra_shard queries, keys;
    RA_TRY(ra_shard_rows(desc, rank, ranks, &queries, &keys));
    *bytes = 0;
    for (int id = 0; id < TENSOR_COUNT && !desc->offload; id++) {
        if (!tensor_needed(j, (tensor_id)id) || j->placed[id] != placed) continue;
        int64_t rows = tensor_has_queries((tensor_id)id) ? queries.count : keys.count, dim = id == T_LSE ? 1 : desc->head_dim;
        int64_t elements = ra_sat_mul(ra_sat_mul(desc->batch, rows), ra_sat_mul(tensor_heads(desc, (tensor_id)id), dim));
        *bytes = ra_sat_add(*bytes, ra_sat_mul(elements, (int64_t)ra_dtype_size(tensor_dtype(desc, (tensor_id)id))));
    }
    return RA_OK;
}

/* The library counts every shard; what stays in mapped files is allowed on top of --memory-limit. */
static ra_status apply_memory_limit(job *j, int ranks) {
    if (!j->s->given[OPT_MEMORY_LIMIT]) return RA_OK;
    int64_t mapped = 0, bytes;
    for (int rank = 0; rank < ranks; rank++) {
        RA_TRY(tensor_bytes(j, rank, ranks, true, &bytes));
        mapped = ra_max(mapped, bytes);
    }
    j->d.desc.memory_limit = ra_sat_add(j->s->memory_limit, mapped);
    for (int rank = 0; rank < ranks; rank++) {
        ra_rank_summary r = {.struct_size = sizeof r};
        ra_status status = ra_plan_summary(desc_of(j), rank, ranks, &r);
        if (status == RA_NOMEM)
            return ra_fail(RA_NOMEM,
                           "rank %d cannot stay within --memory-limit %s, whatever the bucket: a larger --ring-size needs less",
                           rank, show_bytes((double)j->s->memory_limit));
        RA_TRY(status);
        RA_TRY(tensor_bytes(j, rank, ranks, false, &bytes));
        bytes = ra_sat_add(bytes, ra_max(r.workspace_bytes, j->backward ? r.workspace_bytes_backward : 0));
        if (bytes > j->s->memory_limit)
            return ra_fail(RA_NOMEM,
                           "rank %d needs %s for shards and workspace, more than --memory-limit %s: a larger --ring-size or a "
                           "smaller --bucket needs less",
                           rank, show_bytes((double)bytes), show_bytes((double)j->s->memory_limit));
    }
    return RA_OK;
}

/* Zigzag shards, which have two runs, are copied from their file, and striped ones are not; both are balanced. Where memory is
 * short and the layout is left open, it is striped. */
static ra_status choose_memory(job *j, int ranks) {
    choose_placement(j, ranks);
    ra_status status = apply_memory_limit(j, ranks);
    if (status != RA_NOMEM || j->s->layout != LAYOUT_AUTO || desc_of(j)->layout != RA_LAYOUT_ZIGZAG) return status;
    j->d.desc.layout = RA_LAYOUT_STRIPED;
    choose_placement(j, ranks);
    return apply_memory_limit(j, ranks);
}

/* ---------------------------------------------------------------------------------------------------------- computing */

static ra_status attach(job *j, shard *s, tensor_id id) {
    const file_tensor *f = &j->files.tensors[id];
    if (j->placed[id] && shard_place(s, id, f->data)) return RA_OK;
    RA_TRY(shard_alloc(s, id));
    return f->used && !f->output ? shard_load(s, id, f->data, f->array.dtype) : RA_OK;
}

static ra_status store(const job *j, const shard *s, tensor_id id) {
    const file_tensor *f = &j->files.tensors[id];
    bool copy_of_rank_0 = desc_of(j)->query_placement == RA_REPLICATED && tensor_has_queries(id) && s->rank != 0;
    bool wanted = f->used && f->output && s->t[id].buffer && !copy_of_rank_0;
    return wanted ? shard_store(s, id, f->data, f->array.dtype) : RA_OK;
}

static ra_status compute(job *j, rank_job *rank, ra_plan *plan, shard *s) {
    rank_result *result = &j->results[rank->rank];
    ra_stats_data stats = {.struct_size = sizeof stats};
    for (int id = 0; id < TENSOR_COUNT; id++)
        if (tensor_needed(j, (tensor_id)id)) RA_TRY(attach(j, s, (tensor_id)id));
    double start = now(), forward_seconds;
    if (j->backward) RA_TRY(ra_plan_check_backward(plan));
    RA_TRY(device_forward(plan, s, &forward_seconds));
    RA_TRY(ra_stats(plan, &stats));
    result->bytes_sent = stats.bytes_sent;
    result->wait = stats.wait_seconds;
    if (j->backward) {
        double backward_seconds;
        RA_TRY(device_backward(plan, s, &backward_seconds));
        RA_TRY(ra_stats(plan, &stats));
        result->bytes_sent += stats.bytes_sent;
        result->wait += stats.wait_seconds;
    }
    result->seconds = now() - start;
    result->workspace = ra_max(ra_plan_workspace(plan, false), j->backward ? ra_plan_workspace(plan, true) : 0);
    result->schedule = ra_plan_schedule(plan);
    result->bucket = ra_plan_bucket(plan);
    snprintf(result->kernel, sizeof result->kernel, "%s", ra_plan_kernel(plan));
    for (int id = 0; id < TENSOR_COUNT; id++) RA_TRY(store(j, s, (tensor_id)id));
    return RA_OK;
}

static ra_status rank_body(rank_job *rank) {
    job *j = rank->arg;
    shard s;
    ra_plan *plan;
    RA_TRY(shard_init(desc_of(j), rank->rank, rank->ranks, &s));
    RA_TRY(ra_plan_create(rank->comm, desc_of(j), &plan));
    ra_status status = compute(j, rank, plan, &s);
    ra_plan_destroy(plan);
    shard_free(&s);
    return status;
}

/* ---------------------------------------------------------------------------------------------------------- reporting */

static ra_status report(const job *j, int ranks) {
    const ra_attention_desc *desc = desc_of(j);
    rank_result all = j->results[0];
    int64_t total_sent = 0;
    for (int i = 0; i < ranks; i++) {
        total_sent += j->results[i].bytes_sent;
        all.seconds = all.seconds > j->results[i].seconds ? all.seconds : j->results[i].seconds;
        all.wait = all.wait > j->results[i].wait ? all.wait : j->results[i].wait;
        all.bytes_sent = ra_max(all.bytes_sent, j->results[i].bytes_sent);
        all.workspace = ra_max(all.workspace, j->results[i].workspace);
    }
    plan_totals totals;
    RA_TRY(plan_sum(desc, ranks, j->backward, &totals));
    char layout[32], schedule[32];
    snprintf(layout, sizeof layout, "%s", option_word(OPT_LAYOUT, 1 + (int)desc->layout));
    snprintf(schedule, sizeof schedule, "%s", option_word(OPT_SCHEDULE, (int)all.schedule));
    if (j->s->json) {
        json_t *outputs = json_object();
        for (int id = 0; id < TENSOR_COUNT; id++)
            if (j->files.tensors[id].used && j->files.tensors[id].output)
                json_object_set_new(outputs, options[j->files.tensors[id].option].name,
                                    json_text(j->files.tensors[id].argument));
        return print_json(
            j->s,
            json_pack("{s:o, s:I, s:I, s:I, s:I, s:I, s:I, s:s, s:s, s:i, s:i, s:s, s:s, s:I, s:f, s:f, s:I, s:I, s:I, s:o}",
                      "files", outputs, "batch", (json_int_t)desc->batch, "seq_q", (json_int_t)desc->seq_q, "seq_k",
                      (json_int_t)desc->seq_k, "heads", (json_int_t)desc->heads, "kv_heads", (json_int_t)desc->kv_heads,
                      "head_dim", (json_int_t)desc->head_dim, "dtype", ra_dtype_name(desc->dtype), "kernel", all.kernel,
                      "threads", (int)desc->threads, "ring_size", ranks, "layout", layout, "schedule", schedule, "bucket",
                      (json_int_t)all.bucket, "ms", all.seconds * 1e3, "wait_ms", all.wait * 1e3, "bytes_sent",
                      (json_int_t)all.bytes_sent, "bytes_sent_total", (json_int_t)total_sent, "workspace_bytes",
                      (json_int_t)all.workspace, "holes", json_number(totals.hole_share)));
    }
    printf("%s [%lld, %lld, %lld, %lld] %s: %s", commands[j->s->command].name, (long long)desc->batch, (long long)desc->seq_q,
           (long long)desc->heads, (long long)desc->head_dim, ra_dtype_name(desc->dtype), show_seconds(all.seconds));
    if (ranks > 1)
        printf(" on %d ranks (%s, %s), %s sent by the busiest", ranks, layout, schedule, show_bytes((double)all.bytes_sent));
    printf(", kernel %s\n", all.kernel);
    if (totals.holes > 0)
        printf("%.3g %% of the rows have no key in this pattern: their output is 0\n", 100 * totals.hole_share);
    return RA_OK;
}

/* ------------------------------------------------------------------------------------------------------------ running */

/* Rows of a tensor that one rank does not write would be zeros. */
static ra_status agree_on_outputs(const job *j, group *g) {
    file_request *all = calloc((size_t)g->ranks, sizeof *all);
    if (!all) return ra_fail(RA_NOMEM, "no memory for %d ranks", g->ranks);
    all[g->first] = files_request(&j->files);
    ra_status status = group_gather(g, all, (int64_t)sizeof *all);
    if (status == RA_OK) status = files_agree(all, g->ranks);
    free(all);
    return status;
}

/* One process creates the outputs; where ranks are processes, the others join it. If it cannot, it gives up, and they learn
 * why. */
static ra_status make_outputs(job *j, group *g) {
    if (g->local == g->ranks) return files_create(&j->files);
    RA_TRY(agree_on_outputs(j, g));
    if (group_speaks(g)) RA_TRY(files_create(&j->files));
    file_names *all = calloc((size_t)g->ranks, sizeof *all);
    if (!all) return ra_fail(RA_NOMEM, "no memory for %d ranks", g->ranks);
    if (group_speaks(g)) files_names(&j->files, &all[g->first]);
    ra_status status = group_gather(g, all, (int64_t)sizeof *all);
    if (status == RA_OK && !group_speaks(g)) status = files_join(&j->files, &all[0]);
    free(all);
    return status;
}

static ra_status run_group(job *j, group *g) {
    RA_TRY(files_open(j->s, &j->files, &j->d.desc));
    RA_TRY(describe_files(j->s, g->ranks, &j->d));
    files_describe(&j->files, desc_of(j));
    RA_TRY(choose_memory(j, g->ranks));
    RA_TRY(make_outputs(j, g));
    j->results = calloc((size_t)g->ranks, sizeof *j->results);
    if (!j->results) return ra_fail(RA_NOMEM, "no memory for %d ranks", g->ranks);
    if (isatty(STDERR_FILENO) && g->local == g->ranks) g->expected = measure_estimate(j->s, desc_of(j), g->ranks, j->backward);
    RA_TRY(group_run(g, commands[j->s->command].name, rank_body, j));
    RA_TRY(files_sync(&j->files));
    RA_TRY(group_gather(g, j->results, (int64_t)sizeof *j->results)); /* every rank has written its rows */
    if (!group_speaks(g)) {
        files_leave(&j->files);
        return RA_OK;
    }
    RA_TRY(files_publish(&j->files));
    return report(j, g->ranks);
}

static ra_status run_files(job *j) {
    int ranks;
    group g;
    RA_TRY(group_ranks(j->s, &ranks));
    RA_TRY(group_open(j->s, ranks, &g));
    ra_status status = run_group(j, &g);
    group_close(&g);
    return status;
}

ra_status command_run(const settings *s, bool *check_failed) {
    (void)check_failed;
    job j = {.s = s, .backward = s->command == CMD_GRAD};
    ra_status status = run_files(&j);
    files_close(&j.files);
    description_free(&j.d);
    free(j.results);
    return status;
}
