/* Communicators over MPI: the public face of transport/host/mpi.h. */
#include "ringattn_mpi.h"

#include <math.h>

#include "core/status.h"
#include "ring/comm.h"
#include "transport/host/mpi.h"

static ra_status open_comm(const char *implementation, const void *mpi, size_t bytes, double start_timeout, ra_comm **comm) {
    if (!comm) return ra_fail(RA_INVALID, "comm is NULL");
    *comm = NULL;
    if (start_timeout == 0) start_timeout = 600;
    if (!(start_timeout > 0) || !isfinite(start_timeout)) {
        return ra_fail(RA_INVALID, "start_timeout is %g, which is not above 0", start_timeout);
    }
    ra_mpi_session session;
    ra_link *link = NULL;
    RA_TRY(ra_mpi_open(implementation, mpi, bytes, start_timeout, &session));
    ra_status status = session.ctx ? RA_OK : ra_fail(RA_NOMEM, "no memory to open the communicator");
    if (status == RA_OK) status = ra_link_create(&session.ops, session.ctx, session.rank, session.ranks, "mpi", &link);
    if (status == RA_OK) status = ra_comm_from_link(link, comm);
    if (status == RA_OK) status = ra_comm_set_timeout(*comm, 60, start_timeout);
    status = ra_mpi_agree(&session, status, start_timeout);
    if (status == RA_OK) return RA_OK;
    ra_comm_destroy(*comm);
    *comm = NULL;
    return status;
}

ra_status ra_comm_mpi_world(double start_timeout, ra_comm **comm) { return open_comm(NULL, NULL, 0, start_timeout, comm); }

ra_status ra_comm_mpi_handle(const void *mpi, size_t bytes, const char *implementation, ra_comm **comm) {
    if (!mpi || !implementation) return ra_fail(RA_INVALID, "%s is NULL", mpi ? "implementation" : "mpi");
    return open_comm(implementation, mpi, bytes, 0, comm);
}

bool ra_mpi_is_launched(void) { return ra_mpi_launched(); }
bool ra_mpi_version(const char *implementation, char *text, size_t bytes) {
    return ra_mpi_describe(implementation, text, bytes);
}
