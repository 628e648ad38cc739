/* Offload: one rank computes a call block by block. A stage is a block of queries against a block of keys. There are two places
 * for a block of keys, and two for a block of queries, so that copies run beside what is computed:
 *
 *     copies    in 0 | in 1             | in 2       | out, in 3      |
 *     call           | begin, stage 0   | stage 1    | stage 2, end   | begin, stage 3 ...
 *
 * The blocks of keys come in the order in which a ring of as many ranks would bring them: those of the same rows, those before,
 * and after the first the last. So results have the bits of such a ring, except for dk and dv: in backward the sums of a block
 * of keys go through host memory between the stages that add to them. The first stage that meets it starts from zeros, the last
 * one makes the results.
 *
 * Copies have one queue, in which every copy runs after those that were enqueued before it. The host waits for nothing. */
#include "ring/offload.h"

#include <sched.h>
#include <string.h>

#include "core/alloc.h"
#include "core/dtype.h"
#include "core/status.h"

struct ra_offload {
    const ra_copy_ops *copies;
    ra_queue queue;
    void *fetched[2], *computed[2]; /* moments of even and of odd stages: all of it has come; all of it is computed */
    void *done;                     /* moment: all copies of the latest call */
    char *sums;                     /* pinned: sums of 16-bit gradients */
    int64_t sums_bytes;
};

/* ------------------------------------------------------------------------------------------------------- open and close */

ra_status ra_offload_open(const ra_copy_ops *copies, ra_offload **result) {
    if (*result) return RA_OK;
    ra_offload *offload = ra_calloc(sizeof *offload);
    if (!offload) return ra_fail(RA_NOMEM, "no memory for a queue of copies");
    offload->copies = copies;
    const ra_status status = copies->open(&offload->queue);
    if (status != RA_OK) ra_free(offload, sizeof *offload);
    else *result = offload;
    return status;
}

/* Waits for the copies of the latest call, which may use the sums, and frees these. */
static void free_sums(ra_offload *offload) {
    bool passed = !offload->sums || !offload->done;
    while (!passed && offload->copies->passed(offload->done, &passed) == RA_OK) sched_yield();
    if (offload->sums) offload->copies->pinned->free(offload->sums, offload->sums_bytes);
    offload->sums = NULL;
    offload->sums_bytes = 0;
}

static ra_status reserve_sums(ra_offload *offload, int64_t bytes) {
    if (bytes <= offload->sums_bytes) return RA_OK;
    free_sums(offload);
    offload->sums = offload->copies->pinned->alloc(bytes);
    if (!offload->sums) return ra_fail(RA_NOMEM, "no pinned host memory for %lld bytes of sums of gradients", (long long)bytes);
    offload->sums_bytes = bytes;
    return RA_OK;
}

void ra_offload_close(ra_offload *offload) {
    if (!offload) return;
    free_sums(offload);
    void *moments[] = {offload->fetched[0], offload->fetched[1], offload->computed[0], offload->computed[1], offload->done};
    for (size_t i = 0; i < sizeof moments / sizeof *moments; i++)
        if (moments[i]) offload->copies->forget(moments[i]);
    offload->copies->close(&offload->queue);
    ra_free(offload, sizeof *offload);
}

/* --------------------------------------------------------------------------------------------------------------- tensors */

/* A tensor of the call, and the two places for its blocks on the device. A block lies there without gaps, in the order of the
 * tensor: rows of all heads, or heads with all of their rows. */
typedef struct moving {
    const char *name;
    ra_tensor host;
    int64_t heads, dim, size; /* size: of an element */
    bool by_heads;
    char *place[2];
} moving;

static ra_status moving_init(const char *name, ra_tensor host, int64_t heads, int64_t dim, int64_t size, moving *m) {
    *m = (moving){.name = name, .host = host, .heads = heads, .dim = dim, .size = size};
    const bool by_rows = (heads == 1 || host.head == dim) && host.row == heads * dim;
    m->by_heads = !by_rows && host.row == dim;
    if (by_rows || m->by_heads || !host.data) return RA_OK;
    return ra_fail(RA_INVALID,
                   "%s has a row stride of %lld and a head stride of %lld; offload takes [B, N, H, D] and [B, H, N, D]", name,
                   (long long)host.row, (long long)host.head);
}

static ra_tensor view_of(const moving *m, int place, int64_t rows) {
    if (!m->host.data) return (ra_tensor){0};
    if (!m->by_heads) return ra_tensor_bnhd(m->place[place], rows, m->heads, m->dim);
    return (ra_tensor){m->place[place], m->heads * rows * m->dim, m->dim, rows * m->dim};
}

