/* ringattn over MPI. The library itself is built without MPI and loads its module for the implementation at run time:
 * RA_NOT_AVAILABLE if there is none. Link programs with libringattn and, if they call MPI themselves, with their MPI as
 * usual. */
#ifndef RINGATTN_MPI_H
#define RINGATTN_MPI_H

#include "ringattn.h"

#ifdef __cplusplus
extern "C" {
#endif

/* For programs that do not use MPI themselves: every process of `mpirun -n P` is one rank. Initialises MPI (with
 * MPI_THREAD_SERIALIZED) unless that was done already, and finalizes it when the process exits; after an error it is not
 * finalized, because that could wait for a dead rank. Which MPI: RINGATTN_MPI (openmpi, mpich), or the launcher's variables.
 * start_timeout: seconds for all ranks to arrive, also later (ra_comm_set_timeout); 0 means 600. Every rank calls it. */
RA_API ra_status ra_comm_mpi_world(double start_timeout, ra_comm **comm);

/* For programs that use MPI themselves: the ranks are those of the communicator `mpi`, and every one of them calls this. The
 * library duplicates `mpi` and sends nothing on the original. Destroy the ra_comm before you free `mpi` or finalize MPI; after
 * that it only returns RA_PEER_LOST. RA_INVALID: `mpi` is MPI_COMM_NULL or an inter-communicator, or MPI was initialised with
 * less than MPI_THREAD_SERIALIZED on another thread. To send heartbeats while the program is busy elsewhere, the library needs
 * MPI_THREAD_MULTIPLE; with less it sends them only during its own calls, and the peers wait for this rank as long as the
 * start timeout before they count it as lost. After RA_PEER_LOST, RA_TIMEOUT or another communication error, leave with
 * _exit or MPI_Abort: MPI_Finalize may never return. */
#if defined(MPI_VERSION)
static inline ra_status ra_comm_mpi(MPI_Comm mpi, ra_comm **comm);
#endif

/* The same for callers without mpi.h: the address and size of the MPI_Comm, and whose it is ("openmpi", "mpich"). */
RA_API ra_status ra_comm_mpi_handle(const void *mpi, size_t bytes, const char *implementation, ra_comm **comm);

/* True in a process that an MPI launcher started. */
RA_API bool ra_mpi_is_launched(void);
/* Whether the module for an implementation ("openmpi", "mpich") can be loaded: then text is the version of its MPI library,
 * else the reason why not. */
RA_API bool ra_mpi_version(const char *implementation, char *text, size_t bytes);

#if defined(MPI_VERSION)
static inline ra_status ra_comm_mpi(MPI_Comm mpi, ra_comm **comm) {
#if defined(OPEN_MPI)
    return ra_comm_mpi_handle(&mpi, sizeof mpi, "openmpi", comm);
#else
    return ra_comm_mpi_handle(&mpi, sizeof mpi, "mpich", comm);
#endif
}
#endif

#ifdef __cplusplus
}
#endif
#endif
