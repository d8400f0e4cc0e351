"""bench compare: what each program is asked, who runs when, and how far texts are ours."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fake_llama_server
import fake_openai
import psutil
import pytest
from fake_decoder import END, Script, letters
from fake_llama_server import PROMPT_MS, TOKEN_MS
from scripted_modes import ScriptedModes
from tiny_models import token_id

from dspark_edge import Engine, SamplingParams
from dspark_edge.bench import compare, our_mode
from dspark_edge.bench.__main__ import main
from dspark_edge.bench.llama_cpp_python import LlamaCppPython
from dspark_edge.bench.llama_server import LlamaServer, flags_for
from dspark_edge.bench.measure import GroupRun, run_group
from dspark_edge.bench.modes import Setup
from dspark_edge.bench.openai_url import OpenAIUrl
from dspark_edge.bench.programs import Question, Reply, ids_beside

TEXTS = ("then he said", "on the one hand")
N_TOKENS = 8
PARAMS = SamplingParams(max_tokens=N_TOKENS, temperature=0.0, seed=5)
OF_LLAMA_CPP_PYTHON = (
    *("llama-cpp-python", "llama-cpp-python:flash"),
    *("llama-cpp-python:lookup:10", "llama-cpp-python:lookup:2"),
)


def spelled(text: str) -> list[int]:
    return list(text.encode())


def reply_to(prompt: Sequence[int], script: Script = letters, n: int = N_TOKENS) -> list[int]:
    before = list(prompt)
    for _ in range(n):
        before.append(script(before))
    return before[len(prompt) :]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    return path


class Bench(ScriptedModes):
    """The command with our modes on scripted engines, and llama-cpp-python left out."""

    def __init__(
        self, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], prompts: Path
    ) -> None:
        super().__init__()
        self.ran: list[str] = []
        self._capsys = capsys
        self._prompts = prompts
        patch.setattr(compare, "open_mode", self.open)
        patch.setattr(our_mode, "run_group", self._run_group)

    def _run_group(self, engine: Any, ids: Any, params: Any) -> GroupRun:
        self.ran.append(self.name_of(engine))
        return run_group(engine, ids, params)

    def __call__(self, *arguments: str) -> tuple[int, dict[str, Any], str]:
        fixed = f"--max-tokens {N_TOKENS} --repeats 2 --n-ctx 512 --threads 1".split()
        skipped = [word for name in OF_LLAMA_CPP_PYTHON for word in ("--skip", name)]
        command = ["compare", "--prompts", str(self._prompts), *fixed, *skipped, *arguments]
        code = main(command)
        shown = self._capsys.readouterr()
        return code, json.loads(shown.out.splitlines()[-1]) if shown.out else {}, shown.err


@pytest.fixture
def bench(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], prompts: Path
) -> Bench:
    return Bench(monkeypatch, capsys, prompts)


def row(report: dict[str, Any], mode: str) -> dict[str, Any]:
    (line,) = (each for each in report["modes"] if each["mode"] == mode)
    found: dict[str, Any] = line
    return found


# ---------------------------------------------------------------- llama-server


@pytest.fixture
def pair(tiny_llama: Path, tiny_drafter: Path) -> list[str]:
    """Files that exist: our scripted modes do not read them, the flags for llama-server do."""
    return ["--target", str(tiny_llama), "--drafter", str(tiny_drafter)]


def test_llama_server_runs_plain_at_its_default_and_at_the_full_block(
    bench: Bench, pair: list[str], tmp_path: Path
) -> None:
    says = {tuple(spelled(t)): reply_to(spelled(t)) for t in TEXTS}
    fake = fake_llama_server.install(tmp_path, says)
    code, report, err = bench(*pair, "--llama-server", str(fake.path))
    assert code == 0
    names = ["plain", "auto", "llama-server", "llama-server:dspark", "llama-server:dspark:4"]
    assert [line["mode"] for line in report["modes"]] == names
    for name in names[2:]:
        line = row(report, name)
        assert line["decode_tps"] == pytest.approx(1e3 / TOKEN_MS)
        assert line["ttft_s"] == PROMPT_MS / 1e3
        assert line["clock"] == "told"
        assert (line["texts"]["n_replies"], line["texts"]["n_same"]) == (4, 4)
        assert line["ours_over_it"]["ours"] == "auto"
        assert line["ours_over_it"]["values"] == [
            a / b
            for a, b in zip(
                row(report, "auto")["decode_tps_by_repeat"],
                line["decode_tps_by_repeat"],
                strict=True,
            )
        ]
        assert report["programs"][name]["version"] == "version: 7 (fake)"
        assert name in err
    assert row(report, "llama-server")["tau"] == 1.0
    n_decoded = N_TOKENS - 1
    tau = n_decoded / (n_decoded - n_decoded // 2)
    assert row(report, "llama-server:dspark")["tau"] == pytest.approx(tau)
    rows = fake.asked()
    flags = [" ".join(each["flags"]) for each in rows if "flags" in each]
    assert ["--spec-type draft-dspark" in each for each in flags] == [False, True, True]
    assert ["--spec-draft-n-max 4" in each for each in flags] == [False, False, True]
    assert all("-c 512 -np 1 --no-ui -t 1 -tb 1" in each for each in flags)
    asked = [each["body"] for each in rows if "body" in each]
    assert {tuple(body["prompt"]) for body in asked} == says.keys()
    assert not any(body["cache_prompt"] for body in asked)  # else a repeat evaluates no prompt
    assert not any(psutil.pid_exists(each["pid"]) for each in rows if "pid" in each)


def test_a_llama_server_that_cannot_load_says_why(tmp_path: Path) -> None:
    fake = fake_llama_server.install(tmp_path, {})
    flags = flags_for(Path("dies.gguf"), n_ctx=64, n_threads=None, drafter=None, n_max=None)
    with pytest.raises(OSError, match="it ended with 1: cannot load this model"):
        LlamaServer("it", str(fake.path), flags)


def test_a_request_that_fails_stops_the_comparison_and_the_server(
    bench: Bench, pair: list[str], tmp_path: Path
) -> None:
    fake = fake_llama_server.install(tmp_path, {})
    code, report, err = bench(*pair, "--llama-server", str(fake.path))
    assert (code, report) == (1, {})
    assert "/completion answered 500: " in err.splitlines()[-1]
    assert "no such prompt" in err
    assert not any(psutil.pid_exists(each["pid"]) for each in fake.asked() if "pid" in each)


# ---------------------------------------------------------------- who runs when


class Scripted:
    """A program that says what ours says, and notes when."""

    clock = "told"

    def __init__(self, name: str, ran: list[str], script: Script = letters) -> None:
        self.name = name
        self.about: dict[str, Any] = {}
        self._ran = ran
        self._script = script

    def reply(self, question: Question, params: SamplingParams) -> Reply:
        self._ran.append(self.name)
        ids = reply_to(question.token_ids, self._script, params.max_tokens or 0)
        return Reply(
            text=bytes(ids).decode(),
            token_ids=ids,
            n_decoded=len(ids) - 1,
            n_rounds=None,
            ttft_s=0.1,
            decode_s=0.1,
        )

    def close(self) -> None:
        self._ran.append(f"{self.name} closed")


def with_programs(patch: pytest.MonkeyPatch, ran: list[str], scripts: dict[str, Script]) -> None:
    def open_one(name: str, script: Script) -> Any:
        return lambda tokenize: Scripted(name, ran, script)

    openers = {name: open_one(name, script) for name, script in scripts.items()}
    patch.setattr(compare, "choose_programs", lambda args, setup: openers)


def test_all_take_turns_at_each_prompt_and_warm_up_apart(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a slow minute of the machine hits one program alone."""
    with_programs(monkeypatch, bench.ran, {"b": letters, "c": letters})
    code, report, _ = bench()
    assert code == 0
    turn = ["plain", "auto", "b", "c"]
    n_turns = 1 + 2 * len(TEXTS)  # the warm-up, and two repeats
    assert bench.ran == turn * n_turns + ["c closed", "b closed"]
    assert row(report, "b")["n_tokens"] == len(TEXTS) * (N_TOKENS - 1)  # without the warm-up
    assert row(report, "b")["tau"] is None  # it tells no passes


