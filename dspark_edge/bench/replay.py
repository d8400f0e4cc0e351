"""bench replay: recorded texts run again under any cost table and any policy, exactly.

This is how machines that we don't have are planned for. Owns: the simulated clock, the report.
Refuses to know: models; what policies do is in policies.py and oracles.py.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..calibration import Calibration, calibration_of
from ..confidence import SurvivalModel
from ..trace import read_trace
from .costs import NamedCost, load_cost, shipped_costs
from .oracles import PLAIN, BestPath, Oracle
from .policies import (
    Algorithm1,
    Choice,
    Fixed,
    Offer,
    Ours,
    Policy,
    Threshold,
    Times,
    depth_of,
)
from .recorded import Text, texts_of
from .shared import Commands, progress, say

THRESHOLDS = (0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


@dataclass(slots=True)
class Outcome:
    """What one policy made of the texts. Times in seconds of the simulated clock."""

    n_tokens: int = 0
    n_rounds: int = 0
    n_drafted: int = 0  # rounds with a drafter pass
    n_turns: int = 0  # rounds, counted once per sequence in them
    n_verified: int = 0
    n_accepted: int = 0
    seconds: float = 0.0

    @property
    def tps(self) -> float:
        """Emitted tokens per second, over all sequences."""
        return self.n_tokens / self.seconds

    @property
    def tau(self) -> float:
        """Tokens gained per round and sequence, bonus included."""
        return self.n_tokens / self.n_turns


@dataclass(slots=True)
class _Running:
    """A text on its way. sequence: its index among the texts; at: index of the next token."""

    sequence: int
    text: Text
    at: int = 0

    def offer(self) -> Offer:
        proposals = {p.proposer: p for p in self.text.proposals[self.at]}
        return Offer(self.sequence, self.text.start + self.at, proposals)


def simulate(texts: Sequence[Text], policy: Policy, times: Times, n_seq: int = 1) -> Outcome:
    """Run the texts, up to n_seq side by side, and count what the policy gains and pays."""
    outcome = Outcome()
    waiting = [_Running(i, text) for i, text in enumerate(texts)][::-1]
    running: list[_Running] = []
    while waiting or running:
        while waiting and len(running) < n_seq:
            running.append(waiting.pop())
        offers = [r.offer() for r in running]
        choice = policy.choose(offers, times)
        _account(outcome, offers, choice, times)
        for r, (proposal, verify_len) in zip(running, choice.verify, strict=True):
            n_accepted = min(verify_len, proposal.n_correct) if proposal else 0
            n_emitted = n_accepted + 1  # the bonus token
            outcome.n_accepted += n_accepted
            outcome.n_tokens += n_emitted
            emitted = r.text.tokens[r.at : r.at + n_emitted]
            policy.learn(r.sequence, r.text.start + r.at, emitted)
            r.at += n_emitted
            if r.at == len(r.text.tokens):
                policy.finish(r.sequence)
        running = [r for r in running if r.at < len(r.text.tokens)]
    return outcome


def _account(outcome: Outcome, offers: Sequence[Offer], choice: Choice, times: Times) -> None:
    n_verified = sum(verify_len for _, verify_len in choice.verify)
    outcome.seconds += choice.extra_s
    outcome.seconds += times.round_s(len(offers) + n_verified, depth_of(offers), choice.drafted)
    outcome.n_rounds += 1
    outcome.n_turns += len(offers)
    outcome.n_drafted += choice.drafted > 0
    outcome.n_verified += n_verified


# ---------------------------------------------------------------- all policies


def compare(
    texts: Sequence[Text],
    cost: NamedCost,
    n_seq: int = 1,
    fit: Calibration | None = None,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Every policy on one cost table. `best` is the best policy in hindsight, oracles left out.

    fit: an offline calibration to start from; None: start untaught. advance: called n_policies
    times.
    """
    times = Times(cost.table)
    n_slots = _n_slots(texts)

    def model() -> SurvivalModel:
        longest = max(n_slots.values())
        if fit is None:
            return SurvivalModel(longest)
        return SurvivalModel.from_json(fit.survival.to_json(), n_slots=longest)

    def run(policy: Policy) -> Outcome:
        outcome = simulate(texts, policy, times, n_seq)
        advance()
        return outcome

    outcomes = {"plain": run(Fixed(PLAIN, 0))}
    for proposer, longest in n_slots.items():
        for k in range(1, longest + 1):
            outcomes[f"{proposer}, fixed {k}"] = run(Fixed(proposer, k))
        tried = {t: run(Threshold(proposer, t)) for t in THRESHOLDS}
        best = max(tried, key=lambda t: tried[t].tps)
        name = f"{proposer}, threshold {best:g} (best of {len(THRESHOLDS)})"
        outcomes[name] = tried[best]
        outcomes[f"{proposer}, algorithm 1"] = run(Algorithm1(proposer, model()))
    outcomes["ours"] = run(Ours(model(), times, fit.typical if fit else ()))
    oracles = {
        "oracle of lengths": run(Oracle(always_drafts=True)),
        "oracle": run(BestPath(texts, times) if n_seq == 1 else Oracle()),
    }
    return _comparison(cost, outcomes, oracles)


