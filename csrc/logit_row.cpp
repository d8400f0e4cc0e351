#include "logit_row.h"

#include <algorithm>
#include <cmath>
#include <functional>

namespace dspark {

namespace {

constexpr int kLanes = 16;  // independent maxima, so that the compiler can use vector registers

}  // namespace

float block_max(const float * x, int n) {
    float lanes[kLanes];
    for (int j = 0; j < kLanes; ++j) {
        lanes[j] = kNegInf;
    }
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        for (int j = 0; j < kLanes; ++j) {
            lanes[j] = x[i + j] > lanes[j] ? x[i + j] : lanes[j];
        }
    }
    for (; i < n; ++i) {
        lanes[0] = x[i] > lanes[0] ? x[i] : lanes[0];
    }
    float best = lanes[0];
    for (int j = 1; j < kLanes; ++j) {
        best = lanes[j] > best ? lanes[j] : best;
    }
    return best;
}

TopTwo top_two(const float * x, int32_t n) {
    TopTwo top;
    float first = kNegInf;
    float second = kNegInf;
    for (int32_t begin = 0; begin < n; begin += kBlock) {
        const int32_t end = std::min(begin + kBlock, n);
        if (block_max(x + begin, end - begin) <= second) {
            continue;  // nothing in this block can enter
        }
        for (int32_t i = begin; i < end; ++i) {
            if (x[i] > first) {
                second = first;
                top.second = top.first;
                first = x[i];
                top.first = i;
            } else if (x[i] > second) {
                second = x[i];
                top.second = i;
            }
        }
    }
    return top;
}

std::vector<TokenLogprob> logprobs(const float * logits, int32_t n_vocab, llama_token token,
                                   int32_t n) {
    const float max_logit = block_max(logits, n_vocab);
    double sum = 0.0;
    for (int32_t i = 0; i < n_vocab; ++i) {
        sum += std::exp(static_cast<double>(logits[i] - max_logit));
    }
    const double log_sum = max_logit + std::log(sum);

    std::vector<TokenLogprob> result;
    result.push_back({token, static_cast<float>(logits[token] - log_sum)});
    std::vector<llama_token> order(n_vocab);
    for (int32_t i = 0; i < n_vocab; ++i) {
        order[i] = i;
    }
    std::partial_sort(order.begin(), order.begin() + n, order.end(),
                      [&](llama_token a, llama_token b) {
                          return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
                      });
    for (int32_t i = 0; i < n; ++i) {
        result.push_back({order[i], static_cast<float>(logits[order[i]] - log_sum)});
    }
    return result;
}

Draw argmax(LogitRow row) {
    const TopTwo top = top_two(row.logits, row.n);
    if (top.first < 0) {
        return {};
    }
    const float runner_up = top.second < 0 ? kNegInf : row.logits[top.second];
    return {top.first, row.token(top.first), row.logits[top.first] - runner_up};
}

LogitBuckets::LogitBuckets(LogitRow row, float max_logit) : row_(row), max_(max_logit) {
    std::fill(count_, count_ + kBuckets, 0);
    for (int32_t i = 0; i < row.n; ++i) {
        if (row.logits[i] != kNegInf) {
            ++count_[bucket(row.logits[i])];
        }
    }
}

float LogitBuckets::kth_largest(int32_t k, std::vector<float> & scratch) const {
    int32_t above = 0;
    for (int b = 0; b < kBuckets; ++b) {
        if (above + count_[b] < k) {
            above += count_[b];
            continue;
        }
        collect(b, scratch);
        std::nth_element(scratch.begin(), scratch.begin() + (k - above - 1), scratch.end(),
                         std::greater<float>());
        return scratch[k - above - 1];
    }
    return kNegInf;
}

float LogitBuckets::nucleus_edge(float p, float floor, std::vector<float> & scratch) const {
    double mass[kBuckets] = {};
    double total = 0.0;
    for (int32_t i = 0; i < row_.n; ++i) {
        const float z = row_.logits[i];
        if (z >= floor && z != kNegInf) {
            const double e = std::exp(z - max_);
            mass[bucket(z)] += e;
            total += e;
        }
    }
    double above = 0.0;
    for (int b = 0; b < kBuckets; ++b) {
        if (above + mass[b] < p * total) {
            above += mass[b];
            continue;
        }
        collect(b, scratch);
        std::sort(scratch.begin(), scratch.end(), std::greater<float>());
        for (const float z : scratch) {
            above += std::exp(z - max_);
            if (above >= p * total) {
                return std::max(z, floor);
            }
        }
    }
    return floor;
}

int LogitBuckets::bucket(float z) const {
    const float distance = (max_ - z) * kPerUnit;
    return distance < kBuckets - 1 ? static_cast<int>(distance) : kBuckets - 1;
}

void LogitBuckets::collect(int b, std::vector<float> & scratch) const {
    scratch.clear();
    for (int32_t i = 0; i < row_.n; ++i) {
        const float z = row_.logits[i];
        if (z != kNegInf && bucket(z) == b) {
            scratch.push_back(z);
        }
    }
}

}  // namespace dspark
