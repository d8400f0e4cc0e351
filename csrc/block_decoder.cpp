#include "block_decoder.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>

#include "errors.h"
#include "llama_ext.h"

namespace dspark {

namespace {

// Features kept per sequence before they are injected without waiting for the next draft: while
// parked, injection then costs one drafter pass in 64 tokens, and no drafter state is ever lost.
constexpr int32_t kPendingRows = 64;

double now_s() {
    using clock = std::chrono::steady_clock;
    return std::chrono::duration<double>(clock::now().time_since_epoch()).count();
}

bool has_four_positions(const llama_model * model) {
    const llama_rope_type type = llama_model_rope_type(model);
    return type == LLAMA_ROPE_TYPE_MROPE || type == LLAMA_ROPE_TYPE_IMROPE;
}

}  // namespace

// Held during every call that touches a context. llama.cpp contexts are not thread-safe, and a
// silent wait would hide the caller's mistake.
class BlockDecoder::Busy {
  public:
    explicit Busy(std::mutex & mutex) : lock_(mutex, std::try_to_lock) {
        if (!lock_.owns_lock()) {
            throw Error(ErrorKind::decode,
                        "the decoder is in use by another thread; give each thread its own, or "
                        "take turns");
        }
    }

  private:
    std::unique_lock<std::mutex> lock_;
};

void BlockDecoder::BatchDeleter::operator()(llama_batch * batch) const {
    llama_batch_free(*batch);
    delete batch;
}

BlockDecoder::BlockDecoder(const DecoderConfig & config) : config_(config) {
    pair_ = std::make_unique<ModelPair>(config);
    n_vocab_ = llama_vocab_n_tokens(pair_->vocab());
    sequences_.resize(config.n_seq);
    const int32_t n_draft_rows =
        pair_->drafter_ctx() ? config.n_seq * pair_->drafter_file()->block_size : 0;
    batch_.reset(new llama_batch(llama_batch_init(std::max(config.n_batch, n_draft_rows), 0, 1)));
    if (!pair_->drafter_ctx()) {
        return;
    }
    const DrafterFile & file = *pair_->drafter_file();
    if (file.markov_w1) {
        markov_ = std::make_unique<MarkovHead>(file);
    }
    const auto n_rows = static_cast<int32_t>(llama_n_ubatch(pair_->drafter_ctx()));
    inject_batch_.reset(new llama_batch(llama_batch_init(n_rows, pair_->n_feature(), 1)));
    if (has_four_positions(pair_->drafter())) {
        // An embedding batch of such a model has four position rows.
        std::free(inject_batch_->pos);
        inject_batch_->pos = static_cast<llama_pos *>(std::malloc(4 * n_rows * sizeof(llama_pos)));
    }
    if (!file.draft_ids.empty()) {
        draft_index_of_.assign(n_vocab_, -1);
        for (size_t i = 0; i < file.draft_ids.size(); ++i) {
            draft_index_of_[file.draft_ids[i]] = static_cast<int32_t>(i);
        }
    }
}

ModelPair & BlockDecoder::pair() {
    if (!pair_) {
        throw Error(ErrorKind::value, "the decoder is closed; make a new one");
    }
    return *pair_;
}

// ---------------------------------------------------------------- checks

BlockDecoder::Sequence & BlockDecoder::sequence(int32_t seq_id) {
    pair();
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

void BlockDecoder::check_room(const Sequence & seq, int32_t seq_id, size_t n_new) const {
    if (seq.tokens.size() + n_new > static_cast<size_t>(config_.n_ctx)) {
        throw Error(ErrorKind::context_full,
                    "sequence " + std::to_string(seq_id) + " holds " +
                        std::to_string(seq.tokens.size()) + " tokens and " + std::to_string(n_new) +
                        " more do not fit into the context of " + std::to_string(config_.n_ctx) +
                        "; use a larger n_ctx or shorter text");
    }
}

// ---------------------------------------------------------------- sequences

void BlockDecoder::check_sampling(const SamplingParams & sampling) {
    const Sampler sampler(sampling, pair().vocab(), n_vocab_);
}

void BlockDecoder::open_sequence(int32_t seq_id, const SamplingParams & sampling) {
    const Busy busy(mutex_);
    pair();
    auto sampler = std::make_unique<Sampler>(sampling, pair().vocab(), n_vocab_);
    drop_scratch();
    if (seq_id >= 0 && seq_id < config_.n_seq) {
        sequences_[seq_id].is_open = true;
    }
    sequence(seq_id).sampler = std::move(sampler);
}

void BlockDecoder::close_sequence(int32_t seq_id) {
    const Busy busy(mutex_);
    sequence(seq_id) = Sequence();
    clear_caches(seq_id);
}

void BlockDecoder::clear_caches(int32_t seq_id) {
    // Removing a whole sequence never fails.
    llama_memory_seq_rm(llama_get_memory(pair().target_ctx()), seq_id, -1, -1);
    if (has_drafter()) {
        llama_memory_seq_rm(llama_get_memory(pair().drafter_ctx()), seq_id, -1, -1);
    }
}

int32_t BlockDecoder::n_past(int32_t seq_id) {
    const Busy busy(mutex_);
    return static_cast<int32_t>(sequence(seq_id).tokens.size());
}

void BlockDecoder::prefill(int32_t seq_id, const std::vector<llama_token> & tokens) {
    const Busy busy(mutex_);
    Sequence & seq = sequence(seq_id);
    if (tokens.empty() || tokens.size() > static_cast<size_t>(config_.n_batch)) {
        throw Error(ErrorKind::value, "prefill got " + std::to_string(tokens.size()) +
                                          " tokens; give 1 to n_batch = " +
                                          std::to_string(config_.n_batch) + " at a time");
    }
    check_tokens(tokens);
    check_room(seq, seq_id, tokens.size());
    evaluate(seq_id, tokens);
}

void BlockDecoder::evaluate(int32_t seq_id, const std::vector<llama_token> & tokens) {
    Sequence & seq = sequences_[seq_id];
    const auto n_past = static_cast<int32_t>(seq.tokens.size());
    const auto n_tokens = static_cast<int32_t>(tokens.size());
    batch_->n_tokens = 0;
    for (int32_t i = 0; i < n_tokens; ++i) {
        add(*batch_, tokens[i], n_past + i, seq_id, /*output*/ false);
    }
    decode_target(*batch_, {seq_id});
    seq.tokens.insert(seq.tokens.end(), tokens.begin(), tokens.end());
    seq.n_last_pass = n_tokens;
    keep_features(seq_id, 0, n_tokens);
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
    // A recurrent state can go back over tokens of the last pass only: older snapshots are gone,
    // although llama.cpp would accept the request.
    const bool in_reach = !pair().is_recurrent() || n_past - n_keep < seq.n_last_pass;
    llama_memory_t memory = llama_get_memory(pair().target_ctx());
    if (!in_reach || !llama_memory_seq_rm(memory, seq_id, n_keep, -1)) {
        n_keep = 0;
        llama_memory_seq_rm(memory, seq_id, -1, -1);
    }
    seq.n_last_pass = pair().is_recurrent() ? 0 : seq.n_last_pass;  // a rollback is single-use
    seq.tokens.resize(n_keep);
    seq.n_injected = std::min(seq.n_injected, n_keep);
    seq.pending.resize(static_cast<size_t>(std::min(n_pending(seq), n_keep - seq.n_injected)) *
                       pair().n_feature());
    drop_block(seq_id);
    return n_keep;
}

// ---------------------------------------------------------------- passes

void BlockDecoder::add(llama_batch & batch, llama_token token, int32_t pos, int32_t seq_id,
                       bool output) {
    const int32_t i = batch.n_tokens++;
    batch.token[i] = token;
    batch.pos[i] = pos;
    batch.n_seq_id[i] = 1;
    batch.seq_id[i][0] = seq_id;
    batch.logits[i] = output;
}

int BlockDecoder::decode(llama_context * ctx, llama_batch & batch) {
    const double start = now_s();
    const int code = llama_decode(ctx, batch);
    llama_synchronize(ctx);
    decode_s_ += now_s() - start;
    return code;
}

void BlockDecoder::decode_target(llama_batch & batch, const std::vector<int32_t> & seq_ids) {
    const int code = decode(pair().target_ctx(), batch);
    if (code == 0) {
        return;
    }
    // 1 and -1 leave the cache as it was; otherwise part of the batch may be in it.
    std::string fate = "; the sequences are as before";
    for (const int32_t seq_id : seq_ids) {
        if (!cut_target(seq_id)) {
            sequences_[seq_id].tokens.clear();
            sequences_[seq_id].pending.clear();
            sequences_[seq_id].n_injected = 0;
            clear_caches(seq_id);
            fate = "; sequence " + std::to_string(seq_id) + " had to be emptied";
        }
    }
    throw Error(ErrorKind::decode, "llama.cpp could not evaluate a batch of " +
                                       std::to_string(batch.n_tokens) + " tokens (code " +
                                       std::to_string(code) +
                                       (code == 1 ? ", no free cells in the cache)" : ")") + fate);
}

// Cuts the target's cache to the tokens that the sequence has. False: the cache refuses.
bool BlockDecoder::cut_target(int32_t seq_id) {
    const auto n_past = static_cast<int32_t>(sequences_[seq_id].tokens.size());
    llama_memory_t memory = llama_get_memory(pair().target_ctx());
    return llama_memory_seq_pos_max(memory, seq_id) < n_past ||
           llama_memory_seq_rm(memory, seq_id, n_past, -1);
}

// The cache refused to give up its tail: ignoring that would corrupt every later token, so the
// sequence is evaluated again from its start. Slow and correct; callers that heed can_roll_back do
// not get here.
void BlockDecoder::rebuild(int32_t seq_id) {
    ++n_rebuilds_;
    Sequence & seq = sequences_[seq_id];
    const std::vector<llama_token> tokens = std::move(seq.tokens);
    seq.tokens.clear();
    seq.pending.clear();
    seq.n_injected = 0;
    clear_caches(seq_id);
    for (size_t begin = 0; begin < tokens.size(); begin += config_.n_batch) {
        const size_t end = std::min(begin + config_.n_batch, tokens.size());
        evaluate(seq_id, {tokens.begin() + begin, tokens.begin() + end});
    }
}

// ---------------------------------------------------------------- features

int32_t BlockDecoder::n_pending(const Sequence & seq) const {
    const int32_t n_feature = pair_->n_feature();
    return n_feature == 0 ? 0 : static_cast<int32_t>(seq.pending.size() / n_feature);
}

// Copies the tapped layer inputs of rows of the last target pass, layer by layer side by side, as
// the drafter's fc reads them. Only rows of tokens that stay may be given.
void BlockDecoder::keep_features(int32_t seq_id, int32_t first_row, int32_t n_rows) {
    if (!has_drafter()) {
        return;
    }
    Sequence & seq = sequences_[seq_id];
    const std::vector<int32_t> & layers = pair().drafter_file()->target_layers;
    const auto n_embd = static_cast<size_t>(llama_model_n_embd(pair().target()));
    const size_t n_feature = pair().n_feature();
    for (int32_t done = 0; done < n_rows;) {
        const int32_t n = std::min(n_rows - done, kPendingRows - n_pending(seq));
        const size_t old_size = seq.pending.size();
        seq.pending.resize(old_size + n * n_feature);
        for (size_t k = 0; k < layers.size(); ++k) {
            const float * rows = llama_get_embeddings_layer_inp(pair().target_ctx(),
                                                                static_cast<uint32_t>(layers[k]));
            for (int32_t i = 0; i < n; ++i) {
                std::memcpy(seq.pending.data() + old_size + i * n_feature + k * n_embd,
                            rows + (first_row + done + i) * n_embd, n_embd * sizeof(float));
            }
        }
        done += n;
        if (n_pending(seq) == kPendingRows) {
            inject({seq_id});
        }
    }
}

// Writes the pending features into the drafter's cache, at the positions of their tokens.
void BlockDecoder::inject(const std::vector<int32_t> & seq_ids) {
    llama_batch & batch = *inject_batch_;
    const auto n_max = static_cast<int32_t>(llama_n_ubatch(pair().drafter_ctx()));
    const size_t n_feature = pair().n_feature();
    const bool mrope = has_four_positions(pair().drafter());
    const auto flush = [&] {
        if (batch.n_tokens == 0) {
            return;
        }
        if (mrope) {  // rows of positions: time, height, width (all the same for text), unused
            for (int32_t i = 0; i < batch.n_tokens; ++i) {
                batch.pos[batch.n_tokens + i] = batch.pos[i];
                batch.pos[2 * batch.n_tokens + i] = batch.pos[i];
                batch.pos[3 * batch.n_tokens + i] = 0;
            }
        }
        const int code = decode(pair().drafter_ctx(), batch);
        if (code != 0) {
            for (const int32_t seq_id : seq_ids) {
                drop_block(seq_id);
            }
            throw Error(ErrorKind::decode,
                        "llama.cpp could not inject " + std::to_string(batch.n_tokens) +
                            " rows into the drafter (code " + std::to_string(code) + ")");
        }
        batch.n_tokens = 0;
    };
    batch.n_tokens = 0;
    for (const int32_t seq_id : seq_ids) {
        Sequence & seq = sequences_[seq_id];
        const int32_t n_rows = n_pending(seq);
        for (int32_t i = 0; i < n_rows; ++i) {
            if (batch.n_tokens == n_max) {
                flush();
            }
            const int32_t row = batch.n_tokens++;
            std::memcpy(batch.embd + row * n_feature, seq.pending.data() + i * n_feature,
                        n_feature * sizeof(float));
            batch.pos[row] = seq.n_injected + i;
            batch.n_seq_id[row] = 1;
            batch.seq_id[row][0] = seq_id;
            batch.logits[row] = 0;
        }
    }
    flush();
    for (const int32_t seq_id : seq_ids) {
        sequences_[seq_id].n_injected += n_pending(sequences_[seq_id]);
        sequences_[seq_id].pending.clear();
    }
}

// Removes from the drafter's cache what is not the features of a committed token.
void BlockDecoder::drop_block(int32_t seq_id) {
    if (has_drafter()) {
        llama_memory_seq_rm(llama_get_memory(pair().drafter_ctx()), seq_id,
                            sequences_[seq_id].n_injected, -1);
    }
}

// ---------------------------------------------------------------- draft

std::vector<Draft> BlockDecoder::draft(const std::vector<int32_t> & seq_ids,
                                       const std::vector<llama_token> & anchors) {
    const Busy busy(mutex_);
    check_seq_ids(seq_ids, anchors.size());
    check_tokens(anchors);
    if (!has_drafter()) {
        throw Error(ErrorKind::value, "this decoder has no drafter; give drafter_path");
    }
    inject(seq_ids);

    const DrafterFile & file = *pair().drafter_file();
    const llama_token mask = llama_vocab_mask(llama_model_get_vocab(pair().drafter()));
    batch_->n_tokens = 0;
    for (size_t s = 0; s < seq_ids.size(); ++s) {
        const auto n_past = static_cast<int32_t>(sequences_[seq_ids[s]].tokens.size());
        for (int32_t i = 0; i < file.block_size; ++i) {
            add(*batch_, i == 0 ? anchors[s] : mask, n_past + i, seq_ids[s], /*output*/ true);
        }
    }
    const int code = decode(pair().drafter_ctx(), *batch_);
    std::vector<Draft> drafts(seq_ids.size());
    for (size_t s = 0; s < seq_ids.size(); ++s) {
        if (code == 0) {
            read_draft(seq_ids[s], anchors[s], static_cast<int32_t>(s) * file.block_size,
                       drafts[s]);
        }
        // The block's own keys and values must be gone before the next injection.
        drop_block(seq_ids[s]);
    }
    if (code != 0) {
        throw Error(ErrorKind::decode,
                    "llama.cpp could not evaluate a block of the drafter (code " +
                        std::to_string(code) + ")");
    }
    return drafts;
}

// A row of the drafter's logits over the draft vocabulary, in memory that may be changed.
LogitRow BlockDecoder::draft_row(int32_t batch_index) {
    float * logits = llama_get_logits_ith(pair().drafter_ctx(), batch_index);
    const std::vector<llama_token> & ids = pair().drafter_file()->draft_ids;
    if (ids.empty()) {
        return {logits, n_vocab_};
    }
    draft_logits_.resize(ids.size());
    for (size_t i = 0; i < ids.size(); ++i) {
        draft_logits_[i] = logits[ids[i]];
    }
    return {draft_logits_.data(), static_cast<int32_t>(ids.size()), ids.data(),
            draft_index_of_.data()};
}

void BlockDecoder::read_draft(int32_t seq_id, llama_token anchor, int32_t first_row,
                              Draft & draft) {
    Sequence & seq = sequences_[seq_id];
    const DrafterFile & file = *pair().drafter_file();
    const size_t n_past = seq.tokens.size();
    const bool plain_greedy = seq.sampler->plain_greedy();
    seq.tokens.push_back(anchor);
    llama_token drawn = anchor;    // what stands in front of the slot ...
    llama_token assumed = anchor;  // ... and what llama.cpp's greedy chain put there
    for (int32_t slot = file.first_slot(); slot < file.block_size; ++slot) {
        LogitRow row = draft_row(first_row + slot);
        const llama_token greedy = argmax(row).token;
        float confidence = 0.0f;
        if (file.has_confidence) {
            confidence = llama_get_embeddings_nextn_ith(pair().drafter_ctx(), first_row + slot)[0];
        }
        if (markov_ && drawn != assumed) {
            markov_->correct(row, drawn, assumed);
            if (file.has_confidence) {
                confidence = markov_->correct_confidence(confidence, drawn, assumed);
            }
        }
        assumed = greedy;
        // The token of this slot will stand behind the anchor at this position.
        const auto position = static_cast<int32_t>(seq.tokens.size());
        const Draw draw = plain_greedy ? argmax(row)
                                       : seq.sampler->draw(row, position, seq.tokens,
                                                           /*with_grammar*/ false);
        if (draw.index < 0) {
            break;  // every token of the draft vocabulary is forbidden
        }
        drawn = draw.token;
        seq.tokens.push_back(drawn);
        draft.tokens.push_back(drawn);
        draft.certainty.push_back(draw.margin);
        if (file.has_confidence) {
            draft.confidence.push_back(confidence);
        }
    }
    seq.tokens.resize(n_past);
}

// ---------------------------------------------------------------- verify

std::vector<Verdict> BlockDecoder::verify(
    const std::vector<int32_t> & seq_ids,
    const std::vector<std::vector<llama_token>> & verify_tokens) {
    const Busy busy(mutex_);
    check_seq_ids(seq_ids, verify_tokens.size());
    for (size_t s = 0; s < seq_ids.size(); ++s) {
        const size_t limit = 1 + static_cast<size_t>(config_.max_verify_len);
        if (verify_tokens[s].empty() || verify_tokens[s].size() > limit) {
            throw Error(ErrorKind::value, "verify_tokens of sequence " +
                                              std::to_string(seq_ids[s]) + " has " +
                                              std::to_string(verify_tokens[s].size()) +
                                              " tokens; give the anchor and at most " +
                                              std::to_string(config_.max_verify_len) +
                                              " draft tokens (max_verify_len)");
        }
        check_tokens(verify_tokens[s]);
        check_room(sequences_[seq_ids[s]], seq_ids[s], verify_tokens[s].size());
    }

    batch_->n_tokens = 0;
    for (size_t s = 0; s < seq_ids.size(); ++s) {
        const auto n_past = static_cast<int32_t>(sequences_[seq_ids[s]].tokens.size());
        for (size_t i = 0; i < verify_tokens[s].size(); ++i) {
            add(*batch_, verify_tokens[s][i], n_past + static_cast<int32_t>(i), seq_ids[s],
                /*output*/ true);
        }
    }
    decode_target(*batch_, seq_ids);

    // All rows are read before a rebuild, which would overwrite them.
    std::vector<Verdict> verdicts;
    std::vector<int32_t> refused;
    int32_t first_row = 0;
    for (size_t s = 0; s < seq_ids.size(); ++s) {
        verdicts.push_back(emit(sequences_[seq_ids[s]], verify_tokens[s], first_row));
        first_row += static_cast<int32_t>(verify_tokens[s].size());
    }
    for (const int32_t seq_id : seq_ids) {
        if (!cut_target(seq_id)) {
            refused.push_back(seq_id);
        }
    }
    first_row = 0;
    for (size_t s = 0; s < seq_ids.size(); ++s) {
        if (std::count(refused.begin(), refused.end(), seq_ids[s]) == 0) {
            // The anchor and the accepted draft tokens have stayed in the cache.
            keep_features(seq_ids[s], first_row, 1 + verdicts[s].n_accepted);
        }
        first_row += static_cast<int32_t>(verify_tokens[s].size());
    }
    for (const int32_t seq_id : refused) {
        rebuild(seq_id);
    }
    return verdicts;
}

// The emission rule (DESIGN section 3): every token is the target's own draw; a draft token is
// accepted if and only if it equals that draw.
Verdict BlockDecoder::emit(Sequence & seq, const std::vector<llama_token> & verify_tokens,
                           int32_t first_row) {
    Verdict verdict;
    Sampler & sampler = *seq.sampler;
    seq.n_last_pass = static_cast<int32_t>(verify_tokens.size());
    for (size_t i = 0; i < verify_tokens.size(); ++i) {
        seq.tokens.push_back(verify_tokens[i]);
        float * logits = llama_get_logits_ith(pair().target_ctx(), first_row + i);
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
            llama_vocab_is_eog(pair().vocab(), draw.token)) {
            return verdict;
        }
        ++verdict.n_accepted;
    }
    return verdict;
}

// ---------------------------------------------------------------- measuring

void BlockDecoder::drop_scratch() {
    if (scratch_seq_ >= 0) {
        clear_caches(scratch_seq_);
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
            add(*batch_, /*token*/ 0, i, scratch_seq_, /*output*/ false);
        }
        if (decode(pair().target_ctx(), *batch_) != 0) {
            drop_scratch();
            throw Error(ErrorKind::decode,
                        "llama.cpp could not fill the cache to depth " + std::to_string(depth));
        }
    }
}

