#include "core/stream.h"

#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>

#include "core/size.h"

enum { LINE = 64 };

void ra_stream(void *to, const void *from, int64_t bytes) {
    const int64_t edge = ra_min(bytes, (int64_t)(-(uintptr_t)to % LINE));
    char *at = (char *)to + edge;
    const char *source = (const char *)from + edge;
    memcpy(to, from, (size_t)edge);
    for (bytes -= edge; bytes >= LINE; bytes -= LINE, at += LINE, source += LINE)
        for (int i = 0; i < LINE; i += 16)
            _mm_stream_si128((__m128i *)(void *)(at + i), _mm_loadu_si128((const __m128i *)(const void *)(source + i)));
    memcpy(at, source, (size_t)bytes);
}

void ra_stream_zeros(void *to, int64_t bytes) {
    const int64_t edge = ra_min(bytes, (int64_t)(-(uintptr_t)to % LINE));
    char *at = (char *)to + edge;
    memset(to, 0, (size_t)edge);
    for (bytes -= edge; bytes >= LINE; bytes -= LINE, at += LINE)
        for (int i = 0; i < LINE; i += 16) _mm_stream_si128((__m128i *)(void *)(at + i), _mm_setzero_si128());
    memset(at, 0, (size_t)bytes);
}

void ra_stream_end(void) { _mm_sfence(); }

#else /* other CPUs recognise a run of whole lines by themselves */

void ra_stream(void *to, const void *from, int64_t bytes) { memcpy(to, from, (size_t)bytes); }

void ra_stream_zeros(void *to, int64_t bytes) { memset(to, 0, (size_t)bytes); }

void ra_stream_end(void) {}

#endif
