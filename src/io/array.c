#include "io/array.h"

#include "core/size.h"

bool ra_array_size(ra_array *array) {
    int64_t elements = 1;
    for (int i = 0; i < array->ndim; i++)
        if (array->dims[i] < 0 || !ra_mul(elements, array->dims[i], &elements)) return false;
    return ra_mul(elements, (int64_t)ra_dtype_size(array->dtype), &array->bytes);
}
