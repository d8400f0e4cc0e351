// BlockDrafter's features: kept while they wait, injected into the drafter's cache, cut and saved.
#include <algorithm>
#include <cstring>

#include "block_drafter.h"
#include "llama_ext.h"

namespace dspark {

int32_t BlockDrafter::n_pending(const Features & features) const {
    return static_cast<int32_t>(features.pending.size()) / pair_.n_feature();
}

void BlockDrafter::keep_features(int32_t seq_id, int32_t first_row, int32_t n_rows, bool all) {
    Features & features = features_[seq_id];
    for (int32_t done = 0; done < n_rows;) {
        const int32_t n = std::min(n_rows - done, kMaxPending - n_pending(features));
        append_features(features, first_row + done, n);
        done += n;
        // A drafter that fails here must not end the request: the next draft says what is wrong.
        if (n_pending(features) == kMaxPending && !(all && inject({seq_id}))) {
            forget_oldest(seq_id);
        }
    }
}

// The layers' rows side by side, in the order in which the drafter's fc reads them.
void BlockDrafter::append_features(Features & features, int32_t first_row, int32_t n_rows) {
    const auto n_embd = static_cast<size_t>(llama_model_n_embd(pair_.target()));
    const size_t n_feature = pair_.n_feature();
    const size_t old_size = features.pending.size();
    features.pending.resize(old_size + n_rows * n_feature);
    float * column = features.pending.data() + old_size;
    for (const int32_t layer : file().target_layers) {
        const float * rows =
            llama_get_embeddings_layer_inp(pair_.target_ctx(), static_cast<uint32_t>(layer));
        for (int32_t i = 0; i < n_rows; ++i) {
            std::memcpy(column + i * n_feature, rows + (first_row + i) * n_embd,
                        n_embd * sizeof(float));
        }
        column += n_embd;
    }
}

// All but the last kWindow pending features, and the cache: a cache with a hole is not accepted.
void BlockDrafter::forget_oldest(int32_t seq_id) {
    Features & features = features_[seq_id];
    const int32_t n_rows = n_pending(features) - kWindow;
    features.pending.erase(features.pending.begin(),
                           features.pending.begin() + n_rows * pair_.n_feature());
    features.n_past += n_rows;
    llama_memory_seq_rm(llama_get_memory(ctx()), seq_id, -1, -1);
}

// Writes the pending features into the drafter's cache, at the positions of their tokens. False:
// llama.cpp could not; all is as before.
bool BlockDrafter::inject(const std::vector<int32_t> & seq_ids) {
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
        return false;
    }
    for (const int32_t seq_id : seq_ids) {
        features_[seq_id].n_past += n_pending(features_[seq_id]);
        features_[seq_id].pending.clear();
    }
    return true;
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

}  // namespace dspark
