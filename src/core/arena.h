/* An arena: many small arrays that live and die together. A failed allocation sticks, so a builder checks once, at the end. */
#ifndef RA_CORE_ARENA_H
#define RA_CORE_ARENA_H

#include <stdbool.h>
#include <stdint.h>

typedef struct ra_arena_chunk ra_arena_chunk;

typedef struct ra_arena { /* zero = empty */
    ra_arena_chunk *chunks;
    bool failed;
} ra_arena;

/* count*size zeroed bytes, 16-byte aligned; NULL (and arena->failed) when there is no memory. count 0 gives a valid pointer. */
void *ra_arena_take(ra_arena *arena, int64_t count, int64_t size);
/* A vector's growth by one: makes room for index `count` in *items, whose capacity is *capacity. False when there is no
 * memory. */
bool ra_arena_grow(ra_arena *arena, void **items, int64_t count, int64_t *capacity, int64_t size);
void ra_arena_free(ra_arena *arena);

#endif
