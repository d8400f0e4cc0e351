#include "drafter_file.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace dspark {

namespace {

constexpr int64_t kMaxLayers = 512;  // LLAMA_MAX_LAYERS
constexpr int64_t kAlignment = 32;   // of tensors in memory, TENSOR_ALIGNMENT in ggml

}  // namespace

DrafterFile::DrafterFile(const std::string & path) : file_(path, ErrorKind::pair) {
    read_metadata();
    check_layers();
    file_.check_vocabulary();
    check_tensors();
    read_tensors();
    file_.forget_metadata();
}

void DrafterFile::read_metadata() {
    const std::string arch = file_.read_string("general.architecture", "(none)");
    if (arch != "dflash") {
        file_.reject("its architecture is '" + arch +
                     "'; a drafter's is 'dflash' (DSpark and DFlash files of llama.cpp)");
    }
    block_size = static_cast<int32_t>(file_.read_int("dflash.block_size", 0));
    if (block_size < 1 || block_size > 64) {
        file_.reject("dflash.block_size is " + std::to_string(block_size) + "; it must be 1 to 64");
    }
    sample_from_anchor = file_.read_bool("dflash.sample_from_anchor", true);
    causal = file_.read_bool("dflash.attention.causal", false);
    target_layers = file_.read_int_array("dflash.target_layers");
    if (target_layers.empty()) {
        file_.reject("dflash.target_layers, the list of tapped target layers, is missing");
    }
    if (file_.read_int("dflash.selector_rank", 0) > 0) {
        file_.reject("it is a DFlash2 drafter with a selector, which is not supported");
    }
    if (file_.read_int("dflash.hyper_connection.count", 0) > 0 &&
        (file_.read_int("dflash.attention.output_group_count", 0) <= 0 ||
         file_.read_int("dflash.attention.sliding_window", 0) <= 0)) {
        file_.reject("its attention.output_group_count or attention.sliding_window is missing");
    }
}

// Numbers that llama.cpp asserts on while it loads the file or builds its graph.
void DrafterFile::check_layers() const {
    const auto check = [&](const char * name, int64_t fallback, int64_t low, int64_t high) {
        const std::string key = std::string("dflash.") + name;
        const int64_t value = file_.read_int(key.c_str(), fallback);
        if (value < low || value > high) {
            file_.reject(key + " is " + std::to_string(value) + "; it must be " +
                         std::to_string(low) + " to " + std::to_string(high));
        }
        return value;
    };
    check("block_count", 0, 1, kMaxLayers);
    check("nextn_predict_layers", 0, 0, 0);
    if (file_.read_int("dflash.hyper_connection.count", 0) == 0) {  // only those have experts
        check("expert_count", 0, 0, 0);
        check("expert_used_count", 0, 0, 0);
        check("expert_group_count", 0, 0, 0);
        check("expert_group_used_count", 0, 0, 0);
    }
    const int64_t key_length = check("attention.key_length", 2, 2, 1 << 16);
    if (file_.has("dflash.attention.key_length") &&
        check("rope.dimension_count", key_length, 2, key_length) % 2 != 0) {
        file_.reject("dflash.rope.dimension_count must be even");
    }
    check_sections(key_length);
    const std::string scaling = file_.read_string("dflash.rope.scaling.type", "none");
    if (scaling != "none" && scaling != "linear" && scaling != "yarn" && scaling != "longrope") {
        file_.reject("dflash.rope.scaling.type is '" + scaling +
                     "', which llama.cpp does not know");
    }
    const int64_t alignment = file_.read_int("general.alignment", kAlignment);
    if (alignment <= 0 || alignment % kAlignment != 0) {
        file_.reject("general.alignment is " + std::to_string(alignment) +
                     "; it must be a multiple of " + std::to_string(kAlignment));
    }
    const char * eps_key = "dflash.attention.layer_norm_rms_epsilon";
    const int64_t eps_id = gguf_find_key(file_.get(), eps_key);
    if (eps_id < 0 || gguf_get_kv_type(file_.get(), eps_id) != GGUF_TYPE_FLOAT32 ||
        !(gguf_get_val_f32(file_.get(), eps_id) >= 0.0f)) {
        file_.reject(std::string(eps_key) + " is missing or not a number of at least 0");
    }
}

