#include "core/folder.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

bool ra_own_folder(char folder[PATH_MAX]) {
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
