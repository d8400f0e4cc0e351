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

BlockDecoder::BlockDecoder(const DecoderConfig & config, const ProgressCall & progress)
    : config_(config) {
    pair_ = std::make_shared<ModelPair>(config, progress);
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

void BlockDecoder::prefill(int32_t seq_id, const std::vector<llama_token> & tokens,
                           bool for_drafter) {
    const Busy busy(mutex_);
    sequence(seq_id);
    if (tokens.empty() || tokens.size() > static_cast<size_t>(config_.n_batch)) {
        throw Error(ErrorKind::value, "prefill got " + std::to_string(tokens.size()) +
                                          " tokens; give 1 to n_batch = " +
                                          std::to_string(config_.n_batch) + " at a time");
    }
    check_tokens(tokens);
    check_room(seq_id, tokens.size());
    evaluate(seq_id, tokens, for_drafter);
}

void BlockDecoder::evaluate(int32_t seq_id, const std::vector<llama_token> & tokens,
                            bool for_drafter) {
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
        drafter_->keep_features(seq_id, /*first_row*/ 0, seq.n_last_pass, for_drafter);
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
    // A recurrent state would go back to snapshots that the failed pass may never have written.
    const bool is_doubtful = pair_->is_recurrent() && code != 1 && code != -1;
    std::string fate;
    for (const int32_t seq_id : seq_ids) {
        if (is_doubtful || !cut_target(seq_id)) {
            empty(seq_id);
            fate += "; sequence " + std::to_string(seq_id) + " had to be emptied";
        }
    }
    throw Error(ErrorKind::decode, "llama.cpp could not evaluate a batch of " +
                                       std::to_string(batch_->n_tokens) + " tokens (code " +
                                       std::to_string(code) +
                                       (code == 1 ? ", no free cells in the cache)" : ")") +
                                       (fate.empty() ? "; the sequences are as before" : fate));
}

// Cuts the target's cache to the tokens that the sequence has. False: the cache refuses.
bool BlockDecoder::cut_target(int32_t seq_id) {
    const auto n_past = static_cast<int32_t>(sequences_[seq_id].tokens.size());
    return llama_memory_seq_pos_max(memory(), seq_id) < n_past ||
           llama_memory_seq_rm(memory(), seq_id, n_past, -1);
}

// The cache refused to give up its tail: ignoring that would corrupt every later token, so the
// sequence is evaluated again from its start. Slow and correct; callers that heed can_roll_back do
// not get here. What was drawn stays drawn: a failure is told in the verdict, behind its tokens.
void BlockDecoder::rebuild(int32_t seq_id, Verdict & verdict) {
    ++n_rebuilds_;
    const std::vector<llama_token> tokens = std::move(sequences_[seq_id].tokens);
    empty(seq_id);
    try {
        for (size_t begin = 0; begin < tokens.size(); begin += config_.n_batch) {
            const size_t end = std::min(begin + config_.n_batch, tokens.size());
            evaluate(seq_id, {tokens.begin() + begin, tokens.begin() + end}, /*for_drafter*/ true);
        }
    } catch (const Error & error) {
        empty(seq_id);
        const std::string what = error.what();
        verdict.error = what.substr(0, what.find(';')) + "; sequence " + std::to_string(seq_id) +
                        ", which had to be evaluated again, is empty now";
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
    std::vector<Draft> drafts = drafter_->draft(inputs);
    graph_chain_reason_ = drafter_->graph_chain_reason();
    return drafts;
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
            drafter_->keep_features(seq_ids[s], first_rows[s], 1 + verdicts[s].n_accepted,
                                    /*all*/ false);
        }
    }
    for (size_t s = 0; s < seq_ids.size(); ++s) {
        if (std::count(refused.begin(), refused.end(), seq_ids[s]) > 0) {
            rebuild(seq_ids[s], verdicts[s]);
        }
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
        Draw draw;
        try {
            draw = sampler.draw({logits, n_vocab_}, position, seq.tokens, /*with_grammar*/ true);
            if (draw.index >= 0) {
                sampler.accept(draw.token);
            }
        } catch (const std::exception & error) {
            // llama.cpp's grammar throws; the other sequences of the pass go on.
            verdict.error =
                "drawing failed at position " + std::to_string(position) + ": " + error.what() +
                (sampler.params().grammar.empty() ? "" : "; write the grammar in another way");
            return verdict;
        }
        if (draw.index < 0) {
            verdict.error = "no token is allowed at position " + std::to_string(position) +
                            ": the grammar or the logit biases leave none";
            return verdict;
        }
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

}  // namespace dspark
