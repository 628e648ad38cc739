/* --trace: a timeline for Perfetto: two rows a rank, one for what it does and one for its transfers. */
#ifndef CLI_TRACE_H
#define CLI_TRACE_H

#include "options.h"

/* Records what happens on the communicator from now on, if --trace is given. Fails if its file could not be written. */
ra_status trace_attach(const settings *s, ra_comm *comm);
/* Writes the file, if --trace is given. `world`: the communicator of all processes where ranks are processes, else NULL;
 * every one of them calls this, and rank 0 writes. */
ra_status trace_write(const settings *s, ra_comm *world);

#endif
