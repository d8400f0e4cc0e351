"""The chain: sample, train, export, check, calibrate, measure, report. Each stage by the clock.

Goes on from what a killed run left in the work folder. Refuses to know the command line.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from .build import check_memory, new_drafter
from .clock import Clock
from .collect import Collector
from .finish import NO_CHATS, Trained, finish
from .lock import alone_in
from .options import Options
from .precision import train_dtype
from .report import Facts, verdict, write_report
from .settings import Shape, check_same_work, shares_of
from .shards import ShardStore
from .start import StartFile
from .target_file import TargetFile
from .train import Trainer
from .workers import count_for

MIN_SEQUENCES = 3  # one to judge by, two to train on
CHECKPOINT = "checkpoint.pt"
FINISHED = "finished"


def distill(options: Options, *, now: Callable[[], float] = time.monotonic) -> Facts:
    """Makes the drafter and its page beside it (.md). now: in seconds.

    Raises DsparkError (a target that no drafter can be made for, too little memory, a work folder
    in use, a failed parity check), ValueError (a work folder of another run, too little time),
    OSError (disk).
    """
    torch.set_num_threads(options.n_threads)
    device = _device(options.device)
    options.out.parent.mkdir(parents=True, exist_ok=True)  # now, not after hours
    with alone_in(options.work):
        return _distill(options, device, now)


def _distill(options: Options, device: torch.device, now: Callable[[], float]) -> Facts:
    target = TargetFile(options.target)
    start = None if options.start is None else StartFile(options.start)
    shape = target.shape(
        n_layer=options.n_layer,
        block_size=options.block_size,
        rank=options.rank,
        taps=options.taps or (None if start is None else start.taps),
    )
    if start is not None:  # now, not after hours
        shape = start.fitted(shape)
    n_at_once = count_for(
        device, n_threads=options.n_threads, n_sequences=options.training.sequences_per_step
    )
    n_slots = n_at_once * options.data.max_reply * shape.block_size
    check_memory(shape, options.n_draft_max, n_slots)
    is_new = check_same_work(options.work, options.target, shape, options.data)
    if options.from_chats:  # later runs on the same replies know it too
        (options.work / NO_CHATS).unlink(missing_ok=True)
    elif is_new:
        (options.work / NO_CHATS).touch()
    clock = Clock(options.work / "clock.json", options.hours * 3600.0, now=now)
    is_finished = options.work / FINISHED
    if is_finished.exists() and clock.left_s(shares_of(clock.total_s).train) <= 0:
        raise ValueError(
            f"{options.out} is finished; give more --hours (all of them together) to train it "
            "further, or another --out"
        )
    is_finished.unlink(missing_ok=True)
    store = ShardStore(options.work / "shards", limit_bytes=options.disk_bytes)
    _collect(options, target, shape, store, clock)
    trained = _train(options, target, shape, start, store, clock, device)
    facts = finish(options, target, trained, store, clock)
    page = write_report(facts)
    clock.save()
    is_finished.touch()
    clock.say(f"done: {options.out}, and about it {page}. {verdict(facts.trial)}")
    return facts


def _train(
    options: Options,
    target: TargetFile,
    shape: Shape,
    start: StartFile | None,
    store: ShardStore,
    clock: Clock,
    device: torch.device,
) -> Trained:
    drafter, vocabulary, covered = new_drafter(
        target,
        shape,
        store,
        n_draft_max=options.n_draft_max,
        device=device,
        seed=options.training.seed,
        start=start,
    )
    drafter.train_dtype = train_dtype(options.precision, device, clock.say)
    trainer = Trainer(drafter, vocabulary, store, options.training, options.work / CHECKPOINT)
    trainer.train(clock, share=shares_of(clock.total_s).train, max_steps=options.max_steps)
    if not trainer.progress.curve:
        raise ValueError("no time was left to train in; give more --hours")
    progress, held_out = trainer.progress, trainer.held_out
    return Trained(drafter, vocabulary, covered, progress, trainer.reached(), held_out)


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
            share=shares_of(clock.total_s).data,
            max_sequences=options.max_sequences,
        )
    finally:
        collector.close()
    if len(store.numbers) < MIN_SEQUENCES:
        raise ValueError(
            f"only {len(store.numbers)} replies were sampled in the time; give more --hours"
        )


def _device(name: str) -> torch.device:
    """CUDA or MPS where PyTorch has it. Raises ValueError for one that cannot be used."""
    if name != "auto":
        try:
            device = torch.device(name)
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:  # PyTorch without CUDA asserts
            raise ValueError(
                f"--device is {name!r}, which cannot be used here ({error}); give auto, cpu, cuda "
                "or mps"
            ) from error
        return device
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
