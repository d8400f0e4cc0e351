"""The offline fit of a drafter's survival model: from recorded blocks, kept beside the drafter.

Owns: the fit and its file. Refuses to know models and engines: it is given what they drafted and
what they emitted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import platformdirs

from .confidence import (
    PRIOR_PRECISION,
    SurvivalModel,
    prior,
    prior_precision,
)
from .files import fingerprint, write_atomically
from .ledger import DraftLedger, n_decided
from .signals import DRAFTED, FEATURES, DraftSignals, in_all_features

Array = npt.NDArray[np.float64]

NEWTON_STEPS = 50
GAIN_MIN = 1e-6  # nats that a step promises; rounding hides what is below
PRIOR_ROWS = 4.0  # weight of the prior, and ...
SHARED_ROWS = 20.0  # ... of the fit of all slots on each slot, in precision per weight
N_TYPICAL = 256
PRECISION_MAX = 100.0  # trust in a fit, however large: other texts differ


@dataclass(slots=True)
class Recording:
    """One emitted text with a block drafted at each of its positions.

    tokens [n]: the reply. drafts [n]: drafts[i] was made before tokens[i], for that position on.
    source: where the prompt came from. lookups [n], or none at all: what lookup proposed there.
    """

    temperature: float
    tokens: list[int]
    drafts: list[DraftSignals]
    source: str = ""
    lookups: list[DraftSignals] = field(default_factory=list)


@dataclass(slots=True)
class Decided:
    """A block and what the text said of it, as SurvivalModel.observe takes it."""

    signals: DraftSignals
    n_correct: int
    n_seen: int
    recording: Recording = field(repr=False)


@dataclass(slots=True)
class Replay:
    """Plays a recording in the order in which a request would have lived it.

    Each step gives the blocks as they were to be judged (with the acceptance known by then, and
    compared with each other by `model` where one is given), then those that the next token decides.
    """

    recording: Recording
    model: SurvivalModel | None = None

    def __iter__(self) -> Iterator[tuple[list[DraftSignals], list[Decided]]]:
        ledger = DraftLedger()
        last = len(self.recording.tokens) - 1
        for position, token in enumerate(self.recording.tokens):
            offered = self._offered(position, ledger)
            for signals in offered:
                ledger.record(position, signals)
            decided = ledger.resolve(position, [token])
            if position == last:
                decided += ledger.flush()
            yield offered, [Decided(*each, recording=self.recording) for each in decided]

    def _offered(self, position: int, ledger: DraftLedger) -> list[DraftSignals]:
        draft = ledger.known(self.recording.drafts[position])
        if not self.recording.lookups:
            return [draft]
        looked = ledger.known(self.recording.lookups[position])
        if self.model is None:
            return [draft, looked]
        return [self.model.against(draft, looked), self.model.against(looked, draft)]


def decided_blocks(
    recordings: Sequence[Recording], model: SurvivalModel | None = None
) -> list[Decided]:
    """All blocks of which the texts decide at least one token; model: as for Replay."""
    return [block for r in recordings for _, blocks in Replay(r, model) for block in blocks]


# ---------------------------------------------------------------- the fit


def fit(recordings: Sequence[Recording], *, n_slots: int) -> SurvivalModel:
    """The survival model that explains the recordings best: logistic regression for each slot.

    n_slots: longest draft in tokens; lookup's may be longer. Features that never occur keep the
    prior's weights. A slot leans on the fit of all slots, the more so the fewer blocks reached it.
    Raises ValueError when nothing is decided.
    """
    n_slots = max([n_slots, *(len(each.tokens) for r in recordings for each in r.lookups)])
    alone = decided_blocks(recordings)
    model = _fit(alone, n_slots)
    if any(r.lookups for r in recordings):
        # How each proposer is believed alone has to be known before the two can be compared.
        model = _fit([*alone, *decided_blocks(recordings, model)], n_slots)
    return model


def _fit(blocks: Sequence[Decided], n_slots: int) -> SurvivalModel:
    model = SurvivalModel(n_slots)
    x, right, slots = _rows(model, blocks)
    if len(x) == 0:
        raise ValueError("the recordings decide no draft token; record longer texts")
    shared = _newton(x, right, np.array(prior(0)), PRIOR_ROWS)
    seen = np.any(x != 0.0, axis=0)
    for slot in range(n_slots):
        own = slots == slot
        weights = _newton(x[own], right[own], shared, SHARED_ROWS)
        curvature = _precision(x[own], weights)
        curvature = np.clip(curvature, PRIOR_PRECISION, PRECISION_MAX)
        model.set_slot(
            slot,
            np.where(seen, weights, prior(slot)).tolist(),
            np.where(seen, curvature, prior_precision()).tolist(),
        )
    return model


def _rows(model: SurvivalModel, blocks: Sequence[Decided]) -> tuple[Array, Array, Array]:
    """Features [n, n_features], outcome [n] and slot [n] of each decided draft token."""
    features: list[tuple[float, ...]] = []
    right: list[bool] = []
    slots: list[int] = []
    for block in blocks:
        decided = range(n_decided(block.n_correct, block.n_seen))
        for slot, row in zip(decided, model.features(block.signals), strict=False):
            features.append(in_all_features(block.signals, row))
            right.append(slot < block.n_correct)
            slots.append(slot)
    x = np.array(features, dtype=np.float64).reshape(-1, len(FEATURES))
    return x, np.array(right, dtype=np.float64), np.array(slots)


def _newton(x: Array, right: Array, centre: Array, strength: float) -> Array:
    """Logistic regression whose weights are held to `centre` with `strength` (L2)."""

    def loss(weights: Array) -> float:
        logit = x @ weights
        misfit = np.logaddexp(0.0, logit).sum() - right @ logit
        return float(misfit + 0.5 * strength * ((weights - centre) ** 2).sum())

    weights: Array = centre.copy()
    for _ in range(NEWTON_STEPS):
        p = _sigmoid(x @ weights)
        gradient = x.T @ (p - right) + strength * (weights - centre)
        hessian = (x * (p * (1.0 - p))[:, None]).T @ x + strength * np.eye(len(centre))
        step: Array = np.linalg.solve(hessian, gradient)
        if gradient @ step < GAIN_MIN:
            break
        before = loss(weights)
        # From far away a whole step can overshoot; the direction is right, so less of it is not.
        while loss(weights - step) > before:
            step *= 0.5
        weights -= step
    return weights


def _precision(x: Array, weights: Array) -> Array:
    p = _sigmoid(x @ weights)
    return np.asarray(((p * (1.0 - p))[:, None] * x * x).sum(axis=0), dtype=np.float64)


def _sigmoid(logit: Array) -> Array:
    return np.asarray(1.0 / (1.0 + np.exp(-np.clip(logit, -30.0, 30.0))), dtype=np.float64)


# ---------------------------------------------------------------- its file


@dataclass(slots=True)
class Calibration:
    """An offline fit. typical: survival of blocks of its texts: what drafting usually promises."""

    survival: SurvivalModel
    typical: list[list[float]]


def typical_rows(model: SurvivalModel, recordings: Sequence[Recording]) -> list[list[float]]:
    """Survival of up to N_TYPICAL blocks of the drafter, evenly spread over the recordings."""
    blocks = [b for b in decided_blocks(recordings, model) if b.signals.kind == DRAFTED]
    n = min(N_TYPICAL, len(blocks))
    chosen = (blocks[i * len(blocks) // n] for i in range(n))
    return [[round(a, 4) for a in model.survival(block.signals)] for block in chosen]


def save_calibration(drafter: Path, calibration: Calibration) -> Path:
    """Keep the fit beside the drafter, or in the user's cache folder; returns where.

    Raises OSError when neither can be written.
    """
    key = fingerprint(drafter)
    rows = ",\n  ".join(json.dumps(row) for row in calibration.typical)
    survival = json.dumps(calibration.survival.to_json(), indent=1)
    text = f'{{"drafter": "{key}",\n"survival": {survival},\n"typical": [\n  {rows}\n]}}\n'
    for path in _places(drafter, key):
        if write_atomically(path, text):
            return path
    raise OSError(f"calibration of {drafter} can be written neither beside it nor into the cache")


def load_calibration(
    drafter: Path, *, n_slots: int | None = None, notices: list[str] | None = None
) -> Calibration | None:
    """The newest fit made for exactly this drafter, as the start of online learning.

    None when there is none or all are unreadable, corrupt or another drafter's, which is added to
    `notices`; never raises. n_slots: longest draft where that is not the fit's.
    """
    told: list[str] = []
    try:
        key = fingerprint(drafter)
    except OSError:
        return None
    # One in the cache is newer where a folder refused it that holds an older one.
    for path in sorted(_places(drafter, key), key=_written_s, reverse=True):
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(saved, dict) and saved.get("drafter") == key:
                return calibration_of(saved, n_slots=n_slots)
            told.append(f"{path} is not of this drafter")
        except FileNotFoundError:
            continue
        except (OSError, ValueError, RecursionError) as error:  # bad JSON, UTF-8 or weights
            told.append(f"{path} cannot be used ({error})")
    if notices is not None:
        notices += [
            f"calibration {each}; nothing is known beforehand, bench calibrate makes a new one"
            for each in told
        ]
    return None


def calibration_of(saved: object, *, n_slots: int | None = None) -> Calibration:
    """What save_calibration wrote, parsed. Raises ValueError when malformed."""
    if not isinstance(saved, dict):
        raise ValueError("calibration is not an object; calibrate anew")
    survival = SurvivalModel.from_json(saved.get("survival"), n_slots=n_slots)
    typical = saved.get("typical", [])
    if not isinstance(typical, list) or not all(map(_is_survival, typical)):
        raise ValueError("calibration's typical rows are not survival; calibrate anew")
    return Calibration(survival, typical)


def _is_survival(row: object) -> bool:
    """Whether a row is one of falling probabilities."""
    if not isinstance(row, list) or not all(type(a) in (int, float) for a in row):
        return False
    return all(0.0 <= b <= a for a, b in zip([1.0, *row], row, strict=False))


def _written_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _places(drafter: Path, key: str) -> tuple[Path, Path]:
    cache = Path(platformdirs.user_cache_dir("dspark_edge", appauthor=False))
    name = f"{drafter.stem}.calibration.json"
    return drafter.with_name(name), cache / f"{key[-16:]}-{name}"
