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
#include <unordered_set>

#include "errors.h"
#include "ggml.h"

namespace dspark {

namespace {

constexpr int64_t kMaxLayers = 512;  // LLAMA_MAX_LAYERS
constexpr int64_t kAlignment = 32;   // of tensors in memory, TENSOR_ALIGNMENT in ggml

}  // namespace

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
    check_layers();
    check_vocabulary();
    check_tensors();
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

std::string DrafterFile::read_string(const char * key, const std::string & fallback) const {
    const int64_t id = gguf_find_key(gguf_.get(), key);
    if (id < 0) {
        return fallback;
    }
    if (gguf_get_kv_type(gguf_.get(), id) != GGUF_TYPE_STRING) {
        reject(std::string("metadata ") + key + " is not text");
    }
    return gguf_get_val_str(gguf_.get(), id);
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
    tensor.data = file_->data() + begin;
    return tensor;
}

void DrafterFile::read_metadata() {
    const std::string arch = read_string("general.architecture", "(none)");
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

// Numbers that llama.cpp asserts on while it loads the file or builds its graph.
void DrafterFile::check_layers() const {
    const auto check = [&](const char * name, int64_t fallback, int64_t low, int64_t high) {
        const std::string key = std::string("dflash.") + name;
        const int64_t value = read_int(key.c_str(), fallback);
        if (value < low || value > high) {
            reject(key + " is " + std::to_string(value) + "; it must be " + std::to_string(low) +
                   " to " + std::to_string(high));
        }
        return value;
    };
    check("block_count", 0, 1, kMaxLayers);
    check("nextn_predict_layers", 0, 0, 0);
    if (read_int("dflash.hyper_connection.count", 0) == 0) {  // only those have experts
        check("expert_count", 0, 0, 0);
        check("expert_used_count", 0, 0, 0);
        check("expert_group_count", 0, 0, 0);
        check("expert_group_used_count", 0, 0, 0);
    }
    const int64_t key_length = check("attention.key_length", 2, 2, 1 << 16);
    if (gguf_find_key(gguf_.get(), "dflash.attention.key_length") >= 0 &&
        check("rope.dimension_count", key_length, 2, key_length) % 2 != 0) {
        reject("dflash.rope.dimension_count must be even");
    }
    int64_t n_section_dims = 0;
    for (const int32_t n_dims : read_int_array("dflash.rope.dimension_sections")) {
        n_section_dims += std::clamp(n_dims, 0, 1 << 16);
    }
    if (n_section_dims > key_length) {
        reject("dflash.rope.dimension_sections has " + std::to_string(n_section_dims) +
               " dimensions but a key has " + std::to_string(key_length));
    }
    const std::string scaling = read_string("dflash.rope.scaling.type", "none");
    if (scaling != "none" && scaling != "linear" && scaling != "yarn" && scaling != "longrope") {
        reject("dflash.rope.scaling.type is '" + scaling + "', which llama.cpp does not know");
    }
    const int64_t alignment = read_int("general.alignment", kAlignment);
    if (alignment <= 0 || alignment % kAlignment != 0) {
        reject("general.alignment is " + std::to_string(alignment) + "; it must be a multiple of " +
               std::to_string(kAlignment));
    }
    const char * eps_key = "dflash.attention.layer_norm_rms_epsilon";
    const int64_t eps_id = gguf_find_key(gguf_.get(), eps_key);
    if (eps_id < 0 || gguf_get_kv_type(gguf_.get(), eps_id) != GGUF_TYPE_FLOAT32 ||
        !(gguf_get_val_f32(gguf_.get(), eps_id) >= 0.0f)) {
        reject(std::string(eps_key) + " is missing or not a number of at least 0");
    }
}

// llama.cpp asserts that all token texts differ.
void DrafterFile::check_vocabulary() const {
    const std::string model = read_string("tokenizer.ggml.model", "none");
    const int64_t id = gguf_find_key(gguf_.get(), "tokenizer.ggml.tokens");
    if (model == "none" || model == "no_vocab") {
        reject("it has no tokenizer; it needs a copy of its target's");
    }
    if (id < 0 || gguf_get_kv_type(gguf_.get(), id) != GGUF_TYPE_ARRAY ||
        gguf_get_arr_type(gguf_.get(), id) != GGUF_TYPE_STRING) {
        reject("it has no tokenizer.ggml.tokens, the vocabulary of its target");
    }
    std::unordered_set<std::string> texts;
    for (size_t token = 0; token < gguf_get_arr_n(gguf_.get(), id); ++token) {
        const std::string text = gguf_get_arr_str(gguf_.get(), id, token);
        if (!text.empty() && !texts.insert(text).second) {
            reject("its vocabulary has the text '" + text + "' twice, again as token " +
                   std::to_string(token));
        }
    }
}

// llama.cpp multiplies by whatever type it finds: matrices must be numbers it can dequantise, and
// vectors (norms, biases, scales) float32.
void DrafterFile::check_tensors() const {
    for (int64_t i = 0; i < gguf_get_n_tensors(gguf_.get()); ++i) {
        const std::string name = gguf_get_tensor_name(gguf_.get(), i);
        const ggml_type type = gguf_get_tensor_type(gguf_.get(), i);
        const int64_t * ne = gguf_get_tensor_ne(gguf_.get(), i);
        if (name == "d2t") {
            continue;
        }
        const bool is_vector = ne[1] == 1 && ne[2] == 1 && ne[3] == 1 && name != "conf_proj.weight";
        const bool is_readable =
            type == GGML_TYPE_F32 || ggml_get_type_traits(type)->to_float != nullptr;
        if (is_vector ? type != GGML_TYPE_F32 : !is_readable) {
            reject("tensor " + name + " has type " + ggml_type_name(type) + "; it must be " +
                   (is_vector ? "f32" : "a floating-point or quantised type"));
        }
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
        if (scale.n_columns != 1) {
            reject("tensor markov_w2.scale must be one number");
        }
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
