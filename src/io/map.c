#include "io/map.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/status.h"

ra_status ra_map_open(const char *path, ra_map *map) {
    *map = (ra_map){NULL, 0};
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* O_NONBLOCK: a pipe under this name must not block */
    if (fd < 0) return ra_fail(RA_IO, "%s cannot be read: %s", path, strerror(errno));
    struct stat info;
    ra_status status = RA_OK;
    if (fstat(fd, &info) != 0) status = ra_fail(RA_IO, "%s cannot be read: %s", path, strerror(errno));
    else if (!S_ISREG(info.st_mode)) status = ra_fail(RA_IO, "%s is not a regular file", path);
    else if (info.st_size > 0) {
        void *data = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_SHARED, fd, 0);
        if (data == MAP_FAILED) status = ra_fail(RA_IO, "%s cannot be mapped: %s", path, strerror(errno));
        else *map = (ra_map){data, (int64_t)info.st_size};
    }
    close(fd);
    return status;
}

void ra_map_close(ra_map *map) {
    if (map->data) munmap((void *)(uintptr_t)map->data, (size_t)map->bytes);
    *map = (ra_map){NULL, 0};
}

/* JSON, and so a .safetensors header, holds nothing else: no surrogates, nothing longer than it must be. */
static bool is_utf8(const char *text) {
    const unsigned char *p = (const unsigned char *)text;
    while (*p) {
        int more = *p < 0x80 ? 0 : *p >= 0xc2 && *p < 0xe0 ? 1 : *p >= 0xe0 && *p < 0xf0 ? 2 : *p >= 0xf0 && *p < 0xf5 ? 3 : -1;
        if (more < 0 || (*p == 0xe0 && p[1] < 0xa0) || (*p == 0xed && p[1] > 0x9f) || (*p == 0xf0 && p[1] < 0x90) ||
            (*p == 0xf4 && p[1] > 0x8f))
            return false;
        for (p++; more > 0; more--, p++)
            if ((*p & 0xc0) != 0x80) return false;
    }
    return true;
}

ra_status ra_file_name_parse(const char *argument, ra_file_name *file) {
    static const char extension[] = ".safetensors";
    const char *split = strstr(argument, ".safetensors:");
    size_t length = strlen(argument), path_length = split ? (size_t)(split - argument) + strlen(extension) : length;
    const char *name = split ? argument + path_length + 1 : "";
    if (!split && length >= strlen(extension) && strcmp(argument + length - strlen(extension), extension) == 0)
        return ra_fail(RA_INVALID, "%s names no tensor: write %s:NAME", argument, argument);
    if (split && *name == '\0') return ra_fail(RA_INVALID, "%s names no tensor: write it after the colon", argument);
    if (!is_utf8(name)) return ra_fail(RA_INVALID, "the name of a tensor is not UTF-8, which .safetensors files need");
    if (path_length == 0) return ra_fail(RA_INVALID, "a file's name is empty");
    if (path_length >= sizeof file->path || strlen(name) >= sizeof file->name)
        return ra_fail(RA_INVALID, "a file's name is too long");
    memcpy(file->path, argument, path_length);
    file->path[path_length] = '\0';
    strcpy(file->name, name);
    return RA_OK;
}

ra_status ra_map_array(const ra_file_name *file, ra_map *map, ra_array *array) {
    RA_TRY(ra_map_open(file->path, map));
    ra_status status = file->name[0] ? ra_safetensors_find(map->data, map->bytes, file->name, array)
                                     : ra_npy_parse(map->data, map->bytes, array);
    if (status == RA_OK) return RA_OK;
    ra_map_close(map);
    return ra_fail_context(status, "%s: ", file->path);
}
