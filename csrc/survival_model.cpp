#include "survival_model.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "errors.h"

namespace dspark {

namespace {

constexpr double kConfidenceEdge = 1e-3;  // a head that says 0 or 1 is read as this far from it
constexpr double kMarginMiddle = 1.0;     // logits; speaks neither for nor against
constexpr double kMarginMax = 20.0;
constexpr double kMarginUnit = 2.0;
constexpr int64_t kMatchLenMax = 16;
constexpr double kAgreementMax = 4.0;    // about 27 times one way, never another
constexpr double kCacheCountUnit = 5.0;  // of log1p: about 150 cases
constexpr double kRivalMax = 4.0;        // logits
constexpr double kRecentEdge = 0.02;

constexpr double kForgetting = 0.995;  // of past precision, so that learning never comes to rest
// Of one weight in one step: curvature vanishes where the model is sure and wrong.
constexpr double kStepMax = 0.5;
constexpr double kLogitMax = 12.0;  // keeps every probability inside (0, 1)

double clamped(double x, double low, double high) { return std::min(std::max(x, low), high); }

// Log odds of p, which is kept `edge` away from 0 and 1.
double logit_of(double p, double edge) {
    p = clamped(p, edge, 1.0 - edge);
    return std::log(p / (1.0 - p));
}

double dot(const FeatureRow & weights, const FeatureRow & x) {
    double sum = 0.0;
    for (size_t i = 0; i < x.size(); ++i) {
        sum += weights[i] * x[i];
    }
    return sum;
}

double probability(const FeatureRow & weights, const FeatureRow & x) {
    return 1.0 / (1.0 + std::exp(-clamped(dot(weights, x), -kLogitMax, kLogitMax)));
}

// The features of a draft's tokens, made one by one: few tokens of a long copy are asked for.
class DraftFeatures {
  public:
    // recent: acceptance to assume where the signals know none. Throws where lists differ in
    // length.
    DraftFeatures(const DraftSignals & signals, double recent)
        : signals_(signals), recent_(logit_of(signals.recent.value_or(recent), kRecentEdge)) {
        check(signals.confidence, "confidence");
        check(signals.certainty, "certainty");
        if (signals.match_len > 0) {
            if (signals.cache_count) {
                check(signals.cache_agreement, "cache_agreement");
                check(signals.cache_count, "cache_count");
            }
            const auto len = static_cast<double>(std::min(signals.match_len, kMatchLenMax));
            match_ = std::log1p(len) / std::log1p(static_cast<double>(kMatchLenMax));
            copies_ =
                signals.recent_copies ? logit_of(*signals.recent_copies, kRecentEdge) : recent_;
        }
    }

    FeatureRow row(size_t k) const {
        FeatureRow x{};
        x[0] = 1.0;
        return signals_.match_len > 0 ? of_lookup(k, x) : of_drafter(k, x);
    }

  private:
    FeatureRow of_drafter(size_t k, FeatureRow & x) const {
        const double confidence = value(signals_.confidence, k);
        const double certainty = value(signals_.certainty, k);
        if (!std::isnan(confidence)) {
            x[1] = logit_of(confidence, kConfidenceEdge);
        }
        if (!std::isnan(certainty)) {
            const double margin = clamped(certainty, 0.0, kMarginMax);
            x[2] = std::log1p(margin) - std::log1p(kMarginMiddle);
            x[3] = (margin - kMarginMiddle) / kMarginUnit;
        }
        x[4] = recent_;
        compare(k, &x[5]);
        return x;
    }

    FeatureRow of_lookup(size_t k, FeatureRow & x) const {
        const double agreement = value(signals_.certainty, k);
        x[1] = match_;
        x[2] = std::isnan(agreement) ? 0.0 : clamped(agreement, -kAgreementMax, kAgreementMax);
        x[3] = recent_;
        x[4] = copies_;
        compare(k, &x[5]);
        if (signals_.cache_count) {
            x[8] = (*signals_.cache_agreement)[k];
            x[9] = std::log1p((*signals_.cache_count)[k]) / kCacheCountUnit;
        }
        return x;
    }

    // same, other and rival
    void compare(size_t k, double * x) const {
        const Comparison & rival = signals_.rival;
        if (k < rival.logits.size()) {
            const bool is_same = static_cast<int64_t>(k) < rival.n_same;
            x[is_same ? 0 : 1] = 1.0;
            x[2] = is_same ? rival.logits[k] : -rival.logits[k];
        }
    }

    static double value(const std::optional<std::vector<double>> & values, size_t k) {
        return values ? (*values)[k] : std::nan("");
    }

    void check(const std::optional<std::vector<double>> & values, const char * name) const {
        if (values && values->size() != signals_.n_tokens) {
            throw Error(ErrorKind::value, std::string(name) + " has " +
                                              std::to_string(values->size()) +
                                              " values but the draft has " +
                                              std::to_string(signals_.n_tokens) + " tokens");
        }
    }

