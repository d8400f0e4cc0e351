// What lies at one place of a text that a grammar shapes, and how much of it is refused.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "grammar_rules.h"

namespace dspark {

constexpr int kMany = 1 << 20;  // no count here grows further

// In how many ways each character can come; at most 255.
using CharCounts = std::array<uint8_t, kFarChar + 1>;

CharCounts counts_of(const CharSet & chars);
CharCounts sum(CharCounts a, const CharCounts & b);
CharCounts most(CharCounts a, const CharCounts & b);
CharCounts product(unsigned long long n, CharCounts a);
int peak(const CharCounts & counts);

struct Run {
    int row = 0;        // elements in a row that can be left out
    int ways = 0;       // to go on
    CharCounts same{};  // of that row, elements that can be nothing but the character
};

Run sum(const Run & a, const Run & b);
Run most(const Run & a, const Run & b);
int product(unsigned long long n, int a);

// Throw Error(value), a line that says what is too much, the limit and the way out.
[[noreturn]] void refuse(int n, const std::string & what, int limit, const std::string & way_out);
void check_run(const Run & run);

}  // namespace dspark
