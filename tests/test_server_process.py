"""The server as a process: its ready line, signals, its parent, ports and files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from server_harness import WAIT_S, child, start_child

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


def test_logs_hold_no_prompts_unless_asked_to(tiny_llama: Path) -> None:
    secret = {"messages": [{"role": "user", "content": "my secret"}], "max_tokens": 3}
    for extra, is_logged in (((), False), (("--log-content",), True)):
        with child(*tiny_args(tiny_llama), *extra) as server, server.client() as client:
            assert client.post("/v1/chat/completions", json=secret).status_code == 200
            assert client.post("/v1/chat/completions", json={"secret": "my"}).status_code == 422
            server.process.send_signal(signal.SIGINT)
            assert server.process.wait(WAIT_S) == 0
            assert server.process.stdout is not None
            assert server.process.stdout.read() == ""  # nothing beside the ready line
            log = "".join(server.log)
        assert "3 emitted" in log
        assert ("secret" in log) == is_logged


def test_the_server_leaves_when_its_parent_dies(tiny_llama: Path) -> None:
    parent = subprocess.Popen(["sleep", "600"])
    with child(*tiny_args(tiny_llama), "--parent-pid", str(parent.pid)) as server:
        with server.client() as client:
            assert client.get("/health").status_code in (200, 503)
        parent.kill()  # and stays a zombie until this test collects it
        assert server.process.wait(WAIT_S) == 0
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


def test_a_start_model_that_cannot_be_loaded_ends_the_server(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a model")
    code, error = refusal("--model", str(broken))
    assert code == 1
    assert "error: " in error
    assert "broken" in error


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
