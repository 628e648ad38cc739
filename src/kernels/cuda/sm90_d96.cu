#include "sm90_variant.cuh"

const ra::Variant ra::sm90_d96 = ra::sm90_of<ra::Shape<96, 128, 2, 2>>();
