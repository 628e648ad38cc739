/* Opening the transport over MPI: finds and loads the module for the MPI that this job runs under. */
#ifndef RA_TRANSPORT_MPI_H
#define RA_TRANSPORT_MPI_H

#include "transport/link.h"
#include "transport/host/mpi/module.h"

/* `implementation` ("openmpi", "mpich") or NULL: by the launcher's variables; comm: an MPI_Comm of handle_size bytes, or NULL:
 * the world. Collective. The session's ctx may be NULL: report RA_NOMEM to ra_mpi_agree then. */
ra_status ra_mpi_open(const char *implementation, const void *comm, size_t handle_size, double start_timeout,
                      ra_mpi_session *session);
/* Must follow ra_mpi_open, with what came of it here; RA_OK only if every rank says so. Collective. */
ra_status ra_mpi_agree(const ra_mpi_session *session, ra_status mine, double start_timeout);

/* True under a launcher of MPI jobs. */
bool ra_mpi_launched(void);
/* Whether the module for an implementation can be loaded; if so text is the MPI library's version, if not the reason. */
bool ra_mpi_describe(const char *implementation, char *text, size_t bytes);

#endif
