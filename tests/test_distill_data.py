"""Prompts, shards and vocabulary of the trainer: what a kill, a full disk or bad input leaves."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest
from tiny_models import TargetSpec, token_id, write_llama

from dspark_edge import ModelError
from dspark_edge._core import BlockDecoder, DecoderConfig

pytest.importorskip("torch")

from dspark_edge.distill import shards as shards_module
from dspark_edge.distill.clock import Clock, Pieces
from dspark_edge.distill.held_out import HeldOut, hold_out
from dspark_edge.distill.known_replies import known_replies
from dspark_edge.distill.prompts import PromptSource, frame_of, read_given
from dspark_edge.distill.sampling import Job, sample
from dspark_edge.distill.settings import DataSettings, check_same_work
from dspark_edge.distill.shards import Sampled, ShardStore
from dspark_edge.distill.target_file import TargetFile
from dspark_edge.distill.vocabulary import choose_tokens


def sampled(number: int, *, n_prompt: int = 3, n_reply: int = 5) -> Sampled:
    random = np.random.default_rng(number)
    n = n_prompt + n_reply
    return Sampled(
        number=number,
        temperature=0.5,
        n_prompt=n_prompt,
        tokens=random.integers(0, 300, n).astype(np.int32),
        features=random.standard_normal((n - 1, 4)).astype(np.float16),
        hidden=random.standard_normal((n_reply, 2)).astype(np.float16),
        log_sum_exp=random.standard_normal(n_reply).astype(np.float32),
        likely=random.integers(0, 300, (n_reply, 8)).astype(np.int32),
    )


def store_in(folder: Path, limit_bytes: int = 1 << 40) -> ShardStore:
    return ShardStore(folder, limit_bytes=limit_bytes)


def three_in(folder: Path) -> list[Sampled]:
    """Three sequences of different lengths, now in a shard there."""
    store = store_in(folder)
    made = [sampled(7), sampled(2, n_prompt=1, n_reply=1), sampled(9, n_reply=11)]
    for each in made:
        store.add(each)
    store.flush()
    return made


# ---------------------------------------------------------------- shards


def test_sequences_come_back_from_a_shard_as_they_went_in(tmp_path: Path) -> None:
    before = three_in(tmp_path)
    again = store_in(tmp_path)
    assert again.numbers == {7, 2, 9}
    assert again.n_tokens == 5 + 1 + 11
    for old, new in zip(before, again.read(again.shards[0]), strict=True):
        assert (old.number, old.n_prompt, old.temperature) == (
            new.number,
            new.n_prompt,
            new.temperature,
        )
        for name in ("tokens", "features", "hidden", "log_sum_exp", "likely"):
            np.testing.assert_array_equal(getattr(old, name), getattr(new, name))
            assert getattr(old, name).dtype == getattr(new, name).dtype


def test_what_a_kill_left_half_written_is_removed_and_the_rest_kept(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    for number in (0, 1):
        store.add(sampled(number))
        store.flush()
    index = tmp_path / "index.jsonl"
    index.write_text(index.read_text() + '{"name": "shard-00002.npz", "numb')
    (tmp_path / "shard-00002.npz").write_bytes(b"half")
    (tmp_path / "shard-00003.npz.tmp").write_bytes(b"less")
    again = store_in(tmp_path)
    assert again.numbers == {0, 1}
    assert sorted(path.name for path in tmp_path.glob("shard*")) == [
        "shard-00000.npz",
        "shard-00001.npz",
    ]
    again.add(sampled(2))
    again.flush()
    assert store_in(tmp_path).numbers == {0, 1, 2}


def test_a_store_is_full_when_another_shard_would_pass_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards_module, "SHARD_BYTES", 100)
    store = store_in(tmp_path, limit_bytes=100 + 2 * sampled(0).n_bytes)
    assert not store.is_full
    assert store.add(sampled(0))  # larger than a shard: written at once
    assert not store.is_full
    store.add(sampled(1))
    assert not store.is_full
    store.add(sampled(2))
    assert store.is_full


def test_too_little_disk_is_said_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards_module, "RESERVE_BYTES", 1 << 60)
    with pytest.raises(OSError, match="MB of disk left; at least 1099511627776 MB are needed"):
        store_in(tmp_path)


def test_texts_are_read_without_what_the_target_saw(tmp_path: Path) -> None:
    """Of gigabytes of shards, megabytes: the large arrays cannot even be read here."""
    before, store = three_in(tmp_path), store_in(tmp_path)
    path = tmp_path / store.shards[0].name
    features = before[0].features.tobytes()
    path.write_bytes(path.read_bytes().replace(features, bytes(len(features))))
    with pytest.raises(zipfile.BadZipFile, match="Bad CRC-32"):
        store.read(store.shards[0])
    for old, new in zip(before, store.read_texts(store.shards[0]), strict=True):
        assert (new.number, new.temperature, new.n_prompt) == (
            old.number,
            old.temperature,
            old.n_prompt,
        )
        np.testing.assert_array_equal(new.tokens, old.tokens)


# ---------------------------------------------------------------- what is held out


def alike(number: int, prompt: int) -> Sampled:
    """A reply to one of many prompts."""
    one = sampled(number)
    one.tokens[: one.n_prompt] = (prompt, 2, 3)
    return one


def test_no_prompt_is_both_trained_on_and_held_out(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    for number in range(600):
        store.add(alike(number, number % 200))
        if number % 100 == 99:
            store.flush()
    held_out = hold_out(store)
    prompts = {int(each.tokens[0]) for each in held_out.replies}
    assert len(held_out.replies) == len(prompts)
    assert 2 <= len(prompts) <= 24  # about one in 24 of 200
    everything = [each for shard in store.shards for each in store.read(shard)]
    kept = [each for each in everything if held_out.has(each)]
    assert {int(each.tokens[0]) for each in kept} == prompts
    assert len(kept) == 3 * len(prompts)
    assert [each.number for each in hold_out(store).replies] == [
        each.number for each in held_out.replies
    ]


def test_no_more_is_held_out_than_is_judged(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    for number in range(3000):
        store.add(alike(number, number))
    store.flush()
    assert len(hold_out(store).replies) == 32


def test_a_small_store_has_something_to_judge_by(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    for number in range(3):
        store.add(alike(number, number))
    store.flush()
    assert [each.number for each in hold_out(store).replies] == [0]


# ---------------------------------------------------------------- what is looked up in

NOTHING_HELD_OUT = HeldOut([], frozenset())


def store_of(folder: Path, *sequences: Sampled) -> ShardStore:
    """A shard for each."""
    store = store_in(folder)
    for each in sequences:
        store.add(each)
        store.flush()
    return store


def drawn_at(temperature: float, number: int, **lengths: int) -> Sampled:
    one = sampled(number, **lengths)
    one.temperature = temperature
    return one


def test_the_coldest_replies_are_known_first_then_by_number(tmp_path: Path) -> None:
    warm, late, early = drawn_at(0.7, 1), drawn_at(0.0, 3), drawn_at(0.0, 2)
    store = store_of(tmp_path, warm, late, early)
    known = [each.tolist() for each in known_replies(store, NOTHING_HELD_OUT)]
    assert known == [each.tokens.tolist() for each in (early, late, warm)]


def test_a_known_reply_stands_behind_the_last_six_tokens_of_its_prompt(tmp_path: Path) -> None:
    store = store_of(tmp_path, sampled(0, n_prompt=6), sampled(1, n_prompt=20, n_reply=3))
    short, long = known_replies(store, NOTHING_HELD_OUT)
    assert short.tolist() == sampled(0, n_prompt=6).tokens.tolist()
    assert long.tolist() == sampled(1, n_prompt=20, n_reply=3).tokens[14:].tolist()


def test_known_replies_are_whole_and_end_at_the_limit(tmp_path: Path) -> None:
    store = store_of(tmp_path, *(sampled(number) for number in range(4)))  # of 8 tokens each
    assert len(known_replies(store, NOTHING_HELD_OUT, n_max=24)) == 3
    assert len(known_replies(store, NOTHING_HELD_OUT, n_max=23)) == 2
    assert known_replies(store, NOTHING_HELD_OUT, n_max=7) == []


def test_a_text_is_known_once_and_an_empty_reply_is_none(tmp_path: Path) -> None:
    again = sampled(0)
    again.number = 5
    store = store_of(tmp_path, sampled(0), sampled(1, n_reply=0), again)
    (known,) = known_replies(store, NOTHING_HELD_OUT)
    assert known.tolist() == again.tokens.tolist()


def test_what_is_held_out_is_not_known(tmp_path: Path) -> None:
    """The drafter is judged by it, and measured with what is known."""
    store = store_of(tmp_path, *(alike(number, number % 2) for number in range(6)))
    held_out = hold_out(store)
    (judged,) = {int(each.tokens[0]) for each in held_out.replies}
    known = known_replies(store, held_out)
    assert [int(each[0]) for each in known] == [1 - judged] * 3


# ---------------------------------------------------------------- prompts


def test_given_prompts_are_lines_of_text_or_of_json(tmp_path: Path) -> None:
    plain, lines = tmp_path / "p.txt", tmp_path / "p.jsonl"
    plain.write_text("one\n\n two \n")
    lines.write_text('{"prompt": "three"}\n{"turns": ["four", "five"]}\n')
    assert read_given(plain) == ["one", "two"]
    assert read_given(lines) == ["three", "four"]
    lines.write_text('{"prompt": "three"}\n{"text": "four"}\n')
    with pytest.raises(ValueError, match="line 2 has neither"):
        read_given(lines)
    plain.write_bytes(b"caf\xe9\n")
    with pytest.raises(ValueError, match=r"p\.txt is not UTF-8"):
        read_given(plain)
    plain.write_text("\n")
    with pytest.raises(ValueError, match="holds no prompts"):
        read_given(plain)


@pytest.fixture
def decoder(tiny_llama: Path) -> BlockDecoder:
    config = DecoderConfig(
        target_path=str(tiny_llama), n_ctx=128, n_seq=3, n_threads=1, max_verify_len=0
    )
    return BlockDecoder(config)


def draw(decoder: BlockDecoder, source: PromptSource, n: int) -> None:
    for reply in sample(decoder, (source.draw() for _ in range(n))):
        source.take(reply)


def test_prompts_drawn_stay_the_same_when_a_killed_run_goes_on(
    decoder: BlockDecoder, tmp_path: Path
) -> None:
    cache = tmp_path / "prompts.jsonl"
    frame = frame_of(decoder)
    assert (frame.prefix, frame.suffix) == ("<|bos|><|user|>", "<|end|><|assistant|>")
    source = PromptSource(decoder, frame, ["given"], cache)
    assert source.is_ready(0)
    assert not source.is_ready(1)
    draw(decoder, source, 4)
    texts = [source.text(number) for number in range(6)]
    assert texts[0::2] == ["given"] * 3
    assert len(set(texts[1::2])) == 3
    with cache.open("a") as file:
        file.write('"cut by a ki')
    again = PromptSource(decoder, frame, ["given"], cache)
    assert [again.text(number) for number in range(6)] == texts
    assert again.draw().number == source.draw().number  # seeds go on where they were
    assert again.prompt(0)[:2] == [token_id("<|bos|>"), token_id("<|user|>")]


@pytest.mark.parametrize(("share", "n_drawn"), [(0.0, 0), (0.3, 6), (0.5, 10), (1.0, 20)])
def test_given_and_drawn_prompts_are_mixed_as_asked(
    decoder: BlockDecoder, tmp_path: Path, share: float, n_drawn: int
) -> None:
    given = [f"given {i}" for i in range(30)]
    cache = tmp_path / "prompts.jsonl"
    source = PromptSource(decoder, frame_of(decoder), given, cache, drawn_share=share)
    draw(decoder, source, 24)
    texts = [source.text(number) for number in range(20)]
    assert [text for text in texts if text in given] == given[: 20 - n_drawn]
    assert len(set(texts)) == 20
    n_early = sum(text not in given for text in texts[:10])
    assert n_early == n_drawn // 2


def test_a_template_that_hides_the_users_text_is_refused(tmp_path: Path) -> None:
    spec = TargetSpec(metadata={"tokenizer.chat_template": "{{ bos_token }}hello"})
    config = DecoderConfig(target_path=str(write_llama(tmp_path / "t.gguf", spec)), n_ctx=64)
    with pytest.raises(ModelError, match="does not show the user's text"):
        frame_of(BlockDecoder(config))


def test_sampled_sequences_hold_what_the_target_saw(
    decoder: BlockDecoder, tiny_llama: Path
) -> None:
    """Side by side or alone: the same texts, with a feature row for each token but the last."""
    prompts = [[token_id("<|bos|>"), *b"some text"], [*b"other"], [*b"a third one"], [*b"4th"]]
    jobs = [Job(i, prompt, 0.7, 6 + i) for i, prompt in enumerate(prompts)]
    decoder.tap([1, 3])
    together = {reply.job.number: reply for reply in sample(decoder, jobs)}
    assert len(together) == len(jobs)
    for job in jobs:
        (alone,) = sample(decoder, [job])
        reply = together[job.number]
        assert reply.tokens == alone.tokens
        assert len(reply.tokens) == job.max_tokens
        features = np.concatenate(reply.features).astype(np.float32)
        assert features.shape == (len(job.prompt) + job.max_tokens - 1, 2 * 64)
        np.testing.assert_allclose(features, np.concatenate(alone.features), atol=0.1)
        hidden = np.concatenate(reply.hidden).astype(np.float32)
        logits = hidden @ TargetFile(tiny_llama).head_rows(slice(None)).T
        assert logits.argmax(1).tolist() == [row[0] for row in reply.likely]
        log_probs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
        own = log_probs[np.arange(len(reply.tokens)), reply.tokens]
        np.testing.assert_allclose(own, reply.log_probs, atol=0.05)


# ---------------------------------------------------------------- vocabulary, settings, clock


def test_the_draft_vocabulary_holds_what_the_target_says_most() -> None:
    one = sampled(1, n_prompt=1, n_reply=2000)
    one.tokens[:] = 7
    one.tokens[-20:] = np.arange(1000, 1020)
    ids, covered = choose_tokens([one], n_vocab=5000, n_max=4096)
    assert len(ids) == 1024
    assert covered == 1.0
    assert {7, *range(1000, 1020)} <= set(ids.tolist())
    assert (np.diff(ids) > 0).all()
    ids, covered = choose_tokens([one], n_vocab=5000, n_max=1)
    assert (ids.tolist(), covered) == ([7], 0.99)
    ids, covered = choose_tokens([one], n_vocab=2048, n_max=4096)
    assert (len(ids), covered) == (2048, 1.0)


def test_tokens_that_a_drafter_has_stay_where_there_is_room() -> None:
    one = sampled(1, n_prompt=1, n_reply=2000)
    one.tokens[:] = 7
    known = np.arange(3000, 3200)
    alone, _ = choose_tokens([one], n_vocab=5000, n_max=4096)
    ids, covered = choose_tokens([one], n_vocab=5000, n_max=4096, known=known)
    assert set(ids.tolist()) == {*alone.tolist(), *known.tolist()}
    assert (np.diff(ids) > 0).all()
    assert covered == 1.0
    ids, _ = choose_tokens([one], n_vocab=5000, n_max=1100, known=known)
    assert len(ids) == 1100
    assert set(alone.tolist()) < set(ids.tolist())


def test_a_work_folder_of_another_target_or_other_settings_is_refused(
    tmp_path: Path, tiny_llama: Path, tiny_lfm2: Path
) -> None:
    shape = TargetFile(tiny_llama).shape(n_layer=1, block_size=4, rank=8, taps=None)
    check_same_work(tmp_path, tiny_llama, shape, DataSettings())
    check_same_work(tmp_path, tiny_llama, shape, DataSettings())
    with pytest.raises(ValueError, match="another target or other settings"):
        check_same_work(tmp_path, tiny_lfm2, shape, DataSettings())
    with pytest.raises(ValueError, match="give another --work"):
        check_same_work(tmp_path, tiny_llama, shape, DataSettings(max_reply=64))


def test_a_clock_goes_on_from_the_time_spent_before(tmp_path: Path) -> None:
    path = tmp_path / "clock.json"
    path.write_text('{"spent_s": 40.0}')
    clock = Clock(path, 100.0)
    assert clock.spent_s >= 40.0
    assert clock.left_s() <= 60.0
    assert clock.left_s(0.4) <= 0.0
    clock.save()
    assert Clock(path, 100.0).spent_s >= 40.0
    path.write_text("{half")
    assert Clock(path, 1e6).left_s() > 1e5


def test_no_piece_is_begun_that_would_end_after_its_stage(tmp_path: Path) -> None:
    """Five of 15 s fit into 80 s; asking only whether time is left would begin a sixth."""
    time_s = [0.0]
    clock = Clock(tmp_path / "clock.json", 100.0, now=lambda: time_s[0])
    pieces = Pieces(clock, 0.8)
    while not pieces.is_over():
        time_s[0] += 15.0
    assert time_s[0] == 75.0
    assert not Pieces(clock, 0.8).is_over()


def test_sampling_ends_with_its_time_and_keeps_what_it_has(decoder: BlockDecoder) -> None:
    """Long replies would otherwise run on for minutes after the stage."""
    decoder.tap([1])
    jobs = [Job(number, [*b"text"], 0.7, 100) for number in range(5)]
    jobs[1].is_tapped = False
    n_rounds = 0

    def is_over() -> bool:
        nonlocal n_rounds
        n_rounds += 1
        return n_rounds == 3

    replies = list(sample(decoder, jobs, is_over=is_over))
    assert n_rounds == 3
    assert [reply.job.number for reply in replies] == [0, 2]
    for reply in replies:
        assert len(reply.tokens) == len(reply.log_probs) == 3
        assert len(np.concatenate(reply.features)) == len(reply.job.prompt) + 3 - 1
    assert len(list(sample(decoder, jobs[:1]))) == 1  # its sequences were closed


def test_targets_with_a_scaled_head_are_refused(tmp_path: Path) -> None:
    spec = TargetSpec(metadata={"llama.logit_scale": 0.5})
    with pytest.raises(ModelError, match="logit_scale is not supported"):
        TargetFile(write_llama(tmp_path / "t.gguf", spec))
    (tmp_path / "no.gguf").write_bytes(b"nothing")
    with pytest.raises(ModelError, match="cannot be read"):
        TargetFile(tmp_path / "no.gguf")
