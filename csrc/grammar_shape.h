// Refuses rules that llama.cpp's matcher would follow into too many places at once.
#pragma once

#include <vector>

#include "grammar_rules.h"

namespace dspark {

// Throws Error(value), a line that says what is too much, the limit and the way out.
void check_shapes(const std::vector<GrammarRule> & rules);

}  // namespace dspark
