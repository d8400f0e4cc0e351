// BlockDecoder's memory: the drafter's, given up and taken back, and how much there is in use.
#include <new>

#include "block_decoder.h"
#include "errors.h"
#include "llama_ext.h"

namespace dspark {

void BlockDecoder::open_drafter() {
    try {
        drafter_ = std::make_unique<BlockDrafter>(*pair_, config_, clock_);
    } catch (const std::bad_alloc &) {
        pair_->release_drafter_context();
        throw Error(ErrorKind::pair, "no memory to draft with " + config_.drafter_path);
    }
    graph_chain_reason_ = drafter_->graph_chain_reason();
    for (int32_t seq_id = 0; seq_id < config_.n_seq; ++seq_id) {
        drafter_->start_at(seq_id, static_cast<int32_t>(sequences_[seq_id].tokens.size()));
    }
    has_drafter_ = true;
}

void BlockDecoder::close_drafter() {
    has_drafter_ = false;
    drafter_.reset();
}

void BlockDecoder::release_drafter_context() {
    const Busy busy(mutex_);
    (void)pair();
    close_drafter();
    pair_->release_drafter_context();
}

void BlockDecoder::release_drafter() {
    const Busy busy(mutex_);
    (void)pair();
    close_drafter();
    pair_->release_drafter();
}

void BlockDecoder::load_drafter_weights() {
    const Busy busy(mutex_);
    pair()->load_drafter_weights();
}

void BlockDecoder::load_drafter() {
    const Busy busy(mutex_);
    pair()->load_drafter();
    if (!drafter_) {
        open_drafter();
    }
}

void BlockDecoder::close() {
    const Busy busy(mutex_);
    close_drafter();
    sequences_.clear();
    std::atomic_store(&pair_, std::shared_ptr<ModelPair>());
}

MemoryUse BlockDecoder::memory_use() {
    const Busy busy(mutex_);
    (void)pair();
    MemoryUse use{};
    for (const auto & [type, bytes] : llama_get_memory_breakdown(target_ctx())) {
        use.target_model += bytes.model;
        use.target_context += bytes.context;
        use.target_compute += bytes.compute;
    }
    if (drafter_) {
        for (const auto & [type, bytes] : llama_get_memory_breakdown(pair_->drafter_ctx())) {
            use.drafter_model += bytes.model;
            use.drafter_context += bytes.context;
            use.drafter_compute += bytes.compute;
        }
    } else if (pair_->drafter()) {
        use.drafter_model = llama_model_size(pair_->drafter());
    }
    return use;
}

}  // namespace dspark
