#include <stdio.h>
#include <string.h>

#include "core/alloc.h"
#include "core/size.h"
#include "core/status.h"
#include "transport/link_internal.h"

/* Everyone to everyone at once: messages are small, and 2(p-1) of them are in flight. Frame 2i receives from the rank i+1
 * below, and frame 2i+1 sends to the rank i+1 above. */
static ra_status exchange(ra_link *link, char *all, int64_t bytes, const char *phase, char *frames, int64_t frame,
                          ra_transfer *transfers) {
    uint64_t tag = RA_CONTROL_TAG + 1 + (link->gathers++ & 0xfffff);
    int ranks = link->ranks, others = ranks - 1;
    for (int i = 0; i < others; i++) {
        RA_TRY(
            ra_link_recv(link, (link->rank + ranks - 1 - i) % ranks, tag, 0, frames + 2 * i * frame, bytes, &transfers[2 * i]));
    }
    for (int i = 0; i < others; i++) {
        char *buf = frames + (2 * i + 1) * frame;
        if (bytes > 0) memcpy(buf + RA_LINK_HEADER, all + link->rank * bytes, (size_t)bytes);
        RA_TRY(ra_link_send(link, (link->rank + 1 + i) % ranks, tag, 0, buf, bytes, &transfers[2 * i + 1]));
    }
    RA_TRY(ra_link_wait(link, transfers, 2 * others, phase));
    for (int i = 0; i < others && bytes > 0; i++) {
        int peer = (link->rank + ranks - 1 - i) % ranks;
        memcpy(all + peer * bytes, frames + 2 * i * frame + RA_LINK_HEADER, (size_t)bytes);
    }
    return RA_OK;
}

/* An allgather counts as a call for timeouts, but has no number: it shows by itself if ranks differ. */
static void set_calling(ra_link *link, bool calling, const char *phase) {
    ra_link_lock(link);
    snprintf(link->phase, sizeof link->phase, "%s", phase);
    link->calling = calling;
    link->calling_since = ra_seconds();
    link->asking = false;
    ra_link_unlock(link);
}

ra_status ra_link_allgather(ra_link *link, const void *mine, void *all, int64_t bytes, const char *phase) {
    RA_TRY(ra_link_status(link));
    if (ra_link_is_solo(link)) return ra_fail(RA_INVALID, "a rank that runs alone (ra_comm_solo) has nobody to gather from");
    if (bytes > 0) memmove((char *)all + link->rank * bytes, mine, (size_t)bytes);
    int64_t others = link->ranks - 1;
    if (others == 0) return RA_OK;
    int64_t frame = ra_sat_add(bytes, RA_LINK_HEADER + 7) & ~(int64_t)7;
    int64_t frames_size = ra_sat_mul(2 * others, frame), transfers_size = 2 * others * (int64_t)sizeof(ra_transfer);
    char *frames = frames_size < INT64_MAX ? ra_alloc(frames_size) : NULL;
    ra_transfer *transfers = ra_calloc(transfers_size);
    ra_status status;
    set_calling(link, true, phase);
    if (frames && transfers) {
        status = exchange(link, all, bytes, phase, frames, frame, transfers);
    } else {
        ra_link_lock(link);
        ra_fail(RA_NOMEM, "%s: rank %d has no memory to exchange %lld bytes with %d ranks", phase, link->rank, (long long)bytes,
                link->ranks);
        status = ra_link_break(link, RA_NOMEM, link->rank);
        ra_link_unlock(link);
    }
    set_calling(link, false, phase);
    bool over = !transfers || ra_link_cancel(link, transfers, 2 * others);
    ra_free(transfers, transfers_size);
    if (over) ra_free(frames, frames_size);
    return status;
}
