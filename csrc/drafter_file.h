// What a drafter's GGUF file says about itself: layout of the block, heads, reduced vocabulary.
//
// Everything that llama.cpp would only assert on while loading the file or building its graph is
// checked here first, so that a damaged file is an error and not an abort. Knows no contexts and no
// target.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gguf_file.h"
#include "llama.h"

namespace dspark {

class DrafterFile {
  public:
    // Throws Error(pair) with the reason when the file is not a drafter that llama.cpp can run.
    explicit DrafterFile(const std::string & path);

    int32_t block_size = 0;          // tokens that go into one drafter pass, per sequence
    bool sample_from_anchor = true;  // slot 0 gives a draft token
    bool causal = false;             // attention inside the block
    bool has_confidence = false;
    std::vector<int32_t> target_layers;
    std::vector<llama_token> draft_ids;  // d2t: token of each draft column; empty: all tokens

    FileTensor markov_w1;  // {rank, n_vocab}; empty for a DFlash drafter
    FileTensor markov_w2;  // {rank, n_draft_vocab}
    float markov_w2_scale = 1.0f;
    FileTensor conf_proj;  // {n_embd + rank, 1}
    float conf_bias = 0.0f;

    // Draft tokens one pass yields: DFlash and bonus-anchor layouts give none in slot 0.
    int32_t first_slot() const { return markov_w1 && sample_from_anchor ? 0 : 1; }
    int32_t n_draft() const { return block_size - first_slot(); }

  private:
    void read_metadata();
    void check_layers() const;
    void check_sections(int64_t key_length) const;
    void check_tensors() const;
    void read_tensors();

    GgufFile file_;
};

}  // namespace dspark