double BlockDecoder::time_step(int32_t n_tokens, int32_t depth) {
    const Busy busy(mutex_);
    const int32_t widest = std::max(32, config_.n_seq * (1 + config_.max_verify_len));
    if (n_tokens < 1 || n_tokens > widest || depth < 0 || depth + n_tokens > config_.n_ctx) {
        throw Error(ErrorKind::value,
                    "time_step of " + std::to_string(n_tokens) + " tokens at depth " +
                        std::to_string(depth) + "; at most " + std::to_string(widest) +
                        " tokens, inside n_ctx = " + std::to_string(config_.n_ctx));
    }
    use_scratch(depth);
    batch_->n_tokens = 0;
    for (int32_t i = 0; i < n_tokens; ++i) {
        add(*batch_, /*token*/ 0, depth + i, scratch_seq_, /*output*/ true);
    }
    const double start = now_s();
    const int code = decode(pair().target_ctx(), *batch_);
    const double elapsed = now_s() - start;
    llama_memory_t memory = llama_get_memory(pair().target_ctx());
    if (pair().is_recurrent() || depth == 0 ||
        !llama_memory_seq_rm(memory, scratch_seq_, depth, -1)) {
        drop_scratch();
    }
    if (code != 0) {
        throw Error(ErrorKind::decode, "llama.cpp could not evaluate " + std::to_string(n_tokens) +
                                           " tokens (code " + std::to_string(code) + ")");
    }
    return elapsed;
}

