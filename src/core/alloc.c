#include "core/alloc.h"

#include <stdlib.h>
#include <string.h>

#include "ringattn.h"

/* Whole cache lines: two blocks never share one. */
static void *default_alloc(void *ctx, size_t bytes, size_t align) {
    (void)ctx;
    return aligned_alloc(align, (bytes + align - 1) / align * align);
}

static void default_free(void *ctx, void *ptr, size_t bytes) {
    (void)ctx;
    (void)bytes;
    free(ptr);
}

static const ra_allocator default_allocator = {default_alloc, default_free, NULL};
static ra_allocator allocator = {default_alloc, default_free, NULL};

/* What the allocator is asked for; an empty block has an address too. */
static size_t asked_bytes(int64_t bytes) { return bytes ? (size_t)bytes : 1; }

void *ra_alloc(int64_t bytes) {
    if (bytes < 0 || (uint64_t)bytes > PTRDIFF_MAX - RA_ALIGN) return NULL;
    return allocator.alloc(allocator.ctx, asked_bytes(bytes), RA_ALIGN);
}

void *ra_calloc(int64_t bytes) {
    void *ptr = ra_alloc(bytes);
    if (ptr) memset(ptr, 0, asked_bytes(bytes));
    return ptr;
}

void ra_free(void *ptr, int64_t bytes) {
    if (ptr) allocator.free(allocator.ctx, ptr, asked_bytes(bytes));
}

void ra_set_allocator(const ra_allocator *replacement) {
    bool whole = replacement && replacement->alloc && replacement->free;
    allocator = whole ? *replacement : default_allocator;
}
