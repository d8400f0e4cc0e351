"""Who the server lets in, and hostile bodies."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from server_harness import Running, running, tiny_settings
from starlette.types import Receive, Scope, Send

from dspark_edge.server.guard import HostGuard
from dspark_edge.server.settings import EngineOptions, Limits, Settings


async def no_app(scope: Scope, receive: Receive, send: Send) -> None:
    """Is never reached."""


KEY = "a key of enough characters"
BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[Running]:
    settings = tiny_settings(
        tiny_llama,
        cors_origins=("http://app.example:3000", "https://Tools.Example"),
        allow_hosts=("box.lan", "Desk.lan", "FD00::1"),
        limits=Limits(body_bytes=100_000),
    )
    with running(settings) as server:
        yield server


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("localhost:1234", 200),
        ("[::1]:80", 200),
        ("box.lan", 200),
        ("BOX.lan:8080", 200),
        ("desk.lan:8080", 200),
        ("[fd00::1]:8080", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost@evil.example", 403),
        ("10.0.0.1", 403),
        ("localhost:x", 403),
        ("", 403),
    ],
)
def test_only_the_servers_own_names_are_answered(server: Running, host: str, status: int) -> None:
    assert server.get("/health", Host=host).status_code == status


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://app.example:3000", 200),
        ("https://tools.example", 200),
        ("http://app.example:3001", 403),
        ("http://localhost:5173", 403),
        ("https://evil.example", 403),
        ("null", 403),
    ],
)
def test_only_named_pages_may_call(server: Running, origin: str, status: int) -> None:
    response = server.post("/tokenize", {"content": "hi"}, Origin=origin)
    assert response.status_code == status
    allowed = response.headers.get("access-control-allow-origin")
    assert allowed == (origin if status == 200 else None)
    exposed = response.headers.get("access-control-expose-headers")
    assert exposed == ("Retry-After" if status == 200 else None)


def test_a_page_of_the_server_itself_may_call(server: Running) -> None:
    assert server.post("/tokenize", {"content": "hi"}, Origin=server.url).status_code == 200


def test_a_key_is_needed_everywhere(tiny_llama: Path) -> None:
    with running(tiny_settings(tiny_llama, api_key=KEY)) as server:
        for path in ("/health", "/stats", "/metrics", "/v1/models", "/openapi.json"):
            assert server.get(path).status_code == 401
            assert server.get(path, Authorization=f"Bearer {KEY}").status_code == 200
        for wrong in ("", "Bearer", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Basic {KEY}"):
            response = server.post("/v1/chat/completions", BODY, Authorization=wrong)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
        odd = httpx.Headers({"Authorization": "Bearer kéy".encode("latin-1")})
        with server.client() as client:
            assert client.get("/health", headers=odd).status_code == 401


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "example.org"])
def test_a_server_that_others_can_reach_needs_a_key(host: str) -> None:
    with pytest.raises(ValueError, match="give an API key"):
        Settings(host=host)
    assert not Settings(host=host, api_key=KEY).is_loopback
    with pytest.raises(ValueError, match="at least 16"):
        Settings(host=host, api_key="short")


def test_the_servers_own_name_may_be_written_with_capitals() -> None:
    guard = HostGuard(no_app, Settings(host="Box.Lan", api_key=KEY), lambda status: None)
    assert guard._is_own("box.lan:8080")


@pytest.mark.parametrize(
    "host", ["box.lan:8080", "[fd00::1]", "[fd00::1]:80", "http://box.lan", "box.lan/", ""]
)
def test_an_allowed_host_that_could_never_match_is_refused(host: str) -> None:
    with pytest.raises(ValueError, match="write the name or address alone"):
        Settings(allow_hosts=(host,))


def test_a_body_that_is_too_large_is_not_read(server: Running) -> None:
    with server.client() as client:
        known = client.post("/tokenize", content=b"x" * 100_001)
        assert known.status_code == 413
        unknown = client.post("/tokenize", content=iter([b"x" * 60_000] * 2))  # chunked
        assert unknown.status_code == 413
        assert "100000" in unknown.json()["error"]["message"]
        assert "--ctx" in unknown.json()["error"]["message"]


def test_a_body_may_be_as_large_as_a_conversation_that_fills_the_context() -> None:
    """8 MB of names took half a second to parse, and nothing else runs meanwhile."""
    small, large = (Settings(engine=EngineOptions(n_ctx=n)) for n in (4096, 131072))
    assert small.body_bytes == 2**20 + 16 * 4096
    assert large.body_bytes == 2**20 + 16 * 131072
    assert Settings(limits=Limits(body_bytes=5)).body_bytes == 5


HOSTILE = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"text"',
    b"\xff\xfe\x00",
    b"[" * 90_000,
    b'{"messages":' * 5_000,
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": [{"role": "user", "content": "x", "\\ud800": 1}]}',
    b'{"messages": [{"role": "user", "content": "x"}], "\\ud800": 1}',
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
    b'{"messages": [{"role": "user", "content": "x"}], "seed": ' + b"9" * 6000 + b"}",
    b'{"messages": [{"role": "user", "content": {"a": 1}}]}',
    b'{"messages": [{"role": "root", "content": "x"}]}',
    b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
    b'{"messages": "hi"}',
]


@pytest.mark.parametrize("body", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_body_is_refused_in_openais_form(server: Running, body: bytes) -> None:
    with server.client() as client:
        response = client.post(
            "/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}
        )
    assert response.status_code in (400, 422), response.text
    assert response.json()["error"]["message"]


def many(item: str, n: int = 100_000) -> str:
    return ",".join([item] * n)


def keys(value: str, n: int = 60_000) -> str:
    return ",".join(f'"k{i}":{value}' for i in range(n))


HI = '"messages":[{"role":"user","content":"x"}]'
HEAPS = {
    "messages": ("/v1/chat/completions", f'{{"messages":[{many("{}")}]}}'),
    "parts": (
        "/v1/chat/completions",
        f'{{"messages":[{{"role":"user","content":[{many("5")}]}}]}}',
    ),
    "unknown": ("/v1/chat/completions", f"{{{HI},{keys('1')}}}"),
    "logit_bias": ("/v1/chat/completions", f'{{{HI},"logit_bias":{{{keys("1000")}}}}}'),
    "chat_template_kwargs": (
        "/v1/chat/completions",
        f'{{{HI},"chat_template_kwargs":{{{keys("[]")}}}}}',
    ),
    "keys": (
        "/v1/chat/completions",
        f'{{"messages":[{{"role":"user","content":"x",{keys("1")}}}]}}',
    ),
    "tools": ("/v1/chat/completions", f'{{{HI},"tools":[{many("{}")}]}}'),
    "stop": ("/v1/chat/completions", f'{{{HI},"stop":[{many("5")}]}}'),
    "prompt": ("/v1/completions", f'{{"prompt":[{many("{}")}]}}'),
    "tokens": ("/detokenize", f'{{"tokens":[{many("-1")}]}}'),
}


@pytest.mark.parametrize("kind", HEAPS)
def test_a_heap_of_mistakes_is_refused_at_the_first(tiny_llama: Path, kind: str) -> None:
    """Each would become an error with a text: minutes of work and gigabytes for one small body."""
    path, body = HEAPS[kind]
    type_ = {"Content-Type": "application/json"}
    with running(tiny_settings(tiny_llama)) as server, server.client() as client:
        before_s = time.process_time()
        response = client.post(path, content=body.encode(), headers=type_)
        used_s = time.process_time() - before_s
    assert response.status_code == 422
    assert response.json()["error"]["param"]
    assert used_s < 3.0  # of both ends, parsing included; a minute when every error was told


def deep(depth: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (deep(40), "deeper than 32"),
        ({"enum": ["x"] * 3000}, "more than 2000 parts"),
        ({"type": "string", "maxLength": 10**9}, "maxLength"),
        ({"type": "array", "items": {}, "minItems": 10**9}, "minItems"),
        ({"type": "integer", "minimum": 3}, "minimum"),
        ({"not": {}}, "not"),
        ({"$ref": "https://evil.example/schema.json"}, "$ref"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "refer to each other"),
        (
            {
                "type": "array",
                "items": {"$ref": "#/$defs/a"},
                "$defs": {
                    "a": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/b"}]},
                    "b": {"$ref": "#/$defs/a"},
                },
            },
            "refer to each other",
        ),
        ({"type": "string", "pattern": "^(a$"}, "grammar"),
        ({"type": "string", "pattern": "^" + "(" * 200 + "$"}, "grammar"),
        ({"type": "string", "pattern": "^a{99999999}$"}, "more than 200 times"),
        ({"type": "string", "pattern": "^a{1,99999999}$"}, "more than 200 times"),
        ({"type": "string", "pattern": "^(a?){200}$"}, "200 parts may be left out"),
        ({"type": "string", "pattern": "^((a?){20}){20}$"}, "400 parts may be left out"),
        ({"type": "string", "pattern": "^" + "a?" * 100 + "$"}, "100 parts may be left out"),
        ({"properties": {f"p{i}": {} for i in range(200)}}, "200 parts may be left out"),
        ({"type": "object", "properties": {}, "required": ["b"]}, "'b'"),
        ({"enum": ['say "no"']}, "escape"),
        ({"type": "text"}, "type"),
        ({"anyOf": []}, "anyOf"),
        ({"type": "array", "items": {}, "minItems": 3, "maxItems": 2}, "below minItems"),
        ({"enum": [f"{i:040}" for i in range(1900)]}, "limit is 65536"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused(
    server: Running, schema: dict[str, object], why: str
) -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    response = server.post("/v1/chat/completions", {**BODY, "response_format": shape})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert why in error["message"]
    assert (error["param"], error["code"]) == ("response_format", "unsupported_schema")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "boolean"}, "minItems": 2},
        {
            "$ref": "#/$defs/Tree",
            "$defs": {
                "Tree": {
                    "type": "object",
                    "properties": {
                        "is_leaf": {"type": "boolean"},
                        "branches": {"type": "array", "items": {"$ref": "#/$defs/Tree"}},
                    },
                    "required": ["is_leaf", "branches"],
                }
            },
        },
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"type": "boolean"}}},
    ],
    ids=["no greatest number of items", "recursive", "a reference to a reference"],
)
def test_a_schema_that_can_be_enforced_is(server: Running, schema: dict[str, object]) -> None:
    """pydantic writes a recursive model as nothing but a reference; that was once refused."""
    shape = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    response = server.post("/v1/chat/completions", {**BODY, "response_format": shape})
    assert response.status_code == 200, response.text
    begin = response.json()["choices"][0]["message"]["content"].lstrip()
    assert begin[:1] in {"array": ("[",)}.get(str(schema.get("type")), ("{", "t", "f"))


@pytest.mark.parametrize("arguments", ["[" * 90_000, "{", '"' + chr(0) + '"'])
def test_arguments_of_a_call_that_are_not_json_are_refused(server: Running, arguments: str) -> None:
    """The deep one once ended in a 500."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    body = {**BODY, "messages": [*BODY["messages"], said]}  # type: ignore[misc]
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"


