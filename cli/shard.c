#include "shard.h"

#include <string.h>

#include "core/alloc.h"
#include "core/dtype.h"
#include "core/size.h"
#include "core/status.h"

bool tensor_has_queries(tensor_id id) { return id == T_Q || id == T_OUT || id == T_LSE || id == T_DOUT || id == T_DQ; }

ra_dtype tensor_dtype(const ra_attention_desc *desc, tensor_id id) {
    if (id == T_LSE) return desc->dtype == RA_F64 ? RA_F64 : RA_F32;
    return desc->dtype;
}

int64_t tensor_heads(const ra_attention_desc *desc, tensor_id id) {
    return tensor_has_queries(id) || desc->kv_heads == 0 ? desc->heads : desc->kv_heads;
}

int64_t tensor_rows(const ra_attention_desc *desc, tensor_id id) { return tensor_has_queries(id) ? desc->seq_q : desc->seq_k; }

static const ra_shard *rows_of(const shard *s, tensor_id id) { return tensor_has_queries(id) ? &s->queries : &s->keys; }

/* In memory of the device's own; pinned: in host memory from which it reads and writes. */
static bool on_device(const shard *s) { return s->desc->device == RA_DEVICE_CUDA && !s->desc->offload; }
static bool is_pinned(const shard *s) { return s->desc->offload; }

/* ------------------------------------------------------------------------------------------------------------ memory */

ra_status shard_init(const ra_attention_desc *desc, int rank, int ranks, shard *s) {
    memset(s, 0, sizeof *s);
    s->desc = desc;
    s->rank = rank;
    s->ranks = ranks;
    return ra_shard_rows(desc, rank, ranks, &s->queries, &s->keys);
}

ra_status shard_alloc(shard *s, tensor_id id) {
    int64_t rows = rows_of(s, id)->count, heads = tensor_heads(s->desc, id), dim = id == T_LSE ? 1 : s->desc->head_dim, bytes;
    shard_tensor *t = &s->t[id];
    if (!ra_mul(rows, heads, &bytes) || !ra_mul(bytes, dim, &bytes) || !ra_mul(bytes, s->desc->batch, &bytes) ||
        !ra_mul(bytes, (int64_t)ra_dtype_size(tensor_dtype(s->desc, id)), &bytes))
        return ra_fail(RA_NOMEM, "a tensor of rank %d is too large for 64-bit sizes", s->rank);
    if (on_device(s) && s->ranks > 1 && !s->stream) RA_TRY(ra_cuda_open_stream(&s->stream));
    if (on_device(s)) RA_TRY(ra_cuda_alloc(bytes, &t->buffer));
    else if (is_pinned(s)) RA_TRY(ra_cuda_pin(bytes, &t->buffer));
    else t->buffer = ra_alloc(bytes);
    if (!t->buffer) return ra_fail(RA_NOMEM, "rank %d has no memory for a tensor of %lld bytes", s->rank, (long long)bytes);
    t->bytes = bytes;
    t->tensor = id == T_LSE ? ra_tensor_lse(t->buffer, rows, heads) : ra_tensor_bnhd(t->buffer, rows, heads, dim);
    if (is_pinned(s)) return RA_OK; /* what counts is the device's memory */
    s->memory.in_use += bytes;
    s->memory.peak = ra_max(s->memory.peak, s->memory.in_use);
    return RA_OK;
}

ra_status shard_alloc_all(shard *s, bool backward) {
    for (int id = 0; id < (backward ? TENSOR_COUNT : T_DOUT); id++) RA_TRY(shard_alloc(s, (tensor_id)id));
    return RA_OK;
}

void shard_free(shard *s) {
    const ra_sentence kept = ra_sentence_keep();
    for (int id = 0; id < TENSOR_COUNT; id++) {
        if (!s->t[id].buffer) continue;
        if (on_device(s)) ra_cuda_free(s->t[id].buffer);
        else if (is_pinned(s)) ra_cuda_unpin(s->t[id].buffer);
        else ra_free(s->t[id].buffer, s->t[id].bytes);
        if (!is_pinned(s)) s->memory.in_use -= s->t[id].bytes;
        s->t[id] = (shard_tensor){0};
    }
    ra_cuda_close_stream(s->stream);
    s->stream = NULL;
    ra_sentence_restore(&kept);
}

/* -------------------------------------------------------------------------------------------------------- generating */

ra_generated shard_generated(const ra_attention_desc *desc, tensor_id id, data_tensor which, uint64_t seed) {
    return (ra_generated){.seed = seed,
                          .tensor = (int64_t)which,
                          .batch = desc->batch,
                          .rows = tensor_rows(desc, id),
                          .heads = tensor_heads(desc, id),
                          .head_dim = desc->head_dim,
                          .dtype = desc->dtype};
}

