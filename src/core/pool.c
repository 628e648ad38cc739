#include "core/pool.h"

#include "core/alloc.h"
#include "core/size.h"
#include "core/status.h"

typedef struct block {
    struct block *next;
    void *data;
    int64_t bytes;
    const void *owner;
} block;

struct ra_pool {
    ra_memory memory;
    block *taken;
    block *idle;  /* latest given first */
    int64_t most; /* bytes taken at once, ever: peak without resets */
    ra_pool_counts counts;
};

ra_pool *ra_pool_create_on(const ra_memory *memory) {
    ra_pool *pool = ra_calloc(sizeof *pool);
    if (pool) pool->memory = memory ? *memory : (ra_memory){ra_alloc, ra_free};
    return pool;
}

ra_pool *ra_pool_create(void) { return ra_pool_create_on(NULL); }

static void free_list(const ra_pool *pool, block **list, bool data_too) {
    while (*list) {
        block *b = *list;
        *list = b->next;
        if (data_too) pool->memory.free(b->data, b->bytes);
        ra_free(b, sizeof *b);
    }
}

void ra_pool_trim(ra_pool *pool) {
    free_list(pool, &pool->idle, true);
    pool->counts.idle = 0;
}

void ra_pool_destroy(ra_pool *pool) {
    if (!pool) return;
    ra_pool_trim(pool);
    free_list(pool, &pool->taken, false);
    ra_free(pool, sizeof *pool);
}

static bool serves(const block *b, const void *owner) { return !b->owner || b->owner == owner; }

/* The smallest idle block that is large enough: forward reuses backward's, once there is one. */
static block **find_idle(ra_pool *pool, int64_t bytes, const void *owner) {
    block **best = NULL;
    for (block **b = &pool->idle; *b; b = &(*b)->next)
        if ((*b)->bytes >= bytes && serves(*b, owner) && (!best || (*b)->bytes < (*best)->bytes)) best = b;
    return best;
}

/* Frees the idle blocks that would serve this owner. */
static void trim_for(ra_pool *pool, const void *owner) {
    block **at = &pool->idle;
    while (*at) {
        block *b = *at;
        if (!serves(b, owner)) {
            at = &b->next;
            continue;
        }
        *at = b->next;
        pool->counts.idle -= b->bytes;
        pool->memory.free(b->data, b->bytes);
        ra_free(b, sizeof *b);
    }
}

static block *new_block(const ra_pool *pool, int64_t bytes) {
    block *b = ra_alloc(sizeof *b);
    if (!b) return NULL;
    *b = (block){.data = pool->memory.alloc(bytes), .bytes = bytes};
    if (b->data) return b;
    ra_free(b, sizeof *b);
    return NULL;
}

ra_status ra_pool_take(ra_pool *pool, int64_t bytes, void **data) { return ra_pool_take_for(pool, bytes, NULL, data); }

ra_status ra_pool_take_for(ra_pool *pool, int64_t bytes, const void *owner, void **data) {
    *data = NULL;
    if (bytes < 0) return ra_fail(RA_INTERNAL, "a workspace of %lld bytes was asked for", (long long)bytes);
    block **found = find_idle(pool, bytes, owner), *b;
    if (found) {
        b = *found;
        *found = b->next;
        pool->counts.idle -= b->bytes;
        pool->counts.hits++;
    } else {
        trim_for(pool, owner); /* idle blocks are too small, and the new one will serve in their place: never hold both */
        b = new_block(pool, bytes);
        if (!b) return ra_fail(RA_NOMEM, "no memory for a workspace of %lld bytes", (long long)bytes);
        pool->counts.misses++;
    }
    b->owner = owner;
    b->next = pool->taken;
    pool->taken = b;
    pool->counts.in_use += b->bytes;
    pool->counts.peak = ra_max(pool->counts.peak, pool->counts.in_use);
    pool->most = ra_max(pool->most, pool->counts.in_use);
    *data = b->data;
    return RA_OK;
}

/* Calls alternate (forward, backward, another plan), so idle blocks are kept: up to twice the most that was ever taken at once.
 * The oldest go first. */
static void drop_oldest(ra_pool *pool) {
    while (pool->counts.idle > 2 * pool->most) {
        block **last = &pool->idle;
        while ((*last)->next) last = &(*last)->next;
        pool->counts.idle -= (*last)->bytes;
        free_list(pool, last, true);
    }
}

void ra_pool_give(ra_pool *pool, void *data) {
    if (!data) return;
    block **found = &pool->taken;
    while (*found && (*found)->data != data) found = &(*found)->next;
    block *b = *found;
    if (!b) return;
    *found = b->next;
    pool->counts.in_use -= b->bytes;
    pool->counts.idle += b->bytes;
    b->next = pool->idle;
    pool->idle = b;
    drop_oldest(pool);
}

ra_status ra_pool_reserve(ra_pool *pool, int64_t bytes) {
    void *data;
    RA_TRY(ra_pool_take(pool, bytes, &data));
    ra_pool_give(pool, data);
    return RA_OK;
}

ra_pool_counts ra_pool_read(const ra_pool *pool) { return pool->counts; }
