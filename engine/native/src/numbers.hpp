// bfloat16 and float16 as bits, and the conversions every variant shares.
#pragma once

#include <cstdint>
#include <cstring>

namespace tailrace {

struct bf16 {
    uint16_t bits;
};

inline float widen(bf16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}
inline float widen(float x) { return x; }
inline float widen(int8_t x) { return x; }
inline double widen(double x) { return x; }

inline void narrow(float x, bf16 &to) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        to.bits = static_cast<uint16_t>((bits >> 16) | 0x40u);  // NaN stays NaN
    else
        to.bits = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
inline void narrow(float x, float &to) { to = x; }
inline void narrow(double x, double &to) { to = x; }

struct half {
    uint16_t bits;
};

inline float widen(half x) {
    // The exponent of the lowest normal float16 lies 112 above that of float's.
    uint32_t bits = (x.bits & 0x7fffu) << 13;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    wide *= 0x1p112f;
    std::memcpy(&bits, &wide, sizeof bits);
    if ((x.bits & 0x7c00u) == 0x7c00u) bits |= 0x7f800000u;
    bits |= (x.bits & 0x8000u) << 16;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

// Whether float16 holds `x` exactly; then `to` is it.
inline bool narrow_exactly(float x, half &to) {
    const float scaled = x * 0x1p-112f;
    uint32_t bits;
    std::memcpy(&bits, &scaled, sizeof bits);
    to.bits = static_cast<uint16_t>((bits >> 16 & 0x8000u) | ((bits & 0x7fffffffu) >> 13));
    return x == 0 || (x > -65520 && x < 65520 && widen(to) == x);
}

constexpr int64_t round_up(int64_t n, int64_t multiple) {
    return (n + multiple - 1) / multiple * multiple;
}

}  // namespace tailrace
