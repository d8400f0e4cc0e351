"""llama.cpp's llama-server as a program of bench compare: a process of ours, asked over HTTP.

It gets token ids, so that it sees the prompt that we see, and its own timings are taken: then
neither HTTP nor JSON counts. Flags as `llama-server --help` of llama.cpp 0c1e570 has them: -m, -md
(the drafter), -c, -t, -tb, -np 1 (one slot: the whole context), --spec-type draft-dspark,
--spec-draft-n-max (default 3), --no-ui, --host, --port.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..sequence import SamplingParams
from .child import Child
from .http_client import HttpClient
from .openai_url import rounds_told
from .programs import Clock, Question, Reply

HOST = "127.0.0.1"
VERSION_S = 60.0  # for telling its version


def check_executable(path: str) -> str:
    """The program's path. Raises ValueError when it is none."""
    found = shutil.which(os.path.expanduser(path))
    if found is None:
        raise ValueError(f"--llama-server {path} is no program; give the path of llama-server")
    return found


class LlamaServer:
    """A llama-server of our own, for as long as it is open."""

    clock: Clock = "told"

    def __init__(self, name: str, executable: str, flags: Sequence[str]) -> None:
        """flags: all but where it listens. Raises OSError when it does not come up."""
        self.name = name
        port = _free_port()
        command = [executable, *flags, "--host", HOST, "--port", str(port)]
        self.about: dict[str, Any] = {"version": _version(executable), "command": command}
        self._client = HttpClient(f"http://{HOST}:{port}")
        self._child = Child(name, command)
        try:
            self._child.await_health(self._client, "ok")
        except BaseException:  # Ctrl-C too: the process must not stay
            self.close()
            raise

    def reply(self, question: Question, params: SamplingParams) -> Reply:
        """As Program has it, not streamed."""
        try:
            answer = self._client.post("/completion", self._body(question, params))
        except OSError as error:
            raise OSError(
                f"{self.name}: {error}; its log ends with: {self._child.last_line()}"
            ) from error
        if "timings" not in answer or not answer.get("tokens"):
            raise ValueError(f"{self.name} tells no timings or tokens; give a newer llama-server")
        timings = answer["timings"]
        return Reply(
            text=answer["content"],
            token_ids=answer["tokens"],
            n_decoded=timings["predicted_n"] - 1,
            n_rounds=rounds_told(timings),
            ttft_s=timings["prompt_ms"] / 1e3,
            decode_s=timings["predicted_ms"] / 1e3,
        )

    def _body(self, question: Question, params: SamplingParams) -> dict[str, Any]:
        return {
            "prompt": question.token_ids,
            "n_predict": params.max_tokens,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "seed": params.seed,
            "return_tokens": True,
            "cache_prompt": False,
        }

    def close(self) -> None:
        """Ends the process."""
        self._child.close()


def flags_for(
    target: Path, *, n_ctx: int, n_threads: int | None, drafter: Path | None, n_max: int | None
) -> list[str]:
    """The command line of a pair. drafter: None: plain. n_max: None: llama-server's default."""
    flags = ["-m", str(target), "-c", str(n_ctx), "-np", "1", "--no-ui"]
    if n_threads is not None:
        flags += ["-t", str(n_threads), "-tb", str(n_threads)]
    if drafter is not None:
        flags += ["-md", str(drafter), "--spec-type", "draft-dspark"]
    if n_max is not None:
        flags += ["--spec-draft-n-max", str(n_max)]
    return flags


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _version(executable: str) -> str:
    done = subprocess.run(
        [executable, "--version"], capture_output=True, text=True, check=False, timeout=VERSION_S
    )
    said = (done.stdout + done.stderr).strip().splitlines()
    return next((line for line in said if line.startswith("version")), "unknown")
