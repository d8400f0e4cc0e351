"""The page about a finished drafter: Markdown, with a plain verdict.

Refuses to know how its numbers came about.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .evaluate import Acceptance
from .parity import Parity
from .settings import Shape
from .train import Point
from .trial import Trial

WORTH_IT = 1.03  # gain from which a drafter is worth its memory


@dataclass(slots=True, kw_only=True)
class Facts:
    """All that the page tells."""

    target_name: str
    target_hash: str
    drafter: Path
    shape: Shape
    kind: str
    n_sequences: int
    n_tokens: int
    n_draft: int
    covered: float
    n_anchors: int
    data_s: float
    trained_s: float
    curve: list[Point]
    acceptance: Acceptance
    parity: Parity
    trial: Trial


def verdict(trial: Trial) -> str:
    """One sentence."""
    gain = trial.gain
    if gain is None:
        return "Speed was not measured: too little time was left."
    if gain >= WORTH_IT:
        return f"Worth using here: {gain:.2f} times as fast as plain decoding."
    return (
        f"Not worth using here: {gain:.2f} times the speed of plain decoding. It may be on a "
        "machine or a target where a wider pass costs less, or after longer training."
    )


def markdown(facts: Facts) -> str:
    """The page."""
    parts = [
        f"# {facts.drafter.name}",
        f"A DSpark drafter for {facts.target_name}. {verdict(facts.trial)}",
        _facts(facts),
        "## Training\n" + _curve(facts.curve),
        "## Acceptance by position\n" + _acceptance(facts.acceptance),
        "## Calibration\n" + _calibration(facts.trial),
        "## Speed on held-out prompts, temperature 0\n" + _speed(facts.trial),
    ]
    parts += [f"Note: {notice}" for notice in facts.trial.notices]
    return "\n\n".join(parts) + "\n"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _facts(facts: Facts) -> str:
    shape, parity = facts.shape, facts.parity
    size = facts.drafter.stat().st_size / 1e6
    rows = [
        ["file", f"{size:.1f} MB, {facts.kind}, norms f32"],
        ["block_size", str(shape.block_size)],
        [
            "backbone",
            f"{shape.n_layer} layers, {shape.n_head} heads, {shape.n_head_kv} KV heads of "
            f"{shape.head_dim}, feed-forward {shape.n_ff}",
        ],
        ["reads", "inputs of target layers " + ", ".join(map(str, shape.taps))],
        ["Markov rank", str(shape.rank)],
        ["draft vocabulary", f"{facts.n_draft} tokens, {100 * facts.covered:.1f} % of the text"],
        [
            "data",
            f"{facts.n_tokens} reply tokens in {facts.n_sequences} replies, drawn from the target "
            f"in {facts.data_s / 60:.1f} minutes",
        ],
        ["training", f"{facts.n_anchors} anchors in {facts.trained_s / 60:.1f} minutes"],
        [
            "PyTorch against llama.cpp",
            f"{parity.n_blocks} blocks, same tokens; largest difference {parity.lead_error:.4f} "
            f"logits, {parity.confidence_error:.4f} in confidence; {parity.n_ties} ties",
        ],
        ["target", facts.target_hash],
    ]
    return _table(["fact", "value"], rows)


def _curve(curve: list[Point]) -> str:
    rows = [
        [
            f"{point.seconds / 60:.1f}",
            str(point.n_anchors),
            f"{point.cross_entropy:.3f}",
            f"{point.total_variation:.3f}",
            f"{point.confidence:.3f}",
            f"{point.greedy_tau:.3f}",
            f"{point.sampled_tau:.3f}",
        ]
        for point in curve
    ]
    head = ["minutes", "anchors", "cross-entropy", "total variation", "confidence"]
    return _table([*head, "tau, greedy", "tau, sampling bound"], rows)


def _acceptance(acceptance: Acceptance) -> str:
    rows = [
        [str(slot), f"{greedy:.3f}", f"{sampled:.3f}"]
        for slot, (greedy, sampled) in enumerate(
            zip(acceptance.greedy, acceptance.sampled, strict=True), start=1
        )
    ]
    rows.append(["tau", f"{acceptance.greedy_tau:.3f}", f"{acceptance.sampled_tau:.3f}"])
    head = f"Over {acceptance.n_anchors} anchors of held-out replies, given that all before were.\n"
    return head + "\n" + _table(["position", "greedy", "sampling bound"], rows)


def _calibration(trial: Trial) -> str:
    if trial.calibrated is None:
        return "None; the runtime learns while it runs."
    fit = trial.calibrated
    return (
        f"{fit.path.name}: {100 * fit.ece:.1f} % expected calibration error of survival on the "
        f"{fit.n} outcomes that it was fit to."
    )


def _speed(trial: Trial) -> str:
    if not trial.sets:
        return "Not measured."
    rows = [
        [
            each.name,
            str(each.n_prompts),
            f"{each.n_tokens / each.plain_s:.1f}",
            f"{each.gain:.2f}",
            f"{each.full_tau:.2f}",
        ]
        for each in trial.sets
    ]
    head = ["prompts", "how many", "plain, tokens/s", 'speculation="auto", times plain']
    return _table([*head, "tau, always whole blocks"], rows)
