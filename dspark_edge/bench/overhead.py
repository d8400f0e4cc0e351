"""bench overhead: what the runtime itself costs over llama.cpp.

Plain decoding against llama-cpp-python's low-level loop, own time per round, peak memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import llama_cpp

from ..arguments import check_threads
from ..engine import Engine
from ..models import target_path
from ..sequence import SamplingParams, Stats
from .shared import Commands, peak_rss_bytes, progress, said_last, say

PROMPT = "Explain in detail how a steam engine works, step by step."
N_CTX = 2048
MIN_TOKENS, MAX_TOKENS = 32, N_CTX // 2  # more than one block; less than a context
TEMPERATURES = (0.0, 1.0)  # at which own time is taken
IN_PROCESSES = ("low-level", "engine")  # of which peak memory is taken


def overhead(args: argparse.Namespace) -> dict[str, Any]:
    """Plain decoding against llama-cpp-python's low-level loop, own time per round, peak memory."""
    check_threads(args.threads)
    if args.pairs < 1:
        raise ValueError(f"--pairs is {args.pairs}; it must be at least 1")
    if not MIN_TOKENS <= args.tokens <= MAX_TOKENS:
        raise ValueError(f"--tokens is {args.tokens}; give {MIN_TOKENS} to {MAX_TOKENS}")
    n_steps = args.pairs * (1 + len(TEMPERATURES)) + len(IN_PROCESSES)
    with progress(n_steps, "bench overhead") as advance:
        report = {
            "target": str(target_path(args.target)),
            "n_tokens": args.tokens,
            "n_pairs": args.pairs,
            "plain_over_low_level": _plain_against_low_level(args, advance),
            "own_ms_per_round": _own_time(args, advance),
            "memory": _memory(args, advance),
        }
    plain, own, memory = (
        report["plain_over_low_level"],
        report["own_ms_per_round"],
        report["memory"],
    )
    say(f"plain decoding / low-level loop: {plain['median']:.3f} (median of {args.pairs} pairs)")
    for name, value in own.items():
        say(f"own time per round, {name}: {value:.3f} ms")
    say(
        f"peak memory: low-level {memory['low_level_bytes'] / 1e6:.0f} MB, with the drafter "
        f"{memory['engine_bytes'] / 1e6:.0f} MB, of which its weights and caches "
        f"{memory['drafter_bytes'] / 1e6:.0f} MB: {memory['rest_bytes'] / 1e6:.0f} MB over"
    )
    return report


# ---------------------------------------------------------------- plain decoding


def _plain_against_low_level(
    args: argparse.Namespace, advance: Callable[[], None]
) -> dict[str, float]:
    """Ratio of decode speeds, runs interleaved; above 1: ours is the faster one."""
    ratios = []
    with Engine(
        args.target, speculation="off", n_seq=1, n_ctx=N_CTX, n_threads=args.threads
    ) as engine:
        prompt = _prompt(engine)
        low_level = _LowLevel(target_path(args.target), args.threads)
        low_level.tps(prompt, args.tokens)  # warm-up of both
        _run(engine, prompt, args.tokens, 0.0)
        for _ in range(args.pairs):
            theirs = low_level.tps(prompt, args.tokens)
            ratios.append(_run(engine, prompt, args.tokens, 0.0).tps / theirs)
            advance()
        low_level.close()
    return {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}


class _LowLevel:
    """The greedy loop that llama-cpp-python's own low-level examples use."""

    def __init__(self, path: Path, n_threads: int) -> None:
        self._model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = N_CTX, 512, 512
        params.n_threads = params.n_threads_batch = n_threads
        self._ctx = llama_cpp.llama_init_from_model(self._model, params)
        chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_greedy())
        self._chain = chain

    def tps(self, prompt: Sequence[int], n_tokens: int) -> float:
        """Decode speed of n_tokens after the prompt, in tokens per second."""
        memory = llama_cpp.llama_get_memory(self._ctx)
        llama_cpp.llama_memory_seq_rm(memory, 0, -1, -1)
        array = (llama_cpp.llama_token * len(prompt))(*prompt)
        # The last prompt token counts as decoding here as it does in the engine.
        self._decode(array, len(prompt) - 1)
        token = (llama_cpp.llama_token * 1)(prompt[-1])
        start = time.perf_counter()
        for _ in range(n_tokens):
            self._decode(token, 1)
            token[0] = llama_cpp.llama_sampler_sample(self._chain, self._ctx, -1)
        return n_tokens / (time.perf_counter() - start)

    def _decode(self, tokens: Any, n_tokens: int) -> None:
        code = llama_cpp.llama_decode(self._ctx, llama_cpp.llama_batch_get_one(tokens, n_tokens))
        if code != 0:
            raise ValueError(f"llama_decode gave {code}")

    def close(self) -> None:
        llama_cpp.llama_sampler_free(self._chain)
        llama_cpp.llama_free(self._ctx)
        llama_cpp.llama_model_free(self._model)


