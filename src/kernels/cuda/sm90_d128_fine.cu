#include "sm90_variant.cuh"

namespace ra {
const Variant sm90_d128_fine = sm90_with_few<Shape<128, 64, 3, 3>>({1.03f, 150});
} // namespace ra
