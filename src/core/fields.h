/* Texts of "field=value" lines: what a configuration says of itself, for people and for a digest. */
#ifndef RA_CORE_FIELDS_H
#define RA_CORE_FIELDS_H

#include <stddef.h>
#include <stdint.h>

/* The first line in which two texts differ: its field and both values, cut to `room` bytes each. */
void ra_first_difference(const char *a, const char *b, char *field, char *mine, char *theirs, size_t room);

/* FNV-1a of `bytes` bytes, continued from `start` (at first RA_FNV_START). */
#define RA_FNV_START 0xcbf29ce484222325u
uint64_t ra_fnv(uint64_t start, const void *data, int64_t bytes);

#endif
