/* Where this library or program lies, which is where its modules are looked for. */
#ifndef RA_CORE_FOLDER_H
#define RA_CORE_FOLDER_H

#include <limits.h>
#include <stdbool.h>

/* The folder without a slash at its end; false where it cannot be known. */
bool ra_own_folder(char folder[PATH_MAX]);

#endif
