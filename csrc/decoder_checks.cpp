// BlockDecoder's checks of what it is called with, before anything is touched.
#include <algorithm>

#include "block_decoder.h"
#include "errors.h"

namespace dspark {

BlockDecoder::Sequence & BlockDecoder::sequence(int32_t seq_id) {
    (void)pair();
    if (seq_id < 0 || seq_id >= config_.n_seq) {
        throw Error(ErrorKind::value, "seq_id is " + std::to_string(seq_id) +
                                          "; this decoder has sequences 0 to " +
                                          std::to_string(config_.n_seq - 1));
    }
    if (!sequences_[seq_id].is_open) {
        throw Error(ErrorKind::value, "sequence " + std::to_string(seq_id) +
                                          " is not open; call open_sequence first");
    }
    return sequences_[seq_id];
}

void BlockDecoder::check_tokens(const std::vector<llama_token> & tokens) const {
    for (const llama_token token : tokens) {
        if (token < 0 || token >= n_vocab_) {
            throw Error(ErrorKind::value, "token id is " + std::to_string(token) +
                                              "; this model has ids 0 to " +
                                              std::to_string(n_vocab_ - 1));
        }
    }
}

void BlockDecoder::check_seq_ids(const std::vector<int32_t> & seq_ids, size_t n_expected) {
    if (seq_ids.empty() || seq_ids.size() != n_expected) {
        throw Error(ErrorKind::value, "got " + std::to_string(seq_ids.size()) + " sequences and " +
                                          std::to_string(n_expected) +
                                          " entries for them; give one entry per sequence, and at "
                                          "least one");
    }
    for (size_t i = 0; i < seq_ids.size(); ++i) {
        sequence(seq_ids[i]);
        if (std::count(seq_ids.begin(), seq_ids.end(), seq_ids[i]) > 1) {
            throw Error(ErrorKind::value, "sequence " + std::to_string(seq_ids[i]) +
                                              " is given twice; give each once");
        }
    }
}

void BlockDecoder::check_room(int32_t seq_id, size_t n_new) const {
    const size_t n_past = sequences_[seq_id].tokens.size();
    if (n_past + n_new > static_cast<size_t>(config_.n_ctx)) {
        throw Error(ErrorKind::context_full,
                    "sequence " + std::to_string(seq_id) + " holds " + std::to_string(n_past) +
                        " tokens and " + std::to_string(n_new) +
                        " more do not fit into the context of " + std::to_string(config_.n_ctx) +
                        "; use a larger n_ctx or shorter text");
    }
}

void BlockDecoder::check_verify(const std::vector<int32_t> & seq_ids,
                                const std::vector<std::vector<llama_token>> & verify_tokens) {
    check_seq_ids(seq_ids, verify_tokens.size());
    const size_t limit = size_t{1} + static_cast<size_t>(config_.max_verify_len);
    for (size_t s = 0; s < seq_ids.size(); ++s) {
        if (verify_tokens[s].empty() || verify_tokens[s].size() > limit) {
            throw Error(ErrorKind::value, "verify_tokens of sequence " +
                                              std::to_string(seq_ids[s]) + " has " +
                                              std::to_string(verify_tokens[s].size()) +
                                              " tokens; give the anchor and at most " +
                                              std::to_string(config_.max_verify_len) +
                                              " draft tokens (max_verify_len)");
        }
        check_tokens(verify_tokens[s]);
        check_room(seq_ids[s], verify_tokens[s].size());
        // llama.cpp takes runs of neighbours, as far as their lengths agree: rows of the pass would
        // otherwise stand in another order than those of the batch.
        if (config_.own_cells && s > 0 &&
            (seq_ids[s] < seq_ids[s - 1] || verify_tokens[s].size() != verify_tokens[0].size())) {
            throw Error(
                ErrorKind::value,
                "with own_cells, sequences of a pass must be in rising order and have equally "
                "many tokens; sequence " +
                    std::to_string(seq_ids[s]) + " is not so");
        }
    }
}

}  // namespace dspark
