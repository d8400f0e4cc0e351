// Refuses grammars that llama.cpp would take and then choke on: its parser recurses without limits,
// and its matcher follows everything that could be left out at once.
//
// Reads GBNF just well enough to count; whether a grammar parses is llama.cpp's to say.
#pragma once

#include <string>

namespace dspark {

// Throws Error(value), a line that says what is too much, the limit and the way out.
void check_grammar(const std::string & grammar);

}  // namespace dspark
