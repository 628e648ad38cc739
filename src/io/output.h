/* Output files that appear whole under their name or not at all.
 *
 * An output is written under a temporary name beside its target, with all of its space reserved at the start (a full disk is
 * found before anything is computed), mapped so that every thread writes its own part, and renamed after the disk has it.
 * Until then only its owner can read it, and nobody can guess its name:
 *
 *     .ringattn-<64-bit hash of the target's name>-<64 random bits>.tmp
 *
 * The process that created it holds a lock on it. A temporary file of the same target that nobody has locked is what a killed
 * run left, and the next run that writes this target removes it. Temporary names are kept in a table that a signal handler may
 * use. */
#ifndef RA_IO_OUTPUT_H
#define RA_IO_OUTPUT_H

#include "io/path.h"

typedef struct ra_output {
    unsigned char *data; /* the mapped file: header_bytes that are written already, then zeros */
    int64_t bytes;
    int fd;
    int slot; /* in the table of temporary names */
    int mode; /* that the file will have; -1: joined, its creator sets it */
    char path[RA_PATH_MAX]; /* links followed */
} ra_output;

/* Creates the temporary file of `bytes` bytes, beginning with the header. RA_IO names the target. */
ra_status ra_output_create(const char *path, const void *header, int64_t header_bytes, int64_t bytes, ra_output *output);
/* The temporary file's name, without its directory; and another process's way to the same file: it must know the target and
 * that name. All processes that joined it write their parts; one of them publishes, the others leave. */
const char *ra_output_temporary(const ra_output *output);
ra_status ra_output_join(const char *path, const char *temporary, int64_t bytes, ra_output *output);
void ra_output_leave(ra_output *output);

/* Hands the bytes to the disk and checks that it took them; the file gets the mode of the one it replaces. */
ra_status ra_output_sync(ra_output *output);
/* Gives the files their names, hands their directories to the disk, too, and closes the outputs. What fails after the names are
 * given (a directory that cannot be synced) is said, and takes no file back. */
ra_status ra_outputs_publish(ra_output *outputs, int count);
ra_status ra_output_publish(ra_output *output);
/* Removes the temporary file and closes the output; safe after publish and for a zeroed output. */
void ra_output_discard(ra_output *output);

/* Removes every temporary file of this process that is not yet published; safe in a signal handler. */
void ra_output_discard_all(void);

#endif