/* ------------------------------------------------------------------------------------------------------------------ call */

/* A block of queries, and at which turn it meets the next block of keys; after the last turn, none. */
typedef struct stage {
    int64_t number;
    int queries, turn;
    int place; /* of its keys */
} stage;

enum { Q, OUT, LSE, DOUT, DLSE, DQ, QUERY_TENSORS };
enum { K, V, DK, DV, KEY_TENSORS };

typedef struct walk {
    ra_pass pass;
    const ra_blocks *blocks;
    ra_offload *offload;
    ra_problem problem; /* of the block of queries */
    ra_used_rows all;
    moving queries[QUERY_TENSORS];
    moving keys[KEY_TENSORS]; /* dk and dv: the results, in the places of k and v */
    moving sums[2];           /* of dk and dv */
    bool apart;               /* sums are not of the results' type */
} walk;

static ra_status copy_block(const walk *w, const moving *m, int place, ra_span rows, bool in) {
    const ra_offload *o = w->offload;
    const int64_t outer = m->by_heads ? m->heads : 1, bytes = rows.count * m->dim * m->size * (m->by_heads ? 1 : m->heads);
    char *at = m->place[place];
    if (!m->host.data || bytes == 0) return RA_OK;
    for (int64_t b = 0; b < w->problem.batch; b++)
        for (int64_t h = 0; h < outer; h++, at += bytes) {
            char *host = (char *)m->host.data + (b * m->host.batch + rows.start * m->host.row + h * m->host.head) * m->size;
            RA_TRY(o->copies->copy(&o->queue, in ? at : host, in ? host : at, bytes));
        }
    return RA_OK;
}

/* ---------------------------------------------------------------------------------------------------------------- stages */

static bool is_end(const walk *w, stage s) { return s.queries == w->blocks->count; }
static bool has_keys(const walk *w, stage s) { return s.turn < w->blocks->count; }
static int keys_of(const walk *w, stage s) { return (int)ra_mod(s.queries - s.turn, w->blocks->count); }

/* To the next turn, from this one on, at which queries and keys meet. */
static stage to_keys(const walk *w, stage s) {
    while (has_keys(w, s) && ra_block_items(w->blocks, s.queries, keys_of(w, s), w->pass.call.entry->items) == 0) s.turn++;
    return s;
}

/* Every block of queries has a stage, since its results are written even if it meets no keys. Keys that the stage before has
 * met stay where they are. */
static stage stage_after(const walk *w, stage before) {
    stage s = before;
    s.number++;
    if (has_keys(w, s)) s.turn++, s = to_keys(w, s);
    if (!has_keys(w, s)) {
        do s.queries++;
        while (!is_end(w, s) && ra_block_queries(w->blocks, s.queries).count == 0);
        s.turn = 0;
        if (!is_end(w, s)) s = to_keys(w, s);
    }
    return s;
}

static bool keeps_keys(const walk *w, stage s, stage next) {
    return !is_end(w, next) && has_keys(w, s) && has_keys(w, next) && keys_of(w, s) == keys_of(w, next);
}

/* Has this block of keys met all queries that it will meet, with this stage? */
static bool finishes(const walk *w, stage s) {
    return w->pass.backward && w->pass.call.entry->met[keys_of(w, s)] == w->blocks->visits[keys_of(w, s)];
}

static int64_t block_bytes(const walk *w, const moving *m, int64_t rows) {
    return w->problem.batch * rows * m->heads * m->dim * m->size;
}

/* Copies what a stage needs to its place. What lies there is not needed once the stage before last is computed. */
static ra_status fetch(walk *w, stage s, bool begins, bool keys_are_here) {
    ra_offload *o = w->offload;
    RA_TRY(o->copies->wait(&o->queue, o->computed[s.number % 2]));
    for (int i = 0; begins && i < QUERY_TENSORS; i++) {
        const bool input = w->pass.forward ? i == Q : i != DQ;
        if (input) RA_TRY(copy_block(w, &w->queries[i], s.queries % 2, ra_block_queries(w->blocks, s.queries), true));
    }
    if (has_keys(w, s) && !keys_are_here) {
        const ra_span rows = ra_block_keys(w->blocks, keys_of(w, s));
        for (int i = K; i <= V; i++) RA_TRY(copy_block(w, &w->keys[i], s.place, rows, true));
        const bool goes_on = w->pass.backward && w->pass.call.entry->met[keys_of(w, s)] > 0;
        for (int i = 0; goes_on && i < 2; i++) RA_TRY(copy_block(w, &w->sums[i], s.place, rows, true));
    }
    return o->copies->record(&o->queue, &o->fetched[s.number % 2]);
}

