#include "block_drafter.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "errors.h"
#include "llama_ext.h"

namespace dspark {

BlockDrafter::BlockDrafter(ModelPair & pair, int32_t n_seq, PassClock & clock)
    : pair_(pair), clock_(clock), features_(n_seq) {
    if (file().markov_w1) {
        markov_ = std::make_unique<MarkovHead>(file());
    }
    const auto n_rows = static_cast<int32_t>(llama_n_ubatch(ctx()));
    block_batch_ = make_batch(n_seq * file().block_size, 0);
    inject_batch_ = make_batch(n_rows, pair.n_feature());
    const llama_rope_type rope = llama_model_rope_type(pair.drafter());
    has_four_positions_ = rope == LLAMA_ROPE_TYPE_MROPE || rope == LLAMA_ROPE_TYPE_IMROPE;
    if (has_four_positions_) {
        std::free(inject_batch_->pos);
        inject_batch_->pos = static_cast<llama_pos *>(std::malloc(4 * n_rows * sizeof(llama_pos)));
    }
    const std::vector<llama_token> & ids = file().draft_ids;
    if (!ids.empty()) {
        index_of_.assign(llama_vocab_n_tokens(pair.vocab()), -1);
        for (size_t i = 0; i < ids.size(); ++i) {
            index_of_[ids[i]] = static_cast<int32_t>(i);
        }
    }
}

// ---------------------------------------------------------------- features

int32_t BlockDrafter::n_pending(const Features & features) const {
    return static_cast<int32_t>(features.pending.size()) / pair_.n_feature();
}

void BlockDrafter::keep_features(int32_t seq_id, int32_t first_row, int32_t n_rows) {
    std::vector<float> & pending = features_[seq_id].pending;
    const auto n_embd = static_cast<size_t>(llama_model_n_embd(pair_.target()));
    const size_t n_feature = pair_.n_feature();
    for (int32_t done = 0; done < n_rows;) {
        const int32_t n = std::min(n_rows - done, kPendingRows - n_pending(features_[seq_id]));
        const size_t old_size = pending.size();
        pending.resize(old_size + n * n_feature);
        // The layers' rows side by side, in the order in which the drafter's fc reads them.
        float * column = pending.data() + old_size;
        for (const int32_t layer : file().target_layers) {
            const float * rows =
                llama_get_embeddings_layer_inp(pair_.target_ctx(), static_cast<uint32_t>(layer));
            for (int32_t i = 0; i < n; ++i) {
                std::memcpy(column + i * n_feature, rows + (first_row + done + i) * n_embd,
                            n_embd * sizeof(float));
            }
            column += n_embd;
        }
        done += n;
        if (n_pending(features_[seq_id]) == kPendingRows) {
            inject({seq_id});
        }
    }
}

// Writes the pending features into the drafter's cache, at the positions of their tokens.
void BlockDrafter::inject(const std::vector<int32_t> & seq_ids) {
    llama_batch & batch = *inject_batch_;
    const auto n_max = static_cast<int32_t>(llama_n_ubatch(ctx()));
    const size_t n_feature = pair_.n_feature();
    bool ok = true;
    batch.n_tokens = 0;
    for (const int32_t seq_id : seq_ids) {
        const Features & features = features_[seq_id];
        for (int32_t i = 0; i < n_pending(features) && ok; ++i) {
            if (batch.n_tokens == n_max) {
                ok = inject_batch();
            }
            const int32_t row = add_row(batch, features.n_past + i, seq_id, /*output*/ false);
            std::memcpy(batch.embd + row * n_feature, features.pending.data() + i * n_feature,
                        n_feature * sizeof(float));
        }
    }
    if (!ok || !inject_batch()) {
        for (const int32_t seq_id : seq_ids) {
            drop_block(seq_id);
        }
        throw Error(ErrorKind::decode, "llama.cpp could not inject features into the drafter");
    }
    for (const int32_t seq_id : seq_ids) {
        features_[seq_id].n_past += n_pending(features_[seq_id]);
        features_[seq_id].pending.clear();
    }
}

bool BlockDrafter::inject_batch() {
    llama_batch & batch = *inject_batch_;
    if (batch.n_tokens == 0) {
        return true;
    }
    if (has_four_positions_) {  // time, height, width: all the same for text; the fourth is unused
        for (int32_t i = 0; i < batch.n_tokens; ++i) {
            batch.pos[batch.n_tokens + i] = batch.pos[i];
            batch.pos[2 * batch.n_tokens + i] = batch.pos[i];
            batch.pos[3 * batch.n_tokens + i] = 0;
        }
    }
    const int code = clock_.decode(ctx(), batch);
    batch.n_tokens = 0;
    return code == 0;
}

void BlockDrafter::cut(int32_t seq_id, int32_t n_keep) {
    Features & features = features_[seq_id];
    features.n_past = std::min(features.n_past, n_keep);
    const int32_t n_rows = std::min(n_pending(features), n_keep - features.n_past);
    features.pending.resize(static_cast<size_t>(n_rows) * pair_.n_feature());
    drop_block(seq_id);
}

void BlockDrafter::start_at(int32_t seq_id, int32_t n_past) { features_[seq_id].n_past = n_past; }

void BlockDrafter::save(int32_t seq_id, SavedSequence & saved) {
    saved.n_injected = features_[seq_id].n_past;
    saved.pending = features_[seq_id].pending;
    saved.n_drafter_bytes = llama_state_seq_get_size(ctx(), seq_id);
}

bool BlockDrafter::restore(int32_t seq_id, const SavedSequence & saved, const uint8_t * state) {
    if (llama_state_seq_set_data(ctx(), state, saved.n_drafter_bytes, seq_id) !=
            saved.n_drafter_bytes ||
        llama_memory_seq_pos_max(llama_get_memory(ctx()), seq_id) >= saved.n_injected) {
        return false;
    }
    features_[seq_id].n_past = saved.n_injected;
    features_[seq_id].pending = saved.pending;
    return true;
}

// Removes from the cache what is not the features of a committed token.
void BlockDrafter::drop_block(int32_t seq_id) {
    llama_memory_seq_rm(llama_get_memory(ctx()), seq_id, features_[seq_id].n_past, -1);
}

// ---------------------------------------------------------------- blocks

std::vector<Draft> BlockDrafter::draft(const std::vector<DraftInput> & inputs) {
    std::vector<int32_t> seq_ids;
    for (const DraftInput & input : inputs) {
        seq_ids.push_back(input.seq_id);
    }
    inject(seq_ids);

    const llama_token mask = llama_vocab_mask(llama_model_get_vocab(pair_.drafter()));
    block_batch_->n_tokens = 0;
    for (const DraftInput & input : inputs) {
        const auto n_past = static_cast<int32_t>(input.before.size());
        for (int32_t i = 0; i < file().block_size; ++i) {
            add_token(*block_batch_, i == 0 ? input.anchor : mask, n_past + i, input.seq_id,
                      /*output*/ true);
        }
    }
    const int code = clock_.decode(ctx(), *block_batch_);
    std::vector<Draft> drafts;
    for (size_t s = 0; s < inputs.size() && code == 0; ++s) {
        drafts.push_back(read(inputs[s], static_cast<int32_t>(s) * file().block_size));
    }
    for (const int32_t seq_id : seq_ids) {
        // The block's own keys and values must be gone before the next injection.
        drop_block(seq_id);
    }
    if (code != 0) {
        throw Error(ErrorKind::decode,
                    "llama.cpp could not evaluate a block of the drafter (code " +
                        std::to_string(code) + ")");
    }
    return drafts;
}

// A row of logits over the draft vocabulary, in memory that may be changed.
LogitRow BlockDrafter::row_of(int32_t batch_index) {
    float * logits = llama_get_logits_ith(ctx(), batch_index);
    const std::vector<llama_token> & ids = file().draft_ids;
    if (ids.empty()) {
        return {logits, llama_vocab_n_tokens(pair_.vocab())};
    }
    logits_.resize(ids.size());
    for (size_t i = 0; i < ids.size(); ++i) {
        logits_[i] = logits[ids[i]];
    }
    return {logits_.data(), static_cast<int32_t>(ids.size()), ids.data(), index_of_.data()};
}

Draft BlockDrafter::read(const DraftInput & input, int32_t first_row) {
    Draft draft;
    std::vector<llama_token> & before = input.before;
    const size_t n_past = before.size();
    before.push_back(input.anchor);
    llama_token drawn = input.anchor;    // what stands in front of the slot ...
    llama_token assumed = input.anchor;  // ... and what llama.cpp's greedy chain put there
    for (int32_t slot = file().first_slot(); slot < file().block_size; ++slot) {
        const LogitRow row = row_of(first_row + slot);
        const Draw greedy = argmax(row);
        float confidence = 0.0f;
        if (file().has_confidence) {
            confidence = llama_get_embeddings_nextn_ith(ctx(), first_row + slot)[0];
        }
        Draw draw = greedy;
        if (drawn != assumed || !input.sampler.plain_greedy()) {
            if (markov_ && drawn != assumed) {
                markov_->correct(row, drawn, assumed);
                if (file().has_confidence) {
                    confidence = markov_->correct_confidence(confidence, drawn, assumed);
                }
            }
            // The token of this slot will stand behind all those in `before`.
            draw = input.sampler.draw(row, static_cast<int32_t>(before.size()), before,
                                      /*with_grammar*/ false);
        }
        assumed = greedy.token;
        if (draw.index < 0) {
            break;  // every token of the draft vocabulary is forbidden
        }
        drawn = draw.token;
        before.push_back(drawn);
        draft.tokens.push_back(drawn);
        draft.certainty.push_back(draw.margin);
        if (file().has_confidence) {
            draft.confidence.push_back(confidence);
        }
    }
    before.resize(n_past);
    return draft;
}

double BlockDrafter::time_draft(int32_t n_seq) {
    block_batch_->n_tokens = 0;
    for (int32_t seq_id = 0; seq_id < n_seq; ++seq_id) {
        for (int32_t i = 0; i < file().block_size; ++i) {
            add_token(*block_batch_, /*token*/ 0, i, seq_id, /*output*/ true);
        }
    }
    const int code = clock_.decode(ctx(), *block_batch_);
    for (int32_t seq_id = 0; seq_id < n_seq; ++seq_id) {
        drop_block(seq_id);
    }
    if (code != 0) {
        throw Error(ErrorKind::decode,
                    "llama.cpp could not evaluate a block of the drafter (code " +
                        std::to_string(code) + ")");
    }
    return clock_.last_s();
}

}  // namespace dspark
