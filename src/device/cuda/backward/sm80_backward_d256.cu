#include "device/cuda/backward/sm80_variant.cuh"

namespace ra {
const Variant backward_keys_d256 = keys_of<PlainBackward<256, 128, 32>>();
const Variant backward_queries_d256 = queries_of<PlainBackward<256, 256, 32>>();
} // namespace ra
