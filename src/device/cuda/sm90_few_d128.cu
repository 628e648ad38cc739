#include "forward_few.cuh"

namespace ra {
const FewVariant sm90_few_d128[] = {few_of<FewShape<128, 1, 32, 3, 4>>(), few_of<FewShape<128, 2, 32, 3>>(),
                                    few_of<FewShape<128, 4, 64, 3, 4, 2>>()};
} // namespace ra
