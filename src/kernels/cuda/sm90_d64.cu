#include "sm90_variant.cuh"

const ra::Variant ra::sm90_d64 = ra::sm90_of<ra::Shape<64, 128, 3, 4>>();
