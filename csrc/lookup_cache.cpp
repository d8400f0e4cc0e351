#include "lookup_cache.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "errors.h"
#include "ngram_hash.h"

namespace dspark {

namespace {

constexpr int32_t kMaxEntries = 128;  // that count: more would not change what is likeliest
constexpr double kMaxAgreement = 4.0;
constexpr size_t kEntriesPerBucket = 2;  // at least: an offset is 4 bytes, an entry 28

bool is_before(const CacheEntry & a, const CacheEntry & b, int32_t n) {
    return std::lexicographical_compare(a.before, a.before + n, b.before, b.before + n);
}

// What stands in front of `at`, down to `begin`.
CacheEntry entry_of(const int32_t * begin, const int32_t * at) {
    CacheEntry entry;
    for (int32_t k = 0; k < kMaxContext; ++k) {
        entry.before[k] = at - begin > k ? at[-1 - k] : -1;
    }
    return entry;
}

// Returns the number of entries that the replies make.
size_t check_lengths(const int32_t * lengths, size_t n_replies, size_t n_tokens) {
    size_t sum = 0;
    size_t n_entries = 0;
    for (size_t r = 0; r < n_replies; ++r) {
        if (lengths[r] < 0) {
            throw Error(ErrorKind::value, "reply " + std::to_string(r) + " has length " +
                                              std::to_string(lengths[r]) + "; give 0 or more");
        }
        sum += static_cast<size_t>(lengths[r]);
        n_entries += static_cast<size_t>(std::max(lengths[r] - kMinContext, 0));
    }
    if (sum != n_tokens) {
        throw Error(ErrorKind::value, "the lengths add up to " + std::to_string(sum) +
                                          " tokens but there are " + std::to_string(n_tokens) +
                                          "; give the length of each reply");
    }
    return n_entries;
}

}  // namespace

int32_t Followers::n_times(int32_t token) const {
    return static_cast<int32_t>(
        std::count_if(entries, entries + n_entries,
                      [token](const CacheEntry & entry) { return entry.token == token; }));
}

int32_t Followers::likeliest() const {
    int32_t tokens[kMaxEntries];
    for (int32_t i = 0; i < n_entries; ++i) {
        tokens[i] = entries[i].token;
    }
    std::sort(tokens, tokens + n_entries);
    int32_t most = 0;
    int32_t best = -1;
    for (int32_t i = 0, run = 0; i < n_entries; ++i) {
        run = i > 0 && tokens[i] == tokens[i - 1] ? run + 1 : 1;
        if (run > most) {
            most = run;
            best = tokens[i];
        }
    }
    return best;
}

double Followers::agreement(int32_t token) const {
    const int32_t n_same = n_times(token);
    const double odds = std::log((n_same + 0.5) / (n_entries - n_same + 0.5));
    return std::clamp(odds, -kMaxAgreement, kMaxAgreement);
}

LookupCache::LookupCache(const int32_t * tokens, size_t n_tokens, const int32_t * lengths,
                         size_t n_replies)
    : n_tokens_(n_tokens) {
    const size_t n_entries = check_lengths(lengths, n_replies, n_tokens);
    for (size_t i = 0; i < n_tokens; ++i) {
        if (tokens[i] < 0) {
            throw Error(ErrorKind::value, "token " + std::to_string(i) + " is " +
                                              std::to_string(tokens[i]) + "; give 0 or more");
        }
        max_token_ = std::max(max_token_, tokens[i]);
    }
    int n_bits = 1;
    while ((kEntriesPerBucket << (n_bits + 1)) <= n_entries) {
        ++n_bits;
    }
    bucket_shift_ = 64 - n_bits;
    starts_.resize((size_t{1} << n_bits) + 1);
    entries_.resize(n_entries);
    count_buckets(tokens, lengths, n_replies);
    place_entries(tokens, lengths, n_replies);
    for (size_t b = 0; b + 1 < starts_.size(); ++b) {
        if (starts_[b + 1] - starts_[b] > 1) {
            std::stable_sort(entries_.begin() + starts_[b], entries_.begin() + starts_[b + 1],
                             [](const CacheEntry & x, const CacheEntry & y) {
                                 return is_before(x, y, kMaxContext);
                             });
        }
    }
}

size_t LookupCache::bucket(const int32_t * end) const {
    uint64_t hash = 0;
    for (int32_t k = 1; k <= kMinContext; ++k) {
        hash = hash_with(hash, end[-k]);
    }
    return static_cast<size_t>(hash >> bucket_shift_);
}

void LookupCache::count_buckets(const int32_t * tokens, const int32_t * lengths, size_t n_replies) {
    for (size_t r = 0; r < n_replies; tokens += lengths[r++]) {
        for (int32_t i = kMinContext; i < lengths[r]; ++i) {
            ++starts_[bucket(tokens + i) + 1];
        }
    }
    for (size_t b = 1; b < starts_.size(); ++b) {
        starts_[b] += starts_[b - 1];
    }
}

void LookupCache::place_entries(const int32_t * tokens, const int32_t * lengths, size_t n_replies) {
    std::vector<uint32_t> next = starts_;
    for (size_t r = 0; r < n_replies; tokens += lengths[r++]) {
        for (int32_t i = kMinContext; i < lengths[r]; ++i) {
            CacheEntry & entry = entries_[next[bucket(tokens + i)]++];
            entry = entry_of(tokens, tokens + i);
            entry.token = tokens[i];
        }
    }
}

Followers LookupCache::followers(const int32_t * end, size_t n_before) const {
    Followers found;
    const auto n = static_cast<int32_t>(std::min<size_t>(n_before, kMaxContext));
    if (n < kMinContext) {
        return found;
    }
    const CacheEntry sought = entry_of(end - n, end);
    const size_t b = bucket(end);
    const CacheEntry * first = entries_.data() + starts_[b];
    const CacheEntry * last = entries_.data() + starts_[b + 1];
    for (int32_t n_same = kMinContext; n_same <= n; ++n_same) {
        const auto range = std::equal_range(first, last, sought,
                                            [n_same](const CacheEntry & x, const CacheEntry & y) {
                                                return is_before(x, y, n_same);
                                            });
        first = range.first;
        last = range.second;
        if (first == last) {
            break;
        }
        found.match_len = n_same;
        found.entries = first;
        found.n_entries = static_cast<int32_t>(std::min<std::ptrdiff_t>(last - first, kMaxEntries));
    }
    return found;
}

}  // namespace dspark
