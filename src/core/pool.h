/* A pool of workspaces that are reused between calls. One pool a communicator; not thread-safe. */
#ifndef RA_CORE_POOL_H
#define RA_CORE_POOL_H

#include "ringattn.h"

typedef struct ra_pool ra_pool;

/* Where blocks come from. */
typedef struct ra_memory {
    void *(*alloc)(int64_t bytes); /* NULL when there is none */
    void (*free)(void *memory, int64_t bytes);
} ra_memory;

/* memory NULL: host memory. Return NULL when there is no memory. */
ra_pool *ra_pool_create_on(const ra_memory *memory);
ra_pool *ra_pool_create(void);
/* Frees the idle blocks and the pool. Blocks still taken are leaked on purpose: a transport may still write to them. */
void ra_pool_destroy(ra_pool *pool);

/* A block of at least `bytes`, exact size preferred; contents undefined. RA_NOMEM with its sentence. */
ra_status ra_pool_take(ra_pool *pool, int64_t bytes, void **block);
/* The same for work that may still run after the block was given back, in the order of `owner` (a stream): only the same owner
 * gets the block again. Blocks without an owner (NULL) serve anybody. */
ra_status ra_pool_take_for(ra_pool *pool, int64_t bytes, const void *owner, void **block);
void ra_pool_give(ra_pool *pool, void *block);
/* Makes sure that an idle block of so many bytes is there, for whoever takes it next. */
ra_status ra_pool_reserve(ra_pool *pool, int64_t bytes);
/* Frees all idle blocks. */
void ra_pool_trim(ra_pool *pool);

typedef struct ra_pool_counts {
    int64_t in_use, peak, idle; /* bytes; in_use and peak count blocks that are taken */
    int64_t hits, misses;       /* requests served from idle blocks, and not */
} ra_pool_counts;
ra_pool_counts ra_pool_read(const ra_pool *pool);

#endif
