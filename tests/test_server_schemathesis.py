"""Requests made up from the server's own OpenAPI document: none may end in a 500."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from server_harness import TINY, WAIT_S, Running, running, tiny_settings

ROUTES = [
    ("POST", "/v1/chat/completions", 60),
    ("POST", "/v1/completions", 60),
    ("POST", "/tokenize", 20),
    ("POST", "/detokenize", 20),
    ("POST", "/apply-template", 40),
    ("GET", "/v1/models/{model}", 20),
]


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[Running]:
    # Replies end with the context at the latest, so a short one keeps this quick.
    with running(tiny_settings(tiny_llama, engine=replace(TINY, n_ctx=64))) as server:
        yield server


@pytest.mark.parametrize(("method", "path", "n"), ROUTES, ids=[route[1] for route in ROUTES])
def test_no_made_up_request_ends_in_a_500(server: Running, method: str, path: str, n: int) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operation = schema[path][method]
    valid = operation.as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE)
    wrong = operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE)

    @settings(
        max_examples=n,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.one_of(valid, wrong))
    def every_case(case: schemathesis.Case) -> None:
        response = case.call(base_url=server.url, timeout=WAIT_S)
        case.validate_response(response, checks=[not_a_server_error])

    every_case()
    assert server.chat(max_tokens=2).status_code == 200
