// Drafts blocks and verifies them: positions, the two KV caches, and the emission rule.
//
// Owns what is in the caches; the caller owns requests and text. The last emitted token of a
// sequence (the anchor) is in no cache: it comes back as the first of verify_tokens. One call is
// one model pass, whatever the number of sequences. Not reentrant: a second thread gets an error.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "markov_head.h"
#include "model_pair.h"
#include "sampling.h"

namespace dspark {

// What the drafter proposes for one sequence; entry k is about the token k + 1 after the anchor.
struct Draft {
    std::vector<llama_token> tokens;
    std::vector<float> confidence;  // from the confidence head; empty when the drafter has none
    std::vector<float> certainty;   // lead of the drawn token over the runner-up, in logits
};

// What one sequence gained in a round. All tokens are the target's own draws.
struct Verdict {
    std::vector<llama_token> tokens;  // accepted draft tokens, then the next anchor
    int32_t n_accepted = 0;
    std::vector<float> margins;  // lead of each emitted token over the runner-up, in logits
    std::vector<std::vector<TokenLogprob>> logprobs;  // per token, when asked for
    std::string error;  // why no further token could be drawn (grammar); empty: none
};

struct MemoryUse {
    uint64_t target_model, target_context, target_compute;
    uint64_t drafter_model, drafter_context, drafter_compute;
};

class BlockDecoder {
  public:
    explicit BlockDecoder(const DecoderConfig & config);

    // Throws Error(value) when a sequence could not be opened with this.
    void check_sampling(const SamplingParams & sampling);

    // ---- sequences
    void open_sequence(int32_t seq_id, const SamplingParams & sampling);
    void close_sequence(int32_t seq_id);
    int32_t n_past(int32_t seq_id);  // tokens in the target's cache

    // Evaluates tokens behind those in the cache; at most n_batch at a time.
    void prefill(int32_t seq_id, const std::vector<llama_token> & tokens);

    // Cuts the caches to `n_keep` tokens. Returns how many are left: n_keep, or 0 where the target
    // cannot be cut there (recurrent states) and the sequence had to be emptied.
    int32_t rewind(int32_t seq_id, int32_t n_keep);

    // ---- a round
    std::vector<Draft> draft(const std::vector<int32_t> & seq_ids,
                             const std::vector<llama_token> & anchors);
    // verify_tokens[i] = anchor, then draft tokens; all rows go through the target in one pass.
    std::vector<Verdict> verify(const std::vector<int32_t> & seq_ids,
                                const std::vector<std::vector<llama_token>> & verify_tokens);

    // ---- measuring, on a sequence that is not open
    double time_step(int32_t n_tokens, int32_t depth);  // seconds of one target pass
    double time_draft(int32_t n_seq);                   // seconds of one drafter pass

    void release_drafter();
    void close();

    const DecoderConfig & config() const { return config_; }
    ModelPair & pair();  // throws when closed
    int32_t n_vocab() const { return n_vocab_; }
    bool has_drafter() { return pair().drafter_ctx() != nullptr; }
    double decode_s() const { return decode_s_; }  // time spent inside llama.cpp so far
    int64_t n_rebuilds() const { return n_rebuilds_; }
    MemoryUse memory_use();

  private:
    struct Sequence {
        bool is_open = false;
        std::vector<llama_token> tokens;  // in the target's cache, positions 0..
        std::unique_ptr<Sampler> sampler;
        int32_t n_last_pass = 0;     // tokens of the last target pass: how far a state can go back
        int32_t n_injected = 0;      // tokens whose features are in the drafter's cache
        std::vector<float> pending;  // features of the tokens behind them, a row each
    };
    struct BatchDeleter {
        void operator()(llama_batch * batch) const;
    };
    using BatchPtr = std::unique_ptr<llama_batch, BatchDeleter>;

    class Busy;
    Sequence & sequence(int32_t seq_id);
    void check_tokens(const std::vector<llama_token> & tokens) const;
    void check_seq_ids(const std::vector<int32_t> & seq_ids, size_t n_expected);
    void check_room(const Sequence & seq, int32_t seq_id, size_t n_new) const;
    static void add(llama_batch & batch, llama_token token, int32_t pos, int32_t seq_id,
                    bool output);
    int decode(llama_context * ctx, llama_batch & batch);
    void decode_target(llama_batch & batch, const std::vector<int32_t> & seq_ids);
    void evaluate(int32_t seq_id, const std::vector<llama_token> & tokens);
    int32_t n_pending(const Sequence & seq) const;
    void keep_features(int32_t seq_id, int32_t first_row, int32_t n_rows);
    void inject(const std::vector<int32_t> & seq_ids);
    void drop_block(int32_t seq_id);
    void read_draft(int32_t seq_id, llama_token anchor, int32_t first_row, Draft & draft);
    LogitRow draft_row(int32_t batch_index);
    Verdict emit(Sequence & seq, const std::vector<llama_token> & verify_tokens, int32_t first_row);
    bool cut_target(int32_t seq_id);
    void rebuild(int32_t seq_id);
    void clear_caches(int32_t seq_id);
    void use_scratch(int32_t depth);
    void drop_scratch();

    DecoderConfig config_;
    std::unique_ptr<ModelPair> pair_;
    std::unique_ptr<MarkovHead> markov_;
    int32_t n_vocab_ = 0;
    std::vector<Sequence> sequences_;
    BatchPtr batch_;                       // tokens
    BatchPtr inject_batch_;                // features
    std::vector<float> draft_logits_;      // one row over the draft vocabulary
    std::vector<int32_t> draft_index_of_;  // token -> draft column, or -1; empty: same
    std::mutex mutex_;
    double decode_s_ = 0.0;
    int64_t n_rebuilds_ = 0;
    int32_t scratch_seq_ = -1;  // holds filler for time_step; -1: none
    int32_t scratch_depth_ = 0;
};

}  // namespace dspark
