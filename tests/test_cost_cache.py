"""Cost tables on disk: whole or not at all, and not trusted when a busy moment made them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tiny_models import write_llama

from dspark_edge import Engine, cost_cache, loading
from dspark_edge._core import BlockDecoder
from dspark_edge.choice import Choice
from dspark_edge.cost import CostTable, profile
from dspark_edge.cost_cache import cost_table, is_outdated, load_cached, save_cached

MS = 1e-3
Step = Callable[[int, int], float]


def full_table() -> CostTable:
    return CostTable(
        verify={0: {1: 0.010, 2: 0.016, 8: 0.049}, 3: {1: 0.02, 8: 0.07}},
        draft={1: 0.005, 2: 0.006},
        other_s=0.0002,
    )


def test_a_saved_table_is_loaded_under_its_key(tmp_path: Path) -> None:
    path = tmp_path / "made" / "on demand" / "cost.json"
    assert save_cached(path, "key", full_table())
    loaded = load_cached(path, "key")
    assert loaded is not None
    assert loaded.to_json() == full_table().to_json()
    assert os.listdir(path.parent) == ["cost.json"]


def test_a_table_of_another_key_is_not_loaded(tmp_path: Path) -> None:
    save_cached(tmp_path / "cost.json", "key", full_table())
    assert load_cached(tmp_path / "cost.json", "other key") is None


def test_a_missing_file_is_no_table(tmp_path: Path) -> None:
    assert load_cached(tmp_path / "cost.json", "key") is None


def test_a_directory_in_place_of_the_file_is_no_table(tmp_path: Path) -> None:
    assert load_cached(tmp_path, "key") is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"null",
        b"[]",
        b'{"key": "key"}',
        b'{"key": "key", "table": {"version": 1}}',
        b"[" * 100_000,
    ],
)
def test_a_corrupt_file_is_no_table(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "cost.json"
    path.write_bytes(content)
    assert load_cached(path, "key") is None


def test_a_file_cut_anywhere_is_no_table(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    save_cached(path, "key", full_table())
    whole = path.read_bytes()
    for n in range(len(whole)):
        path.write_bytes(whole[:n])
        assert load_cached(path, "key") is None


def test_a_corrupt_file_is_replaced_by_a_new_measurement(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_bytes(b"{")
    assert load_cached(path, "key") is None
    table = profile(lambda n, d: 0.01 * n, None, max_width=8, n_seq=1, depth=0)
    assert save_cached(path, "key", table)
    loaded = load_cached(path, "key")
    assert loaded is not None
    assert loaded.verify_s(8, 0) == 0.08


def test_an_unwritable_place_is_reported_not_raised(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert not save_cached(tmp_path / "file" / "cost.json", "key", full_table())


def test_a_failed_save_leaves_the_old_table_and_no_debris(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cost.json"
    save_cached(path, "key", full_table())

    def refuse(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", refuse)
    assert not save_cached(path, "key", CostTable(verify={0: {1: 1.0}}))
    assert os.listdir(tmp_path) == ["cost.json"]
    loaded = load_cached(path, "key")
    assert loaded is not None
    assert loaded.verify_s(8, 0) == 0.049


# ---------------------------------------------------------------- a table of a busy moment


def quiet(n_tokens: int, depth: int) -> float:
    return (8 + 2 * n_tokens) * MS


def table_of(step: Step, max_width: int = 8) -> CostTable:
    return profile(step, None, max_width=max_width, n_seq=1, depth=0)


@pytest.mark.parametrize(
    ("was", "expected"),
    [
        pytest.param(lambda n, d: 2.0 * quiet(n, d), True, id="all was slow"),
        pytest.param(lambda n, d: quiet(n, d) * (2 if n == 4 else 1), True, id="one width was"),
        pytest.param(lambda n, d: 1.2 * quiet(n, d), False, id="as usual"),
        pytest.param(lambda n, d: 0.3 * quiet(n, d), False, id="it is busy now"),
    ],
)
def test_a_table_is_outdated_when_passes_take_much_less_now(was: Step, expected: bool) -> None:
    assert is_outdated(table_of(was), quiet) is expected


def test_widths_that_were_never_measured_are_not_asked_for() -> None:
    asked: list[int] = []

    def step(n_tokens: int, depth: int) -> float:
        asked.append(n_tokens)
        return quiet(n_tokens, depth)

    assert not is_outdated(table_of(quiet, max_width=2), step)
    assert asked == [1, 1]


class Machine:
    """What cost_table needs of a decoder, with a speed that can be changed."""

    def __init__(self) -> None:
        self.slow = 1.0
        self.n_passes = 0
        self.decoder = self.with_context(512)

    def with_context(self, n_ctx: int) -> BlockDecoder:
        return cast(BlockDecoder, SimpleNamespace(n_seq=4, n_ctx=n_ctx, time_step=self._step))

    def _step(self, n_tokens: int, depth: int) -> float:
        self.n_passes += 1
        return self.slow * quiet(n_tokens, depth)

    def load(
        self, folder: Path, choice: Choice | None = None, *, target: Path | None = None
    ) -> tuple[CostTable, list[str]]:
        choice = choice or Choice("lookup", n_max=4)
        table = cost_table(self.decoder, choice, target=target, setting="", folder=folder)
        return table, choice.notices


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What other programs take of the processors."""
    taken = SimpleNamespace(share=0.0)
    monkeypatch.setattr(cost_cache, "Others", lambda: SimpleNamespace(share=lambda: taken.share))
    return taken


