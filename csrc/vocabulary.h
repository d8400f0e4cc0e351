// Text to tokens and back, with the model's own vocabulary. Knows no templates and no characters:
// a token's bytes may be part of one.
#pragma once

#include <string>
#include <vector>

#include "llama.h"

namespace dspark {

// parse_special: control tokens written out in the text become those tokens.
std::vector<llama_token> tokenize(const llama_vocab * vocab, const std::string & text,
                                  bool add_special, bool parse_special);

// The bytes of a token; control tokens give none unless `special`.
std::string token_bytes(const llama_vocab * vocab, llama_token token, bool special);

std::vector<llama_token> eog_tokens(const llama_vocab * vocab);

}  // namespace dspark
