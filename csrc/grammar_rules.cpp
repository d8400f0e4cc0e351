#include "grammar_rules.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>

#include "errors.h"

namespace dspark {

namespace {

constexpr size_t kMaxName = 1024;  // llama.cpp names each of the rules it adds after the one around
constexpr unsigned long long kManyElements = 1ULL << 32;

// Reads a number and the blanks around it; false when there is none.
bool read_number(const char *& text, unsigned long long & value) {
    char * end = nullptr;
    value = std::strtoull(text, &end, 10);
    const bool is_number = end != text;
    text = end + std::strspn(end, " \t\r\n");
    if (*text == '#') {
        throw Error(ErrorKind::value,
                    "the grammar has a comment between { and }; write it outside of them");
    }
    return is_number;
}

class RuleReader {
  public:
    explicit RuleReader(const std::string & grammar) : text_(grammar) {}

    std::vector<GrammarRule> read() {
        while (skip_blanks(), at_ < text_.size()) {
            const std::string name = take_name();
            check_name(name);
            if (name.empty()) {
                text();
            } else if (skip_blanks(), text_.compare(at_, 3, "::=") == 0) {
                at_ += 3;
                const int rule = rule_of(name);
                rules_[rule].alternatives = alternatives(name);
            }
        }
        return std::move(rules_);
    }

  private:
    int rule_of(const std::string & name) {
        const auto [known, is_new] = ids_.emplace(name, static_cast<int>(rules_.size()));
        return is_new ? add_rule(name, {}) : known->second;
    }

    int add_rule(const std::string & name, std::vector<GrammarSequence> alternatives) {
        rules_.push_back({name, std::move(alternatives)});
        return static_cast<int>(rules_.size()) - 1;
    }

    std::vector<GrammarSequence> alternatives(const std::string & name) {
        std::vector<GrammarSequence> all{sequence(name)};
        while (at_ < text_.size() && text_[at_] == '|') {
            ++at_;
            all.push_back(sequence(name));
        }
        return all;
    }

    GrammarSequence sequence(const std::string & name) {
        GrammarSequence all;
        while (skip_blanks(),
               at_ < text_.size() && text_[at_] != '|' && text_[at_] != ')' && !begins_rule()) {
            GrammarItem one = item(name);
            Repetition times;
            while (skip_blanks(), take_repetition(times)) {
                repeat(one, times, name);
            }
            if (one.n_elements > 0 && one.times.high > 0) {  // of "" llama.cpp keeps nothing
                all.push_back(one);
            }
        }
        return all;
    }

    GrammarItem item(const std::string & name) {
        GrammarItem one;
        if (text_[at_] == '(') {
            ++at_;
            one.rule = add_rule(name, alternatives(name));
            at_ += at_ < text_.size() && text_[at_] == ')' ? 1 : 0;
            return one;
        }
        const std::string other = take_name();
        if (!other.empty()) {
            one.rule = rule_of(other);
            return one;
        }
        return text();
    }

    void repeat(GrammarItem & one, const Repetition & times, const std::string & name) {
        if (one.times.low != 1 || one.times.high != 1) {
            const unsigned long long n_elements = std::min(n_written(one), kManyElements);
            one = {add_rule(name, {{one}}), {}, false, n_elements, times};
        }
        one.times = times;
    }

