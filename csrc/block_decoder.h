// Sequences on a target and an optional drafter: prefill, draft, verify, rewind.
//
// Owns what is in the target's cache and the emission rule; the caller owns requests and text. The
// last emitted token of a sequence (the anchor) is in no cache: it comes back as the first of
// verify_tokens. One call is one model pass, whatever the number of sequences. Not reentrant: a
// second thread gets an error.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "block_drafter.h"
#include "cpu_attention.h"
#include "model_pair.h"
#include "passes.h"
#include "sampling.h"
#include "saved_sequence.h"

namespace dspark {

// What one sequence gained in a round. All tokens are the target's own draws.
struct Verdict {
    std::vector<llama_token> tokens;  // accepted draft tokens, then the next anchor
    int32_t n_accepted = 0;
    std::vector<float> margins;  // lead of each emitted token over the runner-up, in logits
    std::vector<std::vector<TokenLogprob>> logprobs;  // per token, when asked for
    std::string error;  // why the sequence cannot go on: no token could be drawn, or its cache
                        // could not be restored and is empty; empty: none
};

struct MemoryUse {
    uint64_t target_model, target_context, target_compute;
    uint64_t drafter_model, drafter_context, drafter_compute;
};

// Rows of the last target pass, one per token: layers side by side, and the head's input.
struct TappedRows {
    int32_t n_rows = 0;
    std::vector<float> features;  // [n_rows, n_layers, n_embd]
    std::vector<float> hidden;    // [n_rows, n_embd]; empty after a prefill
};

class BlockDecoder {
  public:
    explicit BlockDecoder(const DecoderConfig & config, const ProgressCall & progress = nullptr);

    // Throws Error(value) when a sequence could not be opened with this.
    void check_sampling(const SamplingParams & sampling);

    // ---- sequences
    void open_sequence(int32_t seq_id, const SamplingParams & sampling);
    void close_sequence(int32_t seq_id);
    int32_t n_past(int32_t seq_id);  // tokens in the target's cache

    // Evaluates tokens behind those in the cache; at most n_batch at a time. for_drafter: whether
    // the drafter takes them all; otherwise it sees no more than the last ones.
    void prefill(int32_t seq_id, const std::vector<llama_token> & tokens, bool for_drafter);

    // Cuts the caches to `n_keep` tokens. Returns how many are left: n_keep, or 0 where the target
    // cannot be cut there (recurrent states, a sliding window that has moved on) and the sequence
    // had to be emptied.
    int32_t rewind(int32_t seq_id, int32_t n_keep);

    // ---- a sequence as bytes: both caches and what is held besides, so that it goes on in another
    // process as if nothing had happened.
    size_t saved_bytes(int32_t seq_id);
    void save_sequence(int32_t seq_id, uint8_t * blob, size_t n_bytes);  // n_bytes: saved_bytes
    // Replaces what an open sequence holds; returns its tokens. Throws Error(value) with the
    // sequence as before when the blob is damaged or of other models, and Error(decode) with the
    // sequence empty when llama.cpp refuses what is in it.
    std::vector<llama_token> restore_sequence(int32_t seq_id, std::string_view blob);

    // ---- a round
    std::vector<Draft> draft(const std::vector<int32_t> & seq_ids,
                             const std::vector<llama_token> & anchors);
    // verify_tokens[i] = anchor, then draft tokens; all rows go through the target in one pass.
    std::vector<Verdict> verify(const std::vector<int32_t> & seq_ids,
                                const std::vector<std::vector<llama_token>> & verify_tokens);

    // ---- what the target saw, for training a drafter; without one only
    void tap(const std::vector<int32_t> & layers);  // of the passes from now on; none: stop
    TappedRows tapped_rows();

    // ---- measuring
    double time_step(int32_t n_tokens, int32_t depth);  // on a sequence that is not open
    double time_draft(int32_t n_seq);                   // all must be closed

