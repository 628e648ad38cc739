#include "transport/host/mpi/life.h"

#include <errno.h>
#include <mpi.h>
#include <stdbool.h>
#include <time.h>

#include "core/clock.h"
#include "core/thread.h"

typedef enum state { STARTING, RUNNING, ENDING, OVER } state;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed; /* on the monotonic clock */
static state now_in;
static int begin_error;

/* With the lock held. */
static void enter(state next) {
    now_in = next;
    pthread_cond_broadcast(&changed);
}

static void *owner(void *unused) {
    (void)unused;
    int level, error = MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &level);
    pthread_mutex_lock(&mutex);
    begin_error = error;
    enter(RUNNING);
    while (now_in != ENDING) pthread_cond_wait(&changed, &mutex);
    pthread_mutex_unlock(&mutex);
    MPI_Finalize();
    pthread_mutex_lock(&mutex);
    enter(OVER);
    pthread_mutex_unlock(&mutex);
    return NULL;
}

ra_mpi_start ra_mpi_begin(double seconds, int *error) {
    ra_cond_init(&changed);
    const struct timespec until = ra_seconds_ahead(seconds);
    pthread_t thread;
    if (!ra_thread_start(&thread, owner, NULL)) return RA_MPI_NO_THREAD;
    pthread_detach(thread);
    int waited = 0;
    pthread_mutex_lock(&mutex);
    while (now_in == STARTING && waited != ETIMEDOUT) waited = pthread_cond_timedwait(&changed, &mutex, &until);
    bool started = now_in != STARTING;
    *error = begin_error;
    pthread_mutex_unlock(&mutex);
    return started ? RA_MPI_STARTED : RA_MPI_LATE;
}

void ra_mpi_end(void) {
    pthread_mutex_lock(&mutex);
    enter(ENDING);
    while (now_in != OVER) pthread_cond_wait(&changed, &mutex);
    pthread_mutex_unlock(&mutex);
}
