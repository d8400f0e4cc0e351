// The hash of an n-gram, made token by token. Its high bits depend on all of them; take those.
#pragma once

#include <cstdint>

namespace dspark {

inline uint64_t hash_with(uint64_t hash, int32_t token) {
    hash = (hash ^ static_cast<uint32_t>(token)) * 0x9E3779B97F4A7C15ull;
    return hash ^ hash >> 32;
}

}  // namespace dspark
