"""The finished drafter on this machine: survival calibrated, speed measured against plain decoding.

Takes as many prompts as the time allows. Refuses to know training.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from ..bench.block_recorder import Recorder, read_prompts
from ..bench.measure import GroupRun, run_group
from ..bench.prompt_sets import OWN_SETS, load_prompt_set, tokenize
from ..calibration import Calibration, Recording, fit, save_calibration, typical_rows
from ..engine import Engine
from ..errors import ModelError
from ..reliability import Judgement, judge, judge_head
from ..sequence import SamplingParams
from ..speculation import Mode

PROMPTS = Path(__file__).parent.parent / "prompts" / "calibration.jsonl"
TEMPERATURES = (0.0, 0.7, 1.0)
MAX_TOKENS = 64
N_CTX = 1024
MIN_RECORDINGS = 6  # of a fit that is worth keeping
TOO_LATE = "not calibrated: too little time was left; run dspark-edge bench calibrate"
# With the drafter or without; as SetSpeed.modes.
MODES: tuple[tuple[Mode, bool], ...] = (
    ("off", False),
    ("auto", False),
    ("auto", True),
    ("always", True),
)


@dataclass(slots=True)
class Calibrated:
    """The fit's file, and how good estimates are on every second text: the confidence head's own
    (None without one), and those of a fit to the other texts."""

    path: Path
    head: Judgement | None
    fitted: Judgement


@dataclass(slots=True)
class Speed:
    """Tokens while the clock ran, and its seconds."""

    n_tokens: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second; 0: nothing was clocked."""
        return self.n_tokens / self.seconds if self.seconds > 0.0 else 0.0

    def over(self, other: Speed) -> float | None:
        """Times the other's rate, None where one of them was not clocked."""
        return self.rate / other.rate if self.rate and other.rate else None

    def add(self, n_tokens: int, seconds: float) -> None:
        """One reply more."""
        self.n_tokens += n_tokens
        self.seconds += seconds


@dataclass(slots=True)
class SetSpeed:
    """One prompt set in four modes. lookup: "auto" without the drafter; full: every round drafted,
    whole blocks; full_tau: its tokens per round, a mean over the prompts."""

    name: str
    n_prompts: int = 0
    plain: Speed = field(default_factory=Speed)
    lookup: Speed = field(default_factory=Speed)
    auto: Speed = field(default_factory=Speed)
    full: Speed = field(default_factory=Speed)
    full_tau: float = 0.0

    @property
    def gain(self) -> float | None:
        """Of auto over plain, None where one of them was not clocked."""
        return self.auto.over(self.plain)

    @property
    def modes(self) -> tuple[Speed, ...]:
        """Plain, lookup, auto, full."""
        return self.plain, self.lookup, self.auto, self.full


def total(sets: Sequence[SetSpeed]) -> SetSpeed:
    """All sets as one."""
    whole = SetSpeed("all")
    for each in sets:
        whole.n_prompts += each.n_prompts
        whole.full_tau += each.n_prompts * each.full_tau
        for mine, its in zip(whole.modes, each.modes, strict=True):
            mine.add(its.n_tokens, its.seconds)
    whole.full_tau /= max(1, whole.n_prompts)
    return whole


@dataclass(slots=True)
class Trial:
    """What was found; calibrated None, or sets empty, where the time or a template was lacking."""

    calibrated: Calibrated | None = None
    sets: list[SetSpeed] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


def calibrate(
    target: Path, drafter: Path, *, n_threads: int, is_over: Callable[[], bool]
) -> Calibrated | str:
    """Fits and keeps the survival model; or says why not. is_over: asked in front of loading and of
    each text."""
    if is_over():
        return TOO_LATE
    recordings: list[Recording] = []
    with Recorder(str(target), str(drafter), n_ctx=N_CTX, n_threads=n_threads) as recorder:
        temperatures = itertools.cycle(TEMPERATURES)
        for seed, turns in enumerate(read_prompts(PROMPTS)):
            if is_over():
                break
            try:
                recordings += recorder.conversation(
                    turns[:1],
                    temperature=next(temperatures),
                    seed=seed,
                    max_tokens=MAX_TOKENS,
                    source=PROMPTS.stem,
                )
            except ModelError as error:  # no chat template
                return f"not calibrated: {error}"
        if len(recordings) < MIN_RECORDINGS:
            return TOO_LATE
        n_slots = recorder.n_draft
    try:
        model = fit(recordings, n_slots=n_slots)
        others, judged = recordings[::2], recordings[1::2]
        fitted = judge(fit(others, n_slots=n_slots), judged, online=False)
    except ValueError as error:  # replies too short to decide anything
        return f"not calibrated: {error}"
    path = save_calibration(drafter, Calibration(model, typical_rows(model, recordings)))
    return Calibrated(path, judge_head(judged), fitted)


def measure(
    target: Path,
    drafter: Path,
    *,
    n_threads: int,
    cache: Path,
    n_prompts: int,
    is_over: Callable[[], bool],
) -> list[SetSpeed]:
    """All modes on the package's own prompts, one prompt of each set in turn.

    The engines run in turn on each prompt; the weights are shared by memory map. is_over: asked in
    front of each loading and each reply; a prompt counts once all modes have answered it.
    """
    with ExitStack() as opened:
        engines: list[Engine] = []
        for mode, has_drafter in MODES:
            if is_over():
                return []
            engine = Engine(
                target,
                drafter=drafter if has_drafter else None if mode == "off" else "lookup",
                n_ctx=N_CTX,
                n_seq=1,
                n_threads=n_threads,
                speculation=mode,
                cost_cache=cache,
                limits=None,
            )
            opened.callback(engine.close)
            engines.append(engine)
        speeds = {name: SetSpeed(name) for name in OWN_SETS}
        prompts = [
            tokenize(engines[0], load_prompt_set(name, n_prompts), MAX_TOKENS) for name in speeds
        ]
        for turn in itertools.zip_longest(*prompts):
            for speed, prompt in zip(speeds.values(), turn, strict=True):
                if prompt is not None:
                    _run(engines, prompt, speed, is_over)
        return [speed for speed in speeds.values() if speed.n_prompts]


def _run(
    engines: Sequence[Engine],
    prompt: Sequence[int],
    speed: SetSpeed,
    is_over: Callable[[], bool],
) -> None:
    """Adds one prompt to a set's figures, if the time allows; engines: as MODES."""
    how = [SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)]
    runs: list[GroupRun] = []
    for engine in engines:
        if is_over():
            return
        runs.append(run_group(engine, [prompt], how))
    for mode, run in zip(speed.modes, runs, strict=True):
        mode.add(run.n_tokens, run.seconds)
    n = speed.n_prompts
    speed.full_tau = (n * speed.full_tau + runs[-1].stats[0].tau) / (n + 1)
    speed.n_prompts += 1
