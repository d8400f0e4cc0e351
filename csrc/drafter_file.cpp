#include "drafter_file.h"

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

#include "errors.h"
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

DrafterFile::DrafterFile(const std::string & path) : path_(path) {
    file_ = std::make_unique<MappedFile>(path);
    if (file_->size() == 0) {
        reject("the file is missing, empty or not readable");
    }
    gguf_.reset(gguf_init_from_buffer(file_->data(), file_->size(), {/*no_alloc*/ true, nullptr}));
    if (!gguf_) {
        reject("it is not a GGUF file, or it is cut short");
    }
    read_metadata();
    read_tensors();
}

DrafterFile::~DrafterFile() = default;

void DrafterFile::reject(const std::string & why) const {
    throw Error(ErrorKind::pair, "drafter " + path_ + ": " + why);
}

int64_t DrafterFile::read_int(const char * key, int64_t fallback) const {
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

bool DrafterFile::read_bool(const char * key, bool fallback) const {
    const int64_t id = gguf_find_key(gguf_.get(), key);
    if (id < 0) {
        return fallback;
    }
    if (gguf_get_kv_type(gguf_.get(), id) != GGUF_TYPE_BOOL) {
        reject(std::string("metadata ") + key + " is not true or false");
    }
    return gguf_get_val_bool(gguf_.get(), id);
}

std::vector<int32_t> DrafterFile::read_int_array(const char * key) const {
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

FileTensor DrafterFile::find_tensor(const char * name) const {
    const int64_t id = gguf_find_tensor(gguf_.get(), name);
    if (id < 0) {
        return {};
    }
    FileTensor tensor;
    tensor.type = gguf_get_tensor_type(gguf_.get(), id);
    const int64_t * ne = gguf_get_tensor_ne(gguf_.get(), id);
    tensor.n_columns = ne[0];
    tensor.n_rows = ne[1];
    const size_t begin =
        gguf_get_data_offset(gguf_.get()) + gguf_get_tensor_offset(gguf_.get(), id);
    const size_t size = gguf_get_tensor_size(gguf_.get(), id);
    if (begin > file_->size() || size > file_->size() - begin) {
        reject(std::string("tensor ") + name + " lies beyond the end of the file: cut short");
    }
    if (tensor.type != GGML_TYPE_F32 && !ggml_get_type_traits(tensor.type)->to_float &&
        tensor.type != GGML_TYPE_I64) {
        reject(std::string("tensor ") + name + " has type " + ggml_type_name(tensor.type) +
               ", which cannot be read as numbers");
    }
    tensor.data = file_->data() + begin;
    return tensor;
}

void DrafterFile::read_metadata() {
    const int64_t arch_id = gguf_find_key(gguf_.get(), "general.architecture");
    const bool is_string =
        arch_id >= 0 && gguf_get_kv_type(gguf_.get(), arch_id) == GGUF_TYPE_STRING;
    const std::string arch = is_string ? gguf_get_val_str(gguf_.get(), arch_id) : "(none)";
    if (arch != "dflash") {
        reject("its architecture is '" + arch +
               "'; a drafter's is 'dflash' (DSpark and DFlash files of llama.cpp)");
    }
    block_size = static_cast<int32_t>(read_int("dflash.block_size", 0));
    if (block_size < 1 || block_size > 64) {
        reject("dflash.block_size is " + std::to_string(block_size) + "; it must be 1 to 64");
    }
    sample_from_anchor = read_bool("dflash.sample_from_anchor", true);
    causal = read_bool("dflash.attention.causal", false);
    target_layers = read_int_array("dflash.target_layers");
    if (target_layers.empty()) {
        reject("dflash.target_layers, the list of tapped target layers, is missing");
    }
    if (read_int("dflash.selector_rank", 0) > 0) {
        reject("it is a DFlash2 drafter with a selector, which is not supported");
    }
    if (read_int("dflash.hyper_connection.count", 0) > 0 &&
        (read_int("dflash.attention.output_group_count", 0) <= 0 ||
         read_int("dflash.attention.sliding_window", 0) <= 0)) {
        reject("its attention.output_group_count or attention.sliding_window is missing");
    }
}

void DrafterFile::read_tensors() {
    markov_w1 = find_tensor("markov_w1.weight");
    markov_w2 = find_tensor("markov_w2.weight");
    conf_proj = find_tensor("conf_proj.weight");
    if (static_cast<bool>(markov_w1) != static_cast<bool>(markov_w2) ||
        markov_w1.n_columns != markov_w2.n_columns) {
        reject("its Markov head is incomplete: markov_w1 and markov_w2 do not belong together");
    }
    if (n_draft() < 1) {
        reject("block_size 1 leaves no slot to draft in");
    }
    const FileTensor scale = find_tensor("markov_w2.scale");
    if (scale) {
        scale.read_row(0, &markov_w2_scale);
    }
    has_confidence = static_cast<bool>(conf_proj);
    if (has_confidence && !markov_w1) {
        reject("it has a confidence head but no Markov head");
    }
    if (!has_confidence && read_bool("dflash.has_confidence_head", false)) {
        reject("its metadata promises a confidence head, but tensor conf_proj.weight is missing");
    }
    const FileTensor d2t = find_tensor("d2t");
    if (!d2t) {
        return;
    }
    if (d2t.type != GGML_TYPE_I64 || d2t.n_rows != 1) {
        reject("tensor d2t must be a list of 64-bit integers");
    }
    if (!find_tensor("output.weight")) {
        reject("it has a reduced vocabulary (d2t) but no output.weight of its own");
    }
    std::vector<int64_t> ids(d2t.n_columns);
    std::memcpy(ids.data(), d2t.data, ids.size() * sizeof(int64_t));
    if (*std::min_element(ids.begin(), ids.end()) < 0 ||
        *std::max_element(ids.begin(), ids.end()) > INT32_MAX) {
        reject("tensor d2t holds token ids below 0 or beyond 32 bits");
    }
    draft_ids.assign(ids.begin(), ids.end());
}

}  // namespace dspark
