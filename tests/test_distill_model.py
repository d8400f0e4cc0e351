"""The PyTorch drafter against the numpy one, and the losses against what they stand for."""

from __future__ import annotations

import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from drafter_reference import DrafterReference, GgufFile, LlamaReference
from tiny_models import DrafterSpec, token_id, write_drafter

from dspark_edge.distill import model, precision
from dspark_edge.distill.batch import (
    Candidates,
    DraftVocabulary,
    Sequence,
    anchors_of,
    choose_candidates,
)
from dspark_edge.distill.evaluate import evaluate
from dspark_edge.distill.export import read_back
from dspark_edge.distill.loss import Weights, draft_logits, losses, weights_at
from dspark_edge.distill.model import Drafter
from dspark_edge.distill.settings import TrainSettings
from dspark_edge.distill.target_file import TargetFile, spread_taps
from dspark_edge.distill.workers import Workers, count_for

TOKENS = [token_id("<|bos|>"), *b"the quick brown fox jumps over the lazy dog"]
N_PROMPT = 6
BLOCK = 4


@pytest.fixture(scope="module")
def drafter_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter with a reduced vocabulary of 200 of the 320 tokens."""
    spec = DrafterSpec(draft_vocab=200, block_size=BLOCK)
    return write_drafter(tmp_path_factory.mktemp("drafter") / "d.gguf", spec)


def torch_drafter(drafter_file: Path, target: Path) -> tuple[Drafter, DraftVocabulary]:
    file = TargetFile(target)
    shape = file.shape(n_layer=2, block_size=BLOCK, rank=8, taps=(1, 2))
    shape = replace(shape, n_ff=96, mask_token=token_id("<|mask|>"))
    embedding = torch.from_numpy(file.embedding_rows(slice(None)))
    ids = torch.from_numpy(GgufFile(drafter_file).tensors["d2t"].astype(np.int64))
    drafter = read_back(drafter_file, shape, embedding, embedding[:0])
    return drafter, DraftVocabulary(ids, shape.n_vocab)


def sequence_of(target: Path, *, taps: tuple[int, ...] = (1, 2)) -> Sequence:
    """TOKENS as if the target had replied with what follows the prompt."""
    reference = LlamaReference(target)
    logits, inputs = reference.forward(TOKENS)
    features = np.concatenate([inputs[layer] for layer in taps], axis=1)[:-1]
    rows = torch.from_numpy(logits[N_PROMPT - 1 : -1])
    head = torch.from_numpy(reference.file.weight("output"))
    hidden = torch.linalg.lstsq(head, rows.T).solution.T
    return Sequence(
        tokens=torch.tensor(TOKENS),
        n_prompt=N_PROMPT,
        features=torch.from_numpy(features),
        hidden=hidden,
        log_sum_exp=rows.logsumexp(-1),
        likely=rows.topk(8).indices,
    )


@pytest.mark.parametrize("n_at_once", [5, 64])  # the 38 anchors in parts, and all at once
def test_blocks_of_all_anchors_at_once_are_those_of_the_reference_one_by_one(
    n_at_once: int, tiny_llama: Path, drafter_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "ANCHORS_AT_ONCE", n_at_once)
    drafter, vocabulary = torch_drafter(drafter_file, tiny_llama)
    sequence = sequence_of(tiny_llama)
    anchors = anchors_of(sequence, BLOCK)
    with torch.no_grad():
        context = drafter.context(sequence.features)
        hidden = drafter.hidden(context, anchors.tokens, anchors.positions)
        rows = drafter.markov_rows(anchors.previous)
        logits = draft_logits(drafter, hidden, rows, torch.arange(len(vocabulary)))
        confidence = drafter.confidence_logit(hidden, rows).sigmoid()
    reference = DrafterReference(drafter_file, tiny_llama)
    for index in (0, 7, len(anchors.tokens) - BLOCK):
        position = N_PROMPT - 1 + index
        reference.clear()
        reference.inject(sequence.features[:position].numpy(), range(position))
        expected = reference.draft(
            TOKENS[position], position, previous=TOKENS[position : position + BLOCK]
        )
        np.testing.assert_allclose(hidden[index], expected.hidden, atol=2e-4)
        expected_logits = expected.logits[:, vocabulary.ids.numpy()]
        np.testing.assert_allclose(logits[index], expected_logits, atol=2e-3)
        np.testing.assert_allclose(confidence[index], expected.confidence, atol=1e-4)


def test_anchors_stand_in_front_of_the_reply_tokens_that_their_slots_are_about(
    tiny_llama: Path,
) -> None:
    anchors = anchors_of(sequence_of(tiny_llama), BLOCK)
    n_reply = len(TOKENS) - N_PROMPT
    assert len(anchors.tokens) == n_reply
    assert anchors.tokens[0] == TOKENS[N_PROMPT - 1]
    assert anchors.positions[0] == N_PROMPT - 1
    assert anchors.row[2].tolist() == [2, 3, 4, 5]
    assert anchors.previous[2].tolist() == TOKENS[N_PROMPT + 1 : N_PROMPT + 5]
    assert anchors.is_valid.sum(1).tolist() == [BLOCK] * (n_reply - 3) + [3, 2, 1]


def test_random_candidates_stand_for_the_whole_vocabulary(
    tiny_llama: Path, drafter_file: Path
) -> None:
    """Without their weights the sampled losses would be too small."""
    drafter, vocabulary = torch_drafter(drafter_file, tiny_llama)
    with torch.no_grad():
        drafter.head = torch.from_numpy(TargetFile(tiny_llama).head_rows(vocabulary.ids.numpy()))
        drafter.output_norm.weight.mul_(0.1)  # flat, so that the many unlikely tokens count
        drafter.markov_w2.zero_()
    sequence = sequence_of(tiny_llama)

    def mean_losses(n_exact: int, n_draws: int) -> tuple[float, float]:
        settings = TrainSettings(n_random=40, n_exact=n_exact, confidence_weight=0.0)
        torch.manual_seed(1)
        draws = [
            losses(drafter, sequence, vocabulary, weights=Weights(1.0, 0.0), settings=settings)
            for _ in range(n_draws)
        ]
        return (
            sum(each.cross_entropy for each in draws) / n_draws,
            sum(each.total_variation for each in draws) / n_draws,
        )

    candidates = choose_candidates(sequence, vocabulary, n_random=40, n_exact=0)
    assert len(candidates.columns) < 0.8 * len(vocabulary)
    assert len(set(candidates.columns.tolist())) == len(candidates.columns)
    assert mean_losses(0, 40) == pytest.approx(mean_losses(1024, 1), rel=0.02)


def test_likely_and_said_tokens_are_always_candidates(tiny_llama: Path) -> None:
    sequence = sequence_of(tiny_llama)
    vocabulary = DraftVocabulary(torch.arange(0, 320, 2), 320)
    chosen: Candidates = choose_candidates(sequence, vocabulary, n_random=5, n_exact=0)
    certain = set(vocabulary.ids[chosen.columns[: chosen.n_certain]].tolist())
    wanted = set(TOKENS[N_PROMPT:]) | set(sequence.likely[:, :6].flatten().tolist())
    assert certain == {token for token in wanted if token % 2 == 0}
    assert (chosen.log_weight[: chosen.n_certain] == 0).all()
    assert chosen.log_weight[-1] == pytest.approx(np.log((160 - chosen.n_certain) / 5))


def test_a_drafter_that_is_the_target_is_accepted_always(tiny_llama: Path) -> None:
    """The evaluation's upper end: draft and target distributions that are equal."""
    sequence = sequence_of(tiny_llama)
    file = TargetFile(tiny_llama)
    shape = file.shape(n_layer=1, block_size=BLOCK, rank=8, taps=(1, 2))
    head = torch.from_numpy(file.head_rows(slice(None)))
    embedding = torch.from_numpy(file.embedding_rows(slice(None)))
    drafter = Drafter(shape, embedding, head, torch.ones(shape.n_feature))
    anchors = anchors_of(sequence, BLOCK)
    drafter.hidden = lambda *_: sequence.hidden[anchors.row]  # type: ignore[method-assign]
    reached = evaluate(drafter, [sequence], DraftVocabulary(torch.arange(320), 320))
    assert reached.greedy == [1.0] * BLOCK
    assert reached.sampled == pytest.approx([1.0] * BLOCK, abs=1e-3)
    n = len(anchors.tokens)
    assert reached.greedy_tau == pytest.approx(1 + (BLOCK * (n - 3) + 3 + 2 + 1) / n)


