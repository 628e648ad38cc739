#include "device/cuda/backward/sm90_variant.cuh"

namespace ra {
const BackVariant sm90_backward_d256[2] = {back_variant<WideBackShape<256, false>>(), back_variant<WideBackShape<256, true>>()};
}
