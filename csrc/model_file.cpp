#include "model_file.h"

#include <algorithm>
#include <cstring>
#include <filesystem>

#include "gguf_file.h"

namespace dspark {

void LoadProgress::install(llama_model_params & params) {
    if (call == nullptr || !*call) {
        return;
    }
    params.progress_callback = [](float progress, void * self) {
        auto & part = *static_cast<LoadProgress *>(self);
        part.is_ended = part.is_ended || !(*part.call)(part.done + part.share * progress);
        return !part.is_ended;
    };
    params.progress_callback_user_data = this;
}

LogCapture::LogCapture() : lock_(mutex()) {
    llama_log_get(&callback_, &user_data_);
    llama_log_set(&LogCapture::collect, this);
}

LogCapture::~LogCapture() { llama_log_set(callback_, user_data_); }

std::string LogCapture::reason() const {
    if (first_error_.empty()) {
        return "llama.cpp gives no reason";
    }
    return first_error_.substr(0, first_error_.find_last_not_of(" \n") + 1);
}

std::mutex & LogCapture::mutex() {
    static std::mutex mutex;
    return mutex;
}

void LogCapture::collect(ggml_log_level level, const char * text, void * self) {
    auto & capture = *static_cast<LogCapture *>(self);
    if (std::this_thread::get_id() == capture.loader_ && level == GGML_LOG_LEVEL_ERROR &&
        std::strlen(text) > 1) {
        // The first error names the cause; later ones only say that loading failed.
        if (capture.first_error_.empty()) {
            capture.first_error_ = text;
        }
    }
}

llama_model_ptr load_model(const std::string & path, int32_t n_gpu_layers, ErrorKind kind,
                           LoadProgress progress) {
    const std::string what = kind == ErrorKind::pair ? "drafter " : "model ";
    llama_model_params params = llama_model_default_params();
    params.n_gpu_layers = n_gpu_layers;
    progress.install(params);
    const LogCapture log;
    llama_model_ptr model(llama_model_load_from_file(path.c_str(), params));
    if (!model) {
        throw Error(kind, what + path +
                              (progress.is_ended ? " is not loaded: that was ended on request"
                                                 : " cannot be loaded: " + log.reason()));
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

float file_size(const std::string & path) {
    std::error_code error;
    const auto n_bytes = path.empty() ? 0 : std::filesystem::file_size(path, error);
    return error ? 0.0f : static_cast<float>(n_bytes);
}

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

}  // namespace dspark
