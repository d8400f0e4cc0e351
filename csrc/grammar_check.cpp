#include "grammar_check.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstring>
#include <map>
#include <vector>

#include "errors.h"

namespace dspark {

namespace {

constexpr size_t kMaxGrammarBytes = 1 << 18;
constexpr int kMaxGrammarDepth = 256;
constexpr unsigned long long kMaxRepetition = 2000;

// `text` begins with the brace of {low}, {low,} or {low,high}.
void check_repetition(const char * text) {
    if (text[std::strcspn(text, "#}")] == '#') {  // llama.cpp reads on behind it, sscanf does not
        throw Error(ErrorKind::value,
                    "the grammar has a comment between { and }; write it outside of them");
    }
    unsigned long long low = 0;
    unsigned long long high = 0;
    const int n_read = std::sscanf(text, "{ %llu , %llu", &low, &high);
    if (n_read == 2 && high < low) {
        throw Error(ErrorKind::value, "the grammar repeats {" + std::to_string(low) + "," +
                                          std::to_string(high) +
                                          "}: the upper limit is below the lower one");
    }
    if (n_read >= 1 && std::max(low, high) > kMaxRepetition) {
        throw Error(ErrorKind::value, "the grammar repeats something " +
                                          std::to_string(std::max(low, high)) +
                                          " times; the limit is " + std::to_string(kMaxRepetition));
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
            --depth;
        } else if (c == '{') {
            check_repetition(grammar.c_str() + i);
        }
    }
}

// ---------------------------------------------------------------- what can be left out in a row

// The matcher keeps a stack for each place where the text may go on, and what can be left out lets
// it go on behind: a row of n such elements costs n stacks of up to n elements, compared pairwise,
// for every token of the vocabulary. ("a"?){100} took 1.5 s a round with 49 thousand tokens.
constexpr int kMaxOptionalRow = 64;
constexpr int kMaxDepth = 512;

// lead, tail: elements in a row that can be left out, at its beginning and at its end.
struct Shape {
    bool is_optional = false;
    int lead = 0;
    int tail = 0;

    int weight() const { return std::max(1, lead); }  // when it is left out
};

class OptionalRows {
  public:
    explicit OptionalRows(const std::string & grammar) : text_(grammar) {
        find_rules();
        for (const auto & [name, begin] : rules_) {
            rule(name, 0);
        }
    }

  private:
    void find_rules() {
        for (at_ = 0; skip_blanks(), at_ < text_.size();) {
            const std::string name = take_name();
            if (name.empty()) {
                skip_element();
                continue;
            }
            if (skip_blanks(), text_.compare(at_, 3, "::=") == 0) {
                at_ += 3;
                rules_[name] = at_;
            }
        }
    }

    Shape rule(const std::string & name, int depth) {
        const auto known = shapes_.find(name);
        if (known != shapes_.end()) {
            return known->second;  // of a rule that is being read: nothing, so recursion ends
        }
        const auto found = rules_.find(name);
        if (found == rules_.end()) {
            return {};
        }
        shapes_[name] = {};
        const size_t back = at_;
        at_ = found->second;
        const Shape shape = alternatives(depth);
        at_ = back;
        return shapes_[name] = shape;
    }

    Shape alternatives(int depth) {
        if (++depth > kMaxDepth) {
            throw Error(ErrorKind::value, "the grammar nests rules and parentheses deeper than " +
                                              std::to_string(kMaxDepth) +
                                              "; use fewer rules inside rules");
        }
        Shape all = sequence(depth);
        while (at_ < text_.size() && text_[at_] == '|') {
            ++at_;
            const Shape one = sequence(depth);
            all.is_optional = all.is_optional || one.is_optional;
            all.lead = std::max(all.lead, one.lead);
            all.tail = std::max(all.tail, one.tail);
        }
        return all;
    }

    Shape sequence(int depth) {
        Shape whole{/*is_optional*/ true, 0, 0};
        int row = 0;
        while (skip_blanks(),
               at_ < text_.size() && text_[at_] != '|' && text_[at_] != ')' && !begins_rule()) {
            const Shape one = repeated(element(depth));
            if (one.is_optional) {
                row += one.weight();
            } else {
                check_row(row + one.lead);
                whole.lead = whole.is_optional ? row + one.lead : whole.lead;
                whole.is_optional = false;
                row = one.tail;
            }
            check_row(row);
        }
        whole.lead = whole.is_optional ? row : whole.lead;
        whole.tail = row;
        return whole;
    }