# ---------------------------------------------------------------- texts


def off_at(position: int, token: int) -> Script:
    """Letters, but this token at a position of the reply to the second prompt."""
    prompt = spelled(TEXTS[1])

    def script(before: Sequence[int]) -> int:
        is_there = len(before) == len(prompt) + position and list(before[: len(prompt)]) == prompt
        return token if is_there else letters(before)

    return script


def test_where_another_program_leaves_our_text_is_told_and_does_not_fail(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_programs(monkeypatch, bench.ran, {"b": off_at(3, ord("!"))})
    code, report, err = bench()
    assert code == 0
    assert report["same_text"] is True  # of our own modes
    (found,) = report["differences"]
    assert (found["modes"], found["prompt"], found["position"]) == (["plain", "b"], 2, 3)
    assert found["token_ids"][1] == ord("!")
    # The scripted lead of a token is 1 and the length of the text before it.
    margin = 1.0 + len(TEXTS[1]) + 3
    assert found["min_margin"] == margin
    texts = row(report, "b")["texts"]
    assert texts == {
        "n_replies": 4,
        "n_same": 2,
        "n_tied": 0,
        "n_other": 2,
        "widest_margin": margin,
    }
    assert row(report, "auto")["texts"]["n_same"] == 4
    assert "b differs from plain at token 3" in err


def test_our_own_modes_must_agree(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    with_programs(monkeypatch, bench.ran, {"b": letters})
    bench.scripts["auto"] = off_at(5, ord("!"))
    code, report, err = bench()
    assert code == 1
    assert report["is_failed"] is True
    assert row(report, "b")["texts"]["n_same"] == 4
    assert "OUR OWN TEXTS DIFFER" in err


def test_sampled_texts_of_other_programs_are_not_compared(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has noise of its own: a difference would mean nothing."""
    with_programs(monkeypatch, bench.ran, {"b": off_at(3, ord("!"))})
    code, report, _ = bench("--temperature", "1")
    assert code == 0
    assert report["differences"] == []
    assert row(report, "b")["texts"] is None
    assert row(report, "auto")["texts"]["n_same"] == 4


def one_byte(token: int) -> bytes:
    return b"" if token == END else bytes([token])


def text_only(text: str) -> Reply:
    return Reply(text=text, token_ids=None, n_decoded=1, n_rounds=None, ttft_s=1, decode_s=1)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("abc", [*b"abc", END]),  # the same text: then the end token was there too
        ("abX", [*b"ab", 1, 1]),  # ours as far as it agrees, then as our tokenizer cuts it
        ("ab", [*b"ab"]),
        ("abcd", [*b"abc", 1, 1]),
        ("abc\N{REPLACEMENT CHARACTER}", [*b"abc", END]),  # a character that was cut
    ],
)
def test_a_text_is_cut_like_ours_as_far_as_it_is_ours(text: str, ids: list[int]) -> None:
    """Else another cut of the same text would count as another text."""
    ours = [*b"abc", END]
    cut = ids_beside(ours, text_only(text), one_byte, lambda rest: [1, 1] if rest else [])
    assert cut == ids


# ---------------------------------------------------------------- any URL


def test_a_url_is_asked_for_a_stream_and_counted(bench: Bench, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")

    def pieces(message: str) -> list[str]:
        text = bytes(reply_to(spelled(message))).decode()
        return [text[:2], text[2:7], text[7:]]

    with fake_openai.serve(pieces) as fake:
        fake.usage = {"completion_tokens": N_TOKENS}
        code, report, _ = bench("--url", fake.url, "--api-key-file", str(key))
    assert code == 0
    line = row(report, fake.url)
    assert line["texts"]["n_same"] == line["texts"]["n_replies"] == 4
    assert line["clock"] == "arrival"
    assert line["n_tokens"] == len(TEXTS) * (N_TOKENS - 2)  # two came with the first piece
    assert line["tau"] is None
    assert report["programs"][fake.url] == {"url": fake.url, "model": "a-model"}
    body = fake.bodies[-1]
    assert body["messages"] == [{"role": "user", "content": TEXTS[1]}]
    assert (body["model"], body["temperature"], body["stream"]) == ("a-model", 0.0, True)
    assert set(fake.keys) == {"Bearer secret"}


def count(text: str) -> list[int]:
    return spelled(text)


def test_timings_in_a_stream_tell_the_rounds() -> None:
    with fake_openai.serve(lambda _: ["a", "b", "c", "d", "e"]) as fake:
        fake.timings = {"predicted_n": 5, "draft_n": 6, "draft_n_accepted": 2}
        reply = OpenAIUrl(fake.url, count).reply(Question("hi", []), PARAMS)
    assert (reply.text, reply.n_decoded, reply.n_rounds) == ("abcde", 4, 2)
    assert reply.ttft_s > 0
    assert reply.decode_s >= 0


def test_failures_of_a_url_name_it() -> None:
    with fake_openai.serve(lambda _: []) as fake:
        program = OpenAIUrl(fake.url, count)
        with pytest.raises(ValueError, match=f"{fake.url} answered nothing to 'hi'"):
            program.reply(Question("hi", []), PARAMS)
        fake.is_json = False
        with pytest.raises(ValueError, match=r"chat/completions answered no JSON object: ' <html>"):
            program.reply(Question("hi", []), PARAMS)
        fake.is_json = True
        fake.error = "out of cake"
        with pytest.raises(ValueError, match="out of cake"):
            program.reply(Question("hi", []), PARAMS)
        fake.status = 401
        with pytest.raises(OSError, match=r"chat/completions answered 401: .*not today"):
            program.reply(Question("hi", []), PARAMS)
    with pytest.raises(OSError, match=f"{fake.url}/models gave no answer"):
        OpenAIUrl(fake.url, count)


# ---------------------------------------------------------------- llama-cpp-python


@pytest.mark.parametrize("n_lookup", [None, 2])
def test_llama_cpp_python_gets_our_prompt_and_gives_our_tokens(
    n_lookup: int | None, tiny_llama: Path, tmp_path: Path
) -> None:
    setup = Setup(target=str(tiny_llama), drafter="auto", n_ctx=256, n_threads=1)
    question = Question("", [token_id("<|bos|>"), *b"then he said the one on the one on the one"])
    params = SamplingParams(max_tokens=24, temperature=0.0, seed=5)
    with Engine(tiny_llama, drafter=None, n_ctx=256, n_seq=1, n_threads=1) as engine:
        ours = run_group(engine, [question.token_ids], [params]).replies[0]
    program = LlamaCppPython("it", setup, n_lookup=n_lookup, flash_attn=True)
    try:
        replies = [program.reply(question, params) for _ in range(2)]
    finally:
        program.close()
    for reply in replies:
        assert reply.token_ids == ours
        assert reply.n_rounds is not None
        assert 0 < reply.n_rounds <= reply.n_decoded
        assert (reply.n_rounds == reply.n_decoded) is (n_lookup is None)
        assert reply.decode_s > 0 < reply.ttft_s
    # Were the prompt found in the cache, the repeat would count fewer passes.
    assert replies[0].n_rounds == replies[1].n_rounds


def test_a_tiny_pair_is_compared_with_all_of_llama_cpp_python(
    tiny_llama: Path,
    tiny_drafter: Path,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "report.json"
    code = main(
        f"compare --target {tiny_llama} --drafter {tiny_drafter} --prompts {prompts} "
        f"--max-tokens {N_TOKENS} --repeats 1 --n-ctx 128 --threads 1 --cost-cache {tmp_path} "
        f"--json {file}".split()
    )
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 0
    assert json.loads(file.read_text()) == report
    names = ["plain", "auto", *OF_LLAMA_CPP_PYTHON]
    assert [line["mode"] for line in report["modes"]] == names
    assert report["programs"].keys() == set(names)
    for line in report["modes"]:
        assert line["texts"]["n_same"] == line["texts"]["n_replies"] == 2
        assert line["decode_tps"] > 0 < line["ttft_s"]
    assert row(report, "plain")["tau"] == row(report, "llama-cpp-python")["tau"] == 1.0
    assert report["programs"]["auto"]["speculation"]


# ---------------------------------------------------------------- bad arguments


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--llama-server nowhere/llama-server", "nowhere/llama-server is no program"),
        ("--url 127.0.0.1:8080", "http://127.0.0.1:8080/v1"),
        ("--skip ollama", "'ollama'"),
        ("--modes plain,warp", "'warp'"),
        ("--repeats 0", "--repeats is 0"),
        ("--url http://127.0.0.1:9/v1 --api-key-file nowhere", "nowhere"),
    ],
)
def test_bad_arguments_are_refused_in_one_line_before_anything_runs(
    arguments: str, says: str, bench: Bench
) -> None:
    code, report, err = bench(*arguments.split())
    assert (code, report) == (1, {})
    assert says in err
    assert err.count("\n") == 1
    assert bench.ran == []
