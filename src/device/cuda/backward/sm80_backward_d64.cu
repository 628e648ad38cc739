#include "device/cuda/backward/sm80_variant.cuh"

namespace ra {
const Variant backward_keys_d64 = keys_of<PlainBackward<64, 64, 64>>();
const Variant backward_queries_d64 = queries_of<PlainBackward<64, 64, 64>>();
} // namespace ra
