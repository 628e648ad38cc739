#include "sm90_variant.cuh"

namespace ra {
const Variant sm90_d64_brief = sm90_of<Shape<64, 64, 4, 8>>();
} // namespace ra
