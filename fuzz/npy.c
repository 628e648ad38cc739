/* Any bytes as an .npy file: refused, or an array that lies within the file; and what is accepted can be written again. */
#include <stdlib.h>
#include <string.h>

#include "io/array.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    ra_array array, again;
    if (ra_npy_parse(data, (int64_t)size, &array) != RA_OK) {
        if (ra_last_error()[0] == '\0') abort();
        return 0;
    }
    if (array.offset < 10 || array.bytes < 0 || array.offset + array.bytes != (int64_t)size || array.ndim > RA_ARRAY_MAX_DIMS)
        abort();
    char header[RA_NPY_HEADER_MAX];
    ra_array copy = array;
    if (ra_npy_header(&copy, header) != RA_OK) abort();
    char *file = calloc(1, (size_t)(copy.offset + copy.bytes));
    if (!file) return 0;
    memcpy(file, header, (size_t)copy.offset);
    if (ra_npy_parse(file, copy.offset + copy.bytes, &again) != RA_OK || memcmp(&again, &copy, sizeof again) != 0) abort();
    free(file);
    return 0;
}
