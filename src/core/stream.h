/* Stores that bypass the caches: for what is large, written once and not read again soon. They do not read the lines that they
 * fill, and evict no others. */
#ifndef RA_CORE_STREAM_H
#define RA_CORE_STREAM_H

#include <stdint.h>

/* Copies bytes. Only whole lines bypass the caches: the rest of a partial line may be in them. */
void ra_stream(void *to, const void *from, int64_t bytes);
/* The same with zeros. */
void ra_stream_zeros(void *to, int64_t bytes);
/* To be called before another thread is told of what was streamed. */
void ra_stream_end(void);

#endif