    bool take_repetition(Repetition & times) {
        switch (at_ < text_.size() ? text_[at_] : 0) {
            case '?':
                times = {0, 1, false};
                break;
            case '*':
                times = {0, 1, true};
                break;
            case '+':
                times = {1, 2, true};
                break;
            case '{': {
                const char * end = text_.c_str() + at_;
                times = read_repetition(end);
                at_ = end - text_.c_str();
                return true;
            }
            default:
                return false;
        }
        ++at_;
        return true;
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
    GrammarItem text() {
        at_ += text_.compare(at_, 2, "!<") == 0 ? 1 : 0;
        GrammarItem one;
        switch (text_[at_++]) {
            case '"':
                read_literal(one);
                break;
            case '[':
                read_class(one);
                one.is_char = true;
                break;
            case '<':
                at_ = std::min(text_.find('>', at_), text_.size() - 1) + 1;
                break;
            case '.':
                one.chars.set();
                one.is_char = true;
                break;
        }
        return one;
    }

    void read_literal(GrammarItem & one) {
        for (one.n_elements = 0; take_unless('"'); ++one.n_elements) {
            const size_t c = take_char();
            one.is_char = one.n_elements == 0;
            if (one.is_char && c < kFarChar) {
                one.chars.set(c);
            }
        }
    }

    void read_class(GrammarItem & one) {
        const bool is_negated = at_ < text_.size() && text_[at_] == '^';
        at_ += is_negated ? 1 : 0;
        for (one.n_elements = 0; take_unless(']'); ++one.n_elements) {
            const size_t first = take_char();
            size_t last = first;
            if (at_ + 1 < text_.size() && text_[at_] == '-' && text_[at_ + 1] != ']') {
                ++at_;
                ++one.n_elements;
                last = take_char();
            }
            for (size_t c = first; c <= last; ++c) {
                one.chars.set(c);
            }
        }
        one.chars = is_negated ? ~one.chars : one.chars;
    }

    // False at the text's end, or behind the closer, which is taken.
    bool take_unless(char closer) {
        const bool is_there = at_ < text_.size();
        const bool is_closed = is_there && text_[at_] == closer;
        at_ += is_closed ? 1 : 0;
        return is_there && !is_closed;
    }

    // A character, or an escape. At most kFarChar.
    size_t take_char() {
        const char c = text_[at_++];
        if (c == '\\' && at_ < text_.size()) {
            const char kind = text_[at_++];
            size_t n_digits = kind == 'x' ? 2 : kind == 'u' ? 4 : kind == 'U' ? 8 : 0;
            if (n_digits == 0) {
                return kind == 'n' ? '\n' : kind == 't' ? '\t' : kind == 'r' ? '\r' : kind & 0x7F;
            }
            size_t code = 0;
            for (; n_digits > 0 && at_ < text_.size() && is_hex(text_[at_]); --n_digits) {
                code = code * 16 + std::strtoul(text_.substr(at_++, 1).c_str(), nullptr, 16);
            }
            return std::min(code, kFarChar);
        }
        while (at_ < text_.size() && (text_[at_] & 0xC0) == 0x80) {  // the rest of it in UTF-8
            ++at_;
        }
        return std::min<size_t>(static_cast<unsigned char>(c), kFarChar);
    }

    static bool is_hex(char c) { return std::isxdigit(static_cast<unsigned char>(c)) != 0; }

    static void check_name(const std::string & name) {
        if (name.size() > kMaxName) {
            throw Error(ErrorKind::value, "the grammar has a name of " +
                                              std::to_string(name.size()) +
                                              " bytes; the limit is " + std::to_string(kMaxName));
        }
    }

    const std::string & text_;
    size_t at_ = 0;
    std::vector<GrammarRule> rules_;
    std::map<std::string, int> ids_;
};

// Counts down, for each sequence, the items that cannot be left out.
void find_empty(std::vector<GrammarRule> & rules) {
    struct Count {
        size_t rule;
        size_t n_left;
    };
    std::vector<Count> counts;
    std::vector<std::vector<size_t>> users(rules.size());
    std::vector<size_t> found;
    const auto mark = [&](const Count & count) {
        if (count.n_left == 0 && !rules[count.rule].can_be_empty) {
            rules[count.rule].can_be_empty = true;
            found.push_back(count.rule);
        }
    };
    for (size_t rule = 0; rule < rules.size(); ++rule) {
        for (const GrammarSequence & sequence : rules[rule].alternatives) {
            Count count{rule, 0};
            for (const GrammarItem & item : sequence) {
                count.n_left += item.times.low > 0 ? 1 : 0;
                if (item.times.low > 0 && item.rule != kText) {
                    users[item.rule].push_back(counts.size());
                }
            }
            counts.push_back(count);
            mark(count);
        }
    }
    while (!found.empty()) {
        const size_t rule = found.back();
        found.pop_back();
        for (const size_t user : users[rule]) {
            --counts[user].n_left;
            mark(counts[user]);
        }
    }
}

}  // namespace

Repetition read_repetition(const char *& text) {
    Repetition times{0, 0, false};
    ++text;
    read_number(text, times.low);
    times.high = times.low;
    if (*text == ',') {
        ++text;
        times.loops = !read_number(text, times.high);
        times.high = times.loops ? times.low + 1 : times.high;
    }
    text += *text == '}' ? 1 : 0;
    return times;
}

std::vector<GrammarRule> read_rules(const std::string & grammar) {
    std::vector<GrammarRule> rules = RuleReader(grammar).read();
    find_empty(rules);
    return rules;
}

}  // namespace dspark