def n_policies(texts: Sequence[Text]) -> int:
    """How many policies `compare` simulates, the oracle included."""
    of_proposer = (longest + len(THRESHOLDS) + 1 for longest in _n_slots(texts).values())
    return sum(of_proposer) + 4  # plain, ours, two oracles


def _n_slots(texts: Sequence[Text]) -> dict[str, int]:
    """The longest block of each proposer that occurs, the drafter first."""
    longest: dict[str, int] = {}
    for text in texts:
        for proposals in text.proposals:
            for p in proposals:
                longest[p.proposer] = max(longest.get(p.proposer, 0), len(p.signals.tokens))
    return dict(sorted(longest.items()))


def _comparison(
    cost: NamedCost, outcomes: Mapping[str, Outcome], oracles: Mapping[str, Outcome]
) -> dict[str, Any]:
    plain, oracle = outcomes["plain"], oracles["oracle"]
    best = max(outcomes, key=lambda name: outcomes[name].tps)
    return {
        "cost": cost.name,
        "source": cost.source,
        "measured": cost.measured,
        "assumption": cost.assumption,
        "best": best,
        "ours_over_best": outcomes["ours"].tps / outcomes[best].tps,
        "ours_over_oracle": outcomes["ours"].tps / oracle.tps,
        "policies": {
            name: {
                "tps": outcome.tps,
                "over_plain": outcome.tps / plain.tps,
                "over_best": outcome.tps / outcomes[best].tps,
                "over_oracle": outcome.tps / oracle.tps,
                "tau": outcome.tau,
                "drafted": outcome.n_drafted / outcome.n_rounds,
                "verify_len": outcome.n_verified / outcome.n_turns,
                "acceptance": outcome.n_accepted / max(outcome.n_verified, 1),
            }
            for name, outcome in {**outcomes, **oracles}.items()
        },
    }


# ---------------------------------------------------------------- the command


def replay(args: argparse.Namespace) -> dict[str, Any]:
    """Every policy on the texts of all traces, under each cost table."""
    if args.sequences < 1:
        raise ValueError(f"--sequences is {args.sequences}; it must be at least 1")
    texts = [text for path in args.traces for text in texts_of(read_trace(path))]
    costs = [load_cost(name) for name in args.cost or shipped_costs()]
    fit = _calibration(args.calibration) if args.calibration else None
    n_tokens = sum(len(text.tokens) for text in texts)
    say(f"{len(texts)} texts, {n_tokens} tokens, {args.sequences} side by side")
    tables = []
    with progress(len(costs) * n_policies(texts), "bench replay") as advance:
        for cost in costs:
            tables.append(compare(texts, cost, args.sequences, fit, advance))
            _show(tables[-1])
    return {
        "traces": list(args.traces),
        "n_texts": len(texts),
        "n_tokens": n_tokens,
        "n_seq": args.sequences,
        "costs": tables,
    }


def _calibration(path: str) -> Calibration:
    """What bench calibrate wrote. Raises ValueError naming the file, OSError."""
    try:
        return calibration_of(json.loads(Path(path).read_text("utf-8")))
    except ValueError as error:
        raise ValueError(f"--calibration {path}: {error}") from error


COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("tps", "tok/s", "{:.1f}".format),
    ("over_plain", "/plain", "{:.3f}".format),
    ("over_best", "/best", "{:.3f}".format),
    ("over_oracle", "/oracle", "{:.3f}".format),
    ("tau", "tau", "{:.2f}".format),
    ("drafted", "drafted", "{:.0%}".format),
    ("verify_len", "verified", "{:.2f}".format),
    ("acceptance", "accepted", "{:.0%}".format),
)


def _show(table: Mapping[str, Any]) -> None:
    say(f"\n{table['cost']}: {table['source']}")
    if table["assumption"]:
        say(f"assumption: {table['assumption']}")
    width = max(map(len, table["policies"]))
    say(" " * width + "".join(f"{title:>10}" for _, title, _ in COLUMNS))
    for name, values in table["policies"].items():
        cells = "".join(f"{show(values[key]):>10}" for key, _, show in COLUMNS)
        say(f"{name:<{width}}{cells}" + ("  <- best" if name == table["best"] else ""))


def add_commands(commands: Commands) -> None:
    """Adds `replay`."""
    command = commands.add_parser("replay", help="run recorded texts under other costs, policies")
    command.set_defaults(run=replay)
    command.add_argument("traces", nargs="+", metavar="TRACE")
    command.add_argument(
        "--cost",
        action="append",
        metavar="COST",
        help="a JSON file or a shipped table's name; may be repeated; default: all shipped ones",
    )
    command.add_argument(
        "--calibration", metavar="FILE", help="a fit of bench calibrate to start from"
    )
    command.add_argument("--sequences", type=int, default=1, help="texts that run side by side")
