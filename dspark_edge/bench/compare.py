"""bench compare: our modes against what people would use instead, on the same files and prompts.

The command, and who runs when: all take turns at each prompt, one request at a time. Speed is that
of decoding: tokens after the first over the seconds from the first to the last, by the program's
own clock where it tells one, else by the arrival of its pieces; each row says which.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..loading import default_threads
from ..others import Others
from .busy import busy_reason
from .compare_rows import rows_of
from .compare_table import print_comparison
from .machine import describe_machine
from .measure import draw_lead
from .modes import Opened, open_mode
from .our_mode import OurMode
from .output import check_place
from .program_choice import Openers, add_program_options, choose_programs
from .programs import Program, Question, as_run, ids_beside
from .prompt_sets import tokenize
from .ratios import Runs
from .run import WARM_UP_TOKENS
from .run_plan import Plan, add_common_options, make_plan
from .same_text import TIE_HELP, TextCheck
from .shared import Commands, progress, say
from .summary import Key

MODES = "plain,auto"
N_SEQ = 1  # requests side by side
Questions = Mapping[str, Sequence[Question]]  # by set


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all in turn, and report; `is_failed` when our own modes differ beyond a tie."""
    check_place("--json", args.json)
    plan = make_plan(args)
    # Said to all of them: each has a default of its own.
    plan.setup = replace(plan.setup, n_threads=plan.setup.n_threads or default_threads())
    openers = choose_programs(args, plan.setup)
    comparison = Comparison(plan, TextCheck(args.tie))
    comparison.measure(openers)
    report = comparison.report()
    print_comparison(report)
    return report


class Comparison:
    """Our modes and the other programs, run in turn; keeps what they gave."""

    def __init__(self, plan: Plan, check: TextCheck) -> None:
        self._plan = plan
        self._check = check
        self._runs: Runs = {}
        self._programs: list[Program] = []  # ours first
        self._names = {"target": "", "drafter": "none"}
        self._others_share: float | None = None  # of the processors
        self._start_s = time.monotonic()

    def measure(self, openers: Openers) -> None:
        """Opens all, warms them up, and runs all repeats; closes all whatever happens."""
        with contextlib.ExitStack() as stack:
            reference = self._open(stack)
            for name, opener in openers.items():
                say(f"starting {name}")
                self._programs.append(opener(partial(reference.engine.tokenize, add_special=False)))
                stack.callback(self._programs[-1].close)
            questions = self._questions(reference)
            others = Others()
            self._warm_up(next(iter(questions.values()))[0])
            n_questions = sum(len(of_set) for of_set in questions.values())
            n_turns = n_questions * self._plan.repeats * len(self._programs)
            with progress(n_turns, "bench compare") as advance:
                for _ in self._plan.repeat_numbers(self._start_s):
                    self._repeat(reference, questions, advance)
            # A server behind a URL may be on this machine: it would count as others.
            has_url = any("url" in program.about for program in self._programs)
            self._others_share = None if has_url else others.share()

    def _open(self, stack: contextlib.ExitStack) -> Opened:
        """Opens our modes; the first one is what all texts are compared with."""
        opened = []
        for mode in self._plan.modes:
            each = open_mode(mode, self._plan.setup, N_SEQ)
            opened.append(each)
            self._programs.append(OurMode(each))
            stack.callback(self._programs[-1].close)
            self._names["target"] = each.engine.target_name
            if mode.speculation != "off" and not mode.looks_up:
                self._names["drafter"] = each.engine.drafter_name
            for notice in each.engine.notices:
                say(f"{mode.name}: {notice}")
        return opened[0]

    def _questions(self, reference: Opened) -> Questions:
        return {
            s.name: [
                Question(text, token_ids)
                for text, token_ids in zip(
                    s.texts, tokenize(reference.engine, s, self._plan.max_tokens), strict=True
                )
            ]
            for s in self._plan.sets
        }

    def _warm_up(self, question: Question) -> None:
        params = self._plan.params(0, min(WARM_UP_TOKENS, self._plan.max_tokens))
        for program in self._programs:
            program.reply(question, params)

    def _repeat(self, reference: Opened, questions: Questions, advance: Callable[[], None]) -> None:
        for set_name, of_set in questions.items():
            for program in self._programs:
                self._runs.setdefault(Key(N_SEQ, set_name, program.name), []).append([])
            for number, question in enumerate(of_set):
                self._turn(reference, set_name, number, question, advance)

    def _turn(
        self,
        reference: Opened,
        set_name: str,
        number: int,
        question: Question,
        advance: Callable[[], None],
    ) -> None:
        """One question to all; number: its index in the set."""
        params = self._plan.params(number, self._plan.max_tokens)
        to_tokens = partial(reference.engine.tokenize, add_special=False)
        bytes_of = reference.loaded.decoder.token_bytes
        ours: list[int] = []
        for program in self._programs:
            time.sleep(self._plan.cool_down_s)
            reply = program.reply(question, params)
            ids = ids_beside(ours, reply, bytes_of, to_tokens)
            ours = ours or ids
            key = Key(N_SEQ, set_name, program.name)
            self._runs[key][-1].append(as_run(reply, ids))
            if self._is_comparable(program):
                lead = partial(draw_lead, reference.engine, question.token_ids, params)
                found = self._check.check(key, number, number, ids, lead)
                if found is not None:
                    say(str(found))
            advance()

    def _is_comparable(self, program: Program) -> bool:
        """Whether the text must be ours: sampled, each program's noise is its own."""
        return self._plan.temperature == 0.0 or isinstance(program, OurMode)

    def report(self) -> dict[str, Any]:
        """All figures."""
        plan = self._plan
        ours = [mode.name for mode in plan.modes]
        differences = self._check.differences
        of_ours = [each for each in differences if each.modes[1] in ours]
        comparable = [p.name for p in self._programs if self._is_comparable(p)]
        lines = rows_of(self._runs, [s.name for s in plan.sets], ours[-1], comparable, differences)
        clocks = {program.name: program.clock for program in self._programs}
        for line in lines:
            line["clock"] = clocks[line["mode"]]
        plain = [line["decode_tps_by_repeat"] for line in lines if line["mode"] == "plain"]
        return self._names | {
            "machine": describe_machine(),
            "programs": {program.name: program.about for program in self._programs},
            "prompts": {s.name: len(s.texts) for s in plan.sets},
            "settings": plan.settings,
            "busy": busy_reason(self._others_share, plain),
            "same_text": not of_ours,
            "is_failed": not all(each.is_tie for each in of_ours),
            "differences": [each.to_json() for each in differences],
            "modes": lines,
        }


def add_commands(commands: Commands) -> None:
    """Adds `compare`."""
    command = commands.add_parser("compare", help="ours against other programs, in turn")
    # What only `run` can vary: other programs answer one request at a time here.
    command.set_defaults(run=compare, sequences=str(N_SEQ), ignore_eos=False, fresh=False)
    add_common_options(command, MODES)
    add_program_options(command)
    add = command.add_argument
    add("--tie", type=float, help=TIE_HELP)
    add("--json", type=Path, default=None, metavar="FILE")
