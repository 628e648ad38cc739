#include "core/arena.h"

#include <string.h>

#include "core/alloc.h"
#include "core/size.h"

#define CHUNK_BYTES ((int64_t)16 << 10)

struct ra_arena_chunk {
    ra_arena_chunk *next;
    int64_t bytes, used; /* of the whole chunk, this header included */
};

static const int64_t header_bytes = (int64_t)((sizeof(ra_arena_chunk) + 15) & ~(size_t)15);

void *ra_arena_take(ra_arena *arena, int64_t count, int64_t size) {
    int64_t bytes;
    if (arena->failed) return NULL;
    if (!ra_mul(count, size, &bytes) || !ra_add(bytes, 16, &bytes)) {
        arena->failed = true;
        return NULL;
    }
    bytes = ra_round_up(bytes - 16, 16);
    ra_arena_chunk *chunk = arena->chunks;
    if (!chunk || chunk->bytes - chunk->used < bytes) {
        int64_t chunk_bytes = ra_max(CHUNK_BYTES, ra_sat_add(bytes, header_bytes));
        chunk = ra_alloc(chunk_bytes);
        if (!chunk) {
            arena->failed = true;
            return NULL;
        }
        *chunk = (ra_arena_chunk){arena->chunks, chunk_bytes, header_bytes};
        arena->chunks = chunk;
    }
    void *result = (char *)chunk + chunk->used;
    chunk->used += bytes;
    memset(result, 0, (size_t)bytes);
    return result;
}

bool ra_arena_grow(ra_arena *arena, void **items, int64_t count, int64_t *capacity, int64_t size) {
    if (count < *capacity) return true;
    int64_t grown = ra_max(8, *capacity * 2);
    void *bigger = ra_arena_take(arena, grown, size);
    if (!bigger) return false;
    if (count > 0) memcpy(bigger, *items, (size_t)(count * size));
    *items = bigger;
    *capacity = grown;
    return true;
}

void ra_arena_free(ra_arena *arena) {
    while (arena->chunks) {
        ra_arena_chunk *chunk = arena->chunks;
        arena->chunks = chunk->next;
        ra_free(chunk, chunk->bytes);
    }
    arena->failed = false;
}
