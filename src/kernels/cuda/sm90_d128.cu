#include "sm90_variant.cuh"

const ra::Variant ra::sm90_d128 = ra::sm90_of<ra::Shape<128, 128, 2, 2>>();
