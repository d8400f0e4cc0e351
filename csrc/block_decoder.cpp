#include "block_decoder.h"

#include <algorithm>

#include "errors.h"
#include "llama_ext.h"

namespace dspark {

BlockDecoder::Busy::Busy(std::mutex & mutex) : lock_(mutex, std::try_to_lock) {
    if (!lock_.owns_lock()) {
        throw Error(ErrorKind::decode,
                    "the decoder is in use by another thread; give each thread its own, or take "
                    "turns");
    }
}

BlockDecoder::BlockDecoder(const DecoderConfig & config) : config_(config) {
    pair_ = std::make_shared<ModelPair>(config);
    n_vocab_ = llama_vocab_n_tokens(pair_->vocab());
    sequences_.resize(config.n_seq);
    batch_ = make_batch(config.n_batch, 0);
    cpu_attention_ = CpuAttention(pair_->target_ctx());
    if (const DrafterFile * file = pair_->drafter_file()) {
        block_size_ = file->block_size;
        n_draft_ = file->n_draft();
        has_confidence_ = file->has_confidence;
        open_drafter();
    }
}

std::shared_ptr<ModelPair> BlockDecoder::pair() const {
    std::shared_ptr<ModelPair> pair = std::atomic_load(&pair_);
    if (!pair) {
        throw Error(ErrorKind::value, "the decoder is closed; make a new one");
    }
    return pair;
}

// ---------------------------------------------------------------- checks

BlockDecoder::Sequence & BlockDecoder::sequence(int32_t seq_id) {
    (void)pair();
    if (seq_id < 0 || seq_id >= config_.n_seq) {
        throw Error(ErrorKind::value, "seq_id is " + std::to_string(seq_id) +
                                          "; this decoder has sequences 0 to " +
                                          std::to_string(config_.n_seq - 1));
    }
    if (!sequences_[seq_id].is_open) {
        throw Error(ErrorKind::value, "sequence " + std::to_string(seq_id) +
                                          " is not open; call open_sequence first");
    }
    return sequences_[seq_id];
}

void BlockDecoder::check_tokens(const std::vector<llama_token> & tokens) const {
    for (const llama_token token : tokens) {
        if (token < 0 || token >= n_vocab_) {
            throw Error(ErrorKind::value, "token id is " + std::to_string(token) +
                                              "; this model has ids 0 to " +
                                              std::to_string(n_vocab_ - 1));
        }
    }
}

void BlockDecoder::check_seq_ids(const std::vector<int32_t> & seq_ids, size_t n_expected) {
    if (seq_ids.empty() || seq_ids.size() != n_expected) {
        throw Error(ErrorKind::value, "got " + std::to_string(seq_ids.size()) + " sequences and " +
                                          std::to_string(n_expected) +
                                          " entries for them; give one entry per sequence, and at "
                                          "least one");
    }
    for (size_t i = 0; i < seq_ids.size(); ++i) {
        sequence(seq_ids[i]);
        if (std::count(seq_ids.begin(), seq_ids.end(), seq_ids[i]) > 1) {
            throw Error(ErrorKind::value, "sequence " + std::to_string(seq_ids[i]) +
                                              " is given twice; give each once");
        }
    }
}

void BlockDecoder::check_room(int32_t seq_id, size_t n_new) const {
    const size_t n_past = sequences_[seq_id].tokens.size();
    if (n_past + n_new > static_cast<size_t>(config_.n_ctx)) {
        throw Error(ErrorKind::context_full,
                    "sequence " + std::to_string(seq_id) + " holds " + std::to_string(n_past) +
                        " tokens and " + std::to_string(n_new) +
                        " more do not fit into the context of " + std::to_string(config_.n_ctx) +
                        "; use a larger n_ctx or shorter text");
    }
}

void BlockDecoder::check_verify(const std::vector<int32_t> & seq_ids,
                                const std::vector<std::vector<llama_token>> & verify_tokens) {
    check_seq_ids(seq_ids, verify_tokens.size());
    const size_t limit = size_t{1} + static_cast<size_t>(config_.max_verify_len);
    for (size_t s = 0; s < seq_ids.size(); ++s) {
        if (verify_tokens[s].empty() || verify_tokens[s].size() > limit) {
            throw Error(ErrorKind::value, "verify_tokens of sequence " +
                                              std::to_string(seq_ids[s]) + " has " +
                                              std::to_string(verify_tokens[s].size()) +
                                              " tokens; give the anchor and at most " +
                                              std::to_string(config_.max_verify_len) +
                                              " draft tokens (max_verify_len)");
        }
        check_tokens(verify_tokens[s]);
        check_room(seq_ids[s], verify_tokens[s].size());
    }
}

// ---------------------------------------------------------------- sequences

void BlockDecoder::check_sampling(const SamplingParams & sampling) {
    const Sampler sampler(sampling, pair()->vocab(), n_vocab_);
}

void BlockDecoder::open_sequence(int32_t seq_id, const SamplingParams & sampling) {
    const Busy busy(mutex_);
    auto sampler = std::make_unique<Sampler>(sampling, pair()->vocab(), n_vocab_);
    drop_scratch();
    if (seq_id >= 0 && seq_id < config_.n_seq) {
        sequences_[seq_id].is_open = true;
    }
    sequence(seq_id).sampler = std::move(sampler);
}

void BlockDecoder::close_sequence(int32_t seq_id) {
    const Busy busy(mutex_);
    sequence(seq_id);
    empty(seq_id);
    sequences_[seq_id] = Sequence();
}

int32_t BlockDecoder::n_past(int32_t seq_id) {
    const Busy busy(mutex_);
    return static_cast<int32_t>(sequence(seq_id).tokens.size());
}

void BlockDecoder::prefill(int32_t seq_id, const std::vector<llama_token> & tokens) {
    const Busy busy(mutex_);
    sequence(seq_id);
    if (tokens.empty() || tokens.size() > static_cast<size_t>(config_.n_batch)) {
        throw Error(ErrorKind::value, "prefill got " + std::to_string(tokens.size()) +
                                          " tokens; give 1 to n_batch = " +
                                          std::to_string(config_.n_batch) + " at a time");
    }
    check_tokens(tokens);
    check_room(seq_id, tokens.size());
    evaluate(seq_id, tokens);
}

void BlockDecoder::evaluate(int32_t seq_id, const std::vector<llama_token> & tokens) {
    Sequence & seq = sequences_[seq_id];
    auto pos = static_cast<int32_t>(seq.tokens.size());
    batch_->n_tokens = 0;
    for (const llama_token token : tokens) {
        add_token(*batch_, token, pos++, seq_id, /*output*/ false);
    }
    cpu_attention_.use_one_order(false);
    give_hidden(false);
    decode_target({seq_id});
    seq.tokens.insert(seq.tokens.end(), tokens.begin(), tokens.end());
    seq.n_last_pass = static_cast<int32_t>(tokens.size());
    if (drafter_) {
        drafter_->keep_features(seq_id, /*first_row*/ 0, seq.n_last_pass);
    }
}

int32_t BlockDecoder::rewind(int32_t seq_id, int32_t n_keep) {
    const Busy busy(mutex_);
    Sequence & seq = sequence(seq_id);
    const auto n_past = static_cast<int32_t>(seq.tokens.size());
    if (n_keep < 0 || n_keep > n_past) {
        throw Error(ErrorKind::value, "rewind to " + std::to_string(n_keep) + " of sequence " +
                                          std::to_string(seq_id) + ", which holds " +
                                          std::to_string(n_past) + " tokens");
    }
    if (n_keep == n_past) {
        return n_keep;
    }
    // A recurrent state can go back over tokens of the last pass only, and once: older snapshots
    // are gone, although llama.cpp would accept the request.
    const bool in_reach =
        pair_->is_recurrent() ? n_past - n_keep < seq.n_last_pass : window_is_whole(seq_id, n_keep);
    if (n_keep == 0 || !in_reach || !llama_memory_seq_rm(memory(), seq_id, n_keep, -1)) {
        empty(seq_id);
        return 0;
    }
    seq.n_last_pass = pair_->is_recurrent() ? 0 : seq.n_last_pass;
    seq.tokens.resize(n_keep);
    if (drafter_) {
        drafter_->cut(seq_id, n_keep);
    }
    return n_keep;
}

// Whether all tokens that the token at `n_keep` looks back to are still cached: cells that fell out
// of a sliding window are given to other sequences, whatever the size of the cache.
bool BlockDecoder::window_is_whole(int32_t seq_id, int32_t n_keep) const {
    const int32_t n_window = llama_model_n_swa(pair_->target());
    return n_window == 0 ||
           llama_memory_seq_pos_min(memory(), seq_id) <= std::max(0, n_keep - n_window);
}

void BlockDecoder::empty(int32_t seq_id) {
    sequences_[seq_id].tokens.clear();
    sequences_[seq_id].n_last_pass = 0;
    llama_memory_seq_rm(memory(), seq_id, -1, -1);  // of a whole sequence: never fails
    if (drafter_) {
        drafter_->cut(seq_id, 0);
    }
}

// ---------------------------------------------------------------- passes

void BlockDecoder::decode_target(const std::vector<int32_t> & seq_ids) {
    n_tapped_rows_ = 0;
    const int code = clock_.decode(target_ctx(), *batch_);
    if (code == 0) {
        n_tapped_rows_ = tapped_.empty() ? 0 : batch_->n_tokens;
        return;
    }
    // 1 and -1 leave the cache as it was; otherwise part of the batch may be in it.
    std::string fate = "; the sequences are as before";
    for (const int32_t seq_id : seq_ids) {
        if (!cut_target(seq_id)) {
            empty(seq_id);
            fate = "; sequence " + std::to_string(seq_id) + " had to be emptied";
        }
    }
    throw Error(ErrorKind::decode, "llama.cpp could not evaluate a batch of " +
                                       std::to_string(batch_->n_tokens) + " tokens (code " +
                                       std::to_string(code) +
                                       (code == 1 ? ", no free cells in the cache)" : ")") + fate);
}

// Cuts the target's cache to the tokens that the sequence has. False: the cache refuses.
bool BlockDecoder::cut_target(int32_t seq_id) {
    const auto n_past = static_cast<int32_t>(sequences_[seq_id].tokens.size());
    return llama_memory_seq_pos_max(memory(), seq_id) < n_past ||
           llama_memory_seq_rm(memory(), seq_id, n_past, -1);
}

// The cache refused to give up its tail: ignoring that would corrupt every later token, so the
// sequence is evaluated again from its start. Slow and correct; callers that heed can_roll_back do
// not get here.
void BlockDecoder::rebuild(int32_t seq_id) {
    ++n_rebuilds_;
    const std::vector<llama_token> tokens = std::move(sequences_[seq_id].tokens);
    empty(seq_id);
    for (size_t begin = 0; begin < tokens.size(); begin += config_.n_batch) {
        const size_t end = std::min(begin + config_.n_batch, tokens.size());
        evaluate(seq_id, {tokens.begin() + begin, tokens.begin() + end});
    }
}

// ---------------------------------------------------------------- a round

std::vector<Draft> BlockDecoder::draft(const std::vector<int32_t> & seq_ids,
                                       const std::vector<llama_token> & anchors) {
    const Busy busy(mutex_);
    check_seq_ids(seq_ids, anchors.size());
    check_tokens(anchors);
    if (!drafter_) {
        throw Error(ErrorKind::value, config_.drafter_path.empty()
                                          ? "this decoder has no drafter; give drafter_path"
                                          : "the drafter is released; call load_drafter first");
    }
    std::vector<DraftInput> inputs;
    for (size_t s = 0; s < seq_ids.size(); ++s) {
        Sequence & seq = sequences_[seq_ids[s]];
        inputs.push_back({seq_ids[s], anchors[s], *seq.sampler, seq.tokens});
    }
    return drafter_->draft(inputs);
}

std::vector<Verdict> BlockDecoder::verify(
    const std::vector<int32_t> & seq_ids,
    const std::vector<std::vector<llama_token>> & verify_tokens) {
    const Busy busy(mutex_);
    check_verify(seq_ids, verify_tokens);
    batch_->n_tokens = 0;
    std::vector<int32_t> first_rows;
    for (size_t s = 0; s < seq_ids.size(); ++s) {
        first_rows.push_back(batch_->n_tokens);
        auto pos = static_cast<int32_t>(sequences_[seq_ids[s]].tokens.size());
        for (const llama_token token : verify_tokens[s]) {
            add_token(*batch_, token, pos++, seq_ids[s], /*output*/ true);
        }
    }
    cpu_attention_.use_one_order(true);
    give_hidden(!tapped_.empty());
    decode_target(seq_ids);

    // All rows are read before a rebuild, which would overwrite them.
    std::vector<Verdict> verdicts;
    std::vector<int32_t> refused;
    for (size_t s = 0; s < seq_ids.size(); ++s) {
        verdicts.push_back(emit(sequences_[seq_ids[s]], verify_tokens[s], first_rows[s]));
        if (!cut_target(seq_ids[s])) {
            refused.push_back(seq_ids[s]);
        }
    }
    for (size_t s = 0; s < seq_ids.size() && drafter_; ++s) {
        if (std::count(refused.begin(), refused.end(), seq_ids[s]) == 0) {
            // The anchor and the accepted draft tokens have stayed in the cache.
            drafter_->keep_features(seq_ids[s], first_rows[s], 1 + verdicts[s].n_accepted);
        }
    }
    for (const int32_t seq_id : refused) {
        rebuild(seq_id);
    }
    return verdicts;
}

// The emission rule: every token is the target's own draw; a draft token is
// accepted if and only if it equals that draw.
Verdict BlockDecoder::emit(Sequence & seq, const std::vector<llama_token> & verify_tokens,
                           int32_t first_row) {
    Verdict verdict;
    Sampler & sampler = *seq.sampler;
    seq.n_last_pass = static_cast<int32_t>(verify_tokens.size());
    for (size_t i = 0; i < verify_tokens.size(); ++i) {
        seq.tokens.push_back(verify_tokens[i]);
        float * logits = llama_get_logits_ith(target_ctx(), first_row + i);
        std::vector<float> raw;
        if (sampler.params().n_logprobs >= 0) {
            raw.assign(logits, logits + n_vocab_);
        }
        const auto position = static_cast<int32_t>(seq.tokens.size());
        const Draw draw = sampler.draw({logits, n_vocab_}, position, seq.tokens,
                                       /*with_grammar*/ true);
        if (draw.index < 0) {
            verdict.error = "no token is allowed at position " + std::to_string(position) +
                            ": the grammar or the logit biases leave none";
            return verdict;
        }
        sampler.accept(draw.token);
        verdict.tokens.push_back(draw.token);
        verdict.margins.push_back(draw.margin);
        if (!raw.empty()) {
            verdict.logprobs.push_back(
                logprobs(raw.data(), n_vocab_, draw.token, sampler.params().n_logprobs));
        }
        const bool is_last = i + size_t{1} == verify_tokens.size();
        // Nothing follows an end token, so no draft behind it is accepted.
        if (is_last || draw.token != verify_tokens[i + size_t{1}] ||
            llama_vocab_is_eog(pair_->vocab(), draw.token)) {
            return verdict;
        }
        ++verdict.n_accepted;
    }
    return verdict;
}

// ---------------------------------------------------------------- tapping

void BlockDecoder::tap(const std::vector<int32_t> & layers) {
    const Busy busy(mutex_);
    pair()->tap(layers);
    tapped_ = layers;
    n_tapped_rows_ = 0;
    give_hidden(false);
}

// llama.cpp then treats every token of a pass as an output, so only where all are ones already.
void BlockDecoder::give_hidden(bool is_wanted) {
    llama_set_embeddings(target_ctx(), is_wanted);
    has_hidden_ = is_wanted;
}

TappedRows BlockDecoder::tapped_rows() {
    const Busy busy(mutex_);
    (void)pair();
    if (n_tapped_rows_ == 0) {
        throw Error(ErrorKind::value, "there are no tapped rows; call tap, then run a pass");
    }
    TappedRows result;
    result.n_rows = n_tapped_rows_;
    const auto n_rows = static_cast<size_t>(n_tapped_rows_);
    const auto n_embd = static_cast<size_t>(llama_model_n_embd(pair_->target()));
    result.features.resize(n_rows * tapped_.size() * n_embd);
    for (size_t l = 0; l < tapped_.size(); ++l) {
        const float * rows =
            llama_get_embeddings_layer_inp(target_ctx(), static_cast<uint32_t>(tapped_[l]));
        for (size_t i = 0; i < n_rows; ++i) {
            std::copy_n(rows + i * n_embd, n_embd,
                        result.features.data() + (i * tapped_.size() + l) * n_embd);
        }
    }
    for (int32_t i = 0; i < n_tapped_rows_ && has_hidden_; ++i) {
        const float * row = llama_get_embeddings_ith(target_ctx(), i);
        result.hidden.insert(result.hidden.end(), row, row + n_embd);
    }
    return result;
}

// ---------------------------------------------------------------- measuring

void BlockDecoder::drop_scratch() {
    if (scratch_seq_ >= 0) {
        empty(scratch_seq_);
        scratch_seq_ = -1;
    }
}

// Fills a closed sequence to `depth`. The filler stays between calls of the same depth.
void BlockDecoder::use_scratch(int32_t depth) {
    if (scratch_seq_ >= 0 && scratch_depth_ == depth) {
        return;
    }
    drop_scratch();
    for (int32_t seq_id = 0; seq_id < config_.n_seq; ++seq_id) {
        scratch_seq_ = sequences_[seq_id].is_open ? scratch_seq_ : seq_id;
    }
    if (scratch_seq_ < 0) {
        throw Error(ErrorKind::value, "all sequences are open; measuring needs a closed one");
    }
    scratch_depth_ = depth;
    for (int32_t begin = 0; begin < depth; begin += config_.n_batch) {
        batch_->n_tokens = 0;
        for (int32_t i = begin; i < std::min(depth, begin + config_.n_batch); ++i) {
            add_token(*batch_, /*token*/ 0, i, scratch_seq_, /*output*/ false);
        }
        if (clock_.decode(target_ctx(), *batch_) != 0) {
            drop_scratch();
            throw Error(ErrorKind::decode,
                        "llama.cpp could not fill the cache to depth " + std::to_string(depth));
        }
    }
}

double BlockDecoder::time_step(int32_t n_tokens, int32_t depth) {
    const Busy busy(mutex_);
    (void)pair();
    const int32_t widest = std::max(32, config_.n_seq * (1 + config_.max_verify_len));
    if (n_tokens < 1 || n_tokens > widest || depth < 0 || depth + n_tokens > config_.n_ctx) {
        throw Error(ErrorKind::value,
                    "time_step of " + std::to_string(n_tokens) + " tokens at depth " +
                        std::to_string(depth) + "; at most " + std::to_string(widest) +
                        " tokens, inside n_ctx = " + std::to_string(config_.n_ctx));
    }
    n_tapped_rows_ = 0;
    give_hidden(false);
    use_scratch(depth);
    batch_->n_tokens = 0;
    for (int32_t i = 0; i < n_tokens; ++i) {
        add_token(*batch_, /*token*/ 0, depth + i, scratch_seq_, /*output*/ true);
    }
    cpu_attention_.use_one_order(true);
    const int code = clock_.decode(target_ctx(), *batch_);
    const bool can_cut = !pair_->is_recurrent() && depth > 0;
    if (!can_cut || !llama_memory_seq_rm(memory(), scratch_seq_, depth, -1)) {
        drop_scratch();
    }
    if (code != 0) {
        throw Error(ErrorKind::decode, "llama.cpp could not evaluate " + std::to_string(n_tokens) +
                                           " tokens (code " + std::to_string(code) + ")");
    }
    return clock_.last_s();
}

double BlockDecoder::time_draft(int32_t n_seq) {
    const Busy busy(mutex_);
    (void)pair();
    if (!drafter_) {
        throw Error(ErrorKind::value, "this decoder has no drafter to time");
    }
    if (n_seq < 1 || n_seq > config_.n_seq) {
        throw Error(ErrorKind::value, "time_draft of " + std::to_string(n_seq) +
                                          " sequences; this decoder has " +
                                          std::to_string(config_.n_seq));
    }
    for (const Sequence & seq : sequences_) {
        if (seq.is_open) {
            throw Error(ErrorKind::value, "time_draft needs all sequences closed");
        }
    }
    return drafter_->time_draft(n_seq);
}

// ---------------------------------------------------------------- life

void BlockDecoder::open_drafter() {
    drafter_ = std::make_unique<BlockDrafter>(*pair_, config_.n_seq, clock_);
    for (int32_t seq_id = 0; seq_id < config_.n_seq; ++seq_id) {
        drafter_->start_at(seq_id, static_cast<int32_t>(sequences_[seq_id].tokens.size()));
    }
    has_drafter_ = true;
}

void BlockDecoder::close_drafter() {
    has_drafter_ = false;
    drafter_.reset();
}

void BlockDecoder::release_drafter_context() {
    const Busy busy(mutex_);
    (void)pair();
    close_drafter();
    pair_->release_drafter_context();
}

void BlockDecoder::release_drafter() {
    const Busy busy(mutex_);
    (void)pair();
    close_drafter();
    pair_->release_drafter();
}

void BlockDecoder::load_drafter_weights() {
    const Busy busy(mutex_);
    pair()->load_drafter_weights();
}

void BlockDecoder::load_drafter() {
    const Busy busy(mutex_);
    pair()->load_drafter();
    if (!drafter_) {
        open_drafter();
    }
}

void BlockDecoder::close() {
    const Busy busy(mutex_);
    close_drafter();
    sequences_.clear();
    std::atomic_store(&pair_, std::shared_ptr<ModelPair>());
}

MemoryUse BlockDecoder::memory_use() {
    const Busy busy(mutex_);
    (void)pair();
    MemoryUse use{};
    for (const auto & [type, bytes] : llama_get_memory_breakdown(target_ctx())) {
        use.target_model += bytes.model;
        use.target_context += bytes.context;
        use.target_compute += bytes.compute;
    }
    if (drafter_) {
        for (const auto & [type, bytes] : llama_get_memory_breakdown(pair_->drafter_ctx())) {
            use.drafter_model += bytes.model;
            use.drafter_context += bytes.context;
            use.drafter_compute += bytes.compute;
        }
    } else if (pair_->drafter()) {
        use.drafter_model = llama_model_size(pair_->drafter());
    }
    return use;
}

}  // namespace dspark
