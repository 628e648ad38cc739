/* The one way to memory: the caller's allocator, or aligned malloc. Sizes are remembered by whoever allocates. */
#ifndef RA_CORE_ALLOC_H
#define RA_CORE_ALLOC_H

#include <stddef.h>
#include <stdint.h>

#define RA_ALIGN 64

/* At least 64-byte aligned; NULL when there is none (no sentence recorded). bytes 0 gives a unique pointer too. */
void *ra_alloc(int64_t bytes);
/* The same, zeroed. */
void *ra_calloc(int64_t bytes);
/* Safe for NULL; bytes as given to ra_alloc. */
void ra_free(void *ptr, int64_t bytes);

#endif
