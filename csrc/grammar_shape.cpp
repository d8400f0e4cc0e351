#include "grammar_shape.h"

#include <algorithm>
#include <string>

#include "errors.h"
#include "grammar_run.h"

namespace dspark {

namespace {

// Seconds for one token, of 49 thousand:
constexpr int kMaxSameAgain = 2;   // ([a-z] | [a-z]){10}: 0.3; a third alternative: no end
constexpr int kMaxSameLooped = 4;  // ([a-z]? [a-z]? [a-z]? [a-z]?)*: 0.7; six: 10
constexpr int kMaxReturns = 2;     // b (a root)?{3}: 5 behind 24 characters, {20}: 12 behind four

constexpr int kMaxDepth = 512;  // of the recursion here, and in llama.cpp's search
constexpr unsigned long long kMaxSearch = 1 << 26;  // 2^32 took 44 seconds

struct Shape {
    bool is_searched = false;
    bool is_in_search = false;
    int height = 0;                  // of the rules that it can begin with
    unsigned long long n_steps = 0;  // of llama.cpp's search for rules that begin with themselves
    CharCounts alone{};              // ways in which the whole can be nothing but the character
    CharSet first;                   // characters that it can begin with
    Run lead;                        // at its beginning
    Run tail;                        // at its end
    bool is_closed = false;          // tail and component are known
    int order = 0;                   // in which the search came by; 0: not yet
    int component = 0;               // of rules that can end with each other: its first one's order
};

class Shapes {
  public:
    explicit Shapes(const std::vector<GrammarRule> & rules) : rules_(rules), shapes_(rules.size()) {
        unsigned long long n_steps = 0;
        for (int rule = 0; rule < n_rules(); ++rule) {
            search(rule, 0);
            n_steps += shapes_[rule].n_steps;
        }
        for (const int rule : searched_) {
            read_lead(rule);
        }
        if (n_steps > kMaxSearch) {
            throw Error(ErrorKind::value,
                        "the grammar takes llama.cpp over " + std::to_string(kMaxSearch) +
                            " steps, the limit, to find which rules begin with each other; use "
                            "fewer that do");
        }
        for (int rule = 0; rule < n_rules(); ++rule) {
            read_tail(rule, 0);
        }
        for (int rule = 0; rule < n_rules(); ++rule) {
            for (const GrammarSequence & sequence : rules_[rule].alternatives) {
                check_rows(sequence);
                check_returns(sequence, rule);
            }
        }
    }

  private:
    int n_rules() const { return static_cast<int>(rules_.size()); }

    bool can_be_empty(const GrammarItem & item) const {
        return item.times.low == 0 || repeats_nothing(item);
    }

    // ------------------------------------------------------------ beginnings

    // Puts each rule behind those that it can begin with.
    void search(int rule, int depth) {
        Shape & shape = shapes_[rule];
        if (shape.is_searched) {
            return;
        }
        if (shape.is_in_search) {
            // llama.cpp would refuse it as left recursion, or not see it and never come back.
            throw Error(ErrorKind::value, "the grammar's rule " + rules_[rule].name +
                                              " can begin with itself; put something before it, "
                                              "as in sum ::= number (\"+\" number)*");
        }
        check_depth(depth);
        shape.is_in_search = true;
        for (const GrammarSequence & sequence : rules_[rule].alternatives) {
            bool is_begin = true;
            shape.n_steps += 1;
            for (const GrammarItem & item : sequence) {
                shape.n_steps += n_written(item);
                if (is_begin && item.rule != kText) {
                    search(item.rule, depth + 1);
                    const Shape & inner = shapes_[item.rule];
                    shape.height = std::max(shape.height, inner.height + 1);
                    shape.n_steps = std::min(shape.n_steps + inner.n_steps, 2 * kMaxSearch);
                }
                is_begin = is_begin && can_be_empty(item);
            }
        }
        check_depth(shape.height);
        shape.is_in_search = false;
        shape.is_searched = true;
        searched_.push_back(rule);
    }

    void read_lead(int rule) {
        Shape & shape = shapes_[rule];
        for (const GrammarSequence & sequence : rules_[rule].alternatives) {
            Run lead;
            bool is_begin = true;
            for (size_t i = 0; i < sequence.size() && is_begin; ++i) {
                lead = sum(lead, weight(sequence[i]));
                shape.first |= first(sequence[i]);
                is_begin = can_be_empty(sequence[i]);
            }
            const int ways = sum(shape.lead, lead).ways + (is_begin ? 1 : 0);
            shape.lead = most(shape.lead, lead);
            shape.lead.ways = ways;
            shape.alone = sum(shape.alone, alone(sequence));
        }
        check_run(shape.lead);
    }

    const CharSet & first(const GrammarItem & item) const {
        return item.rule == kText ? item.chars : shapes_[item.rule].first;
    }

    // One item that is the character, and others only that can be left out.
    CharCounts alone(const GrammarSequence & sequence) const {
        CharCounts of_needed{};
        CharCounts of_all{};
        int n_needed = 0;
        for (const GrammarItem & item : sequence) {
            const CharCounts of_item = alone(item);
            n_needed += can_be_empty(item) ? 0 : 1;
            of_needed = can_be_empty(item) ? of_needed : of_item;
            of_all = sum(of_all, of_item);
        }
        return n_needed == 0 ? of_all : n_needed == 1 ? of_needed : CharCounts{};
    }

