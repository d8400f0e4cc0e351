"""bench calibrate: fits a drafter's survival estimates to a target, and says how good they are.

Recording, fit and measures live elsewhere; this is the command, its tables and its plot.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..arguments import check_threads
from ..calibration import Calibration, Recording, fit, save_calibration, typical_rows
from ..confidence import SurvivalModel
from ..reliability import N_BINS, Judgement, judge, judge_head
from .block_recorder import Recorder, read_prompts
from .run_plot import check_plot
from .shared import Commands, progress, say

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PROMPTS = Path(__file__).parent.parent / "prompts" / "calibration.jsonl"
SAY_EVERY = 10  # prompts

Judgements = dict[str, Judgement]  # by estimator: head, fused, online


def calibrate(args: argparse.Namespace) -> dict[str, Any]:
    """Record, fit, write the fit, and judge it on the prompts of the fit and on held-out ones."""
    check_threads(args.threads)
    if args.max_tokens < 1:
        raise ValueError(f"--max-tokens is {args.max_tokens}; it must be at least 1")
    check_plot(args.plot)
    temperatures = _temperatures(args.temperature)
    prompts = read_prompts(args.prompts)
    holdout = {path.stem: read_prompts(path) for path in args.holdout}
    with Recorder(args.target, args.drafter, n_threads=args.threads) as recorder:

        def record(name: str, conversations: Sequence[Sequence[str]]) -> list[Recording]:
            return record_all(recorder, name, conversations, temperatures, args.max_tokens)

        fitted = record(args.prompts.stem, prompts)
        model = fit(fitted, n_slots=recorder.n_draft)
        calibration = Calibration(model, typical_rows(model, fitted))
        path = save_calibration(recorder.drafter, calibration)
        say(f"written to {path}")
        held_out = [r for name, texts in holdout.items() for r in record(name, texts)]
        report: dict[str, Any] = {
            "target": recorder.target_name,
            "drafter": recorder.drafter.name,
            "written": str(path),
            "n_bins": N_BINS,
            "max_tokens": args.max_tokens,
        }
    judgements = judge_groups(model, fitted, "fit")
    if held_out:
        judgements |= judge_groups(model, held_out, "held out")
    print_judgements(judgements)
    if args.plot is not None:
        plot(judgements["held out" if held_out else "fit"], args.plot)
        say(f"plotted to {args.plot}")
    report["judgements"] = {
        group: {name: judgement.to_json() for name, judgement in of_group.items()}
        for group, of_group in judgements.items()
    }
    return report


def record_all(
    recorder: Recorder,
    name: str,
    conversations: Sequence[Sequence[str]],
    temperatures: Sequence[float],
    max_tokens: int,
) -> list[Recording]:
    """Recordings of all conversations at all temperatures, said to come from `name`."""
    recordings: list[Recording] = []
    with progress(len(conversations) * len(temperatures), name) as advance:
        for seed, turns in enumerate(conversations):
            for temperature in temperatures:
                recordings += recorder.conversation(
                    turns, temperature=temperature, seed=seed, max_tokens=max_tokens, source=name
                )
                advance()
            if (seed + 1) % SAY_EVERY == 0 or seed + 1 == len(conversations):
                n_tokens = sum(len(r.tokens) for r in recordings)
                say(f"{name}: {seed + 1} of {len(conversations)} prompts, {n_tokens} blocks")
    return recordings


# ---------------------------------------------------------------- judgement


def judge_groups(
    model: SurvivalModel, recordings: Sequence[Recording], name: str
) -> dict[str, Judgements]:
    """Judgements of all recordings, of each source, and of each source at each temperature.

    In each group online learning starts again from the fit.
    """
    sources = list(dict.fromkeys(r.source for r in recordings))
    temperatures = sorted({r.temperature for r in recordings})
    groups: dict[str, list[Recording]] = {name: list(recordings)}
    for temperature in temperatures:
        groups[f"{name}, temperature {temperature:g}"] = [
            r for r in recordings if r.temperature == temperature
        ]
    for source in sources if len(sources) > 1 else []:
        own = [r for r in recordings if r.source == source]
        groups[f"{name}, {source}"] = own
        for temperature in temperatures:
            groups[f"{name}, {source}, temperature {temperature:g}"] = [
                r for r in own if r.temperature == temperature
            ]
    return {group: _judge_all(model, rows) for group, rows in groups.items() if _any_block(rows)}


def _any_block(recordings: Sequence[Recording]) -> bool:
    return any(draft.tokens for r in recordings for draft in r.drafts)


def _judge_all(model: SurvivalModel, recordings: Sequence[Recording]) -> Judgements:
    head = judge_head(recordings)
    learning = SurvivalModel.from_json(model.to_json())
    judged = {} if head is None else {"head": head}
    judged["fused"] = judge(model, recordings, online=False)
    judged["online"] = judge(learning, recordings, online=True)
    if any(looked.tokens for r in recordings for looked in r.lookups):
        judged["lookup"] = judge(model, recordings, online=False, of_lookup=True)
    return judged


def print_judgements(judgements: Mapping[str, Judgements]) -> None:
    """Calibration errors as a table, and the reliability table of the largest groups."""
    say(f"\nexpected calibration error of survival in percent, {N_BINS} bins of equal mass")
    say("chance: what exact estimates would show on so few outcomes, were they independent")
    for group, of_group in judgements.items():
        n = next(iter(of_group.values())).survival.n
        say(f"\n{group} ({n} outcomes)")
        say(f"  {'':8}{'all':>6}{'chance':>8}{'log loss':>10}  by position (chance)")
        for name, judgement in of_group.items():
            each = judgement.survival
            positions = "  ".join(
                f"{100 * r.ece:.2f} ({100 * r.ece_of_chance:.2f})" for r in judgement.by_position
            )
            say(
                f"  {name:8}{100 * each.ece:6.2f}{100 * each.ece_of_chance:8.2f}"
                f"{each.log_loss:10.4f}  {positions}"
            )
    for group in ("fit", "held out"):
        for name, judgement in judgements.get(group, {}).items():
            say(f"\nreliability, {group}, {name}: mean estimate -> share that survived")
            table = judgement.survival.table
            say("  " + "  ".join(f"{mean:.3f} -> {share:.3f}" for mean, share, _ in table))


# ---------------------------------------------------------------- the plot


def plot(judgements: Judgements, path: Path) -> None:
    """Draw reliability diagrams into a file whose ending says the format. Raises OSError."""
    draw(judgements).savefig(path, dpi=150)


def draw(judgements: Judgements) -> Figure:
    """Reliability diagrams: all positions together, then each."""
    from matplotlib.figure import Figure

    n_positions = len(next(iter(judgements.values())).by_position)
    figure = Figure(figsize=(3.2 * (1 + n_positions), 3.6), layout="tight")
    axes = figure.subplots(1, 1 + n_positions)
    for index, axis in enumerate(axes):
        axis.plot([0, 1], [0, 1], color="0.7", linewidth=1)
        for name, judgement in judgements.items():
            each = judgement.by_position[index - 1] if index else judgement.survival
            means, shares, _ = zip(*each.table, strict=True)
            axis.plot(means, shares, marker="o", label=f"{name}: {100 * each.ece:.1f} %")
        axis.set(title=f"position {index}" if index else "survival, all positions")
        axis.set(xlabel="estimate", xlim=(0, 1), ylim=(0, 1), aspect="equal")
        axis.legend(title="calibration error", fontsize=7, title_fontsize=7)
    axes[0].set_ylabel("share that survived")
    return figure


# ---------------------------------------------------------------- the command


def _temperatures(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"--temperature is {text!r}; give numbers such as 0,0.7,1.0") from error


def add_commands(commands: Commands) -> None:
    """Adds `calibrate`."""
    command = commands.add_parser("calibrate", help="fit a drafter's survival estimates")
    command.set_defaults(run=calibrate)
    command.add_argument("--target", default="default")
    command.add_argument("--drafter", default="auto")
    command.add_argument("--prompts", type=Path, default=PROMPTS, help="JSON lines to fit on")
    command.add_argument("--holdout", type=Path, action="append", default=[], metavar="FILE")
    command.add_argument("--max-tokens", type=int, default=96, help="of each reply")
    command.add_argument("--temperature", default="0,0.7,1.0")
    command.add_argument("--threads", type=int, default=None)
    command.add_argument("--plot", type=Path, default=None, metavar="PNG")
