"""Clients that hold a connection: they send no head, trickle a body, or never read."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from server_harness import WAIT_S, Running, answering, running, scripted, tiny_settings

from dspark_edge.server.settings import Limits

QUICK = Limits(head_s=0.3, body_s=0.3, write_s=0.3)
POST = "POST /tokenize HTTP/1.1\r\nHost: {host}\r\nContent-Length: 100000\r\n\r\n{{"


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[Running]:
    with running(tiny_settings(tiny_llama, limits=QUICK)) as server:
        yield server


def connection_to(server: Running, *, receive_bytes: int | None = None) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.socket()
    if receive_bytes is not None:  # before connecting, or the system has offered more already
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.settimeout(WAIT_S)
    connection.connect((host, int(port)))
    return connection


def all_of(connection: socket.socket) -> bytes:
    """What comes until the server closes."""
    got = b""
    with suppress(ConnectionError):
        while more := connection.recv(4096):
            got += more
    return got


def test_a_head_that_never_ends_is_given_up_with_the_reason(server: Running) -> None:
    with connection_to(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: local")
        head, _, body = all_of(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    error = json.loads(body)["error"]
    assert error["code"] == "timeout"
    assert "0.3 s" in error["message"]


@pytest.mark.parametrize("junk", [b"\x16\x03\x01\x02\r\n\r\n", b"GET /health HTTP/9\r\n\r\n"])
def test_what_is_no_http_is_refused_in_openais_form(server: Running, junk: bytes) -> None:
    with connection_to(server) as connection:
        connection.sendall(junk)
        head, _, body = all_of(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["code"] == "bad_request"


def test_junk_after_a_refusal_ends_the_connection_and_nothing_else(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    head = "POST /tokenize HTTP/1.1\r\nHost: evil\r\nTransfer-Encoding: chunked\r\n\r\n"
    with connection_to(server) as connection:
        connection.sendall(head.encode())
        assert connection.recv(12) == b"HTTP/1.1 403"
        connection.sendall(b"no chunk\r\n")
        rest = all_of(connection)
    assert b"bad_host" in rest
    assert b"bad_request" not in rest  # one answer
    assert not [r for r in caplog.records if r.name == "asyncio"]


@pytest.mark.parametrize(("host", "status"), [("localhost", 200), ("evil.example", 403)])
def test_a_websocket_is_not_opened_and_its_request_is_guarded(
    server: Running, host: str, status: int
) -> None:
    """With the package websockets installed they once went past the guard, into a traceback."""
    head = (
        f"GET /health HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    with connection_to(server) as connection:
        connection.sendall(head.encode())
        assert connection.recv(12) == f"HTTP/1.1 {status}".encode()


def test_the_time_for_a_head_does_not_start_anew_with_each_byte(server: Running) -> None:
    with connection_to(server) as connection:
        n_sent, pause = 0, threading.Event()
        with suppress(ConnectionError):
            for byte in b"GET /health HTTP/1.1\r\nX: " + b"x" * 5000:
                connection.sendall(bytes([byte]))
                n_sent += 1
                pause.wait(0.05)
        assert n_sent < 5000


def test_a_connection_on_which_nothing_comes_is_closed_without_a_word(server: Running) -> None:
    """Browsers open some in advance; an answer that nobody asked for would be taken for another."""
    with connection_to(server) as connection:
        assert all_of(connection) == b""


def test_a_connection_serves_several_requests_and_then_a_head_has_its_time_again(
    server: Running,
) -> None:
    with connection_to(server) as connection:
        client = http.client.HTTPConnection("localhost")
        client.sock = connection
        for _ in range(3):
            client.request("GET", "/v1/models")
            response = client.getresponse()
            assert response.read()
            assert response.status == 200
        connection.sendall(b"GET /v1/models HTTP/1.1\r\n")
        assert all_of(connection).startswith(b"HTTP/1.1 408 ")


def test_a_reply_may_take_longer_than_a_head(tiny_llama: Path) -> None:
    """The clocks run while the client owes something, not while the server does."""
    make = scripted(answering("x" * 20), after=lambda: threading.Event().wait(0.2) and None)
    with running(tiny_settings(tiny_llama, limits=QUICK), make) as server:
        assert server.chat().json()["choices"][0]["message"]["content"] == "x" * 20


def test_a_body_that_never_comes_is_given_up(server: Running) -> None:
    with connection_to(server) as connection:
        connection.sendall(POST.format(host="localhost").encode())
        assert connection.recv(64).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(("host", "status"), [("localhost", 408), ("evil.example", 403)])
def test_a_body_that_trickles_ends_with_its_connection(
    server: Running, host: str, status: int
) -> None:
    """After a refusal nobody reads the body; it once could go on coming for ever."""
    with connection_to(server) as connection:
        connection.sendall(POST.format(host=host).encode())
        n_sent, pause = 0, threading.Event()
        connection.settimeout(0.05)
        got = b""
        with suppress(ConnectionError):
            while n_sent < 5000:
                connection.sendall(b" ")
                n_sent += 1
                with suppress(TimeoutError):
                    more = connection.recv(4096)
                    if not more:
                        break
                    got += more
                pause.wait(0.02)
    assert got.startswith(f"HTTP/1.1 {status} ".encode())
    assert n_sent < 5000


def test_a_client_that_never_reads_its_stream_loses_its_place(tiny_llama: Path) -> None:
    make = scripted(answering("x" * 450), after=lambda: threading.Event().wait(0.03) and None)
    with (
        running(tiny_settings(tiny_llama, limits=QUICK), make, send_bytes=4096) as server,
        connection_to(server, receive_bytes=4096) as connection,
    ):
        connection.sendall(stream_request())
        wait_until(lambda: server.hub.n_requests == 1)
        wait_until(lambda: server.hub.n_requests == 0)
        assert server.get("/stats").json()["requests"] == {"cancelled": 1}
        assert b"[DONE]" not in all_of(connection)


def wait_until(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < until_s
        threading.Event().wait(0.01)


def test_a_client_that_never_reads_does_not_keep_the_server_from_leaving(tiny_llama: Path) -> None:
    """Its stream is cut short after the drain, and the last word to it cannot be sent either."""
    settings = tiny_settings(tiny_llama, limits=Limits(write_s=10 * WAIT_S), drain_s=1.0)
    with running(settings, scripted(answering("x" * 450)), send_bytes=4096) as server:
        client = connection_to(server, receive_bytes=4096)
        client.sendall(stream_request())
        wait_until(lambda: server.hub.n_requests == 1)
    # `running` has waited for the server's end.
    client.close()


def stream_request() -> bytes:
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": "hi"}],
            "stream": True,
            "stream_options": {"include_pieces": True},
            "ignore_eos": True,
            "temperature": 0,
        }
    ).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
