#include "sm90_variant.cuh"

namespace ra {
const Variant sm90_d64_rows256 = sm90_of<Shape<64, 64, 4, 8>>({0.955f, 150});
} // namespace ra