    // ---- the drafter's memory, given up in two steps and taken back in the other order. Texts do
    // not change; sequences that hold tokens go on drafting from what follows those.
    void release_drafter_context();
    void release_drafter();
    void load_drafter_weights();
    void load_drafter();

    void close();

    // Throws when closed. Shared, so that tokenizing goes on safely while another thread closes.
    std::shared_ptr<ModelPair> pair() const;
    const DecoderConfig & config() const { return config_; }
    int32_t n_vocab() const { return n_vocab_; }
    bool has_drafter() const { return (void)pair(), has_drafter_; }
    // Of the drafter that was given, in memory or not; all 0 without one.
    int32_t block_size() const { return block_size_; }
    int32_t n_draft() const { return n_draft_; }
    bool has_confidence() const { return has_confidence_; }
    double decode_s() const { return clock_.total_s(); }  // time spent inside llama.cpp so far
    int64_t n_rebuilds() const { return n_rebuilds_; }
    // BlockDrafter's, as far as passes have shown; empty without a drafter.
    const char * graph_chain_reason() const { return graph_chain_reason_; }
    MemoryUse memory_use();

  private:
    struct Sequence {
        bool is_open = false;
        std::vector<llama_token> tokens;  // in the target's cache, positions 0..
        std::unique_ptr<Sampler> sampler;
        int32_t n_last_pass = 0;  // tokens of the last target pass: how far a state can go back
    };
    // Held during every call that touches a context. llama.cpp contexts are not thread-safe, and a
    // silent wait would hide the caller's mistake.
    class Busy {
      public:
        explicit Busy(std::mutex & mutex);

      private:
        std::unique_lock<std::mutex> lock_;
    };

    Sequence & sequence(int32_t seq_id);
    void check_tokens(const std::vector<llama_token> & tokens) const;
    void check_seq_ids(const std::vector<int32_t> & seq_ids, size_t n_expected);
    void check_room(int32_t seq_id, size_t n_new) const;
    void check_verify(const std::vector<int32_t> & seq_ids,
                      const std::vector<std::vector<llama_token>> & verify_tokens);
    void give_hidden(bool is_wanted);
    void decode_target(const std::vector<int32_t> & seq_ids);
    void evaluate(int32_t seq_id, const std::vector<llama_token> & tokens, bool for_drafter);
    Verdict emit(Sequence & seq, const std::vector<llama_token> & verify_tokens, int32_t first_row);
    bool cut_target(int32_t seq_id);
    void rebuild(int32_t seq_id, Verdict & verdict);
    void empty(int32_t seq_id);
    void open_drafter();
    void close_drafter();
    bool window_is_whole(int32_t seq_id, int32_t n_keep) const;
    SavedSequence small_parts(int32_t seq_id);
    void check_saved(const SavedSequence & saved) const;
    void use_scratch(int32_t depth);
    void drop_scratch();
    llama_context * target_ctx() const { return pair_->target_ctx(); }
    llama_memory_t memory() const { return llama_get_memory(target_ctx()); }

    DecoderConfig config_;
    std::shared_ptr<ModelPair> pair_;
    PassClock clock_;
    CpuAttention cpu_attention_;
    std::unique_ptr<BlockDrafter> drafter_;  // null: none
    std::atomic<bool> has_drafter_{false};   // read without the lock, as is the next
    std::atomic<const char *> graph_chain_reason_{""};
    int32_t block_size_ = 0;
    int32_t n_draft_ = 0;
    bool has_confidence_ = false;
    int32_t n_vocab_ = 0;
    std::vector<Sequence> sequences_;
    BatchPtr batch_;
    std::mutex mutex_;
    std::vector<int32_t> tapped_;
    int32_t n_tapped_rows_ = 0;  // of the last pass; 0: none to read
    bool has_hidden_ = false;    // whether that pass gave the head's inputs
    int64_t n_rebuilds_ = 0;
    int32_t scratch_seq_ = -1;  // holds filler for time_step; -1: none
    int32_t scratch_depth_ = 0;
};

}  // namespace dspark