def test_products_in_bfloat16_leave_losses_and_gradients_where_they_were(
    tiny_llama: Path, drafter_file: Path
) -> None:
    """A matrix in the wrong type or place would turn its gradient; judging is not rounded."""
    drafter, vocabulary = torch_drafter(drafter_file, tiny_llama)
    sequence = sequence_of(tiny_llama)

    def gradients() -> tuple[float, dict[str, torch.Tensor]]:
        drafter.zero_grad()
        result = losses(
            drafter, sequence, vocabulary, weights=Weights(0.5, 0.5), settings=TrainSettings()
        )
        torch.autograd.backward(result.total)
        named = drafter.named_parameters()
        return float(result.total.detach()), {
            n: p.grad.clone() for n, p in named if p.grad is not None
        }

    exact, expected = gradients()
    judged = evaluate(drafter, [sequence], vocabulary)
    drafter.train_dtype = torch.bfloat16
    rounded, found = gradients()
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=0.02)
    assert set(found) == set(expected)
    for name, gradient in found.items():
        assert gradient.dtype == torch.float32
        alike = torch.cosine_similarity(gradient.flatten(), expected[name].flatten(), dim=0)
        assert alike > 0.99, name
    assert evaluate(drafter, [sequence], vocabulary) == judged


def test_sequences_side_by_side_give_the_gradients_of_one_after_the_other(
    tiny_llama: Path, drafter_file: Path
) -> None:
    drafter, vocabulary = torch_drafter(drafter_file, tiny_llama)
    sequence = sequence_of(tiny_llama)
    used: set[str] = set()

    def learn(weight: float) -> float:
        used.add(threading.current_thread().name)
        result = losses(
            drafter,
            sequence,
            vocabulary,
            weights=Weights(weight, 1.0 - weight),
            settings=TrainSettings(),
        )
        torch.autograd.backward(result.total)
        return float(result.total.detach())

    found: list[dict[str, torch.Tensor]] = []
    totals: list[list[float]] = []
    for n in (1, 3):
        drafter.zero_grad()
        with closing(Workers(n, n_threads=4)) as workers:
            totals.append(workers.map(learn, [0.1, 0.3, 0.5, 0.7, 0.9] * 4))
        gradients = {n: p.grad for n, p in drafter.named_parameters() if p.grad is not None}
        found.append({name: gradient.clone() for name, gradient in gradients.items()})
    assert totals[1] == pytest.approx(totals[0], rel=1e-5)
    assert set(found[0]) == set(found[1])
    for name, gradient in found[0].items():
        assert torch.allclose(found[1][name], gradient, rtol=1e-4, atol=1e-5), name
    assert threading.current_thread().name in used
    assert len(used) > 1


