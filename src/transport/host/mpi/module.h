/* The seam between the library, which is built without any MPI, and its modules, one for each MPI implementation, since their
 * handles and libraries differ. A module is a shared object that exports one symbol, `ra_mpi_module`, and asks nothing of the
 * library but what `host` offers. */
#ifndef RA_TRANSPORT_MPI_MODULE_H
#define RA_TRANSPORT_MPI_MODULE_H

#include "ringattn.h"

#define RA_MPI_MODULE_ABI 1u

typedef struct ra_mpi_host {
    void *(*alloc)(int64_t bytes);
    void (*free)(void *ptr, int64_t bytes);
    ra_status (*fail)(ra_status status, const char *sentence); /* records the sentence, returns the status */
} ra_mpi_host;

/* A communicator that was opened: the raw transport and who this rank is. */
typedef struct ra_mpi_session {
    ra_comm_ops ops;
    void *ctx; /* NULL: this rank had no memory for it; `agree` must be called all the same */
    int rank, ranks;
    bool owned;   /* the module has called MPI_Init_thread */
    void *shared; /* the module's */
} ra_mpi_session;

typedef struct ra_mpi_module {
    uint32_t abi;
    const char *implementation; /* "openmpi", "mpich" */
    size_t handle_size;         /* sizeof(MPI_Comm) */
    /* Initialises MPI if nobody has, checks that the library is the module's implementation, and duplicates *comm (an MPI_Comm;
     * NULL: MPI_COMM_WORLD). Collective; `seconds` for the others to come. */
    ra_status (*open)(const ra_mpi_host *host, const void *comm, double seconds, ra_mpi_session *session);
    /* Everybody tells how opening went here and learns the worst: RA_OK, or that status with the rank that reports it.
     * Collective. */
    ra_status (*agree)(const ra_mpi_session *session, ra_status mine, double seconds, ra_status *worst, int *rank);
    /* MPI_Finalize, unless something went wrong on any communicator. */
    void (*finalize)(void);
    /* MPI_Get_library_version's first line. */
    void (*version)(char *text, size_t bytes);
} ra_mpi_module;

#endif
