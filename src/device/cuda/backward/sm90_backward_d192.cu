#include "device/cuda/backward/sm90_variant.cuh"

namespace ra {
const BackVariant sm90_backward_d192[2] = {back_variant<WideBackShape<192, false>>(), back_variant<WideBackShape<192, true>>()};
}
