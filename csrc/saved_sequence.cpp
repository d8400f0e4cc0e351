#include "saved_sequence.h"

#include <cstring>

#include "errors.h"

namespace dspark {

namespace {

constexpr char kMagic[8] = {'d', 's', 'p', 'a', 'r', 'k', 'k', 'v'};
constexpr uint32_t kVersion = 1;
constexpr uint32_t kByteOrder = 0x01020304;

// All fields are 8 bytes or packed to them, so that the header has no padding.
struct Header {
    char magic[8];
    uint32_t version;
    uint32_t byte_order;
    uint64_t checksum;  // of everything behind this field
    char build[32];     // of llama.cpp, whose states change with it; padded with zeros
    uint64_t n_target_id_bytes;
    uint64_t n_drafter_id_bytes;
    uint64_t n_tokens;
    uint64_t n_injected;
    uint64_t n_pending;  // floats
    uint64_t n_target_bytes;
    uint64_t n_drafter_bytes;
};
static_assert(sizeof(Header) == 24 + 32 + 7 * 8, "the header is written as it lies in memory");
static_assert(sizeof(LLAMA_CPP_PYTHON_VERSION) <= sizeof(Header::build), "the build has no room");

constexpr size_t kChecked = offsetof(Header, build);

// Every step maps states one to one, so a damaged word of 8 bytes is always found, and more damage
// but for one case in 2^64.
uint64_t checksum(const uint8_t * bytes, size_t n_bytes) {
    uint64_t sum = n_bytes;
    for (size_t i = 0; i < n_bytes; i += sizeof(uint64_t)) {
        uint64_t word = 0;
        std::memcpy(&word, bytes + i, std::min(sizeof(word), n_bytes - i));
        sum = (sum ^ word) * 0x9E3779B97F4A7C15u;
        sum ^= sum >> 32;
    }
    return sum;
}

[[noreturn]] void refuse(const std::string & why) {
    throw Error(ErrorKind::value, "the saved sequence " + why);
}

uint8_t * put(uint8_t * to, const void * from, size_t n_bytes) {
    if (n_bytes > 0) {
        std::memcpy(to, from, n_bytes);
    }
    return to + n_bytes;
}

}  // namespace

SavedOffsets saved_offsets(const SavedSequence & saved) {
    SavedOffsets at{};
    at.target = sizeof(Header) + saved.identity.target.size() + saved.identity.drafter.size() +
                saved.tokens.size() * sizeof(llama_token) + saved.pending.size() * sizeof(float);
    at.drafter = at.target + saved.n_target_bytes;
    at.end = at.drafter + saved.n_drafter_bytes;
    return at;
}

void write_saved(const SavedSequence & saved, uint8_t * blob) {
    Header header{};
    std::memcpy(header.magic, kMagic, sizeof(kMagic));
    header.version = kVersion;
    header.byte_order = kByteOrder;
    std::memcpy(header.build, LLAMA_CPP_PYTHON_VERSION, sizeof(LLAMA_CPP_PYTHON_VERSION));
    header.n_target_id_bytes = saved.identity.target.size();
    header.n_drafter_id_bytes = saved.identity.drafter.size();
    header.n_tokens = saved.tokens.size();
    header.n_injected = static_cast<uint64_t>(saved.n_injected);
    header.n_pending = saved.pending.size();
    header.n_target_bytes = saved.n_target_bytes;
    header.n_drafter_bytes = saved.n_drafter_bytes;

    uint8_t * to = put(blob, &header, sizeof(header));
    to = put(to, saved.identity.target.data(), saved.identity.target.size());
    to = put(to, saved.identity.drafter.data(), saved.identity.drafter.size());
    to = put(to, saved.tokens.data(), saved.tokens.size() * sizeof(llama_token));
    put(to, saved.pending.data(), saved.pending.size() * sizeof(float));
    header.checksum = checksum(blob + kChecked, saved_offsets(saved).end - kChecked);
    put(blob, &header, sizeof(header));
}

SavedSequence read_saved(std::string_view blob) {
    Header header{};
    if (blob.size() < sizeof(header)) {
        refuse("has " + std::to_string(blob.size()) + " bytes, less than its header");
    }
    std::memcpy(&header, blob.data(), sizeof(header));
    if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0) {
        refuse("does not begin as one does: it is something else");
    }
    if (header.version != kVersion || header.byte_order != kByteOrder) {
        refuse("is of version " + std::to_string(header.version) +
               " or of another byte order; this program reads version " + std::to_string(kVersion));
    }
    // Each count is held to what is left, so that no sum can wrap around.
    size_t n_left = blob.size() - sizeof(header);
    const struct {
        uint64_t count;
        size_t size;
    } parts[] = {{header.n_target_id_bytes, 1},
                 {header.n_drafter_id_bytes, 1},
                 {header.n_tokens, sizeof(llama_token)},
                 {header.n_pending, sizeof(float)},
                 {header.n_target_bytes, 1},
                 {header.n_drafter_bytes, 1}};
    for (const auto & [count, size] : parts) {
        if (count > n_left / size) {
            refuse("is cut off at " + std::to_string(blob.size()) + " bytes");
        }
        n_left -= count * size;
    }
    const auto * bytes = reinterpret_cast<const uint8_t *>(blob.data());
    if (n_left != 0 || checksum(bytes + kChecked, blob.size() - kChecked) != header.checksum) {
        refuse("is damaged: its checksum does not match");
    }
    if (std::memchr(header.build, 0, sizeof(header.build)) == nullptr ||
        std::strcmp(header.build, LLAMA_CPP_PYTHON_VERSION) != 0) {
        refuse("is of llama-cpp-python " + std::string(header.build, strnlen(header.build, 32)) +
               "; this is " LLAMA_CPP_PYTHON_VERSION);
    }
    if (header.n_injected > header.n_tokens) {
        refuse("counts more tokens of the drafter than of the target");
    }
    SavedSequence saved;
    const char * from = blob.data() + sizeof(header);
    saved.identity.target.assign(from, header.n_target_id_bytes);
    from += header.n_target_id_bytes;
    saved.identity.drafter.assign(from, header.n_drafter_id_bytes);
    from += header.n_drafter_id_bytes;
    saved.tokens.resize(header.n_tokens);
    std::memcpy(saved.tokens.data(), from, header.n_tokens * sizeof(llama_token));
    from += header.n_tokens * sizeof(llama_token);
    saved.pending.resize(header.n_pending);
    std::memcpy(saved.pending.data(), from, header.n_pending * sizeof(float));
    saved.n_injected = static_cast<int32_t>(header.n_injected);
    saved.n_target_bytes = header.n_target_bytes;
    saved.n_drafter_bytes = header.n_drafter_bytes;
    return saved;
}

}  // namespace dspark
