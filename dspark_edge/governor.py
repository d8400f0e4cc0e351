"""Acts on pressure: looks at the machine about once a second, gives up what the policy says, and
takes it back.

Owns the drafter's way out of memory and back, and what is told about it. Refuses to know when
pressure begins (pressure_policy.py), where readings come from (device.py) and how rounds run
(rounds.py): it is asked between them, and about every LOOK_S seconds while there are none.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from ._core import BlockDecoder, device_memory
from .device import Reading, Readings, read
from .errors import PairError
from .pressure import STEPS, Action, Limits, Step
from .pressure_policy import PressurePolicy
from .slots import SlotTable
from .speculation import Speculation

LOOK_S = 1.0  # between two looks, at least
RETRY_LOAD_S = 30.0  # between two tries to load a drafter that could not be loaded
N_NEWS = 100  # lines kept for whoever asks; later ones push the oldest out
NOTHING: Sequence[str] = ()


class Governor:
    """Carries out a PressurePolicy's actions on a decoder, its speculation and its idle slots.

    Nothing it does changes a text or ends a request.
    """

    __slots__ = (
        "_clock",
        "_decoder",
        "_news",
        "_policy",
        "_readings",
        "_retry_load_s",
        "_speculation",
    )

    def __init__(
        self,
        decoder: BlockDecoder,
        speculation: Speculation,
        limits: Limits,
        *,
        source: Callable[[], Reading] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """source: of readings, None for this machine's. clock: seconds, never going back.

        How much room the drafter's return needs is asked of the decoder, whatever limits say.
        """
        use = decoder.memory_use()
        self._decoder = decoder
        self._speculation = speculation
        self._policy = PressurePolicy(
            replace(
                limits,
                drafter_context_bytes=use.drafter_context_bytes + use.drafter_compute_bytes,
                drafter_weights_bytes=use.drafter_model_bytes,
            ),
            steps=_steps_of(decoder, speculation),
        )
        source = source or partial(read, gpu_devices=device_memory)
        self._readings = Readings(source, interval_s=LOOK_S, clock=clock)
        self._clock = clock
        self._retry_load_s = 0.0
        self._news: deque[str] = deque(maxlen=N_NEWS)

    @property
    def in_force(self) -> tuple[Action, ...]:
        """What is given up now, in the order of STEPS, each with the reason."""
        return self._policy.in_force

    def take_news(self) -> list[str]:
        """What was given up and taken back since the last call, a line each."""
        return [self._news.popleft() for _ in range(len(self._news))]

    def look(self, slots: SlotTable, queue_len: int) -> Sequence[str]:
        """Between two rounds: acts on a reading when one is due.

        Returns what was done, a line each.
        """
        reading = self._readings.next()
        if reading is None:
            return NOTHING
        now_s, speculation = self._clock(), self._speculation
        actions = self._policy.observe(
            reading,
            now_s,
            queue_len=queue_len,
            n_active=len(slots.running),
            # Other modes have no profile to be slower than.
            slowdown=speculation.cost.load if speculation.mode == "auto" else None,
        )
        done = [line for action in actions for line in (action.text, *self._act(action, slots))]
        speculation.bar = self._policy.bar
        done += self._retry_load(now_s)
        self._news.extend(done)
        return done

    def max_batch_tokens(self, n_seq: int, n_batch: int) -> int:
        """batch_tokens that a round of n_seq sequences may use, of n_batch that fit one pass."""
        return self._policy.max_batch_tokens(n_seq, self._speculation.n_proposed_usual, n_batch)

    def retry_s(self) -> int | None:
        """Whole seconds after which a refused request may come back; None: none is refused."""
        return self._policy.retry_s(self._clock())

    # ------------------------------------------------------------ steps

    def _act(self, action: Action, slots: SlotTable) -> Sequence[str]:
        speculation = self._speculation
        if action.kind == "park":
            speculation.held = action.reason if action.is_on else ""
        elif action.kind == "shrink_idle" and action.is_on:
            return self._empty_idle(slots)
        elif action.kind == "release_context" and action.is_on:
            self._decoder.release_drafter_context()
            speculation.released = action.reason
        elif action.kind == "release_weights" and action.is_on:
            self._decoder.release_drafter()
        elif action.kind in ("release_context", "release_weights"):
            return self._load(self._clock(), weights_only=action.kind == "release_weights")
        return NOTHING

    def _empty_idle(self, slots: SlotTable) -> Sequence[str]:
        """Their cells are free for others then; llama.cpp's cache as a whole keeps its size."""
        idle = slots.idle
        if not idle:
            return NOTHING
        n_tokens = sum(len(slot.cached) for slot in idle)
        for slot in idle:
            self._decoder.rewind(slot.seq_id, 0)
            slot.cached.clear()
        return [f"{n_tokens} cached tokens of {len(idle)} idle sessions dropped"]

    def _load(self, now_s: float, *, weights_only: bool = False) -> Sequence[str]:
        if self._speculation.proposer != "drafter":
            return NOTHING  # switched off for another reason: its memory is better used elsewhere
        try:
            if weights_only:
                self._decoder.load_drafter_weights()
            else:
                self._decoder.load_drafter()
        except PairError as error:
            self._retry_load_s = now_s + RETRY_LOAD_S
            self._speculation.released = f"it could not be loaded again: {error}"
            return [f"the drafter could not be loaded again: {error}"]
        if not weights_only:
            self._speculation.released = ""
        return NOTHING

    def _retry_load(self, now_s: float) -> Sequence[str]:
        """A drafter that no step keeps out of memory, and that still is not there."""
        speculation = self._speculation
        is_wanted = speculation.proposer == "drafter" and speculation.released
        if not is_wanted or now_s < self._retry_load_s:
            return NOTHING
        if any(a.kind == "release_context" for a in self._policy.in_force):
            return NOTHING
        return self._load(now_s) or ["the drafter is loaded again"]


def _steps_of(decoder: BlockDecoder, speculation: Speculation) -> tuple[Step, ...]:
    """The steps that have something to give up here."""
    vain: set[Step] = set()
    if not decoder.has_drafter:
        vain |= {"release_context", "release_weights"}
    if speculation.proposer is None:
        vain |= {"shorten", "park"}
    return tuple(step for step in STEPS if step not in vain)
