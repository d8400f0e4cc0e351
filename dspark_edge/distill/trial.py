"""The finished drafter on this machine: survival calibrated, speed measured against plain decoding.

Takes as many prompts as the time allows. Refuses to know training.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..bench.block_recorder import Recorder, read_prompts
from ..bench.measure import run_group
from ..bench.prompt_sets import OWN_SETS, load_prompt_set, tokenize
from ..calibration import Calibration, Recording, fit, save_calibration, typical_rows
from ..engine import Engine
from ..errors import ModelError
from ..reliability import judge
from ..sequence import SamplingParams
from ..speculation import Mode

PROMPTS = Path(__file__).parent.parent / "prompts" / "calibration.jsonl"
TEMPERATURES = (0.0, 0.7, 1.0)
MAX_TOKENS = 64
N_CTX = 1024
MIN_RECORDINGS = 6  # of a fit that is worth keeping


@dataclass(slots=True)
class Calibrated:
    """The fit's file; its calibration error of survival on its own texts, over n outcomes."""

    path: Path
    n: int
    ece: float


@dataclass(slots=True)
class SetSpeed:
    """One prompt set, both modes: tokens per second, and tokens per round of drafted rounds."""

    name: str
    n_prompts: int = 0
    n_tokens: int = 0
    plain_s: float = 0.0
    auto_s: float = 0.0
    full_tau: float = 0.0  # every round drafted, whole blocks

    @property
    def gain(self) -> float:
        """Of auto over plain; 1: none."""
        return self.plain_s / self.auto_s if self.auto_s > 0.0 else 1.0


@dataclass(slots=True)
class Trial:
    """What was found; calibrated None, or sets empty, where the time or a template was lacking."""

    calibrated: Calibrated | None = None
    sets: list[SetSpeed] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    @property
    def gain(self) -> float | None:
        """Over all sets, None where nothing was measured."""
        auto_s = sum(each.auto_s for each in self.sets)
        return sum(each.plain_s for each in self.sets) / auto_s if auto_s > 0.0 else None


def calibrate(
    target: Path, drafter: Path, *, n_threads: int, is_over: Callable[[], bool]
) -> Calibrated | str:
    """Fits and keeps the survival model; or says why not."""
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
            return "not calibrated: too little time was left; run dspark-edge bench calibrate"
        model = fit(recordings, n_slots=recorder.n_draft)
    path = save_calibration(drafter, Calibration(model, typical_rows(model, recordings)))
    survival = judge(model, recordings, online=False).survival
    return Calibrated(path, survival.n, survival.ece)


def measure(
    target: Path,
    drafter: Path,
    *,
    n_threads: int,
    cache: Path,
    n_prompts: int,
    is_over: Callable[[], bool],
) -> list[SetSpeed]:
    """Plain, auto and full blocks on the package's own prompts, one prompt of each set in turn.

    The engines run in turn on each prompt; the weights are shared by memory map.
    """

    def engine(mode: Mode) -> Engine:
        return Engine(
            target,
            drafter=None if mode == "off" else drafter,
            n_ctx=N_CTX,
            n_seq=1,
            n_threads=n_threads,
            speculation=mode,
            cost_cache=cache,
            limits=None,
        )

    engines = [engine("off"), engine("auto"), engine("always")]
    try:
        speeds = {name: SetSpeed(name) for name in OWN_SETS}
        prompts = [
            tokenize(engines[0], load_prompt_set(name, n_prompts), MAX_TOKENS) for name in speeds
        ]
        for turn in itertools.zip_longest(*prompts):
            for speed, prompt in zip(speeds.values(), turn, strict=True):
                if prompt is not None and not is_over():
                    _run(engines, prompt, speed)
        return [speed for speed in speeds.values() if speed.n_prompts]
    finally:
        for each in engines:
            each.close()


def _run(engines: Sequence[Engine], prompt: Sequence[int], speed: SetSpeed) -> None:
    """Adds one prompt to a set's figures; engines: plain, auto, always."""
    how = [SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)]
    plain, auto, full = (run_group(engine, [prompt], how) for engine in engines)
    n = speed.n_prompts
    speed.plain_s += plain.seconds
    speed.auto_s += auto.seconds
    speed.full_tau = (n * speed.full_tau + full.stats[0].tau) / (n + 1)
    speed.n_tokens += plain.n_tokens
    speed.n_prompts += 1
