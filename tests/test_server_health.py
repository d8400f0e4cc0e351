"""What /health says while nothing is asked: that a model is loaded, and pressure as it is now."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_decoder import Machine, engine_on
from server_harness import (
    TINY,
    WAIT_S,
    Running,
    ScriptedDecoder,
    answering,
    child,
    running,
    scripted,
    tiny_settings,
)
from tiny_models import token_id

from dspark_edge import Engine
from dspark_edge.loading import Progress
from dspark_edge.server.engine_making import make_engine
from dspark_edge.server.settings import EngineOptions


def health_once(server: Running, is_it: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first answer of /health that is what a test waits for."""
    until_s = time.monotonic() + WAIT_S
    while time.monotonic() < until_s:
        body: dict[str, Any] = server.get("/health").json()
        if is_it(body):
            return body
        threading.Event().wait(0.1)
    raise AssertionError(f"still {body}")


def test_the_first_200_after_a_start_means_that_the_model_is_there(tiny_llama: Path) -> None:
    """An app waits for it; it once came from a server that had not begun to load."""
    args = ["--model", str(tiny_llama), "--drafter", "lookup", "--ctx", "256", "--threads", "1"]
    with child(*args) as server, server.client() as client:
        answers = [client.get("/health")]
        while answers[-1].status_code == 503:
            answers.append(client.get("/health"))
    assert {answer.json()["status"] for answer in answers[:-1]} <= {"loading"}
    assert {answer.json()["model"] for answer in answers} == {"llama"}
    assert (answers[-1].status_code, answers[-1].json()["status"]) == (200, "ready")


def test_a_model_that_will_be_loaded_counts_as_loading(tiny_llama: Path) -> None:
    with running(tiny_settings(tiny_llama), scripted(answering("fine"))) as server:
        unloaded = server.get("/health")
        loading = server.hub.preload()
        waiting = server.get("/health")
        loading.close()
    assert (unloaded.status_code, unloaded.json()["status"]) == (200, "unloaded")
    assert (waiting.status_code, waiting.json()["status"]) == (503, "loading")
    assert waiting.json()["model"] == "llama"
    assert waiting.json()["progress"] == 0.0  # there from the first moment: the page draws it


def test_a_switch_of_models_counts_as_loading_from_its_start(
    tmp_path: Path, tiny_llama: Path
) -> None:
    """While the first one was on its way out, the server once seemed to have nothing to do."""
    (tmp_path / "second.gguf").write_bytes(tiny_llama.read_bytes())
    is_closing, may_close = threading.Event(), threading.Event()

    class Slow(ScriptedDecoder):
        def close(self) -> None:
            is_closing.set()
            may_close.wait(WAIT_S)

    def make(path: Path, options: EngineOptions, progress: Progress) -> Engine:
        end = token_id("<|eos|>")
        return engine_on(Slow(answering("fine"), n_vocab=1000, eog_tokens=[end]))

    with running(tiny_settings(tiny_llama, models_dirs=(tmp_path,)), make) as server:
        assert server.chat().status_code == 200
        switch = threading.Thread(target=lambda: server.chat(model="second"))
        switch.start()
        assert is_closing.wait(WAIT_S)
        leaving = server.get("/health")
        may_close.set()
        switch.join(WAIT_S)
    assert (leaving.status_code, leaving.json()["status"]) == (503, "loading")
    assert leaving.json()["model"] == "second"


def test_an_idle_server_sees_pressure_come_and_go(tiny_llama: Path) -> None:
    """Without requests nobody looked: /health went on telling of a pressure that was gone."""
    machine = Machine()

    def make(path: Path, options: EngineOptions, progress: Progress) -> Engine:
        end = token_id("<|eos|>")
        decoder = ScriptedDecoder(answering("fine"), n_vocab=1000, eog_tokens=[end])
        return engine_on(decoder, machine=machine)

    def refuses(body: dict[str, Any]) -> bool:
        machine.now_s += 15.0  # beyond what a refusal lasts after its pressure
        return "refuse" in [each["step"] for each in body["pressure"]]

    with running(tiny_settings(tiny_llama), make) as server:
        assert server.chat().status_code == 200
        assert server.get("/health").json()["pressure"] == []
        machine.free_mb = 100.0  # scarce
        health_once(server, refuses)
        assert 'dspark_pressure{step="refuse"} 1.0' in server.get("/metrics").text
        machine.free_mb = 4000.0
        health_once(server, lambda body: not refuses(body))
        assert 'dspark_pressure{step="refuse"} 0.0' in server.get("/metrics").text
        assert server.chat("something new").status_code == 200


def test_health_tells_the_share_of_both_files_weights_that_is_loaded(
    tiny_llama: Path, tiny_drafter: Path
) -> None:
    told = threading.Event()
    go_on = threading.Event()
    shares: list[float] = []

    def make(path: Path, options: EngineOptions, progress: Progress) -> Engine:
        def slowly(share: float) -> bool:
            shares.append(share)
            goes_on = progress(share)
            if 0.3 < share < 0.7 and not told.is_set():
                told.set()
                go_on.wait(WAIT_S)
            return goes_on

        return make_engine(path, options, slowly)

    options = replace(TINY, drafter=str(tiny_drafter), speculation="always")
    with running(tiny_settings(tiny_llama, engine=options), make) as server:
        first = threading.Thread(target=lambda: server.chat(max_tokens=1))
        first.start()
        assert told.wait(WAIT_S)
        loading = server.get("/health").json()
        share = shares[-1]
        go_on.set()
        first.join(WAIT_S)
        ready = server.get("/health").json()
    assert loading["status"] == "loading"
    assert loading["progress"] == pytest.approx(share, abs=1e-3)
    assert loading["elapsed_s"] > 0.0
    assert ready["status"] == "ready"
    assert "progress" not in ready
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1.0)
    n_target, n_drafter = (path.stat().st_size for path in (tiny_llama, tiny_drafter))
    # One bar for both: the target's end is not the end.
    assert any(abs(each - n_target / (n_target + n_drafter)) < 1e-3 for each in shares)


def test_a_server_that_leaves_gives_up_what_it_loads(tiny_llama: Path) -> None:
    """A large file may take minutes to read, and nobody wants it any more."""
    has_begun = threading.Event()
    answers = []

    def make(path: Path, options: EngineOptions, progress: Progress) -> Engine:
        def endless(share: float) -> bool:
            has_begun.set()
            until_s = time.monotonic() + WAIT_S
            while progress(share):
                assert time.monotonic() < until_s
                threading.Event().wait(0.01)
            return False

        return make_engine(path, options, endless)

    with running(tiny_settings(tiny_llama, drain_s=1.0), make) as server:
        asking = threading.Thread(target=lambda: answers.append(server.chat()))
        asking.start()
        assert has_begun.wait(WAIT_S)
    asking.join(WAIT_S)  # `running` has waited for the server's end
    assert [answer.status_code for answer in answers] == [503]
