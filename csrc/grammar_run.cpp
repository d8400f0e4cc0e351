#include "grammar_run.h"

#include <algorithm>

#include "errors.h"

namespace dspark {

namespace {

// The matcher keeps a stack for each place where the text may go on, compares them pairwise, and
// tries every token of the vocabulary on each. Seconds for one token, of 49 thousand:
constexpr int kMaxRow = 64;     // ("a"?){100}: 1.5
constexpr int kMaxWays = 1024;  // 1,000 words that begin alike: 1.4; r | r in 40 rules: days
constexpr int kMaxSame = 8;     // ([a-z]?){8}: 3, {12}: 8; (" "?){60}: no end, for long tokens

int at_most_many(int n) { return std::min(n, kMany); }

}  // namespace

CharCounts counts_of(const CharSet & chars) {
    CharCounts counts{};
    for (size_t c = 0; c < counts.size(); ++c) {
        counts[c] = chars[c] ? 1 : 0;
    }
    return counts;
}

CharCounts sum(CharCounts a, const CharCounts & b) {
    for (size_t c = 0; c < a.size(); ++c) {
        a[c] = static_cast<uint8_t>(std::min(255, a[c] + b[c]));
    }
    return a;
}

CharCounts most(CharCounts a, const CharCounts & b) {
    for (size_t c = 0; c < a.size(); ++c) {
        a[c] = std::max(a[c], b[c]);
    }
    return a;
}

CharCounts product(unsigned long long n, CharCounts a) {
    for (uint8_t & count : a) {
        count = static_cast<uint8_t>(std::min(255ULL, std::min(n, 255ULL) * count));
    }
    return a;
}

int peak(const CharCounts & counts) { return *std::max_element(counts.begin(), counts.end()); }

Run sum(const Run & a, const Run & b) {
    return {at_most_many(a.row + b.row), at_most_many(a.ways + b.ways), sum(a.same, b.same)};
}

Run most(const Run & a, const Run & b) {
    return {std::max(a.row, b.row), std::max(a.ways, b.ways), most(a.same, b.same)};
}

int product(unsigned long long n, int a) {
    return static_cast<int>(
        std::min<unsigned long long>(std::min<unsigned long long>(n, kMany) * a, kMany));
}

[[noreturn]] void refuse(int n, const std::string & what, int limit, const std::string & way_out) {
    throw Error(ErrorKind::value, "the grammar has " +
                                      (n < kMany ? std::to_string(n) : "over a million") + what +
                                      "; the limit is " + std::to_string(limit) + ": " + way_out);
}

void check_run(const Run & run) {
    if (run.row > kMaxRow) {
        refuse(run.row, " elements in a row that can all be left out", kMaxRow,
               "repeat something that cannot be empty, as in \"a\"{0,100}");
    }
    if (run.ways > kMaxWays) {
        refuse(
            run.ways, " ways to go on at one place", kMaxWays,
            "let fewer alternatives begin there, as in \"a\" (\"b\" | \"c\") for \"ab\" | \"ac\"");
    }
    if (peak(run.same) > kMaxSame) {
        refuse(peak(run.same), " elements in a row that can be the same character or be left out",
               kMaxSame, "repeat something that cannot be empty, as in [a-z]{0,100}");
    }
}

}  // namespace dspark
