// BlockDecoder's side passes: what the target's layers saw, and how long passes take.
#include <algorithm>

#include "block_decoder.h"
#include "errors.h"
#include "llama_ext.h"

namespace dspark {

// ---------------------------------------------------------------- tapping

void BlockDecoder::tap(const std::vector<int32_t> & layers) {
    const Busy busy(mutex_);
    pair()->tap(layers);
    tapped_ = layers;
    n_tapped_rows_ = 0;
    give_hidden(false);
}

// llama.cpp then treats every token of a pass as an output, so only where all are ones already.
void BlockDecoder::give_hidden(bool is_wanted) {
    llama_set_embeddings(target_ctx(), is_wanted);
    has_hidden_ = is_wanted;
}

TappedRows BlockDecoder::tapped_rows() {
    const Busy busy(mutex_);
    (void)pair();
    if (n_tapped_rows_ == 0) {
        throw Error(ErrorKind::value, "there are no tapped rows; call tap, then run a pass");
    }
    TappedRows result;
    result.n_rows = n_tapped_rows_;
    const auto n_rows = static_cast<size_t>(n_tapped_rows_);
    const auto n_embd = static_cast<size_t>(llama_model_n_embd(pair_->target()));
    result.features.resize(n_rows * tapped_.size() * n_embd);
    for (size_t l = 0; l < tapped_.size(); ++l) {
        const float * rows =
            llama_get_embeddings_layer_inp(target_ctx(), static_cast<uint32_t>(tapped_[l]));
        for (size_t i = 0; i < n_rows; ++i) {
            std::copy_n(rows + i * n_embd, n_embd,
                        result.features.data() + (i * tapped_.size() + l) * n_embd);
        }
    }
    for (int32_t i = 0; i < n_tapped_rows_ && has_hidden_; ++i) {
        const float * row = llama_get_embeddings_ith(target_ctx(), i);
        result.hidden.insert(result.hidden.end(), row, row + n_embd);
    }
    return result;
}

// ---------------------------------------------------------------- timing

void BlockDecoder::drop_scratch() {
    if (scratch_seq_ >= 0) {
        empty(scratch_seq_);
        scratch_seq_ = -1;
    }
}

// Fills a closed sequence to `depth`. The filler stays between calls of the same depth.
void BlockDecoder::use_scratch(int32_t depth) {
    if (scratch_seq_ >= 0 && scratch_depth_ == depth) {
        return;
    }
    drop_scratch();
    for (int32_t seq_id = 0; seq_id < config_.n_seq; ++seq_id) {
        scratch_seq_ = sequences_[seq_id].is_open ? scratch_seq_ : seq_id;
    }
    if (scratch_seq_ < 0) {
        throw Error(ErrorKind::value, "all sequences are open; measuring needs a closed one");
    }
    scratch_depth_ = depth;
    for (int32_t begin = 0; begin < depth; begin += config_.n_batch) {
        batch_->n_tokens = 0;
        for (int32_t i = begin; i < std::min(depth, begin + config_.n_batch); ++i) {
            add_token(*batch_, /*token*/ 0, i, scratch_seq_, /*output*/ false);
        }
        if (clock_.decode(target_ctx(), *batch_) != 0) {
            drop_scratch();
            throw Error(ErrorKind::decode,
                        "llama.cpp could not fill the cache to depth " + std::to_string(depth));
        }
    }
}

double BlockDecoder::time_step(int32_t n_tokens, int32_t depth) {
    const Busy busy(mutex_);
    (void)pair();
    const int32_t widest = std::max(32, config_.n_seq * (1 + config_.max_verify_len));
    if (n_tokens < 1 || n_tokens > widest || depth < 0 || depth + n_tokens > config_.n_ctx) {
        throw Error(ErrorKind::value,
                    "time_step of " + std::to_string(n_tokens) + " tokens at depth " +
                        std::to_string(depth) + "; at most " + std::to_string(widest) +
                        " tokens, inside n_ctx = " + std::to_string(config_.n_ctx));
    }
    n_tapped_rows_ = 0;
    give_hidden(false);
    use_scratch(depth);
    batch_->n_tokens = 0;
    for (int32_t i = 0; i < n_tokens; ++i) {
        add_token(*batch_, /*token*/ 0, depth + i, scratch_seq_, /*output*/ true);
    }
    cpu_attention_.use_one_order(true);
    const int code = clock_.decode(target_ctx(), *batch_);
    const bool can_cut = !pair_->is_recurrent() && depth > 0;
    if (!can_cut || !llama_memory_seq_rm(memory(), scratch_seq_, depth, -1)) {
        drop_scratch();
    }
    if (code != 0) {
        throw Error(ErrorKind::decode, "llama.cpp could not evaluate " + std::to_string(n_tokens) +
                                           " tokens (code " + std::to_string(code) + ")");
    }
    return clock_.last_s();
}

double BlockDecoder::time_draft(int32_t n_seq) {
    const Busy busy(mutex_);
    (void)pair();
    if (!drafter_) {
        throw Error(ErrorKind::value, "this decoder has no drafter to time");
    }
    if (n_seq < 1 || n_seq > config_.n_seq) {
        throw Error(ErrorKind::value, "time_draft of " + std::to_string(n_seq) +
                                          " sequences; this decoder has " +
                                          std::to_string(config_.n_seq));
    }
    for (const Sequence & seq : sequences_) {
        if (seq.is_open) {
            throw Error(ErrorKind::value, "time_draft needs all sequences closed");
        }
    }
    const double seconds = drafter_->time_draft(n_seq);
    graph_chain_reason_ = drafter_->graph_chain_reason();
    return seconds;
}

}  // namespace dspark
