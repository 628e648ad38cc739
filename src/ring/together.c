/* Ranks of one process, between which lanes are direct: what they keep for each other. */
#include <pthread.h>
#include <string.h>

#include "core/alloc.h"
#include "core/status.h"
#include "ring/lane.h"

struct ra_together {
    pthread_mutex_t mutex;
    int64_t bytes; /* of this */
    int ranks;     /* that are left */
    bool staged;   /* all the same */
    int count;
    const ra_copy_ops *copies;
    void *moments[]; /* that peers were told of */
};

ra_status ra_together_create(ra_comm **comms, int ranks) {
    const int64_t bytes = (int64_t)sizeof(ra_together) + RA_TOLD * ranks * (int64_t)sizeof(void *);
    ra_together *together = ra_calloc(bytes);
    if (!together) return ra_fail(RA_NOMEM, "no memory for %d ranks", ranks);
    pthread_mutex_init(&together->mutex, NULL);
    together->bytes = bytes;
    together->ranks = ranks;
    together->staged = strcmp(ra_lane_wish(), "staged") == 0;
    for (int rank = 0; rank < ranks; rank++) comms[rank]->together = together;
    return RA_OK;
}

bool ra_together_staged(const ra_together *together) { return together->staged; }

void ra_together_leave(ra_together *together, const ra_copy_ops *copies, void *const *moments) {
    pthread_mutex_lock(&together->mutex);
    for (int i = 0; moments && i < RA_TOLD; i++)
        if (moments[i]) together->moments[together->count++] = moments[i];
    if (copies) together->copies = copies;
    const bool last = --together->ranks == 0;
    pthread_mutex_unlock(&together->mutex);
    if (!last) return;
    while (together->count > 0) together->copies->forget(together->moments[--together->count]);
    pthread_mutex_destroy(&together->mutex);
    ra_free(together, together->bytes);
}