def test_a_kept_table_is_used_after_three_passes(tmp_path: Path, others: SimpleNamespace) -> None:
    machine = Machine()
    first, notices = machine.load(tmp_path)
    assert notices == []
    machine.n_passes = 0
    again, _ = machine.load(tmp_path)
    assert again.to_json() == first.to_json()
    assert machine.n_passes == 3


def test_a_table_of_a_busy_moment_is_measured_again_and_replaced(
    tmp_path: Path, others: SimpleNamespace
) -> None:
    machine = Machine()
    machine.slow = 2.0
    machine.load(tmp_path)
    machine.slow = 1.0
    table, notices = machine.load(tmp_path)
    assert notices == []
    assert table.verify_s(4, 0) == quiet(4, 0)
    machine.n_passes = 0
    machine.load(tmp_path)
    assert machine.n_passes == 3  # the new one was kept


def test_what_was_measured_beside_other_programs_is_not_kept(
    tmp_path: Path, others: SimpleNamespace
) -> None:
    """Steadily busy: no pass is slower than another, so the passes alone do not tell."""
    machine = Machine()
    others.share = 0.3
    _, notices = machine.load(tmp_path)
    assert notices == ["the machine was busy while passes were timed: not kept"]
    assert list(tmp_path.iterdir()) == []


def test_a_table_of_a_tiny_context_is_not_used_for_a_wide_one(
    tmp_path: Path, others: SimpleNamespace
) -> None:
    """It ends at the width that fitted: wider passes would be guesses for good."""
    machine = Machine()
    machine.decoder = machine.with_context(8)
    assert machine.load(tmp_path)[0].widest == 8
    machine.decoder = machine.with_context(512)
    assert machine.load(tmp_path)[0].widest == 32


def test_a_table_of_another_processor_under_the_same_name_is_not_used(
    tmp_path: Path, others: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card that was exchanged is CUDA0 again, and a cache folder may be on several machines."""
    machine = Machine()
    for n_files, description in enumerate(["a card", "another card", "a card"], start=1):
        card = SimpleNamespace(name="CUDA0", description=description)
        monkeypatch.setattr(cost_cache, "device_memory", lambda card=card: [card])
        machine.load(tmp_path)
        assert len(list(tmp_path.iterdir())) == min(n_files, 2)


def test_a_table_of_other_weights_is_not_used(tmp_path: Path, others: SimpleNamespace) -> None:
    machine, target, drafter = Machine(), tmp_path / "target", tmp_path / "drafter"
    n_files = 0
    for weights in (b"four bits", b"eight bits"):
        target.write_bytes(weights)
        for draft_weights in (b"narrow", b"wide"):
            drafter.write_bytes(draft_weights)
            machine.load(tmp_path / "cache", Choice("lookup", drafter, n_max=4), target=target)
            n_files += 1
            assert len(list((tmp_path / "cache").iterdir())) == n_files


@pytest.mark.parametrize(
    ("name", "value"),
    [("__version__", "9.9.9"), ("llama_print_system_info", lambda: b"AVX512 = 1")],
)
def test_a_table_of_another_build_of_llama_cpp_is_not_used(
    tmp_path: Path,
    others: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: object,
) -> None:
    machine = Machine()
    machine.load(tmp_path)
    monkeypatch.setattr(cost_cache.llama_cpp, name, value)
    machine.load(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_table_of_other_threads_or_gpu_layers_is_not_used(
    tmp_path: Path, others: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, target = Machine(), write_llama(tmp_path / "target.gguf")

    def timed(decoder: BlockDecoder, choice: Choice, **given: Any) -> CostTable:
        return cost_table(machine.decoder, choice, **given)  # real passes may be too uneven to keep

    monkeypatch.setattr(loading, "cost_table", timed)
    settings = [{"n_threads": 1}, {"n_threads": 2}, {"n_threads": 2, "n_gpu_layers": 0}]
    for n_files, setting in enumerate(settings, start=1):
        for _ in range(2):
            with Engine(
                target, drafter="lookup", n_ctx=512, cost_cache=tmp_path / "cache", **setting
            ):
                assert len(list((tmp_path / "cache").iterdir())) == n_files