    const DraftSignals & signals_;
    double recent_;
    double match_ = 0.0;
    double copies_ = 0.0;
};

}  // namespace

SurvivalModel::SurvivalModel(const Matrix & weights, const Matrix & precision,
                             const Learning & learning)
    : counts_(weights.size()),
      lookup_counts_(weights.size()),
      learning_(learning),
      recent_(learning.recent_start) {
    if (precision.size() != weights.size()) {
        throw Error(ErrorKind::value, "weights have " + std::to_string(weights.size()) +
                                          " slots but precision has " +
                                          std::to_string(precision.size()));
    }
    for (int kind = 0; kind < kKinds; ++kind) {
        weights_[kind].resize(n_slots());
        precision_[kind].resize(n_slots());
    }
    for (size_t slot = 0; slot < n_slots(); ++slot) {
        set_row(slot, weights[slot], precision[slot]);
    }
}

void SurvivalModel::set_row(size_t slot, const std::vector<double> & weights,
                            const std::vector<double> & precision) {
    if (slot >= n_slots()) {
        throw Error(ErrorKind::value, "slot " + std::to_string(slot) + " is not below n_slots " +
                                          std::to_string(n_slots()));
    }
    split(weights, slot, weights_);
    split(precision, slot, precision_);
}

void SurvivalModel::split(const std::vector<double> & row, size_t slot, Rows & rows) {
    const size_t n = std::accumulate(kFeatures.begin(), kFeatures.end(), size_t{0});
    if (row.size() != n) {
        throw Error(ErrorKind::value, "a row has " + std::to_string(row.size()) +
                                          " numbers; give one for each of " + std::to_string(n) +
                                          " features");
    }
    auto from = row.begin();
    for (int kind = 0; kind < kKinds; ++kind) {
        const auto to = from + static_cast<std::ptrdiff_t>(kFeatures[kind]);
        std::copy(from, to, rows[kind][slot].begin());
        from = to;
    }
}

SurvivalModel::Matrix SurvivalModel::joined(const Rows & rows) const {
    Matrix result(n_slots());
    for (size_t slot = 0; slot < n_slots(); ++slot) {
        for (int kind = 0; kind < kKinds; ++kind) {
            const auto from = rows[kind][slot].begin();
            result[slot].insert(result[slot].end(), from, from + kFeatures[kind]);
        }
    }
    return result;
}

void SurvivalModel::check_length(const DraftSignals & signals) const {
    if (signals.n_tokens > n_slots()) {
        throw Error(ErrorKind::value, "draft has " + std::to_string(signals.n_tokens) +
                                          " tokens but n_slots is " + std::to_string(n_slots()));
    }
}

std::vector<FeatureRow> SurvivalModel::features(const DraftSignals & signals) const {
    check_length(signals);
    const DraftFeatures features(signals, recent_);
    std::vector<FeatureRow> rows;
    for (size_t k = 0; k < signals.n_tokens; ++k) {
        rows.push_back(features.row(k));
    }
    return rows;
}

std::vector<double> SurvivalModel::survival(const DraftSignals & signals, double floor) const {
    check_length(signals);
    const DraftFeatures features(signals, recent_);
    const std::vector<FeatureRow> & weights = weights_[signals.kind()];
    std::vector<double> survival;
    survival.reserve(signals.n_tokens);
    double a = 1.0;
    for (size_t k = 0; k < signals.n_tokens; ++k) {
        a *= probability(weights[k], features.row(k));
        survival.push_back(a);
        if (a < floor) {
            break;
        }
    }
    return survival;
}

Comparison SurvivalModel::against(const std::vector<int64_t> & mine,
                                  const std::vector<int64_t> & theirs, DraftSignals rival) const {
    check_length(rival);
    rival.rival = {};
    const DraftFeatures features(rival, recent_);
    const size_t n_both = std::min({mine.size(), theirs.size(), rival.n_tokens});
    const auto differs = std::mismatch(mine.begin(), mine.begin() + n_both, theirs.begin());
    const auto n_same = static_cast<size_t>(differs.first - mine.begin());
    const std::vector<FeatureRow> & weights = weights_[rival.kind()];
    Comparison result;
    result.n_same = static_cast<int64_t>(n_same);
    const size_t n_compared = std::min(n_same + 1, n_both);  // the first that differs as well
    for (size_t k = 0; k < n_compared; ++k) {
        result.logits.push_back(clamped(dot(weights[k], features.row(k)), -kRivalMax, kRivalMax));
    }
    return result;
}

void SurvivalModel::observe(const DraftSignals & signals, int64_t n_correct, int64_t n_seen) {
    const auto n_tokens = static_cast<int64_t>(signals.n_tokens);
    if (n_correct < 0 || n_correct > n_seen || n_seen > n_tokens) {
        throw Error(ErrorKind::value, "n_correct " + std::to_string(n_correct) + " of n_seen " +
                                          std::to_string(n_seen) + " does not fit a draft of " +
                                          std::to_string(n_tokens));
    }
    check_length(signals);
    const int kind = signals.kind();
    const DraftFeatures features(signals, recent_);
    Counts & counts = kind == 0 ? counts_ : lookup_counts_;
    const auto n_right = static_cast<size_t>(n_correct);
    const size_t n_decided = n_right + (n_correct < n_seen);  // the right ones, the first wrong one
    for (size_t slot = 0; slot < n_decided; ++slot) {
        const bool right = slot < n_right;
        learn(kind, slot, features.row(slot), right);
        counts[slot].first += right;
        counts[slot].second += 1;
        recent_ += learning_.recent_smoothing * (right - recent_);
    }
}

// One Newton step with a diagonal, slowly forgotten precision.
void SurvivalModel::learn(int kind, size_t slot, const FeatureRow & x, bool right) {
    FeatureRow & weights = weights_[kind][slot];
    FeatureRow & precision = precision_[kind][slot];
    const double p = probability(weights, x);
    const double error = p - right;
    const double curvature = p * (1.0 - p);
    for (size_t i = 0; i < x.size(); ++i) {
        if (x[i] != 0.0) {  // what was not seen is not forgotten either
            const double kept = std::max(kForgetting * precision[i], learning_.precision_min);
            precision[i] = kept + curvature * x[i] * x[i];
            weights[i] -= clamped(error * x[i] / precision[i], -kStepMax, kStepMax);
        }
    }
}

}  // namespace dspark
