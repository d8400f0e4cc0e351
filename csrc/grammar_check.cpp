#include "grammar_check.h"

#include <algorithm>
#include <vector>

#include "errors.h"
#include "grammar_rules.h"
#include "grammar_shape.h"

namespace dspark {

namespace {

constexpr size_t kMaxGrammarBytes = 1 << 18;
constexpr int kMaxGrammarDepth = 256;
constexpr unsigned long long kMaxRepetition = 2000;
constexpr unsigned long long kElementBytes = 8;
constexpr unsigned long long kMaxElements = 1 << 22;
constexpr unsigned long long kRuleElements = 16;  // as much memory as a rule takes beside its own

void check_repetition(const char * text) {
    const Repetition times = read_repetition(text);
    const unsigned long long most = std::max(times.low, times.loops ? 0 : times.high);
    if (most > kMaxRepetition) {
        throw Error(ErrorKind::value, "the grammar repeats something " + std::to_string(most) +
                                          " times; the limit is " + std::to_string(kMaxRepetition));
    }
    if (times.high < times.low) {
        throw Error(ErrorKind::value, "the grammar repeats {" + std::to_string(times.low) + "," +
                                          std::to_string(times.high) +
                                          "}: the upper limit is below the lower one");
    }
}

// llama.cpp's parser recurses into parentheses and writes repetitions out, without limits that
// protect the stack and the memory. Braces in literals, character classes, tokens in angle brackets
// and comments are text.
void check_limits(const std::string & grammar) {
    if (grammar.size() > kMaxGrammarBytes) {
        throw Error(ErrorKind::value, "the grammar has " + std::to_string(grammar.size()) +
                                          " bytes; the limit is " +
                                          std::to_string(kMaxGrammarBytes));
    }
    if (grammar.find('\0') != std::string::npos) {
        throw Error(ErrorKind::value, "the grammar holds a zero byte, where llama.cpp would stop");
    }
    char closer = 0;  // what ends the text we are in; '\n': a line's end; 0: none
    int depth = 0;
    for (size_t i = 0; i < grammar.size(); ++i) {
        const char c = grammar[i];
        if (closer != 0) {
            if (c == '\\' && closer != '\n' && closer != '>') {
                ++i;
            } else if (c == closer || (closer == '\n' && c == '\r')) {
                closer = 0;
            }
        } else if (c == '"' || c == '[' || c == '<' || c == '#') {
            closer = c == '"' ? '"' : c == '[' ? ']' : c == '<' ? '>' : '\n';
        } else if (c == '(' && ++depth > kMaxGrammarDepth) {
            throw Error(ErrorKind::value, "the grammar nests parentheses deeper than " +
                                              std::to_string(kMaxGrammarDepth));
        } else if (c == ')') {
            depth = std::max(0, depth - 1);
        } else if (c == '{') {
            check_repetition(grammar.c_str() + i);
        }
    }
}

// llama.cpp writes repetitions out, and each optional one becomes a rule.
void check_size(const std::vector<GrammarRule> & rules) {
    unsigned long long n_elements = 0;
    for (const GrammarRule & rule : rules) {
        const unsigned long long n_of_rule = kRuleElements + rule.name.size() / kElementBytes;
        n_elements += n_of_rule;
        for (const GrammarSequence & sequence : rule.alternatives) {
            for (const GrammarItem & item : sequence) {
                const Repetition & times = item.times;
                n_elements += item.n_elements * times.low +
                              (item.n_elements + n_of_rule) * (times.high - times.low);
            }
        }
    }
    if (n_elements > kMaxElements) {
        throw Error(ErrorKind::value, "the grammar has " + std::to_string(n_elements) +
                                          " elements with all repetitions written out; the limit "
                                          "is " +
                                          std::to_string(kMaxElements) +
                                          ": repeat less, or with * and +");
    }
}

}  // namespace

void check_grammar(const std::string & grammar) {
    check_limits(grammar);
    const std::vector<GrammarRule> rules = read_rules(grammar);
    check_size(rules);
    check_shapes(rules);
}

}  // namespace dspark
