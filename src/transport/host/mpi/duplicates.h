/* Duplicates of callers' communicators. One is cached on its communicator as an attribute, so that opening it again costs no
 * new context. Openings are numbered, and the number is part of every tag: a last heartbeat of an earlier link can never match
 * a later link's receive. When all numbers have been used there is a new duplicate; links on an old one go on with that. */
#ifndef RA_TRANSPORT_MPI_DUPLICATES_H
#define RA_TRANSPORT_MPI_DUPLICATES_H

#include <mpi.h>
#include <stdbool.h>

#include "transport/host/mpi/module.h"

#define RA_MPI_OPENING_BITS 6

/* The duplicate of one communicator, and its openings. An attribute of the duplicate leads to the one before it. */
typedef struct ra_mpi_shared {
    struct ra_mpi_shared *next; /* all that an attribute leads to */
    const ra_mpi_host *host;
    MPI_Comm parent, comm;
    int openings, open_now; /* of this duplicate; of this one and those before it */
    bool failed; /* somebody broke a link on it: it is never freed */
    bool orphan; /* no attribute leads to it any more: the last endpoint frees it */
} ra_mpi_shared;

/* Once a process, after MPI has begun. */
void ra_mpi_duplicates_begin(void);
/* The duplicate of a communicator for one more opening; made if there is none, or if all its numbers have been used. *shared is
 * NULL: it was made, and this rank had no memory to keep it. Then *comm is all that there is. Collective. */
ra_status ra_mpi_share(const ra_mpi_host *host, MPI_Comm parent, double seconds, MPI_Comm *comm, ra_mpi_shared **shared);
/* When a rank could not open the first duplicate, all ranks forget it: the next opening must find the same on every rank. It is
 * not freed, for there may be messages in it. */
void ra_mpi_forget_first(ra_mpi_shared *shared);

#endif
