/* Where modules of this library are looked for. */
#ifndef RA_CORE_FOLDER_H
#define RA_CORE_FOLDER_H

#include <limits.h>
#include <stdbool.h>

/* The path of the file `name` in place 0, 1, ... If RINGATTN_MODULE_PATH is set, that folder is the only place. Else: beside
 * this library or program; in ringattn/ beside it; where an installed tree has modules, relative to its programs; where this
 * build was configured to install them. False: there are no more places. */
bool ra_module_path(const char *name, int place, char path[PATH_MAX]);

#endif