static ra_status generate_on_device(const shard *s, tensor_id id, data_tensor which, uint64_t seed) {
    const ra_shard *rows = rows_of(s, id);
    const ra_generated whole = shard_generated(s->desc, id, which, seed);
    ra_tensor to = s->t[id].tensor;
    for (int run = 0; run < 2; run++) {
        const ra_row_set set = {.heads = {0, 1, whole.heads}, .rows = rows->rows[run], .repeats = 1};
        RA_TRY(ra_cuda_generate(&whole, &set, to, s->stream));
        to.data = (char *)to.data + rows->rows[run].count * to.row * (int64_t)ra_dtype_size(whole.dtype);
    }
    return ra_cuda_synchronize(s->stream);
}

/* Made on the device, which is many times as fast as the host, some rows at a time. */
static ra_status generate_pinned(const shard *s, tensor_id id, data_tensor which, uint64_t seed) {
    const ra_generated whole = shard_generated(s->desc, id, which, seed);
    const int64_t row = whole.heads * whole.head_dim * (int64_t)ra_dtype_size(whole.dtype);
    const int64_t rows = ra_max(1, ra_min(whole.rows, ((int64_t)64 << 20) / row / ra_max(1, whole.batch)));
    void *made = NULL;
    RA_TRY(ra_cuda_alloc(whole.batch * rows * row, &made));
    ra_status status = RA_OK;
    for (int64_t first = 0; first < whole.rows && status == RA_OK; first += rows) {
        const int64_t count = ra_min(rows, whole.rows - first);
        const ra_row_set set = {.heads = {0, 1, whole.heads}, .rows = {first, 1, count}, .repeats = 1};
        status = ra_cuda_generate(&whole, &set, ra_tensor_bnhd(made, count, whole.heads, whole.head_dim), s->stream);
        for (int64_t b = 0; b < whole.batch && status == RA_OK; b++)
            status = ra_cuda_copy((char *)s->t[id].buffer + (b * whole.rows + first) * row, (char *)made + b * count * row,
                                  count * row, s->stream);
        if (status == RA_OK) status = ra_cuda_synchronize(s->stream);
    }
    ra_cuda_free(made);
    return status;
}

static ra_status generate(const shard *s, tensor_id id, data_tensor which, uint64_t seed) {
    if (!s->t[id].buffer) return RA_OK;
    if (is_pinned(s)) return generate_pinned(s, id, which, seed);
    if (on_device(s)) return generate_on_device(s, id, which, seed);
    const ra_shard *rows = rows_of(s, id);
    int64_t heads = tensor_heads(s->desc, id), row_elements = heads * s->desc->head_dim, total = tensor_rows(s->desc, id);
    char *at = s->t[id].buffer;
    for (int64_t b = 0; b < s->desc->batch; b++)
        for (int run = 0; run < 2; run++)
            for (int64_t i = 0; i < rows->rows[run].count;) {
                int64_t global = rows->rows[run].start + i * rows->rows[run].step;
                int64_t n = rows->rows[run].step == 1 ? rows->rows[run].count - i : 1; /* rows in one piece */
                data_fill(seed, which, (b * total + global) * row_elements, n * row_elements, s->desc->dtype, at);
                at += (size_t)(n * row_elements) * ra_dtype_size(s->desc->dtype);
                i += n;
            }
    return RA_OK;
}

ra_status shard_generate(shard *s, uint64_t seed) {
    RA_TRY(generate(s, T_Q, DATA_Q, seed));
    RA_TRY(generate(s, T_K, DATA_K, seed));
    RA_TRY(generate(s, T_V, DATA_V, seed));
    return generate(s, T_DOUT, DATA_DOUT, seed);
}

/* ------------------------------------------------------------------------------------------------------ global arrays */

bool shard_place(shard *s, tensor_id id, void *array) {
    const ra_shard *rows = rows_of(s, id);
    const ra_rows *only = rows->rows[0].count > 0 ? &rows->rows[0] : &rows->rows[1];
    int64_t size = (int64_t)ra_dtype_size(tensor_dtype(s->desc, id));
    if (on_device(s) || is_pinned(s) || only->count != rows->count || (uintptr_t)array % (uintptr_t)size != 0) return false;
    int64_t heads = tensor_heads(s->desc, id), dim = s->desc->head_dim, total = tensor_rows(s->desc, id);
    ra_tensor *t = &s->t[id].tensor;
    *t = id == T_LSE ? ra_tensor_lse(array, total, heads) : ra_tensor_bnhd(array, total, heads, dim);
    t->data = (char *)array + only->start * t->row * size;
    t->row *= only->step;
    return true;
}

/* Where the host may read and write a tensor: the tensor itself, or a copy of a device's, to be handed back. */
static ra_status host_side(const shard *s, tensor_id id, bool filled, char **host) {
    *host = s->t[id].buffer;
    if (!on_device(s)) return RA_OK;
    *host = ra_alloc(s->t[id].bytes);
    if (!*host)
        return ra_fail(RA_NOMEM, "rank %d has no memory to copy a tensor of %lld bytes", s->rank, (long long)s->t[id].bytes);
    if (!filled) return RA_OK;
    ra_status status = ra_cuda_copy(*host, s->t[id].buffer, s->t[id].bytes, s->stream);
    if (status == RA_OK) status = ra_cuda_synchronize(s->stream);
    if (status != RA_OK) ra_free(*host, s->t[id].bytes);
    return status;
}

