"""Whole characters and stop strings, however the bytes are cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_edge.text import TextStream


def shown(pieces: list[bytes], stop: list[str]) -> tuple[str, str | None]:
    stream = TextStream(stop)
    text = "".join([stream.push(piece) for piece in pieces]) + stream.flush()
    return text, stream.stop_string


def test_ascii_is_shown_at_once() -> None:
    assert TextStream().push(b"hello") == "hello"


def test_a_character_is_held_back_until_its_last_byte() -> None:
    stream = TextStream()
    smile = "\N{SLIGHTLY SMILING FACE}".encode()
    assert [stream.push(smile[i : i + 1]) for i in range(4)] == ["", "", "", smile.decode()]


def test_an_incomplete_character_becomes_a_replacement_character_at_the_end() -> None:
    stream = TextStream()
    assert stream.push(b"a\xe2\x82") == "a"
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_an_invalid_byte_becomes_a_replacement_character() -> None:
    assert TextStream().push(b"a\xffb") == "a\ufffdb"


def test_the_text_is_cut_before_the_stop_string() -> None:
    stream = TextStream(["END"])
    assert stream.push(b"done END and more") == "done "
    assert stream.stopped
    assert stream.stop_string == "END"


def test_nothing_is_shown_after_the_stop() -> None:
    stream = TextStream(["\n"])
    stream.push(b"line\n")
    assert stream.push(b"next") == ""
    assert stream.flush() == ""


def test_a_stop_string_is_found_across_pushes() -> None:
    stream = TextStream(["<|end|>"])
    assert [stream.push(p) for p in (b"hi <", b"|en", b"d|", b">x")] == ["hi ", "", "", ""]
    assert stream.stop_string == "<|end|>"


def test_what_cannot_become_a_stop_string_any_more_is_released() -> None:
    stream = TextStream(["abcd"])
    assert stream.push(b"xabc") == "x"
    assert stream.push(b"e") == "abce"
    assert not stream.stopped


def test_a_stop_string_may_begin_inside_a_failed_beginning() -> None:
    assert shown([b"a", b"a", b"a", b"b"], ["aab"]) == ("a", "aab")


def test_held_text_is_given_back_at_the_end() -> None:
    stream = TextStream(["END"])
    assert stream.push(b"the EN") == "the "
    assert stream.flush() == "EN"
    assert not stream.stopped


def test_the_stop_that_completes_first_wins_even_if_it_starts_later() -> None:
    assert shown([b"x abcdef"], ["abcdef", "cd"]) == ("x ab", "cd")


def test_of_two_stops_that_complete_together_the_one_that_starts_first_wins() -> None:
    assert shown([b"x abcd"], ["cd", "bcd"]) == ("x a", "bcd")


def test_the_earlier_of_two_stops_in_one_piece_wins() -> None:
    assert shown([b"one STOP two END"], ["END", "STOP"]) == ("one ", "STOP")


def test_a_stop_string_of_many_byte_characters_is_found_byte_by_byte() -> None:
    text = "so \N{EM DASH}\N{EM DASH} no"
    pieces = [bytes([b]) for b in text.encode()]
    assert shown(pieces, ["\N{EM DASH}\N{EM DASH}"]) == ("so ", "\N{EM DASH}\N{EM DASH}")


def test_a_stop_string_completed_by_the_flush_stops_too() -> None:
    stream = TextStream(["a\ufffd"])
    assert stream.push(b"xa\xe2") == "x"
    assert stream.flush() == ""
    assert stream.stop_string == "a\ufffd"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="stop holds an empty string"):
        TextStream(["a", ""])


def test_a_bare_string_as_stop_is_refused() -> None:
    with pytest.raises(ValueError, match=r"stop 'END' is a string .*; pass \['END'\]"):
        TextStream("END")


def by_definition(text: str, stop: list[str]) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        completed = [s for s in stop if text[:end].endswith(s)]
        if completed:
            longest = max(completed, key=len)
            return text[: end - len(longest)], longest
    return text, None


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(c % (len(data) + 1) for c in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


cut_places = st.lists(st.integers(0, 100), max_size=12)


@given(
    st.text(alphabet="ab\N{EURO SIGN}", max_size=24),
    st.lists(st.text(alphabet="ab\N{EURO SIGN}", min_size=1, max_size=4), max_size=3),
    cut_places,
)
def test_stop_strings_are_found_as_defined_for_every_split(
    text: str, stop: list[str], cuts: list[int]
) -> None:
    assert shown(cut(text.encode(), cuts), stop) == by_definition(text, stop)


@given(st.binary(max_size=24), cut_places)
def test_any_bytes_read_the_same_for_every_split(data: bytes, cuts: list[int]) -> None:
    assert shown(cut(data, cuts), []) == (data.decode("utf-8", errors="replace"), None)


@given(st.text(alphabet="abc", max_size=24), cut_places)
def test_what_is_shown_is_never_taken_back(text: str, cuts: list[int]) -> None:
    stream = TextStream(["abc", "ca"])
    full, _ = by_definition(text, ["abc", "ca"])
    so_far = ""
    for piece in cut(text.encode(), cuts):
        so_far += stream.push(piece)
        assert full.startswith(so_far)
