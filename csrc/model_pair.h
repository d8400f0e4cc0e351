// A target and an optional drafter, loaded, checked to belong together, with a context each.
//
// Owns models and contexts and the order in which they go. Knows no sequences, positions or
// tokens of any request.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "drafter_file.h"
#include "head_tap.h"
#include "llama-cpp.h"
#include "model_file.h"

namespace dspark {

struct DecoderConfig {
    std::string target_path;       // a GGUF file, or:
    uintptr_t target_address = 0;  // a llama_model* that the caller keeps alive
    std::string drafter_path;      // empty: no drafter
    int32_t n_ctx = 4096;          // tokens one sequence can hold
    int32_t n_seq = 4;             // sequences
    int32_t n_batch = 512;         // tokens in one pass at most
    int32_t n_threads = 0;         // 0: all cores
    int32_t n_gpu_layers = -1;     // -1: all that fit the backend's own rule
    int32_t max_verify_len = 8;    // draft tokens per sequence and round at most
    bool own_cells = false;        // of each sequence: faster where it has one token in each pass
    bool chain_in_graph = false;   // leave the Markov chain to llama.cpp in any case
    std::string target_id;         // tells the files' contents from others; a saved sequence
    std::string drafter_id;        // goes back only under the same
};

class ModelPair {
  public:
    // Throws Error(value), Error(model) or Error(pair).
    explicit ModelPair(const DecoderConfig & config, const ProgressCall & progress = nullptr);

    const llama_vocab * vocab() const { return llama_model_get_vocab(target_); }
    const llama_model * target() const { return target_; }
    llama_context * target_ctx() const { return target_ctx_.get(); }
    llama_context * drafter_ctx() const { return drafter_ctx_.get(); }  // null: no drafter
    const llama_model * drafter() const { return drafter_model_.get(); }
    const DrafterFile * drafter_file() const { return drafter_file_.get(); }
    HeadTap & head_tap() { return head_tap_; }  // of the drafter's context

    // The drafter goes in two steps and comes back in the other order. A step that is done already
    // does nothing; one that fails throws Error(pair) and leaves the steps before it done.
    void release_drafter_context();
    void release_drafter();  // context, then weights
    void load_drafter_weights();
    void load_drafter();  // weights, then context

    // Lets the target's passes give the inputs of these layers, without a drafter. Throws
    // Error(value) when there is one, Error(model) for a layer or architecture that has none.
    void tap(const std::vector<int32_t> & layers);

    // Whether rejected tokens can leave the target's cache; if not, why.
    bool can_roll_back() const { return no_roll_back_reason_.empty(); }
    const std::string & no_roll_back_reason() const { return no_roll_back_reason_; }
    bool is_recurrent() const { return is_recurrent_; }
    int32_t n_feature() const { return n_feature_; }  // floats per token that the drafter reads

  private:
    void check_config(const DecoderConfig & config) const;
    void load_target(const DecoderConfig & config, LoadProgress progress);
    void load_drafter_weights(LoadProgress progress);
    void check_same_drafter(const DrafterFile & file) const;
    void open_drafter_context();

    DecoderConfig config_;
    llama_model_ptr owned_target_;
    llama_model * target_ = nullptr;
    llama_context_ptr target_ctx_;
    std::unique_ptr<DrafterFile> drafter_file_;
    llama_model_ptr drafter_model_;
    HeadTap head_tap_;
    llama_context_ptr drafter_ctx_;  // refers to target_ctx_: declared after it, freed before it
    bool is_recurrent_ = false;
    std::string no_roll_back_reason_;
    int32_t n_feature_ = 0;
    std::vector<int32_t> tapped_;  // without a drafter
    int32_t n_draft_ = 0;          // of the drafter that was loaded first; 0: none yet
    bool has_confidence_ = false;
};

}  // namespace dspark