    CharCounts alone(const GrammarItem & item) const {
        if (item.times.low > 1 && !repeats_nothing(item)) {
            return {};
        }
        if (item.rule == kText) {
            return item.is_char ? counts_of(item.chars) : CharCounts{};
        }
        return product(repeats_nothing(item) ? item.times.high : 1, shapes_[item.rule].alone);
    }

    bool repeats_nothing(const GrammarItem & item) const {
        return item.rule != kText && rules_[item.rule].can_be_empty;
    }

    // How often it can come beyond what has to come.
    unsigned long long n_optional(const GrammarItem & item) const {
        const Repetition & times = item.times;
        return times.loops ? 1 : repeats_nothing(item) ? times.high : times.high - times.low;
    }

    // What an item adds to the run that it stands in.
    Run weight(const GrammarItem & item) const {
        const Run once = item.rule == kText ? Run{0, 1, {}} : shapes_[item.rule].lead;
        if (!can_be_empty(item)) {
            return once;
        }
        const unsigned long long n = repeats_nothing(item) ? item.times.high : 1;
        return {product(n, std::max(1, once.row)), product(n, once.ways),
                most(alone(item), product(n, once.same))};
    }

    // ------------------------------------------------------------ ends

    // Tarjan's strongly connected components of the rules that end with each other. Returns the
    // first on the path to `rule` that this one can end with.
    int read_tail(int rule, int depth) {
        Shape & shape = shapes_[rule];
        if (shape.order > 0) {
            return shape.is_closed ? kMany : shape.order;
        }
        check_depth(depth);
        open_.push_back(rule);
        shape.order = shape.component = ++n_ordered_;
        for (const GrammarSequence & sequence : rules_[rule].alternatives) {
            for (size_t i = sequence.size(); i > 0; --i) {
                const GrammarItem & item = sequence[i - 1];
                if (item.rule != kText) {
                    shape.component = std::min(shape.component, read_tail(item.rule, depth + 1));
                }
                if (!can_be_empty(item)) {
                    break;
                }
            }
        }
        const int first = shape.component;
        if (first == shape.order) {
            close_component(rule);
        }
        return first;
    }

    // What such rules add to each other is as long as the text is, and not counted.
    void close_component(int first) {
        size_t begin = open_.size() - 1;
        while (open_[begin] != first) {
            --begin;
        }
        const std::vector<int> members(open_.begin() + begin, open_.end());
        open_.resize(begin);
        Run tail;
        for (const int member : members) {
            for (const GrammarSequence & sequence : rules_[member].alternatives) {
                Run run;
                for (const GrammarItem & item : sequence) {
                    run = behind(run, item);
                }
                tail = most(tail, run);
            }
        }
        for (const int member : members) {
            shapes_[member].tail = tail;
            shapes_[member].component = shapes_[first].order;
            shapes_[member].is_closed = true;
        }
    }

    Run tail_of(const GrammarItem & item) const {
        return item.rule == kText ? Run{} : shapes_[item.rule].tail;  // nothing while it is open
    }

    Run behind(const Run & run, const GrammarItem & item) const {
        return can_be_empty(item) ? most(sum(run, weight(item)), tail_of(item)) : tail_of(item);
    }

    void check_rows(const GrammarSequence & sequence) const {
        Run run;
        for (const GrammarItem & item : sequence) {
            check_run(sum(run, weight(item)));
            if (item.rule != kText && (item.times.loops || item.times.high > 1)) {
                check_repeated(shapes_[item.rule], item.times);
            }
            run = behind(run, item);
        }
        check_run(run);
    }

    static void check_repeated(const Shape & shape, const Repetition & times) {
        check_run(sum(shape.tail, shape.lead));  // where it ends and begins again
        const int n = peak(most(shape.alone, shape.lead.same));
        const int limit = times.loops ? kMaxSameLooped : kMaxSameAgain;
        if (n > limit) {
            refuse(n, " ways to read a character within something that it repeats", limit,
                   "let them differ, as in ([a-z] | [0-9])*");
        }
    }

    // Behind a rule that comes again in its own end, each of them can be what goes on.
    void check_returns(const GrammarSequence & sequence, int rule) const {
        CharCounts returns{};
        for (size_t i = sequence.size(); i > 0; --i) {
            const GrammarItem & item = sequence[i - 1];
            if (item.rule != kText && shapes_[item.rule].component == shapes_[rule].component) {
                returns = sum(returns, product(n_optional(item), counts_of(first(item))));
            }
            if (!can_be_empty(item)) {
                break;
            }
        }
        if (peak(returns) > kMaxReturns) {
            refuse(peak(returns),
                   " elements at the end of rule " + rules_[rule].name +
                       " that begin alike, can be left out and lead back to it",
                   kMaxReturns, "close the rule with something, as in \"(\" list \")\"");
        }
    }

    static void check_depth(int depth) {
        if (depth > kMaxDepth) {
            throw Error(ErrorKind::value, "the grammar nests rules and parentheses deeper than " +
                                              std::to_string(kMaxDepth) +
                                              "; use fewer rules inside rules");
        }
    }

    const std::vector<GrammarRule> & rules_;
    std::vector<Shape> shapes_;
    std::vector<int> searched_;
    std::vector<int> open_;  // rules whose component is not known yet
    int n_ordered_ = 0;
};

}  // namespace

void check_shapes(const std::vector<GrammarRule> & rules) { const Shapes shapes(rules); }

}  // namespace dspark
