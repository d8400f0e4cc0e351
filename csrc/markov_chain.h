// The Markov chain and the confidence head on the host, over the rows of a pass that ended at the
// drafter's head (DSpark section 3.2). The caller decides which token stands in front of a slot.
#pragma once

#include <vector>

#include "drafter_file.h"
#include "sampling.h"

namespace dspark {

class MarkovChain {
  public:
    // The host adds up a larger head more slowly than llama.cpp's graph does, and its copy of W2
    // would weigh.
    static bool is_small_enough(const DrafterFile & file);

    explicit MarkovChain(const DrafterFile & file);

    // The token in front of the slot that the two below are about.
    void set_previous(llama_token token);
    // Adds W1[previous] . W2[v] to every column v of the head's row.
    void add_bias(LogitRow row) const;
    // The confidence head's probability for a slot; `hidden` is its row in front of the head.
    float confidence(const float * hidden) const;

  private:
    const DrafterFile & file_;
    std::vector<float> w2_;      // scaled W2 in tiles of columns: [n_tiles, rank, tile]
    std::vector<float> w_conf_;  // [n_embd + rank]: of the hidden state, of the embedding
    float conf_bias_ = 0.0f;
    std::vector<float> embedding_;  // W1[previous]
};

}  // namespace dspark
