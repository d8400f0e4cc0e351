"""bench server: our server with speculation and without, asked by 1, 2, 4, 8 clients at a time.

The command, and who runs when: the servers take turns, one batch of requests each. Processes,
clients, figures and the table live elsewhere.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from ..loading import default_threads
from ..others import Others
from ..speculation import Mode as Speculating
from .busy import busy_reason
from .machine import describe_machine
from .our_server import MAX_PARALLEL, OurServer, command_of
from .output import check_place
from .prompt_sets import in_groups
from .run import WARM_UP_TOKENS
from .run_plan import Plan, add_load_options, counts, make_plan
from .same_text import SHARED_TIE_LOGITS, TextCheck
from .server_clients import Batch, Body, run_batch
from .server_rows import PLAIN, Place, rows_of
from .server_table import print_servers
from .shared import Commands, progress, say
from .summary import Key

SERVERS: dict[str, Speculating] = {PLAIN: "off", "auto": "auto"}  # in the order of their turns
CLIENTS = "1,2,4,8"
REPEATS = 3

Opened: TypeAlias = list[OurServer]


def server(args: argparse.Namespace) -> dict[str, Any]:
    """Measure both servers in turn, and report; `is_failed` when texts differ beyond a tie."""
    clients = counts(args.clients, "--clients")
    if max(clients) > MAX_PARALLEL:
        raise ValueError(f"--clients has {max(clients)}; give at most {MAX_PARALLEL}")
    check_place("--json", args.json)
    plan = make_plan(args)
    plan.params(0, plan.max_tokens)  # refuses bad ones before anything starts
    plan.setup = replace(plan.setup, n_threads=plan.setup.n_threads or default_threads())
    bench = ServerBench(plan, clients, TextCheck(args.tie))
    bench.measure()
    report = bench.report()
    print_servers(report)
    return report


class ServerBench:
    """Both servers, asked in turn; keeps what they gave."""

    def __init__(self, plan: Plan, clients: list[int], check: TextCheck) -> None:
        self._plan = plan
        self._clients = clients
        self._check = check
        self._texts = [text for s in plan.sets for text in s.texts]
        self._batches: dict[Place, list[Batch]] = {}
        self._idle_s = dict.fromkeys(SERVERS, 0.0)  # processor time while the other one was asked
        self._waited_s = dict.fromkeys(SERVERS, 0.0)
        self._others_share = 0.0
        self._about: dict[str, dict[str, Any]] = {}

    def measure(self) -> None:
        """Starts both, warms them up, runs all repeats, and ends both whatever happens."""
        start_s = time.monotonic()
        with contextlib.ExitStack() as stack:
            servers = self._open(stack)
            others = Others()
            most = max(self._clients)
            for each in servers:
                run_batch(each.client, self._bodies(most, WARM_UP_TOKENS)[:most], most)
            n_batches = self._plan.repeats * len(self._clients) * len(servers)
            with progress(n_batches, "bench server") as advance:
                for _ in self._plan.repeat_numbers(start_s):
                    for n_clients in self._clients:
                        for each in servers:
                            self._turn(servers, each, n_clients)
                            advance()
            self._others_share = others.share()
            for each in servers:
                self._about[each.name] |= {"health": each.health()}

    def _open(self, stack: contextlib.ExitStack) -> Opened:
        """One after the other: loading times passes, which nothing may disturb."""
        servers = []
        for name, speculation in SERVERS.items():
            say(f"starting our server, speculation {speculation}")
            command = command_of(self._plan.setup, speculation, max(self._clients))
            each = OurServer(name, command, max(self._clients))
            stack.callback(each.close)
            servers.append(each)
            self._about[name] = {"command": command}
            for notice in each.health()["notices"]:
                say(f"{name}: {notice}")
        return servers

    def _bodies(self, n_clients: int, max_tokens: int) -> list[Body]:
        """Every prompt, and the first ones again until all clients have as many."""
        plan = self._plan
        return [
            {
                "messages": [{"role": "user", "content": self._texts[prompt]}],
                "max_tokens": min(max_tokens, plan.max_tokens),
                "temperature": plan.temperature,
                "seed": plan.seed + prompt,
            }
            for group in in_groups(len(self._texts), n_clients)
            for prompt in group
        ]

    def _turn(self, servers: Opened, asked: OurServer, n_clients: int) -> None:
        """One batch to one server."""
        bodies = self._bodies(n_clients, self._plan.max_tokens)
        idle = [each for each in servers if each is not asked]
        asked.forget()
        time.sleep(self._plan.cool_down_s)
        start, used = time.monotonic(), [each.cpu_s() for each in idle]
        batch = run_batch(asked.client, bodies, n_clients)
        for each, before in zip(idle, used, strict=True):
            self._idle_s[each.name] += each.cpu_s() - before
            self._waited_s[each.name] += time.monotonic() - start
        self._batches.setdefault(Place(n_clients, asked.name), []).append(batch)
        self._compare(servers[0], asked, n_clients, bodies, batch)

    def _compare(
        self, plain: OurServer, asked: OurServer, n_clients: int, bodies: list[Body], batch: Batch
    ) -> None:
        """Sets the texts against the first ones that the same requests got."""
        key = Key(n_clients, self._set_names, asked.name)
        for place, (body, answer) in enumerate(zip(bodies, batch.answers, strict=True)):
            lead = partial(plain.lead, body)
            prompt = place % len(self._texts)
            found = self._check.check(key, place, prompt, plain.tokenize(answer.text), lead)
            if found is not None:
                say(str(found))

    @property
    def _set_names(self) -> str:
        return "+".join(s.name for s in self._plan.sets)

    def report(self) -> dict[str, Any]:
        """All figures."""
        plan = self._plan
        lines = rows_of(self._batches, self._set_names)
        differences = self._check.differences
        health = self._about["auto"]["health"]
        plain = [line["total_tps_by_repeat"] for line in lines if line["mode"] == PLAIN]
        return {
            "target": health["target"],
            "drafter": health["drafter"] or "none",
            "machine": describe_machine(),
            "servers": self._about,
            "prompts": {s.name: len(s.texts) for s in plan.sets},
            "settings": {"clients": self._clients} | plan.settings,
            "idle_share": {
                name: self._idle_s[name] / max(self._waited_s[name], 1e-9) for name in SERVERS
            },
            "busy": busy_reason(self._others_share, plain),
            "same_text": not differences,
            "is_failed": not all(each.is_tie for each in differences),
            "differences": [each.to_json() for each in differences],
            "modes": lines,
        }


def add_commands(commands: Commands) -> None:
    """Adds `server`."""
    command = commands.add_parser("server", help="our server with many clients, against plain")
    # Of a plan, what only modes within one process can vary.
    command.set_defaults(run=server, modes="plain,auto", sequences="1", cost_cache=None)
    command.set_defaults(ignore_eos=False, fresh=False)
    add_load_options(command, REPEATS)
    add = command.add_argument
    add("--clients", default=CLIENTS, help="asking at the same time, comma-separated")
    add("--tie", type=float, default=SHARED_TIE_LOGITS, help="a lead that counts as none")
    add("--json", type=Path, default=None, metavar="FILE")
