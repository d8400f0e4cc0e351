"""The chain: sample, train, export, check, calibrate, measure, report. Each stage by the clock.

Goes on from what a killed run left in the work folder. Refuses to know the command line.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..files import fingerprint, write_atomically
from .batch import DraftVocabulary
from .build import all_sequences, check_memory, new_drafter
from .clock import Clock, Pieces
from .collect import Collector
from .evaluate import Acceptance, evaluate
from .export import export, read_back
from .lock import alone_in
from .model import Drafter
from .parity import Parity, check_parity
from .precision import Precision, train_dtype
from .report import Facts, markdown, verdict
from .settings import DataSettings, Kind, Shape, Shares, TrainSettings, check_same_work
from .shards import ShardStore
from .target_file import TargetFile
from .train import Progress, Trainer, is_held_out
from .trial import Trial, calibrate, measure

N_PARITY = 8  # blocks
CALIBRATED_BY = 0.965  # of the time
MEASURED_BY = 0.99
MIN_SEQUENCES = 2
CHECKPOINT = "checkpoint.pt"


@dataclass(slots=True, kw_only=True)
class Options:
    """What the command was given. n_threads bounds llama.cpp's and PyTorch's threads alike."""

    target: Path
    out: Path
    work: Path
    hours: float = 2.0
    given: list[str] = field(default_factory=list)
    n_threads: int = 1
    disk_bytes: int = 20 << 30
    kind: Kind = "q8_0"
    n_draft_max: int = 8192
    n_layer: int = 2
    block_size: int = 4
    rank: int = 64
    taps: tuple[int, ...] | None = None
    start: Path | None = None  # a drafter that training goes on from
    device: str = "auto"
    precision: Precision = "auto"
    max_sequences: int | None = None
    max_steps: int | None = None
    n_trial_prompts: int = 12  # of each set, if the time allows
    data: DataSettings = field(default_factory=DataSettings)
    training: TrainSettings = field(default_factory=TrainSettings)
    shares: Shares = field(default_factory=Shares)


@dataclass(slots=True)
class _Trained:
    """What the training stage leaves. data_s: seconds before it."""

    drafter: Drafter
    vocabulary: DraftVocabulary
    covered: float
    progress: Progress
    acceptance: Acceptance
    data_s: float


def distill(options: Options) -> Facts:
    """Makes the drafter and its page beside it (.md).

    Raises DsparkError (a target that no drafter can be made for, too little memory, a work folder
    in use, a failed parity check), ValueError (a work folder of another run, too little time),
    OSError (disk).
    """
    torch.set_num_threads(options.n_threads)
    device = _device(options.device)
    options.out.parent.mkdir(parents=True, exist_ok=True)  # now, not after hours
    with alone_in(options.work):
        return _distill(options, device)


def _distill(options: Options, device: torch.device) -> Facts:
    target = TargetFile(options.target)
    shape = target.shape(
        n_layer=options.n_layer,
        block_size=options.block_size,
        rank=options.rank,
        taps=options.taps,
    )
    check_memory(shape, options.n_draft_max)
    check_same_work(options.work, options.target, shape, options.data)
    clock = Clock(options.work / "clock.json", options.hours * 3600.0)
    store = ShardStore(options.work / "shards", limit_bytes=options.disk_bytes)
    _collect(options, target, shape, store, clock)
    trained = _train(options, target, shape, store, clock, device)
    clock.say("exporting, and comparing with llama.cpp")
    parity = _export(options, target, trained, store)
    facts = _facts(options, target, store, trained, parity, _try_out(options, clock))
    page = options.out.with_suffix(".md")
    if not write_atomically(page, markdown(facts)):
        raise OSError(f"{page} cannot be written; the drafter itself is {options.out}")
    clock.save()
    clock.say(f"done: {options.out}, and about it {page}. {verdict(facts.trial)}")
    return facts


def _train(
    options: Options,
    target: TargetFile,
    shape: Shape,
    store: ShardStore,
    clock: Clock,
    device: torch.device,
) -> _Trained:
    drafter, vocabulary, covered = new_drafter(
        target,
        shape,
        store,
        n_draft_max=options.n_draft_max,
        device=device,
        seed=options.training.seed,
        start=options.start,
    )
    drafter.train_dtype = train_dtype(options.precision, device, clock.say)
    trainer = Trainer(drafter, vocabulary, store, options.training, options.work / CHECKPOINT)
    data_s = clock.spent_s - trainer.progress.trained_s
    trainer.train(clock, share=options.shares.train, max_steps=options.max_steps)
    acceptance = evaluate(drafter, trainer.held_out, vocabulary)
    return _Trained(drafter, vocabulary, covered, trainer.progress, acceptance, data_s)


def _collect(
    options: Options, target: TargetFile, shape: Shape, store: ShardStore, clock: Clock
) -> None:
    if (options.work / CHECKPOINT).exists():  # its draft vocabulary belongs to the text as it was
        return
    collector = Collector(target, shape, options.data, n_threads=options.n_threads)
    try:
        clock.say(f"sampling from {target.name}")
        collector.collect(
            store,
            clock,
            given=options.given,
            work=options.work,
            share=options.shares.data,
            max_sequences=options.max_sequences,
        )
    finally:
        collector.close()
    n_trained = sum(not is_held_out(number) for number in store.numbers)
    if n_trained < MIN_SEQUENCES or n_trained == len(store.numbers):
        raise ValueError(
            f"only {len(store.numbers)} replies were sampled in the time; give more --hours"
        )


def _export(options: Options, target: TargetFile, trained: _Trained, store: ShardStore) -> Parity:
    """Under its own name only once llama.cpp drafts from it what PyTorch does."""
    unchecked = options.out.with_name(options.out.name + ".unchecked")
    drafter, vocabulary = trained.drafter, trained.vocabulary
    provenance = _provenance(options, target, store, trained)
    export(drafter, vocabulary, target, unchecked, kind=options.kind, provenance=provenance)
    cpu = torch.device("cpu")
    read = read_back(unchecked, drafter.shape, drafter.embedding.to(cpu), drafter.head.to(cpu))
    parity = check_parity(
        options.target,
        unchecked,
        read,
        DraftVocabulary(vocabulary.ids.to(cpu), drafter.shape.n_vocab),
        _parity_prompts(store),
        kind=options.kind,
        n_threads=options.n_threads,
    )
    os.replace(unchecked, options.out)
    return parity


def _parity_prompts(store: ShardStore) -> Sequence[list[int]]:
    """Beginnings of sampled sequences, cut somewhere in the reply."""
    prompts: list[list[int]] = []
    for sampled in all_sequences(store):
        n = sampled.n_prompt + sampled.n_reply * (1 + len(prompts)) // (1 + N_PARITY)
        prompts.append(sampled.tokens[: max(2, n)].tolist())
        if len(prompts) == N_PARITY:
            break
    return prompts


def _provenance(
    options: Options, target: TargetFile, store: ShardStore, trained: _Trained
) -> dict[str, str | int | float]:
    licence = target.licence or "unknown"
    acceptance = trained.acceptance
    return {
        "general.description": (
            f"Trained by dspark_edge.distill on text drawn from {target.name}; "
            f"the target's licence ({licence}) governs its use"
        ),
        "dspark_edge.target.name": target.name,
        "dspark_edge.target.fingerprint": fingerprint(options.target),
        "dspark_edge.n_tokens": store.n_tokens,
        "dspark_edge.n_anchors": trained.progress.n_anchors,
        "dspark_edge.cross_entropy": trained.progress.curve[-1].cross_entropy,
        "dspark_edge.tau.greedy": acceptance.greedy_tau,
        "dspark_edge.tau.sampled": acceptance.sampled_tau,
        "dspark_edge.acceptance.greedy": " ".join(f"{rate:.4f}" for rate in acceptance.greedy),
        "dspark_edge.acceptance.sampled": " ".join(f"{rate:.4f}" for rate in acceptance.sampled),
    }


def _facts(
    options: Options,
    target: TargetFile,
    store: ShardStore,
    trained: _Trained,
    parity: Parity,
    trial: Trial,
) -> Facts:
    return Facts(
        target_name=target.name,
        target_hash=fingerprint(options.target),
        drafter=options.out,
        shape=trained.drafter.shape,
        kind=options.kind,
        n_sequences=len(store.numbers),
        n_tokens=store.n_tokens,
        n_draft=len(trained.vocabulary),
        covered=trained.covered,
        n_anchors=trained.progress.n_anchors,
        data_s=trained.data_s,
        trained_s=trained.progress.trained_s,
        curve=trained.progress.curve,
        acceptance=trained.acceptance,
        parity=parity,
        trial=trial,
    )


def _try_out(options: Options, clock: Clock) -> Trial:
    trial = Trial()
    clock.say("calibrating")
    calibrated = calibrate(
        options.target,
        options.out,
        n_threads=options.n_threads,
        is_over=Pieces(clock, CALIBRATED_BY).is_over,
    )
    if isinstance(calibrated, str):
        trial.notices.append(calibrated)
    else:
        trial.calibrated = calibrated
    if clock.left_s(MEASURED_BY) > 0:
        clock.say("measuring against plain decoding")
        trial.sets = measure(
            options.target,
            options.out,
            n_threads=options.n_threads,
            cache=options.work / "costs",
            n_prompts=options.n_trial_prompts,
            is_over=Pieces(clock, MEASURED_BY).is_over,
        )
    return trial


def _device(name: str) -> torch.device:
    """CUDA or MPS where PyTorch has it. Raises ValueError for a name that it does not know."""
    if name != "auto":
        try:
            return torch.device(name)
        except RuntimeError as error:
            raise ValueError(f"--device is {name!r}; give auto, cpu, cuda or mps") from error
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
