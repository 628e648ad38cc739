#include "sm90_variant.cuh"

const ra::Variant ra::sm90_d256 = ra::sm90_of<ra::Shape<256, 80, 2, 2>>();
