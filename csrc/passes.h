// Model passes: token batches, and how long llama.cpp took over them.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <new>

#include "llama.h"

namespace dspark {

struct BatchDeleter {
    void operator()(llama_batch * batch) const {
        llama_batch_free(*batch);
        delete batch;
    }
};
using BatchPtr = std::unique_ptr<llama_batch, BatchDeleter>;

// Room for n_rows tokens, or for n_rows rows of n_feature floats.
inline BatchPtr make_batch(int32_t n_rows, int32_t n_feature) {
    BatchPtr batch(new llama_batch(llama_batch_init(n_rows, n_feature, 1)));
    if (!batch->token && !batch->embd) {  // llama.cpp does not check its malloc
        throw std::bad_alloc();
    }
    return batch;
}

// Appends a row and returns its index; the caller sets its token or its features.
inline int32_t add_row(llama_batch & batch, int32_t pos, int32_t seq_id, bool output) {
    const int32_t row = batch.n_tokens++;
    batch.pos[row] = pos;
    batch.n_seq_id[row] = 1;
    batch.seq_id[row][0] = seq_id;
    batch.logits[row] = output;
    return row;
}

inline void add_token(llama_batch & batch, llama_token token, int32_t pos, int32_t seq_id,
                      bool output) {
    const int32_t row = add_row(batch, pos, seq_id, output);
    batch.token[row] = token;
}

// Runs batches and adds up the time that passes take.
class PassClock {
  public:
    // Returns llama_decode's code. Waits for the device, so that the time is the pass's own.
    int decode(llama_context * ctx, const llama_batch & batch) {
        const auto start = std::chrono::steady_clock::now();
        int code = kThrew;
        try {
            code = llama_decode(ctx, batch);
        } catch (const std::exception &) {
            // Compute buffers are reserved anew after taps were switched, and there may be no
            // memory for them; the next pass asks for no more than it needs.
        }
        llama_synchronize(ctx);
        const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
        last_s_ = elapsed.count();
        total_s_ += last_s_;
        return code;
    }

    // Adds what belongs to the last pass but was computed outside of llama.cpp.
    void add(double seconds) {
        last_s_ += seconds;
        total_s_ += seconds;
    }

    double last_s() const { return last_s_; }
    double total_s() const { return total_s_; }

  private:
    static constexpr int kThrew = -100;  // no code of llama.cpp's

    double last_s_ = 0.0;
    double total_s_ = 0.0;
};

}  // namespace dspark
