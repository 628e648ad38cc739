#include "forward_few.cuh"

namespace ra {
const FewVariant sm90_few_d64[] = {few_of<FewShape<64, 1, 64, 3, 4>>(), few_of<FewShape<64, 2, 64, 3>>(),
                                   few_of<FewShape<64, 4, 64, 6, 4, 2>>()};
} // namespace ra
