/* Stores that pass the caches by: for what is large, written once and not read again soon. They do not read the lines that they
 * fill, and push no others out. */
#ifndef RA_CORE_STREAM_H
#define RA_CORE_STREAM_H

#include <stdint.h>

/* Copies bytes. Only whole lines pass the caches by: a part of a line may have neighbours that are there. */
void ra_stream(void *to, const void *from, int64_t bytes);
/* The same with zeros. */
void ra_stream_zeros(void *to, int64_t bytes);
/* Before another thread is told of what was streamed. */
void ra_stream_end(void);

#endif
