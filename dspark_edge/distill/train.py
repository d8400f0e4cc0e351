"""The training loop: sequences in, a trained drafter out, by the clock and safe against a kill.

Refuses to know how data was made and where the drafter goes.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .batch import DraftVocabulary, Sequence, to_device
from .clock import Clock
from .evaluate import Acceptance, evaluate
from .held_out import hold_out
from .loss import Losses, losses, weights_at
from .model import Drafter
from .settings import TrainSettings
from .shards import ShardStore
from .workers import Workers, count_for

N_POINTS = 20  # of the curve
WARM_UP = 0.02  # of the stage
MOMENTUM = 0.95
OTHER_BETAS = (0.9, 0.99)


@dataclass(slots=True)
class Point:
    """One point of the training curve: means since the point before, tau on held-out text."""

    seconds: float
    n_anchors: int
    cross_entropy: float
    total_variation: float
    confidence: float
    greedy_tau: float
    sampled_tau: float


@dataclass(slots=True)
class Progress:
    """What training has seen. data_s: seconds before it; trained_s: of the stage, over all runs."""

    n_steps: int = 0
    n_anchors: int = 0
    data_s: float = 0.0
    trained_s: float = 0.0
    curve: list[Point] = field(default_factory=list)


class Trainer:
    """Trains until the clock's share is used up or max_steps are done."""

    def __init__(
        self,
        drafter: Drafter,
        vocabulary: DraftVocabulary,
        store: ShardStore,
        settings: TrainSettings,
        checkpoint: Path,
    ) -> None:
        """Goes on from the checkpoint where there is one.

        Raises ValueError when that is one of another draft vocabulary.
        """
        self.drafter = drafter
        self.progress = Progress()
        self._vocabulary = vocabulary
        self._store = store
        self._settings = settings
        self._checkpoint = checkpoint
        self._device = drafter.embedding.device
        self._n_workers = count_for(
            self._device,
            n_threads=torch.get_num_threads(),
            n_sequences=settings.sequences_per_step,
        )
        self._optimisers = _optimisers(drafter, settings)
        self._sums = [0.0, 0.0, 0.0, 0.0]  # of the anchors' losses since the last point, and these
        self.held_out = hold_out(store)
        self._judged = [to_device(each, self._device) for each in self.held_out.replies]
        self._reached: Acceptance | None = None  # of the weights as they are
        self._judging_s = self._saving_s = 0.0  # what the last point, and checkpoint, took
        if checkpoint.exists():
            self._load()

    def train(self, clock: Clock, *, share: float, max_steps: int | None) -> None:
        """Runs the stage and leaves a checkpoint of its end."""
        with closing(Workers(self._n_workers, n_threads=torch.get_num_threads())) as workers:
            self._train(workers, clock, share, max_steps)

    def _train(self, workers: Workers, clock: Clock, share: float, max_steps: int | None) -> None:
        stage_s = self.progress.trained_s + max(1e-3, clock.left_s(share))
        before_s, start_s = self.progress.trained_s, clock.spent_s
        saved_s = start_s
        stream = self._stream()
        progress = self.progress
        if progress.n_steps == 0:
            progress.data_s = start_s

        step_s = 0.0

        def is_over() -> bool:
            if max_steps is not None and progress.n_steps >= max_steps:
                return True
            # The last point and checkpoint are the stage's too.
            return clock.left_s(share) <= step_s + self._judging_s + self._saving_s

        def part_done() -> float:
            of_steps = 0.0 if max_steps is None else progress.n_steps / max_steps
            return min(1.0, max(progress.trained_s / stage_s, of_steps))

        n_due = int(part_done() * N_POINTS) + bool(progress.curve)  # points up to here
        while not is_over():
            begun_s = clock.spent_s
            done = part_done()
            self._step(workers, stream, done)
            step_s = clock.spent_s - begun_s
            progress.trained_s = before_s + clock.spent_s - start_s
            if done * N_POINTS >= n_due:
                n_due = int(done * N_POINTS) + 1
                self._add_point(clock)
                point = progress.curve[-1]
                clock.say(
                    f"trained on {progress.n_anchors} anchors, cross-entropy "
                    f"{point.cross_entropy:.3f}, held-out tau {point.greedy_tau:.3f}"
                )
            if clock.spent_s - saved_s >= self._settings.checkpoint_s:
                self.save(clock)
                saved_s = clock.spent_s
            clock.say(f"trained on {progress.n_anchors} anchors", share=share)
        self._add_point(clock)
        self.save(clock)

    def save(self, clock: Clock) -> None:
        """Writes the checkpoint, whole or not at all."""
        begun_s = clock.spent_s
        state = {
            "draft_ids": self._vocabulary.ids,
            "drafter": self.drafter.state_dict(),
            "optimisers": [each.state_dict() for each in self._optimisers],
            "progress": asdict(self.progress),
        }
        temporary = self._checkpoint.with_suffix(".tmp")
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._checkpoint)
        clock.save()
        self._saving_s = clock.spent_s - begun_s

    def reached(self) -> Acceptance:
        """On the held-out sequences of the curve, by the weights as they are now."""
        if self._reached is None:
            self._reached = evaluate(self.drafter, self._judged, self._vocabulary)
        return self._reached

    def _load(self) -> None:
        state: dict[str, Any] = torch.load(
            self._checkpoint, map_location=self._device, weights_only=True
        )
        if not torch.equal(state["draft_ids"], self._vocabulary.ids):
            raise ValueError(
                f"{self._checkpoint} was begun with another draft vocabulary; give the same "
                "--draft-vocab and --start-from as then, or another --work"
            )
        self.drafter.load_state_dict(state["drafter"])
        for optimiser, saved in zip(self._optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        progress = state["progress"]
        progress["curve"] = [Point(**point) for point in progress["curve"]]
        self.progress = Progress(**progress)

    def _step(self, workers: Workers, stream: Iterator[Sequence], done: float) -> None:
        rate = _rate(done)
        for optimiser in self._optimisers:
            optimiser.zero_grad()
            for group in optimiser.param_groups:
                group["lr"] = group["top_lr"] * rate
        weights = weights_at(done)
        # The longest first: the last to end are short.
        sequences = sorted(
            islice(stream, self._settings.sequences_per_step),
            key=lambda sequence: -sequence.n_reply,
        )
        n_anchors = sum(sequence.n_reply for sequence in sequences)

        def learn(sequence: Sequence) -> Losses:
            """Adds its gradients; that is safe from several threads."""
            result = losses(
                self.drafter, sequence, self._vocabulary, weights=weights, settings=self._settings
            )
            # All anchors weigh the same, those of a short reply no more than others.
            torch.autograd.backward(result.total * (sequence.n_reply / n_anchors))
            return result

        for result in workers.map(learn, sequences):
            parts = (result.cross_entropy, result.total_variation, result.confidence, 1.0)
            self._sums = [a + result.n_anchors * b for a, b in zip(self._sums, parts, strict=True)]
            self.progress.n_anchors += result.n_anchors
        nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
        for optimiser in self._optimisers:
            optimiser.step()
        self.progress.n_steps += 1
        self._reached = None

    def _stream(self) -> Iterator[Sequence]:
        """Training sequences without end: shards in random order, each one's in random order.

        Raises ValueError when there are none.
        """
        order = random.Random(self._settings.seed + self.progress.n_steps)
        n_given = 0
        while True:
            shards = list(self._store.shards)
            order.shuffle(shards)
            for shard in shards:
                sequences = [s for s in self._store.read(shard) if not self.held_out.has(s)]
                order.shuffle(sequences)
                n_given += len(sequences)
                for sampled in sequences:
                    yield to_device(sampled, self._device)
            if n_given == 0:
                raise ValueError(
                    "all replies are to prompts that are held out for judging; "
                    "sample more, or give more prompts"
                )

    def _add_point(self, clock: Clock) -> None:
        if self._sums[3] == 0.0:
            return
        ce, tv, bce = (each / self._sums[3] for each in self._sums[:3])
        self._sums = [0.0, 0.0, 0.0, 0.0]
        begun_s = clock.spent_s
        reached = self.reached()
        self._judging_s = clock.spent_s - begun_s
        progress = self.progress
        progress.curve.append(
            Point(
                progress.trained_s,
                progress.n_anchors,
                ce,
                tv,
                bce,
                reached.greedy_tau,
                reached.sampled_tau,
            )
        )


def _rate(done: float) -> float:
    """Of the top rate: a short rise, then a cosine down to a twentieth."""
    if done < WARM_UP:
        return 0.1 + 0.9 * done / WARM_UP
    fall = (done - WARM_UP) / (1.0 - WARM_UP)
    return 0.05 + 0.95 * 0.5 * (1.0 + math.cos(math.pi * fall))


def _optimisers(drafter: Drafter, settings: TrainSettings) -> list[torch.optim.Optimizer]:
    """Muon for the backbone's matrices where PyTorch has it, AdamW for all else."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    has_muon = hasattr(torch.optim, "Muon")
    for name, parameter in drafter.named_parameters():
        is_matrix = parameter.ndim == 2 and not name.startswith("markov")
        (matrices if is_matrix and has_muon else others).append(parameter)
    optimisers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(others, lr=settings.other_rate, betas=OTHER_BETAS, weight_decay=0.0)
    ]
    if matrices:
        optimisers.append(
            torch.optim.Muon(matrices, lr=settings.matrix_rate, weight_decay=0.0, momentum=MOMENTUM)
        )
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["top_lr"] = group["lr"]
    return optimisers
