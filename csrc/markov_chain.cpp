#include "markov_chain.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace dspark {

namespace {

constexpr int64_t kMaxWeights = 1 << 20;  // of W2: 4 MiB, which caches hold; 12 MiB lost
constexpr int64_t kTile = 512;            // columns whose sums stay in the fastest cache

int64_t n_padded(int64_t n_columns) { return (n_columns + kTile - 1) / kTile * kTile; }

}  // namespace

bool MarkovChain::is_small_enough(const DrafterFile & file) {
    return file.markov_w2.n_columns * file.markov_w2.n_rows <= kMaxWeights;
}

MarkovChain::MarkovChain(const DrafterFile & file)
    : file_(file),
      w2_(file.markov_w2.n_columns * n_padded(file.markov_w2.n_rows)),
      w_conf_(file.conf_proj.n_columns),
      embedding_(file.markov_w1.n_columns) {
    const int64_t rank = file.markov_w2.n_columns;
    std::vector<float> row(rank);
    for (int64_t v = 0; v < file.markov_w2.n_rows; ++v) {
        file.markov_w2.read_row(v, row.data());
        float * tile = w2_.data() + v / kTile * kTile * rank;
        for (int64_t r = 0; r < rank; ++r) {
            tile[r * kTile + v % kTile] = row[r] * file.markov_w2_scale;
        }
    }
    if (file.has_confidence) {
        file.conf_proj.read_row(0, w_conf_.data());
        conf_bias_ = file.conf_bias;
    }
}

void MarkovChain::set_previous(llama_token token) {
    file_.markov_w1.read_row(token, embedding_.data());
}

// A tile's sums stay in registers while its weights are read once, in their order in memory.
// Compilers vectorise this as it stands: nothing is reordered within a sum.
void MarkovChain::add_bias(LogitRow row) const {
    const float * weights = w2_.data();
    for (int64_t begin = 0; begin < row.n; begin += kTile) {
        float sums[kTile] = {};
        for (const float factor : embedding_) {
            for (int64_t i = 0; i < kTile; ++i) {
                sums[i] += factor * weights[i];
            }
            weights += kTile;
        }
        const int64_t size = std::min(kTile, row.n - begin);
        for (int64_t i = 0; i < size; ++i) {
            row.logits[begin + i] += sums[i];
        }
    }
}

float MarkovChain::confidence(const float * hidden) const {
    const auto n_hidden = static_cast<std::ptrdiff_t>(w_conf_.size() - embedding_.size());
    const auto split = w_conf_.begin() + n_hidden;
    float logit = std::inner_product(w_conf_.begin(), split, hidden, conf_bias_);
    logit = std::inner_product(split, w_conf_.end(), embedding_.begin(), logit);
    return 1.0f / (1.0f + std::exp(-logit));
}

}  // namespace dspark
