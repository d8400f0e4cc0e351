// A row of logits: its likeliest columns, log-probabilities, and edges of what truncation keeps.
//
// Owns the passes over a whole vocabulary that every draw makes. Knows no noise and no parameters.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "llama.h"

namespace dspark {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();
constexpr int kBlock = 256;  // columns that are looked at together

// One row of logits. `ids` and `index_of` are null when column i is token i; for a reduced draft
// vocabulary ids[i] is the token of column i, and index_of[token] its column or -1.
struct LogitRow {
    float * logits;
    int32_t n;
    const llama_token * ids = nullptr;
    const int32_t * index_of = nullptr;

    llama_token token(int32_t i) const { return ids ? ids[i] : i; }
};

struct Draw {
    int32_t index = -1;      // column of the winner; -1: no token is allowed
    llama_token token = -1;  // -1: no token is allowed
    float margin = 0.0f;     // winner's score minus the runner-up's, in units of logits
};

// The two best columns by logit; ties go to the lower column, as in ggml's argmax. -1: none.
struct TopTwo {
    int32_t first = -1;
    int32_t second = -1;
};

TopTwo top_two(const float * logits, int32_t n);

float block_max(const float * values, int n);

struct TokenLogprob {
    llama_token token;
    float logprob;
};

// Log-probabilities of the target's own distribution, before the sampler chain: first the given
// token's, then those of the n likeliest tokens.
std::vector<TokenLogprob> logprobs(const float * logits, int32_t n_vocab, llama_token token,
                                   int32_t n);

// The likeliest token of a row as it stands; ties go to the lower column, as in ggml.
Draw argmax(LogitRow row);

// Logits of a row sorted into buckets by distance from the maximum, to find the k-th largest value
// or the edge of a nucleus without sorting the row.
class LogitBuckets {
  public:
    LogitBuckets(LogitRow row, float max_logit);

    // The k-th largest logit, or -inf when there are fewer than k.
    float kth_largest(int32_t k, std::vector<float> & scratch) const;

    // The lowest logit of the smallest set of likeliest tokens at or above `floor` whose
    // probability, among those, reaches p.
    float nucleus_edge(float p, float floor, std::vector<float> & scratch) const;

  private:
    static constexpr int kBuckets = 512;
    static constexpr float kPerUnit = 16.0f;  // buckets per unit of logit; the last one is open

    int bucket(float z) const;
    void collect(int b, std::vector<float> & scratch) const;

    LogitRow row_;
    float max_;
    int32_t count_[kBuckets];
};

}  // namespace dspark
