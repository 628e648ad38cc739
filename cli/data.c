#include "data.h"

#include "core/dtype.h"
#include "core/philox.h"
#include "core/size.h"

#define CHUNK 256

/* The sum of four uniform 16-bit numbers, centred and scaled: near enough to normal, and the same on every machine. */
static float normal(uint32_t a, uint32_t b) {
    int32_t sum = (int32_t)(a & 0xffff) + (int32_t)(a >> 16) + (int32_t)(b & 0xffff) + (int32_t)(b >> 16);
    return (float)(sum - 2 * 65535) * 2.6429e-5f; /* 1 / (65536 / sqrt(3)) */
}

void data_fill(uint64_t seed, data_tensor tensor, int64_t first, int64_t count, ra_dtype dtype, void *elements) {
    char *at = elements;
    float chunk[CHUNK];
    for (int64_t done = 0; done < count;) {
        int64_t n = ra_min(count - done, CHUNK);
        for (int64_t i = 0; i < n;) {
            uint64_t index = (uint64_t)(first + done + i);
            ra_philox draw =
                ra_philox4x32(seed, (uint32_t)(index >> 1), (uint32_t)(index >> 33), (uint32_t)tensor, 0x64617461u);
            if ((index & 1) == 0) chunk[i++] = normal(draw.word[0], draw.word[1]);
            if (i < n) chunk[i++] = normal(draw.word[2], draw.word[3]);
        }
        ra_convert(at, dtype, chunk, RA_F32, n);
        at += (size_t)n * ra_dtype_size(dtype);
        done += n;
    }
}
