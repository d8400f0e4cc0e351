// Reads GBNF into rules, as llama.cpp does: parentheses and a second repetition become rules too.
//
// Reads just well enough to count; whether a grammar parses is llama.cpp's to say.
#pragma once

#include <bitset>
#include <cstddef>
#include <string>
#include <vector>

namespace dspark {

// How often: {low,high}; a loop may go on behind high.
struct Repetition {
    unsigned long long low = 1;
    unsigned long long high = 1;
    bool loops = false;
};

constexpr size_t kFarChar = 128;  // stands for all characters outside of ASCII
using CharSet = std::bitset<kFarChar + 1>;

constexpr int kText = -1;  // a literal, a class, a dot or a token

struct GrammarItem {
    int rule = kText;                   // or the one it stands for
    CharSet chars;                      // that text can begin with; of literals only ASCII
    bool is_char = false;               // text, and no more than one character
    unsigned long long n_elements = 1;  // that llama.cpp keeps for it when it comes once
    Repetition times;
};

// What llama.cpp writes for an item where it stands.
inline unsigned long long n_written(const GrammarItem & item) {
    return item.n_elements * item.times.low + (item.times.high > item.times.low ? 1 : 0);
}

using GrammarSequence = std::vector<GrammarItem>;

struct GrammarRule {
    std::string name;                           // of what is in parentheses: of the rule around it
    std::vector<GrammarSequence> alternatives;  // none: never defined
    bool can_be_empty = false;
};

// Recurses into parentheses. Throws Error(value) for a comment between braces.
std::vector<GrammarRule> read_rules(const std::string & grammar);

// `text` begins with a brace and is moved behind what was read; without a number: {0,0}. Throws
// Error(value) for a comment: llama.cpp reads on behind it.
Repetition read_repetition(const char *& text);

}  // namespace dspark
