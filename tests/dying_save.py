"""Saves one session over and over in children that are killed; prints what was left, as JSON.

Run by test_sessions. Each child saves version after version; each version says its number in every
part. Two ways to die: at the n-th call that changes the disk, and after a random time.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
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


def dying_at(step: int, count: list[int]) -> None:
    """From now on the step-th call that changes the disk is the process's last act, or nearly."""

    def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            count[0] += 1
            if count[0] == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **options)

        return wrapped

    for name in STEPS:
        setattr(os, name, wrap(getattr(os, name)))


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
            dying_at(step, [0])
            save(store, Versions(), version)

        _, status = os.waitpid(child(work), 0)
        left.append(version_of(store) - step)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            return {"gained": left}
    raise AssertionError("saving never ends")


def die_at_random(store: SessionStore) -> dict[str, int]:
    draw = random.Random(0)
    version = version_of(store)
    n_advanced = 0
    for _ in range(N_RANDOM):

        def work(first: int = version + 1) -> None:
            engine = Versions()
            for later in range(first, first + 10_000):
                save(store, engine, later)

        pid = child(work)
        time.sleep(draw.uniform(0.002, 0.03))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status)
        left = version_of(store)
        assert left >= version
        n_advanced += left > version
        version = left
    return {"n_random": N_RANDOM, "n_advanced": n_advanced}


if __name__ == "__main__":
    sessions = SessionStore(Path(sys.argv[1]))
    print(json.dumps(die_at_each_step(sessions) | die_at_random(sessions)))
