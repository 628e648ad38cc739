#include "transport/host/mpi/duplicates.h"

#include "transport/host/mpi/calls.h"

static int duplicate_key = MPI_KEYVAL_INVALID, before_key = MPI_KEYVAL_INVALID, finalize_key = MPI_KEYVAL_INVALID;
static ra_mpi_shared *duplicates;

/* Last heartbeats may have come that no link wanted any more. They must be gone before MPI reuses the context for another
 * communicator, and some MPIs complain about each of them in MPI_Finalize. Once everybody is here they have all been sent. */
static bool receive_leftovers(const ra_mpi_shared *shared, MPI_Comm comm) {
    MPI_Request barrier;
    pthread_mutex_lock(&ra_mpi_mutex);
    bool begun = !shared->failed && !ra_mpi_anything_failed && MPI_Ibarrier(comm, &barrier) == MPI_SUCCESS;
    pthread_mutex_unlock(&ra_mpi_mutex);
    if (!begun) return false;
    if (ra_mpi_wait_collective(shared->host, &barrier, 10, "closing the communicator") != RA_OK) return false;
    for (int quiet = 0; quiet < 20;) {
        static char scratch[1 << 16];
        int there = 0, count = 0;
        MPI_Status status;
        pthread_mutex_lock(&ra_mpi_mutex);
        MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, comm, &there, &status);
        if (there) MPI_Get_count(&status, MPI_BYTE, &count);
        bool beat = count <= (int)sizeof scratch;
        if (there && beat)
            MPI_Recv(scratch, count, MPI_BYTE, status.MPI_SOURCE, status.MPI_TAG, comm, MPI_STATUS_IGNORE);
        pthread_mutex_unlock(&ra_mpi_mutex);
        if (!beat) return false; /* left to MPI */
        quiet = there ? 0 : quiet + 1;
    }
    return true;
}

/* The duplicate before this one; MPI_COMM_NULL: there is none. */
static MPI_Comm duplicate_before(MPI_Comm comm) {
    void *handle = NULL;
    int found = 0;
    MPI_Comm_get_attr(comm, before_key, &handle, &found);
    return found ? MPI_Comm_f2c((MPI_Fint)(intptr_t)handle) : MPI_COMM_NULL;
}

/* The caller frees the communicator that the duplicate was made of; all ranks do, so freeing the duplicate is safe, unless a
 * link still uses it or has failed on it. */
static int free_duplicate(MPI_Comm comm, int key, void *value, void *extra) {
    (void)comm, (void)key, (void)extra;
    ra_mpi_shared *shared = value, **at = &duplicates;
    while (*at && *at != shared) at = &(*at)->next;
    if (*at) *at = shared->next;
    MPI_Comm own = shared->orphan || shared->open_now > 0 ? MPI_COMM_NULL : shared->comm;
    while (own != MPI_COMM_NULL && receive_leftovers(shared, own)) {
        MPI_Comm before = duplicate_before(own);
        MPI_Comm_free(&own);
        own = before;
    }
    shared->orphan = true;
    if (shared->open_now == 0) shared->host->free(shared, sizeof *shared);
    return MPI_SUCCESS;
}

/* MPI calls this at the beginning of MPI_Finalize. A program may have forgotten a communicator whose heart still beats: it
 * is told that MPI is over, and calls it no more. */
static int before_finalize(MPI_Comm comm, int key, void *value, void *extra) {
    (void)comm, (void)key, (void)value, (void)extra;
    for (ra_mpi_shared *shared = duplicates; shared; shared = shared->next) {
        MPI_Comm own = shared->comm;
        while (own != MPI_COMM_NULL && receive_leftovers(shared, own)) own = duplicate_before(own);
    }
    pthread_mutex_lock(&ra_mpi_mutex);
    atomic_store(&ra_mpi_closing, true);
    pthread_mutex_unlock(&ra_mpi_mutex);
    return MPI_SUCCESS;
}

void ra_mpi_duplicates_begin(void) {
    if (duplicate_key != MPI_KEYVAL_INVALID) return;
    MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, free_duplicate, &duplicate_key, NULL);
    MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, MPI_COMM_NULL_DELETE_FN, &before_key, NULL);
    MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, before_finalize, &finalize_key, NULL);
    MPI_Comm_set_attr(MPI_COMM_SELF, finalize_key, NULL);
}

static ra_status duplicate(const ra_mpi_host *host, MPI_Comm parent, double seconds, MPI_Comm *comm) {
    MPI_Request pending;
    pthread_mutex_lock(&ra_mpi_mutex);
    int error = MPI_Comm_idup(parent, comm, &pending);
    pthread_mutex_unlock(&ra_mpi_mutex);
    if (error != MPI_SUCCESS) return ra_mpi_failed(host, error, "MPI_Comm_idup");
    ra_status status = ra_mpi_wait_collective(host, &pending, seconds, "duplicating the communicator");
    if (status == RA_OK) MPI_Comm_set_errhandler(*comm, MPI_ERRORS_RETURN);
    return status;
}

ra_status ra_mpi_share(const ra_mpi_host *host, MPI_Comm parent, double seconds, MPI_Comm *comm, ra_mpi_shared **out) {
    ra_mpi_shared *shared = NULL;
    int found = 0;
    *out = NULL;
    MPI_Comm_get_attr(parent, duplicate_key, &shared, &found);
    if (found && shared->failed) return host->fail(RA_PEER_LOST, "an earlier failure has made this MPI communicator unusable");
    if (!found || shared->openings == 1 << RA_MPI_OPENING_BITS) {
        const ra_status status = duplicate(host, parent, seconds, comm);
        if (status != RA_OK) return status;
    }
    if (!found) {
        shared = host->alloc(sizeof *shared);
        if (!shared) return RA_OK;
        *shared = (ra_mpi_shared){.next = duplicates, .host = host, .parent = parent, .comm = *comm};
        duplicates = shared;
        MPI_Comm_set_attr(parent, duplicate_key, shared);
    } else if (shared->openings == 1 << RA_MPI_OPENING_BITS) {
        MPI_Comm_set_attr(*comm, before_key, (void *)(intptr_t)MPI_Comm_c2f(shared->comm));
        shared->comm = *comm;
        shared->openings = 0;
    }
    *comm = shared->comm;
    *out = shared;
    return RA_OK;
}

void ra_mpi_forget_first(ra_mpi_shared *shared) {
    if (shared->openings != 1 || duplicate_before(shared->comm) != MPI_COMM_NULL) return;
    shared->orphan = true;
    MPI_Comm_delete_attr(shared->parent, duplicate_key);
}
