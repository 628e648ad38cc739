/* exp for float, in arithmetic that compilers vectorise. */
#ifndef RA_DEVICE_CPU_EXP_H
#define RA_DEVICE_CPU_EXP_H

#include <math.h>
#include <stdint.h>
#include <string.h>

/* exp(x) = 2^n * exp(r) with n = round(x / ln 2) and |r| <= ln(2)/2, where exp(r) = 1 + r + r^2 * P(r); P is the minimax
 * polynomial of degree 4, 3.1e-9 off at most. The result is within 1.1 units in the last place on [-87.3, 88.3]; below it is 0,
 * above +inf; NaN stays NaN. */
static inline float ra_exp_f32(float x) {
    const float round = 12582912.0f; /* 1.5 * 2^23: adding it leaves the nearest integer in the low bits */
    const float inside = x < -87.3f ? -87.3f : x > 88.3f ? 88.3f : x;
    const float shifted = inside * 1.44269504f + round;
    const float n = shifted - round;
    float r = inside - n * 0.693145752f; /* ln 2 in two parts: the first has few bits, so that its product is exact */
    r = r - n * 1.42860677e-6f;
    float p = 1.381458403e-3f;
    p = p * r + 8.368723936e-3f;
    p = p * r + 4.166838873e-2f;
    p = p * r + 1.666652057e-1f;
    p = p * r + 4.999999344e-1f;
    p = (p * r) * r + r + 1.0f;
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 127u) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    const float y = p * power;
    return x < -87.3f ? 0.0f : x > 88.3f ? INFINITY : y;
}

#endif
