// Turns one row of logits into one token: the sampler chain and the shared-noise Gumbel draw.
//
// A draw is a function of (row, sampling parameters, position, tokens before it) and of nothing
// else, so drafter and target can draw with the same noise in any order. Knows no contexts, no
// caches and no drafts.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "llama.h"

namespace dspark {

struct SamplingParams {
    float temperature = 0.0f;  // 0: the most likely token, no noise
    int32_t top_k = 0;         // 0: off
    float top_p = 1.0f;        // 1: off
    float min_p = 0.0f;        // 0: off
    float repeat_penalty = 1.0f;
    float frequency_penalty = 0.0f;
    float presence_penalty = 0.0f;
    int32_t penalty_last_n = 64;  // how many of the last tokens the three penalties look at
    int32_t penalty_from = 0;     // position: of those, tokens in front of it do not count
    uint64_t seed = 0;
    std::vector<std::pair<llama_token, float>> logit_bias;
    std::string grammar;      // GBNF, root rule "root"; empty: none
    int32_t n_logprobs = -1;  // -1: none; n: the emitted token's and those of the n likeliest

    void check(int32_t n_vocab) const;  // throws Error(value)
};

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

class Sampler {
  public:
    // Throws Error(value) when a parameter is out of range or the grammar does not parse.
    Sampler(const SamplingParams & params, const llama_vocab * vocab, int32_t n_vocab);

    const SamplingParams & params() const { return params_; }
    bool plain_greedy() const;  // argmax of the raw row: no noise, penalty, bias

    // Draws the token at `position`. `before`: all tokens in front of it. Penalties and biases are
    // applied to the row in place. A drafter's draw ignores the grammar.
    Draw draw(LogitRow row, int32_t position, const std::vector<llama_token> & before,
              bool with_grammar);

    // Moves the grammar; only for tokens that are emitted.
    void accept(llama_token token);

  private:
    void apply_penalties(LogitRow row, const std::vector<llama_token> & before) const;
    void apply_logit_bias(LogitRow row) const;
    void apply_grammar(LogitRow row);
    bool grammar_allows(llama_token token);
    float truncation_threshold(LogitRow row, float max_logit);
    Draw gumbel_argmax(LogitRow row, int32_t position);

    struct SamplerDeleter {
        void operator()(llama_sampler * sampler) const { llama_sampler_free(sampler); }
    };

    SamplingParams params_;
    std::unique_ptr<llama_sampler, SamplerDeleter> grammar_;
    std::vector<llama_token_data> grammar_row_;  // scratch
    std::vector<float> scratch_;
};

}  // namespace dspark
