"""Faults that were found by trying, each as small as it could be made."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import llama_cpp
import pytest
from tiny_models import (
    DrafterSpec,
    TargetSpec,
    write_drafter,
    write_gemma3,
    write_lfm2,
    write_llama,
)

from dspark_edge import Engine, ModelError, SamplingParams, _core
from dspark_edge.interrupts import Uninterrupted


def test_a_sliding_window_that_another_sequence_took_is_evaluated_again(tmp_path: Path) -> None:
    target = write_gemma3(tmp_path / "gemma3.gguf", TargetSpec(sliding_window=16))
    base = [(7 * i) % 256 for i in range(60)]
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=1, ignore_eos=True)

    def first_logprob(engine: Engine) -> float:
        (first, *_) = engine.generate([*base[:30], 100], params)
        return first.logprobs[0].logprob

    with Engine(target, speculation="off", n_ctx=256, n_seq=2, n_threads=1) as engine:
        list(engine.generate(base, params))
        other = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        list(engine.generate([5, 6, 7], other))
        reused = first_logprob(engine)
    with Engine(target, speculation="off", n_ctx=256, n_seq=2, n_threads=1) as engine:
        assert reused == pytest.approx(first_logprob(engine), abs=5e-3)


def test_a_hybrid_target_speculates_with_one_sequence_only(tmp_path: Path) -> None:
    target = write_lfm2(tmp_path / "lfm2.gguf")
    with Engine(target, drafter="lookup", n_ctx=256, n_seq=2, n_threads=1) as engine:
        assert engine.speculation_state.startswith("off: recurrent states are rolled back reliably")
    with Engine(
        target, drafter="lookup", n_ctx=256, n_seq=1, n_threads=1, cost_cache=tmp_path
    ) as engine:
        assert engine.speculation_state.startswith("lookup")


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("root ::= " + "(" * 300 + '"a"' + ")" * 300, "nests parentheses deeper than 256"),
        ("root ::= # c\r" + "(" * 300 + '"a"' + ")" * 300, "nests parentheses deeper than 256"),
        ('root ::= <"> ' + "(" * 300 + '"a"' + ")" * 300, "nests parentheses deeper than 256"),
        ('root ::= "a"{0,50000}', "repeats something 50000 times; the limit is 2000"),
        ('root ::= "' + "a" * 300_000 + '"', "has 300011 bytes; the limit is 262144"),
    ],
)
def test_a_grammar_that_would_exhaust_the_parser_is_refused(
    tiny_llama: Path, grammar: str, message: str
) -> None:
    with (
        Engine(tiny_llama, speculation="off", n_ctx=64, n_seq=1, n_threads=1) as engine,
        pytest.raises(ValueError, match=message),
    ):
        engine.add([1], SamplingParams(grammar=grammar))


def test_models_can_be_loaded_in_several_threads_at_once(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    errors: list[str] = []

    def load() -> None:
        try:
            _core.BlockDecoder(_core.DecoderConfig(target_path=str(broken)))
        except ModelError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 8


def test_a_load_that_fails_gives_its_own_reason(tmp_path: Path) -> None:
    """llama.cpp's log is one for all threads."""
    without = TargetSpec(tensors={"output_norm.weight": None})
    headless = write_llama(tmp_path / "headless.gguf", without)
    is_done = threading.Event()

    def fail_otherwise() -> None:
        while not is_done.is_set():
            llama_cpp.llama_model_load_from_file(
                b"another.gguf", llama_cpp.llama_model_default_params()
            )

    other = threading.Thread(target=fail_otherwise)
    other.start()
    try:
        for _ in range(20):
            with pytest.raises(ModelError, match=r"tensor 'output_norm\.weight' not found"):
                _core.BlockDecoder(_core.DecoderConfig(target_path=str(headless)))
    finally:
        is_done.set()
        other.join()


def test_a_context_smaller_than_a_profile_can_be_loaded(tiny_llama: Path, tmp_path: Path) -> None:
    with Engine(
        tiny_llama, drafter="lookup", n_ctx=8, n_seq=1, n_threads=1, cost_cache=tmp_path
    ) as engine:
        chunks = list(engine.generate([1, 2], SamplingParams(temperature=0.0, ignore_eos=True)))
    assert chunks[-1].finish_reason == "context_full"


def test_the_second_drafter_form_that_fits_is_found(tmp_path: Path) -> None:
    target = tmp_path / "model.gguf"
    write_lfm2(target)
    write_drafter(tmp_path / "dspark-model.gguf", DrafterSpec(n_embd=32))
    with Engine(target, n_ctx=128, n_seq=1, n_threads=1, cost_cache=tmp_path) as engine:
        assert engine.drafter_name == "lookup"
        assert "is not used" in engine.notices[0]


def test_ctrl_c_takes_effect_behind_a_protected_block() -> None:
    reached = False

    def work() -> None:
        nonlocal reached
        with Uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            reached = True

    with pytest.raises(KeyboardInterrupt):
        work()
    assert reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    "params",
    [{"max_tokens": 1.5}, {"seed": 0.5}, {"top_k": True}, {"temperature": "1"}, {"stop": [None]}],
)
def test_a_parameter_of_the_wrong_type_is_named(params: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(params))):
        SamplingParams(**params)  # type: ignore[arg-type]


def test_a_text_with_a_lone_surrogate_is_refused(tiny_llama: Path) -> None:
    with (
        Engine(tiny_llama, speculation="off", n_ctx=64, n_seq=1, n_threads=1) as engine,
        pytest.raises(ValueError, match="the text is not Unicode"),
    ):
        engine.add("a\ud800")


def test_a_reader_that_leaves_early_sees_no_traceback(tiny_llama: Path) -> None:
    command = f"{sys.executable} -m dspark_edge.chat --model {tiny_llama} --drafter none --ctx 256"
    done = subprocess.run(
        ["sh", "-c", f"echo hello | {command} --threads 1 --max-tokens 100 | head -c 1"],
        capture_output=True,
        timeout=60,
    )
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(("text", "code"), [(b"caf\xc3\xa9\n", 0), (b"caf\xe9\n", 1)])
def test_the_locale_does_not_decide_what_input_means(
    tiny_llama: Path, text: bytes, code: int
) -> None:
    command = [sys.executable, "-m", "dspark_edge.chat", "--model", str(tiny_llama)]
    done = subprocess.run(
        [*command, "--drafter", "none", "--ctx", "256", "--threads", "1", "--max-tokens", "5"],
        input=text,
        capture_output=True,
        env={**os.environ, "LC_ALL": "C"},
        timeout=60,
    )
    assert done.returncode == code, done.stderr
    assert (b"not UTF-8: byte 0xe9 at offset 3" in done.stderr) == (code == 1)
