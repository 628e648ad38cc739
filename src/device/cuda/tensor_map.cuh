/* Tensor maps: how TMA finds the rows of an item in the caller's tensor, wherever they lie.
 *
 * A map is 5-D: {columns, rows of the progression, three more}. The three are taken by the instance's numbers that move the
 * tensor's start (segment, residue, head, group, batch entry); two of them share a dimension when one's stride is the other's
 * times its extent. Rows beyond the progression are read as zeros.
 */
#ifndef RA_KERNELS_CUDA_TENSOR_MAP_CUH
#define RA_KERNELS_CUDA_TENSOR_MAP_CUH

#include "tiles_sm90.cuh"

namespace ra {

/* The driver's cuTensorMapEncodeTiled; the library does not link the driver. */
using EncodeTiled = CUresult (*)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *,
                                 const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/* Rows of a tensor as an item walks them; strides in elements. */
struct MapRows {
    void *data;
    int64_t count, step;
    int64_t stride[INDEXES];
};

/* NULL: the driver has none. */
EncodeTiled find_encoder();

/* Where the rows of q or out, and of k or v, lie for the batch entries from `batch` on. */
MapRows query_rows(const ra_tensor &q, const JobItem &i, int64_t batch);
MapRows key_rows(const ra_tensor &t, const JobItem &i, int64_t batch);

/* Can TMA walk these rows? If so *place says how an instance's numbers become coordinates, and dims[3], strides[3] what they
 * are. */
inline bool map_places(const MapRows &rows, const uint32_t (&extent)[INDEXES], TmaPlace *place, int64_t (&dims)[3],
                       int64_t (&strides)[3]) {
    struct Dim {
        int64_t extent, stride;
        int32_t times[INDEXES];
    } dim[INDEXES];
    int count = 0;
    const int64_t limit = (int64_t)1 << 39; /* of a stride in elements of two bytes */
    auto good = [&](int64_t stride) { return stride > 0 && stride % 8 == 0 && stride < limit; };
    if (reinterpret_cast<uintptr_t>(rows.data) % 16 || (rows.count > 1 && !good(rows.step))) return false;
    for (int i = 0; i < INDEXES; i++) {
        if (extent[i] == 1 || rows.stride[i] == 0) continue;
        if (!good(rows.stride[i])) return false;
        dim[count] = {extent[i], rows.stride[i], {}};
        dim[count++].times[i] = 1;
    }
    while (count > 3) {
        int inner = -1, outer = -1;
        for (int i = 0; i < count; i++)
            for (int j = 0; j < count; j++)
                if (dim[j].stride == dim[i].stride * dim[i].extent) inner = i, outer = j;
        if (inner < 0) return false;
        for (int i = 0; i < INDEXES; i++) dim[inner].times[i] += dim[outer].times[i] * (int32_t)dim[inner].extent;
        dim[inner].extent *= dim[outer].extent;
        dim[outer] = dim[--count];
    }
    *place = TmaPlace{};
    for (int c = 0; c < 3; c++) {
        dims[c] = c < count ? dim[c].extent : 1;
        strides[c] = c < count ? dim[c].stride : 8;
        if (dims[c] > INT32_MAX) return false;
        for (int i = 0; i < INDEXES && c < count; i++) place->at[c][i] = dim[c].times[i];
    }
    return true;
}

inline CUresult encode_map(EncodeTiled encode, CUtensorMap *map, ra_dtype dtype, int head_dim, const MapRows &rows,
                           const int64_t (&dims)[3], const int64_t (&strides)[3], int box_rows) {
    cuuint64_t size[5] = {(cuuint64_t)head_dim, (cuuint64_t)rows.count, (cuuint64_t)dims[0], (cuuint64_t)dims[1],
                          (cuuint64_t)dims[2]};
    cuuint64_t stride[4] = {(cuuint64_t)(rows.count > 1 ? rows.step : 8) * 2, (cuuint64_t)strides[0] * 2,
                            (cuuint64_t)strides[1] * 2, (cuuint64_t)strides[2] * 2};
    cuuint32_t box[5] = {64, (cuuint32_t)box_rows, 1, 1, 1}, ones[5] = {1, 1, 1, 1, 1};
    return encode(map, dtype == RA_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 5, rows.data,
                  size, stride, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

} // namespace ra
#endif
