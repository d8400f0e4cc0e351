#include "pair_check.h"

#include <algorithm>
#include <cstring>

#include "errors.h"
#include "model_file.h"

namespace dspark {

// Architectures whose graph in llama.cpp 0c1e570 fills t_layer_inp (src/models/*.cpp). For any
// other one llama.cpp would abort when asked for a layer's input.
bool can_tap(const std::string & arch) {
    static const char * const kArchs[] = {
        "bailingmoe3",  "deepseek4", "gemma4",     "gpt-oss",        "hunyuan-dense", "hunyuan_vl",
        "lfm2",         "lfm2moe",   "llama",      "mimo2",          "minimax-01",    "minimax-m2",
        "muse-glimmer", "nanbeige",  "nemotron_h", "nemotron_h_moe", "qwen3",         "qwen35",
        "qwen35moe",    "qwen3moe",  "qwen3next",  "qwen4exp"};
    return std::find(std::begin(kArchs), std::end(kArchs), arch) != std::end(kArchs);
}

namespace {

// Only these also give the output of the last layer (id n_layer).
bool can_tap_output(const std::string & arch) {
    return arch == "deepseek4" || arch == "mimo2" || arch == "nemotron_h" ||
           arch == "nemotron_h_moe";
}

std::string quoted(const char * text) { return std::string("'") + (text ? text : "") + "'"; }

void check_same_vocab(const llama_vocab * target, const llama_vocab * drafter) {
    const int32_t n_target = llama_vocab_n_tokens(target);
    const int32_t n_drafter = llama_vocab_n_tokens(drafter);
    if (n_target != n_drafter) {
        throw Error(ErrorKind::pair, "the drafter's vocabulary has " + std::to_string(n_drafter) +
                                         " tokens but the target's has " +
                                         std::to_string(n_target) +
                                         "; use a drafter made for this target");
    }
    for (llama_token token = 0; token < n_target; ++token) {
        const char * a = llama_vocab_get_text(target, token);
        const char * b = llama_vocab_get_text(drafter, token);
        if (std::strcmp(a ? a : "", b ? b : "") != 0) {
            throw Error(ErrorKind::pair, "token " + std::to_string(token) + " is " + quoted(a) +
                                             " in the target but " + quoted(b) +
                                             " in the drafter; use a drafter made for this target");
        }
    }
    const struct {
        const char * name;
        llama_token target, drafter;
    } special[] = {
        {"beginning-of-sequence", llama_vocab_bos(target), llama_vocab_bos(drafter)},
        {"end-of-sequence", llama_vocab_eos(target), llama_vocab_eos(drafter)},
    };
    for (const auto & [name, in_target, in_drafter] : special) {
        if (in_target != in_drafter) {
            throw Error(ErrorKind::pair, std::string("the ") + name + " token is " +
                                             std::to_string(in_target) + " in the target but " +
                                             std::to_string(in_drafter) +
                                             " in the drafter; use a drafter made for this target");
        }
    }
}

}  // namespace

int32_t last_tap(const llama_model * target) {
    const int32_t n_layer = llama_model_n_layer(target);
    return can_tap_output(metadata(target, "general.architecture")) ? n_layer : n_layer - 1;
}

void check_pair(const DrafterFile & file, const llama_model * drafter, const llama_model * target) {
    const std::string arch = metadata(target, "general.architecture");
    if (!can_tap(arch)) {
        throw Error(ErrorKind::pair, "llama.cpp cannot tap the layers of architecture '" + arch +
                                         "', so no drafter can follow this target; use lookup");
    }
    check_same_vocab(llama_model_get_vocab(target), llama_model_get_vocab(drafter));
    const int32_t n_embd_target = llama_model_n_embd(target);
    const int32_t n_embd_drafter = llama_model_n_embd(drafter);
    if (n_embd_target != n_embd_drafter) {
        throw Error(ErrorKind::pair,
                    "the drafter reads hidden states of " + std::to_string(n_embd_drafter) +
                        " values but the target's have " + std::to_string(n_embd_target) +
                        "; use a drafter made for this target");
    }
    const int32_t last = last_tap(target);
    for (const int32_t layer : file.target_layers) {
        if (layer < 0 || layer > last) {
            throw Error(ErrorKind::pair, "the drafter taps target layer " + std::to_string(layer) +
                                             " but the target has layers 0 to " +
                                             std::to_string(last) +
                                             "; use a drafter made for this target");
        }
    }
    const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(target));
    const llama_token mask = llama_vocab_mask(llama_model_get_vocab(drafter));
    if (mask < 0 || mask >= n_vocab) {
        throw Error(ErrorKind::pair, "the drafter's mask token is " + std::to_string(mask) +
                                         "; it must be a token of the vocabulary, 0 to " +
                                         std::to_string(n_vocab - 1));
    }
    for (const llama_token id : file.draft_ids) {
        if (id >= n_vocab) {
            throw Error(ErrorKind::pair, "the drafter's d2t names token " + std::to_string(id) +
                                             " but the vocabulary ends at " +
                                             std::to_string(n_vocab - 1));
        }
    }
}

}  // namespace dspark
