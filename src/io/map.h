/* Files mapped for reading. */
#ifndef RA_IO_MAP_H
#define RA_IO_MAP_H

#include "io/array.h"
#include "io/path.h"

typedef struct ra_map {
    const unsigned char *data; /* NULL for an empty file */
    int64_t bytes;
} ra_map;

/* Maps a regular file; its pages are read when they are touched, so it may be larger than memory. RA_IO names the file. */
ra_status ra_map_open(const char *path, ra_map *map);
void ra_map_close(ra_map *map);

/* A file argument: `x.safetensors:name`, or anything else, which is read as .npy. Splits at the first ".safetensors:"; name is
 * "" for .npy. RA_INVALID: a .safetensors without a tensor's name, a name that is not UTF-8, or a path or name that is empty
 * or too long. */
typedef struct ra_file_name {
    char path[RA_PATH_MAX];
    char name[1024];
} ra_file_name;
ra_status ra_file_name_parse(const char *argument, ra_file_name *file);

/* Maps the file and finds its array. RA_IO names the file. */
ra_status ra_map_array(const ra_file_name *file, ra_map *map, ra_array *array);

#endif