static ra_status begin_block(walk *w, int block) {
    ra_pass *pass = &w->pass;
    const ra_device_ops *device = pass->call.device;
    ra_tensor t[QUERY_TENSORS];
    w->problem.rows_q = ra_block_queries(w->blocks, block).count;
    for (int i = 0; i < QUERY_TENSORS; i++) t[i] = view_of(&w->queries[i], block % 2, w->problem.rows_q);
    if (pass->forward) {
        pass->forward->q = t[Q], pass->forward->out = t[OUT], pass->forward->lse = t[LSE];
        device->forward_lay(pass->forward);
        return device->forward_begin(pass->forward, NULL, 0);
    }
    ra_backward_pass *b = pass->backward;
    b->q = t[Q], b->out = t[OUT], b->lse = t[LSE], b->dout = t[DOUT], b->dlse = t[DLSE], b->dq = t[DQ];
    device->backward_lay(b);
    return device->backward_begin(b, NULL, 0);
}

static ra_status meet(walk *w, stage s) {
    ra_call *call = &w->pass.call;
    const ra_device_ops *device = call->device;
    const int keys = keys_of(w, s);
    const int64_t rows = ra_block_keys(w->blocks, keys).count;
    const ra_item_views views = {.k = view_of(&w->keys[K], s.place, rows),
                                 .v = view_of(&w->keys[V], s.place, rows),
                                 .dk = view_of(&w->sums[0], s.place, rows),
                                 .dv = view_of(&w->sums[1], s.place, rows),
                                 .sums_size = w->sums[0].size};
    const bool first = w->pass.backward && call->entry->met[keys]++ == 0;
    for (int i = 0; first && i < 2; i++)
        RA_TRY(device->zero(&call->queue, w->sums[i].place[s.place], block_bytes(w, &w->sums[i], rows)));
    call->item_count = ra_block_items(w->blocks, s.queries, keys, call->entry->items);
    ra_items_look(&views, w->keys[K].size, call->entry->items, call->item_count);
    RA_TRY(ra_pass_compute(&w->pass, false));
    for (int i = 0; w->apart && finishes(w, s) && i < 2; i++)
        RA_TRY(device->convert(&call->queue, &w->problem, view_of(&w->keys[DK + i], s.place, rows),
                               view_of(&w->sums[i], s.place, rows), rows, w->problem.kv_heads));
    return RA_OK;
}

static ra_status compute(walk *w, stage s, bool begins, bool ends) {
    ra_offload *o = w->offload;
    ra_call *call = &w->pass.call;
    RA_TRY(o->copies->wait(&call->queue, o->fetched[s.number % 2]));
    if (begins) RA_TRY(begin_block(w, s.queries));
    if (has_keys(w, s)) RA_TRY(meet(w, s));
    if (ends)
        RA_TRY(w->pass.forward ? call->device->forward_end(w->pass.forward) : call->device->backward_end(w->pass.backward));
    return o->copies->record(&call->queue, &o->computed[s.number % 2]);
}

/* Copies what a stage made to host memory. */
static ra_status bring_back(walk *w, stage s, bool ends, bool keys_stay) {
    ra_offload *o = w->offload;
    const bool sums = w->pass.backward && has_keys(w, s) && !keys_stay;
    if (!ends && !sums) return RA_OK;
    RA_TRY(o->copies->wait(&o->queue, o->computed[s.number % 2]));
    for (int i = 0; sums && i < 2; i++) {
        const moving *made = w->apart && finishes(w, s) ? &w->keys[DK + i] : &w->sums[i];
        RA_TRY(copy_block(w, made, s.place, ra_block_keys(w->blocks, keys_of(w, s)), false));
    }
    for (int i = 0; ends && i < QUERY_TENSORS; i++) {
        const bool output = w->pass.forward ? i == OUT || i == LSE : i == DQ;
        if (output) RA_TRY(copy_block(w, &w->queries[i], s.queries % 2, ra_block_queries(w->blocks, s.queries), false));
    }
    return RA_OK;
}

