/* Gradients in the ring: dK and dV follow one step behind their bucket,
 *
 *     step h      compute bucket -> local      dK/dV so far -> in        those of the step before: out -> next member
 *     then        local += in                  local becomes out
 *
 * and from the last consumer straight home, where they are added to what home computed itself. The order of all sums is that of
 * the plan, never that of arrival.
 *
 * Where a lane carries them beside the steps, messages may be late (ra_call_recv_late): what comes home has a step more to
 * come, and room of its own. So has all that is sent; its frame rests for a step before it is computed in again:
 *
 *     step h: compute -> F0      h + 1: F0 -> next member, or home      h + 2: F0 rests      h + 3: compute -> F0 */
#include "core/dtype.h"
#include "core/status.h"
#include "ring/rounds.h"

/* Which pieces of a message, here at some hop, have gradients that go on (chain) or home. */
static bool has_grads(const ra_piece *piece, int32_t hop, bool home) {
    return piece->first <= hop && (home ? piece->hops == hop : piece->hops > hop);
}

static int64_t grad_payload(const ra_pass *pass, const ra_message *message, int32_t hop, bool home) {
    int64_t bytes = 0;
    for (int64_t i = 0; i < message->count; i++)
        if (has_grads(&message->pieces[i], hop, home)) bytes += ra_sums_bytes(&pass->call, &message->pieces[i]);
    return bytes;
}

/* The two frames of a message's gradients in a buffer, one after the other: those that go on, and those that go home. */
typedef struct frames {
    char *at[2];
    int64_t bytes; /* of both */
} frames;

static frames frames_at(const ra_pass *pass, const ra_message *message, int32_t hop, char *at) {
    int64_t chain = ra_frame_bytes_if_any(grad_payload(pass, message, hop, false));
    return (frames){{at, at + chain}, chain + ra_frame_bytes_if_any(grad_payload(pass, message, hop, true))};
}

ra_gradients *ra_gradients_open(ra_pass *pass, ra_gradients *g) {
    *g = (ra_gradients){.local = pass->grads[0], .out = pass->grads[1]};
    if (pass->grads_home[0]) g->resting = pass->grads[2];
    return g;
}

/* Gradients of what is held now, as far as the members before computed them, then those of own buckets that come home. */
ra_status ra_gradients_receive(ra_pass *pass, ra_gradients *g, const ra_round_of *round, int64_t bucket, int32_t hop) {
    ra_entry *entry = pass->call.entry;
    g->late = g->resting && bucket < round->round->buckets; /* nothing is computed in the last step: no time for it */
    g->finished_hops = hop >= 2 ? hop - 1 : (hop == 0 && bucket > 0 ? round->round->hops : 0);
    if (g->finished_hops > 0)
        ra_messages_list(&pass->call.plan->route, round->own, round->own_count, hop >= 2 ? bucket : bucket - 1, 0, false,
                         &entry->home);
    char *at = pass->grads_in;
    for (int64_t i = 0; hop >= 2 && i < entry->held.count; i++) {
        const ra_message *message = &entry->held.list[i];
        int64_t payload = grad_payload(pass, message, hop - 1, false);
        if (payload > 0) RA_TRY(ra_call_recv(&pass->call, ra_message_rank(message, -1), at, payload));
        at += ra_frame_bytes_if_any(payload);
    }
    if (g->resting) at = hop == 0 ? g->local : pass->grads_home[hop % 2]; /* at hop 0 nothing is computed there */
    g->home = at;
    for (int64_t i = 0; g->finished_hops > 0 && i < entry->home.count; i++) {
        const ra_message *message = &entry->home.list[i];
        int64_t payload = grad_payload(pass, message, g->finished_hops, true);
        const int peer = ra_message_rank(message, g->finished_hops);
        if (payload > 0) RA_TRY((g->late ? ra_call_recv_late : ra_call_recv)(&pass->call, peer, at, payload));
        at += ra_frame_bytes_if_any(payload);
    }
    return RA_OK;
}

/* First everything that goes on, then everything that goes home, as receivers expect it. */
ra_status ra_gradients_send(ra_pass *pass, ra_gradients *g) {
    const ra_messages *previous = &pass->call.entry->previous;
    for (int home = 0; g->out_hop > 0 && home < 2; home++) {
        char *at = g->out;
        for (int64_t i = 0; i < previous->count; i++) {
            const ra_message *message = &previous->list[i];
            frames f = frames_at(pass, message, g->out_hop, at);
            int64_t payload = grad_payload(pass, message, g->out_hop, home);
            int peer = home ? message->own->channel->members[message->source] : ra_message_rank(message, 1);
            if (payload > 0) RA_TRY((g->late ? ra_call_send_late : ra_call_send)(&pass->call, peer, f.at[home], payload));
            at += f.bytes;
        }
    }
    return RA_OK;
}

