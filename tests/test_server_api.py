"""The API on a tiny pair and on scripted targets, over real sockets."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_decoder import Machine, engine_on
from server_harness import (
    TINY,
    WAIT_S,
    Running,
    ScriptedDecoder,
    answering,
    running,
    scripted,
    tiny_settings,
)
from tiny_models import TargetSpec, token_id, write_llama

from dspark_edge import Engine, SamplingParams
from dspark_edge.loading import Progress
from dspark_edge.server.settings import EngineOptions, Limits


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[Running]:
    with running(tiny_settings(tiny_llama)) as server:
        yield server


def events_of(server: Running, body: dict[str, Any]) -> list[Any]:
    """The objects of a stream, "[DONE]" at its end."""
    found: list[Any] = []
    with (
        server.client() as client,
        client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response,
    ):
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if line:
                data = line.removeprefix("data: ")
                found.append(data if data == "[DONE]" else json.loads(data))
    return found


def question(text: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_a_reply_is_the_engines_own(server: Running, tiny_llama: Path) -> None:
    with Engine(tiny_llama, drafter=None, n_ctx=512, n_threads=1) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=20)
        messages = [{"role": "user", "content": "hi"}]
        expected = "".join(chunk.text for chunk in engine.chat(messages, params))
    answer = server.chat(max_tokens=20).json()
    assert answer["choices"][0]["message"]["content"] == expected
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 20
    assert answer["x_dspark"]["stats"][0]["n_tokens"] == 20


def test_a_stream_says_the_same_as_a_whole_reply(server: Running) -> None:
    body = question("tell me", max_tokens=24, stream_options={"include_usage": True})
    events = events_of(server, body)
    assert events[-1] == "[DONE]"
    assert events[-2]["usage"]["completion_tokens"] == 24
    assert events[-2]["choices"] == []
    deltas = [event["choices"][0]["delta"] for event in events[:-2]]
    assert deltas[0]["role"] == "assistant"
    text = "".join(delta.get("content", "") for delta in deltas)
    del body["stream_options"]
    whole = server.post("/v1/chat/completions", body).json()
    assert text == whole["choices"][0]["message"]["content"]
    assert [e["choices"][0]["finish_reason"] for e in events[:-2]][-1] == "length"


def test_every_token_of_a_stream_is_told_once(server: Running) -> None:
    body = question(max_tokens=16, stream_options={"include_pieces": True})
    extras = [event["x_dspark"] for event in events_of(server, body)[:-1]]
    assert sum(extra["n_tokens"] for extra in extras) == 16
    assert sum(len(extra["pieces"]) for extra in extras) == 16
    assert extras[-1]["stats"]["n_tokens"] == 16


def test_drafted_tokens_are_marked_in_a_stream(tiny_llama: Path) -> None:
    with running(tiny_settings(tiny_llama), scripted(answering("hello world"))) as server:
        body = question(stream_options={"include_pieces": True})
        pieces = [p for event in events_of(server, body)[:-1] for p in event["x_dspark"]["pieces"]]
    assert "".join(text for text, _ in pieces) == "hello world"
    assert sum(is_drafted for _, is_drafted in pieces) > 5  # the script's drafter is always right


def test_several_choices_have_seeds_that_count_up(server: Running) -> None:
    fields = {"n": 3, "seed": 7, "temperature": 1.5, "max_tokens": 12}
    answer = server.chat(**fields).json()
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert len(set(texts)) == 3
    assert [stats["seed"] for stats in answer["x_dspark"]["stats"]] == [7, 8, 9]
    alone = server.chat(**{**fields, "n": 1, "seed": 8}).json()
    assert alone["choices"][0]["message"]["content"] == texts[1]
    assert answer["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]


def test_logprobs_come_with_each_token(server: Running) -> None:
    answer = server.chat(max_tokens=5, logprobs=True, top_logprobs=3).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == 5
    for token in content:
        assert token["logprob"] == pytest.approx(token["top_logprobs"][0]["logprob"])  # greedy
        assert len(token["top_logprobs"]) == 3
        assert bytes(token["bytes"]).decode("utf-8", "replace") == token["token"]


def test_a_stop_string_is_not_shown(tiny_llama: Path) -> None:
    with running(tiny_settings(tiny_llama), scripted(answering("one two three"))) as server:
        answer = server.chat(stop=["thr", "two t"]).json()
    assert answer["choices"][0]["message"]["content"] == "one "
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_a_bias_decides(server: Running) -> None:
    token = server.post("/tokenize", {"content": "z"}).json()["tokens"][0]
    answer = server.chat(max_tokens=4, logit_bias={str(token): 100}).json()
    assert answer["choices"][0]["message"]["content"] == "zzzz"


def test_completions_take_texts_and_ids(server: Running) -> None:
    ids = server.post("/tokenize", {"content": "the he", "add_special": True}).json()["tokens"]
    body = {"temperature": 0, "max_tokens": 6, "logprobs": 2}
    both = server.post("/v1/completions", {"prompt": ["the he", "of"], **body}).json()
    one = server.post("/v1/completions", {"prompt": ids, **body}).json()
    assert both["choices"][0]["text"] == one["choices"][0]["text"]
    assert [choice["index"] for choice in both["choices"]] == [0, 1]
    logprobs = one["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == 6
    assert logprobs["text_offset"][0] == 0
    body = {"prompt": "the he", "echo": True, "max_tokens": 6, "temperature": 0}
    echoed = server.post("/v1/completions", body).json()
    assert echoed["choices"][0]["text"] == "the he" + one["choices"][0]["text"]


def test_a_conversation_that_returns_is_not_evaluated_again(server: Running) -> None:
    first = question("a long story about " + "the sea and " * 8, max_tokens=8)
    reply = server.post("/v1/chat/completions", first).json()
    said = reply["choices"][0]["message"]
    n_known = reply["usage"]["total_tokens"]
    for _ in range(3):
        server.chat("something else", max_tokens=4)  # on other slots
    again = [*first["messages"], {"role": said["role"], "content": said["content"]}]
    body = question(max_tokens=4) | {"messages": [*again, {"role": "user", "content": "more"}]}
    usage = server.post("/v1/chat/completions", body).json()["usage"]
    # The reply's bytes may be tokenised in another way when they come back as text.
    n_prompt = reply["usage"]["prompt_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= n_prompt
    assert usage["prompt_tokens"] > n_known - 8


def test_text_routes_agree_with_each_other(server: Running) -> None:
    prompt = server.post("/apply-template", {"messages": question("hé")["messages"]}).json()
    assert prompt == {"prompt": "<|bos|><|user|>hé<|end|><|assistant|>"}
    tokens = server.post("/tokenize", {"content": prompt["prompt"]}).json()["tokens"]
    text = server.post("/detokenize", {"tokens": tokens}).json()["content"]
    assert text == prompt["prompt"]
    usage = server.chat("hé", max_tokens=1).json()["usage"]
    assert usage["prompt_tokens"] == len(tokens)


def test_health_stats_and_metrics_count_the_same(server: Running) -> None:
    server.chat(max_tokens=9)
    health = server.get("/health").json()
    assert (health["status"], health["model"]) == ("ready", "llama")
    assert health["speculation"]["state"] == "off"
    assert "no drafter was asked for" in health["speculation"]["reason"]
    assert health["memory"]["target_model_bytes"] > 100_000
    stats = server.get("/stats").json()
    assert stats["n_tokens"] >= 9
    assert sum(stats["verify_lens"].values()) == stats["n_rounds"]
    assert stats["plain_tps"]["1"] > 0
    metrics = server.get("/metrics").text
    assert f"dspark_tokens_total {float(stats['n_tokens'])}" in metrics
    assert f'dspark_verify_len_bucket{{le="+Inf"}} {float(stats["n_rounds"])}' in metrics
    assert "dspark_ttft_seconds_count" in metrics


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"temperatur": 1}, 422, "temperatur"),
        ({"temperature": "hot"}, 422, "temperature"),
        ({"temperature": -1}, 422, "temperature"),
        ({"n": 0}, 422, "n"),
        ({"n": 99}, 400, "n"),
        ({"max_tokens": 0}, 422, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, 400, "max_tokens"),
        ({"top_logprobs": 3}, 400, "top_logprobs"),
        ({"stop": ["a"] * 99}, 400, "stop"),
        ({"stop": "a" * 999}, 400, "stop"),
        ({"logit_bias": {"x": 1}}, 400, "logit_bias"),
        ({"functions": []}, 422, "functions"),
        ({"grammar": 'root ::= "a"'}, 422, "grammar"),
        ({"store": True}, 422, "store"),
        ({"tools": [], "tool_choice": "required"}, 400, "tool_choice"),
        ({"reasoning_effort": "high"}, 400, "reasoning_effort"),
        ({"chat_template_kwargs": {"messages": "x"}}, 400, "chat_template_kwargs"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
        ({"response_format": {"type": "xml"}}, 422, "response_format"),
        ({"messages": []}, 422, "messages"),
        ({"model": "gpt-9"}, 404, "model"),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            400,
            "tools",
        ),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(
    server: Running, fields: dict[str, Any], status: int, param: str
) -> None:
    response = server.post("/v1/chat/completions", question() | fields)
    assert response.status_code == status, response.text
    assert error_of(response)["param"] == param


CALLED = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("message", "param", "code", "words"),
    [
        ({"role": "user", "content": None}, "content", "missing_required_parameter", "missing"),
        ({"role": "user"}, "content", "missing_required_parameter", "missing"),
        ({"role": "assistant"}, "content", "missing_required_parameter", "tool_calls"),
        ({"role": "user", "content": []}, "content", "missing_required_parameter", "empty list"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            *("content", "unsupported_content", "'image_url'"),
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_audio"}]},
            *("content", "unsupported_content", "part 1"),
        ),
        (
            {"role": "user", "content": [{"type": "text"}]},
            *("content[0].text", "missing_required_parameter", "missing"),
        ),
        ({"role": "user", "content": 5}, "content", "invalid_type", "string"),
        ({"role": "boss", "content": "x"}, "role", "invalid_value", "user"),
        (
            {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
            *("tool_calls[0].function.arguments", "missing_required_parameter", "missing"),
        ),
    ],
)
def test_a_message_that_cannot_be_read_is_refused_by_name(
    server: Running, message: dict[str, Any], param: str, code: str, words: str
) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}, message], "max_tokens": 1}
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 422
    error = error_of(response)
    assert (error["param"], error["code"]) == (f"messages[1].{param}", code)
    assert words in error["message"]


def test_text_parts_are_joined_and_a_call_needs_no_content(server: Running) -> None:
    parts = [{"type": "text", "text": "hé"}, {"type": "text", "text": "llo"}]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [CALLED]},
        {"role": "tool", "content": "", "tool_call_id": "1"},
    ]
    prompt = server.post("/apply-template", {"messages": messages}).json()["prompt"]
    assert prompt.startswith("<|bos|><|user|>héllo<|end|><|assistant|>")


@pytest.mark.parametrize(
    ("fields", "param", "code", "words"),
    [
        ({"temperature": -1}, "temperature", "decimal_below_min_value", "is -1; it must be at"),
        ({"top_p": 1.5}, "top_p", "decimal_above_max_value", "at most 1"),
        ({"repeat_penalty": 0}, "repeat_penalty", "decimal_below_min_value", "more than 0"),
        ({"n": 0}, "n", "integer_below_min_value", "at least 1"),
        ({"seed": 2**70}, "seed", "integer_above_max_value", "at most"),
        ({"max_tokens": 10**400}, "max_tokens", "integer_above_max_value", "at most"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "integer_above_max_value", "20"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "decimal_above_max_value", "100"),
        ({"max_tokens": 1.5}, "max_tokens", "invalid_type", "integer"),
        ({"temperature": True}, "temperature", "invalid_type", "number"),
        ({"messages": []}, "messages", "empty_array", "at least 1"),
        ({"stop": 5}, "stop", "invalid_type", "string"),
        ({"stop": ["a", ""]}, "stop", "invalid_value", "empty string"),
        ({"logit_bias": {"400000": 1}}, "logit_bias", "invalid_value", "400000"),
        ({"tool_choice": "any"}, "tool_choice", "invalid_value", "'required'"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            *("response_format.json_schema.schema", "missing_required_parameter", "missing"),
        ),
        ({"response_format": {}}, "response_format", "missing_required_parameter", "type"),
        ({"tempratur": 1}, "tempratur", "unknown_parameter", "leave it out"),
    ],
)
def test_an_error_names_its_parameter_its_kind_and_the_limit(
    server: Running, fields: dict[str, Any], param: str, code: str, words: str
) -> None:
    error = error_of(server.post("/v1/chat/completions", question() | fields))
    assert (error["param"], error["code"]) == (param, code)
    assert words in error["message"]
    assert len(error["message"]) < 300


@pytest.mark.parametrize(
    ("prompt", "code", "words"),
    [
        ("x y " * 400, "context_length_exceeded", "holds 512"),
        ([1] * 600, "context_length_exceeded", "600 tokens"),
        ([], None, "at least one"),
        ([[]], None, "at least one"),
        ([10**6], "invalid_value", "token 1000000"),
        ([-1], "integer_below_min_value", "at least 0"),
    ],
)
def test_a_prompt_that_cannot_be_continued_is_refused_by_name(
    server: Running, prompt: object, code: str | None, words: str
) -> None:
    response = server.post("/v1/completions", {"prompt": prompt})
    assert response.status_code in (400, 422)
    error = error_of(response)
    assert error["param"].startswith("prompt")
    assert words in error["message"]
    assert code in (None, error["code"])


def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers(server: Running) -> None:
    response = server.chat("x y " * 400)
    assert response.status_code == 400
    error = error_of(response)
    assert error["code"] == "context_length_exceeded"
    assert "512" in error["message"]
    n_tokens = len(server.post("/tokenize", {"content": "x y " * 400}).json()["tokens"])
    assert str(n_tokens + 4) in error["message"]


def test_a_dead_end_in_a_stream_is_its_last_event(tiny_llama: Path) -> None:
    make = scripted(answering("hello world, how are you"), dead_end=14)
    with running(tiny_settings(tiny_llama), make) as server:
        events = events_of(server, question())
        assert "no token is allowed" in events[-1]["error"]["message"]
        assert server.chat().status_code == 500


def test_an_engine_that_breaks_costs_its_requests_and_is_made_anew(tiny_llama: Path) -> None:
    n_made = 0

    def break_down() -> None:
        if n_made == 1:
            raise RuntimeError("secret prompt text")

    def make(path: Path, options: EngineOptions, progress: Progress) -> Engine:
        nonlocal n_made
        n_made += 1
        return scripted(answering("fine"), after=break_down)(path, options, progress)

    with running(tiny_settings(tiny_llama), make) as server:
        broken = server.chat()
        assert broken.status_code == 500
        assert "secret" not in broken.text
        again = server.chat().json()
    assert again["choices"][0]["message"]["content"] == "fine"
    assert n_made == 2


def test_an_engine_without_memory_says_so_and_when_to_come_back(tiny_llama: Path) -> None:
    machine = Machine()

    def run_short() -> None:
        machine.free_mb = 100.0  # scarce
        machine.now_s += 1.0

    def make(path: Path, options: EngineOptions, progress: Progress) -> Engine:
        end = token_id("<|eos|>")
        decoder = ScriptedDecoder(answering("x" * 40), n_vocab=1000, eog_tokens=[end])
        decoder.after = run_short
        return engine_on(decoder, machine=machine)

    with running(tiny_settings(tiny_llama), make) as server:
        assert server.chat("a" * 60).status_code == 200  # what runs goes on to its end
        refused = server.chat("b" * 60)
        health, metrics = server.get("/health").json(), server.get("/metrics").text
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert "free memory" in error_of(refused)["message"]
    assert "refuse" in [each["step"] for each in health["pressure"]]
    assert "new requests are refused" in health["pressure"][-1]["text"]
    assert 'dspark_pressure{step="refuse"} 1.0' in metrics
    assert 'dspark_pressure{step="raise_bar"} 0.0' in metrics
    assert "dspark_parked_seconds_total" in metrics


def test_a_full_queue_says_when_to_come_back(tiny_llama: Path) -> None:
    go_on = threading.Event()
    make = scripted(answering("x" * 50), after=lambda: go_on.wait(60) and None)
    settings = tiny_settings(tiny_llama, max_queue=0, engine=replace(TINY, n_seq=1))
    with running(settings, make) as server, server.client() as client:
        body = question(stream=True)
        with client.stream("POST", "/v1/chat/completions", json=body) as busy:
            refused = server.chat()
            go_on.set()
            busy.read()
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert error_of(refused)["code"] == "queue_full"
        assert server.chat().status_code == 200


def test_more_choices_than_can_ever_wait_are_no_matter_of_time(tiny_llama: Path) -> None:
    """A 429 with Retry-After would have the client ask for ever."""
    settings = tiny_settings(tiny_llama, max_queue=1, engine=replace(TINY, n_seq=1))
    with running(settings, scripted(answering("ok"))) as server:
        response = server.chat(n=3)
        assert response.status_code == 400
        assert "3 choices are more than the 2 that" in error_of(response)["message"]
        assert error_of(response)["param"] == "n"
        assert server.chat(n=2).status_code == 200


def test_a_client_that_leaves_ends_its_work_within_a_round(tiny_llama: Path) -> None:
    rounds = threading.Semaphore(0)  # one is taken for each round
    decoders: list[int] = []

    def wait() -> None:
        decoders.append(1)
        rounds.acquire(timeout=60)

    make = scripted(answering("x" * 400), after=wait)
    with running(tiny_settings(tiny_llama), make) as server:
        with (
            server.client() as client,
            client.stream("POST", "/v1/chat/completions", json=question(stream=True)) as response,
        ):
            rounds.release()
            next(response.iter_lines())
        poll = threading.Event()
        while server.hub.n_requests:  # the server has seen it
            poll.wait(0.01)
        n_before = len(decoders)
        for _ in range(50):
            rounds.release()
        assert server.get("/stats").json()["requests"] == {"cancelled": 1}
        assert len(decoders) <= n_before + 1


def test_a_new_request_joins_those_that_run_within_a_round(tiny_llama: Path) -> None:
    rounds = threading.Semaphore(0)  # one is taken for each round
    make = scripted(answering("x" * 400), after=lambda: rounds.acquire(timeout=60) and None)
    with running(tiny_settings(tiny_llama), make) as server, server.client() as client:
        long = client.stream("POST", "/v1/chat/completions", json=question(stream=True))
        with long as response:
            rounds.release()
            lines = response.iter_lines()
            next(lines)
            answers: list[httpx.Response] = []
            second = threading.Thread(target=lambda: answers.append(server.chat(max_tokens=3)))
            second.start()
            poll = threading.Event()
            while server.hub.n_jobs < 2:
                poll.wait(0.01)
            rounds.release(2)  # for the round under way, and one with both of them in it
            second.join(60)
            assert answers[0].json()["usage"]["completion_tokens"] == 3
            rounds.release(1000)
            assert [line for line in lines if line][-1] == "data: [DONE]"


def test_an_idle_model_is_unloaded_and_comes_back(tiny_llama: Path) -> None:
    with running(tiny_settings(tiny_llama, keep_alive_s=0.05)) as server:
        first = server.chat(max_tokens=5).json()
        poll = threading.Event()
        while server.get("/health").json()["status"] != "unloaded":
            poll.wait(0.02)
        assert server.post("/tokenize", {"content": "hi"}).json()["tokens"]
        again = server.chat(max_tokens=5).json()
    assert again["choices"][0]["message"] == first["choices"][0]["message"]


def test_a_model_whose_requester_left_while_it_loaded_is_unloaded_too(tiny_llama: Path) -> None:
    may_load, poll = threading.Event(), threading.Event()

    def make(path: Path, options: EngineOptions, progress: Progress) -> Engine:
        assert may_load.wait(WAIT_S)
        return scripted(answering("fine"))(path, options, progress)

    with running(tiny_settings(tiny_llama, keep_alive_s=0.05), make) as server:
        with server.client() as client, pytest.raises(httpx.ReadTimeout):
            client.post("/v1/chat/completions", json=question(), timeout=0.2)
        while server.hub.n_requests:
            poll.wait(0.02)
        may_load.set()
        while server.get("/health").json()["status"] != "unloaded":
            poll.wait(0.02)


def test_another_model_is_loaded_when_a_request_names_it(tmp_path: Path, tiny_llama: Path) -> None:
    write_llama(tmp_path / "second.gguf", TargetSpec(seed=9))
    (tmp_path / "dspark-second.gguf").write_bytes(b"a drafter, not a target")
    settings = tiny_settings(tiny_llama, models_dirs=(tmp_path,))
    with running(settings) as server:
        names = [model["id"] for model in server.get("/v1/models").json()["data"]]
        assert names[:2] == ["llama", "second"]  # then what the catalogue finds on this disk
        assert "dspark-second" not in names
        texts = [
            server.chat(model=name, max_tokens=12).json()["choices"][0]["message"]["content"]
            for name in ("llama", "second", "llama")
        ]
        assert texts[0] == texts[2] != texts[1]
        assert server.get("/health").json()["model"] == "llama"
        assert server.get("/v1/models/second").json()["id"] == "second"
        assert server.get("/v1/models/third").status_code == 404


def test_requests_for_two_models_at_once_are_all_answered(tmp_path: Path, tiny_llama: Path) -> None:
    write_llama(tmp_path / "second.gguf", TargetSpec(seed=9))
    with running(tiny_settings(tiny_llama, models_dirs=(tmp_path,))) as server:
        answers: list[tuple[int, str]] = []

        def ask(name: str) -> None:
            response = server.chat(model=name, max_tokens=6)
            answers.append((response.status_code, response.json()["model"]))

        names = ["llama", "second"] * 4
        threads = [threading.Thread(target=ask, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(answers) == sorted((200, name) for name in names)


def test_a_model_file_that_vanished_is_said_and_the_server_goes_on(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "here.gguf")
    with running(tiny_settings(path, keep_alive_s=0.05)) as server:
        assert server.chat(max_tokens=2).status_code == 200
        path.unlink()
        poll = threading.Event()
        while server.get("/health").json()["status"] != "unloaded":
            poll.wait(0.02)
        gone = server.chat(max_tokens=2)
        assert gone.status_code == 404
        assert "here.gguf is gone" in error_of(gone)["message"]
        write_llama(path)
        assert server.chat(max_tokens=2).status_code == 200


def test_a_file_that_is_no_model_fails_with_the_reason(tmp_path: Path, tiny_llama: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but not really")
    with running(tiny_settings(tiny_llama, models_dirs=(tmp_path,))) as server:
        response = server.chat(model="broken")
        assert response.status_code == 503
        assert "broken" in error_of(response)["message"]
        # An app that watches its server must not take it for dead: the default model is served.
        health = server.get("/health")
        assert (health.status_code, health.json()["status"]) == (200, "unloaded")
        assert "broken" in health.json()["failure"]
        assert server.chat(max_tokens=2).status_code == 200
        assert "failure" not in server.get("/health").json()


def test_a_default_model_that_cannot_be_loaded_any_more_is_a_failure(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "here.gguf")
    with running(tiny_settings(path)) as server:
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        assert server.chat().status_code == 503
        health = server.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "failed")
        path.write_bytes(whole)
        assert server.chat(max_tokens=2).status_code == 200
        assert server.get("/health").status_code == 200


def test_a_slow_grammar_is_ended(tiny_llama: Path) -> None:
    def burn() -> None:
        total = 0
        for i in range(200_000):
            total += i

    settings = tiny_settings(tiny_llama, limits=Limits(grammar_s=0.001))
    with running(settings, scripted(answering("x" * 30), after=burn)) as server:
        response = server.chat(response_format={"type": "json_object"})
        assert response.status_code == 500
        assert "grammar took" in error_of(response)["message"]
        assert server.chat().status_code == 200


def test_a_grammar_is_not_blamed_for_all_its_rounds_when_a_step_is_slow(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu_s, rounds = [0.0], itertools.count(1)

    def round_ends() -> None:
        decoder.decode_s -= 0.3  # of the round, 0.3 s seem to be spent outside llama.cpp
        if next(rounds) == 5:
            cpu_s[0] += 2.0  # one slow step, e.g. somebody's prompt

    decoder = ScriptedDecoder(
        answering("x" * 60), n_vocab=1000, eog_tokens=[token_id("<|eos|>")], after=round_ends
    )
    monkeypatch.setattr(time, "thread_time", lambda: cpu_s[0])
    settings = tiny_settings(tiny_llama, limits=Limits(grammar_s=1.0))
    with running(settings, lambda *_: engine_on(decoder, "off", None)) as server:
        response = server.chat(response_format={"type": "json_object"})
    assert response.status_code == 200, error_of(response)["message"]
    assert next(rounds) > 6
