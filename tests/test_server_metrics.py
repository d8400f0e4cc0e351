"""/metrics by name: each moves as what it stands for does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fake_decoder import Machine, engine_on
from prometheus_client.parser import text_string_to_metric_families
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
from tiny_models import token_id

from dspark_edge import Engine
from dspark_edge.loading import Progress
from dspark_edge.server.settings import EngineOptions

COUNTERS = (
    *(
        "requests",
        "responses",
        "prompt_tokens",
        "reused_tokens",
        "tokens",
        "rounds",
        "drafted_tokens",
    ),
    *("verified_tokens", "accepted_tokens", "decode_seconds", "parked_seconds"),
)
HISTOGRAMS = ("verify_len", "ttft_seconds")
GAUGES = (
    *("requests_running", "requests_waiting", "parked", "tau", "model_loaded"),
    *("memory_pressure", "pressure"),
)
Values = dict[tuple[str, str], float]


def metrics_of(server: Running) -> Values:
    """(name without dspark_, label's value or "") to the value."""
    return {
        (sample.name.removeprefix("dspark_"), next(iter(sample.labels.values()), "")): sample.value
        for family in text_string_to_metric_families(server.get("/metrics").text)
        for sample in family.samples
    }


def wait_until(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < until_s
        threading.Event().wait(0.02)


@pytest.fixture
def server(tiny_llama: Path) -> Iterator[Running]:
    """Says "hello world" and has a drafter of 4 that is always right."""
    with running(tiny_settings(tiny_llama), scripted(answering("hello world"))) as server:
        yield server


def test_no_metric_is_left_untested_here(server: Running) -> None:
    families = {
        family.name: family.type
        for family in text_string_to_metric_families(server.get("/metrics").text)
    }
    assert families == {
        **{f"dspark_{name}": "counter" for name in COUNTERS},
        **{f"dspark_{name}": "histogram" for name in HISTOGRAMS},
        **{f"dspark_{name}": "gauge" for name in GAUGES},
    }


def test_counters_are_the_sums_of_what_replies_told(server: Running) -> None:
    before = metrics_of(server)
    assert before["tokens_total", ""] == 0
    stats = [server.chat("a" * 60).json()["x_dspark"]["stats"][0] for _ in range(2)]
    after = metrics_of(server)
    for metric, figure in (
        ("prompt_tokens_total", "n_prompt"),
        ("reused_tokens_total", "n_reused"),
        ("tokens_total", "n_tokens"),
        ("rounds_total", "n_rounds"),
        ("drafted_tokens_total", "n_drafted"),
        ("verified_tokens_total", "n_verified"),
        ("accepted_tokens_total", "n_accepted"),
    ):
        assert after[metric, ""] == sum(each[figure] for each in stats), metric
        assert after[metric, ""] > 0, metric
    took_s = sum(each["decode_s"] for each in stats)
    assert after["decode_seconds_total", ""] == pytest.approx(took_s, abs=1e-3)
    assert after["requests_total", "ok"] == 2


def test_refusals_are_counted_by_status(server: Running) -> None:
    """requests has only those that could be read: a client that errs each time would go unseen."""
    for headers, fields in (({}, {"nonsense": 1}), ({"Host": "evil.example"}, {}), ({}, {})):
        body = {"messages": [{"role": "user", "content": "hi"}], **fields}
        server.post("/v1/chat/completions", body, **headers)
    after = metrics_of(server)
    assert [after["responses_total", status] for status in ("200", "403", "422")] == [1, 1, 1]
    assert after["requests_total", "ok"] == 1


def test_tau_is_tokens_per_round(server: Running) -> None:
    assert metrics_of(server)["tau", ""] == 0
    stats = server.chat("hi").json()["x_dspark"]["stats"][0]
    # 11 characters and the end token, five at a time.
    assert (stats["n_tokens"], stats["n_rounds"]) == (12, 3)
    assert metrics_of(server)["tau", ""] == 4.0


def test_the_histogram_of_verified_lengths_counts_rounds(server: Running) -> None:
    stats = server.chat("hi", max_tokens=8).json()["x_dspark"]["stats"][0]
    after = metrics_of(server)
    assert after["verify_len_count", ""] == stats["n_rounds"] == 2
    assert after["verify_len_sum", ""] == stats["n_verified"]
    assert after["verify_len_bucket", "+Inf"] == 2
    assert after["verify_len_bucket", "4.0"] == 2
    assert after["verify_len_bucket", "1.0"] == 0


def test_time_to_the_first_token_falls_into_its_bucket(tiny_llama: Path) -> None:
    make = scripted(answering("hello"), after=lambda: threading.Event().wait(0.6) and None)
    with running(tiny_settings(tiny_llama), make) as server:
        assert metrics_of(server)["ttft_seconds_count", ""] == 0
        stats = [server.chat("hi").json()["x_dspark"]["stats"][0] for _ in range(2)]
        after = metrics_of(server)
    assert after["ttft_seconds_count", ""] == after["ttft_seconds_bucket", "+Inf"] == 2
    told_s = sum(each["ttft_s"] for each in stats)
    assert after["ttft_seconds_sum", ""] == pytest.approx(told_s, abs=1e-3)
    for bound in ("0.5", "1.0", "2.0", "5.0", "10.0", "60.0"):
        n_below = sum(each["ttft_s"] <= float(bound) for each in stats)
        assert after["ttft_seconds_bucket", bound] == n_below
    assert after["ttft_seconds_bucket", "0.5"] == 0


def test_the_queue_is_told_while_it_lasts(tiny_llama: Path) -> None:
    gate = threading.Semaphore(0)
    make = scripted(answering("x" * 20), after=lambda: gate.acquire(timeout=WAIT_S) and None)
    settings = tiny_settings(tiny_llama, engine=replace(TINY, n_seq=2), max_queue=1)
    with running(settings, make) as server:
        before = metrics_of(server)
        threads = [threading.Thread(target=server.chat) for _ in range(3)]
        for thread in threads:
            thread.start()
        wait_until(lambda: server.hub.n_requests == 3)
        assert server.chat().status_code == 429
        during = metrics_of(server)
        gate.release(1000)
        for thread in threads:
            thread.join(WAIT_S)
        wait_until(lambda: not server.hub.n_requests)
        after = metrics_of(server)
    running_and_waiting = [
        (each["requests_running", ""], each["requests_waiting", ""])
        for each in (before, during, after)
    ]
    assert running_and_waiting == [(0, 0), (2, 1), (0, 0)]
    assert (before["model_loaded", ""], after["model_loaded", ""]) == (0, 1)
    assert (after["requests_total", "429"], after["requests_total", "ok"]) == (1, 3)
    assert 0.0 < after["memory_pressure", ""] < 1.0


def test_pressure_and_parked_time_are_told(tiny_llama: Path) -> None:
    machine = Machine()

    def run_short() -> None:
        machine.free_mb = 100.0  # scarce
        machine.now_s += 1.0
        threading.Event().wait(0.05)

    def make(path: Path, options: EngineOptions, progress: Progress) -> Engine:
        decoder = ScriptedDecoder(
            answering("x" * 40), n_vocab=1000, eog_tokens=[token_id("<|eos|>")], in_memory=set()
        )
        decoder.after = run_short
        # Lookup, which stays parked; a drafter would be released next.
        return engine_on(decoder, proposer="lookup", machine=machine)

    with running(tiny_settings(tiny_llama), make) as server:
        before = metrics_of(server)
        decode_s = server.chat().json()["x_dspark"]["stats"][0]["decode_s"]
        after = metrics_of(server)
    for step in ("shorten", "park", "refuse"):
        assert (before["pressure", step], after["pressure", step]) == (0, 1), step
    for step in ("release_context", "release_weights", "raise_bar"):
        assert after["pressure", step] == 0, step
    assert (before["parked", ""], after["parked", ""]) == (0, 1)
    assert before["parked_seconds_total", ""] == 0
    assert 0.0 < after["parked_seconds_total", ""] < decode_s