// Without sections positions are plain; llama.cpp writes a single number out as four.
void DrafterFile::check_sections(int64_t key_length) const {
    const char * key = "dflash.rope.dimension_sections";
    if (!file_.has(key)) {
        return;
    }
    const std::vector<int32_t> sections = file_.read_int_array(key);
    if (sections.size() != 4 || *std::min_element(sections.begin(), sections.end()) < 0) {
        file_.reject(std::string(key) + " must be four integers of at least 0");
    }
    const int64_t n_dims = std::accumulate(sections.begin(), sections.end(), int64_t{0});
    if (n_dims > key_length) {
        file_.reject(std::string(key) + " has " + std::to_string(n_dims) +
                     " dimensions but a key has " + std::to_string(key_length));
    }
    if (n_dims > 0 && n_dims == sections[3]) {
        file_.reject(std::string(key) + " has dimensions in its last section only");
    }
}

// llama.cpp multiplies by whatever type it finds: matrices must be numbers it can dequantise, and
// vectors (norms, biases, scales) float32.
void DrafterFile::check_tensors() const {
    for (int64_t i = 0; i < gguf_get_n_tensors(file_.get()); ++i) {
        const std::string name = gguf_get_tensor_name(file_.get(), i);
        const ggml_type type = gguf_get_tensor_type(file_.get(), i);
        const int64_t * ne = gguf_get_tensor_ne(file_.get(), i);
        if (name == "d2t") {
            continue;
        }
        const bool is_vector = ne[1] == 1 && ne[2] == 1 && ne[3] == 1 && name != "conf_proj.weight";
        const bool is_readable =
            type == GGML_TYPE_F32 || ggml_get_type_traits(type)->to_float != nullptr;
        if (is_vector ? type != GGML_TYPE_F32 : !is_readable) {
            file_.reject("tensor " + name + " has type " + ggml_type_name(type) + "; it must be " +
                         (is_vector ? "f32" : "a floating-point or quantised type"));
        }
    }
}

void DrafterFile::read_tensors() {
    markov_w1 = file_.find_tensor("markov_w1.weight");
    markov_w2 = file_.find_tensor("markov_w2.weight");
    conf_proj = file_.find_tensor("conf_proj.weight");
    if (static_cast<bool>(markov_w1) != static_cast<bool>(markov_w2) ||
        markov_w1.n_columns != markov_w2.n_columns) {
        file_.reject(
            "its Markov head is incomplete: markov_w1 and markov_w2 do not belong together");
    }
    if (n_draft() < 1) {
        file_.reject("block_size 1 leaves no slot to draft in");
    }
    const FileTensor scale = file_.find_tensor("markov_w2.scale");
    if (scale) {
        if (scale.n_columns != 1) {
            file_.reject("tensor markov_w2.scale must be one number");
        }
        scale.read_row(0, &markov_w2_scale);
    }
    has_confidence = static_cast<bool>(conf_proj);
    const FileTensor bias = file_.find_tensor("conf_proj.bias");
    if (has_confidence && bias) {
        if (bias.n_columns != 1) {
            file_.reject("tensor conf_proj.bias must be one number");
        }
        bias.read_row(0, &conf_bias);
    }
    if (has_confidence && !markov_w1) {
        file_.reject("it has a confidence head but no Markov head");
    }
    if (!has_confidence && file_.read_bool("dflash.has_confidence_head", false)) {
        file_.reject(
            "its metadata promises a confidence head, but tensor conf_proj.weight is missing");
    }
    const FileTensor d2t = file_.find_tensor("d2t");
    if (!d2t) {
        return;
    }
    if (d2t.type != GGML_TYPE_I64 || d2t.n_rows != 1) {
        file_.reject("tensor d2t must be a list of 64-bit integers");
    }
    if (!file_.find_tensor("output.weight")) {
        file_.reject("it has a reduced vocabulary (d2t) but no output.weight of its own");
    }
    std::vector<int64_t> ids(d2t.n_columns);
    std::memcpy(ids.data(), d2t.data, ids.size() * sizeof(int64_t));
    if (*std::min_element(ids.begin(), ids.end()) < 0 ||
        *std::max_element(ids.begin(), ids.end()) > INT32_MAX) {
        file_.reject("tensor d2t holds token ids below 0 or beyond 32 bits");
    }
    draft_ids.assign(ids.begin(), ids.end());
}

}  // namespace dspark
