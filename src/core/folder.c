#include "core/folder.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef RA_MODULES_FROM_BIN /* the build knows better */
#define RA_MODULES_FROM_BIN "../lib/ringattn"
#define RA_MODULE_DIR "/usr/local/lib/ringattn"
#endif

/* The folder of this library or program, without a slash at its end; false where it cannot be known. */
static bool own_folder(char folder[PATH_MAX]) {
    static const char here;
    Dl_info info;
    if (!dladdr(&here, &info) || !info.dli_fname) return false;
    /* A program is known by the name it was called by, which says nothing when the shell found it on PATH. */
    bool bare = !strchr(info.dli_fname, '/');
    if (!realpath(bare ? "/proc/self/exe" : info.dli_fname, folder)) return false;
    char *slash = strrchr(folder, '/');
    if (slash) *slash = 0;
    return slash != NULL;
}

bool ra_module_path(const char *name, int place, char path[PATH_MAX]) {
    static const char *const below[] = {"", "/ringattn", ("/" RA_MODULES_FROM_BIN)};
    const int places = (int)(sizeof below / sizeof *below);
    const char *wish = getenv("RINGATTN_MODULE_PATH"), *folder = wish;
    char own[PATH_MAX] = "";
    if (wish && *wish) {
        if (place > 0) return false;
    } else if (place < places) {
        folder = own_folder(own) ? own : RA_MODULE_DIR;
    } else {
        if (place > places) return false;
        folder = RA_MODULE_DIR;
    }
    const int length = snprintf(path, PATH_MAX, "%s%s/%s", folder, folder == own ? below[place] : "", name);
    if (length >= PATH_MAX) path[0] = 0; /* no file has that name */
    return true;
}
