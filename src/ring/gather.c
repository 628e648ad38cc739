/* The gather schedule: one exchange of what each rank needs, then one step. For short sequences, where latency counts and
 * memory does not. What a rank has at home is computed while the rest is on its way. Gradients go straight home in a second
 * exchange. */
#include <string.h>

#include "core/status.h"
#include "ring/pack.h"
#include "ring/pass.h"

/* One message between this rank and another member of a channel. */
typedef struct direct {
    const ra_own_channel *own;
    int64_t member; /* the other one */
    ra_piece *pieces;
    int64_t count, elements; /* elements of K and V together */
} direct;

typedef struct direct_loop {
    const ra_plan *plan;
    bool out;
    int64_t channel, member; /* of the next message to look at */
} direct_loop;

/* The next message that holds anything, in the order that both its ends use. */
static bool next_direct(direct_loop *loop, direct *message) {
    const ra_view *view = &loop->plan->view;
    for (; loop->channel < view->own_count; loop->channel++, loop->member = 0) {
        const ra_own_channel *own = &view->own[loop->channel];
        while (loop->member < own->channel->member_count) {
            int64_t other = loop->member++;
            if (other == own->member) continue;
            ra_piece *pieces = loop->plan->held.list[0].pieces;
            *message = (direct){own, other, pieces, 0, 0};
            message->count = ra_direct_pieces(&loop->plan->route, own->channel, loop->out ? own->member : other,
                                              loop->out ? other : own->member, pieces);
            for (int64_t i = 0; i < message->count; i++)
                message->elements += 2 * ra_piece_elements(&loop->plan->route, &pieces[i]);
            if (message->count > 0) return true;
        }
    }
    return false;
}

static int rank_of(const direct *message) { return message->own->channel->members[message->member]; }

/* Posts all of K and V, receives first. */
static ra_status exchange(ra_call *call, ra_tensor k, ra_tensor v, int64_t size, char *in, char *out) {
    direct message;
    for (direct_loop loop = {call->plan, false, 0, 0}; next_direct(&loop, &message); in += ra_framed(message.elements * size))
        RA_TRY(ra_call_recv_kv(call, rank_of(&message), in, message.elements * size, message.pieces, message.count));
    for (direct_loop loop = {call->plan, true, 0, 0}; next_direct(&loop, &message); out += ra_framed(message.elements * size)) {
        char *packed = out + RA_LINK_HEADER;
        for (int64_t i = 0; i < message.count; i++) {
            int64_t bytes = ra_piece_elements(&call->plan->route, &message.pieces[i]) * size;
            ra_pack(&call->plan->route, &message.pieces[i], k, packed);
            ra_pack(&call->plan->route, &message.pieces[i], v, packed + bytes);
            packed += 2 * bytes;
        }
        RA_TRY(ra_call_send(call, rank_of(&message), out, message.elements * size));
    }
    return RA_OK;
}

/* Own keys that other members need too, against own queries. */
static void add_home(ra_call *call, const ra_item_views *home) {
    const ra_view *view = &call->plan->view;
    for (int64_t i = 0; i < view->own_count; i++) {
        const ra_own_channel *own = &view->own[i];
        int64_t count =
            ra_direct_pieces(&call->plan->route, own->channel, own->member, own->member, call->plan->held.list[0].pieces);
        for (int64_t j = 0; j < count; j++) ra_call_items_home(call, &call->plan->held.list[0].pieces[j], home);
    }
}

ra_status ra_gather_forward(ra_forward_pass *pass) {
    ra_call *call = &pass->call;
    int64_t size = (int64_t)ra_dtype_size(call->plan->config.dtype);
    RA_TRY(exchange(call, pass->args->k, pass->args->v, size, pass->buffer[0], pass->buffer[1]));
    add_home(call, &pass->home);
    RA_TRY(ra_forward_compute(pass));
    RA_TRY(ra_call_wait(call));
    direct message;
    char *in = pass->buffer[0];
    for (direct_loop loop = {call->plan, false, 0, 0}; next_direct(&loop, &message); in += ra_framed(message.elements * size))
        ra_add_packed(call, message.pieces, message.count, in + RA_LINK_HEADER, NULL);
    pass->last = true;
    return call->item_count > 0 ? ra_forward_compute(pass) : RA_OK;
}

ra_status ra_gather_backward(ra_backward_pass *pass) {
    ra_call *call = &pass->call;
    int64_t size = pass->size, state = pass->state_size;
    RA_TRY(exchange(call, pass->args->k, pass->args->v, size, pass->buffer[0], pass->buffer[1]));
    add_home(call, &pass->home);
    RA_TRY(ra_backward_compute(pass));
    RA_TRY(ra_call_wait(call));
    direct message;
    char *in = pass->buffer[0], *sums = pass->grads[0];
    for (direct_loop loop = {call->plan, false, 0, 0}; next_direct(&loop, &message);) {
        memset(sums + RA_LINK_HEADER, 0, (size_t)(message.elements * state));
        ra_add_packed(call, message.pieces, message.count, in + RA_LINK_HEADER, sums + RA_LINK_HEADER);
        in += ra_framed(message.elements * size);
        sums += ra_framed(message.elements * state);
    }
    RA_TRY(ra_backward_compute(pass));
    char *home = pass->grads_in; /* now the other way round: what came goes back as gradients */
    for (direct_loop loop = {call->plan, true, 0, 0}; next_direct(&loop, &message); home += ra_framed(message.elements * state))
        RA_TRY(ra_call_recv(call, rank_of(&message), home, message.elements * state));
    sums = pass->grads[0];
    for (direct_loop loop = {call->plan, false, 0, 0}; next_direct(&loop, &message);
         sums += ra_framed(message.elements * state))
        RA_TRY(ra_call_send(call, rank_of(&message), sums, message.elements * state));
    RA_TRY(ra_call_wait(call));
    home = pass->grads_in;
    for (direct_loop loop = {call->plan, true, 0, 0}; next_direct(&loop, &message);
         home += ra_framed(message.elements * state)) {
        char *packed = home + RA_LINK_HEADER;
        for (int64_t i = 0; i < message.count; i++) {
            int64_t bytes = ra_piece_elements(&call->plan->route, &message.pieces[i]) * state;
            ra_unpack_add(&call->plan->route, &message.pieces[i], packed, pass->home.dk);
            ra_unpack_add(&call->plan->route, &message.pieces[i], packed + bytes, pass->home.dv);
            packed += 2 * bytes;
        }
    }
    return RA_OK;
}
