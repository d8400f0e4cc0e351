"""Sampling parameters over HTTP: each gives the text that the engine itself gives with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from server_harness import TINY, Running, running, tiny_settings
from tiny_models import DrafterSpec, TargetSpec, write_drafter, write_llama

from dspark_edge import Engine, SamplingParams

NOISE = 8e-3  # logits: draws closer than this may differ between pass widths
MESSAGES = [{"role": "user", "content": "the in of the in of"}]
BASE: dict[str, Any] = {"temperature": 1.2, "seed": 11, "max_tokens": 24}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    spec = TargetSpec(layer_gain=0.05)
    drafter = write_drafter(folder / "drafter.gguf", DrafterSpec(target=spec, mimic=True))
    return write_llama(folder / "target.gguf", spec), drafter


@pytest.fixture(scope="module")
def server(pair: tuple[Path, Path]) -> Iterator[Running]:
    engine = replace(TINY, drafter=str(pair[1]), speculation="always")
    with running(tiny_settings(pair[0], engine=engine)) as server:
        yield server


@pytest.fixture(scope="module")
def engine(pair: tuple[Path, Path]) -> Iterator[Engine]:
    """Without speculation: the text must not depend on it."""
    with Engine(pair[0], drafter=None, n_ctx=512, n_threads=1) as engine:
        yield engine


def own_text(engine: Engine, fields: dict[str, Any]) -> str:
    return "".join(chunk.text for chunk in engine.chat(MESSAGES, SamplingParams(**fields)))


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 3},
        {"top_p": 0.3},
        {"min_p": 0.2},
        {"frequency_penalty": 2.0},
        {"presence_penalty": 2.0},
        {"repeat_penalty": 3.0},
        {"repeat_penalty": 3.0, "penalty_last_n": 2},
        {"repeat_penalty": 3.0, "penalize_prompt": False},
        {"temperature": 0.4},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "frequency_penalty": 0.5},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_each_parameter_gives_the_engines_own_text(
    server: Running, engine: Engine, fields: dict[str, Any]
) -> None:
    for seed in range(11, 31):
        given = {**BASE, "seed": seed, **fields}
        expected = own_text(engine, given)
        answer = server.post("/v1/chat/completions", {"messages": MESSAGES, **given}).json()
        if answer["x_dspark"]["stats"][0]["min_margin"] <= NOISE:
            continue  # either text would be right
        assert answer["choices"][0]["message"]["content"] == expected
        if expected != own_text(engine, {**BASE, "seed": seed}):
            return  # so that a parameter which is lost would be seen
    raise AssertionError("no seed tells anything")


def test_a_bias_by_token_id_gives_the_engines_own_text(server: Running, engine: Engine) -> None:
    given = {**BASE, "temperature": 0.0}
    first = engine.tokenize(own_text(engine, given), add_special=False)[0]
    answer = server.post(
        "/v1/chat/completions", {"messages": MESSAGES, **given, "logit_bias": {str(first): -100}}
    ).json()
    text = answer["choices"][0]["message"]["content"]
    assert text == own_text(engine, {**given, "logit_bias": {first: -100.0}})
    assert text != own_text(engine, given)


def test_every_parameter_of_the_engine_can_be_given_over_http(server: Running) -> None:
    """One that is added there must be read here, or be left out on purpose."""
    schema = server.get("/openapi.json").json()["components"]["schemas"]
    fields = set(schema["ChatRequest"]["properties"])
    of_the_engine = set(SamplingParams.__dataclass_fields__)
    assert of_the_engine - fields == {"grammar", "json_schema"}  # come of response_format and tools
