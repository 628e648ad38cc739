/* Pieces of messages as a pass sees them: their bytes, their items, and the way between messages and this rank's tensors. */
#include "core/dtype.h"
#include "core/status.h"
#include "ring/pass.h"

int64_t ra_rows_bytes(const ra_call *call, const ra_piece *piece) {
    return 2 * ra_piece_elements(&call->plan->route, piece) * (int64_t)ra_dtype_size(call->plan->config.dtype);
}
int64_t ra_sums_bytes(const ra_call *call, const ra_piece *piece) {
    return 2 * ra_piece_elements(&call->plan->route, piece) * ra_state_size(call->plan->config.dtype);
}

/* ---------------------------------------------------------------------------------------------------------- items */

/* A view by head instead of by head index: the heads of a class start somewhere and have a step. */
static ra_tensor by_index(ra_tensor tensor, int64_t size, const ra_item *item) {
    tensor.data = tensor.data ? (char *)tensor.data + item->heads.start * tensor.head * size : NULL;
    tensor.head *= item->heads.step;
    return tensor;
}

void ra_items_look(const ra_item_views *views, int64_t size, ra_item *items, int64_t count) {
    for (ra_item *item = items; item < items + count; item++) {
        item->k_view = by_index(views->k, size, item);
        item->v_view = by_index(views->v, size, item);
        item->dk_view = by_index(views->dk, views->sums_size, item);
        item->dv_view = by_index(views->dv, views->sums_size, item);
        item->dk_result = by_index(views->dk_result, size, item);
        item->dv_result = by_index(views->dv_result, size, item);
    }
}

/* A message has the heads of its piece alone, one after the other. */
static void look_at_packed(const ra_item_views *views, ra_item *items, int64_t count) {
    for (ra_item *item = items; item < items + count; item++) {
        item->k_view = views->k;
        item->v_view = views->v;
        item->dk_view = views->dk;
        item->dv_view = views->dv;
        item->dk_result = item->dv_result = (ra_tensor){0};
    }
}

/* Does a query meet every key of a packed piece? Items of one target meet distinct keys, so that it is enough to count. */
static bool meet_all_keys(const ra_problem *p, const ra_piece *piece, const ra_item *items, int64_t count) {
    int64_t keys = 0;
    for (const ra_item *item = items; item < items + count; item++) {
        if (!ra_item_whole(p, item)) return false;
        keys += item->k.count * item->loop[0].repeat * item->loop[1].repeat;
    }
    return keys == piece->repeats * piece->rows;
}

/* True: the sums begin with the items of the first target that meets the piece, which are fresh; those of others add. */
static bool add_items(ra_call *call, const ra_piece *piece, const ra_item_views *views, bool packed) {
    const ra_plan *plan = call->plan;
    const ra_ring *ring = &plan->route.rings.rings[piece->ring];
    bool first = packed && views->dk.data && call->device->begins, begun = false;
    for (int32_t t = ra_first_target(ring, plan->view.rank); t >= 0; t = ring->next_target[t]) {
        ra_item *items = &call->entry->items[call->item_count];
        int64_t count = ra_items(&plan->route, piece, &ring->targets[t], packed, items);
        if (packed) look_at_packed(views, items, count);
        else ra_items_look(views, (int64_t)ra_dtype_size(plan->config.dtype), items, count);
        call->item_count += count;
        if (!first || count == 0) continue;
        first = false;
        begun = meet_all_keys(&plan->problem, piece, items, count);
        for (int64_t i = 0; i < count; i++) items[i].fresh = begun;
    }
    return begun;
}

void ra_items_home(ra_pass *pass, const ra_piece *piece) { add_items(&pass->call, piece, &pass->home, false); }

bool ra_items_packed(ra_pass *pass, const ra_piece *piece, char *packed, char *sums) {
    const ra_route *route = &pass->call.plan->route;
    ra_item_views views = {.k = ra_packed_view(route, piece, packed),
                           .v = ra_packed_view(route, piece, packed + ra_rows_bytes(&pass->call, piece) / 2)};
    if (sums) {
        views.dk = ra_packed_view(route, piece, sums);
        views.dv = ra_packed_view(route, piece, sums + ra_sums_bytes(&pass->call, piece) / 2);
    }
    return add_items(&pass->call, piece, &views, true);
}

void ra_items_local(ra_pass *pass) {
    const ra_view *view = &pass->call.plan->view;
    for (int64_t i = 0; i < view->local_count; i++) {
        const ra_ring *ring = &pass->call.plan->route.rings.rings[view->local[i]];
        for (int64_t s = 0; s < ring->source_count; s++) {
            ra_piece whole = {
                .ring = view->local[i], .source = (int32_t)s, .repeats = ring->repeat, .rows = ring->sources[s].rows.count};
            ra_items_home(pass, &whole);
        }
    }
}

/* -------------------------------------------------------------------------------------------------------- messages */

ra_status ra_pack_piece(ra_pass *pass, const ra_piece *piece, char *packed) {
    const ra_call *call = &pass->call;
    const ra_box box = ra_piece_box(&call->plan->route, piece);
    const ra_dtype dtype = call->plan->config.dtype;
    pass->call.packed = true;
    RA_TRY(call->device->pack(&call->queue, dtype, &box, pass->home.k, packed));
    return call->device->pack(&call->queue, dtype, &box, pass->home.v, packed + ra_rows_bytes(call, piece) / 2);
}

ra_status ra_add_piece_home(ra_pass *pass, const ra_piece *piece, const char *sums) {
    const ra_call *call = &pass->call;
    const ra_box box = ra_piece_box(&call->plan->route, piece);
    const ra_dtype dtype = call->plan->config.dtype;
    RA_TRY(call->device->unpack_add(&call->queue, dtype, &box, sums, pass->home.dk, pass->home.dk_result));
    return call->device->unpack_add(&call->queue, dtype, &box, sums + ra_sums_bytes(call, piece) / 2, pass->home.dv,
                                    pass->home.dv_result);
}
