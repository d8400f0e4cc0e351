#include "noise.h"

#include <cmath>

namespace dspark {

namespace {

uint64_t mix64(uint64_t x) {
    x ^= x >> 30;
    x *= 0xBF58476D1CE4E5B9ull;
    x ^= x >> 27;
    x *= 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

}  // namespace

Noise::Noise(uint64_t seed, int32_t position) {
    const uint64_t key =
        mix64(mix64(seed + 0x9E3779B97F4A7C15ull) +
              static_cast<uint64_t>(static_cast<uint32_t>(position)) * 0xD1B54A32D192ED03ull);
    key0_ = static_cast<uint32_t>(key);
    key1_ = static_cast<uint32_t>(key >> 32);
}

double Noise::gumbel(llama_token token) const {
    const double u = (bits(static_cast<uint32_t>(token)) + 0.5) * 0x1p-32;
    return -std::log(-std::log(u));
}

}  // namespace dspark
