"""Traces: written line by line, never in the way of decoding, read back with every line checked."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from synthetic_trace import header, one_round, recording

from dspark_edge.cost import CostTable
from dspark_edge.trace import TraceBlock, TraceEvent, TraceWriter, read_trace


def write_all(path: Path, lines: list[Any]) -> None:
    with TraceWriter(path) as writer:
        for line in lines:
            writer.write(line)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    made = recording(n_texts=1, n_tokens=20)
    made.header.cost = CostTable(verify={0: {1: 0.01, 4: 0.02}}, draft={1: 0.003}).to_json()
    made.rounds[3].predicted_s, made.rounds[3].pass_s = 0.0125, 0.008
    made.rounds[3].alternatives = [(1, 1.0, 0.01), (4, 2.5, 0.02)]
    event = TraceEvent(event="pressure", t_s=0.05, text="parked: 93 % of RAM in use")
    write_all(tmp_path / "t", [made.header, *made.rounds[:5], event, *made.rounds[5:]])
    trace = read_trace(tmp_path / "t")
    assert trace.header == made.header
    assert trace.rounds == made.rounds
    assert trace.events == [event]


def test_a_trace_without_the_time_inside_llama_cpp_is_read_too(tmp_path: Path) -> None:
    write_all(tmp_path / "t", [header(), one_round(0, 10, [5], []), one_round(1, 11, [6], [])])
    first, second, third = (tmp_path / "t").read_text().splitlines()
    line = json.loads(second)
    del line["pass_s"]
    (tmp_path / "t").write_text(f"{first}\n{json.dumps(line)}\n{third}\n")
    assert [line.pass_s for line in read_trace(tmp_path / "t").rounds] == [None, None]


def test_a_trace_from_before_there_was_a_lookup_cache_is_read_too(tmp_path: Path) -> None:
    block = TraceBlock(proposer="lookup", tokens=[5], certainty=[0.5], match_len=3)
    write_all(tmp_path / "t", [header(), one_round(0, 10, [5], [block])])
    first, second = (tmp_path / "t").read_text().splitlines()
    line = json.loads(second)
    for name in ("is_cached", "cache_agreement", "cache_count"):
        del line["sequences"][0]["blocks"][0][name]
    (tmp_path / "t").write_text(f"{first}\n{json.dumps(line)}\n")
    assert read_trace(tmp_path / "t").rounds[0].sequences[0].blocks == [block]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("is_cached", "yes", "is_cached is 'yes'; it must be true or false"),
        ("match_len", 2**80, "it must be a whole number, at least 0"),
        ("cache_count", [10**400], "it must be token ids"),
    ],
)
def test_what_lookup_never_says_is_refused(
    tmp_path: Path, name: str, value: object, message: str
) -> None:
    block = TraceBlock(proposer="lookup", tokens=[5], certainty=[0.5], match_len=3)
    write_all(tmp_path / "t", [header(), one_round(0, 10, [5], [block])])
    first, second = (tmp_path / "t").read_text().splitlines()
    line = json.loads(second)
    line["sequences"][0]["blocks"][0][name] = value
    (tmp_path / "t").write_text(f"{first}\n{json.dumps(line)}\n")
    with pytest.raises(ValueError, match=re.escape(message)):
        read_trace(tmp_path / "t")


def test_plain_dicts_are_written_as_they_are(tmp_path: Path) -> None:
    write_all(tmp_path / "t", [header(), {"event": "notice", "t_s": 0, "text": "hello"}])
    assert read_trace(tmp_path / "t").events == [TraceEvent(event="notice", t_s=0.0, text="hello")]


def test_the_first_line_has_the_keys_of_the_format(tmp_path: Path) -> None:
    write_all(tmp_path / "t", [header(block=4)])
    assert json.loads((tmp_path / "t").read_text()) == {
        "trace": 1,
        "target": "made up",
        "drafter": "made up",
        "n_ctx": 4096,
        "n_seq": 1,
        "block": 4,
        "mode": "always",
        "cost": None,
    }


def test_each_line_is_in_the_file_at_once(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t") as writer:
        writer.write(header())
        assert (tmp_path / "t").read_text().endswith("}\n")


def test_a_full_disk_ends_the_trace_with_one_warning() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with TraceWriter("/dev/full") as writer:
        with pytest.warns(RuntimeWarning, match="trace /dev/full ends here"):
            writer.write(header())
        assert not writer.is_on
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            writer.write(header())


def test_a_line_that_json_cannot_hold_ends_the_trace_with_a_warning(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t") as writer:
        writer.write(header())
        for value in (float("nan"), object()):
            if writer.is_on:
                with pytest.warns(RuntimeWarning, match="ends here"):
                    writer.write({"event": "notice", "t_s": value})
    assert read_trace(tmp_path / "t").rounds == []


def test_a_place_that_cannot_be_written_is_the_callers_mistake(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot be written \(No such file.*; pass another path"):
        TraceWriter(tmp_path / "missing" / "t")


def test_an_empty_file_is_no_trace(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("")
    with pytest.raises(ValueError, match="line 1: the file is empty"):
        read_trace(tmp_path / "t")


def broken(key: str, value: object) -> Callable[[dict[str, Any]], None]:
    """Sets one key of a round's line, of its sequence or of its block; None removes it."""

    def change(line: dict[str, Any]) -> None:
        owner = line
        *path, last = key.split(".")
        for name in path:
            owner = owner[name][0]
        if value is None:
            del owner[last]
        else:
            owner[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (broken("round", None), "line 2: round is missing"),
        (broken("t_s", -1.0), "line 2: t_s is '-1.0'; it must be a time in seconds"),
        (broken("pass_s", -1.0), "pass_s is '-1.0'; it must be a time in seconds"),
        (broken("verify_s", float("nan")), "verify_s is 'nan'; it must be a time in seconds"),
        (broken("batch_tokens", True), "batch_tokens is 'True'; it must be a whole number"),
        (broken("state", 3), "state is '3'; it must be text"),
        (broken("sequences", {}), "sequences is '{}'; it must be a list"),
        (broken("alternatives", [[1, 2]]), "alternatives must be"),
        (broken("sequences.n_accepted", 1), "n_accepted 1 is more than verify_len 0"),
        (broken("sequences.proposer", "magic"), "it must be drafter or lookup"),
        (broken("sequences.emitted", ["a"]), "it must be token ids"),
        (broken("sequences.blocks.confidence", [0.5]), "confidence has 1 values but the block has"),
        (broken("sequences.blocks.tokens", None), "tokens is missing"),
    ],
)
def test_a_broken_round_is_refused_with_its_line(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    block = TraceBlock(proposer="drafter", tokens=[5, 6], confidence=[0.9, 0.8], certainty=[1, 2])
    write_all(tmp_path / "t", [header(), one_round(0, 10, [5], [block])])
    first, second = (tmp_path / "t").read_text().splitlines()
    line = json.loads(second)
    change(line)
    (tmp_path / "t").write_text(f"{first}\n{json.dumps(line)}\n")
    with pytest.raises(ValueError, match="line 2: ") as caught:
        read_trace(tmp_path / "t")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"trace": 2}\n', "line 1: trace version is 2 but 1 is read"),
        ("[]\n", "line 1: line is not a JSON object"),
        ("hello\n", "line 1: not JSON"),
        ('{"trace": 1, "target": "a"', "line 1: cut off; delete this line"),
        ('{"trace": 1, "target": "a"}\n', "line 1: drafter is missing"),
        ('{"trace": 1, "cost": {}}\n', "line 1: cost table must have"),
    ],
)
def test_a_broken_header_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "t").write_text(text)
    with pytest.raises(ValueError, match="line 1") as caught:
        read_trace(tmp_path / "t")
    assert message in str(caught.value)
