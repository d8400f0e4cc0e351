"""The server as a process: its ready line, signals, its parent, ports and files."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import psutil
import pytest
from server_harness import WAIT_S, child, start_child

from dspark_edge.trace import read_trace

QUESTION = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}


def tiny_args(model: Path) -> list[str]:
    return ["--model", str(model), "--drafter", "none", "--ctx", "2048", "--threads", "1"]


def refusal(*args: str) -> tuple[int, str]:
    """Exit code and stderr of a server that does not start."""
    done = subprocess.run(
        [sys.executable, "-m", "dspark_edge", "serve", "--port", "0", *args],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    return done.returncode, done.stderr


def test_sigterm_lets_running_replies_finish(tiny_llama: Path) -> None:
    with child(*tiny_args(tiny_llama)) as server, server.client() as client:
        body = {**QUESTION, "stream": True, "max_tokens": 1500}
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2]
        assert server.process.wait(WAIT_S) == 0
        log = server.whole_log()
    assert "SIGTERM: no new requests are taken; 1 may go on for 30 s" in log
    assert log.rstrip().endswith("the server has ended")


def test_replies_that_take_longer_than_the_drain_end_with_the_reason(tiny_llama: Path) -> None:
    """A client that only sees the connection break would take half a reply for a whole one."""
    endless = {**QUESTION, "ignore_eos": True, "n": 2}
    args = [*tiny_args(tiny_llama), "--ctx", "8192", "--drain", "1"]
    with child(*args) as server, server.client() as client:
        answers: list[httpx.Response] = []

        def ask() -> None:
            answers.append(client.post("/v1/chat/completions", json=endless))

        whole = threading.Thread(target=ask)
        body = {**endless, "stream": True}
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            whole.start()
            pause = threading.Event()
            with server.client() as other:
                while other.get("/stats").json()["queue"]["n_requests"] < 4:
                    pause.wait(0.02)
            server.process.send_signal(signal.SIGTERM)
            last = [line for line in lines if line][-1]
        whole.join(WAIT_S)
        assert server.process.wait(WAIT_S) == 0
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert answers[0].status_code == 503
    assert answers[0].json()["error"]["code"] == "shutting_down"


def test_the_log_tells_of_each_load_and_why_a_model_left(tiny_llama: Path, tmp_path: Path) -> None:
    second = tmp_path / "second.gguf"
    second.write_bytes(tiny_llama.read_bytes())
    (tmp_path / "broken.gguf").write_bytes(b"not a model")
    body = {**QUESTION, "max_tokens": 1}
    args = [*tiny_args(tiny_llama), "--models-dir", str(tmp_path), "--keep-alive", "0.3"]
    with child(*args) as server, server.client() as client:
        pause = threading.Event()
        for model in ("second", "broken", "second"):
            client.post("/v1/chat/completions", json={**body, "model": model})
        while client.get("/health").json()["status"] != "unloaded":
            pause.wait(0.02)
        assert client.post("/v1/chat/completions", json=body).status_code == 200
        log = server.end()
    assert "model llama is unloaded: second takes its place" in log
    assert "model broken cannot be loaded: " in log
    assert "is no GGUF" in log or "is not a GGUF" in log
    assert "model second is unloaded: idle for 0.3 s" in log
    assert log.count("model llama is loaded after") == 2
    assert "model llama is unloaded: the server ends" in log


def test_a_trace_is_of_the_first_model_and_the_next_one_does_not_replace_it(
    tiny_llama: Path, tmp_path: Path
) -> None:
    (tmp_path / "second.gguf").write_bytes(tiny_llama.read_bytes())
    trace = tmp_path / "trace.jsonl"
    args = [*tiny_args(tiny_llama), "--models-dir", str(tmp_path), "--trace", str(trace)]
    with child(*args) as server, server.client() as client:
        for n_tokens, model in ((5, "llama"), (7, "second")):
            body = {**QUESTION, "max_tokens": n_tokens, "model": model}
            assert client.post("/v1/chat/completions", json=body).status_code == 200
        log = server.end()
    assert f"a trace is written to {trace} until the model is unloaded" in log
    assert f"no trace of this model: {trace} has one" in log
    recorded = read_trace(trace)
    assert recorded.header.target == tiny_llama.name
    assert sum(len(s.emitted) for line in recorded.rounds for s in line.sequences) == 5


@pytest.mark.skipif(os.name != "posix", reason="needs limits of POSIX shells")
def test_a_full_disk_costs_the_server_only_the_cost_table(tiny_llama: Path, tmp_path: Path) -> None:
    """The cost table is all that the server writes; conversations are kept by its clients."""
    full = ["sh", "-c", 'ulimit -f 0; exec "$@"', "sh"]  # every write to a file fails
    prefix = ["env", f"XDG_CACHE_HOME={tmp_path}", *full]
    args = [*tiny_args(tiny_llama), "--drafter", "lookup"]
    with child(*args, prefix=prefix) as server, server.client() as client:
        server.wait_ready()
        notices = client.get("/health").json()["notices"]
        assert (
            client.post("/v1/chat/completions", json={**QUESTION, "max_tokens": 4}).status_code
            == 200
        )
        log = server.end()
    # On a busy machine it is not kept in any case.
    assert len([each for each in notices if re.search(r"cannot be kept|not kept", each)]) == 1
    assert all(each in log for each in notices)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_logs_hold_no_prompts_unless_asked_to(tiny_llama: Path) -> None:
    secret = {"messages": [{"role": "user", "content": "my secret"}], "max_tokens": 3}
    for extra, is_logged in (((), False), (("--log-content",), True)):
        with child(*tiny_args(tiny_llama), *extra) as server, server.client() as client:
            assert client.post("/v1/chat/completions", json=secret).status_code == 200
            assert client.post("/v1/chat/completions", json={"secret": "my"}).status_code == 422
            assert client.get("/stats").status_code == 200
            assert client.get("/nothing").status_code == 404
            log = server.end(signal.SIGINT)
            assert server.process.stdout is not None
            assert server.process.stdout.read() == ""  # nothing beside the ready line
        assert "3 emitted" in log
        assert "GET '/nothing' 404" in log
        assert "/stats" not in log  # a page that asks each second would fill the disk
        assert ("secret" in log) == is_logged


def test_the_server_leaves_when_its_parent_dies(tiny_llama: Path) -> None:
    parent = subprocess.Popen(["sleep", "600"])
    with child(*tiny_args(tiny_llama), "--parent-pid", str(parent.pid)) as server:
        with server.client() as client:
            assert client.get("/health").status_code in (200, 503)
        parent.kill()  # and stays a zombie until this test collects it
        assert server.process.wait(WAIT_S) == 0
        assert "the parent process has ended: no new requests" in server.whole_log()
    parent.wait(WAIT_S)
    code, error = refusal(*tiny_args(tiny_llama), "--parent-pid", str(parent.pid))
    assert code == 1
    assert "--parent-pid" in error


def test_a_killed_server_can_start_again_on_its_port(tiny_llama: Path) -> None:
    with child(*tiny_args(tiny_llama)) as server:
        port = server.url.rpartition(":")[2]
        with (
            server.client() as client,
            client.stream(
                "POST", "/v1/chat/completions", json={**QUESTION, "stream": True}
            ) as response,
        ):
            next(response.iter_lines())
            server.process.kill()
            server.process.wait(WAIT_S)
        again = start_child(*tiny_args(tiny_llama), "--port", port)
        try:
            assert again.url == server.url
            with again.client() as client:
                body = {**QUESTION, "max_tokens": 2}
                assert client.post("/v1/chat/completions", json=body).status_code == 200
        finally:
            again.process.kill()
            again.process.wait(WAIT_S)


def test_what_cannot_start_says_why_in_one_line(tiny_llama: Path, tmp_path: Path) -> None:
    with child(*tiny_args(tiny_llama)) as server:
        port = server.url.rpartition(":")[2]
        code, error = refusal(*tiny_args(tiny_llama), "--port", port)
    assert (code, error.count("\n")) == (1, 1)
    assert f"port {port}: Address already in use" in error
    code, error = refusal("--model", str(tmp_path / "none.gguf"))
    assert (code, error.count("\n")) == (1, 1)
    assert "none.gguf is not a file" in error
    code, error = refusal(*tiny_args(tiny_llama), "--host", "0.0.0.0")
    assert (code, error.count("\n")) == (1, 1)
    assert "--api-key-file" in error
    (tmp_path / "notes").write_text("mine")
    code, error = refusal(*tiny_args(tiny_llama), "--trace", str(tmp_path / "notes"))
    assert (code, error.count("\n")) == (1, 1)
    assert "notes is there already; give another name" in error
    assert (tmp_path / "notes").read_text() == "mine"


def test_a_start_model_that_cannot_be_loaded_ends_the_server(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a model")
    code, error = refusal("--model", str(broken))
    assert code == 1
    assert "error: " in error
    assert "broken" in error


def test_a_trace_that_cannot_be_written_ends_the_server(tiny_llama: Path, tmp_path: Path) -> None:
    code, error = refusal(*tiny_args(tiny_llama), "--trace", str(tmp_path / "none" / "trace"))
    assert code == 1
    assert "none/trace cannot be written (No such file or directory); pass another path" in error


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
def test_a_second_sigterm_does_not_wait(tiny_llama: Path) -> None:
    with child(*tiny_args(tiny_llama), "--ctx", "4096") as server, server.client() as client:
        body = {**QUESTION, "stream": True, "n": 4}
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            next(response.iter_lines())
            server.process.send_signal(signal.SIGTERM)
            threading.Event().wait(0.3)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(WAIT_S) is not None


def test_an_idle_server_leaves_the_processor_alone(tiny_llama: Path) -> None:
    with child(*tiny_args(tiny_llama)) as server:
        server.wait_ready()
        process = psutil.Process(server.process.pid)
        before = process.cpu_times()
        threading.Event().wait(1.5)
        after = process.cpu_times()
    used_s = after.user + after.system - before.user - before.system
    assert used_s < 0.5  # a thread that spins takes all of the time


def test_without_its_extra_the_command_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "fastapi.py").write_text("raise ModuleNotFoundError('No module named fastapi')")
    done = subprocess.run(
        [sys.executable, "-m", "dspark_edge", "serve"],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: No module named fastapi; pip install")
