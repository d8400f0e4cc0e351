"""bench server: who is asked when, what counts as speed, that another text fails, processes."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import psutil
import pytest
from serving import listening

from dspark_edge.bench import server
from dspark_edge.bench.__main__ import main
from dspark_edge.bench.http_client import HttpClient
from dspark_edge.bench.modes import Setup
from dspark_edge.bench.our_server import OurServer, command_of
from dspark_edge.bench.run import WARM_UP_TOKENS
from dspark_edge.bench.server_clients import Answer, Batch, run_batch
from dspark_edge.bench.server_rows import Place, rows_of

TEXTS = ("then he said", "on the one hand", "a third text")
WAIT_S = 60.0  # the machine may stand still for a while


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    return path


def answer(
    *arrivals: tuple[float, int], asked_at: float = 0.0, text: str = "", n_rounds: int = 1
) -> Answer:
    n_tokens = sum(n for _, n in arrivals)
    stats = {"n_tokens": n_tokens, "n_rounds": n_rounds, "n_prompt": 10, "n_reused": 2}
    return Answer(asked_at, text, list(arrivals), stats)


# ---------------------------------------------------------------- the whole command


def test_a_tiny_pair_is_served_with_speculation_and_without(
    tiny_llama: Path,
    tiny_drafter: Path,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "report.json"
    code = main(
        f"server --target {tiny_llama} --drafter {tiny_drafter} --prompts {prompts} --clients 1,2 "
        f"--max-tokens 8 --repeats 2 --n-ctx 256 --threads 1 --json {file}".split()
    )
    shown = capsys.readouterr()
    report = json.loads(shown.out.splitlines()[-1])
    assert code == 0, "the servers gave other texts"
    assert json.loads(file.read_text()) == report
    assert (report["target"], report["drafter"]) == (tiny_llama.name, tiny_drafter.name)
    assert report["same_text"] is True
    assert report.keys() >= {"busy", "machine", "prompts", "settings", "idle_share"}
    places = [(line["clients"], line["mode"]) for line in report["modes"]]
    assert places == [(1, "plain"), (1, "auto"), (2, "plain"), (2, "auto")]
    # Two clients have two prompts each: the first one again, so that both are busy to the end.
    assert [line["n_requests"] for line in report["modes"]] == [3, 3, 4, 4]
    for line in report["modes"]:
        assert line["n_tokens"] <= 8 * line["n_requests"]
        assert line["total_tps"] > 0 < line["ttft_s"] <= line["ttft_p95_s"]
        assert len(line["ratio_to_plain_by_repeat"]) == 2
        # What all prompts begin with may be found in the cache, no prompt of an earlier repeat.
        assert line["reused_share"] < 0.5
    states = [
        report["servers"][mode]["health"]["speculation"]["state"] for mode in ("plain", "auto")
    ]
    assert states[0] == "off" != states[1]
    left = [c for c in psutil.Process().children() if "dspark_edge.server" in c.cmdline()]
    assert left == []
    assert main(["tables", str(file)]) == 0
    assert f"| 2 | auto | {report['modes'][3]['total_tps']:.1f} |" in capsys.readouterr().out


def test_a_server_that_cannot_load_says_why(tmp_path: Path) -> None:
    setup = Setup(target=str(tmp_path / "no.gguf"), drafter="auto", n_ctx=256, n_threads=1)
    with pytest.raises(OSError, match=r"our server \(plain\) ended with 1: .*no\.gguf"):
        OurServer("plain", command_of(setup, "off", 1), 1)


# ---------------------------------------------------------------- who is asked when


class Servers:
    """Stands in for both servers. says: by server, a reply other than the message. lead: of it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.did: list[tuple[Any, ...]] = []
        self.says: dict[str, str] = {}
        self.lead = 3.0
        patch.setattr(server, "OurServer", self._open)
        patch.setattr(server, "run_batch", self._run_batch)

    def _open(self, name: str, command: list[str], n_parallel: int) -> Any:
        self.did.append(("open", name, n_parallel))
        return FakeServer(name, self)

    def _run_batch(self, client: Any, bodies: Sequence[Mapping[str, Any]], n: int) -> Batch:
        self.did.append(("ask", client.name, n, [body["max_tokens"] for body in bodies]))
        texts = [body["messages"][0]["content"] for body in bodies]
        said = [self.says.get(client.name, text) if text == TEXTS[1] else text for text in texts]
        answers = [answer((1.0, 1), (2.0, 3), text=text) for text in said]
        return Batch(answers, [answers])


