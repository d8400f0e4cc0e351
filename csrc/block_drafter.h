// The drafter's side of a round: features of committed tokens go in, drafts come out.
//
// Owns the drafter's cache and the features that wait to be injected. Knows nothing of what the
// target accepts, except that only features of tokens that stay are handed in.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "markov_chain.h"
#include "markov_head.h"
#include "model_pair.h"
#include "passes.h"
#include "sampling.h"
#include "saved_sequence.h"

namespace dspark {

// What the drafter proposes for one sequence; entry k is about token k + 1 after the anchor.
struct Draft {
    std::vector<llama_token> tokens;
    std::vector<float> confidence;  // from the confidence head; empty when the drafter has none
    std::vector<float> certainty;   // lead of the drawn token over the runner-up, in logits
};

// A sequence to draft for. `before` is all its tokens without the anchor; it is put back as it was.
struct DraftInput {
    int32_t seq_id;
    llama_token anchor;
    Sampler & sampler;
    std::vector<llama_token> & before;
};

class BlockDrafter {
  public:
    // Of a sequence that is not drafted for, the features of the last kWindow tokens are kept, and
    // up to twice as many. Injecting them all would cost about 2 % of the time that a parked
    // drafter is there to save; drafts from a window of 64 tokens are nearly as good.
    static constexpr int32_t kWindow = 64;
    static constexpr int32_t kMaxPending = 2 * kWindow;

    // The pair must have a drafter and outlive this.
    BlockDrafter(ModelPair & pair, const DecoderConfig & config, PassClock & clock);

    // Takes the tapped layer inputs of rows of the last target pass: those of the next n_rows
    // tokens of the sequence. When kMaxPending wait for a draft they are injected at once if
    // `all` are wanted; otherwise the drafter forgets what is in front of the last kWindow.
    void keep_features(int32_t seq_id, int32_t first_row, int32_t n_rows, bool all);

    // Forgets everything behind the first n_keep tokens.
    void cut(int32_t seq_id, int32_t n_keep);

    // Goes on behind the first n_past tokens of an empty sequence, without their features. Until
    // the sequence is emptied the drafter attends to what follows only: its cache has a gap.
    void start_at(int32_t seq_id, int32_t n_past);

    // Puts down what it holds of a sequence, and how large the state of its cache is.
    void save(int32_t seq_id, SavedSequence & saved);

    // Takes both back, into an empty sequence. False: llama.cpp refuses the state.
    bool restore(int32_t seq_id, const SavedSequence & saved, const uint8_t * state);

    // One pass for all sequences, a full block for each.
    std::vector<Draft> draft(const std::vector<DraftInput> & inputs);

    double time_draft(int32_t n_seq);  // seconds; the cache must be empty

    // Why llama.cpp's graph runs the Markov chain; empty: the host does, in a fraction of the time.
    // A literal.
    const char * graph_chain_reason() const { return graph_chain_reason_; }

  private:
    struct Features {
        int32_t n_past = 0;          // tokens whose features are in the drafter's cache, or missed
        std::vector<float> pending;  // features of the tokens behind them, a row each
    };

    int32_t n_pending(const Features & features) const;
    void append_features(Features & features, int32_t first_row, int32_t n_rows);
    void forget_oldest(int32_t seq_id);
    bool inject(const std::vector<int32_t> & seq_ids);
    bool inject_batch();
    void drop_block(int32_t seq_id);
    bool is_chain_on_host() const { return *graph_chain_reason_ == '\0'; }
    void use_graph_chain(const char * reason);
    void decode_blocks();
    LogitRow row_of(int32_t row_index);
    float run_chain(LogitRow row, int32_t row_index, llama_token previous);
    float correct(LogitRow row, int32_t row_index, llama_token drawn, llama_token assumed);
    Draft read(const DraftInput & input, int32_t first_row);

    llama_context * ctx() const { return pair_.drafter_ctx(); }
    const DrafterFile & file() const { return *pair_.drafter_file(); }

    ModelPair & pair_;
    PassClock & clock_;
    std::unique_ptr<MarkovChain> chain_;      // null: DFlash, or the graph runs the chain
    std::unique_ptr<MarkovHead> correction_;  // null: DFlash, or the host runs the chain
    const char * graph_chain_reason_ = "";
    std::vector<Features> features_;
    BatchPtr inject_batch_;
    BatchPtr block_batch_;
    bool has_four_positions_;        // an embedding row of an M-RoPE model has four
    std::vector<float> logits_;      // one row over a reduced draft vocabulary
    std::vector<int32_t> index_of_;  // token -> its column there, or -1
};

}  // namespace dspark
