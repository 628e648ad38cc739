#include "transport/host/mpi/calls.h"

#include <sched.h>
#include <stdio.h>
#include <time.h>

#include "core/clock.h"

pthread_mutex_t ra_mpi_mutex = PTHREAD_MUTEX_INITIALIZER;
atomic_bool ra_mpi_closing;
bool ra_mpi_anything_failed;

ra_status ra_mpi_failed(const ra_mpi_host *host, int error, const char *what) {
    char text[MPI_MAX_ERROR_STRING + 64], reason[MPI_MAX_ERROR_STRING];
    int class = MPI_ERR_OTHER, length = 0;
    MPI_Error_class(error, &class);
    MPI_Error_string(error, reason, &length);
    snprintf(text, sizeof text, "%s: %.*s", what, length, reason);
    return host->fail(class == MPI_ERR_TRUNCATE ? RA_PROTOCOL : RA_PEER_LOST, text);
}

bool ra_mpi_is_over(void) {
    int over = 0;
    if (!atomic_load(&ra_mpi_closing)) MPI_Finalized(&over);
    return over != 0 || atomic_load(&ra_mpi_closing);
}

void ra_mpi_relax(double since) {
    double waited = ra_seconds() - since;
    if (waited < 0.002) sched_yield();
    else nanosleep(&(struct timespec){.tv_nsec = waited < 0.05 ? 10000 : 200000}, NULL);
}

ra_status ra_mpi_wait_collective(const ra_mpi_host *host, MPI_Request *pending, double seconds, const char *what) {
    double begin = ra_seconds(), until = begin + seconds;
    for (;; ra_mpi_relax(begin)) {
        int done = 0;
        pthread_mutex_lock(&ra_mpi_mutex);
        int error = MPI_Test(pending, &done, MPI_STATUS_IGNORE);
        pthread_mutex_unlock(&ra_mpi_mutex);
        if (error != MPI_SUCCESS) return ra_mpi_failed(host, error, what);
        if (done) return RA_OK;
        if (ra_seconds() > until) {
            char text[128];
            snprintf(text, sizeof text, "%s: not every rank has arrived within %.3g s", what, seconds);
            return host->fail(RA_TIMEOUT, text);
        }
    }
}
