/* What every call of MPI needs. MPI is called under one lock, because links have threads of their own; MPI_THREAD_SERIALIZED is
 * enough for a program whose MPI is all ours. */
#ifndef RA_TRANSPORT_MPI_CALLS_H
#define RA_TRANSPORT_MPI_CALLS_H

#include <mpi.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "transport/host/mpi/module.h"

extern pthread_mutex_t ra_mpi_mutex;
extern atomic_bool ra_mpi_closing;  /* MPI_Finalize has begun */
extern bool ra_mpi_anything_failed; /* nothing of MPI is freed or finalized any more */

/* Records what MPI says of an error. */
ra_status ra_mpi_failed(const ra_mpi_host *host, int error, const char *what);
/* True once MPI is finalized, or being finalized, by whomever: nothing may be called any more. */
bool ra_mpi_is_over(void);
/* Between two looks at something that is not there yet: yields, and sleeps a little if it takes long. MPI moves bytes only
 * while somebody looks, so progress starts the count anew: `since` is the time of the last. */
void ra_mpi_relax(double since);
/* Waits for one request of a collective. */
ra_status ra_mpi_wait_collective(const ra_mpi_host *host, MPI_Request *pending, double seconds, const char *what);

#endif