def test_a_worker_that_fails_ends_the_step_and_leaves_the_threads_as_they_were() -> None:
    def fail(item: int) -> int:
        if item == 2:
            raise RuntimeError(f"item {item}")
        return item

    n_threads = torch.get_num_threads()
    with closing(Workers(2, n_threads=2)) as workers:
        assert workers.map(fail, [0, 1, 3]) == [0, 1, 3]
        with pytest.raises(RuntimeError, match="item 2"):
            workers.map(fail, [0, 1, 2, 3])
    assert torch.get_num_threads() == n_threads


def test_only_a_cpu_has_several_workers() -> None:
    assert count_for(torch.device("cpu"), n_threads=16, n_sequences=8) == 8
    assert count_for(torch.device("cpu"), n_threads=2, n_sequences=8) == 2
    assert count_for(torch.device("cuda"), n_threads=16, n_sequences=8) == 1


@pytest.mark.parametrize(("gain", "dtype"), [(1.29, torch.float32), (1.31, torch.bfloat16)])
def test_training_is_in_bfloat16_where_that_is_faster(
    gain: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    cpu = torch.device("cpu")
    assert precision.bfloat16_gain() > 0.0
    monkeypatch.setattr(precision, "bfloat16_gain", lambda: gain)
    assert precision.train_dtype("auto", cpu, said.append) == dtype
    assert said == [
        f"training in {str(dtype).removeprefix('torch.')}: products in bfloat16 are 1.3 times as "
        "fast here as in float32"
    ]
    assert precision.train_dtype("float32", cpu, said.append) == torch.float32
    assert precision.train_dtype("bfloat16", cpu, said.append) == torch.bfloat16


def test_evaluating_on_nothing_is_refused(tiny_llama: Path, drafter_file: Path) -> None:
    drafter, vocabulary = torch_drafter(drafter_file, tiny_llama)
    with pytest.raises(ValueError, match="no sequence to evaluate"):
        evaluate(drafter, [], vocabulary)


def test_total_variation_blends_in_over_the_second_half() -> None:
    assert weights_at(0.0) == weights_at(0.5) == Weights(1.0, 0.0)
    assert weights_at(0.75) == Weights(pytest.approx(0.55), pytest.approx(0.45))
    assert weights_at(1.0) == Weights(pytest.approx(0.1), pytest.approx(0.9))


@pytest.mark.parametrize("taps", [(0, 0), (1, 2, 1), (-1, 2), (1, 4)])
def test_layers_that_cannot_be_tapped_are_refused(tiny_llama: Path, taps: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="it must be different layers from 0 to 3"):
        TargetFile(tiny_llama).shape(n_layer=1, block_size=4, rank=8, taps=taps)


def test_taps_are_spread_over_the_layers_that_exist() -> None:
    assert spread_taps(30) == (2, 8, 15, 22, 28)
    assert spread_taps(4) == (1, 2, 3)
    assert spread_taps(1) == (0,)
