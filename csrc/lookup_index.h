// Prompt lookup: drafts by copying what followed the same tokens earlier in the sequence or, where
// that says little, in the replies of a static cache. Works with any target, at no cost. Refuses to
// know models, text, and whether its drafts are used.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "lookup_cache.h"

namespace dspark {

// Lists run over the tokens; those of the cache are empty without one.
struct LookupProposal {
    std::vector<int32_t> tokens;
    int32_t match_len = 0;
    bool is_cached = false;
    std::vector<double> agreement;
    std::vector<double> cache_agreement;
    std::vector<int32_t> cache_count;
};

class LookupIndex {
  public:
    // cache: may be null.
    explicit LookupIndex(std::shared_ptr<const LookupCache> cache);

    size_t size() const { return tokens_.size(); }
    // Throws ErrorKind::value at a negative token, with the sequence as before.
    void extend(const std::vector<int32_t> & tokens);
    LookupProposal propose(int32_t n_max) const;

  private:
    // An n-gram that a token has followed. Its tokens are those in front of `end`: equal keys are
    // told apart there, so that a collision never gives a wrong answer.
    struct Slot {
        uint32_t key = 0;     // hash; the lowest two bits are n - 2
        int32_t end = 0;      // position of the token that followed last; 0: the slot is free
        int32_t n_times = 0;  // how many tokens have followed
    };

    void count_tail();
    void grow();
    size_t slot_of(uint32_t key, const int32_t * ngram_end) const;
    int32_t n_followed(int32_t n, const int32_t * ngram_end) const;
    int32_t find_copy() const;
    int32_t match_len(int32_t copy_from) const;
    double agreement(const int32_t * at) const;

    std::shared_ptr<const LookupCache> cache_;
    std::vector<int32_t> tokens_;
    std::vector<Slot> slots_;  // open addressing, 2^(32 - slot_shift_) of them
    int slot_shift_;
    size_t n_used_ = 0;
};

}  // namespace dspark