    Shape element(int depth) {
        if (text_[at_] == '(') {
            ++at_;
            const Shape inner = alternatives(depth);
            at_ += at_ < text_.size() ? 1 : 0;  // the closing parenthesis
            return inner;
        }
        const std::string name = take_name();
        if (name.empty()) {
            const bool is_empty = text_.compare(at_, 2, "\"\"") == 0;
            skip_element();
            return {is_empty, 0, 0};
        }
        return rule(name, depth);
    }

    // What ?, *, + and {low,high} make of an element; several may follow each other.
    Shape repeated(Shape shape) {
        for (; skip_blanks(), at_ < text_.size(); ++at_) {
            unsigned long long low = 0;
            unsigned long long high = 0;
            const char c = text_[at_];
            if (c == '{') {
                const int n_read = std::sscanf(text_.c_str() + at_, "{ %llu , %llu", &low, &high);
                high = n_read == 1 ? low : std::max(low, high);
                at_ = std::min(text_.find('}', at_), text_.size() - 1);
            } else if (c == '?' || c == '*' || c == '+') {
                low = c == '+' ? 1 : 0;
                high = 1;  // a loop is entered once before the text goes on
            } else {
                break;
            }
            if (shape.is_optional) {
                const auto n = static_cast<int>(std::min<unsigned long long>(high, 1 << 12));
                shape.lead = shape.tail = n * std::min(shape.weight(), 1 << 12);
                check_row(shape.lead);
            } else if (high > 1) {
                check_row(shape.tail + shape.lead);  // where one ends and the next begins
            }
            shape.is_optional = shape.is_optional || low == 0;
        }
        return shape;
    }

    static void check_row(int row) {
        if (row > kMaxOptionalRow) {
            throw Error(ErrorKind::value,
                        "the grammar has " + std::to_string(row) +
                            " elements in a row that can all be left out; the limit is " +
                            std::to_string(kMaxOptionalRow) +
                            ": repeat something that cannot be empty, as in \"a\"{0,100}");
        }
    }

    // ------------------------------------------------------------ characters

    static bool is_word(char c) {
        return std::isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_';
    }

    void skip_blanks() {
        while (at_ < text_.size()) {
            if (text_[at_] == '#') {
                at_ = std::min(text_.find_first_of("\r\n", at_), text_.size());
            } else if (std::isspace(static_cast<unsigned char>(text_[at_]))) {
                ++at_;
            } else {
                return;
            }
        }
    }

    std::string take_name() {
        const size_t begin = at_;
        while (at_ < text_.size() && is_word(text_[at_])) {
            ++at_;
        }
        return text_.substr(begin, at_ - begin);
    }

    bool begins_rule() {
        const size_t back = at_;
        const bool is_name = !take_name().empty();
        skip_blanks();
        const bool begins = is_name && text_.compare(at_, 3, "::=") == 0;
        at_ = back;
        return begins;
    }

    // A literal, a class, a token in angle brackets or any other one, or a character of its own.
    void skip_element() {
        at_ += text_.compare(at_, 2, "!<") == 0 ? 1 : 0;
        const char c = text_[at_++];
        const char closer = c == '"' ? '"' : c == '[' ? ']' : c == '<' ? '>' : 0;
        while (closer != 0 && at_ < text_.size()) {
            const char next = text_[at_++];
            if (next == '\\' && closer != '>') {
                ++at_;
            } else if (next == closer) {
                break;
            }
        }
        at_ = std::min(at_, text_.size());
    }

    const std::string & text_;
    size_t at_ = 0;
    std::map<std::string, size_t> rules_;  // where each begins, behind ::=
    std::map<std::string, Shape> shapes_;
};

}  // namespace

void check_grammar(const std::string & grammar) {
    check_limits(grammar);
    const OptionalRows rows(grammar);
}

}  // namespace dspark
