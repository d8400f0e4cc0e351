#include "markov_head.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace dspark {

namespace {

constexpr int32_t kCandidates = 256;

float dot(const std::vector<float> & a, const std::vector<float> & b) {
    return std::inner_product(a.begin(), a.end(), b.begin(), 0.0f);
}

}  // namespace

MarkovHead::MarkovHead(const DrafterFile & file)
    : file_(file), difference_(file.markov_w1.n_columns), row_(file.markov_w1.n_columns) {
    if (file.has_confidence) {
        const int64_t rank = file.markov_w1.n_columns;
        std::vector<float> all(file.conf_proj.n_columns);
        file.conf_proj.read_row(0, all.data());
        // llama.cpp concatenates [hidden state, Markov embedding]: the last `rank` are ours.
        w_conf_.assign(all.end() - rank, all.end());
    }
}

void MarkovHead::read_difference(llama_token drawn, llama_token assumed) {
    file_.markov_w1.read_row(drawn, difference_.data());
    file_.markov_w1.read_row(assumed, row_.data());
    for (size_t i = 0; i < difference_.size(); ++i) {
        difference_[i] -= row_[i];
    }
}

void MarkovHead::correct(LogitRow row, llama_token drawn, llama_token assumed) {
    read_difference(drawn, assumed);
    candidates_.clear();
    for (int32_t i = 0; i < row.n; ++i) {
        if (row.logits[i] != -std::numeric_limits<float>::infinity()) {
            candidates_.push_back(i);
        }
    }
    if (candidates_.size() > kCandidates) {
        std::nth_element(candidates_.begin(), candidates_.begin() + kCandidates, candidates_.end(),
                         [&](int32_t a, int32_t b) { return row.logits[a] > row.logits[b]; });
        candidates_.resize(kCandidates);
    }
    for (const int32_t i : candidates_) {
        file_.markov_w2.read_row(i, row_.data());
        row.logits[i] += dot(difference_, row_) * file_.markov_w2_scale;
    }
}

float MarkovHead::correct_confidence(float confidence, llama_token drawn, llama_token assumed) {
    read_difference(drawn, assumed);
    const float p = std::clamp(confidence, 1e-6f, 1.0f - 1e-6f);
    const float logit = std::log(p / (1.0f - p)) + dot(w_conf_, difference_);
    return 1.0f / (1.0f + std::exp(-logit));
}

}  // namespace dspark
