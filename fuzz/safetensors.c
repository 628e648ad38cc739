/* Any bytes as a .safetensors file: refused, or a tensor that lies within the file. */
#include <stdlib.h>

#include "io/array.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const char *const names[] = {"q", "a", "__metadata__", ""};
    for (int i = 0; i < 4; i++) {
        ra_array array;
        ra_status status = ra_safetensors_find(data, (int64_t)size, names[i], &array);
        if (status != RA_OK) {
            if (ra_last_error()[0] == '\0') abort();
            continue;
        }
        int64_t bytes = array.bytes;
        if (array.offset < 8 || bytes < 0 || array.offset + bytes > (int64_t)size || array.ndim > RA_ARRAY_MAX_DIMS) abort();
        if (!ra_array_size(&array) || array.bytes != bytes) abort();
    }
    return 0;
}
