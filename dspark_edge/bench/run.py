"""bench run: how fast each mode decodes the same prompts, and whether the text stays the same.

The command, and who runs when. Running, checks, figures, table and plot live elsewhere.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..others import Others
from .busy import busy_reason
from .energy import EnergyMeter, find_meter
from .machine import describe_machine
from .measure import draw_lead, run_group
from .modes import Opened, open_mode
from .output import check_place
from .prompt_sets import in_groups, tokenize
from .ratios import Runs, check_ratio, named_ratios, rows
from .run_memory import add_memory, peaks
from .run_plan import Plan, add_options, make_plan
from .run_plot import check_plot, plot
from .run_table import print_table
from .same_text import TIE_HELP, TextCheck
from .shared import Commands, progress, say
from .summary import Key

WARM_UP_TOKENS = 32
Prompts = Mapping[str, Sequence[Sequence[int]]]  # token ids of each prompt, by set


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all modes in turn, and report; `is_failed` when a text differed beyond a tie."""
    plan = make_plan(args)
    pair = check_ratio(args.ratio_of, plan.modes)
    check_place("--json", args.json)
    check_plot(args.plot)
    bench = Bench(plan, find_meter(), TextCheck(args.tie))
    try:
        with progress(plan.n_runs, "bench run") as advance:
            for n_seq in plan.sequences:
                bench.measure(n_seq, advance)
    finally:
        bench.close()
    report = bench.report()
    report["ratios"] = named_ratios(bench.runs, [s.name for s in plan.sets], plan.modes, pair)
    add_memory(report, {} if args.no_memory else peaks(plan, args))
    print_table(report)
    return report


class Bench:
    """Engines of all modes, run in turn; keeps what they gave."""

    def __init__(self, plan: Plan, meter: EnergyMeter | None, check: TextCheck) -> None:
        self.runs: Runs = {}
        self._check = check
        self._plan = plan
        self._meter = meter
        self._names: dict[str, str] = {"target": "", "drafter": "none"}
        self._notices: dict[str, None] = {}  # in order, each once
        self._cost: dict[str, object] | None = None
        self._states: dict[tuple[str, int], str] = {}  # by mode and number of sequences
        self._others = Others()
        self._start_s = time.monotonic()

    def measure(self, n_seq: int, advance: Callable[[], None]) -> None:
        """All repeats with n_seq sequences; the modes take turns at each group of prompts."""
        plan = self._plan
        repeats = plan.repeat_numbers(self._start_s)
        with self._engines(n_seq) as opened:
            tokens = {s.name: tokenize(opened[0].engine, s, plan.max_tokens) for s in plan.sets}
            self._warm_up(opened, tokens, n_seq)
            for _ in () if plan.is_fresh else repeats:
                self._repeat(opened, tokens, n_seq, advance)
        for _ in repeats if plan.is_fresh else ():
            with self._engines(n_seq) as opened:
                self._repeat(opened, tokens, n_seq, advance)

    @contextlib.contextmanager
    def _engines(self, n_seq: int) -> Iterator[list[Opened]]:
        with contextlib.ExitStack() as stack:
            opened = []
            for mode in self._plan.modes:
                each = open_mode(mode, self._plan.setup, n_seq)
                opened.append(each)
                stack.enter_context(each.engine)
                self._note(each)
            yield opened
            for each in opened:
                self._states[each.mode.name, n_seq] = each.engine.speculation_state
                if each.mode.name == "auto":
                    self._cost = each.cost

    def _note(self, opened: Opened) -> None:
        self._names["target"] = opened.engine.target_name
        if opened.mode.speculation != "off" and not opened.mode.looks_up:
            self._names["drafter"] = opened.engine.drafter_name
        for notice in opened.engine.notices:
            if notice not in self._notices:
                self._notices[notice] = None
                say(f"{opened.mode.name}: {notice}")

    def _warm_up(self, opened: Sequence[Opened], tokens: Prompts, n_seq: int) -> None:
        n_tokens = min(WARM_UP_TOKENS, self._plan.max_tokens)
        prompts = next(iter(tokens.values()))
        group = in_groups(len(prompts), n_seq)[0]
        for each in opened:
            params = [self._plan.params(i, n_tokens) for i in group]
            run_group(each.engine, [prompts[i] for i in group], params)

    def _repeat(
        self,
        opened: Sequence[Opened],
        tokens: Prompts,
        n_seq: int,
        advance: Callable[[], None],
    ) -> None:
        for prompts in self._plan.sets:
            for each in opened:
                self.runs.setdefault(Key(n_seq, prompts.name, each.mode.name), []).append([])
            for number, group in enumerate(in_groups(len(prompts.texts), n_seq)):
                for each in opened:
                    time.sleep(self._plan.cool_down_s)
                    key = Key(n_seq, prompts.name, each.mode.name)
                    ids = [tokens[prompts.name][i] for i in group]
                    params = [self._plan.params(i, self._plan.max_tokens) for i in group]
                    result = run_group(each.engine, ids, params, self._meter)
                    self.runs[key][-1].append(result)
                    if not result.rounds:
                        self._say_unclocked(key)
                    for index, reply in enumerate(result.replies):
                        place, prompt = number * n_seq + index, group[index]
                        lead = partial(draw_lead, opened[0].engine, ids[index], params[index])
                        found = self._check.check(key, place, prompt, reply, lead)
                        if found is not None:
                            say(str(found))
                    advance()

    def _say_unclocked(self, key: Key) -> None:
        notice = (
            f"{key.prompts}, {key.sequences} sequences, {key.mode}: a reply ended before all had "
            f"begun, so no speed was clocked; raise --max-tokens from {self._plan.max_tokens}"
        )
        if notice not in self._notices:
            self._notices[notice] = None
            say(notice)

    def report(self) -> dict[str, Any]:
        """Everything but memory and named ratios."""
        plan = self._plan
        differences = self._check.differences
        lines = rows(self.runs, [s.name for s in plan.sets])
        for line in lines:
            line["speculation"] = self._states[line["mode"], line["sequences"]]
        plain = [line["decode_tps_by_repeat"] for line in lines if line["mode"] == "plain"]
        return self._names | {
            "machine": describe_machine(),
            "energy_source": None if self._meter is None else self._meter.source,
            "prompts": {s.name: len(s.texts) for s in plan.sets},
            "settings": plan.settings | {"ignore_eos": plan.ignore_eos, "fresh": plan.is_fresh},
            "notices": list(self._notices),
            "busy": busy_reason(self._others.share(), plain),
            "same_text": not differences,
            "is_failed": not all(each.is_tie for each in differences),
            "differences": [each.to_json() for each in differences],
            "cost": self._cost,
            "modes": lines,
        }

    def close(self) -> None:
        """Ends the meter."""
        if self._meter is not None:
            self._meter.close()


# ---------------------------------------------------------------- the command


def add_commands(commands: Commands) -> None:
    """Adds `run`."""
    command = commands.add_parser("run", help="speed of each mode, measured in turn")
    command.set_defaults(run=run, draw=plot)
    add_options(command)
    add = command.add_argument
    add("--tie", type=float, help=TIE_HELP)
    add("--no-memory", action="store_true", help="no processes for peak memory")
    add("--ratio-of", metavar="A/B", help="e.g. auto/best-fixed")
    add("--json", type=Path, default=None, metavar="FILE")
    add("--plot", type=Path, default=None, metavar="FILE")
