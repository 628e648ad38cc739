/* Which file a path means, once links are followed; also for files that are not there yet. */
#ifndef RA_IO_PATH_H
#define RA_IO_PATH_H

#include <sys/types.h>

#include "ringattn.h"

#define RA_PATH_MAX 4096 /* bytes of a path with its end */

/* The path of the file itself: links in the last component are followed, a dangling one to the file that it would make. RA_IO
 * names the path. */
ra_status ra_path_resolve(const char *path, char target[RA_PATH_MAX]);

/* The last component of a path. */
const char *ra_path_name(const char *path);

/* The identity of a file, whatever it is called: links and hard links to one file are equal. */
typedef struct ra_path_id {
    dev_t device;
    ino_t file;
    char name[RA_PATH_MAX]; /* "" where the file exists; else its name, and `file` is the directory it would be made in */
} ra_path_id;
ra_status ra_path_identify(const char *path, ra_path_id *id);
bool ra_path_same(const ra_path_id *a, const ra_path_id *b);

/* The directory of a path, "." if it names none. */
void ra_path_directory(const char *path, char directory[RA_PATH_MAX]);

#endif
