// What each token of a draft has to be believed: its features, the weights that they are given by
// kind of token and slot, and how those learn. Refuses to know where tokens come from, what
// anything costs, and what a model starts from.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace dspark {

constexpr int kKinds = 3;  // drafted, copied, cached: KINDS in dspark_edge/signals.py
// Features of each kind, in the order of their names there.
constexpr std::array<size_t, kKinds> kFeatures = {8, 10, 10};
constexpr size_t kMostFeatures = 10;

// How a draft compares with the other proposer's: dspark_edge/_core.pyi.
struct Comparison {
    int64_t n_same = 0;
    std::vector<double> logits;
};

// What a proposer says of its draft: DraftSignals in dspark_edge/signals.py. A list that is not
// known is absent; NaN in confidence or certainty is a value that is not known.
struct DraftSignals {
    size_t n_tokens = 0;
    std::optional<std::vector<double>> confidence, certainty, cache_agreement, cache_count;
    int64_t match_len = 0;
    bool is_cached = false;
    std::optional<double> recent, recent_copies;
    Comparison rival;

    int kind() const { return match_len > 0 ? 1 + is_cached : 0; }
};

// One token's, or the weights of them; 0 behind the last one of its kind.
using FeatureRow = std::array<double, kMostFeatures>;

// How weights and recent acceptance are learnt: SurvivalNumbers in dspark_edge/_core.pyi.
struct Learning {
    double precision_min;
    double recent_start;
    double recent_smoothing;
};

class SurvivalModel {
  public:
    using Matrix = std::vector<std::vector<double>>;  // [n_slots][features of all kinds]
    using Counts = std::vector<std::pair<int64_t, int64_t>>;

    // Throws ErrorKind::value, as all below: a shape that does not fit.
    SurvivalModel(const Matrix & weights, const Matrix & precision, const Learning & learning);

    size_t n_slots() const { return counts_.size(); }
    const Counts & counts() const { return counts_; }
    const Counts & lookup_counts() const { return lookup_counts_; }
    Matrix weights() const { return joined(weights_); }
    Matrix precision() const { return joined(precision_); }
    void set_row(size_t slot, const std::vector<double> & weights,
                 const std::vector<double> & precision);

    std::vector<FeatureRow> features(const DraftSignals & signals) const;
    std::vector<double> survival(const DraftSignals & signals, double floor) const;
    // Of a draft's tokens with those of the other proposer, whose draft is believed as if alone.
    Comparison against(const std::vector<int64_t> & mine, const std::vector<int64_t> & theirs,
                       DraftSignals rival) const;
    void observe(const DraftSignals & signals, int64_t n_correct, int64_t n_seen);

  private:
    using Rows = std::array<std::vector<FeatureRow>, kKinds>;  // a pass over slots reads on

    void check_length(const DraftSignals & signals) const;
    void learn(int kind, size_t slot, const FeatureRow & x, bool right);
    static void split(const std::vector<double> & row, size_t slot, Rows & rows);
    Matrix joined(const Rows & rows) const;

    Rows weights_;
    Rows precision_;
    Counts counts_;
    Counts lookup_counts_;
    Learning learning_;
    double recent_;  // of all sequences
};

}  // namespace dspark
