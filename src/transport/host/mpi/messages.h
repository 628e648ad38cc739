/* Messages over a duplicate.
 *
 *     MPI tag:  [ opening 6 bits | the link's own 1 bit | low 20 bits of the link's tag ]
 *
 * A message is sent in pieces of 4 MiB, all with the same tag; MPI keeps their order. So none is longer than MPI's int can
 * count, and a large message shows its progress to whoever waits for it. A receive waits until its piece has come and its
 * length is known, and only then hands MPI the buffer (MPI_Improbe, MPI_Imrecv). */
#ifndef RA_TRANSPORT_MPI_MESSAGES_H
#define RA_TRANSPORT_MPI_MESSAGES_H

#include "transport/host/mpi/duplicates.h"
#include "transport/link.h"

#define RA_MPI_TAG_BITS (RA_LINK_TAG_BITS + 1 + RA_MPI_OPENING_BITS)

/* The raw transport of one more opening, with these flags, and its ctx; NULL if this rank has no memory for it. */
void *ra_mpi_endpoint(ra_mpi_shared *shared, uint32_t flags, ra_comm_ops *ops);

#endif
