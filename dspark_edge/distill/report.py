"""The page about a finished drafter: Markdown and a picture beside it, with a plain verdict.

Refuses to know how its numbers came about.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from ..files import write_atomically
from ..lookup_cache import LookupTexts
from ..models.pairing import lookup_cache_path
from ..reliability import Reliability
from .chart import Panel, Series, svg
from .evaluate import Acceptance
from .outlook import Outlook, outlook
from .parity import Parity
from .settings import Shape
from .train import Point
from .trial import Trial, total

BY_HEART = 0.02  # of held-out tau that went lost again: the text is too little
WORTH_IT = 1.03  # gain over doing without it from which a drafter is worth its memory
MORE_DATA = (2, 4, 8)  # times the anchors that the outlook looks at


@dataclass(slots=True, kw_only=True)
class Facts:
    """All that the page tells."""

    target_name: str
    target_file: str
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
    looked_up: LookupTexts | str  # why there is none
    trial: Trial


def verdict(trial: Trial) -> str:
    """One sentence."""
    found = total(trial.sets)
    lookup = found.lookup.over(found.plain)
    if found.gain is None or lookup is None:
        return "Speed was not measured: too little time was left."
    if found.gain >= WORTH_IT * max(1.0, lookup):
        return (
            f"Worth using here: {found.gain:.2f} times as fast as plain decoding, where prompt "
            f"lookup without it is {lookup:.2f} times as fast."
        )
    return (
        f"Not worth using here: {found.gain:.2f} times the speed of plain decoding with it, "
        f"{lookup:.2f} times with prompt lookup alone. It may be on a machine or a target where a "
        "wider pass costs less, or after longer training."
    )


def write_report(facts: Facts) -> Path:
    """Page and picture beside the drafter; returns the page. Raises OSError."""
    page = facts.drafter.with_suffix(".md")
    for path, text in ((_picture(facts), picture(facts.curve)), (page, markdown(facts))):
        if not write_atomically(path, text):
            raise OSError(f"{path} cannot be written; the drafter itself is {facts.drafter}")
    return page


def picture(curve: list[Point]) -> str:
    """The training curve as SVG: losses, and held-out tau with where its line leads."""

    def series(name: str, of: str) -> Series:
        return Series(name=name, points=[(p.n_anchors, getattr(p, of)) for p in curve])

    tau = [series("greedy", "greedy_tau"), series("sampling bound", "sampled_tau")]
    if (found := outlook(curve)) is not None:
        tau.append(Series(name="extrapolated", points=_line(found), is_dashed=True))
    others = [series("total variation", "total_variation"), series("confidence", "confidence")]
    anchors = "anchors seen"
    return svg(
        [
            Panel(title="Cross-entropy", x_label=anchors, series=[series("", "cross_entropy")]),
            Panel(title="Other losses", x_label=anchors, series=others),
            Panel(title="Held-out tau", x_label=anchors, series=tau),
        ]
    )


def _line(found: Outlook) -> list[tuple[float, float]]:
    ends = (float(found.from_anchors), float(MORE_DATA[0] * found.n_anchors))
    return [(n_anchors, 1.0 + found.gained_at(n_anchors)[0]) for n_anchors in ends]


def _picture(facts: Facts) -> Path:
    return facts.drafter.with_suffix(".svg")


def markdown(facts: Facts) -> str:
    """The page."""
    parts = [
        f"# {facts.drafter.name}",
        f"A DSpark drafter for {facts.target_name}. {verdict(facts.trial)}",
        _facts(facts),
        f"## Training\n![the training curve]({quote(_picture(facts).name)})",
        _curve(facts.curve),
        "## What more data would bring\n" + _by_heart(facts) + _outlook(facts.curve),
        "## Acceptance by position\n" + _acceptance(facts.acceptance),
        "## Calibration\n" + _calibration(facts.trial),
        "## Speed on held-out prompts, temperature 0\n" + _speed(facts),
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
        [
            "training",
            f"{facts.n_anchors} anchors in {facts.trained_s / 60:.1f} minutes, "
            f"{facts.n_anchors / facts.n_tokens:.1f} for each reply token",
        ],
        [
            "PyTorch against llama.cpp",
            f"{parity.n_blocks} blocks, {_same_tokens(parity)}; largest difference "
            f"{parity.lead_error:.4f} logits, {parity.confidence_error:.4f} in confidence",
        ],
        ["lookup cache", _looked_up(facts)],
        ["target", facts.target_hash],
    ]
    return _table(["fact", "value"], rows)


def _looked_up(facts: Facts) -> str:
    found = facts.looked_up
    if isinstance(found, str):
        return found
    return (
        f"{lookup_cache_path(facts.drafter).name}: {len(found.tokens)} tokens in "
        f"{len(found.lengths)} of the replies, none of them held out; whoever has the file can "
        "read them, and the last words of their prompts"
    )


def _same_tokens(parity: Parity) -> str:
    if parity.n_ties == 0:
        return "same tokens"
    return f"same tokens but from {parity.n_ties} ties on"


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
    text = (
        "Losses are means since the line before. tau is a mean over all anchors of held-out "
        "replies, which were sampled at all temperatures, each slot given what was said before it: "
        "what rounds that begin at every token would gain. Real rounds begin where the one before "
        "ended, and gain less.\n\n"
    )
    return text + _table([*head, "tau, greedy", "tau, sampling bound"], rows)


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


def _by_heart(facts: Facts) -> str:
    best = max(facts.curve, key=lambda point: point.greedy_tau)
    now = facts.curve[-1]
    # The loss turns from the likeliest token to the whole distribution: one may fall for that.
    if best.greedy_tau - now.greedy_tau < BY_HEART or now.sampled_tau > best.sampled_tau:
        return ""
    return (
        f"Held-out tau was best, {best.greedy_tau:.3f}, after {best.n_anchors} anchors "
        f"({best.n_anchors / facts.n_tokens:.1f} for each reply token), and is "
        f"{now.greedy_tau:.3f} now, and its sampling bound has not risen since: the "
        "drafter learns its text by heart. More text would bring more, more training on this text "
        "would not.\n\n"
    )


def _outlook(curve: list[Point]) -> str:
    found = outlook(curve)
    if found is None:
        return "The curve has too few points to say."
    now = curve[-1].greedy_tau - 1.0
    rows = [["now, measured", f"{now:.3f}", ""]]
    for times in MORE_DATA:
        gained, error = found.gained_at(times * found.n_anchors)
        rows.append([f"{times} times the anchors", f"{gained:.3f}", f"{error:.3f}"])
    return (
        f"From {found.from_anchors} to {found.n_anchors} anchors, over {found.n_points} points, "
        f"each doubling gave {found.slope:.3f} (standard error {found.slope_error:.3f}) draft "
        "tokens more per round, the likeliest ones: least squares of tau - 1 against "
        "log2(anchors). Beyond that the line is an extrapolation, and rather too steep: while it "
        "was measured the learning rate fell too, which lifts tau by itself. The errors are those "
        "of the line; not in them is how well the few held-out replies stand for others.\n\n"
        + _table(["anchors", "tau - 1", "standard error"], rows)
    )


def _calibration(trial: Trial) -> str:
    if trial.calibrated is None:
        return "None; the runtime learns while it runs."
    found = trial.calibrated
    after = [found.fitted.survival, *found.fitted.by_position]
    before: list[Reliability | None] = [None] * len(after)
    if found.head is not None:
        before = [found.head.survival, *found.head.by_position]
    rows = [
        [
            "all" if slot == 0 else str(slot),
            str(fitted.n),
            "" if head is None else _percent(head.ece),
            _percent(fitted.ece),
            _percent(fitted.ece_of_chance),
        ]
        for slot, (head, fitted) in enumerate(zip(before, after, strict=True))
    ]
    head_row = ["position", "outcomes", "confidence head as trained", "calibrated", "chance"]
    return (
        f"{found.path.name}. Expected calibration error of survival in percent, on every second "
        "text, of a fit to the others; the file's own fit is to all of them. Chance is what exact "
        "estimates would show on so few outcomes, were they independent.\n\n"
        + _table(head_row, rows)
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _speed(facts: Facts) -> str:
    trial = facts.trial
    if not trial.sets:
        return "Not measured."
    speeds = [*trial.sets, total(trial.sets)] if len(trial.sets) > 1 else trial.sets
    rows = [
        [
            each.name,
            str(each.n_prompts),
            f"{each.plain.rate:.1f}",
            f"{each.lookup.rate:.1f}",
            f"{each.auto.rate:.1f}",
            "" if each.gain is None else f"{each.gain:.2f}",
            f"{each.full.rate:.1f}",
            f"{each.full_tau:.2f}",
        ]
        for each in speeds
    ]
    head = ["prompts", "how many", "plain", "lookup", "auto", "times plain"]
    text = f"On {facts.target_file}, in tokens per second. Lookup: without the drafter.\n\n"
    return text + _table([*head, "always whole blocks", "their tau"], rows)
