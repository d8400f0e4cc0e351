#include "lookup_index.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "errors.h"
#include "ngram_hash.h"

namespace dspark {

namespace {

constexpr int32_t kMinNgram = 2;
constexpr int32_t kMaxNgram = 4;
constexpr int32_t kMaxMatch = 16;
// Draft tokens that any match is worth; a longer one of the sequence itself is followed as far as
// it goes.
constexpr int32_t kShortCopy = 8;
constexpr int kFirstBits = 8;  // of the slots' number

uint32_t key_of(uint64_t hash, int32_t n) {
    return (static_cast<uint32_t>(hash >> 32) & ~3u) | static_cast<uint32_t>(n - kMinNgram);
}

int32_t n_of(uint32_t key) { return static_cast<int32_t>(key & 3u) + kMinNgram; }

// Last token first: the hash of a longer n-gram goes on from that of a shorter one.
uint64_t hash_of(int32_t n, const int32_t * ngram_end) {
    uint64_t hash = 0;
    for (int32_t k = 1; k <= n; ++k) {
        hash = hash_with(hash, ngram_end[-k]);
    }
    return hash;
}

}  // namespace

LookupIndex::LookupIndex(std::shared_ptr<const LookupCache> cache)
    : cache_(std::move(cache)), slots_(size_t{1} << kFirstBits), slot_shift_(32 - kFirstBits) {}

void LookupIndex::extend(const std::vector<int32_t> & tokens) {
    for (const int32_t token : tokens) {
        if (token < 0) {
            throw Error(ErrorKind::value,
                        "token " + std::to_string(token) + " is negative; give 0 or more");
        }
    }
    for (const int32_t token : tokens) {
        // An n-gram enters the index once a token follows it: the tail never finds itself.
        count_tail();
        tokens_.push_back(token);
    }
}

void LookupIndex::count_tail() {
    const auto end = static_cast<int32_t>(tokens_.size());
    const int32_t * ngram_end = tokens_.data() + end;
    uint64_t hash = 0;
    for (int32_t n = 1; n <= std::min(end, kMaxNgram); ++n) {
        hash = hash_with(hash, ngram_end[-n]);
        if (n < kMinNgram) {
            continue;
        }
        const uint32_t key = key_of(hash, n);
        Slot & slot = slots_[slot_of(key, ngram_end)];
        n_used_ += slot.end == 0;
        slot = {key, end, slot.n_times + 1};
        if (n_used_ * 2 > slots_.size()) {
            grow();
        }
    }
}

// Moves slots by their keys alone, in a fraction of a millisecond at 10,000 tokens.
void LookupIndex::grow() {
    const std::vector<Slot> old = std::exchange(slots_, std::vector<Slot>(slots_.size() * 2));
    --slot_shift_;
    const size_t mask = slots_.size() - 1;
    for (const Slot & slot : old) {
        if (slot.end != 0) {
            size_t i = slot.key >> slot_shift_;
            while (slots_[i].end != 0) {
                i = (i + 1) & mask;
            }
            slots_[i] = slot;
        }
    }
}

// The slot of an n-gram, or the free one that it would take.
size_t LookupIndex::slot_of(uint32_t key, const int32_t * ngram_end) const {
    const int32_t n = n_of(key);
    const size_t mask = slots_.size() - 1;
    size_t i = key >> slot_shift_;
    for (; slots_[i].end != 0; i = (i + 1) & mask) {
        const Slot & slot = slots_[i];
        if (slot.key == key &&
            std::equal(ngram_end - n, ngram_end, tokens_.data() + slot.end - n)) {
            break;
        }
    }
    return i;
}

int32_t LookupIndex::n_followed(int32_t n, const int32_t * ngram_end) const {
    return slots_[slot_of(key_of(hash_of(n, ngram_end), n), ngram_end)].n_times;
}

// Position of the token that followed the longest known n-gram last; 0: none is known.
int32_t LookupIndex::find_copy() const {
    const auto end = static_cast<int32_t>(tokens_.size());
    const int32_t * ngram_end = tokens_.data() + end;
    for (int32_t n = std::min(end, kMaxNgram); n >= kMinNgram; --n) {
        const Slot & slot = slots_[slot_of(key_of(hash_of(n, ngram_end), n), ngram_end)];
        if (slot.end != 0) {
            return slot.end;
        }
    }
    return 0;
}

int32_t LookupIndex::match_len(int32_t copy_from) const {
    const int32_t * tail_end = tokens_.data() + tokens_.size();
    const int32_t * copy_end = tokens_.data() + copy_from;
    const int32_t n_most = std::min(copy_from, kMaxMatch);
    int32_t n = 0;
    while (n < n_most && copy_end[-1 - n] == tail_end[-1 - n]) {
        ++n;
    }
    return n;
}

// Log odds that the token at `at` is what follows the two in front of it, as counted so far; half a
// count is added to both sides.
double LookupIndex::agreement(const int32_t * at) const {
    const int32_t n_all = n_followed(2, at);
    // A token's own occurrence at the end of the sequence is in no count: nothing follows.
    const int32_t n_same = std::min(n_followed(3, at + 1), n_all);
    return std::log((n_same + 0.5) / (n_all - n_same + 0.5));
}

LookupProposal LookupIndex::propose(int32_t n_max) const {
    LookupProposal result;
    const int32_t copy_from = find_copy();
    const int32_t own_len = copy_from == 0 ? 0 : match_len(copy_from);
    std::vector<int32_t> text(tokens_.end() - std::min<std::ptrdiff_t>(size(), kMaxContext),
                              tokens_.end());  // the last tokens, and what is proposed
    Followers known;
    const auto look_up = [&] { known = cache_->followers(text.data() + text.size(), text.size()); };
    if (cache_) {
        look_up();
    }
    const bool is_cached = own_len < kMinContext && known.match_len > 0;
    if (n_max < 1 || (own_len == 0 && !is_cached)) {
        return result;
    }
    result.is_cached = is_cached;
    result.match_len = is_cached ? known.match_len : own_len;
    const size_t n_most = std::min(n_max, is_cached ? kShortCopy : std::max(kShortCopy, own_len));
    // Copying past the end repeats the last `period` tokens (LZ77's overlapping copy).
    const size_t period = size() - copy_from;
    for (size_t k = 0; k < n_most; ++k) {
        if (cache_ && k > 0) {
            look_up();
        }
        if (is_cached && known.match_len == 0) {
            break;
        }
        const int32_t token = is_cached ? known.likeliest() : tokens_[copy_from + k % period];
        result.tokens.push_back(token);
        text.push_back(token);
        result.agreement.push_back(agreement(text.data() + text.size() - 1));
        if (cache_) {
            result.cache_agreement.push_back(known.agreement(token));
            result.cache_count.push_back(known.n_entries);
        }
    }
    return result;
}

}  // namespace dspark