# ---------------------------------------------------------------- own time


def _own_time(args: argparse.Namespace, advance: Callable[[], None]) -> dict[str, float]:
    """Milliseconds per round outside llama.cpp, whole blocks, one sequence."""
    with Engine(
        args.target,
        drafter=args.drafter,
        speculation="always",
        n_seq=1,
        n_ctx=N_CTX,
        n_threads=args.threads,
    ) as engine:
        prompt = _prompt(engine)
        _run(engine, prompt, 32, 0.0)
        report = {}
        for temperature in TEMPERATURES:
            rounds: list[float] = []
            for seed in range(args.pairs):
                rounds += _own_s_of_rounds(engine, prompt, _params(args.tokens, temperature, seed))
                advance()
            report[f"temperature {temperature:g}"] = 1e3 * statistics.median(rounds)
        return report


def _own_s_of_rounds(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> list[float]:
    """Seconds outside llama.cpp, round by round."""
    rounds, before = [], 0.0
    for chunk in engine.generate(prompt, params):
        rounds.append(chunk.stats.own_s - before)
        before = chunk.stats.own_s
    return rounds[1:]  # a chunk leaves before its round's time is booked: the first shows none


# ---------------------------------------------------------------- memory


def _memory(args: argparse.Namespace, advance: Callable[[], None]) -> dict[str, int]:
    """Peak resident bytes of two fresh processes that decode the same tokens."""
    found = {}
    for what in IN_PROCESSES:
        found[what] = _peak(args, what)
        advance()
    low_level, engine = found["low-level"], found["engine"]
    rest = engine["peak"] - low_level["peak"] - engine["drafter"]
    return {
        "low_level_bytes": low_level["peak"],
        "engine_bytes": engine["peak"],
        "drafter_bytes": engine["drafter"],
        "rest_bytes": rest,
    }


def _peak(args: argparse.Namespace, what: str) -> dict[str, int]:
    command = [sys.executable, "-m", "dspark_edge.bench", "peak", what]
    command += ["--target", args.target, "--drafter", args.drafter]
    command += ["--tokens", str(args.tokens), "--threads", str(args.threads)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise ValueError(f"peak memory: the process {said_last(done)}")
    result: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return result


def peak(args: argparse.Namespace) -> dict[str, int]:
    """Decodes in this process and reports its peak resident memory in bytes."""
    drafter_bytes = 0
    if args.what == "low-level":
        low_level = _LowLevel(target_path(args.target), args.threads)
        low_level.tps(list(range(100, 150)), args.tokens)
    else:
        engine = Engine(
            args.target,
            drafter=args.drafter,
            speculation="always",
            n_seq=1,
            n_ctx=N_CTX,
            n_threads=args.threads,
        )
        _run(engine, list(range(100, 150)), args.tokens, 0.0)
        use = engine.memory_use()
        drafter_bytes = use.drafter_model_bytes + use.drafter_context_bytes
    return {"peak": peak_rss_bytes(), "drafter": drafter_bytes}


# ---------------------------------------------------------------- shared


def _prompt(engine: Engine) -> list[int]:
    return engine.tokenize(engine.render([{"role": "user", "content": PROMPT}]), add_special=False)


def _run(
    engine: Engine, prompt: Sequence[int], n_tokens: int, temperature: float, seed: int = 0
) -> Stats:
    stats = Stats()
    for chunk in engine.generate(prompt, _params(n_tokens, temperature, seed)):
        stats = chunk.stats
    return stats


def _params(n_tokens: int, temperature: float, seed: int) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=seed, max_tokens=n_tokens, ignore_eos=True)


def add_commands(commands: Commands) -> None:
    """Adds `overhead`, and `peak` which it runs in fresh processes."""
    run_overhead = commands.add_parser("overhead", help="what the runtime itself costs")
    run_peak = commands.add_parser("peak", help="peak memory of one process, for overhead")
    run_peak.add_argument("what", choices=IN_PROCESSES)
    for command, run in ((run_overhead, overhead), (run_peak, peak)):
        command.set_defaults(run=run)
        command.add_argument("--target", default="default")
        command.add_argument("--drafter", default="auto")
        command.add_argument("--tokens", type=int, default=64)
        command.add_argument("--threads", type=int, default=2)
    run_overhead.add_argument("--pairs", type=int, default=11)