double BlockDecoder::time_draft(int32_t n_seq) {
    const Busy busy(mutex_);
    if (!has_drafter()) {
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
    batch_->n_tokens = 0;
    const int32_t block_size = pair().drafter_file()->block_size;
    for (int32_t seq_id = 0; seq_id < n_seq; ++seq_id) {
        for (int32_t i = 0; i < block_size; ++i) {
            add(*batch_, 0, i, seq_id, /*output*/ true);
        }
    }
    const double start = now_s();
    const int code = decode(pair().drafter_ctx(), *batch_);
    const double elapsed = now_s() - start;
    for (int32_t seq_id = 0; seq_id < n_seq; ++seq_id) {
        llama_memory_seq_rm(llama_get_memory(pair().drafter_ctx()), seq_id, -1, -1);
    }
    if (code != 0) {
        throw Error(ErrorKind::decode, "llama.cpp could not evaluate a drafter block (code " +
                                           std::to_string(code) + ")");
    }
    return elapsed;
}

// ---------------------------------------------------------------- life

void BlockDecoder::release_drafter() {
    const Busy busy(mutex_);
    markov_.reset();
    inject_batch_.reset();
    for (Sequence & seq : sequences_) {
        seq.pending = {};
    }
    pair().release_drafter();
}

void BlockDecoder::close() {
    const Busy busy(mutex_);
    markov_.reset();
    sequences_.clear();
    pair_.reset();
}

MemoryUse BlockDecoder::memory_use() {
    const Busy busy(mutex_);
    MemoryUse use{};
    for (const auto & [type, bytes] : llama_get_memory_breakdown(pair().target_ctx())) {
        use.target_model += bytes.model;
        use.target_context += bytes.context;
        use.target_compute += bytes.compute;
    }
    if (has_drafter()) {
        for (const auto & [type, bytes] : llama_get_memory_breakdown(pair().drafter_ctx())) {
            use.drafter_model += bytes.model;
            use.drafter_context += bytes.context;
            use.drafter_compute += bytes.compute;
        }
    }
    return use;
}

}  // namespace dspark
