"""The whole chain on a tiny target: it learns, its file drafts as PyTorch does, kills cost little.

Wall time decides nothing here: lengths are given in sequences and steps.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import numpy as np
import torch
from gguf import GGUFReader
from tiny_models import TargetSpec, write_llama

from dspark_edge import DsparkError, Engine, MemoryPlanError, ModelError, SamplingParams
from dspark_edge.calibration import load_calibration
from dspark_edge.distill import __main__ as command
from dspark_edge.distill import parity as parity_module
from dspark_edge.distill.build import check_memory, new_drafter
from dspark_edge.distill.export import export, read_back
from dspark_edge.distill.held_out import hold_out
from dspark_edge.distill.options import Options
from dspark_edge.distill.pipeline import distill
from dspark_edge.distill.report import Facts
from dspark_edge.distill.settings import DataSettings, Shape, TrainSettings
from dspark_edge.distill.shards import ShardStore
from dspark_edge.distill.start import StartFile
from dspark_edge.distill.target_file import TargetFile
from dspark_edge.distill.train import Trainer
from dspark_edge.lookup_cache import load_lookup_texts, lookup_cache_path

MARGIN = 0.3  # in tau, of a trained drafter over an untrained one
N_SEQUENCES, N_STEPS = 64, 100
WAIT_S = 300.0  # for a subprocess to get somewhere: far more than it takes


def options_of(target: Path, folder: Path) -> Options:
    return Options(
        target=target,
        out=folder / "tiny-dspark.gguf",
        work=folder / "work",
        hours=1.0,
        kind="f16",
        n_draft_max=256,
        rank=32,
        max_sequences=N_SEQUENCES,
        max_steps=N_STEPS,
        n_trial_prompts=1,
        data=DataSettings(n_seq=8, max_prompt=128, max_reply=48),
        training=TrainSettings(n_exact=128, n_random=64),
    )


@pytest.fixture(scope="module")
def shallow_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose next token depends mostly on the last one: learnt in seconds."""
    spec = TargetSpec(layer_gain=0.1)
    return write_llama(tmp_path_factory.mktemp("target") / "target.gguf", spec)


