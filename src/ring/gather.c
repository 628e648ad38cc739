/* The gather schedule: one exchange of what each rank needs, then one step. For short sequences, where latency counts and
 * memory does not. What a rank has at home is computed while the rest is on its way. Gradients go straight home in a second
 * exchange. */
#include "core/status.h"
#include "ring/pass.h"

/* One message between this rank and another member of a channel. */
typedef struct direct {
    int rank; /* of the other one */
    const ra_piece *pieces;
    int64_t count;
    int64_t rows, sums; /* bytes of K and V, and of dK and dV */
} direct;

typedef struct direct_loop {
    ra_pass *pass;
    bool out;
    int64_t channel, member; /* of the next message to look at */
} direct_loop;

/* The next message that holds anything, in the order that both its ends use. */
static bool next_direct(direct_loop *loop, direct *message) {
    const ra_call *call = &loop->pass->call;
    const ra_view *view = &call->plan->view;
    for (; loop->channel < view->own_count; loop->channel++, loop->member = 0) {
        const ra_own_channel *own = &view->own[loop->channel];
        while (loop->member < own->channel->member_count) {
            int64_t other = loop->member++;
            if (other == own->member) continue;
            ra_piece *pieces = call->entry->held.list[0].pieces;
            *message = (direct){.rank = own->channel->members[other], .pieces = pieces};
            message->count = ra_direct_pieces(&call->plan->route, own->channel, loop->out ? own->member : other,
                                              loop->out ? other : own->member, pieces);
            for (int64_t i = 0; i < message->count; i++) {
                message->rows += ra_rows_bytes(call, &pieces[i]);
                message->sums += ra_sums_bytes(call, &pieces[i]);
            }
            if (message->count > 0) return true;
        }
    }
    return false;
}

/* Posts all of K and V, receives first. */
static ra_status exchange(ra_pass *pass) {
    char *in = pass->kv[0], *out = pass->kv[1];
    direct message;
    for (direct_loop loop = {pass, false, 0, 0}; next_direct(&loop, &message); in += ra_frame_bytes_if_any(message.rows))
        RA_TRY(ra_call_recv_kv(&pass->call, message.rank, in, message.rows, message.pieces, message.count));
    for (direct_loop loop = {pass, true, 0, 0}; next_direct(&loop, &message); out += ra_frame_bytes_if_any(message.rows)) {
        char *packed = ra_frame_payload(out);
        for (int64_t i = 0; i < message.count; i++) {
            RA_TRY(ra_pack_piece(pass, &message.pieces[i], packed));
            packed += ra_rows_bytes(&pass->call, &message.pieces[i]);
        }
        RA_TRY(ra_call_send(&pass->call, message.rank, out, message.rows));
    }
    return RA_OK;
}

/* Own keys that other members need too meet own queries. */
static void add_home(ra_pass *pass) {
    const ra_call *call = &pass->call;
    ra_piece *pieces = call->plan->view.own_count > 0 ? call->entry->held.list[0].pieces : NULL;
    for (int64_t i = 0; i < call->plan->view.own_count; i++) {
        const ra_own_channel *own = &call->plan->view.own[i];
        int64_t count = ra_direct_pieces(&call->plan->route, own->channel, own->member, own->member, pieces);
        for (int64_t j = 0; j < count; j++) ra_items_home(pass, &pieces[j]);
    }
}

/* What came meets own queries; in backward it has room for its gradients. */
static ra_status add_arrived(ra_pass *pass) {
    const ra_call *call = &pass->call;
    char *in = pass->kv[0], *out = pass->grads[0];
    direct message;
    for (direct_loop loop = {pass, false, 0, 0}; next_direct(&loop, &message); in += ra_frame_bytes_if_any(message.rows)) {
        char *packed = ra_frame_payload(in), *sums = pass->backward ? ra_frame_payload(out) : NULL;
        for (int64_t i = 0; i < message.count; i++) {
            const int64_t bytes = ra_sums_bytes(call, &message.pieces[i]);
            const bool begun = ra_items_packed(pass, &message.pieces[i], packed, sums);
            if (sums && !begun) RA_TRY(call->device->zero(&call->queue, sums, bytes));
            packed += ra_rows_bytes(call, &message.pieces[i]);
            if (sums) sums += bytes;
        }
        if (pass->backward) out += ra_frame_bytes_if_any(message.sums);
    }
    return RA_OK;
}

/* Now the other way round: what came goes back as gradients. */
static ra_status return_gradients(ra_pass *pass) {
    direct message;
    char *in = pass->grads_in, *out = pass->grads[0];
    for (direct_loop loop = {pass, true, 0, 0}; next_direct(&loop, &message); in += ra_frame_bytes_if_any(message.sums))
        RA_TRY(ra_call_recv(&pass->call, message.rank, in, message.sums));
    for (direct_loop loop = {pass, false, 0, 0}; next_direct(&loop, &message); out += ra_frame_bytes_if_any(message.sums))
        RA_TRY(ra_call_send(&pass->call, message.rank, out, message.sums));
    RA_TRY(ra_call_wait(&pass->call));
    in = pass->grads_in;
    for (direct_loop loop = {pass, true, 0, 0}; next_direct(&loop, &message); in += ra_frame_bytes_if_any(message.sums)) {
        char *sums = ra_frame_payload(in);
        for (int64_t i = 0; i < message.count; i++) {
            RA_TRY(ra_add_piece_home(pass, &message.pieces[i], sums));
            sums += ra_sums_bytes(&pass->call, &message.pieces[i]);
        }
    }
    return RA_OK;
}

ra_status ra_gather(ra_pass *pass) {
    RA_TRY(exchange(pass));
    add_home(pass);
    RA_TRY(ra_pass_compute(pass, false));
    RA_TRY(ra_call_wait(&pass->call));
    RA_TRY(add_arrived(pass));
    if (pass->call.item_count > 0) RA_TRY(ra_pass_compute(pass, true));
    return pass->backward ? return_gradients(pass) : RA_OK;
}
