// The static lookup cache: which tokens followed which in replies known beforehand. Immutable, so
// all sequences share one. Refuses to know text, models, and what is proposed from it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace dspark {

constexpr int32_t kMinContext = 3;  // tokens
constexpr int32_t kMaxContext = 6;

// One place of a reply.
struct CacheEntry {
    int32_t
        before[kMaxContext];  // the tokens in front of it, last one first; -1: the reply's start
    int32_t token;
};

// What followed a context: the entries for its longest known end.
struct Followers {
    int32_t match_len = 0;  // tokens of that end, 3 to 6; 0 where nothing is known
    int32_t n_entries = 0;  // of those that count, at most 128
    const CacheEntry * entries = nullptr;

    int32_t n_times(int32_t token) const;
    // The token of most entries, of equals the smallest; call it only where something is known.
    int32_t likeliest() const;
    // Log odds of a token, half a count added to both sides, within -4..4; 0 where nothing is
    // known.
    double agreement(int32_t token) const;
};

class LookupCache {
  public:
    // tokens: of all replies, one after the other; lengths: of each. Throws ErrorKind::value.
    LookupCache(const int32_t * tokens, size_t n_tokens, const int32_t * lengths, size_t n_replies);

    // For the context of n_before tokens that ends in front of `end`; none may be negative.
    Followers followers(const int32_t * end, size_t n_before) const;
    size_t n_tokens() const { return n_tokens_; }
    // -1 when it is empty.
    int32_t max_token() const { return max_token_; }

  private:
    size_t bucket(const int32_t * end) const;
    void count_buckets(const int32_t * tokens, const int32_t * lengths, size_t n_replies);
    void place_entries(const int32_t * tokens, const int32_t * lengths, size_t n_replies);

    size_t n_tokens_;
    int32_t max_token_ = -1;
    int bucket_shift_ = 0;
    // Entries with the same last three tokens share a bucket and lie side by side in it: of a
    // look-up behind a model pass, which leaves nothing in the processor's caches, each access to
    // another place costs, and comparisons do not.
    std::vector<uint32_t> starts_;     // [n_buckets + 1]: of each bucket, in entries_
    std::vector<CacheEntry> entries_;  // within a bucket by `before`, then as in the replies
};

}  // namespace dspark
