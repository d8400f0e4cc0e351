// Refuses grammars that llama.cpp would take and then choke on: its parser recurses without limits,
// and its matcher follows every way to go on at once.
//
// Limits on the text and its size are here, those on what the matcher follows in grammar_shape.
#pragma once

#include <string>

namespace dspark {

// Throws Error(value), a line that says what is too much, the limit and the way out.
void check_grammar(const std::string & grammar);

}  // namespace dspark
