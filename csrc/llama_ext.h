// Prototypes of libllama functions that are exported with C++ linkage but whose header is not
// installed. They belong to llama.cpp's staging API, so the package checks at import that the
// running llama-cpp-python is the one it was built against.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

#include "ggml-backend.h"
#include "llama.h"

// Only the member function that is called; the layout is llama.cpp's own.
struct llama_context {
    ggml_backend_sched_t get_sched() const;
};

struct llama_memory_breakdown_data {
    size_t model = 0;
    size_t context = 0;
    size_t compute = 0;
};

// One row of n_embd floats per token of the last batch: the residual stream entering a layer.
LLAMA_API void llama_set_embeddings_layer_inp(llama_context * ctx, uint32_t layer, bool enable);
LLAMA_API float * llama_get_embeddings_layer_inp(llama_context * ctx, uint32_t layer);

// The "nextn" slot carries the confidence head's output of a DSpark drafter.
LLAMA_API void llama_set_embeddings_nextn(llama_context * ctx, bool enable, bool masked);
LLAMA_API float * llama_get_embeddings_nextn_ith(llama_context * ctx, int32_t i);

LLAMA_API std::map<ggml_backend_buffer_type_t, llama_memory_breakdown_data>
llama_get_memory_breakdown(const llama_context * ctx);