ra_status ra_gradients_items(ra_pass *pass, ra_gradients *g, int32_t hop) {
    const ra_call *call = &pass->call;
    char *at = g->local;
    for (int64_t i = 0; i < call->entry->held.count; i++) {
        const ra_message *message = &call->entry->held.list[i];
        frames f = frames_at(pass, message, hop, at);
        char *packed = ra_frame_payload(pass->kv[0] + message->offset);
        char *sums[2] = {ra_frame_payload(f.at[0]), ra_frame_payload(f.at[1])};
        for (int64_t j = 0; j < message->count; j++) {
            const ra_piece *piece = &message->pieces[j];
            bool home = piece->hops == hop;
            if (has_grads(piece, hop, home)) {
                int64_t bytes = ra_sums_bytes(call, piece);
                if (!ra_items_packed(pass, piece, packed, sums[home]))
                    RA_TRY(call->device->zero(&call->queue, sums[home], bytes));
                sums[home] += bytes;
            }
            packed += ra_rows_bytes(call, piece);
        }
        at += f.bytes;
    }
    return RA_OK;
}

/* To what was computed here, those of the members before. */
static ra_status add_chains(ra_pass *pass, const ra_gradients *g, int32_t hop) {
    const ra_call *call = &pass->call;
    const ra_dtype dtype = call->plan->config.dtype;
    char *in = pass->grads_in, *at = g->local;
    for (int64_t i = 0; hop >= 2 && i < call->entry->held.count; i++) {
        const ra_message *message = &call->entry->held.list[i];
        frames f = frames_at(pass, message, hop, at);
        char *sums[2] = {ra_frame_payload(f.at[0]), ra_frame_payload(f.at[1])}, *came = ra_frame_payload(in);
        for (int64_t j = 0; j < message->count; j++) {
            const ra_piece *piece = &message->pieces[j];
            bool home = piece->hops == hop;
            int64_t bytes = ra_sums_bytes(call, piece);
            if (!has_grads(piece, hop, home)) continue;
            if (has_grads(piece, hop - 1, false)) {
                RA_TRY(call->device->add(&call->queue, dtype, sums[home], came, bytes / ra_state_size(dtype)));
                came += bytes;
            }
            sums[home] += bytes;
        }
        in += ra_frame_bytes_if_any(grad_payload(pass, message, hop - 1, false));
        at += f.bytes;
    }
    return RA_OK;
}

static ra_status add_home(ra_pass *pass, const ra_messages *home, int32_t hops, char *in) {
    for (int64_t i = 0; hops > 0 && i < home->count; i++) {
        const ra_message *message = &home->list[i];
        char *came = ra_frame_payload(in);
        for (int64_t j = 0; j < message->count; j++) {
            const ra_piece *piece = &message->pieces[j];
            if (!has_grads(piece, hops, true)) continue;
            RA_TRY(ra_add_piece_home(pass, piece, came));
            came += ra_sums_bytes(&pass->call, piece);
        }
        in += ra_frame_bytes_if_any(grad_payload(pass, message, hops, true));
    }
    return RA_OK;
}

/* What comes home now is added in the next step. */
static void keep_home(ra_pass *pass, ra_gradients *g) {
    ra_entry *entry = pass->call.entry;
    const ra_messages came = entry->home;
    entry->home = entry->late_home;
    entry->late_home = came;
    g->late_home = g->home;
    g->late_hops = g->finished_hops;
}

ra_status ra_gradients_add(ra_pass *pass, ra_gradients *g, int32_t hop) {
    const ra_entry *entry = pass->call.entry;
    char *local = g->local;
    RA_TRY(add_chains(pass, g, hop));
    RA_TRY(add_home(pass, &entry->late_home, g->late_hops, g->late_home));
    g->late_hops = 0;
    if (g->late) keep_home(pass, g);
    else RA_TRY(add_home(pass, &entry->home, g->finished_hops, g->home));
    g->local = g->resting ? g->resting : g->out;
    if (g->resting) g->resting = g->out;
    g->out = local;
    g->out_hop = hop;
    return RA_OK;
}
