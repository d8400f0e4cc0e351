#include "vocabulary.h"

#include <climits>

#include "errors.h"

namespace dspark {

std::vector<llama_token> tokenize(const llama_vocab * vocab, const std::string & text,
                                  bool add_special, bool parse_special) {
    if (text.size() > INT32_MAX / 2) {
        throw Error(ErrorKind::value, "text of " + std::to_string(text.size()) +
                                          " bytes is too long to tokenize; the limit is 1 GiB");
    }
    const auto n_bytes = static_cast<int32_t>(text.size());
    std::vector<llama_token> tokens(n_bytes / 2 + 16);
    int32_t n = llama_tokenize(vocab, text.data(), n_bytes, tokens.data(),
                               static_cast<int32_t>(tokens.size()), add_special, parse_special);
    if (n < 0 && n != INT32_MIN) {  // too small: the negative is the size it takes
        tokens.resize(-n);
        n = llama_tokenize(vocab, text.data(), n_bytes, tokens.data(),
                           static_cast<int32_t>(tokens.size()), add_special, parse_special);
    }
    if (n < 0) {
        throw Error(ErrorKind::value, "llama.cpp could not tokenize the text");
    }
    tokens.resize(n);
    return tokens;
}

std::string token_bytes(const llama_vocab * vocab, llama_token token, bool special) {
    if (token < 0 || token >= llama_vocab_n_tokens(vocab)) {
        throw Error(ErrorKind::value, "token id is " + std::to_string(token) +
                                          "; this model has ids 0 to " +
                                          std::to_string(llama_vocab_n_tokens(vocab) - 1));
    }
    std::string bytes(32, '\0');
    int32_t n = llama_token_to_piece(vocab, token, bytes.data(), static_cast<int32_t>(bytes.size()),
                                     0, special);
    if (n < 0) {
        bytes.resize(-n);
        n = llama_token_to_piece(vocab, token, bytes.data(), static_cast<int32_t>(bytes.size()), 0,
                                 special);
    }
    bytes.resize(n);
    return bytes;
}

std::vector<llama_token> eog_tokens(const llama_vocab * vocab) {
    std::vector<llama_token> tokens;
    for (llama_token token = 0; token < llama_vocab_n_tokens(vocab); ++token) {
        if (llama_vocab_is_eog(vocab, token)) {
            tokens.push_back(token);
        }
    }
    return tokens;
}

}  // namespace dspark
