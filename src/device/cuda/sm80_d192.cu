#include "sm80_variant.cuh"

namespace ra {
const Variant sm80_d192[] = {sm80_of<Plain<192, 1, 64>, true>(), sm80_of<Plain<192, 1, 64>, false>()};
} // namespace ra