class FakeServer:
    def __init__(self, name: str, servers: Servers) -> None:
        self.name = name
        self.client = self
        self._servers = servers

    def health(self) -> dict[str, Any]:
        return {"target": "t", "drafter": None, "notices": []}

    def cpu_s(self) -> float:
        return 0.0

    def forget(self) -> None:
        self._servers.did.append(("forget", self.name))

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode())

    def lead(self, body: Mapping[str, Any], reply: Sequence[int]) -> float:
        self._servers.did.append(("lead", self.name, body["seed"], bytes(reply)))
        return self._servers.lead

    def close(self) -> None:
        self._servers.did.append(("close", self.name))


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    return Servers(monkeypatch)


def run(
    capsys: pytest.CaptureFixture[str], prompts: Path, *arguments: str
) -> tuple[int, dict[str, Any], str]:
    code = main(["server", "--prompts", str(prompts), *arguments])
    shown = capsys.readouterr()
    return code, json.loads(shown.out) if shown.out else {}, shown.err


def test_servers_take_turns_and_start_each_batch_without_earlier_prompts(
    servers: Servers, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else a slow minute hits one of them alone, and a repeat finds its prompt in a cache."""
    code, _, _ = run(capsys, prompts, "--clients", "1,2", "--max-tokens", "40", "--repeats", "2")
    assert code == 0
    repeat = [
        event
        for n_clients, n_requests in ((1, 3), (2, 4))
        for name in ("plain", "auto")
        for event in (("forget", name), ("ask", name, n_clients, [40] * n_requests))
    ]
    warm_up = [("ask", name, 2, [WARM_UP_TOKENS] * 2) for name in ("plain", "auto")]
    assert servers.did == [
        *[("open", name, 2) for name in ("plain", "auto")],
        *warm_up,
        *(repeat * 2),
        *[("close", name) for name in ("auto", "plain")],
    ]


@pytest.mark.parametrize(("lead", "code"), [(3.0, 1), (0.001, 0)])
def test_another_text_fails_unless_it_left_at_a_tie(
    lead: float, code: int, servers: Servers, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers.says["auto"] = "on the other"
    servers.lead = lead
    got, report, err = run(capsys, prompts, "--clients", "1", "--repeats", "2", "--seed", "5")
    assert got == code
    assert (report["same_text"], report["is_failed"]) == (False, code == 1)
    (found,) = report["differences"]
    assert (found["prompt"], found["position"], found["n_replies"]) == (2, len("on the o"), 2)
    assert ("TEXTS DIFFER" in err) is (code == 1)
    # Drawn again by the server without speculation, with the seed of that prompt.
    assert ("lead", "plain", 6, b"on the o") in servers.did


def test_servers_end_when_a_batch_fails(
    servers: Servers,
    prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: Any) -> Batch:
        raise OSError("http://x gave no answer")

    monkeypatch.setattr(server, "run_batch", fail)
    code, report, err = run(capsys, prompts)
    assert (code, report) == (1, {})
    assert err.splitlines()[-1] == "error: http://x gave no answer"
    assert servers.did[-2:] == [("close", "auto"), ("close", "plain")]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--clients 0", "--clients is '0'"),
        ("--clients 1,17", "--clients has 17"),
        ("--repeats 0", "--repeats is 0"),
        ("--seed -1", "seed is -1"),
    ],
)
def test_bad_arguments_are_refused_in_one_line_before_anything_starts(
    arguments: str,
    says: str,
    servers: Servers,
    prompts: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, report, err = run(capsys, prompts, *arguments.split())
    assert (code, report, servers.did) == (1, {}, [])
    assert says in err
    assert err.count("\n") == 1


# ---------------------------------------------------------------- clients


def stream_of(pieces: Sequence[str]) -> list[dict[str, Any]]:
    """The events of a reply, one token each, with what our server tells of it."""
    events = [
        {"choices": [{"delta": {"content": piece}}], "x_dspark": {"n_tokens": 1}}
        for piece in pieces
    ]
    stats = {"n_tokens": len(pieces), "n_rounds": 1, "n_prompt": 1, "n_reused": 0}
    last = {"choices": [{"delta": {}}], "x_dspark": {"n_tokens": 0, "stats": stats}}
    return [{"choices": [{"delta": {"role": "assistant"}}]}, *events, last]


def handler_of(together: int, failure: str = "") -> type[BaseHTTPRequestHandler]:
    """Answers with the message itself, once so many requests are there at the same time."""
    barrier = threading.Barrier(together, timeout=WAIT_S)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            barrier.wait()
            self.send_response(200)
            self.end_headers()
            said = body["messages"][0]["content"]
            events = [{"error": failure}] if failure else stream_of(said)
            for event in events:
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


def bodies(*texts: str) -> list[dict[str, Any]]:
    return [{"messages": [{"role": "user", "content": text}]} for text in texts]


def test_as_many_requests_as_clients_run_at_a_time() -> None:
    """The server answers only when three are there: fewer clients would wait for ever."""
    texts = ("one", "two", "three", "four", "five", "six")
    with listening(handler_of(3)) as url:
        batch = run_batch(HttpClient(url), bodies(*texts), 3)
    assert [each.text for each in batch.answers] == list(texts)
    assert [each.n_tokens for each in batch.answers] == [len(text) for text in texts]
    assert len(batch.by_client) == 3
    assert sum(map(len, batch.by_client)) == len(texts)
    for each in batch.answers:
        assert each.asked_at < each.first_at <= each.last_at


def test_a_stream_that_fails_fails_the_batch() -> None:
    with listening(handler_of(1, "out of cake")) as url, pytest.raises(ValueError, match="cake"):
        run_batch(HttpClient(url), bodies("one", "two"), 1)


# ---------------------------------------------------------------- figures


def test_full_speed_is_that_while_every_client_is_served() -> None:
    """Prompts at the begin and the last client alone at the end are no full load."""
    first = answer((1.0, 1), (2.0, 2), (3.0, 4))
    second = answer((2.0, 1), (4.0, 8), asked_at=0.5)
    third = answer((5.0, 3), (6.0, 6), asked_at=3.0)  # of the first client
    batch = Batch([first, second, third], [[first, third], [second]])
    assert batch.seconds == 6.0
    assert batch.total_tps == (7 + 9 + 9) / 6.0
    # From 2.0, when both have a token, to 4.0, when the second client has no more requests.
    assert batch.full_tps == (4 + 8) / 2.0


def test_there_is_no_full_speed_where_clients_were_never_all_served() -> None:
    one, other = answer((1.0, 1), (2.0, 5)), answer((3.0, 1), (4.0, 5))
    assert Batch([one, other], [[one], [other]]).full_tps is None
    assert Batch([one], [[one], []]).full_tps is None


def test_ratios_of_servers_are_taken_pair_by_pair() -> None:
    def batch(seconds: float, wait_s: float) -> Batch:
        one = answer((wait_s, 1), (seconds, 9), n_rounds=5)
        return Batch([one], [[one]])

    plain = [batch(4.0, 1.0), batch(8.0, 2.0), batch(4.0, 1.0)]
    auto = [batch(2.0, 1.5), batch(8.0, 2.0), batch(4.0, 0.5)]
    lines = rows_of({Place(1, "plain"): plain, Place(1, "auto"): auto}, "mine")
    assert lines[0]["ratio_to_plain_by_repeat"] == [1.0, 1.0, 1.0]
    line = lines[1]
    assert line["ratio_to_plain_by_repeat"] == [2.0, 1.0, 1.0]
    assert line["ratio_to_plain"] == 1.0
    assert line["ratio_to_plain_quartiles"] == [1.0, 1.5]
    assert line["full_ratio_to_plain_by_repeat"] == [6.0, 1.0, pytest.approx(3.0 / 3.5)]
    assert line["ttft_ratio_to_plain_by_repeat"] == [1.5, 1.0, 0.5]
    assert line["ttft_s"] == 1.5
    assert line["ttft_p95_s"] == pytest.approx(1.95)
    assert line["total_tps_by_repeat"] == [5.0, 1.25, 2.5]
    assert line["tau"] == 2.0
    assert line["reused_share"] == pytest.approx(0.2)
