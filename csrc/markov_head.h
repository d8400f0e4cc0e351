// The Markov head's rows on the host: what a drafted row of logits becomes when the token in front
// of it is another one than llama.cpp's greedy chain assumed (DSpark section 3.2).
#pragma once

#include <vector>

#include "drafter_file.h"
#include "sampling.h"

namespace dspark {

class MarkovHead {
  public:
    explicit MarkovHead(const DrafterFile & file);

    // Adds (W1[drawn] - W1[assumed]) . W2[v] to the likeliest candidates of the row. The others
    // keep the bias of `assumed`: that can only cost acceptance, since the target decides.
    void correct(LogitRow row, llama_token drawn, llama_token assumed);

    // The same shift for the confidence head's logit; takes and returns a probability.
    float correct_confidence(float confidence, llama_token drawn, llama_token assumed);

  private:
    void read_difference(llama_token drawn, llama_token assumed);

    const DrafterFile & file_;
    std::vector<float> w_conf_;  // the confidence head's weights of the Markov embedding
    std::vector<float> difference_;
    std::vector<float> row_;
    std::vector<int32_t> candidates_;
};

}  // namespace dspark
