/* Tensor maps: what is not worth inlining. */
#include "tensor_map.cuh"

#include <cuda_runtime.h>

namespace ra {

EncodeTiled find_encoder() {
    static const EncodeTiled encoder = [] {
        void *entry = nullptr;
        cudaDriverEntryPointQueryResult found;
        if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found) != cudaSuccess)
            entry = nullptr;
        return reinterpret_cast<EncodeTiled>(entry);
    }();
    return encoder;
}

MapRows query_rows(const ra_tensor &q, const JobItem &i, int64_t batch) {
    const int64_t group = i.extent[INDEX_GROUP];
    char *data = static_cast<char *>(q.data) + 2 * (batch * q.batch + i.q.row * q.row + i.head_start * group * q.head);
    return {data,
            i.q.count,
            i.q.row_step * q.row,
            {q.head, i.head_step * group * q.head, i.q.row_loop[1] * q.row, i.q.row_loop[0] * q.row, q.batch}};
}

MapRows key_rows(const ra_tensor &t, const JobItem &i, int64_t batch) {
    char *data = static_cast<char *>(t.data) + 2 * (batch * t.batch + i.k.row * t.row);
    return {data, i.k.count, i.k.row_step * t.row, {0, t.head, i.k.row_loop[1] * t.row, i.k.row_loop[0] * t.row, t.batch}};
}

} // namespace ra
