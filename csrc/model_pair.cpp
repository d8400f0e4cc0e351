#include "model_pair.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <new>
#include <thread>

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include "errors.h"
#include "llama_ext.h"

namespace dspark {

namespace {

// Largest number of rows injected into the drafter in one pass (its attention is not causal, so
// llama.cpp wants the whole batch in one micro-batch, and sizes its buffers for it).
constexpr int32_t kInjectRows = 32;
constexpr int32_t kProfileWidth = 32;  // widest pass that time_step measures

// Collects llama.cpp's error lines while it loads a file, to put the first one into our message.
// The callback is global to the process, so one load at a time has it.
class LogCapture {
  public:
    LogCapture() : lock_(mutex()) {
        llama_log_get(&callback_, &user_data_);
        llama_log_set(&LogCapture::collect, this);
    }
    ~LogCapture() { llama_log_set(callback_, user_data_); }

    std::string reason() const {
        if (first_error_.empty()) {
            return "llama.cpp gives no reason";
        }
        return first_error_.substr(0, first_error_.find_last_not_of(" \n") + 1);
    }

  private:
    static std::mutex & mutex() {
        static std::mutex mutex;
        return mutex;
    }

    static void collect(ggml_log_level level, const char * text, void * self) {
        if (level == GGML_LOG_LEVEL_ERROR && std::strlen(text) > 1) {
            auto & capture = *static_cast<LogCapture *>(self);
            // The first error names the cause; later ones only say that loading failed.
            if (capture.first_error_.empty()) {
                capture.first_error_ = text;
            }
        }
    }

