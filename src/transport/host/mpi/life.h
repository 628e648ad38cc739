/* MPI_Init and MPI_Finalize, where they are ours to call. MPI_Init waits without limit for every process that the launcher has
 * started, and MPI_Finalize must be called by the same thread; so a thread of its own calls both, and others wait for it as
 * long as they like. */
#ifndef RA_TRANSPORT_MPI_LIFE_H
#define RA_TRANSPORT_MPI_LIFE_H

typedef enum ra_mpi_start { RA_MPI_STARTED, RA_MPI_LATE, RA_MPI_NO_THREAD } ra_mpi_start;

/* MPI_Init_thread with MPI_THREAD_SERIALIZED, for at most so many seconds. RA_MPI_STARTED: *error is what it returned.
 * RA_MPI_LATE: it goes on for ever; the process can only leave. Once a process. */
ra_mpi_start ra_mpi_begin(double seconds, int *error);
/* MPI_Finalize. */
void ra_mpi_end(void);

#endif
