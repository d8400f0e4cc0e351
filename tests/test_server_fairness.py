"""Who is served when there is not room for all: whoever came first; nobody waits for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fake_decoder import engine_on
from server_harness import TINY, WAIT_S, ScriptedDecoder, answering, running, tiny_settings
from tiny_models import token_id

from dspark_edge import Engine
from dspark_edge.loading import Progress
from dspark_edge.server.engine_making import MakeEngine
from dspark_edge.server.settings import EngineOptions


def wait_until(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < until_s
        threading.Event().wait(0.01)


def gated(
    gate: threading.Semaphore, n_seq: int, made: list[str] | None = None, n_chars: int = 30
) -> MakeEngine:
    """Engines that take one of the gate for each round."""

    def make(path: Path, options: EngineOptions, progress: Progress) -> Engine:
        if made is not None:
            made.append(path.stem)
        decoder = ScriptedDecoder(
            answering("x" * n_chars), n_seq=n_seq, n_vocab=1000, eog_tokens=[token_id("<|eos|>")]
        )
        decoder.after = lambda: gate.acquire(timeout=WAIT_S) and None
        return engine_on(decoder)

    return make


def test_requests_are_served_in_the_order_of_their_arrival(tiny_llama: Path) -> None:
    """Long ones that come later, even many at once, do not get in front of a short one."""
    gate, ended = threading.Semaphore(0), []
    settings = tiny_settings(tiny_llama, engine=replace(TINY, n_seq=1))
    with running(settings, gated(gate, 1)) as server:

        def ask(name: str, n_choices: int, max_tokens: int) -> None:
            assert server.chat(n=n_choices, max_tokens=max_tokens).status_code == 200
            ended.append(name)

        threads = []
        n_jobs = 0
        for name, n_choices, max_tokens in (
            ("first", 1, 30),
            ("many", 4, 30),
            ("short", 1, 1),
            ("more", 4, 30),
            ("last", 1, 1),
        ):
            threads.append(threading.Thread(target=ask, args=(name, n_choices, max_tokens)))
            threads[-1].start()
            n_jobs += n_choices
            wait_until(lambda n=n_jobs: server.hub.n_jobs == n)
        for thread in threads:
            while thread.is_alive():
                gate.release()
                thread.join(0.01)
    assert ended == ["first", "many", "short", "more", "last"]


def test_all_that_run_go_on_in_every_round(tiny_llama: Path) -> None:
    """A request with many choices gets no more of a round than its choices."""
    gate = threading.Semaphore(0)
    with running(tiny_settings(tiny_llama), gated(gate, 4, n_chars=60)) as server:
        answers = []

        def ask(n_choices: int) -> None:
            answers.append(server.chat(n=n_choices).json())

        threads = [threading.Thread(target=ask, args=(n,)) for n in (3, 1)]
        for thread, n_jobs in zip(threads, (3, 4), strict=True):
            thread.start()
            wait_until(lambda n=n_jobs: server.hub.n_jobs == n)
        for thread in threads:
            while thread.is_alive():
                gate.release()
                thread.join(0.01)
    stats = [each for answer in answers for each in answer["x_dspark"]["stats"]]
    assert [each["n_rounds"] for each in stats] == [stats[0]["n_rounds"]] * 4


def test_a_stream_of_requests_for_one_model_does_not_shut_out_another(
    tmp_path: Path, tiny_llama: Path
) -> None:
    """Whoever comes after the request for another model waits behind it."""
    (tmp_path / "second.gguf").write_bytes(tiny_llama.read_bytes())
    gate, made = threading.Semaphore(0), []
    settings = tiny_settings(tiny_llama, models_dirs=(tmp_path,))
    with running(settings, gated(gate, 4, made)) as server:
        ended: list[str] = []

        def ask(name: str, model: str) -> None:
            assert server.chat(model=model).status_code == 200
            ended.append(name)

        threads = []
        for i, (name, model) in enumerate(
            [("one", "llama"), ("other", "second"), ("two", "llama"), ("three", "llama")]
        ):
            threads.append(threading.Thread(target=ask, args=(name, model)))
            threads[-1].start()
            wait_until(lambda n=i: server.hub.n_requests == n + 1)
            wait_until(lambda: server.hub.n_jobs == 1)
        for thread in threads:
            while thread.is_alive():
                gate.release()
                thread.join(0.01)
    assert made == ["llama", "second", "llama"]
    assert ended[:2] == ["one", "other"]
