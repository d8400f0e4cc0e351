// Gumbel noise that depends on seed, position and token only. Knows no logits.
#pragma once

#include <cstdint>
#include <cstring>

#include "llama.h"

namespace dspark {

// Standard Gumbel noise keyed by (seed, position, token): a counter, not a stream.
class Noise {
  public:
    Noise(uint64_t seed, int32_t position);
    uint32_t bits(uint32_t token) const {
        uint32_t x = token * 0x9E3779B1u + key0_;
        x ^= x >> 16;
        x *= 0x21F0AAADu;
        x ^= x >> 15;
        x += key1_;
        x *= 0x735A2D97u;
        x ^= x >> 15;
        x *= 0x85EBCA6Bu;
        x ^= x >> 16;
        return x;
    }
    double gumbel(llama_token token) const;

  private:
    uint32_t key0_;
    uint32_t key1_;
};

// An upper bound of the Gumbel noise that `bits` stands for, cheap enough for every token.
// With w = 1 - u: -ln(u) >= w, so noise <= -ln(w); and log2(w) is bounded from below by the chord
// that a float's exponent and mantissa form.
inline float gumbel_bound(uint32_t bits) {
    const float half_w = static_cast<float>(static_cast<int32_t>(~bits >> 1));
    int32_t as_int;
    std::memcpy(&as_int, &half_w, sizeof as_int);
    const float log2_below = static_cast<float>(as_int) * (1.0f / 8388608.0f) - 127.0f;
    constexpr float kLn2 = 0.69314718f;
    return kLn2 * (31.0f - log2_below);
}

}  // namespace dspark
