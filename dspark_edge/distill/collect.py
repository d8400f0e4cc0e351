"""The data stage: replies sampled from the target, and what it saw, into shards.

Refuses to know the drafter's training.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from .._core import BlockDecoder, DecoderConfig
from .clock import Clock
from .prompts import Frame, PromptSource, frame_of, numbers_from
from .sampling import Job, Reply, sample
from .settings import DataSettings, Shape
from .shards import Sampled, ShardStore
from .target_file import TargetFile

SAVE_EVERY = 64  # sequences, or a shard: what a kill can cost


class Collector:
    """Samples until the time of the stage, the disk limit or `max_sequences` is reached."""

    def __init__(
        self, target: TargetFile, shape: Shape, settings: DataSettings, *, n_threads: int
    ) -> None:
        self._target = target
        self._settings = settings
        self._decoder = BlockDecoder(
            DecoderConfig(
                target_path=str(target.path),
                n_ctx=settings.max_prompt + settings.max_reply,
                n_seq=settings.n_seq,
                n_batch=max(512, settings.n_seq),
                n_threads=n_threads,
                max_verify_len=0,
                own_cells=True,
            )
        )
        self._decoder.tap(list(shape.taps))

    def close(self) -> None:
        """Frees the target."""
        self._decoder.close()

    def collect(
        self,
        store: ShardStore,
        clock: Clock,
        *,
        given: list[str],
        work: Path,
        share: float,
        max_sequences: int | None,
    ) -> None:
        """Fills the store. Raises DsparkError when the target writes no prompts."""
        frame = frame_of(self._decoder)
        source = PromptSource(
            self._decoder,
            frame,
            self._fitting(frame, given, clock),
            work / "prompts.jsonl",
            drawn_share=self._settings.drawn_share,
        )
        numbers = numbers_from(store.numbers)
        number = next(numbers)
        n_done = n_begun = len(store.numbers)
        n_unsaved = 0

        def jobs() -> Iterator[Job]:
            nonlocal number, n_begun
            while not (store.is_full or clock.left_s(share) <= 0):
                if max_sequences is not None and n_begun >= max_sequences:
                    return
                if not source.is_ready(number):
                    yield source.draw()
                    continue
                prompt = source.prompt(number)
                if self._fits(prompt):
                    n_begun += 1
                    yield self._job(number, prompt)
                number = next(numbers)

        for reply in sample(self._decoder, jobs(), is_over=lambda: clock.left_s(share) <= 0):
            if not reply.job.is_tapped:
                source.take(reply)
                clock.say(f"drawing prompts; sampled {n_done} replies", share=share)
                continue
            n_done += 1
            n_unsaved += 1
            if store.add(self._sampled(reply)) or n_unsaved >= SAVE_EVERY:
                store.flush()
                clock.save()
                n_unsaved = 0
            clock.say(f"sampled {n_done} replies, {store.n_tokens} tokens stored", share=share)
        store.flush()
        clock.save()

    def _fitting(self, frame: Frame, given: list[str], clock: Clock) -> list[str]:
        """The prompts that are not too long; says how many are.

        Raises ValueError when none is left and none is to be drawn.
        """
        n_max = self._settings.max_prompt
        fitting = [text for text in given if self._fits(frame.tokens(self._decoder, text))]
        if (n_left_out := len(given) - len(fitting)) > 0:
            text = f"{n_left_out} of {len(given)} given prompts are longer than {n_max} tokens"
            if not fitting and self._settings.drawn_share == 0.0:
                raise ValueError(f"{text}; give shorter ones, or a --drawn-share above 0")
            clock.say(f"{text} and left out")
        return fitting

    def _fits(self, prompt: list[int]) -> bool:
        return 2 <= len(prompt) <= self._settings.max_prompt  # an anchor, and something before it

    def _job(self, number: int, prompt: list[int]) -> Job:
        # Not in turn: given prompts stand at every second number, and would miss half of them.
        temperature = random.Random(number).choice(self._settings.temperatures)
        return Job(number, prompt, temperature, self._settings.max_reply)

    def _sampled(self, reply: Reply) -> Sampled:
        hidden = np.concatenate(reply.hidden)
        tokens = np.array(reply.tokens, np.int64)
        # The emitted token's logit, from its row of the head, gives what normalises all others.
        logits = np.einsum("ne,ne->n", hidden.astype(np.float32), self._target.head_rows(tokens))
        return Sampled(
            number=reply.job.number,
            temperature=reply.job.temperature,
            n_prompt=len(reply.job.prompt),
            tokens=np.array(reply.job.prompt + reply.tokens, np.int32),
            features=np.concatenate(reply.features),
            hidden=hidden,
            log_sum_exp=(logits - np.array(reply.log_probs)).astype(np.float32),
            likely=np.array(reply.likely, np.int32),
        )
