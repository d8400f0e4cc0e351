"""Progress of loading models: a number that grows, an end on request, errors that come through."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from dspark_edge import _core
from dspark_edge.errors import ModelError, PairError


def config(target: Path, drafter: Path | None = None) -> _core.DecoderConfig:
    return _core.DecoderConfig(
        target_path=str(target), drafter_path=str(drafter or ""), n_ctx=64, n_seq=1, n_threads=1
    )


def test_progress_grows_from_zero_to_one_over_both_files(
    tiny_llama: Path, tiny_drafter: Path
) -> None:
    seen: list[float] = []

    def progress(done: float) -> bool:
        seen.append(done)
        return True

    decoder = _core.BlockDecoder(config(tiny_llama, tiny_drafter), progress)
    assert seen == sorted(seen)
    assert seen[0] == 0.0
    assert seen[-1] == pytest.approx(1.0)
    n_target, n_drafter = (path.stat().st_size for path in (tiny_llama, tiny_drafter))
    assert any(abs(done - n_target / (n_target + n_drafter)) < 1e-3 for done in seen)
    decoder.close()


def test_progress_of_a_target_alone_ends_at_one(tiny_llama: Path) -> None:
    seen: list[float] = []

    def progress(done: float) -> bool:
        seen.append(done)
        return True

    _core.BlockDecoder(config(tiny_llama), progress)
    assert seen[-1] == pytest.approx(1.0)


def test_false_ends_the_loading(tiny_llama: Path, tiny_drafter: Path) -> None:
    with pytest.raises(ModelError, match="ended on request"):
        _core.BlockDecoder(config(tiny_llama), lambda _: False)
    with pytest.raises(PairError, match="ended on request"):
        _core.BlockDecoder(config(tiny_llama, tiny_drafter), lambda done: done < 0.99)


def test_what_progress_raises_comes_through(tiny_llama: Path) -> None:
    """Also what is no Exception: Ctrl-C while a large file is read must end the program."""
    for error in (KeyError("mine"), KeyboardInterrupt()):

        def progress(_: float, error: BaseException = error) -> bool:
            raise error

        with pytest.raises(type(error)):
            _core.BlockDecoder(config(tiny_llama), progress)


def test_other_threads_run_inside_progress(tiny_llama: Path) -> None:
    """The loader has no GIL: what progress waits for can happen."""
    is_asked, is_answered = threading.Event(), threading.Event()

    def answer() -> None:
        is_asked.wait(60)
        is_answered.set()

    thread = threading.Thread(target=answer)
    thread.start()

    def progress(_: float) -> bool:
        is_asked.set()
        return is_answered.wait(60)

    _core.BlockDecoder(config(tiny_llama), progress).close()
    thread.join()
