// BlockDecoder's saving of sequences: both caches, and what is held besides, as one piece of bytes.
#include <algorithm>

#include "block_decoder.h"
#include "errors.h"
#include "saved_sequence.h"

namespace dspark {

namespace {

// What a cache is only good for, in words: an error shows both sides.
std::string identity_of(const llama_model * model, const llama_context * ctx,
                        const std::string & id) {
    char desc[128] = "";
    llama_model_desc(model, desc, sizeof(desc));
    const llama_context_params defaults = llama_context_default_params();  // the caches' types
    std::string text = desc;
    text += " of " + std::to_string(llama_model_n_params(model)) + " parameters in " +
            std::to_string(llama_model_size(model)) + " bytes";
    text += ", embedding " + std::to_string(llama_model_n_embd(model));
    text += ", layers " + std::to_string(llama_model_n_layer(model));
    text += ", KV heads " + std::to_string(llama_model_n_head_kv(model));
    text += ", vocabulary " + std::to_string(llama_vocab_n_tokens(llama_model_get_vocab(model)));
    text += std::string(", cache ") + ggml_type_name(defaults.type_k) + "/" +
            ggml_type_name(defaults.type_v);
    // Some models turn positions differently in a context longer than they were first trained for.
    const std::string original = metadata(
        model, (metadata(model, "general.architecture") + ".rope.scaling.original_context_length")
                   .c_str());
    if (!original.empty()) {
        const bool is_long = llama_n_ctx_seq(ctx) > std::strtoull(original.c_str(), nullptr, 10);
        text += is_long ? ", long context" : ", short context";
    }
    return text + (id.empty() ? "" : ", file " + id);
}

}  // namespace

SavedSequence BlockDecoder::small_parts(int32_t seq_id) {
    Sequence & seq = sequence(seq_id);
    if (seq.tokens.empty()) {
        throw Error(ErrorKind::value,
                    "sequence " + std::to_string(seq_id) + " holds no tokens to save");
    }
    SavedSequence saved;
    saved.identity.target = identity_of(pair_->target(), target_ctx(), config_.target_id);
    saved.tokens = seq.tokens;
    saved.n_target_bytes = llama_state_seq_get_size(target_ctx(), seq_id);
    if (drafter_) {
        saved.identity.drafter =
            identity_of(pair_->drafter(), pair_->drafter_ctx(), config_.drafter_id);
        drafter_->save(seq_id, saved);
    }
    return saved;
}

size_t BlockDecoder::saved_bytes(int32_t seq_id) {
    const Busy busy(mutex_);
    return saved_offsets(small_parts(seq_id)).end;
}

void BlockDecoder::save_sequence(int32_t seq_id, uint8_t * blob, size_t n_bytes) {
    const Busy busy(mutex_);
    const SavedSequence saved = small_parts(seq_id);
    const SavedOffsets at = saved_offsets(saved);
    const bool fits =
        at.end == n_bytes && saved.n_target_bytes > 0 &&
        llama_state_seq_get_data(target_ctx(), blob + at.target, saved.n_target_bytes, seq_id) ==
            saved.n_target_bytes &&
        (saved.n_drafter_bytes == 0 ||
         llama_state_seq_get_data(pair_->drafter_ctx(), blob + at.drafter, saved.n_drafter_bytes,
                                  seq_id) == saved.n_drafter_bytes);
    if (!fits) {
        throw Error(ErrorKind::decode,
                    "llama.cpp could not write the state of sequence " + std::to_string(seq_id));
    }
    write_saved(saved, blob);
}

void BlockDecoder::check_saved(const SavedSequence & saved) const {
    const std::string target = identity_of(pair_->target(), target_ctx(), config_.target_id);
    if (saved.identity.target != target) {
        throw Error(ErrorKind::value, "the saved sequence is of another target: " +
                                          saved.identity.target + "; this one is " + target);
    }
    if (saved.tokens.empty() || saved.tokens.size() > static_cast<size_t>(config_.n_ctx)) {
        throw Error(ErrorKind::value, "the saved sequence has " +
                                          std::to_string(saved.tokens.size()) +
                                          " tokens but the context holds " +
                                          std::to_string(config_.n_ctx) + "; use a larger n_ctx");
    }
    check_tokens(saved.tokens);
    if (!drafter_) {
        return;  // the target's part is whole without the drafter's
    }
    const std::string drafter =
        identity_of(pair_->drafter(), pair_->drafter_ctx(), config_.drafter_id);
    if (saved.identity.drafter != drafter) {
        // Taking the target's part alone would leave the drafter blind to all that was said.
        throw Error(ErrorKind::value,
                    (saved.identity.drafter.empty()
                         ? "the saved sequence has no drafter state"
                         : "the saved sequence is of another drafter: " + saved.identity.drafter) +
                        "; this one is " + drafter);
    }
    const size_t n_feature = pair_->n_feature();
    const size_t n_rows = saved.pending.size() / n_feature;
    if (saved.pending.size() % n_feature != 0 || n_rows >= BlockDrafter::kMaxPending ||
        saved.n_injected + n_rows != saved.tokens.size()) {
        throw Error(ErrorKind::value, "the saved sequence has features of " +
                                          std::to_string(saved.n_injected + n_rows) +
                                          " tokens but " + std::to_string(saved.tokens.size()) +
                                          " tokens");
    }
}

std::vector<llama_token> BlockDecoder::restore_sequence(int32_t seq_id, std::string_view blob) {
    const Busy busy(mutex_);
    Sequence & seq = sequence(seq_id);
    const SavedSequence saved = read_saved(blob);
    check_saved(saved);
    const auto * bytes = reinterpret_cast<const uint8_t *>(blob.data());
    const SavedOffsets at = saved_offsets(saved);
    empty(seq_id);
    bool ok = llama_state_seq_set_data(target_ctx(), bytes + at.target, saved.n_target_bytes,
                                       seq_id) == saved.n_target_bytes &&
              llama_memory_seq_pos_max(memory(), seq_id) + size_t{1} == saved.tokens.size();
    ok = ok && (!drafter_ || drafter_->restore(seq_id, saved, bytes + at.drafter));
    if (!ok) {
        empty(seq_id);
        throw Error(ErrorKind::decode,
                    "llama.cpp refuses the saved state of " + std::to_string(saved.tokens.size()) +
                        " tokens; sequence " + std::to_string(seq_id) + " is empty now");
    }
    // A recurrent state comes back without the snapshots that it could be rolled back to.
    seq.tokens = saved.tokens;
    seq.n_last_pass = 0;
    return seq.tokens;
}

}  // namespace dspark
