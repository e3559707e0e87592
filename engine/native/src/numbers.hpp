// bfloat16 as bits, and the conversions every variant shares.
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

constexpr int64_t round_up(int64_t n, int64_t multiple) {
    return (n + multiple - 1) / multiple * multiple;
}

}  // namespace tailrace
