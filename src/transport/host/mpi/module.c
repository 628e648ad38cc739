/* The transport over MPI, compiled once for each implementation: how MPI begins and ends, and how a communicator is opened.
 *
 * MPI reports next to nothing when a rank dies; heartbeats find that. After an error nothing of MPI is freed or finalized: each
 * of these calls may wait for the dead. */
#include "transport/host/mpi/module.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "transport/host/mpi/calls.h"
#include "transport/host/mpi/life.h"
#include "transport/host/mpi/messages.h"

#if defined(OPEN_MPI)
#define IMPLEMENTATION "openmpi"
#define LIBRARY_NAME "Open MPI"
#elif defined(MPICH_VERSION)
#define IMPLEMENTATION "mpich"
#define LIBRARY_NAME "MPICH"
#else
#error "this MPI is neither Open MPI nor MPICH"
#endif

static bool initialized_here;

static void library_version(char *text, size_t bytes) {
    char all[MPI_MAX_LIBRARY_VERSION_STRING];
    int length = 0;
    MPI_Get_library_version(all, &length);
    all[strcspn(all, "\n\r")] = 0;
    for (char *tab = all; (tab = strchr(tab, '\t'));) *tab = ' ';
    snprintf(text, bytes, "%.100s", all);
}

/* Under a launcher that speaks to another MPI every process is a world of its own: p rings of one rank instead of one of p. */
static ra_status check_launcher(const ra_mpi_host *host) {
    static const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"};
    int ranks = 0;
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    const char *name = NULL;
    long wanted = 0;
    for (int i = 0; i < 2; i++) {
        const char *text = getenv(names[i]);
        if (!text) continue;
        name = names[i];
        wanted = strtol(text, NULL, 10);
        if (wanted == ranks) return RA_OK;
    }
    if (!name) return RA_OK;
    char text[256];
    snprintf(text, sizeof text,
             "the launcher started %ld ranks (%s), but %s sees %d: use the launcher of %s, or set RINGATTN_MPI", wanted, name,
             LIBRARY_NAME, ranks, LIBRARY_NAME);
    return host->fail(RA_NOT_AVAILABLE, text);
}

static ra_status initialize(const ra_mpi_host *host, double seconds, bool *own_thread) {
    int initialized = 0, level = MPI_THREAD_SINGLE;
    char version[128], text[320];
    library_version(version, sizeof version); /* may be called before MPI_Init */
    if (!strstr(version, LIBRARY_NAME)) {
        snprintf(text, sizeof text, "the module for %s found another MPI library: %s", LIBRARY_NAME, version);
        return host->fail(RA_NOT_AVAILABLE, text);
    }
    if (ra_mpi_is_over()) return host->fail(RA_NOT_AVAILABLE, "MPI was finalized already, and cannot be used again");
    MPI_Initialized(&initialized);
    if (!initialized && ra_mpi_anything_failed)
        return host->fail(RA_TIMEOUT, "an earlier attempt to start MPI has not finished yet");
    if (!initialized) {
        int error;
        ra_mpi_start start = ra_mpi_begin(seconds, &error);
        if (start == RA_MPI_NO_THREAD) return host->fail(RA_NOMEM, "a thread for MPI_Init could not be started");
        ra_mpi_anything_failed |= start == RA_MPI_LATE;
        snprintf(text, sizeof text, "MPI_Init: not every rank has arrived within %.3g s", seconds);
        if (start == RA_MPI_LATE) return host->fail(RA_TIMEOUT, text);
        if (error != MPI_SUCCESS) return ra_mpi_failed(host, error, "MPI_Init_thread");
        initialized_here = true;
        /* MPICH raises errors of requests on the world, whatever communicator they belong to. */
        MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
        MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
    }
    ra_status launched = check_launcher(host);
    if (launched != RA_OK) return launched;
    MPI_Query_thread(&level);
    int main_thread = 1;
    if (level < MPI_THREAD_SERIALIZED) MPI_Is_thread_main(&main_thread);
    if (!main_thread) {
        snprintf(text, sizeof text,
                 "MPI was initialised with %s, so that only the thread that initialised it may use it; this is another",
                 level == MPI_THREAD_SINGLE ? "MPI_THREAD_SINGLE" : "MPI_THREAD_FUNNELED");
        return host->fail(RA_INVALID, text);
    }
    /* Beside a program's own MPI calls a second thread is allowed only with MPI_THREAD_MULTIPLE. */
    *own_thread = level >= (initialized_here ? MPI_THREAD_SERIALIZED : MPI_THREAD_MULTIPLE);
    int *tag_limit = NULL, found = 0;
    MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, (void *)&tag_limit, &found);
    if (!found || *tag_limit < (1 << RA_MPI_TAG_BITS) - 1) {
        snprintf(text, sizeof text, "this MPI allows tags up to %d only; tags up to %d are needed", found ? *tag_limit : 0,
                 (1 << RA_MPI_TAG_BITS) - 1);
        return host->fail(RA_NOT_AVAILABLE, text);
    }
    ra_mpi_duplicates_begin();
    return RA_OK;
}

