// Loading a GGUF file into llama.cpp: checks in front, its progress, and llama.cpp's own reason
// when it refuses.
#pragma once

#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "errors.h"
#include "llama-cpp.h"

namespace dspark {

// Gets 0 to 1, of all files together; false ends the loading. Must not throw: llama.cpp is between.
using ProgressCall = std::function<bool(float)>;

// One file's part of it.
struct LoadProgress {
    const ProgressCall * call = nullptr;  // null: nobody asked
    float done = 0.0f;                    // by the files before
    float share = 1.0f;
    bool is_ended = false;  // by the call

    void install(llama_model_params & params);
};

// Collects llama.cpp's error lines while it loads a file, to put the first one into our message.
// The callback is global to the process, so one load at a time has it, and lines of other threads
// are not its own.
class LogCapture {
  public:
    LogCapture();
    ~LogCapture();
    LogCapture(const LogCapture &) = delete;
    LogCapture & operator=(const LogCapture &) = delete;

    std::string reason() const;

  private:
    static std::mutex & mutex();
    static void collect(ggml_log_level level, const char * text, void * self);

    const std::lock_guard<std::mutex> lock_;
    const std::thread::id loader_ = std::this_thread::get_id();
    ggml_log_callback callback_ = nullptr;
    void * user_data_ = nullptr;
    std::string first_error_;
};

// Throws Error(kind) with the reason.
llama_model_ptr load_model(const std::string & path, int32_t n_gpu_layers, ErrorKind kind,
                           LoadProgress progress);

void check_target_file(const std::string & path);  // throws Error(model)

float file_size(const std::string & path);  // bytes, for a share of the progress; 0: unreadable

std::string metadata(const llama_model * model, const char * key);  // empty: none

}  // namespace dspark
