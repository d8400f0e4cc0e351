// Makes attention on the processor round alike in passes of every width.
//
// ggml adds up attention differently for one token (the cache split among threads), a few and many.
// A pass that verifies drafts would then draw other tokens than plain decoding wherever two nearly
// tie. ggml's reference path has one order of adding for all; prompts are left to the fast one.
#pragma once

#include "ggml-backend.h"
#include "llama.h"

namespace dspark {

class CpuAttention {
  public:
    CpuAttention() = default;
    explicit CpuAttention(llama_context * ctx);

    // Of the passes from now on. Does nothing where the processor is no backend of the context.
    void use_one_order(bool on) const;

  private:
    using SetReference = void (*)(ggml_backend_t, bool);

    ggml_backend_t cpu_ = nullptr;
    SetReference set_reference_ = nullptr;
};

}  // namespace dspark
