#include "data.h"

#include "core/dtype.h"
#include "core/normal.h"
#include "core/size.h"

#define CHUNK 256

void data_fill(uint64_t seed, data_tensor tensor, int64_t first, int64_t count, ra_dtype dtype, void *elements) {
    char *at = elements;
    float chunk[CHUNK];
    for (int64_t done = 0; done < count;) {
        int64_t n = ra_min(count - done, CHUNK);
        for (int64_t i = 0; i < n;) {
            uint64_t index = (uint64_t)(first + done + i);
            ra_normal_pair pair = ra_normal_draw(seed, (uint32_t)tensor, index / 2);
            if (index % 2 == 0) chunk[i++] = pair.element[0];
            if (i < n) chunk[i++] = pair.element[1];
        }
        ra_convert(at, dtype, chunk, RA_F32, n);
        at += (size_t)n * ra_dtype_size(dtype);
        done += n;
    }
}