def test_paths_in_a_model_name_open_no_files(server: Running) -> None:
    for name in ("../../etc/passwd", "/etc/passwd", "llama.gguf", "llama/../llama", "\x00"):
        response = server.post("/v1/chat/completions", {**BODY, "model": name})
        assert response.status_code == 404
    assert server.get("/v1/models/..%2F..%2Fetc%2Fpasswd").status_code == 404


def test_errors_of_the_framework_have_openais_form(server: Running) -> None:
    nowhere = server.get("/nowhere").json()["error"]
    assert (nowhere["type"], nowhere["code"]) == ("not_found_error", "not_found")
    assert "GET /nowhere" in nowhere["message"]
    wrong = server.get("/v1/chat/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert wrong.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize("given", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_a_body_that_is_not_said_to_be_json_is_told_which_header_it_needs(
    server: Running, given: str | None
) -> None:
    """Text is what a foreign page may send without asking first; a form is what curl -d says."""
    headers = {} if given is None else {"Content-Type": given}
    with server.client() as client:
        response = client.post("/v1/chat/completions", content=json.dumps(BODY), headers=headers)
    assert response.status_code == 415
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("Content-Type", "unsupported_media_type")
    assert "Content-Type: application/json" in error["message"]
    assert (given or "none") in error["message"]


def test_the_page_needs_no_key_and_nothing_else_is_served_from_disk(
    tiny_llama: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret.txt").write_text("not for you")
    static = tmp_path / "static"
    static.mkdir()
    (static / "index.html").write_text("<title>page</title>")
    (static / "page.js").write_text("1")
    with running(tiny_settings(tiny_llama, api_key=KEY), static=static) as server:
        assert server.get("/").text == "<title>page</title>"
        assert server.get("/static/page.js").text == "1"
        for path in ("/static/../secret.txt", "/static/%2e%2e/secret.txt", "/static//etc/passwd"):
            assert server.get(path).status_code in (401, 404)