/* A rank without memory goes on with the collective part and reports in `agree`: nobody is left waiting. */
static ra_status open_comm(const ra_mpi_host *host, const void *handle, double seconds, ra_mpi_session *session) {
    bool own_thread;
    *session = (ra_mpi_session){0};
    ra_status status = initialize(host, seconds, &own_thread);
    if (status != RA_OK) return status;
    MPI_Comm parent = handle ? *(const MPI_Comm *)handle : MPI_COMM_WORLD;
    if (parent == MPI_COMM_NULL) return host->fail(RA_INVALID, "the communicator is MPI_COMM_NULL");
    int inter = 0;
    MPI_Comm_test_inter(parent, &inter);
    if (inter) return host->fail(RA_INVALID, "the communicator joins two groups (an inter-communicator); a ring needs one");
    MPI_Comm comm;
    ra_mpi_shared *shared;
    status = ra_mpi_share(host, parent, seconds, &comm, &shared);
    if (status != RA_OK) return status;
    MPI_Comm_rank(comm, &session->rank);
    MPI_Comm_size(comm, &session->ranks);
    if (!shared) { /* no ctx: only good for agree, which needs no more than the duplicate */
        static ra_mpi_shared last_resort;
        last_resort = (ra_mpi_shared){.host = host, .comm = comm, .orphan = true};
        session->shared = &last_resort;
        return RA_OK;
    }
    session->shared = shared;
    session->owned = initialized_here;
    session->ctx = ra_mpi_endpoint(shared, own_thread ? 0 : RA_COMM_CALLER_THREAD, &session->ops);
    return RA_OK;
}

static ra_status agree(const ra_mpi_session *session, ra_status mine, double seconds, ra_status *worst, int *rank) {
    ra_mpi_shared *shared = session->shared;
    static struct { int status, rank; } in, out; /* static: if not everybody comes, MPI uses them for ever */
    MPI_Request pending;
    in.status = (int)mine;
    in.rank = session->rank;
    pthread_mutex_lock(&ra_mpi_mutex);
    int error = MPI_Iallreduce(&in, &out, 1, MPI_2INT, MPI_MAXLOC, shared->comm, &pending);
    pthread_mutex_unlock(&ra_mpi_mutex);
    if (error != MPI_SUCCESS) return ra_mpi_failed(shared->host, error, "MPI_Iallreduce");
    ra_status status = ra_mpi_wait_collective(shared->host, &pending, seconds, "opening the communicator");
    if (status != RA_OK) {
        pthread_mutex_lock(&ra_mpi_mutex);
        shared->failed = ra_mpi_anything_failed = true;
        pthread_mutex_unlock(&ra_mpi_mutex);
        return status;
    }
    *worst = (ra_status)out.status;
    *rank = out.rank;
    if (*worst != RA_OK) ra_mpi_forget_first(shared);
    return RA_OK;
}

static void finalize(void) {
    pthread_mutex_lock(&ra_mpi_mutex);
    bool may = initialized_here && !ra_mpi_anything_failed && !ra_mpi_is_over();
    if (may) atomic_store(&ra_mpi_closing, true);
    pthread_mutex_unlock(&ra_mpi_mutex);
    if (may) ra_mpi_end();
}

extern RA_API const ra_mpi_module ra_mpi_module_table;
RA_API const ra_mpi_module ra_mpi_module_table = {.abi = RA_MPI_MODULE_ABI,
                                                  .implementation = IMPLEMENTATION,
                                                  .handle_size = sizeof(MPI_Comm),
                                                  .open = open_comm,
                                                  .agree = agree,
                                                  .finalize = finalize,
                                                  .version = library_version};
