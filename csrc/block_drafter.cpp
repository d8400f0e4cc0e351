#include "block_drafter.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>

#include "errors.h"
#include "llama_ext.h"

namespace dspark {

namespace {

constexpr float kMaxCertainty = 1e4f;  // of the only token that is allowed: traces take no infinity

}  // namespace

BlockDrafter::BlockDrafter(ModelPair & pair, const DecoderConfig & config, PassClock & clock)
    : pair_(pair), clock_(clock), features_(config.n_seq) {
    if (config.chain_in_graph) {
        use_graph_chain("it was asked for");
    } else if (!MarkovChain::is_small_enough(file())) {
        use_graph_chain("the drafter's Markov head is too large for the host");
    } else if (file().markov_w1) {
        chain_ = std::make_unique<MarkovChain>(file());
    }
    const auto n_rows = static_cast<int32_t>(llama_n_ubatch(ctx()));
    block_batch_ = make_batch(config.n_seq * file().block_size, 0);
    inject_batch_ = make_batch(n_rows, pair.n_feature());
    for (Features & features : features_) {
        // Here, where a lack of memory costs no request; growing by itself takes up to twice that.
        features.pending.reserve(static_cast<size_t>(kMaxPending) * pair.n_feature());
    }
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

std::vector<Draft> BlockDrafter::draft(const std::vector<DraftInput> & inputs) {
    std::vector<int32_t> seq_ids;
    for (const DraftInput & input : inputs) {
        seq_ids.push_back(input.seq_id);
    }
    if (!inject(seq_ids)) {
        throw Error(ErrorKind::decode, "llama.cpp could not inject features into the drafter");
    }

    const llama_token mask = llama_vocab_mask(llama_model_get_vocab(pair_.drafter()));
    block_batch_->n_tokens = 0;
    for (const DraftInput & input : inputs) {
        const auto n_past = static_cast<int32_t>(input.before.size());
        for (int32_t i = 0; i < file().block_size; ++i) {
            add_token(*block_batch_, i == 0 ? input.anchor : mask, n_past + i, input.seq_id,
                      !is_chain_on_host());
        }
    }
    decode_blocks();
    std::vector<Draft> drafts;
    for (size_t s = 0; s < inputs.size(); ++s) {
        drafts.push_back(read(inputs[s], static_cast<int32_t>(s) * file().block_size));
    }
    return drafts;
}

double BlockDrafter::time_draft(int32_t n_seq) {
    block_batch_->n_tokens = 0;
    for (int32_t seq_id = 0; seq_id < n_seq; ++seq_id) {
        for (int32_t i = 0; i < file().block_size; ++i) {
            add_token(*block_batch_, /*token*/ 0, i, seq_id, !is_chain_on_host());
        }
    }
    decode_blocks();
    for (int32_t i = 0; i < block_batch_->n_tokens && is_chain_on_host(); ++i) {
        if (i % file().block_size >= file().first_slot()) {
            run_chain(row_of(i), i, /*previous*/ 0);
        }
    }
    return clock_.last_s();
}

// Runs the blocks of the batch; what they put into the cache is gone afterwards.
void BlockDrafter::decode_blocks() {
    int code = 0;
    for (bool is_done = false; !is_done;) {
        is_done = true;
        if (is_chain_on_host()) {
            code = pair_.head_tap().decode(clock_, ctx(), *block_batch_);
            if (code == 0 && *pair_.head_tap().refusal() != '\0') {
                use_graph_chain(pair_.head_tap().refusal());
                is_done = false;
            }
        } else {
            code = clock_.decode(ctx(), *block_batch_);
        }
        for (int32_t i = 0; i < block_batch_->n_tokens; i += file().block_size) {
            // The block's own keys and values must be gone before the next injection.
            drop_block(block_batch_->seq_id[i][0]);
        }
    }
    if (code != 0) {
        throw Error(ErrorKind::decode,
                    "llama.cpp could not evaluate a block of the drafter (code " +
                        std::to_string(code) + ")");
    }
}

// The blocks of the batch then need their outputs, which the chain on the host does without.
void BlockDrafter::use_graph_chain(const char * reason) {
    graph_chain_reason_ = reason;
    chain_.reset();
    if (file().markov_w1) {
        correction_ = std::make_unique<MarkovHead>(file());
    }
    llama_set_embeddings_nextn(ctx(), file().has_confidence, /*masked*/ true);
    for (int32_t i = 0; block_batch_ && i < block_batch_->n_tokens; ++i) {
        block_batch_->logits[i] = true;
    }
}

// A row of logits over the draft vocabulary, in memory that may be changed.
LogitRow BlockDrafter::row_of(int32_t row_index) {
    const std::vector<llama_token> & ids = file().draft_ids;
    const bool is_reduced = !ids.empty();
    if (is_chain_on_host()) {
        const HeadTap & tap = pair_.head_tap();
        return {tap.logits(row_index), tap.n_columns(), is_reduced ? ids.data() : nullptr,
                is_reduced ? index_of_.data() : nullptr};
    }
    float * logits = llama_get_logits_ith(ctx(), row_index);
    if (!is_reduced) {
        return {logits, llama_vocab_n_tokens(pair_.vocab())};
    }
    logits_.resize(ids.size());
    for (size_t i = 0; i < ids.size(); ++i) {
        logits_[i] = logits[ids[i]];
    }
    return {logits_.data(), static_cast<int32_t>(ids.size()), ids.data(), index_of_.data()};
}

// Adds the bias of the token in front to a row of the head; returns the slot's confidence.
float BlockDrafter::run_chain(LogitRow row, int32_t row_index, llama_token previous) {
    if (!chain_) {
        return 0.0f;
    }
    const auto start = std::chrono::steady_clock::now();
    chain_->set_previous(previous);
    chain_->add_bias(row);
    float confidence = 0.0f;
    if (file().has_confidence) {
        confidence = chain_->confidence(pair_.head_tap().hidden(row_index));
    }
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    clock_.add(elapsed.count());
    return confidence;
}

// The same for a row of the graph's chain, in which `assumed` stands in front.
float BlockDrafter::correct(LogitRow row, int32_t row_index, llama_token drawn,
                            llama_token assumed) {
    float confidence = 0.0f;
    if (file().has_confidence) {
        confidence = llama_get_embeddings_nextn_ith(ctx(), row_index)[0];
    }
    if (correction_ && drawn != assumed) {
        correction_->correct(row, drawn, assumed);
        if (file().has_confidence) {
            confidence = correction_->correct_confidence(confidence, drawn, assumed);
        }
    }
    return confidence;
}

Draft BlockDrafter::read(const DraftInput & input, int32_t first_row) {
    Draft draft;
    std::vector<llama_token> & before = input.before;
    const bool is_greedy = input.sampler.plain_greedy();
    const size_t n_past = before.size();
    before.push_back(input.anchor);
    llama_token drawn = input.anchor;    // what stands in front of the slot ...
    llama_token assumed = input.anchor;  // ... and what the graph's greedy chain put there
    for (int32_t slot = file().first_slot(); slot < file().block_size; ++slot) {
        const int32_t row_index = first_row + slot;
        const LogitRow row = row_of(row_index);
        float confidence = 0.0f;
        if (is_chain_on_host()) {
            confidence = run_chain(row, row_index, drawn);
        } else {
            const llama_token next_assumed = is_greedy ? drawn : argmax(row).token;
            confidence = correct(row, row_index, drawn, assumed);
            assumed = next_assumed;
        }
        // The token of this slot will stand behind all those in `before`.
        const Draw draw = is_greedy ? argmax(row)
                                    : input.sampler.draw(row, static_cast<int32_t>(before.size()),
                                                         before, /*with_grammar*/ false);
        if (draw.index < 0) {
            break;  // every token of the draft vocabulary is forbidden
        }
        drawn = draw.token;
        assumed = is_greedy ? drawn : assumed;
        before.push_back(drawn);
        draft.tokens.push_back(drawn);
        draft.certainty.push_back(std::min(draw.margin, kMaxCertainty));
        if (file().has_confidence) {
            draft.confidence.push_back(confidence);
        }
    }
    before.resize(n_past);
    return draft;
}

}  // namespace dspark
