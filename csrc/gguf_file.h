// A GGUF file's metadata and tensors as they lie in the file, read through a memory map.
//
// Every reader checks the type first: gguf aborts on a wrong one. Knows no architecture.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "errors.h"
#include "ggml.h"
#include "gguf.h"

namespace dspark {

// A tensor's rows inside the mapped file; row r is dequantised on demand.
struct FileTensor {
    const uint8_t * data = nullptr;
    ggml_type type = GGML_TYPE_F32;
    int64_t n_columns = 0;
    int64_t n_rows = 0;

    explicit operator bool() const { return data != nullptr; }
    void read_row(int64_t row, float * out) const;
};

class MappedFile;

class GgufFile {
  public:
    // Throws Error(kind) when the file cannot be read; so do all checks below.
    GgufFile(const std::string & path, ErrorKind kind);
    ~GgufFile();

    [[noreturn]] void reject(const std::string & why) const;
    const gguf_context * get() const { return gguf_.get(); }

    bool has(const char * key) const { return gguf_find_key(gguf_.get(), key) >= 0; }
    int64_t read_int(const char * key, int64_t fallback) const;
    bool read_bool(const char * key, bool fallback) const;
    std::string read_string(const char * key, const std::string & fallback) const;
    std::vector<int32_t> read_int_array(const char * key) const;  // empty: none
    FileTensor find_tensor(const char * name) const;              // empty: none

    void check_vocabulary() const;

    // Frees the parsed metadata (a vocabulary takes megabytes); tensors found stay readable.
    void forget_metadata() { gguf_.reset(); }

  private:
    struct GgufDeleter {
        void operator()(gguf_context * ctx) const { gguf_free(ctx); }
    };

    std::string path_;
    ErrorKind kind_;
    std::unique_ptr<MappedFile> file_;
    std::unique_ptr<gguf_context, GgufDeleter> gguf_;
};

}  // namespace dspark