    const std::lock_guard<std::mutex> lock_;
    ggml_log_callback callback_ = nullptr;
    void * user_data_ = nullptr;
    std::string first_error_;
};

[[noreturn]] void bad_config(const std::string & name, int64_t value, const std::string & limit) {
    throw Error(ErrorKind::value, name + " is " + std::to_string(value) + "; it must be " + limit);
}

void set_threads(llama_context_params & params, int32_t n_threads) {
    if (n_threads == 0) {
        n_threads = std::max(1u, std::thread::hardware_concurrency());
    }
    params.n_threads = n_threads;
    params.n_threads_batch = n_threads;
}

llama_model_ptr load_model(const std::string & path, int32_t n_gpu_layers, ErrorKind kind) {
    const std::string what = kind == ErrorKind::pair ? "drafter " : "model ";
    llama_model_params params = llama_model_default_params();
    params.n_gpu_layers = n_gpu_layers;
    const LogCapture log;
    llama_model_ptr model(llama_model_load_from_file(path.c_str(), params));
    if (!model) {
        throw Error(kind, what + path + " cannot be loaded: " + log.reason());
    }
    return model;
}

// llama.cpp aborts on a vocabulary with the same text twice.
void check_target_file(const std::string & path) {
    std::error_code error;
    if (!std::filesystem::is_regular_file(path, error)) {
        throw Error(ErrorKind::model, "model " + path + " is not a file; check the path");
    }
    const GgufFile file(path, ErrorKind::model);
    if (file.read_string("tokenizer.ggml.model", "none") != "none") {
        file.check_vocabulary();
    }
}

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

// Only these also give the output of the last layer (id n_layer).
bool can_tap_output(const std::string & arch) {
    return arch == "deepseek4" || arch == "mimo2" || arch == "nemotron_h" ||
           arch == "nemotron_h_moe";
}

// Freed memory goes back to the system at once: others are waiting for it.
void give_back_memory() {
#ifdef __GLIBC__
    malloc_trim(0);
#endif
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

std::string metadata(const llama_model * model, const char * key) {
    std::string text(64, '\0');
    int32_t n = llama_model_meta_val_str(model, key, text.data(), text.size());
    if (n >= static_cast<int32_t>(text.size())) {
        text.resize(n + size_t{1});  // room for the terminating zero
        n = llama_model_meta_val_str(model, key, text.data(), text.size());
    }
    text.resize(std::max(n, 0));
    return text;
}

ModelPair::ModelPair(const DecoderConfig & config) : config_(config) {
    check_config(config);
    load_target(config);
    if (!config.drafter_path.empty()) {
        load_drafter();
    }
}

void ModelPair::check_config(const DecoderConfig & config) const {
    if (config.target_path.empty() == (config.target_address == 0)) {
        throw Error(ErrorKind::value, "give either a target path or a loaded model, not both");
    }
    const auto n_seq_limit = static_cast<int32_t>(llama_max_parallel_sequences());
    if (config.n_seq < 1 || config.n_seq > n_seq_limit) {
        bad_config("n_seq", config.n_seq, "1 to " + std::to_string(n_seq_limit));
    }
    if (config.n_ctx < 8 || config.n_ctx > (1 << 24)) {
        bad_config("n_ctx", config.n_ctx, "8 to 16777216");
    }
    if (config.n_batch < 32 || config.n_batch > 65536) {
        bad_config("n_batch", config.n_batch, "32 to 65536");
    }
    if (config.n_threads < 0 || config.n_threads > 512) {
        bad_config("n_threads", config.n_threads, "1 to 512, or 0 for all cores");
    }
    if (config.max_verify_len < 0 || config.max_verify_len > 64) {
        bad_config("max_verify_len", config.max_verify_len, "0 to 64");
    }
    if (static_cast<int64_t>(config.n_ctx) * config.n_seq > (1 << 28)) {
        bad_config("n_ctx", config.n_ctx, "small enough that n_ctx * n_seq is below 2^28");
    }
    const int32_t n_rows = config.n_seq * (1 + config.max_verify_len);
    if (n_rows > config.n_batch) {
        bad_config("n_batch", config.n_batch,
                   "at least n_seq * (1 + max_verify_len) = " + std::to_string(n_rows));
    }
}

void ModelPair::load_target(const DecoderConfig & config) {
    if (config.target_address != 0) {
        target_ = reinterpret_cast<llama_model *>(config.target_address);
    } else {
        check_target_file(config.target_path);
        owned_target_ = load_model(config.target_path, config.n_gpu_layers, ErrorKind::model);
        target_ = owned_target_.get();
    }
    const std::string arch = metadata(target_, "general.architecture");
    if (arch == "dflash") {
        throw Error(ErrorKind::model, "model " + config.target_path +
                                          " is a drafter; give it as drafter, with its target");
    }
    if (!llama_model_has_decoder(target_) || llama_model_has_encoder(target_) ||
        llama_model_is_diffusion(target_) || llama_vocab_n_tokens(vocab()) == 0) {
        throw Error(ErrorKind::model, "architecture '" + arch +
                                          "' does not decode text token by token; give a causal "
                                          "language model with a tokenizer");
    }
    is_recurrent_ = llama_model_is_recurrent(target_) || llama_model_is_hybrid(target_);

    llama_context_params params = llama_context_default_params();
    // llama.cpp cuts n_batch to n_ctx, so a tiny context must not shrink the batch.
    // It keeps the tokens that a recurrent state can go back over in one micro-batch, and asserts
    // that the micro-batch is larger than those.
    const int32_t n_batch = std::max(config.n_batch, 2 + config.max_verify_len);
    params.n_ctx = std::max(config.n_ctx * config.n_seq, n_batch);
    params.n_batch = n_batch;
    params.n_ubatch = n_batch;
    params.n_seq_max = config.n_seq;
    params.n_outputs_max = std::max(kProfileWidth, config.n_seq * (1 + config.max_verify_len));
    params.kv_unified = true;  // sequences of unequal verify_len then fit into one micro-batch
    params.swa_full = true;    // a rewind may reach behind the sliding window, if nobody took it
    params.n_rs_seq = is_recurrent_ ? config.max_verify_len : 0;
    set_threads(params, config.n_threads);
    const LogCapture log;
    target_ctx_.reset(llama_init_from_model(target_, params));
    if (!target_ctx_ || !llama_get_memory(target_ctx_.get())) {
        throw Error(ErrorKind::model, "no context of " + std::to_string(params.n_ctx) +
                                          " tokens for the target: " + log.reason() +
                                          "; try a smaller n_ctx or n_seq");
    }
    if (is_recurrent_ &&
        static_cast<int32_t>(llama_n_rs_seq(target_ctx_.get())) < config.max_verify_len) {
        no_roll_back_reason_ =
            "architecture '" + arch + "' keeps a recurrent state that llama.cpp cannot roll back";
    }
}

void ModelPair::load_drafter_weights() {
    if (drafter_model_) {
        return;
    }
    const std::string & path = config_.drafter_path;
    if (path.empty()) {
        throw Error(ErrorKind::value, "this decoder has no drafter; give drafter_path");
    }
    try {
        // Read and checked before llama.cpp sees the file: it asserts on what it does not expect.
        auto file = std::make_unique<DrafterFile>(path);
        check_same_drafter(*file);
        llama_model_ptr model = load_model(path, config_.n_gpu_layers, ErrorKind::pair);
        check_pair(*file, model.get());
        drafter_file_ = std::move(file);
        drafter_model_ = std::move(model);
    } catch (const std::bad_alloc &) {
        throw Error(ErrorKind::pair, "no memory for drafter " + path);
    }
    n_draft_ = drafter_file_->n_draft();
    has_confidence_ = drafter_file_->has_confidence;
}

// The scheduler is set up for the drafter that was loaded first, and its file may be replaced.
void ModelPair::check_same_drafter(const DrafterFile & file) const {
    if (n_draft_ > 0 && (file.n_draft() != n_draft_ || file.has_confidence != has_confidence_)) {
        throw Error(ErrorKind::pair, "drafter " + config_.drafter_path +
                                         " is another one than before; start again to use it");
    }
}

void ModelPair::load_drafter() {
    load_drafter_weights();
    if (!drafter_ctx_) {
        open_drafter_context();
    }
}

void ModelPair::open_drafter_context() {
    llama_context_params params = llama_context_default_params();
    const int32_t block = drafter_file_->block_size;
    // Positions of a block may lie beyond the last token that fits into the target's context.
    params.n_batch = std::max(kInjectRows, config_.n_seq * block);
    params.n_ctx = std::max<uint32_t>((config_.n_ctx + block) * config_.n_seq, params.n_batch);
    params.n_ubatch = params.n_batch;
    params.n_seq_max = config_.n_seq;
    params.n_outputs_max = config_.n_seq * block;
    params.kv_unified = true;
    params.swa_full = true;
    params.ctx_other = target_ctx_.get();
    set_threads(params, config_.n_threads);
    {
        const LogCapture log;
        drafter_ctx_.reset(llama_init_from_model(drafter_model_.get(), params));
        if (!drafter_ctx_) {
            throw Error(ErrorKind::pair,
                        "no context for drafter " + config_.drafter_path + ": " + log.reason());
        }
    }
    llama_set_causal_attn(drafter_ctx_.get(), drafter_file_->causal);
    llama_set_embeddings_nextn(drafter_ctx_.get(), drafter_file_->has_confidence, /*masked*/ true);
    for (const int32_t layer : drafter_file_->target_layers) {
        llama_set_embeddings_layer_inp(target_ctx_.get(), static_cast<uint32_t>(layer), true);
    }
    n_feature_ =
        llama_model_n_embd(target_) * static_cast<int32_t>(drafter_file_->target_layers.size());
}

int32_t ModelPair::last_tap() const {
    const int32_t n_layer = llama_model_n_layer(target_);
    return can_tap_output(metadata(target_, "general.architecture")) ? n_layer : n_layer - 1;
}

void ModelPair::tap(const std::vector<int32_t> & layers) {
    if (!config_.drafter_path.empty()) {
        throw Error(ErrorKind::value,
                    "a decoder with a drafter taps what that needs; tap one without a drafter");
    }
    const std::string arch = metadata(target_, "general.architecture");
    if (!can_tap(arch)) {
        throw Error(ErrorKind::model,
                    "llama.cpp cannot tap the layers of architecture '" + arch +
                        "', so no drafter can be made for this target; use lookup");
    }
    for (const int32_t layer : layers) {
        if (layer < 0 || layer > last_tap()) {
            throw Error(ErrorKind::model, "layer to tap is " + std::to_string(layer) +
                                              "; this target has layers 0 to " +
                                              std::to_string(last_tap()));
        }
    }
    for (const int32_t layer : tapped_) {
        llama_set_embeddings_layer_inp(target_ctx_.get(), static_cast<uint32_t>(layer), false);
    }
    tapped_ = layers;
    for (const int32_t layer : tapped_) {
        llama_set_embeddings_layer_inp(target_ctx_.get(), static_cast<uint32_t>(layer), true);
    }
}

void ModelPair::check_pair(const DrafterFile & file, const llama_model * drafter) const {
    const std::string arch = metadata(target_, "general.architecture");
    if (!can_tap(arch)) {
        throw Error(ErrorKind::pair, "llama.cpp cannot tap the layers of architecture '" + arch +
                                         "', so no drafter can follow this target; use lookup");
    }
    check_same_vocab(vocab(), llama_model_get_vocab(drafter));
    const int32_t n_embd_target = llama_model_n_embd(target_);
    const int32_t n_embd_drafter = llama_model_n_embd(drafter);
    if (n_embd_target != n_embd_drafter) {
        throw Error(ErrorKind::pair,
                    "the drafter reads hidden states of " + std::to_string(n_embd_drafter) +
                        " values but the target's have " + std::to_string(n_embd_target) +
                        "; use a drafter made for this target");
    }
    const int32_t last = last_tap();
    for (const int32_t layer : file.target_layers) {
        if (layer < 0 || layer > last) {
            throw Error(ErrorKind::pair, "the drafter taps target layer " + std::to_string(layer) +
                                             " but the target has layers 0 to " +
                                             std::to_string(last) +
                                             "; use a drafter made for this target");
        }
    }
    const int32_t n_vocab = llama_vocab_n_tokens(vocab());
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

void ModelPair::release_drafter_context() {
    if (!drafter_ctx_) {
        return;
    }
    drafter_ctx_.reset();
    // llama.cpp then builds the target's next graph without the taps. Its host buffer for them
    // keeps its size: llama.cpp never shrinks that.
    for (const int32_t layer : drafter_file_->target_layers) {
        llama_set_embeddings_layer_inp(target_ctx_.get(), static_cast<uint32_t>(layer), false);
    }
    give_back_memory();
}

void ModelPair::release_drafter() {
    release_drafter_context();
    drafter_model_.reset();
    drafter_file_.reset();
    give_back_memory();
}

}  // namespace dspark
