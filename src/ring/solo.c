/* A rank played alone: what its peers would send is made row by row. */
#include "ring/solo.h"

#include "core/dtype.h"

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

void ra_make_pieces(void *arg, char *packed) {
    const ra_made_pieces *made = arg;
    const ra_route *route = made->route;
    for (int64_t i = 0; i < made->count; i++) {
        const ra_piece *piece = &made->pieces[i];
        making job = {route, piece, made->ops, packed};
        int64_t heads = route->rings.classes[route->rings.rings[piece->ring].class_index].heads.count;
        ra_workers_run(made->workers, 2 * route->config->batch * heads, make_rows, &job, NULL, NULL);
        packed += 2 * ra_piece_elements(route, piece) * (int64_t)ra_dtype_size(route->config->dtype);
    }
}
