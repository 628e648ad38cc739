/* Finds, loads and keeps the module of an MPI implementation.
 *
 * If the module has initialised MPI it must also be finalized, or launchers count the rank as failed; but communicators come
 * and go, and MPI cannot be initialised twice. So that happens when the process exits. Waiting there for ranks that still work
 * is right, waiting for ranks that died is not: a small link of its own, the guard, stays open until then, and its last
 * agreement tells these apart. */
#include "transport/host/mpi.h"

#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/alloc.h"
#include "core/folder.h"
#include "core/log.h"
#include "core/status.h"

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static const ra_mpi_module *loaded; /* one MPI a process */
static ra_link *guard;
static pid_t guarded; /* the process that MPI belongs to: a forked child that exits is none of its ranks */

static ra_status fail(ra_status status, const char *sentence) { return ra_fail(status, "%s", sentence); }

static const ra_mpi_host host = {.alloc = ra_alloc, .free = ra_free, .fail = fail};

/* --------------------------------------------------------------------------------------------------------------- loading */

bool ra_mpi_launched(void) { return getenv("OMPI_COMM_WORLD_SIZE") || getenv("PMI_RANK") || getenv("PMIX_RANK"); }

/* The implementation that the launcher speaks to, in the order in which it should be tried; NULL: either. */
static const char *launcher(void) {
    const char *wish = getenv("RINGATTN_MPI");
    if (wish && *wish) return wish;
    if (getenv("OMPI_COMM_WORLD_SIZE")) return "openmpi";
    if (getenv("PMI_RANK") && !getenv("PMIX_RANK")) return "mpich";
    return NULL; /* PMIx serves both */
}

static const ra_mpi_module *load_from(const char *path, const char *implementation, char *reason, size_t bytes) {
    FILE *file = fopen(path, "rb"); /* only to tell "not there" from "does not load" */
    if (!file) return NULL;
    fclose(file);
    void *object = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    const ra_mpi_module *module = object ? dlsym(object, "ra_mpi_module_table") : NULL;
    if (!module) {
        snprintf(reason, bytes, "%s", dlerror());
    } else if (module->abi != RA_MPI_MODULE_ABI || strcmp(module->implementation, implementation) != 0) {
        snprintf(reason, bytes, "%s belongs to another version of ringattn", path);
        module = NULL;
    }
    return module; /* never unloaded: MPI libraries do not survive that */
}

static const ra_mpi_module *load(const char *implementation, char *reason, size_t bytes) {
    snprintf(reason, bytes, "ringattn_mpi_%s.so was not found: this build has no module for it", implementation);
    const ra_mpi_module *module = NULL;
    char name[PATH_MAX], path[PATH_MAX];
    snprintf(name, sizeof name, "ringattn_mpi_%s.so", implementation);
    for (int place = 0; !module && ra_module_path(name, place, path); place++)
        module = load_from(path, implementation, reason, bytes);
    return module;
}

bool ra_mpi_describe(const char *implementation, char *text, size_t bytes) {
    pthread_mutex_lock(&mutex);
    const ra_mpi_module *module =
        loaded && strcmp(loaded->implementation, implementation) == 0 ? loaded : load(implementation, text, bytes);
    pthread_mutex_unlock(&mutex);
    if (module) module->version(text, bytes);
    return module != NULL;
}

/* With the lock held. */
static ra_status choose(const char *implementation) {
    char reason[512], other[512];
    if (!implementation) implementation = loaded ? loaded->implementation : launcher();
    if (loaded && strcmp(loaded->implementation, implementation) != 0) {
        return ra_fail(RA_INVALID, "this process uses %s already, so it cannot use %s", loaded->implementation, implementation);
    }
    if (loaded) return RA_OK;
    if (implementation) {
        loaded = load(implementation, reason, sizeof reason);
        return loaded ? RA_OK : ra_fail(RA_NOT_AVAILABLE, "the transport mpi is not available: %s", reason);
    }
    loaded = load("openmpi", reason, sizeof reason);
    if (!loaded) loaded = load("mpich", other, sizeof other);
    return loaded ? RA_OK : ra_fail(RA_NOT_AVAILABLE, "the transport mpi is not available: %s; %s", reason, other);
}

/* --------------------------------------------------------------------------------------------------------------- the end */

static void finish(void) {
    if (getpid() != guarded) return;
    bool clean = ra_link_allgather(guard, NULL, NULL, 0, "exit") == RA_OK;
    if (!clean) ra_log(RA_LOG_WARN, "MPI is not finalized: %s", ra_last_error());
    ra_link_destroy(guard);
    guard = NULL;
    if (clean) loaded->finalize();
}

/* The first time that MPI turns out to be ours. Collective, as opening is. */
static ra_status set_guard(double start_timeout) {
    ra_mpi_session session;
    RA_TRY(loaded->open(&host, NULL, start_timeout, &session));
    ra_status status = session.ctx ? ra_link_create(&session.ops, session.ctx, session.rank, session.ranks, "mpi", &guard)
                                   : ra_fail(RA_NOMEM, "no memory to open the communicator");
    status = ra_mpi_agree(&session, status, start_timeout);
    if (status != RA_OK) {
        ra_link_destroy(guard);
        guard = NULL;
        return status;
    }
    guarded = getpid();
    ra_link_set_mute(guard); /* what went wrong has been told by the communicator in use, or is by finish */
    return atexit(finish) == 0 ? RA_OK : ra_fail(RA_NOMEM, "no memory for an exit handler");
}

/* --------------------------------------------------------------------------------------------------------------- opening */

ra_status ra_mpi_open(const char *implementation, const void *comm, size_t handle_size, double start_timeout,
                      ra_mpi_session *session) {
    pthread_mutex_lock(&mutex);
    ra_status status = choose(implementation);
    if (status == RA_OK && comm && handle_size != loaded->handle_size) {
        status = ra_fail(RA_INVALID, "an MPI_Comm of %s has %zu bytes, not %zu", loaded->implementation, loaded->handle_size,
                         handle_size);
    }
    if (status == RA_OK) status = loaded->open(&host, comm, start_timeout, session);
    if (status == RA_OK && session->owned && !guard) status = set_guard(start_timeout);
    pthread_mutex_unlock(&mutex);
    return status;
}

ra_status ra_mpi_agree(const ra_mpi_session *session, ra_status mine, double start_timeout) {
    ra_status worst = RA_OK;
    int rank = 0;
    char own[512];
    snprintf(own, sizeof own, "%s", ra_last_error());
    RA_TRY(loaded->agree(session, mine, start_timeout, &worst, &rank));
    if (mine != RA_OK) return ra_fail(mine, "%s", own);
    return worst == RA_OK ? RA_OK : ra_fail(worst, "rank %d could not open the communicator (%s)", rank, ra_status_name(worst));
}