/* Keys that meet no query have gradients of zero. */
static ra_status clear_rest(walk *w) {
    ra_offload *o = w->offload;
    const ra_call *call = &w->pass.call;
    for (int block = 0; block < w->blocks->count; block++) {
        const ra_span rows = ra_block_keys(w->blocks, block);
        if (w->blocks->visits[block] > 0 || rows.count == 0) continue;
        RA_TRY(o->copies->record(&o->queue, &o->fetched[0])); /* all that went out of this place */
        RA_TRY(o->copies->wait(&call->queue, o->fetched[0]));
        for (int i = DK; i <= DV; i++)
            RA_TRY(call->device->zero(&call->queue, w->keys[i].place[0], block_bytes(w, &w->keys[i], rows.count)));
        RA_TRY(o->copies->record(&call->queue, &o->computed[0]));
        RA_TRY(o->copies->wait(&o->queue, o->computed[0]));
        for (int i = DK; i <= DV; i++) RA_TRY(copy_block(w, &w->keys[i], 0, rows, false));
    }
    return RA_OK;
}

static ra_status walk_stages(walk *w) {
    ra_offload *o = w->offload;
    for (int i = 0; i < 2; i++) RA_TRY(o->copies->record(&w->pass.call.queue, &o->computed[i]));
    bool begins = true;
    stage now = stage_after(w, (stage){.number = -1, .queries = -1, .turn = w->blocks->count});
    if (!is_end(w, now)) RA_TRY(fetch(w, now, true, false));
    while (!is_end(w, now)) {
        stage next = stage_after(w, now);
        const bool ends = next.queries != now.queries, stay = keeps_keys(w, now, next);
        if (!stay) next.place = 1 - now.place;
        if (!is_end(w, next)) RA_TRY(fetch(w, next, ends, stay));
        RA_TRY(compute(w, now, begins, ends));
        RA_TRY(bring_back(w, now, ends, stay));
        begins = ends;
        now = next;
    }
    return w->pass.backward ? clear_rest(w) : RA_OK;
}

/* ---------------------------------------------------------------------------------------------------------------- passes */

static ra_status init_queries(walk *w, const ra_tensor *tensors) {
    static const char *const names[QUERY_TENSORS] = {"q", "out", "lse", "dout", "dlse", "dq"};
    const ra_problem *p = &w->problem;
    for (int i = 0; i < QUERY_TENSORS; i++) {
        const bool numbers = i == LSE || i == DLSE;
        RA_TRY(moving_init(names[i], tensors[i], p->heads, numbers ? 1 : p->head_dim,
                           numbers ? ra_state_size(p->dtype) : (int64_t)ra_dtype_size(p->dtype), &w->queries[i]));
    }
    return RA_OK;
}

/* Sums lie in the results where these are of the same type. */
static ra_status init_keys(walk *w, const ra_tensor *tensors) {
    static const char *const names[KEY_TENSORS] = {"k", "v", "dk", "dv"};
    const ra_problem *p = &w->problem;
    const int64_t size = (int64_t)ra_dtype_size(p->dtype);
    for (int i = 0; i < KEY_TENSORS; i++)
        RA_TRY(moving_init(names[i], tensors[i], p->kv_heads, p->head_dim, size, &w->keys[i]));
    for (int i = 0; i < 2; i++) w->sums[i] = w->keys[DK + i];
    w->apart = w->pass.backward && size != ra_state_size(p->dtype);
    return RA_OK;
}

static ra_status init_sums(walk *w, int64_t rows) {
    const ra_problem *p = &w->problem;
    const int64_t state = ra_state_size(p->dtype), bytes = p->batch * rows * p->kv_heads * p->head_dim * state;
    bool returns = false; /* does any block of keys meet several blocks of queries? */
    for (int i = 0; i < w->blocks->count; i++) returns = returns || w->blocks->visits[i] > 1;
    if (returns) RA_TRY(reserve_sums(w->offload, 2 * bytes));
    static char none[1]; /* where sums never leave the device */
    for (int i = 0; i < 2; i++) {
        char *at = returns ? w->offload->sums + i * bytes : none;
        RA_TRY(moving_init("sums", ra_tensor_bnhd(at, rows, p->kv_heads, p->head_dim), p->kv_heads, p->head_dim, state,
                           &w->sums[i]));
    }
    return RA_OK;
}

