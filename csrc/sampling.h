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
#include "logit_row.h"
#include "noise.h"

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

    // Moves the grammar, for tokens that are emitted. What llama.cpp throws is passed on; nothing
    // is allowed from then on.
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
    bool is_grammar_lost_ = false;               // it threw and has no state left to go on from
    std::vector<llama_token_data> grammar_row_;  // scratch
    std::vector<float> scratch_;
};

}  // namespace dspark
