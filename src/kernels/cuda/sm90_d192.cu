#include "sm90_variant.cuh"

const ra::Variant ra::sm90_d192 = ra::sm90_of<ra::Shape<192, 96, 2, 2>>();
