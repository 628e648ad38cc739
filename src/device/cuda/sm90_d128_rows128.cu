#include "sm90_variant.cuh"

namespace ra {
const Variant sm90_d128_rows128 = sm90_with_few<Shape<128, 128, 2, 2>>({1, 230});
} // namespace ra
