/* A rank played alone: what its peers would send is made, on the CPU row by row, on a device with memory of its own by whatever
 * the caller enqueues there. */
#include "ring/solo.h"

#include "core/dtype.h"
#include "core/status.h"

/* The rows of a piece, by their places in the whole tensor. */
static ra_row_set rows_of(const ra_route *route, const ra_piece *piece) {
    const ra_ring *ring = &route->rings.rings[piece->ring];
    const ra_item_rows *rows = &ring->sources[piece->source].rows;
    const ra_span heads = route->rings.classes[ring->class_index].heads;
    return (ra_row_set){.heads = {heads.start, heads.step, heads.count},
                        .rows = {rows->pos + piece->first_repeat * ring->shift + piece->first_row * rows->pos_step,
                                 rows->pos_step, piece->rows},
                        .repeats = piece->repeats,
                        .repeat_step = ring->shift};
}

/* ------------------------------------------------------------------------------------------------------------ row by row */

typedef struct making {
    const ra_config *config;
    const ra_solo_ops *ops;
    ra_row_set set;
    char *packed;
} making;

/* One (k or v, batch, head): all rows of the piece. */
static void make_rows(void *arg, int64_t index, int worker) {
    const making *job = arg;
    const ra_config *c = job->config;
    const ra_row_set *set = &job->set;
    int64_t bytes = c->head_dim * (int64_t)ra_dtype_size(c->dtype), head = index % set->heads.count,
            batch = index / set->heads.count % c->batch;
    char *at = job->packed + index * set->repeats * set->rows.count * bytes;
    (void)worker;
    for (int64_t r = 0; r < set->repeats; r++)
        for (int64_t i = 0; i < set->rows.count; i++, at += bytes)
            job->ops->make_row(job->ops->ctx, index >= set->heads.count * c->batch, batch,
                               set->rows.start + r * set->repeat_step + i * set->rows.step,
                               set->heads.start + head * set->heads.step, at);
}

/* ------------------------------------------------------------------------------------------------------------- by pieces */

/* K of the piece, then V, each `bytes` long. */
static ra_status make_piece(const ra_made_pieces *made, const ra_row_set *set, char *packed, int64_t bytes) {
    const ra_comm *comm = made->comm;
    if (made->device->memory) {
        RA_TRY(comm->device_maker(comm->device_maker_ctx, false, set, packed, made->queue->stream));
        return comm->device_maker(comm->device_maker_ctx, true, set, packed + bytes, made->queue->stream);
    }
    const ra_config *config = made->route->config;
    making job = {config, &comm->solo, *set, packed};
    ra_workers_run(made->queue->workers, 2 * config->batch * set->heads.count, make_rows, &job, NULL, NULL);
    return RA_OK;
}

ra_status ra_make_pieces(void *arg, char *packed) {
    const ra_made_pieces *made = arg;
    const ra_route *route = made->route;
    for (int64_t i = 0; i < made->count; i++) {
        const ra_row_set set = rows_of(route, &made->pieces[i]);
        const int64_t bytes = ra_piece_elements(route, &made->pieces[i]) * (int64_t)ra_dtype_size(route->config->dtype);
        RA_TRY(make_piece(made, &set, packed, bytes));
        packed += 2 * bytes;
    }
    return RA_OK;
}
