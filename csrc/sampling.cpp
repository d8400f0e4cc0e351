#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "errors.h"
#include "grammar_check.h"

namespace dspark {

namespace {

constexpr float kMinTemperature = 1e-3f;  // below it noise cannot matter: the same as 0

bool finite_in(float x, float low, float high) { return std::isfinite(x) && x >= low && x <= high; }

[[noreturn]] void bad_value(const std::string & name, const std::string & value,
                            const std::string & limit) {
    throw Error(ErrorKind::value, name + " is " + value + "; it must be " + limit);
}

[[noreturn]] void bad_value(const std::string & name, float value, const std::string & limit) {
    char text[32];
    std::snprintf(text, sizeof text, "%g", static_cast<double>(value));
    bad_value(name, text, limit);
}

[[noreturn]] void bad_value(const std::string & name, int32_t value, const std::string & limit) {
    bad_value(name, std::to_string(value), limit);
}

}  // namespace

void SamplingParams::check(int32_t n_vocab) const {
    if (!finite_in(temperature, 0.0f, 100.0f)) bad_value("temperature", temperature, "0 to 100");
    if (top_k < 0) bad_value("top_k", top_k, "0 (off) or more");
    if (!(top_p > 0.0f && top_p <= 1.0f)) bad_value("top_p", top_p, "above 0, at most 1");
    if (!finite_in(min_p, 0.0f, 1.0f)) bad_value("min_p", min_p, "0 to 1");
    if (!(repeat_penalty > 0.0f && repeat_penalty <= 100.0f)) {
        bad_value("repeat_penalty", repeat_penalty, "above 0, at most 100");
    }
    if (!finite_in(frequency_penalty, -100.0f, 100.0f)) {
        bad_value("frequency_penalty", frequency_penalty, "-100 to 100");
    }
    if (!finite_in(presence_penalty, -100.0f, 100.0f)) {
        bad_value("presence_penalty", presence_penalty, "-100 to 100");
    }
    if (penalty_last_n < 0) {
        bad_value("penalty_last_n", penalty_last_n, "0 or more");
    }
    if (penalty_from < 0) {
        bad_value("penalty_from", penalty_from, "0 or more");
    }
    if (n_logprobs < -1 || n_logprobs > n_vocab) {
        bad_value("logprobs", n_logprobs, "0 to the vocabulary size, " + std::to_string(n_vocab));
    }
    for (const auto & [token, bias] : logit_bias) {
        if (token < 0 || token >= n_vocab) {
            bad_value("logit_bias token", token, "0 to " + std::to_string(n_vocab - 1));
        }
        if (std::isnan(bias) || bias == -kNegInf) {
            bad_value("logit_bias of token " + std::to_string(token), bias, "finite or -inf");
        }
    }
}

Sampler::Sampler(const SamplingParams & params, const llama_vocab * vocab, int32_t n_vocab)
    : params_(params) {
    params.check(n_vocab);
    if (params_.temperature < kMinTemperature) {
        params_.temperature = 0.0f;
    }
    if (!params.grammar.empty()) {
        check_grammar(params.grammar);
        // llama.cpp prints the parse error to its log and returns null.
        grammar_.reset(llama_sampler_init_grammar(vocab, params.grammar.c_str(), "root"));
        if (!grammar_) {
            throw Error(ErrorKind::value,
                        "the grammar does not parse, or has no rule named root; see GBNF's syntax");
        }
        grammar_row_.reserve(n_vocab);
    }
}

bool Sampler::plain_greedy() const {
    const bool penalties = params_.repeat_penalty != 1.0f || params_.frequency_penalty != 0.0f ||
                           params_.presence_penalty != 0.0f;
    return params_.temperature <= 0.0f && !penalties && params_.logit_bias.empty();
}

Draw Sampler::draw(LogitRow row, int32_t position, const std::vector<llama_token> & before,
                   bool with_grammar) {
    if (with_grammar && is_grammar_lost_) {
        return {};  // llama.cpp would assert
    }
    apply_penalties(row, before);
    apply_logit_bias(row);
    const bool noisy = params_.temperature > 0.0f;
    Draw winner = noisy ? gumbel_argmax(row, position) : argmax(row);
    if (with_grammar && grammar_ && winner.index >= 0 && !grammar_allows(winner.token)) {
        // A winner that the grammar allows stands, as in llama.cpp's own sampling; only here the
        // whole row has to be filtered. Same noise, so still one draw.
        apply_grammar(row);
        winner = noisy ? gumbel_argmax(row, position) : argmax(row);
    }
    return winner;
}

void Sampler::accept(llama_token token) {
    if (grammar_) {
        is_grammar_lost_ = true;
        llama_sampler_accept(grammar_.get(), token);
        is_grammar_lost_ = false;
    }
}

void Sampler::apply_penalties(LogitRow row, const std::vector<llama_token> & before) const {
    if (params_.repeat_penalty == 1.0f && params_.frequency_penalty == 0.0f &&
        params_.presence_penalty == 0.0f) {
        return;
    }
    const size_t n_skipped = std::min(before.size(), static_cast<size_t>(params_.penalty_from));
    const size_t n =
        std::min(before.size() - n_skipped, static_cast<size_t>(params_.penalty_last_n));
    std::vector<llama_token> window(before.end() - n, before.end());
    std::sort(window.begin(), window.end());
    for (size_t i = 0; i < window.size();) {
        size_t end = i;
        while (end < window.size() && window[end] == window[i]) {
            ++end;
        }
        const int32_t column = row.index_of ? row.index_of[window[i]] : window[i];
        if (column >= 0) {
            float & z = row.logits[column];
            z = z <= 0.0f ? z * params_.repeat_penalty : z / params_.repeat_penalty;
            z -= static_cast<float>(end - i) * params_.frequency_penalty + params_.presence_penalty;
        }
        i = end;
    }
}

void Sampler::apply_logit_bias(LogitRow row) const {
    for (const auto & [token, bias] : params_.logit_bias) {
        const int32_t column = row.index_of ? row.index_of[token] : token;
        if (column >= 0) {
            row.logits[column] += bias;
        }
    }
}

bool Sampler::grammar_allows(llama_token token) {
    llama_token_data one{token, 0.0f, 0.0f};
    llama_token_data_array candidates{&one, 1, -1, false};
    llama_sampler_apply(grammar_.get(), &candidates);
    return one.logit != kNegInf;
}

void Sampler::apply_grammar(LogitRow row) {
    grammar_row_.clear();
    for (int32_t i = 0; i < row.n; ++i) {
        if (row.logits[i] != kNegInf) {
            grammar_row_.push_back({i, row.logits[i], 0.0f});
        }
    }
    llama_token_data_array candidates{grammar_row_.data(), grammar_row_.size(), -1, false};
    llama_sampler_apply(grammar_.get(), &candidates);
    for (const llama_token_data & candidate : grammar_row_) {
        row.logits[candidate.id] = candidate.logit;
    }
}

float Sampler::truncation_threshold(LogitRow row, float max_logit) {
    float threshold = kNegInf;
    const bool by_rank = params_.top_k > 0 && params_.top_k < row.n;
    if (by_rank || params_.top_p < 1.0f) {
        const LogitBuckets buckets(row, max_logit);
        if (by_rank) {
            threshold = buckets.kth_largest(params_.top_k, scratch_);
        }
        if (params_.top_p < 1.0f) {
            threshold = buckets.nucleus_edge(params_.top_p, threshold, scratch_);
        }
    }
    if (params_.min_p > 0.0f) {
        threshold = std::max(threshold, max_logit + std::log(params_.min_p));
    }
    return threshold;
}

Draw Sampler::gumbel_argmax(LogitRow row, int32_t position) {
    const TopTwo top = top_two(row.logits, row.n);
    if (top.first < 0 || !std::isfinite(row.logits[top.first])) {
        return {};
    }
    const Noise noise(params_.seed, position);
    const float threshold = truncation_threshold(row, row.logits[top.first]);
    const float inv_temperature = 1.0f / params_.temperature;
    // Bounds are computed in single precision: the slack covers their rounding.
    const double slack = 1e-3 + 1e-6 * std::abs(row.logits[top.first] * inv_temperature);

    int32_t winner = -1;
    double best = kNegInf;
    double second = kNegInf;
    const auto consider = [&](int32_t i) {
        if (row.logits[i] < threshold) {
            return;
        }
        const double score =
            static_cast<double>(row.logits[i]) * inv_temperature + noise.gumbel(row.token(i));
        if (score > best || (score == best && i < winner)) {
            second = best;
            best = score;
            winner = i;
        } else if (score > second) {
            second = score;
        }
    };
    // The likeliest two first: their scores make the bound below tight from the start.
    consider(top.first);
    if (top.second >= 0) {
        consider(top.second);
    }

    float bound[kBlock];
    for (int32_t begin = 0; begin < row.n; begin += kBlock) {
        const int32_t n = std::min(kBlock, row.n - begin);
        const float * logits = row.logits + begin;
        if (row.ids) {
            for (int32_t i = 0; i < n; ++i) {
                bound[i] = logits[i] * inv_temperature +
                           gumbel_bound(noise.bits(static_cast<uint32_t>(row.ids[begin + i])));
            }
        } else {
            for (int32_t i = 0; i < n; ++i) {
                bound[i] = logits[i] * inv_temperature +
                           gumbel_bound(noise.bits(static_cast<uint32_t>(begin + i)));
            }
        }
        if (block_max(bound, n) <= second - slack) {
            continue;
        }
        for (int32_t i = 0; i < n; ++i) {
            const int32_t column = begin + i;
            if (bound[i] > second - slack && column != top.first && column != top.second) {
                consider(column);
            }
        }
    }
    double margin = (best - second) * params_.temperature;
    if (second == kNegInf && top.second >= 0) {
        // One token survived the truncation: another one wins only if the edge moves as far as it.
        margin = row.logits[top.first] - row.logits[top.second];
    }
    return {winner, row.token(winner), static_cast<float>(margin)};
}

}  // namespace dspark
