// Layout of a saved sequence: a header, then identities, tokens, features and llama.cpp's states.
//
// Owns the bytes and the refusal of what is not whole, was written by another build or for other
// models. Knows no contexts: what is inside the states is llama.cpp's. The checksum finds damage,
// not malice: a saved sequence is as trusted as a model file.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "llama.h"

namespace dspark {

// What a saved sequence belongs to. Compared as text: the error then shows both.
struct SavedIdentity {
    std::string target;   // file, shape and types of the target and its cache
    std::string drafter;  // the same of the drafter; empty: no drafter state
};

// The small parts, and how large the states are; those stay in the blob.
struct SavedSequence {
    SavedIdentity identity;
    std::vector<llama_token> tokens;  // in the target's cache
    int32_t n_injected = 0;           // tokens in the drafter's cache, or missed by it
    std::vector<float> pending;       // features of the tokens behind those
    size_t n_target_bytes = 0;
    size_t n_drafter_bytes = 0;
};

// Where the states lie in a blob, in bytes from its beginning.
struct SavedOffsets {
    size_t target;
    size_t drafter;
    size_t end;
};

SavedOffsets saved_offsets(const SavedSequence & saved);

// Writes all but the states, which the caller has put to their offsets in `blob`: [end] bytes.
void write_saved(const SavedSequence & saved, uint8_t * blob);

// Throws Error(value) unless the blob is whole and of this build of llama.cpp.
SavedSequence read_saved(std::string_view blob);

}  // namespace dspark