static ra_status hand_back(const shard *s, tensor_id id, bool changed, char *host) {
    if (!on_device(s)) return RA_OK;
    ra_status status = changed ? ra_cuda_copy(s->t[id].buffer, host, s->t[id].bytes, s->stream) : RA_OK;
    if (status == RA_OK) status = ra_cuda_synchronize(s->stream);
    ra_free(host, s->t[id].bytes);
    return status;
}

/* Elements may lie at any address in a file, so they pass through an aligned buffer when they must. */
static void convert(void *to, ra_dtype to_type, const void *from, ra_dtype from_type, int64_t count) {
    size_t size = ra_dtype_size(from_type);
    if (to_type == from_type || (uintptr_t)from % size == 0) {
        ra_convert(to, to_type, from, from_type, count);
        return;
    }
    double aligned[128];
    for (int64_t done = 0, n; done < count; done += n) {
        n = ra_min(count - done, (int64_t)(sizeof aligned / size));
        memcpy(aligned, (const char *)from + (size_t)done * size, (size_t)n * size);
        ra_convert((char *)to + (size_t)done * ra_dtype_size(to_type), to_type, aligned, from_type, n);
    }
}

/* Calls move for every piece of the rank's tensor that lies in one piece in the global array as well: element offsets and a
 * count. */
static void each_piece(const shard *s, tensor_id id, void (*move)(void *ctx, int64_t local, int64_t global, int64_t count),
                       void *ctx) {
    const ra_shard *rows = rows_of(s, id);
    int64_t total = tensor_rows(s->desc, id), heads = tensor_heads(s->desc, id);
    /* lse is [B*H][N] single elements, the others [B][N] rows of H*D elements */
    int64_t outer = id == T_LSE ? s->desc->batch * heads : s->desc->batch;
    int64_t width = id == T_LSE ? 1 : heads * s->desc->head_dim;
    for (int64_t b = 0, local = 0; b < outer; b++)
        for (int run = 0; run < 2; run++) {
            const ra_rows *r = &rows->rows[run];
            for (int64_t i = 0; i < r->count;) {
                int64_t n = r->step == 1 ? r->count - i : 1;
                move(ctx, local * width, (b * total + r->start + i * r->step) * width, n * width);
                local += n;
                i += n;
            }
        }
}

typedef struct copy {
    char *local, *global;
    ra_dtype local_type, global_type;
} copy;

static void move_in(void *ctx, int64_t local, int64_t global, int64_t count) {
    copy *c = ctx;
    convert(c->local + (size_t)local * ra_dtype_size(c->local_type), c->local_type,
            c->global + (size_t)global * ra_dtype_size(c->global_type), c->global_type, count);
}

static void move_out(void *ctx, int64_t local, int64_t global, int64_t count) {
    copy *c = ctx;
    ra_convert(c->global + (size_t)global * ra_dtype_size(c->global_type), c->global_type,
               c->local + (size_t)local * ra_dtype_size(c->local_type), c->local_type, count);
}

ra_status shard_load(shard *s, tensor_id id, const void *array, ra_dtype dtype) {
    copy c = {NULL, (char *)(uintptr_t)array, tensor_dtype(s->desc, id), dtype};
    RA_TRY(host_side(s, id, false, &c.local));
    each_piece(s, id, move_in, &c);
    return hand_back(s, id, true, c.local);
}

ra_status shard_store(const shard *s, tensor_id id, void *array, ra_dtype dtype) {
    copy c = {NULL, array, tensor_dtype(s->desc, id), dtype};
    RA_TRY(host_side(s, id, true, &c.local));
    each_piece(s, id, move_out, &c);
    return hand_back(s, id, false, c.local);
}

ra_status shard_read(const shard *s, tensor_id id, int64_t first, int64_t count, void *elements) {
    const int64_t size = (int64_t)ra_dtype_size(tensor_dtype(s->desc, id));
    const char *from = (const char *)s->t[id].tensor.data + first * size;
    if (on_device(s)) {
        RA_TRY(ra_cuda_copy(elements, from, count * size, s->stream));
        return ra_cuda_synchronize(s->stream);
    }
    memcpy(elements, from, (size_t)(count * size));
    return RA_OK;
}

/* --------------------------------------------------------------------------------------------------------- arguments */

ra_forward_args shard_forward_args(const shard *s) {
    return (ra_forward_args){.stream = s->stream,
                             .q = s->t[T_Q].tensor,
                             .k = s->t[T_K].tensor,
                             .v = s->t[T_V].tensor,
                             .out = s->t[T_OUT].tensor,
                             .lse = s->t[T_LSE].tensor};
}

ra_backward_args shard_backward_args(const shard *s) {
    return (ra_backward_args){.stream = s->stream,
                              .q = s->t[T_Q].tensor,
                              .k = s->t[T_K].tensor,
                              .v = s->t[T_V].tensor,
                              .out = s->t[T_OUT].tensor,
                              .lse = s->t[T_LSE].tensor,
                              .dout = s->t[T_DOUT].tensor,
                              .dq = s->t[T_DQ].tensor,
                              .dk = s->t[T_DK].tensor,
                              .dv = s->t[T_DV].tensor};
}
