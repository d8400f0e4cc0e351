#include "head_tap.h"

#include <cstring>

#include "llama_ext.h"

namespace dspark {

namespace {

bool has_name(const ggml_tensor * tensor, const char * name) {
    return tensor != nullptr && std::strcmp(tensor->name, name) == 0;
}

bool is_on_host(const ggml_tensor * tensor) {
    const ggml_tensor * owner = tensor->view_src ? tensor->view_src : tensor;
    return owner->buffer && ggml_backend_buffer_is_host(owner->buffer);
}

bool is_in_one_piece(llama_context * ctx) {
#ifdef _WIN32
    (void)ctx;  // llama.dll does not export get_sched
    return false;
#else
    return ggml_backend_sched_get_n_splits(ctx->get_sched()) == 1;
#endif
}

const char * why_not(const ggml_tensor * head, const ggml_tensor * hidden, int64_t n_rows,
                     bool is_whole) {
    if (!is_whole) {
        return "the drafter's graph does not run on the CPU alone";
    }
    if (head == nullptr || hidden == nullptr || head->ne[1] != n_rows || hidden->ne[1] != n_rows ||
        head->type != GGML_TYPE_F32 || hidden->type != GGML_TYPE_F32) {
        return "the drafter's graph has another form than is known";
    }
    if (!is_on_host(head) || !is_on_host(hidden)) {
        return "the drafter's logits are not in the host's memory";
    }
    return "";
}

}  // namespace

void HeadTap::install(llama_context_params & params) {
    params.cb_eval = &HeadTap::on_node;
    params.cb_eval_user_data = this;
}

int HeadTap::decode(PassClock & clock, llama_context * ctx, const llama_batch & batch) {
    ctx_ = ctx;
    head_ = nullptr;
    hidden_ = nullptr;
    is_whole_ = false;
    is_watching_ = true;
    const int code = clock.decode(ctx, batch);
    is_watching_ = false;
    refusal_ = code == 0 ? why_not(head_, hidden_, batch.n_tokens, is_whole_) : "";
    return code;
}

// llama.cpp asks, node after node in the order of computing, which one is wanted. It computes up to
// that one and asks whether to go on, which it does with the next piece of the graph in any case:
// on rows that nobody has computed, so a graph of several pieces runs to its end.
bool HeadTap::on_node(ggml_tensor * node, bool ask, void * self) {
    auto & tap = *static_cast<HeadTap *>(self);
    return ask && tap.is_watching_ && tap.is_behind_head(node) && tap.is_whole_;
}

// The head is the product with "result_norm", scaled or not. The node behind it is a view or a copy
// of a few numbers: the last one to be computed.
bool HeadTap::is_behind_head(ggml_tensor * node) {
    if (head_ != nullptr && node->src[0] == head_ && node->op == GGML_OP_MUL) {
        head_ = node;
    } else if (head_ != nullptr) {
        is_watching_ = false;
        return true;
    } else if (node->op == GGML_OP_MUL_MAT && has_name(node->src[1], "result_norm")) {
        head_ = node;
        is_whole_ = is_in_one_piece(ctx_);
    } else if (has_name(node, "hc_head") ||  // of DeepSeek-V4 drafters, in front of the norm
               (hidden_ == nullptr && has_name(node, "result_norm"))) {
        hidden_ = node;
    }
    return false;
}

}  // namespace dspark
