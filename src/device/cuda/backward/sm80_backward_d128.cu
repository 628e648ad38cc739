#include "device/cuda/backward/sm80_variant.cuh"

namespace ra {
const Variant backward_keys_d128 = keys_of<PlainBackward<128, 128, 32>>();
const Variant backward_queries_d128 = queries_of<PlainBackward<128, 128, 64>>();
} // namespace ra