@pytest.fixture(scope="module")
def facts(shallow_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Facts:
    return distill(options_of(shallow_target, tmp_path_factory.mktemp("made")))


def full_block_tau(target: Path, drafter: Path) -> float:
    """Of real decoding, every round drafted."""
    with Engine(
        target, drafter=drafter, n_ctx=256, n_seq=1, n_threads=1, speculation="always"
    ) as e:
        taus = []
        for number in range(12):
            prompt = e.render([{"role": "user", "content": f"prompt number {number}"}])
            *_, last = e.generate(prompt, SamplingParams(max_tokens=48, temperature=0.0))
            taus.append(last.stats.tau)
    return sum(taus) / len(taus)


def untrained_of(facts: Facts, target: Path) -> tuple[float, Path]:
    """Held-out tau and file of the same drafter before its first step."""
    work = facts.drafter.parent / "work"
    store = ShardStore(work / "shards", limit_bytes=1 << 40)
    file = TargetFile(target)
    drafter, vocabulary, _ = new_drafter(
        file, facts.shape, store, n_draft_max=256, device=torch.device("cpu"), seed=1
    )
    checkpoint = work / "none.pt"
    trainer = Trainer(drafter, vocabulary, store, TrainSettings(), checkpoint)
    tau = trainer.reached().greedy_tau
    path = facts.drafter.with_name("untrained.gguf")
    export(drafter, vocabulary, file, path, kind="f16", provenance={})
    return tau, path


def test_loss_falls_and_the_drafter_beats_an_untrained_one(
    facts: Facts, shallow_target: Path
) -> None:
    first, last = facts.curve[0], facts.curve[-1]
    assert last.cross_entropy < 0.7 * first.cross_entropy
    assert last.total_variation < 0.8 * first.total_variation
    before, untrained = untrained_of(facts, shallow_target)
    assert facts.acceptance.greedy_tau > before + MARGIN
    real = full_block_tau(shallow_target, facts.drafter)
    assert real > full_block_tau(shallow_target, untrained) + MARGIN


def started_from(
    start: Path, facts: Facts, target: Path, shape: Shape | None = None, n_draft_max: int = 256
) -> float:
    """Held-out tau of a drafter that begins with a file's weights."""
    store = ShardStore(facts.drafter.parent / "work" / "shards", limit_bytes=1 << 40)
    begun = StartFile(start)
    shape = begun.fitted(shape or facts.shape)
    drafter, vocabulary, _ = new_drafter(
        TargetFile(target),
        shape,
        store,
        n_draft_max=n_draft_max,
        device=torch.device("cpu"),
        seed=2,
        start=begun,
    )
    checkpoint = facts.drafter.parent / "none.pt"
    trainer = Trainer(drafter, vocabulary, store, TrainSettings(), checkpoint)
    return trainer.reached().greedy_tau


def test_training_goes_on_from_a_drafter_file(facts: Facts, shallow_target: Path) -> None:
    """With the file's own mask token, whichever would be taken for a new one."""
    shape = replace(facts.shape, mask_token=facts.shape.mask_token - 1)
    tau = started_from(facts.drafter, facts, shallow_target, shape)
    assert tau == pytest.approx(facts.acceptance.greedy_tau, abs=0.02)


def test_a_start_with_another_draft_vocabulary_keeps_what_both_can_draft(
    facts: Facts, shallow_target: Path
) -> None:
    """Half of the file's tokens: rows of the Markov head must follow their tokens."""
    store = ShardStore(facts.drafter.parent / "work" / "shards", limit_bytes=1 << 40)
    begun = StartFile(facts.drafter)
    drafter, vocabulary, covered = new_drafter(
        TargetFile(shallow_target),
        begun.fitted(facts.shape),
        store,
        n_draft_max=128,
        device=torch.device("cpu"),
        seed=2,
        start=begun,
    )
    assert len(vocabulary) == 128
    assert 0.3 < covered < 1.0
    theirs = begun.draft_ids.tolist()
    rows = GGUFReader(facts.drafter).tensors
    (w2,) = (tensor.data for tensor in rows if tensor.name == "markov_w2.weight")
    for column, token in enumerate(vocabulary.ids.tolist()):
        ours = drafter.markov_w2[column].detach().numpy()
        if token in theirs:
            np.testing.assert_allclose(ours, w2[theirs.index(token)].astype(np.float32))
            assert ours.any()
        else:
            assert not ours.any()
    tau = started_from(facts.drafter, facts, shallow_target, n_draft_max=128)
    assert tau > 1.0 + 0.3 * (facts.acceptance.greedy_tau - 1.0)


@pytest.mark.parametrize("change", [{"n_layer": 1}, {"block_size": 3}, {"rank": 16}])
def test_a_start_of_another_shape_is_refused(
    change: dict[str, Any], facts: Facts, shallow_target: Path
) -> None:
    with pytest.raises(ModelError, match=r"give the same .*, or begin without --start-from"):
        started_from(facts.drafter, facts, shallow_target, replace(facts.shape, **change))
    with pytest.raises(ModelError, match="cannot be read"):
        started_from(facts.drafter.with_suffix(".md"), facts, shallow_target)


def test_llama_cpp_and_pytorch_agree_within_a_hundredth(facts: Facts) -> None:
    assert facts.parity.n_blocks == 8
    assert 0.0 < facts.parity.lead_error <= 1e-2
    assert facts.parity.confidence_error <= 1e-2


def test_the_file_says_where_it_comes_from(facts: Facts, shallow_target: Path) -> None:
    fields = {name: field.contents() for name, field in GGUFReader(facts.drafter).fields.items()}
    assert fields["general.architecture"] == "dflash"
    assert fields["dspark_edge.n_anchors"] == facts.n_anchors > 0
    assert fields["dspark_edge.n_tokens"] == facts.n_tokens > 0
    assert fields["dspark_edge.tau.greedy"] == pytest.approx(facts.acceptance.greedy_tau)
    assert fields["dspark_edge.target.fingerprint"] == facts.target_hash
    theirs = {name: f.contents() for name, f in GGUFReader(shallow_target).fields.items()}
    for key in ("tokens", "token_type", "merges", "pre", "eos_token_id", "mask_token_id"):
        assert fields[f"tokenizer.ggml.{key}"] == theirs[f"tokenizer.ggml.{key}"]


def test_known_replies_lie_beside_the_drafter_but_for_those_that_judge_it(facts: Facts) -> None:
    notices: list[str] = []
    texts = load_lookup_texts(facts.drafter, n_vocab=facts.shape.n_vocab, notices=notices)
    assert notices == []
    assert texts is not None
    store = ShardStore(facts.drafter.parent / "work" / "shards", limit_bytes=1 << 40)
    held_out = hold_out(store)
    n_held_out = sum(held_out.has(each) for s in store.shards for each in store.read_texts(s))
    assert 0 < len(texts.lengths) <= N_SEQUENCES - n_held_out
    known = np.split(texts.tokens, np.cumsum(texts.lengths)[:-1])
    for reply in held_out.replies:
        assert not any(np.array_equal(reply.tokens[reply.n_prompt - 6 :], text) for text in known)
    page = facts.drafter.with_suffix(".md").read_text()
    told = f"{len(texts.tokens)} tokens in {len(texts.lengths)} of the replies"
    assert f"| lookup cache | tiny-dspark.lookup.npz: {told}" in page


def test_the_fit_and_the_page_lie_beside_the_drafter(facts: Facts) -> None:
    assert load_calibration(facts.drafter) is not None
    page = facts.drafter.with_suffix(".md").read_text()
    assert "worth using here" in page.lower()
    assert f"| tau | {facts.acceptance.greedy_tau:.3f} |" in page
    assert page.count("\n| ") > 20 + len(facts.curve)
    assert "(tiny-dspark.svg)" in page
    assert facts.drafter.with_suffix(".svg").read_text().count("<polyline") >= 5
    judged = facts.trial.calibrated
    assert judged is not None
    assert judged.head is not None
    assert len(judged.fitted.by_position) == len(judged.head.by_position) == facts.shape.block_size
    assert judged.fitted.survival.ece < judged.head.survival.ece + 0.05
    assert [each.name for each in facts.trial.sets] == ["chat", "code", "math", "edit"]
    assert not list(facts.drafter.parent.glob("*.unchecked"))


def test_a_wrong_file_fails_the_parity_check_and_gets_no_name(
    facts: Facts, shallow_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that differ in one tensor, as a mistake of the layout would make them."""

    def damaged(*args: object) -> object:
        drafter = read_back(*args)  # type: ignore[arg-type]
        with torch.no_grad():
            drafter.get_parameter("layers.0.attn_k").neg_()
        return drafter

    monkeypatch.setattr("dspark_edge.distill.finish.read_back", damaged)
    options = options_of(shallow_target, facts.drafter.parent)
    options.out = facts.drafter.with_name("other.gguf")
    with pytest.raises(DsparkError, match=r"differ by|where PyTorch drafts"):
        distill(options)
    assert not options.out.exists()
    assert parity_module.TOLERANCE["f16"] == 1e-2


def test_too_little_memory_and_targets_without_taps_are_refused(
    shallow_target: Path, tiny_gemma3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelError, match="no drafter can be made for this target; use lookup"):
        distill(options_of(tiny_gemma3, tmp_path / "a"))
    shape = TargetFile(shallow_target).shape(n_layer=1, block_size=4, rank=8, taps=None)
    check_memory(shape, 100, n_slots=1000)
    with pytest.raises(MemoryPlanError, match="fewer --layers or --threads"):
        check_memory(shape, 100, n_slots=1 << 40)
    monkeypatch.setattr("dspark_edge.distill.build.WORKING_BYTES", 1 << 60)
    with pytest.raises(MemoryPlanError, match="MB are free; close other programs"):
        distill(options_of(shallow_target, tmp_path / "b"))


def test_too_little_time_says_so(shallow_target: Path, tmp_path: Path) -> None:
    options = options_of(shallow_target, tmp_path)
    options.hours = 1e-6
    with pytest.raises(ValueError, match=r"replies were sampled in the time; give more --hours"):
        distill(options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hours", "0"], "--hours is 0; it must be above 0"),
        (["--out", "x.bin"], "its name must end in .gguf"),
        (["--target", "nowhere.gguf"], "nowhere.gguf is not a file"),
        (["--device", "abacus"], "--device is 'abacus'"),
        (["--device", "xpu"], "--device is 'xpu', which cannot be used here"),
        (["--prompts", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_bad_arguments_are_one_line(
    arguments: list[str],
    message: str,
    shallow_target: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    good = ["--target", str(shallow_target), "--out", str(tmp_path / "d.gguf"), "--hours", "1e-6"]
    assert command.main([*good, *arguments]) == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last


# ---------------------------------------------------------------- kill -9


def run_until(command_line: list[str], is_there: Callable[[], bool]) -> None:
    """Starts the command and kills it once something is there."""
    process = subprocess.Popen(command_line, stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + WAIT_S
        while not is_there():
            if process.poll() is not None or time.monotonic() > until:
                raise AssertionError(f"it ended too early: {process.communicate()[1]}")
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


@pytest.mark.skipif(os.name == "nt", reason="no SIGKILL")
def test_a_killed_run_goes_on_where_it_was(shallow_target: Path, tmp_path: Path) -> None:
    out, work = tmp_path / "d.gguf", tmp_path / "d.work"
    index, checkpoint = work / "shards" / "index.jsonl", work / "checkpoint.pt"
    line = [sys.executable, "-m", "dspark_edge.distill", "--target", str(shallow_target)]
    line += ["--out", str(out), "--hours", "1", "--threads", "1", "--type", "f16"]
    line += ["--sequences", "8", "--max-sequences", "140", "--max-steps", "40"]
    line += [
        "--rank",
        "32",
        "--checkpoint-minutes",
        "0.001",
        "--trial-prompts",
        "1",
        "--reply-tokens",
        "24",
    ]

    run_until(line, lambda: index.exists() and index.read_text().count("\n") == 1)
    sampled = [json.loads(row)["numbers"] for row in index.read_text().splitlines()]

    run_until(line, checkpoint.exists)
    rows = [json.loads(row)["numbers"] for row in index.read_text().splitlines()]
    assert rows[: len(sampled)] == sampled
    numbers = [number for row in rows for number in row]
    assert len(numbers) == len(set(numbers)) == 140
    n_before = torch.load(checkpoint, weights_only=True)["progress"]["n_steps"]
    assert 0 < n_before < 40

    done = subprocess.run(line, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    progress = torch.load(checkpoint, weights_only=True)["progress"]
    assert progress["n_steps"] == 40
    anchors = [point["n_anchors"] for point in progress["curve"]]
    assert anchors == sorted(set(anchors))
    assert "sampling from" not in done.stderr
    assert out.exists()
    assert lookup_cache_path(out).exists()
