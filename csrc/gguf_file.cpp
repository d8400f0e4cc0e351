#include "gguf_file.h"

#ifdef _WIN32
#include <fstream>
#include <iterator>
#else
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <cstring>
#include <string_view>
#include <unordered_set>

#include "ggml.h"

namespace dspark {

// The file's bytes, read-only. Mapped where the system can: only the rows that are used then cost
// memory.
class MappedFile {
  public:
#ifdef _WIN32
    explicit MappedFile(const std::string & path) {
        std::ifstream in(path, std::ios::binary);
        bytes_.assign(std::istreambuf_iterator<char>(in), {});
    }
    const uint8_t * data() const { return reinterpret_cast<const uint8_t *>(bytes_.data()); }
    size_t size() const { return bytes_.size(); }

  private:
    std::vector<char> bytes_;
#else
    explicit MappedFile(const std::string & path) {
        const int fd = open(path.c_str(), O_RDONLY);
        struct stat info;
        if (fd >= 0 && fstat(fd, &info) == 0 && info.st_size > 0) {
            void * address = mmap(nullptr, info.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
            if (address != MAP_FAILED) {
                data_ = static_cast<const uint8_t *>(address);
                size_ = info.st_size;
            }
        }
        if (fd >= 0) {
            close(fd);
        }
    }
    ~MappedFile() {
        if (data_) {
            munmap(const_cast<uint8_t *>(data_), size_);
        }
    }
    MappedFile(const MappedFile &) = delete;
    MappedFile & operator=(const MappedFile &) = delete;
    const uint8_t * data() const { return data_; }
    size_t size() const { return size_; }

  private:
    const uint8_t * data_ = nullptr;
    size_t size_ = 0;
#endif
};

void FileTensor::read_row(int64_t row, float * out) const {
    const uint8_t * source = data + row * ggml_row_size(type, n_columns);
    if (type == GGML_TYPE_F32) {
        std::memcpy(out, source, n_columns * sizeof(float));
    } else {
        ggml_get_type_traits(type)->to_float(source, out, n_columns);
    }
}

GgufFile::GgufFile(const std::string & path, ErrorKind kind) : path_(path), kind_(kind) {
    file_ = std::make_unique<MappedFile>(path);
    if (file_->size() == 0) {
        reject("the file is missing, empty or not readable");
    }
    gguf_.reset(gguf_init_from_buffer(file_->data(), file_->size(), {/*no_alloc*/ true, nullptr}));
    if (!gguf_) {
        reject("it is not a GGUF file, or it is cut short");
    }
}

GgufFile::~GgufFile() = default;

void GgufFile::reject(const std::string & why) const {
    const char * what = kind_ == ErrorKind::pair ? "drafter " : "model ";
    throw Error(kind_, what + path_ + ": " + why);
}

int64_t GgufFile::read_int(const char * key, int64_t fallback) const {
    const int64_t id = gguf_find_key(gguf_.get(), key);
    if (id < 0) {
        return fallback;
    }
    switch (gguf_get_kv_type(gguf_.get(), id)) {
        case GGUF_TYPE_UINT32:
            return gguf_get_val_u32(gguf_.get(), id);
        case GGUF_TYPE_INT32:
            return gguf_get_val_i32(gguf_.get(), id);
        case GGUF_TYPE_UINT64:
            return static_cast<int64_t>(gguf_get_val_u64(gguf_.get(), id));
        case GGUF_TYPE_INT64:
            return gguf_get_val_i64(gguf_.get(), id);
        default:
            reject(std::string("metadata ") + key + " is not an integer");
    }
}

bool GgufFile::read_bool(const char * key, bool fallback) const {
    const int64_t id = gguf_find_key(gguf_.get(), key);
    if (id < 0) {
        return fallback;
    }
    if (gguf_get_kv_type(gguf_.get(), id) != GGUF_TYPE_BOOL) {
        reject(std::string("metadata ") + key + " is not true or false");
    }
    return gguf_get_val_bool(gguf_.get(), id);
}

std::string GgufFile::read_string(const char * key, const std::string & fallback) const {
    const int64_t id = gguf_find_key(gguf_.get(), key);
    if (id < 0) {
        return fallback;
    }
    if (gguf_get_kv_type(gguf_.get(), id) != GGUF_TYPE_STRING) {
        reject(std::string("metadata ") + key + " is not text");
    }
    return gguf_get_val_str(gguf_.get(), id);
}

std::vector<int32_t> GgufFile::read_int_array(const char * key) const {
    const int64_t id = gguf_find_key(gguf_.get(), key);
    if (id < 0 || gguf_get_kv_type(gguf_.get(), id) != GGUF_TYPE_ARRAY) {
        return {};
    }
    const gguf_type type = gguf_get_arr_type(gguf_.get(), id);
    if (type != GGUF_TYPE_INT32 && type != GGUF_TYPE_UINT32) {
        return {};
    }
    const auto * values = static_cast<const int32_t *>(gguf_get_arr_data(gguf_.get(), id));
    return {values, values + gguf_get_arr_n(gguf_.get(), id)};
}

FileTensor GgufFile::find_tensor(const char * name) const {
    const int64_t id = gguf_find_tensor(gguf_.get(), name);
    if (id < 0) {
        return {};
    }
    FileTensor tensor;
    tensor.type = gguf_get_tensor_type(gguf_.get(), id);
    const int64_t * ne = gguf_get_tensor_ne(gguf_.get(), id);
    if (std::count(ne, ne + GGML_MAX_DIMS, 0) > 0) {
        reject(std::string("tensor ") + name + " is empty");
    }
    tensor.n_columns = ne[0];
    tensor.n_rows = ne[1];
    const size_t begin =
        gguf_get_data_offset(gguf_.get()) + gguf_get_tensor_offset(gguf_.get(), id);
    const size_t size = gguf_get_tensor_size(gguf_.get(), id);
    if (begin > file_->size() || size > file_->size() - begin) {
        reject(std::string("tensor ") + name + " lies beyond the end of the file: cut short");
    }
    tensor.data = file_->data() + begin;
    return tensor;
}

// llama.cpp asserts that all token texts differ.
void GgufFile::check_vocabulary() const {
    const std::string model = read_string("tokenizer.ggml.model", "none");
    const int64_t id = gguf_find_key(gguf_.get(), "tokenizer.ggml.tokens");
    if (model == "none" || model == "no_vocab") {
        reject("it has no tokenizer");
    }
    if (id < 0 || gguf_get_kv_type(gguf_.get(), id) != GGUF_TYPE_ARRAY ||
        gguf_get_arr_type(gguf_.get(), id) != GGUF_TYPE_STRING) {
        reject("it has no tokenizer.ggml.tokens, its vocabulary");
    }
    std::unordered_set<std::string_view> texts;
    for (size_t token = 0; token < gguf_get_arr_n(gguf_.get(), id); ++token) {
        const std::string_view text = gguf_get_arr_str(gguf_.get(), id, token);
        if (!text.empty() && !texts.insert(text).second) {
            reject("its vocabulary has the text '" + std::string(text) +
                   "' twice, again as token " + std::to_string(token));
        }
    }
    for (size_t token = 0; token < gguf_get_arr_n(gguf_.get(), id); ++token) {
        if (*gguf_get_arr_str(gguf_.get(), id, token) != '\0') {
            continue;
        }
        const std::string name = "[EMPTY_" + std::to_string(token) + "]";
        if (texts.count(name) > 0) {
            reject("its vocabulary has the text '" + name + "', which llama.cpp gives to token " +
                   std::to_string(token) + ", whose own is empty");
        }
    }
}

}  // namespace dspark
