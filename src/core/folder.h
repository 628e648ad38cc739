/* Where modules of this library are looked for. */
#ifndef RA_CORE_FOLDER_H
#define RA_CORE_FOLDER_H

#include <limits.h>
#include <stdbool.h>

/* The places where the file `name` may lie, place 0 first: in the folder that RINGATTN_MODULE_PATH names, and nowhere else; or
 * beside this library or program, in ringattn/ beside it, where an installed tree has it as seen from its programs, where this
 * build was configured to be installed. False: there is no such place. */
bool ra_module_path(const char *name, int place, char path[PATH_MAX]);

#endif
