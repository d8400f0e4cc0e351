"""Saves one session over and over in children that are killed; prints what was left, as JSON.

Run by test_sessions. Each child saves version after version; each version says its number in every
part. Two ways to die: by its own hand at the n-th call that changes the disk, and by another's,
anywhere, after a random number of calls of any kind.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

from dspark_edge import Engine, SamplingParams
from dspark_edge.loading import Identity
from dspark_edge.sessions import Session, SessionStore

N_KV_BYTES = 300_000
STEPS = ("mkdir", "fsync", "chmod", "replace", "unlink", "write", "open")
N_RANDOM = 60


class Versions:
    """The part of an engine that a store uses; its KV state says which version it is of."""

    def __init__(self) -> None:
        self.identity = Identity()
        self.version = 0
        self.loaded = -1

    def render(self, messages: object) -> str:
        return "text"

    def tokenize(self, text: str, *, add_special: bool = True) -> list[int]:
        return [1]

    def save_cache(self, tokens: object) -> bytes:
        return self.version.to_bytes(4, "little") * (N_KV_BYTES // 4)

    def load_cache(self, blob: bytes) -> int:
        assert len(blob) == N_KV_BYTES
        versions = {blob[i : i + 4] for i in range(0, len(blob), 4)}
        assert len(versions) == 1
        self.loaded = int.from_bytes(versions.pop(), "little")
        return 1


def save(store: SessionStore, engine: Versions, version: int) -> None:
    engine.version = version
    messages = [{"role": "user", "content": f"{version} " * 2000}]
    session = Session(messages=messages, params=SamplingParams(seed=version))
    notices = store.save("chat", session, engine=cast(Engine, engine))
    assert notices == [], notices


def version_of(store: SessionStore) -> int:
    """The version that all parts of the session are of; anything else raises."""
    engine = Versions()
    restored = store.load("chat", engine=cast(Engine, engine))
    assert restored.notices == [], restored.notices
    words = set(restored.session.messages[0]["content"].split())
    assert words == {str(engine.loaded)} == {str(restored.session.params.seed)}
    return engine.loaded


def dying_at(step: int) -> None:
    """From now on the step-th call that changes the disk is the process's last act, or nearly."""
    steps = itertools.count(1)

    def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            if next(steps) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **options)

        return wrapped

    for name in STEPS:
        setattr(os, name, wrap(getattr(os, name)))


def telling(mouth: int) -> None:
    """From now on the process writes a C into the pipe before each call of something in C."""

    def tell(frame: object, event: str, arg: object) -> None:
        if event == "c_call":
            os.write(mouth, b"C")

    sys.setprofile(tell)


def child(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
    return pid


def die_at_each_step(store: SessionStore) -> dict[str, list[int]]:
    """Versions left after a child died at step 1, 2, ... of saving, until one lives."""
    left: list[int] = []
    for step in range(1, 1000):
        version = step + 1
        save(store, Versions(), step)

        def work(step: int = step, version: int = version) -> None:
            dying_at(step)
            save(store, Versions(), version)

        _, status = os.waitpid(child(work), 0)
        left.append(version_of(store) - step)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            return {"gained": left}
    raise AssertionError("saving never ends")


def killed_when(is_enough: Callable[[bytes], bool], store: SessionStore, first: int) -> bytes:
    """A child saves version after version and is killed from outside. Returns what it told.

    C: it was about to call something in C. S: another version was saved.
    """
    ear, mouth = os.pipe()

    def work() -> None:
        os.close(ear)
        telling(mouth)
        engine = Versions()
        for version in itertools.count(first):
            save(store, engine, version)
            os.write(mouth, b"S")

    pid = child(work)
    os.close(mouth)
    heard = b""
    while not is_enough(heard):
        more = os.read(ear, 16)
        assert more, "the child died by itself"
        heard += more
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    os.close(ear)
    assert os.WIFSIGNALED(status)
    return heard


def has_length(n: int, heard: bytes) -> bool:
    return len(heard) >= n


def die_at_random(store: SessionStore) -> dict[str, int]:
    """Children are killed wherever they are once they have come far enough.

    Far enough is a random number of calls, of up to three versions. On a loaded machine they come
    farther before the kill takes effect; nothing here depends on that.
    """
    draw = random.Random(0)
    version = version_of(store)
    n_calls = killed_when(lambda heard: b"S" in heard, store, version + 1).index(b"S")
    version = version_of(store)
    n_advanced = 0
    for _ in range(N_RANDOM):
        n = draw.randint(1, 3 * n_calls)
        heard = killed_when(partial(has_length, n), store, version + 1)
        left = version_of(store)
        assert left >= version + heard.count(b"S")  # what was saved stays saved
        n_advanced += left > version
        version = left
    return {"n_random": N_RANDOM, "n_advanced": n_advanced}


if __name__ == "__main__":
    sessions = SessionStore(Path(sys.argv[1]))
    print(json.dumps(die_at_each_step(sessions) | die_at_random(sessions)))