/* Parts the workspace into places for blocks of the largest size. */
static void carve(walk *w, char **state, char **scratch) {
    ra_call *call = &w->pass.call;
    const ra_workspace *used = w->pass.forward ? &call->plan->forward : &call->plan->backward;
    *state = ra_call_carve(call, used->state);
    *scratch = ra_call_carve(call, used->scratch);
    for (int place = 0; place < 2; place++) {
        for (int i = 0; i < (w->pass.forward ? LSE + 1 : QUERY_TENSORS); i++) {
            moving *m = &w->queries[i];
            m->place[place] = ra_call_carve(call, block_bytes(w, m, w->blocks->rows_q));
        }
        for (int i = K; i <= V; i++) {
            moving *m = &w->keys[i];
            m->place[place] = ra_call_carve(call, block_bytes(w, m, w->blocks->rows_k));
            w->keys[DK + i].place[place] = m->place[place];
        }
        for (int i = 0; w->pass.backward && i < 2; i++) {
            moving *m = &w->sums[i];
            m->place[place] = ra_call_carve(call, block_bytes(w, m, w->blocks->rows_k));
            if (!w->apart) w->keys[DK + i].place[place] = m->place[place];
        }
    }
}

/* The call's queue goes on when all copies are done. If that cannot be had, the workspace is lost to them. */
static ra_status join(walk *w, ra_status status) {
    ra_offload *o = w->offload;
    ra_call *call = &w->pass.call;
    const ra_sentence kept = ra_sentence_keep();
    ra_status joined = o->copies->record(&o->queue, &o->done);
    if (joined == RA_OK) joined = o->copies->wait(&call->queue, o->done);
    if (joined != RA_OK) call->workspace = NULL;
    if (status == RA_OK) return joined;
    ra_sentence_restore(&kept);
    return status;
}

static ra_status run(walk *w, ra_plan *plan, void *stream, const ra_tensor *queries, const ra_tensor *keys) {
    ra_call *call = &w->pass.call;
    ra_forward_pass *forward = w->pass.forward;
    ra_backward_pass *backward = w->pass.backward;
    ra_entry *entry = ra_entry_of(plan);
    w->offload = entry->comm->offload;
    w->blocks = &plan->blocks[backward != NULL];
    w->all = (ra_used_rows){.modulus = 1};
    w->problem = plan->problem;
    w->problem.keys = w->blocks->rows_k;
    if (plan->kernel->device->recording(&(ra_queue){.stream = stream}))
        return ra_fail(RA_NOT_AVAILABLE, "a call with offload cannot be captured into a CUDA graph");
    RA_TRY(init_queries(w, queries));
    RA_TRY(init_keys(w, keys));
    if (w->apart) RA_TRY(init_sums(w, plan->config.seq_k));
    RA_TRY(ra_call_begin(call, entry, forward ? "forward" : "backward", forward ? &plan->forward : &plan->backward, stream));
    const ra_pass_shape shape = {.problem = &w->problem,
                                 .used_q = &w->all,
                                 .used_k = &w->all,
                                 .all_q = &w->all,
                                 .all_k = &w->all,
                                 .direct = plan->kernel->direct};
    memset(entry->met, 0, (size_t)plan->blocks[1].count * sizeof *entry->met);
    if (forward) {
        carve(w, &forward->state, &forward->scratch);
        forward->kernel = plan->kernel, forward->shape = shape, forward->queue = call->queue;
    } else {
        carve(w, &backward->state, &backward->scratch);
        backward->kernel = plan->kernel, backward->shape = shape, backward->queue = call->queue;
    }
    return ra_call_end(call, join(w, walk_stages(w)));
}

ra_status ra_offload_forward(ra_plan *plan, const ra_forward_args *a) {
    ra_forward_pass forward = {0};
    walk w = {.pass = {.forward = &forward}};
    const ra_tensor queries[QUERY_TENSORS] = {[Q] = a->q, [OUT] = a->out, [LSE] = a->lse};
    const ra_tensor keys[KEY_TENSORS] = {[K] = a->k, [V] = a->v};
    return run(&w, plan, a->stream, queries, keys);
}

ra_status ra_offload_backward(ra_plan *plan, const ra_backward_args *a) {
    ra_backward_pass backward = {0};
    walk w = {.pass = {.backward = &backward}};
    const ra_tensor queries[QUERY_TENSORS] = {
        [Q] = a->q, [OUT] = a->out, [LSE] = a->lse, [DOUT] = a->dout, [DLSE] = a->dlse, [DQ] = a->dq};
    const ra_tensor keys[KEY_TENSORS] = {[K] = a->k, [V] = a->v, [DK] = a->dk, [DV] = a->dv};
    return run(&w, plan, a->stream, queries, keys);
}
