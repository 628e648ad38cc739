#include "ring/pack.h"

#include <string.h>

#include "core/dtype.h"

/* Where row `row` of repeat `repeat` of a piece lies in its rank's tensor, and how its heads are spread. */
typedef struct rows_at {
    int64_t first, row_step, repeat_step; /* in local rows */
    ra_span heads;
} rows_at;

static rows_at place(const ra_route *route, const ra_piece *piece) {
    const ra_ring *ring = &route->rings.rings[piece->ring];
    const ra_part *source = &ring->sources[piece->source];
    return (rows_at){source->rows.row + piece->first_repeat * source->row_shift + piece->first_row * source->rows.row_step,
                     source->rows.row_step, source->row_shift, route->rings.classes[ring->class_index].heads};
}

/* Calls move(config, rows, packed, elements) for the rows of a piece, in packed order, as many at a time as lie together.
 * `size` is that of an element, in the tensor and packed. */
static void each_row(const ra_route *route, const ra_piece *piece, ra_tensor tensor, int64_t size, char *packed,
                     void (*move)(const ra_config *c, char *rows, char *packed, int64_t elements)) {
    const ra_config *c = route->config;
    const rows_at at = place(route, piece);
    const int64_t some = at.row_step * tensor.row == c->head_dim ? piece->rows : 1;
    const int64_t step = some * at.row_step * tensor.row * size, elements = some * c->head_dim;
    for (int64_t b = 0; b < c->batch; b++)
        for (int64_t h = 0; h < at.heads.count; h++)
            for (int64_t r = 0; r < piece->repeats; r++) {
                int64_t head = at.heads.start + h * at.heads.step, first = at.first + r * at.repeat_step;
                char *row = (char *)tensor.data + (b * tensor.batch + head * tensor.head + first * tensor.row) * size;
                for (int64_t i = 0; i < piece->rows; i += some, row += step, packed += elements * size)
                    move(c, row, packed, elements);
            }
}

static void copy_out(const ra_config *c, char *rows, char *packed, int64_t elements) {
    memcpy(packed, rows, (size_t)elements * ra_dtype_size(c->dtype));
}

static void add_in(const ra_config *c, char *rows, char *packed, int64_t elements) {
    ra_add_sums(c->dtype, rows, packed, elements);
}

void ra_pack(const ra_route *route, const ra_piece *piece, ra_tensor tensor, char *packed) {
    each_row(route, piece, tensor, (int64_t)ra_dtype_size(route->config->dtype), packed, copy_out);
}

void ra_unpack_add(const ra_route *route, const ra_piece *piece, char *packed, ra_tensor sums) {
    each_row(route, piece, sums, ra_state_size(route->config->dtype), packed, add_in);
}

void ra_pack_message(const ra_route *route, const ra_message *message, ra_tensor k, ra_tensor v, char *packed) {
    for (int64_t i = 0; i < message->count && message->pieces[i].hops > 0; i++) {
        const ra_piece *piece = &message->pieces[i];
        int64_t bytes = ra_piece_elements(route, piece) * (int64_t)ra_dtype_size(route->config->dtype);
        ra_pack(route, piece, k, packed);
        ra_pack(route, piece, v, packed + bytes);
        packed += 2 * bytes;
    }
}

void ra_add_sums(ra_dtype dtype, char *a, const char *b, int64_t count) {
    if (dtype == RA_F64) {
        double *x = (double *)(void *)a;
        const double *y = (const double *)(const void *)b;
        for (int64_t i = 0; i < count; i++) x[i] += y[i];
    } else {
        float *x = (float *)(void *)a;
        const float *y = (const float *)(const void *)b;
        for (int64_t i = 0; i < count; i++) x[i] += y[i];
    }
}

ra_tensor ra_packed_view(const ra_route *route, const ra_piece *piece, char *packed) {
    const ra_ring *ring = &route->rings.rings[piece->ring];
    int64_t rows = piece->repeats * piece->rows, heads = route->rings.classes[ring->class_index].heads.count;
    int64_t dim = route->config->head_dim;
    return (ra_tensor){packed, heads * rows * dim, dim, rows * dim};
}

/* ------------------------------------------------------------------------------------------------- a rank played alone */

typedef struct making {
    const ra_route *route;
    const ra_piece *piece;
    const ra_solo_ops *ops;
    char *packed;
} making;

/* One (k or v, batch, head): all rows of the piece. */
static void make_rows(void *arg, int64_t index, int worker) {
    const making *job = arg;
    const ra_piece *piece = job->piece;
    const ra_config *c = job->route->config;
    const ra_ring *ring = &job->route->rings.rings[piece->ring];
    const ra_item_rows *rows = &ring->sources[piece->source].rows;
    ra_span heads = job->route->rings.classes[ring->class_index].heads;
    int64_t bytes = c->head_dim * (int64_t)ra_dtype_size(c->dtype), head = index % heads.count,
            batch = index / heads.count % c->batch;
    char *at = job->packed + index * piece->repeats * piece->rows * bytes;
    (void)worker;
    for (int64_t r = 0; r < piece->repeats; r++)
        for (int64_t i = 0; i < piece->rows; i++, at += bytes) {
            int64_t key = rows->pos + (piece->first_repeat + r) * ring->shift + (piece->first_row + i) * rows->pos_step;
            job->ops->make_row(job->ops->ctx, index >= heads.count * c->batch, batch, key, heads.start + head * heads.step, at);
        }
}

void ra_make_pieces(const ra_route *route, const ra_piece *pieces, int64_t count, ra_workers *workers, const ra_solo_ops *ops,
                    char *packed) {
    for (int64_t i = 0; i < count; i++) {
        making job = {route, &pieces[i], ops, packed};
        int64_t heads = route->rings.classes[route->rings.rings[pieces[i].ring].class_index].heads.count;
        ra_workers_run(workers, 2 * route->config->batch * heads, make_rows, &job, NULL, NULL);
        packed += 2 * ra_piece_elements(route, &pieces[i]) * (int64_t)ra_dtype_size(route->config->dtype);
    }
}
