"""bench explain: a trace as a table and a plot: what was decided, why, and what came of it.

Refuses to know: models, and costs beyond what the trace holds. Only --plot imports matplotlib.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from ..chat.screen import Screen
from ..trace import Trace, TraceBlock, TraceRound, read_trace
from .run_plot import check_plot
from .shared import Commands, say

ALTERNATIVES = ("nothing verified", "best without drafter", "best with drafter")
ACCEPTED_STYLE, REJECTED_STYLE = "green", "red"
MAX_SHOWN = 40  # state changes and events in the table; the report has them all

Offer: TypeAlias = "tuple[float, float]"  # tokens, seconds


def explain(args: argparse.Namespace) -> dict[str, Any]:
    """A readable table of one run, and a plot of it."""
    check_plot(Path(args.plot) if args.plot else None)
    trace = read_trace(args.trace)
    if not trace.rounds:
        raise ValueError(f"{args.trace} holds no rounds; record a longer run")
    report = summary(trace)
    _show(report)
    if args.plot:
        from .explain_plot import plot  # matplotlib is an extra

        plot(trace, Path(args.plot))
        say(f"\nplot: {args.plot}")
        report["plot"] = args.plot
    return report


def summary(trace: Trace) -> dict[str, Any]:
    """What the table shows, as one JSON object. Times in seconds."""
    rounds = trace.rounds
    turns = [sequence for line in rounds for sequence in line.sequences]
    n_tokens = sum(len(turn.emitted) for turn in turns)
    seconds = sum(line.measured_s for line in rounds)
    return {
        "target": trace.header.target,
        "drafter": trace.header.drafter,
        "mode": trace.header.mode,
        "n_rounds": len(rounds),
        "n_requests": len({turn.request for turn in turns}),
        "n_tokens": n_tokens,
        "round_s": seconds,
        "tps": n_tokens / seconds if seconds else 0.0,
        "tau": n_tokens / max(len(turns), 1),
        "time_shares": {
            name: sum(getattr(line, name) for line in rounds) / seconds if seconds else 0.0
            for name in ("draft_s", "verify_s", "own_s")
        },
        "states": state_changes(rounds),
        "block_use": block_use(rounds),
        "acceptance_by_position": acceptance_by_position(rounds),
        "alternatives": alternatives(rounds),
        "prediction": prediction(rounds),
        "events": [{"t_s": e.t_s, "event": e.event, "text": e.text} for e in trace.events],
    }


def state_changes(rounds: Sequence[TraceRound]) -> list[dict[str, Any]]:
    """Each stretch of rounds in one state; the reason is the one given when it began.

    A state is what comes before the colon: the numbers after it change every round.
    """
    changes: list[dict[str, Any]] = []
    for line in rounds:
        state, _, reason = line.state.partition(":")
        if not changes or changes[-1]["state"] != state:
            changes.append(
                {
                    "round": line.round,
                    "t_s": line.t_s,
                    "state": state,
                    "reason": reason.strip(),
                    "n_rounds": 0,
                    "n_tokens": 0,
                }
            )
        changes[-1]["n_rounds"] += 1
        changes[-1]["n_tokens"] += sum(len(s.emitted) for s in line.sequences)
    return changes


def block_use(rounds: Sequence[TraceRound]) -> list[dict[str, Any]]:
    """By proposer and verify_len: how often, and how many of its tokens were accepted on average.

    A round counts once per sequence; proposer None is the anchor alone.
    """
    accepted: dict[tuple[str, int], list[int]] = {}
    for line in rounds:
        for s in line.sequences:
            name = s.proposer if s.verify_len and s.proposer else ""
            accepted.setdefault((name, s.verify_len), []).append(s.n_accepted)
    return [
        {
            "proposer": name or None,
            "verify_len": verify_len,
            "n_rounds": len(values),
            "n_accepted": statistics.fmean(values),
        }
        for (name, verify_len), values in sorted(accepted.items())
    ]


def acceptance_by_position(rounds: Sequence[TraceRound]) -> dict[str, list[tuple[int, int]]]:
    """(n_right, n_seen) of each draft position, given that the positions before were right.

    All proposals count, verified or not: the text decides them. By proposer.
    """
    text: dict[tuple[int, int], int] = {}
    for line in rounds:
        for s in line.sequences:
            text.update({(s.request, s.position + i): t for i, t in enumerate(s.emitted)})
    counts: dict[str, list[tuple[int, int]]] = {}
    for line in rounds:
        for s in line.sequences:
            for block in s.blocks:
                ahead = [text.get((s.request, s.position + k)) for k in range(len(block.tokens))]
                _count(counts.setdefault(block.proposer, []), block, ahead)
    return counts


def _count(counts: list[tuple[int, int]], block: TraceBlock, ahead: Sequence[int | None]) -> None:
    for k, (drafted, emitted) in enumerate(zip(block.tokens, ahead, strict=True)):
        if emitted is None:
            return  # the text ends here, which says nothing about the draft
        if k == len(counts):
            counts.append((0, 0))
        n_right, n_seen = counts[k]
        counts[k] = n_right + (drafted == emitted), n_seen + 1
        if drafted != emitted:
            return


def alternatives(rounds: Sequence[TraceRound]) -> list[dict[str, Any]]:
    """How often each way to run a round was weighed and was the best, and tokens/s it promised.

    Of the rounds in which it was the best also what they gave, in whichever way they ran. Promises
    leave the time of draws out. Of equal ones the first is the best. Empty: none was weighed.
    """
    offered: dict[int, list[Offer]] = {}
    best: dict[int, list[tuple[Offer, Offer]]] = {}  # promised, given
    for line in rounds:
        offers = [(tokens, seconds) for _, tokens, seconds in line.alternatives]
        if not offers or not all(seconds > 0.0 for _, seconds in offers):
            continue
        for way, offer in enumerate(offers):
            offered.setdefault(way, []).append(offer)
        way = max(range(len(offers)), key=lambda w: offers[w][0] / offers[w][1])
        given = float(sum(len(s.emitted) for s in line.sequences)), line.measured_s
        best.setdefault(way, []).append((offers[way], given))
    return [
        {
            "name": name,
            "n_rounds": len(offered[way]),
            "n_best": len(best.get(way, [])),
            "promised_tps": _tps(offered[way]),
            "promised_tps_when_best": _tps([promised for promised, _ in best.get(way, [])]),
            "given_tps_when_best": _tps([given for _, given in best.get(way, [])]),
        }
        for way, name in enumerate(ALTERNATIVES)
        if way in offered
    ]


def _tps(offers: Sequence[Offer]) -> float | None:
    """Tokens per second over all of them; None: they took no time."""
    seconds = sum(seconds for _, seconds in offers)
    return sum(tokens for tokens, _ in offers) / seconds if seconds else None


def prediction(rounds: Sequence[TraceRound]) -> dict[str, Any] | None:
    """Predicted against measured round time: median error, overall and by batch_tokens."""
    errors: dict[int, list[tuple[float, float]]] = {}
    for line in rounds:
        if line.predicted_s is not None and line.measured_s > 0.0:
            pair = (line.predicted_s, line.measured_s)
            errors.setdefault(line.batch_tokens, []).append(pair)
    if not errors:
        return None
    everything = [pair for pairs in errors.values() for pair in pairs]
    return {
        "n_rounds": len(everything),
        "median_error": _median_error(everything),
        "by_batch_tokens": {
            str(b): {
                "n_rounds": len(pairs),
                "predicted_s": statistics.median(p for p, _ in pairs),
                "measured_s": statistics.median(m for _, m in pairs),
                "median_error": _median_error(pairs),
            }
            for b, pairs in sorted(errors.items())
        },
    }


def _median_error(pairs: Sequence[tuple[float, float]]) -> float:
    """Of |predicted - measured| / measured."""
    return statistics.median(abs(p - m) / m for p, m in pairs)


# ---------------------------------------------------------------- the table


def _show(report: dict[str, Any]) -> None:
    say(f"{report['target']} with {report['drafter']}, speculation {report['mode']}")
    say(
        f"{report['n_requests']} requests, {report['n_rounds']} rounds, {report['n_tokens']} tokens"
        f", {report['tps']:.1f} tokens/s, tau {report['tau']:.2f}"
    )
    shares = report["time_shares"]
    say(
        f"time: draft {shares['draft_s']:.0%}, verify {shares['verify_s']:.0%}, "
        f"own {shares['own_s']:.0%}"
    )
    _show_states(report["states"])
    _show_events(report["events"])
    _show_block_use(report["block_use"])
    say("\naccepted by position, when those before were right")
    for name, counts in report["acceptance_by_position"].items():
        cells = "  ".join(f"{right / seen:.0%} of {seen}" for right, seen in counts)
        say(f"{name:<9}{cells}")
    _show_alternatives(report["alternatives"])
    _show_prediction(report["prediction"])


def _show_block_use(uses: Sequence[dict[str, Any]]) -> None:
    screen = Screen()
    say("\nblock use    verify_len   rounds   accepted   rejected")
    for use in uses:
        name, n_accepted = use["proposer"] or "anchor alone", use["n_accepted"]
        screen.pieces(
            [
                (f"{name:<12}{use['verify_len']:>11}{use['n_rounds']:>9}", ""),
                (f"{n_accepted:>11.2f}", ACCEPTED_STYLE),
                (f"{use['verify_len'] - n_accepted:>11.2f}", REJECTED_STYLE),
            ]
        )


def _show_alternatives(alternatives: Sequence[dict[str, Any]]) -> None:
    if not alternatives:
        return
    say("\n                                 promised   where it was best, tokens/s")
    say("way to run a round     rounds    tokens/s     rounds  promised   given")
    for way in alternatives:
        cells = (way["promised_tps"], way["promised_tps_when_best"], way["given_tps_when_best"])
        tps, promised, given = ("-" if cell is None else f"{cell:.1f}" for cell in cells)
        say(
            f"{way['name']:<20}{way['n_rounds']:>9}{tps:>12}"
            f"{way['n_best']:>11}{promised:>10}{given:>8}"
        )


def _show_states(states: Sequence[dict[str, Any]]) -> None:
    n_rounds = Counter[str]()
    for s in states:
        n_rounds[s["state"]] += s["n_rounds"]
    say("\nstates: " + ", ".join(f"{name} {n} rounds" for name, n in n_rounds.most_common()))
    say("   at s    round   lasted   state")
    for s in states[:MAX_SHOWN]:
        reason = f": {s['reason']}" if s["reason"] else ""
        say(f"{s['t_s']:>7.2f}{s['round']:>9}{s['n_rounds']:>9}   {s['state']}{reason}")
    if len(states) > MAX_SHOWN:
        say(f"        and {len(states) - MAX_SHOWN} more changes, in the JSON report")


def _show_events(events: Sequence[dict[str, Any]]) -> None:
    if events:
        say("\nevents")
    for e in events[:MAX_SHOWN]:
        say(f"{e['t_s']:>7.2f}   {e['event']}: {e['text']}")
    if len(events) > MAX_SHOWN:
        say(f"        and {len(events) - MAX_SHOWN} more, in the JSON report")


def _show_prediction(prediction: dict[str, Any] | None) -> None:
    if prediction is None:
        say("\nround time: no predictions in this trace")
        return
    say(
        f"\nround time, predicted against measured: median error "
        f"{prediction['median_error']:.1%} of {prediction['n_rounds']} rounds"
    )
    say("batch_tokens   rounds   predicted ms   measured ms   median error")
    for b, row in prediction["by_batch_tokens"].items():
        say(
            f"{b:>12}{row['n_rounds']:>9}{1e3 * row['predicted_s']:>15.2f}"
            f"{1e3 * row['measured_s']:>14.2f}{row['median_error']:>15.1%}"
        )


def add_commands(commands: Commands) -> None:
    """Adds `explain`."""
    command = commands.add_parser("explain", help="a trace as a table and a plot")
    command.set_defaults(run=explain)
    command.add_argument("trace", metavar="TRACE")
    command.add_argument("--plot", metavar="FILE.png", help="needs dspark-edge[plot]")
