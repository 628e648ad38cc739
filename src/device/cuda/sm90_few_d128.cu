#include "forward_few.cuh"

namespace ra {
const FewVariant sm90_few_d128[] = {few_of<FewShape<128, 1, 16, 3>>(), few_of<FewShape<128, 2, 32, 3>>(),
                                    few_of<FewShape<128, 4, 32, 6>>()};
} // namespace ra
