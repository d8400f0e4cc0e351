#include "model_pair.h"

#include <algorithm>
#include <new>
#include <thread>

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include "errors.h"
#include "llama_ext.h"
#include "model_file.h"
#include "pair_check.h"

namespace dspark {

namespace {

// Largest number of rows injected into the drafter in one pass (its attention is not causal, so
// llama.cpp wants the whole batch in one micro-batch, and sizes its buffers for it).
constexpr int32_t kInjectRows = 32;
constexpr int32_t kProfileWidth = 32;  // widest pass that time_step measures

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

// Freed memory goes back to the system at once: others are waiting for it.
void give_back_memory() {
#ifdef __GLIBC__
    malloc_trim(0);
#endif
}

}  // namespace

ModelPair::ModelPair(const DecoderConfig & config, const ProgressCall & progress)
    : config_(config) {
    check_config(config);
    const float target_size = file_size(config.target_path);
    const float drafter_size = file_size(config.drafter_path);
    const float share = target_size / std::max(1.0f, target_size + drafter_size);
    load_target(config, {&progress, 0.0f, share});
    if (!config.drafter_path.empty()) {
        load_drafter_weights({&progress, share, 1.0f - share});
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

void ModelPair::load_target(const DecoderConfig & config, LoadProgress progress) {
    if (config.target_address != 0) {
        target_ = reinterpret_cast<llama_model *>(config.target_address);
    } else {
        check_target_file(config.target_path);
        owned_target_ =
            load_model(config.target_path, config.n_gpu_layers, ErrorKind::model, progress);
        target_ = owned_target_.get();
    }
    const std::string arch = metadata(target_, "general.architecture");
    if (arch == "dflash") {
        throw Error(ErrorKind::model, "model " + config.target_path +
                                          " is a drafter; give it as drafter, with its target");
    }
    if (!llama_model_has_decoder(target_) || llama_model_has_encoder(target_) ||
        llama_model_is_diffusion(target_)) {
        throw Error(ErrorKind::model, "architecture '" + arch +
                                          "' does not decode text token by token; give a causal "
                                          "language model with a tokenizer");
    }
    if (llama_vocab_type(vocab()) == LLAMA_VOCAB_TYPE_NONE || llama_vocab_n_tokens(vocab()) == 0) {
        throw Error(ErrorKind::model,
                    "the model has no tokenizer; give a causal language model with one");
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
    // Sequences of unequal verify_len fit into one micro-batch only where they share the cells;
    // cells of its own spare a sequence the others' in attention.
    params.kv_unified = !config.own_cells;
    params.swa_full = true;  // a rewind may reach behind the sliding window, if nobody took it
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

void ModelPair::load_drafter_weights() { load_drafter_weights(LoadProgress()); }

void ModelPair::load_drafter_weights(LoadProgress progress) {
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
        llama_model_ptr model = load_model(path, config_.n_gpu_layers, ErrorKind::pair, progress);
        check_pair(*file, model.get(), target_);
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
    head_tap_.install(params);
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
    for (const int32_t layer : drafter_file_->target_layers) {
        llama_set_embeddings_layer_inp(target_ctx_.get(), static_cast<uint32_t>(layer), true);
    }
    n_feature_ =
        llama_model_n_embd(target_) * static_cast<int32_t>(drafter_file_->target_layers.size());
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
        if (layer < 0 || layer > last_tap(target_)) {
            throw Error(ErrorKind::model, "layer to tap is " + std::to_string(layer) +
                                              "; this target has layers 0 to " +
                                              std::to_string(last_tap(target_)));
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
