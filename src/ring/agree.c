#include "ring/agree.h"

#include <stdio.h>
#include <string.h>

#include "core/alloc.h"
#include "core/fields.h"
#include "core/size.h"
#include "core/status.h"

/* What ranks exchange first: short enough to be cheap on every plan. */
typedef struct ballot {
    uint64_t digest[2];
    int64_t bytes;  /* of the text */
    int64_t status; /* of making the plan */
    int64_t frames[2];
    char reason[200];
} ballot;

static void digest(const char *text, int64_t bytes, uint64_t out[2]) {
    uint64_t b = 0x9E3779B97F4A7C15u;
    for (int64_t i = 0; i < bytes; i++) {
        b = (b + (uint64_t)(unsigned char)text[i]) * 0xD6E8FEB86659FD93u;
        b ^= b >> 29;
    }
    out[0] = ra_fnv(RA_FNV_START, text, bytes);
    out[1] = b;
}

/* Ranks differ: all exchange their whole texts, and all name the same two ranks, field and values. */
static ra_status explain(ra_comm *comm, const ballot *all, const char *text, int64_t bytes) {
    int ranks = ra_comm_size(comm), other = 0;
    int64_t room = 1;
    for (int i = 0; i < ranks; i++) room = ra_max(room, all[i].bytes + 1);
    while (other < ranks && memcmp(all[other].digest, all[0].digest, sizeof all[0].digest) == 0) other++;
    char *mine = ra_calloc(room), *texts = ra_calloc(ra_sat_mul(room, ranks));
    ra_status status = mine && texts ? RA_OK : ra_fail(RA_NOMEM, "no memory to compare configurations");
    if (status == RA_OK) {
        memcpy(mine, text, (size_t)bytes);
        status = ra_link_allgather(comm->link, mine, texts, room, "plan");
    }
    if (status == RA_OK) {
        char field[64], first[64], second[64];
        ra_first_difference(texts, texts + (int64_t)other * room, field, first, second, sizeof field);
        status = ra_fail(RA_DISAGREE, "ranks disagree: %s is %s on rank 0 and %s on rank %d", field, first, second, other);
    }
    ra_free(mine, room);
    ra_free(texts, ra_sat_mul(room, ranks));
    return status;
}

ra_status ra_agree(ra_comm *comm, ra_status mine, const char *text, int64_t bytes, int64_t frames[2]) {
    int ranks = ra_comm_size(comm);
    ballot vote = {.bytes = bytes, .status = mine, .frames = {frames[0], frames[1]}};
    if (mine != RA_OK) snprintf(vote.reason, sizeof vote.reason, "%s", ra_last_error());
    digest(text, bytes, vote.digest);
    int64_t room = (int64_t)sizeof vote * ranks;
    ballot *all = ra_calloc(room);
    if (!all) {
        ra_fail(RA_NOMEM, "no memory to agree with %d ranks", ranks);
        ra_link_abort(comm->link, RA_NOMEM, ra_last_error());
        return RA_NOMEM;
    }
    ra_status status = ra_link_allgather(comm->link, &vote, all, (int64_t)sizeof vote, "plan");
    if (status == RA_OK && mine != RA_OK) status = ra_fail(mine, "%s", vote.reason);
    for (int i = 0; i < ranks && status == RA_OK; i++)
        if (all[i].status != RA_OK)
            status = ra_fail((ra_status)all[i].status, "rank %d could not plan: %.*s", i, (int)sizeof all[i].reason - 1,
                             all[i].reason);
    bool same = true;
    for (int i = 1; i < ranks; i++) same = same && memcmp(all[i].digest, all[0].digest, sizeof all[0].digest) == 0;
    if (status == RA_OK && !same) status = explain(comm, all, text, bytes);
    for (int i = 0; i < ranks && status == RA_OK; i++)
        for (int pass = 0; pass < 2; pass++) frames[pass] = ra_max(frames[pass], all[i].frames[pass]);
    ra_free(all, room);
    return status;
}
