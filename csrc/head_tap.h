// Ends a drafter's pass behind its head, in front of the Markov chain that llama.cpp's graph has.
//
// That chain costs half of a pass on a CPU; on the head's rows the host does it in a fraction of
// that. Knows no chain, and says why where a pass cannot be ended early.
#pragma once

#include <cstdint>

#include "ggml.h"
#include "passes.h"

namespace dspark {

class HeadTap {
  public:
    // To be called before the context is made from the params; this must outlive the context.
    void install(llama_context_params & params);

    // One pass of a block batch, as PassClock::decode. Its rows are then here, or refusal() says
    // why not.
    int decode(PassClock & clock, llama_context * ctx, const llama_batch & batch);
    const char * refusal() const { return refusal_; }  // empty: none

    // Of the last pass, until the context's next one. Rows are those of the batch.
    int32_t n_columns() const { return static_cast<int32_t>(head_->ne[0]); }
    float * logits(int32_t row) const { return row_of(head_, row); }  // without the Markov bias
    const float * hidden(int32_t row) const { return row_of(hidden_, row); }

  private:
    static bool on_node(ggml_tensor * node, bool ask, void * self);
    bool is_behind_head(ggml_tensor * node);
    static float * row_of(const ggml_tensor * tensor, int32_t row) {
        return static_cast<float *>(tensor->data) + row * tensor->ne[0];
    }

    bool is_watching_ = false;
    bool is_whole_ = false;  // the graph is one piece
    llama_context * ctx_ = nullptr;
    ggml_tensor * head_ = nullptr;
    ggml_tensor * hidden_ = nullptr;  // what the confidence head reads
    const char * refusal_ = "";
};

}  // namespace dspark
