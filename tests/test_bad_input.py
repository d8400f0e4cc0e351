"""Wrong arguments and broken files: the right error, saying value and limit, and never an abort.

Broken drafters and targets are opened in forked children of a process of their own, so that an
abort inside llama.cpp fails a test and not the test run.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_cpp import llama_grammar
from llama_cpp.llama_grammar import json_schema_to_gbnf
from tiny_models import (
    DrafterSpec,
    TargetSpec,
    token_id,
    vocabulary,
    write_drafter,
    write_llama,
)

from dspark_edge import _core
from dspark_edge.errors import DecodeError, ModelError, PairError

N_VOCAB = 320
PROMPT = [token_id("<|bos|>"), *b"the quick brown fox"]
CHILD_S = 20  # a child that takes longer hangs


def decoder_of(target: Path, drafter: Path | None = None, **options: Any) -> _core.BlockDecoder:
    options = {
        "n_ctx": 64,
        "n_seq": 2,
        "n_batch": 64,
        "n_threads": 1,
        "max_verify_len": 4,
    } | options
    return _core.BlockDecoder(
        _core.DecoderConfig(target_path=str(target), drafter_path=str(drafter or ""), **options)
    )


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> _core.BlockDecoder:
    """A pair with sequence 0 open and filled, sequence 1 closed. Tests leave it so."""
    folder = tmp_path_factory.mktemp("pair")
    opened = decoder_of(write_llama(folder / "llama.gguf"), write_drafter(folder / "drafter.gguf"))
    opened.open_sequence(0, _core.SamplingConfig())
    opened.prefill(0, PROMPT[:-1])
    return opened


def message(error: type[Exception], call: Callable[[], object]) -> str:
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    return str(caught.value)


# ---------------------------------------------------------------- arguments of a call


@pytest.mark.parametrize("seq_id", [-1, 2, 2**31 - 1])
def test_a_seq_id_out_of_range_is_named_with_the_range(
    decoder: _core.BlockDecoder, seq_id: int
) -> None:
    expected = f"seq_id is {seq_id}; this decoder has sequences 0 to 1"
    calls: list[Callable[[], object]] = [
        lambda: decoder.open_sequence(seq_id, _core.SamplingConfig()),
        lambda: decoder.close_sequence(seq_id),
        lambda: decoder.n_past(seq_id),
        lambda: decoder.prefill(seq_id, [1]),
        lambda: decoder.rewind(seq_id, 0),
        lambda: decoder.draft([seq_id], [1]),
        lambda: decoder.verify([0, seq_id], [[1], [1]]),
    ]
    assert [message(ValueError, call) for call in calls] == [expected] * len(calls)


def test_a_closed_sequence_is_named_with_the_way_out(decoder: _core.BlockDecoder) -> None:
    expected = "sequence 1 is not open; call open_sequence first"
    calls: list[Callable[[], object]] = [
        lambda: decoder.close_sequence(1),
        lambda: decoder.n_past(1),
        lambda: decoder.prefill(1, [1]),
        lambda: decoder.rewind(1, 0),
        lambda: decoder.draft([1], [1]),
        lambda: decoder.verify([1], [[1]]),
    ]
    assert [message(ValueError, call) for call in calls] == [expected] * len(calls)


@pytest.mark.parametrize("token", [-1, N_VOCAB, 2**31 - 1])
def test_a_token_id_out_of_range_is_named_with_the_range(
    decoder: _core.BlockDecoder, token: int
) -> None:
    expected = f"token id is {token}; this model has ids 0 to 319"
    calls: list[Callable[[], object]] = [
        lambda: decoder.prefill(0, [1, token]),
        lambda: decoder.draft([0], [token]),
        lambda: decoder.verify([0], [[1, 2, token]]),
        lambda: decoder.token_bytes(token),
    ]
    assert [message(ValueError, call) for call in calls] == [expected] * len(calls)


def test_a_sequence_given_twice_is_named(decoder: _core.BlockDecoder) -> None:
    expected = "sequence 0 is given twice; give each once"
    assert message(ValueError, lambda: decoder.draft([0, 0], [1, 1])) == expected
    assert message(ValueError, lambda: decoder.verify([0, 0], [[1], [1]])) == expected


def test_lists_of_unequal_or_no_length_are_counted(decoder: _core.BlockDecoder) -> None:
    rule = "give one entry per sequence, and at least one"
    expected = {
        f"got 0 sequences and 0 entries for them; {rule}": ([], []),
        f"got 1 sequences and 2 entries for them; {rule}": ([0], [1, 1]),
        f"got 1 sequences and 0 entries for them; {rule}": ([0], []),
    }
    for text, (seq_ids, anchors) in expected.items():
        rows = [[anchor] for anchor in anchors]
        assert message(ValueError, lambda s=seq_ids, a=anchors: decoder.draft(s, a)) == text
        assert message(ValueError, lambda s=seq_ids, r=rows: decoder.verify(s, r)) == text


@pytest.mark.parametrize("n_tokens", [0, 6, 60])
def test_too_many_or_no_verify_tokens_are_counted(
    decoder: _core.BlockDecoder, n_tokens: int
) -> None:
    assert message(ValueError, lambda: decoder.verify([0], [[1] * n_tokens])) == (
        f"verify_tokens of sequence 0 has {n_tokens} tokens; "
        "give the anchor and at most 4 draft tokens (max_verify_len)"
    )


@pytest.mark.parametrize("n_tokens", [0, 65])
def test_too_many_or_no_prompt_tokens_are_counted(
    decoder: _core.BlockDecoder, n_tokens: int
) -> None:
    assert message(ValueError, lambda: decoder.prefill(0, [1] * n_tokens)) == (
        f"prefill got {n_tokens} tokens; give 1 to n_batch = 64 at a time"
    )


@pytest.mark.parametrize("n_keep", [-1, 20, 2**31 - 1])
def test_a_rewind_beyond_the_sequence_is_named(decoder: _core.BlockDecoder, n_keep: int) -> None:
    assert message(ValueError, lambda: decoder.rewind(0, n_keep)) == (
        f"rewind to {n_keep} of sequence 0, which holds 19 tokens"
    )


def test_a_timing_pass_out_of_range_is_named(decoder: _core.BlockDecoder) -> None:
    for n_tokens, depth in ((0, 0), (33, 0), (1, -1), (1, 64), (2**31 - 1, 0)):
        assert message(ValueError, lambda n=n_tokens, d=depth: decoder.time_step(n, d)) == (
            f"time_step of {n_tokens} tokens at depth {depth}; at most 32 tokens, inside n_ctx = 64"
        )
    for n_seq in (0, 3):
        assert message(ValueError, lambda n=n_seq: decoder.time_draft(n)) == (
            f"time_draft of {n_seq} sequences; this decoder has 2"
        )
    assert message(ValueError, lambda: decoder.time_draft(1)) == (
        "time_draft needs all sequences closed"
    )


def test_a_timing_pass_needs_a_closed_sequence(tiny_llama: Path) -> None:
    full = decoder_of(tiny_llama, n_seq=1)
    full.open_sequence(0, _core.SamplingConfig())
    assert message(ValueError, lambda: full.time_step(1, 0)) == (
        "all sequences are open; measuring needs a closed one"
    )
    assert message(ValueError, lambda: full.time_draft(1)) == "this decoder has no drafter to time"


def test_refused_calls_leave_the_sequence_as_it_was(
    decoder: _core.BlockDecoder, tiny_llama: Path
) -> None:
    assert decoder.n_past(0) == len(PROMPT) - 1
    fresh = decoder_of(tiny_llama)
    fresh.open_sequence(0, _core.SamplingConfig())
    fresh.prefill(0, PROMPT[:-1])
    texts = [each.verify([0], [[PROMPT[-1]]])[0].tokens for each in (decoder, fresh)]
    decoder.rewind(0, len(PROMPT) - 1)
    assert texts[0] == texts[1]


def test_wrong_types_raise_type_error(decoder: _core.BlockDecoder) -> None:
    for call in (
        lambda: decoder.prefill(0, "abc"),  # type: ignore[arg-type]
        lambda: decoder.prefill(0, [1.5]),  # type: ignore[list-item]
        lambda: decoder.prefill(0, [2**40]),
        lambda: decoder.verify([0], [1]),  # type: ignore[list-item]
        lambda: decoder.open_sequence(0, None),  # type: ignore[arg-type]
        lambda: _core.SamplingConfig(seed=-1),
        lambda: _core.SamplingConfig(top_q=1),  # type: ignore[call-arg]
        lambda: _core.BlockDecoder(None),  # type: ignore[arg-type]
    ):
        message(TypeError, call)


def test_draw_token_names_what_it_cannot_take() -> None:
    config, row = _core.SamplingConfig(), np.zeros(4, np.float32)
    for bad in (np.zeros(0, np.float32), np.zeros((2, 2), np.float32)):
        assert message(ValueError, lambda b=bad: _core.draw_token(b, config, 0)) == (
            "logits must be one row of at least one number"
        )
    assert message(ValueError, lambda: _core.draw_token(row, config, 0, [4])) == (
        "token 4 is not a column of the row"
    )
    grammar = _core.SamplingConfig(grammar='root ::= "a"')
    assert message(ValueError, lambda: _core.draw_token(row, grammar, 0)) == (
        "draw_token takes no grammar: it has no vocabulary"
    )


# ---------------------------------------------------------------- sampling


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"temperature": -1.0}, "temperature is -1; it must be 0 to 100"),
        ({"temperature": 101.0}, "temperature is 101; it must be 0 to 100"),
        ({"temperature": float("nan")}, "temperature is nan; it must be 0 to 100"),
        ({"top_k": -1}, "top_k is -1; it must be 0 (off) or more"),
        ({"top_p": 0.0}, "top_p is 0; it must be above 0, at most 1"),
        ({"top_p": 1.5}, "top_p is 1.5; it must be above 0, at most 1"),
        ({"min_p": -0.5}, "min_p is -0.5; it must be 0 to 1"),
        ({"min_p": 2.0}, "min_p is 2; it must be 0 to 1"),
        ({"repeat_penalty": 0.0}, "repeat_penalty is 0; it must be above 0, at most 100"),
        ({"frequency_penalty": 200.0}, "frequency_penalty is 200; it must be -100 to 100"),
        ({"presence_penalty": float("inf")}, "presence_penalty is inf; it must be -100 to 100"),
        ({"penalty_last_n": -1}, "penalty_last_n is -1; it must be 0 or more"),
        ({"penalty_from": -1}, "penalty_from is -1; it must be 0 or more"),
        (
            {"n_logprobs": 321},
            "logprobs is 321; it must be 0 to the vocabulary size, 320",
        ),
        ({"logit_bias": [(320, 1.0)]}, "logit_bias token is 320; it must be 0 to 319"),
        (
            {"logit_bias": [(5, float("inf"))]},
            "logit_bias of token 5 is inf; it must be finite or -inf",
        ),
        (
            {"logit_bias": [(5, float("nan"))]},
            "logit_bias of token 5 is nan; it must be finite or -inf",
        ),
    ],
    ids=str,
)
def test_a_sampling_parameter_out_of_range_is_named_with_its_range(
    options: dict[str, Any], expected: str, decoder: _core.BlockDecoder
) -> None:
    config = _core.SamplingConfig(**options)
    assert message(ValueError, lambda: decoder.open_sequence(0, config)) == expected
    assert decoder.n_past(0) == len(PROMPT) - 1


@pytest.mark.parametrize(
    "grammar",
    [
        "x",
        "root ::= (",
        'rot ::= "a"',
        "root ::= missing",
        'root ::= "a',
        "root ::= [a-",
        'root ::= "\\xZZ"',
        'root ::= "a" ) b ::= ' + ")" * 1000 + "(" * 200,
        'root ::= "\\x" "' + "(" * 5000 + '"',
        "root ::= <|nope|>",
        "?" * 5000,
    ],
    ids=lambda grammar: repr(grammar[:30]),
)
def test_a_grammar_that_does_not_parse_is_refused(
    grammar: str, decoder: _core.BlockDecoder
) -> None:
    config = _core.SamplingConfig(grammar=grammar)
    assert message(ValueError, lambda: decoder.open_sequence(0, config)) == (
        "the grammar does not parse, or has no rule named root; see GBNF's syntax"
    )


def test_a_grammar_that_would_exhaust_memory_is_refused(decoder: _core.BlockDecoder) -> None:
    config = _core.SamplingConfig(grammar='root ::= "a{3,1}" [{9,1}] "b"{ 5 , 2 }')
    assert message(ValueError, lambda: decoder.open_sequence(0, config)) == (
        "the grammar repeats {5,2}: the upper limit is below the lower one"
    )


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= ("a"?){100}',
        'root ::= ("a"?){1000}',
        "root ::= " + '"a"? ' * 100,
        'root ::= (("ab"?){0,9}){9} "b"',
        'root ::= ("b" x{64} "c"?){3}\nx ::= "a" |',
        'root ::= "b" x x\nx ::= y{8}\ny ::= [a]* "c"? "d"? "e"? "f"?',
        'root ::= ("b" ("a"?){40}) ("c"? "d"?){20} # }',
        'root ::= # ends with the line\r ("a"?){100}',
        "root ::= " + "!<[1]>? " * 100,
        'root ::= x{100}\nx ::= "a" | ""',
        'root ::= ("a" "" | "" ""){100}',
        'root ::= ("ab" | []){100}',
        'root ::= ("ab" | [^]){100}',
        'root ::= "b" o{60} o{60}\no ::= "a" root | ""',
        'root ::= a | "b"\na ::= "a" b{100} c\nb ::= c c | d\nc ::= d |\nd ::= "d" a',
        'root ::= ("b" ("ac"?){40})? ("cc"? "dd"?){20}',
        'root ::= (("ab"?){40} "b" ("ab"?){40})*',
    ],
)
def test_a_grammar_that_would_take_forever_is_refused(
    grammar: str, decoder: _core.BlockDecoder
) -> None:
    # The matcher follows all that can be left out at once: a round took seconds, or never ended.
    limit = "elements in a row that can all be left out; the limit is 64: repeat something that"
    with pytest.raises(ValueError, match=limit):
        decoder.check_sampling(_core.SamplingConfig(grammar=grammar))


def doubled(n: int, ends: tuple[str, str] = ("", "")) -> str:
    """2**n ways to begin: n rules of the next one, or the next one."""
    rules = [f"r{i} ::= r{i + 1} {ends[0]} | r{i + 1} {ends[1]}" for i in range(n)]
    return "\n".join(["root ::= r0", *rules, f'r{n} ::= "x"', ""])


@pytest.mark.parametrize(
    ("grammar", "n_ways"),
    [
        (doubled(11), "2048"),
        (doubled(40), "2048"),
        (doubled(40, ('"a"', '"b"')), "2048"),
        ("root ::= " + " | ".join('"a"' for _ in range(1025)), "1025"),
        ('root ::= x x "c"\nx ::= ' + '"bb" | ' * 600, "1203"),
        ('root ::= ("a" x) x "c"\nx ::= ' + '"bb" | ' * 600, "1202"),
        ('root ::= (x "a" x)*\nx ::= ' + '"bb" | ' * 600, "1203"),
    ],
    ids=lambda text: text[:30],
)
def test_a_grammar_with_too_many_ways_to_go_on_is_refused(
    grammar: str, n_ways: str, decoder: _core.BlockDecoder
) -> None:
    # r | r in 40 rules kept llama.cpp's search for left recursion busy for days.
    config = _core.SamplingConfig(grammar=grammar)
    assert message(ValueError, lambda: decoder.check_sampling(config)) == (
        f"the grammar has {n_ways} ways to go on at one place; the limit is 1024: let fewer "
        'alternatives begin there, as in "a" ("b" | "c") for "ab" | "ac"'
    )


def test_a_grammar_whose_rules_are_searched_for_too_long_is_refused(
    decoder: _core.BlockDecoder,
) -> None:
    chain = [f"r{i} ::= r{i + 1}" for i in range(9, 450)]
    again = [f"s{i} ::= r0" for i in range(10_000)]
    grammar = "\n".join([doubled(9).replace('r9 ::= "x"', ""), *chain, 'r450 ::= "x"', *again])
    with pytest.raises(ValueError, match=r"takes llama\.cpp over 67108864 steps, the limit"):
        decoder.check_sampling(_core.SamplingConfig(grammar=grammar))


@pytest.mark.parametrize(
    ("grammar", "rule"),
    [
        ('root ::= root "a"', "root"),
        ('root ::= "a" r\nr ::= e r "a" | "b"\ne ::= f\nf ::= "c" |', "r"),
        ('root ::= a\na ::= "x"? b* c "d" | "e"\nb ::= "b"\nc ::= (a | "c")', "a"),
    ],
)
def test_a_rule_that_can_begin_with_itself_is_named(
    grammar: str, rule: str, decoder: _core.BlockDecoder
) -> None:
    # llama.cpp overlooks it behind a rule that is empty by way of another, and never comes back.
    config = _core.SamplingConfig(grammar=grammar)
    assert message(ValueError, lambda: decoder.check_sampling(config)) == (
        f"the grammar's rule {rule} can begin with itself; put something before it, as in "
        'sum ::= number ("+" number)*'
    )


@pytest.mark.parametrize(
    ("grammar", "n"),
    [
        ("root ::= ([a-z]?){20}", 20),
        ("root ::= " + "[a-z]? [0-9a]* " * 5, 10),
        ('root ::= (" "?){60}', 60),
        ("root ::= x x x\nx ::= [^0-9]? .? ([\\x20-\\x7E])? # each a letter, or nothing", 9),
    ],
)
def test_a_row_that_can_be_the_same_character_is_refused(
    grammar: str, n: int, decoder: _core.BlockDecoder
) -> None:
    # A token of n letters can be cut in as many ways as n of the row's elements can be chosen.
    config = _core.SamplingConfig(grammar=grammar)
    assert message(ValueError, lambda: decoder.check_sampling(config)) == (
        f"the grammar has {n} elements in a row that can be the same character or be left out; "
        "the limit is 8: repeat something that cannot be empty, as in [a-z]{0,100}"
    )


@pytest.mark.parametrize(
    ("grammar", "n", "limit"),
    [
        ("root ::= ([a-z] | [a-y] | [^0-9]){10}", 3, 2),
        ("root ::= (" + "[a-z] | " * 7 + "[a-z])+", 8, 4),
        ("root ::= (" + "[a-z]? " * 7 + "[a-z]){10}", 7, 2),
    ],
)
def test_a_repetition_that_can_read_a_character_in_many_ways_is_refused(
    grammar: str, n: int, limit: int, decoder: _core.BlockDecoder
) -> None:
    config = _core.SamplingConfig(grammar=grammar)
    assert message(ValueError, lambda: decoder.check_sampling(config)) == (
        f"the grammar has {n} ways to read a character within something that it repeats; the "
        f"limit is {limit}: let them differ, as in ([a-z] | [0-9])*"
    )


@pytest.mark.parametrize(
    ("grammar", "n"),
    [
        ('root ::= "b" o{20}\no ::= "a" root | ""', 20),
        ('root ::= "b" o{1,3} o? ws\no ::= "a" root\nws ::= " "*', 3),
        ('root ::= "-" root{0,3}', 3),
    ],
)
def test_a_rule_that_comes_back_in_its_own_end_is_refused(
    grammar: str, n: int, decoder: _core.BlockDecoder
) -> None:
    # Each "ba" of the text multiplied the stacks by the number of elements.
    config = _core.SamplingConfig(grammar=grammar)
    assert message(ValueError, lambda: decoder.check_sampling(config)) == (
        f"the grammar has {n} elements at the end of rule root that begin alike, can be left out "
        "and lead back to it; the limit is 2: close the rule with something, as in "
        '"(" list ")"'
    )


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        ('root ::= "' + "a" * 10_000 + '"{1999}', "has 19990016 elements with all repetitions"),
        ("root ::= [" + "a-b" * 10_000 + "]{0,500}", "has 10008016 elements with all repetitions"),
        ("root ::= " + '"a"{1,1999} ' * 200, "has 6793416 elements with all repetitions written"),
        ("n" * 2000 + ' ::= "a"', "has a name of 2000 bytes; the limit is 1024"),
        ("n" * 1000 + " ::= " + "(a)" * 50_000, "elements with all repetitions written out; the"),
        ("{" * 200_000, "does not parse"),
    ],
    ids=lambda text: text[:30],
)
def test_a_grammar_of_a_few_kilobytes_takes_neither_gigabytes_nor_seconds(
    grammar: str, expected: str, decoder: _core.BlockDecoder
) -> None:
    began = time.perf_counter()
    with pytest.raises(ValueError, match=expected):
        decoder.check_sampling(_core.SamplingConfig(grammar=grammar))
    assert time.perf_counter() - began < 2


@pytest.mark.parametrize(
    "grammar",
    ['root ::= ("a"{5 #\n,6})', 'root ::= (("a"?){ #\n100})', 'root ::= ("a"{5,# }\n6})'],
)
def test_a_comment_between_braces_is_refused(grammar: str, decoder: _core.BlockDecoder) -> None:
    # llama.cpp reads {5,2} behind such a comment, and adds rules until the memory is gone.
    config = _core.SamplingConfig(grammar=grammar)
    assert message(ValueError, lambda: decoder.check_sampling(config)) == (
        "the grammar has a comment between { and }; write it outside of them"
    )


def test_a_grammar_that_nests_rules_too_deeply_is_refused(decoder: _core.BlockDecoder) -> None:
    rules = [f'r{i} ::= "a" r{i + 1}' for i in range(600)]
    grammar = "\n".join(["root ::= r0", *rules, 'r600 ::= "b"'])
    with pytest.raises(ValueError, match="nests rules and parentheses deeper than 512"):
        decoder.check_sampling(_core.SamplingConfig(grammar=grammar))


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "a"{0,2000}',
        'root ::= ("a" "b"?){1000}',
        'root ::= ("a"? "b"? "c"?)+ # ("a"?){100}',
        'root ::= "(\\"a\\"?){100}" [("a"?){100}]{9}',
        'root ::= expr\nexpr ::= "-" expr ws | [0-9]+\nws ::= | " " ws',
        'root ::= x{60}\nx ::= "ab"?',
        'root ::= x{8}\nx ::= "a"?',
        'root ::= "a" # a " or { or (\r\n  # and a \'\r\nx ::= "b"{2}',
        'root ::= <[34]> !<|bos|>* "(\\"a\\"?){100}" # <"',
        'root ::= ("a" ""){1000} "\\"" x{60}\nx ::= "" | "ab"',
        doubled(10),
        "root ::= " + " | ".join(f'"{i}"' for i in range(1024)),
        "root ::= " + " ".join(f'"{letter}"?' for letter in "abcdefghijklmnopqrstuvwxyz"),
        'root ::= ("é" | "è" | "ê" | "ë" | "ç" | [a-z] | [A-Z] | [^ -~\\n] | "\\t")+',
        'root ::= word ("," " "? word)* ws\nword ::= [a-z]+ ("-" word)?\nws ::= [ \\n]*',
        'root ::= ws expr\nexpr ::= term (("+" | "-") expr)?\nterm ::= num | "(" ws expr ")" ws\n'
        "num ::= [0-9]+ ws\nws ::= [ \\t]*",
        'root ::= s\ns ::= "if" e s ("elif" e s)* ("else" s)? | e ";"\ne ::= [a-z]+ (op e)? ws\n'
        'op ::= "<" | "="\nws ::= " "*',
        'root ::= e\ne ::= [0-9]+ ("*" e)? ("+" e)? ("-" e)?',
        'root ::= "M"? "M"? "M"? "D"? "C"? "C"? "C"? "L"? "X"? "X"? "X"? "V"? "I"? "I"? "I"?',
        'root ::= ([0-9] [0-9]? [0-9]? "."){3} [0-9] [0-9]? [0-9]?',
    ],
)
def test_an_ordinary_grammar_with_repetitions_is_taken(
    grammar: str, decoder: _core.BlockDecoder
) -> None:
    decoder.check_sampling(_core.SamplingConfig(grammar=grammar))


@pytest.mark.parametrize("name", [name for name in dir(llama_grammar) if name.endswith("_GBNF")])
def test_the_grammars_that_come_with_llama_cpp_are_taken(
    name: str, decoder: _core.BlockDecoder
) -> None:
    decoder.check_sampling(_core.SamplingConfig(grammar=getattr(llama_grammar, name)))


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object", "required": ["p0"]}
        | {"properties": {f"p{i}": {"type": "string", "maxLength": 40} for i in range(40)}},
        {"properties": {f"p{i}": {"enum": [i, "a", None]} for i in range(60)}},
        {"properties": {f"p{i}": {} for i in range(20)}, "additionalProperties": True},
        {"$defs": {"tree": {"properties": {f"p{i}": {"$ref": "#/$defs/tree"} for i in range(40)}}}}
        | {"anyOf": [{"$ref": "#/$defs/tree"}]},
        {"anyOf": [{"properties": {f"p{i}": {}}, "required": [f"p{i}"]} for i in range(100)]},
        {"enum": [f"value {i}" for i in range(1000)]},
        {"type": "string", "pattern": "^M{0,3}(CM|CD|D?C{0,3})(XC|XL|L?X{0,3})(IX|IV|V?I{0,3})$"},
        {"type": "string", "pattern": "^(https?://)?[a-z0-9.-]+(:[0-9]+)?(/[a-z0-9._-]*)*$"},
    ],
    ids=lambda schema: json.dumps(schema)[:40],
)
def test_json_schemas_become_grammars_that_are_taken(
    schema: dict[str, Any], decoder: _core.BlockDecoder
) -> None:
    grammar = json_schema_to_gbnf(json.dumps(schema))
    decoder.check_sampling(_core.SamplingConfig(grammar=grammar))


def test_a_grammar_with_a_zero_byte_is_refused(decoder: _core.BlockDecoder) -> None:
    config = _core.SamplingConfig(grammar="\0")
    assert message(ValueError, lambda: decoder.open_sequence(0, config)) == (
        "the grammar holds a zero byte, where llama.cpp would stop"
    )


# ---------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"n_seq": 0}, "n_seq is 0; it must be 1 to 256"),
        ({"n_seq": 257}, "n_seq is 257; it must be 1 to 256"),
        ({"n_ctx": 7}, "n_ctx is 7; it must be 8 to 16777216"),
        ({"n_ctx": 2**24 + 1}, "n_ctx is 16777217; it must be 8 to 16777216"),
        ({"n_batch": 31}, "n_batch is 31; it must be 32 to 65536"),
        ({"n_batch": 65537}, "n_batch is 65537; it must be 32 to 65536"),
        ({"n_threads": -1}, "n_threads is -1; it must be 1 to 512, or 0 for all cores"),
        ({"n_threads": 513}, "n_threads is 513; it must be 1 to 512, or 0 for all cores"),
        ({"max_verify_len": -1}, "max_verify_len is -1; it must be 0 to 64"),
        ({"max_verify_len": 65}, "max_verify_len is 65; it must be 0 to 64"),
        (
            {"n_seq": 16, "max_verify_len": 4},
            "n_batch is 64; it must be at least n_seq * (1 + max_verify_len) = 80",
        ),
        (
            {"n_ctx": 2**24, "n_seq": 32, "n_batch": 512},
            "n_ctx is 16777216; it must be small enough that n_ctx * n_seq is below 2^28",
        ),
    ],
    ids=str,
)
def test_a_config_value_out_of_range_is_named_with_its_range(
    options: dict[str, int], expected: str, tiny_llama: Path
) -> None:
    assert message(ValueError, lambda: decoder_of(tiny_llama, **options)) == expected


def test_a_target_is_given_once(tiny_llama: Path) -> None:
    expected = "give either a target path or a loaded model, not both"
    for config in (
        _core.DecoderConfig(),
        _core.DecoderConfig(target_path=str(tiny_llama), target_address=1),
    ):
        assert message(ValueError, lambda c=config: _core.BlockDecoder(c)) == expected


@pytest.mark.parametrize("n_batch", [32, 33, 34, 64])
def test_a_recurrent_target_takes_the_longest_verify_its_batch_allows(
    n_batch: int, tiny_lfm2: Path
) -> None:
    opened = decoder_of(tiny_lfm2, n_seq=1, n_batch=n_batch, max_verify_len=31)
    opened.open_sequence(0, _core.SamplingConfig())
    assert len(opened.verify([0], [[65] * 32])[0].tokens) >= 1


def test_a_closed_decoder_says_so(tiny_llama: Path) -> None:
    closed = decoder_of(tiny_llama)
    closed.open_sequence(0, _core.SamplingConfig())
    closed.close()
    closed.close()
    calls: list[Callable[[], object]] = [
        lambda: closed.open_sequence(0, _core.SamplingConfig()),
        lambda: closed.close_sequence(0),
        lambda: closed.n_past(0),
        lambda: closed.prefill(0, [1]),
        lambda: closed.rewind(0, 0),
        lambda: closed.draft([0], [1]),
        lambda: closed.verify([0], [[1]]),
        lambda: closed.time_step(1, 0),
        lambda: closed.time_draft(1),
        lambda: closed.release_drafter(),
        lambda: closed.release_drafter_context(),
        lambda: closed.load_drafter_weights(),
        lambda: closed.load_drafter(),
        lambda: closed.memory_use(),
        lambda: closed.tokenize("a"),
        lambda: closed.token_bytes(1),
        lambda: closed.metadata("general.name"),
        lambda: closed.eog_tokens,
        lambda: closed.bos_token,
        lambda: closed.n_ctx_train,
        lambda: closed.has_drafter,
        lambda: closed.can_roll_back,
    ]
    expected = "the decoder is closed; make a new one"
    assert [message(ValueError, call) for call in calls] == [expected] * len(calls)


def test_a_second_thread_is_turned_away_while_the_first_works(tmp_path: Path) -> None:
    spec = TargetSpec(n_layer=24, n_embd=512, n_head=8, n_head_kv=8, n_ff=1024)
    slow = decoder_of(write_llama(tmp_path / "slow.gguf", spec), n_ctx=512, n_batch=512)
    slow.open_sequence(0, _core.SamplingConfig())
    slow.open_sequence(1, _core.SamplingConfig())

    def work() -> None:
        done = False
        while not done:
            with contextlib.suppress(DecodeError):  # the other thread happened to be first
                slow.prefill(0, [65] * 512)
                done = True

    worker = threading.Thread(target=work)
    worker.start()
    messages = set()
    while worker.is_alive():
        try:
            slow.verify([1], [[66]])
            slow.rewind(1, 0)
        except DecodeError as error:
            messages.add(str(error))
    worker.join()
    assert messages == {
        "the decoder is in use by another thread; give each thread its own, or take turns"
    }
    assert slow.n_past(0) == 512
    assert len(slow.verify([1], [[66]])[0].tokens) == 1


# ---------------------------------------------------------------- files that do not belong


def pair_error(target: Path, folder: Path, spec: DrafterSpec) -> str:
    path = write_drafter(folder / "d.gguf", spec)
    text = message(PairError, lambda: decoder_of(target, path))
    return text.replace(str(path), "d.gguf")


def test_a_missing_file_is_named(tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "no.gguf"
    for missing in (path, tmp_path):
        assert message(ModelError, lambda m=missing: decoder_of(m)) == (
            f"model {missing} is not a file; check the path"
        )
    assert message(PairError, lambda: decoder_of(tiny_llama, path)) == (
        f"drafter {path}: the file is missing, empty or not readable"
    )
    assert message(PairError, lambda: _core.DrafterFile(str(path))) == (
        f"drafter {path}: the file is missing, empty or not readable"
    )


def test_a_file_that_is_no_gguf_is_named(tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.gguf"
    path.write_text("hello " * 100)
    assert message(ModelError, lambda: decoder_of(path)) == (
        f"model {path}: it is not a GGUF file, or it is cut short"
    )
    assert message(PairError, lambda: decoder_of(tiny_llama, path)) == (
        f"drafter {path}: it is not a GGUF file, or it is cut short"
    )


def test_a_drafter_given_as_target_is_named(tiny_drafter: Path, tiny_llama: Path) -> None:
    assert message(ModelError, lambda: decoder_of(tiny_drafter)) == (
        f"model {tiny_drafter} is a drafter; give it as drafter, with its target"
    )
    assert message(PairError, lambda: decoder_of(tiny_llama, tiny_llama)) == (
        f"drafter {tiny_llama}: its architecture is 'llama'; "
        "a drafter's is 'dflash' (DSpark and DFlash files of llama.cpp)"
    )


@pytest.mark.parametrize("name", ["tiny_gemma3", "tiny_mamba"])
def test_a_target_that_cannot_be_tapped_takes_no_drafter(
    name: str, tiny_drafter: Path, request: pytest.FixtureRequest
) -> None:
    target = request.getfixturevalue(name)
    assert message(PairError, lambda: decoder_of(target, tiny_drafter)) == (
        f"llama.cpp cannot tap the layers of architecture '{name[5:]}', "
        "so no drafter can follow this target; use lookup"
    )


def test_a_target_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    metadata = {f"tokenizer.ggml.{key}": None for key in ("tokens", "token_type", "merges")}
    spec = TargetSpec(metadata={**metadata, "tokenizer.ggml.model": "none"})
    path = write_llama(tmp_path / "mute.gguf", spec)
    assert message(ModelError, lambda: decoder_of(path)) == (
        "the model has no tokenizer; give a causal language model with one"
    )


WRONG_METADATA = {
    "block_size missing": (
        {"dflash.block_size": None},
        "dflash.block_size is 0; it must be 1 to 64",
    ),
    "block_size 65": ({"dflash.block_size": 65}, "dflash.block_size is 65; it must be 1 to 64"),
    "block_size text": (
        {"dflash.block_size": "4"},
        "metadata dflash.block_size is not an integer",
    ),
    "anchor as text": (
        {"dflash.sample_from_anchor": "yes"},
        "metadata dflash.sample_from_anchor is not true or false",
    ),
    "no tapped layers": (
        {"dflash.target_layers": None},
        "dflash.target_layers, the list of tapped target layers, is missing",
    ),
    "selector": (
        {"dflash.selector_rank": 4},
        "it is a DFlash2 drafter with a selector, which is not supported",
    ),
    "no layers": (
        {"dflash.block_count": 0},
        "dflash.block_count is 0; it must be 1 to 512",
    ),
    "experts": (
        {"dflash.expert_count": 8},
        "dflash.expert_count is 8; it must be 0 to 0",
    ),
    "odd rope": (
        {"dflash.rope.dimension_count": 7},
        "dflash.rope.dimension_count must be even",
    ),
    "wide rope": (
        {"dflash.rope.dimension_count": 64},
        "dflash.rope.dimension_count is 64; it must be 2 to 16",
    ),
    "rope sections": (
        {"dflash.rope.dimension_sections": [100, 0, 0, 0]},
        "dflash.rope.dimension_sections has 100 dimensions but a key has 16",
    ),
    "negative rope sections": (
        {"dflash.rope.dimension_sections": [8, -8, 0, 0]},
        "dflash.rope.dimension_sections must be four integers of at least 0",
    ),
    "a single rope section": (
        {"dflash.rope.dimension_sections": 8},
        "dflash.rope.dimension_sections must be four integers of at least 0",
    ),
    "the last rope section alone": (
        {"dflash.rope.dimension_sections": [0, 0, 0, 8]},
        "dflash.rope.dimension_sections has dimensions in its last section only",
    ),
    "rope scaling": (
        {"dflash.rope.scaling.type": "zz"},
        "dflash.rope.scaling.type is 'zz', which llama.cpp does not know",
    ),
    "negative epsilon": (
        {"dflash.attention.layer_norm_rms_epsilon": -1.0},
        "dflash.attention.layer_norm_rms_epsilon is missing or not a number of at least 0",
    ),
    "no tokenizer": (
        {"tokenizer.ggml.model": "no_vocab"},
        "it has no tokenizer",
    ),
    "no tokens": (
        {"tokenizer.ggml.tokens": None},
        "it has no tokenizer.ggml.tokens, its vocabulary",
    ),
    "a token twice": (
        {"tokenizer.ggml.tokens": [*vocabulary()[:-1], "th"]},
        "its vocabulary has the text 'th' twice, again as token 319",
    ),
}


@pytest.mark.parametrize(("metadata", "why"), WRONG_METADATA.values(), ids=WRONG_METADATA.keys())
def test_wrong_drafter_metadata_is_named(
    metadata: dict[str, object], why: str, tiny_llama: Path, tmp_path: Path
) -> None:
    spec = DrafterSpec(metadata=metadata)
    assert pair_error(tiny_llama, tmp_path, spec) == f"drafter d.gguf: {why}"


WRONG_TENSORS = {
    "integer weights": (
        DrafterSpec(tensors={"fc.weight": np.zeros((64, 128), np.int32)}),
        "tensor fc.weight has type i32; it must be a floating-point or quantised type",
    ),
    "a norm of half precision": (
        DrafterSpec(tensors={"output_norm.weight": np.ones(64, np.float16)}),
        "tensor output_norm.weight has type f16; it must be f32",
    ),
    "integer Markov rows": (
        DrafterSpec(tensors={"markov_w1.weight": np.zeros((N_VOCAB, 8), np.int64)}),
        "tensor markov_w1.weight has type i64; it must be a floating-point or quantised type",
    ),
    "half a Markov head": (
        DrafterSpec(tensors={"markov_w2.weight": None}),
        "its Markov head is incomplete: markov_w1 and markov_w2 do not belong together",
    ),
    "a scale of many numbers": (
        DrafterSpec(tensors={"markov_w2.scale": np.ones(4096, np.float32)}),
        "tensor markov_w2.scale must be one number",
    ),
    "a scale of no number": (
        DrafterSpec(tensors={"markov_w2.scale": np.zeros((0, 1), np.float32)}),
        "tensor markov_w2.scale is empty",
    ),
    "a bias of no number": (
        DrafterSpec(tensors={"conf_proj.bias": np.zeros((0, 1), np.float32)}),
        "tensor conf_proj.bias is empty",
    ),
    "a promised confidence head": (
        DrafterSpec(tensors={"conf_proj.weight": None}),
        "its metadata promises a confidence head, but tensor conf_proj.weight is missing",
    ),
    "confidence without Markov": (
        DrafterSpec(tensors={"markov_w1.weight": None, "markov_w2.weight": None}),
        "it has a confidence head but no Markov head",
    ),
    "a block of one without an anchor slot": (
        DrafterSpec(block_size=1, sample_from_anchor=False),
        "block_size 1 leaves no slot to draft in",
    ),
    "d2t of 32 bits": (
        DrafterSpec(draft_vocab=96, tensors={"d2t": np.zeros(96, np.int32)}),
        "tensor d2t must be a list of 64-bit integers",
    ),
    "d2t in rows": (
        DrafterSpec(draft_vocab=96, tensors={"d2t": np.zeros((2, 48), np.int64)}),
        "tensor d2t must be a list of 64-bit integers",
    ),
    "d2t below zero": (
        DrafterSpec(draft_vocab=96, tensors={"d2t": np.full(96, -1, np.int64)}),
        "tensor d2t holds token ids below 0 or beyond 32 bits",
    ),
    "d2t without an output": (
        DrafterSpec(draft_vocab=96, tensors={"output.weight": None}),
        "it has a reduced vocabulary (d2t) but no output.weight of its own",
    ),
}


@pytest.mark.parametrize(("spec", "why"), WRONG_TENSORS.values(), ids=WRONG_TENSORS.keys())
def test_wrong_drafter_tensors_are_named(
    spec: DrafterSpec, why: str, tiny_llama: Path, tmp_path: Path
) -> None:
    assert pair_error(tiny_llama, tmp_path, spec) == f"drafter d.gguf: {why}"


def changed(tokens: list[str], token: int, text: str) -> list[str]:
    return [*tokens[:token], text, *tokens[token + 1 :]]


WRONG_PAIRS = {
    "d2t beyond the vocabulary": (
        DrafterSpec(draft_vocab=96, tensors={"d2t": np.full(96, N_VOCAB, np.int64)}),
        "the drafter's d2t names token 320 but the vocabulary ends at 319",
    ),
    "a tapped layer too many": (
        DrafterSpec(target_layers=(1, 4)),
        "the drafter taps target layer 4 but the target has layers 0 to 3; "
        "use a drafter made for this target",
    ),
    "a token text changed": (
        DrafterSpec(metadata={"tokenizer.ggml.tokens": changed(vocabulary(), 300, "zzz")}),
        f"token 300 is '{vocabulary()[300]}' in the target but 'zzz' in the drafter; "
        "use a drafter made for this target",
    ),
    "another end token": (
        DrafterSpec(metadata={"tokenizer.ggml.eos_token_id": 319}),
        "the end-of-sequence token is 314 in the target but 319 in the drafter; "
        "use a drafter made for this target",
    ),
    "another width": (
        DrafterSpec(n_embd=128),
        "the drafter reads hidden states of 128 values but the target's have 64; "
        "use a drafter made for this target",
    ),
}


@pytest.mark.parametrize(("spec", "why"), WRONG_PAIRS.values(), ids=WRONG_PAIRS.keys())
def test_a_drafter_of_another_target_is_named_with_the_first_difference(
    spec: DrafterSpec, why: str, tiny_llama: Path, tmp_path: Path
) -> None:
    """SCENARIO 15."""
    assert pair_error(tiny_llama, tmp_path, spec) == why


def test_a_message_that_quotes_broken_bytes_is_still_text(
    tiny_drafter: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    path = tmp_path / "d.gguf"
    path.write_bytes(tiny_drafter.read_bytes().replace(b"dflash", b"d\xfflash", 1))
    text = message(PairError, lambda: decoder_of(tiny_llama, path))
    assert "its architecture is 'd\ufffdlash'" in text


# ---------------------------------------------------------------- broken files, in child processes

CHILD = """
import json, logging, os, signal, sys
from dspark_edge import _core
from dspark_edge.errors import DsparkError

logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL)
role, target, drafter, folder = sys.argv[1:]

def use(path):
    target_path, drafter_path = (target, path) if role == "drafter" else (path, "")
    decoder = _core.BlockDecoder(_core.DecoderConfig(
        target_path=target_path, drafter_path=drafter_path, n_ctx=64, n_seq=2, n_batch=64,
        n_threads=1, max_verify_len=4))
    for seq_id in (0, 1):
        decoder.open_sequence(seq_id, _core.SamplingConfig(temperature=float(seq_id)))
        decoder.prefill(seq_id, list(range(20)))
    rows = [[65, 1, 2], [66]]
    if role == "drafter":
        drafts = decoder.draft([0, 1], [65, 66])
        rows = [[65, *drafts[0].tokens[:4]], [66, *drafts[1].tokens[:2]]]
    decoder.verify([0, 1], rows)

def outcome(path, seconds):
    pid = os.fork()
    if pid == 0:
        signal.alarm(seconds)
        code = 3
        try:
            use(path)
            code = 0
        except DsparkError:
            code = 1
        except ValueError:
            code = 2
        finally:
            os._exit(code)
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        return "signal %d" % os.WTERMSIG(status)
    return ("ok", "refused", "value", "other")[os.WEXITSTATUS(status)]

data = open(target if role == "target" else drafter, "rb").read()
path = os.path.join(folder, "broken.gguf")
for case in json.load(sys.stdin):
    broken = bytearray(data[: case.get("size", len(data))])
    for offset, byte in case.get("bytes", []):
        broken[offset] = byte
    with open(path, "wb") as out:
        out.write(broken)
    print(json.dumps([case, outcome(case.get("path", path), 20)]), flush=True)
"""

Case = dict[str, Any]


def outcomes(
    role: str, target: Path, drafter: Path, folder: Path, cases: list[Case]
) -> list[tuple[Case, str]]:
    """How each case ended: ok, refused (a DsparkError), value, other, or the signal."""
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")
    done = subprocess.run(
        [sys.executable, "-c", CHILD, role, str(target), str(drafter), str(folder)],
        input=json.dumps(cases),
        env={**os.environ, "GGML_NO_BACKTRACE": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
    )
    # llama.cpp may print between: only our own lines start a list.
    lines = [line for line in done.stdout.splitlines() if line.startswith('[{"')]
    assert len(lines) == len(cases)
    return [tuple(json.loads(line)) for line in lines]


def cuts(path: Path, n: int) -> list[Case]:
    size = path.stat().st_size
    random = np.random.default_rng(1)
    return [
        {"size": int(cut)} for cut in (0, 1, 4, 8, 23, 24, size - 64, *random.integers(0, size, n))
    ]


def flips(path: Path, n: int, n_header: int) -> list[Case]:
    """One changed byte each: most in the header, where every byte means something."""
    data = path.read_bytes()
    random = np.random.default_rng(2)
    cases = list[Case]()
    for i in range(n):
        offset = int(random.integers(0, n_header if i % 8 else len(data)))
        byte = int(random.choice([0, 255, data[offset] ^ 1, data[offset] ^ 128]))
        cases.append({"bytes": [[offset, byte]]})
    return cases


def test_a_drafter_cut_anywhere_is_refused(
    tiny_llama: Path, tiny_drafter: Path, tmp_path: Path
) -> None:
    ended = outcomes("drafter", tiny_llama, tiny_drafter, tmp_path, cuts(tiny_drafter, 60))
    assert [end for end in ended if end[1] != "refused"] == []


def test_a_drafter_with_any_byte_changed_is_refused_or_runs(
    tiny_llama: Path, tiny_drafter: Path, tmp_path: Path
) -> None:
    cases = flips(tiny_drafter, 300, 8192)
    ended = outcomes("drafter", tiny_llama, tiny_drafter, tmp_path, cases)
    assert [end for end in ended if end[1] not in ("ok", "refused")] == []
    assert {end for _, end in ended} == {"ok", "refused"}


def test_drafters_with_nonsense_in_any_number_are_refused_or_run(
    tiny_llama: Path, tiny_drafter: Path, tmp_path: Path
) -> None:
    """Keys that llama.cpp reads for this architecture, each with values at its edges."""
    keys = (
        "block_count",
        "context_length",
        "embedding_length",
        "vocab_size",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.sliding_window",
        "block_size",
        "rope.dimension_count",
        "expert_count",
        "expert_used_count",
        "expert_group_count",
        "nextn_predict_layers",
        "hyper_connection.count",
        "rope.dimension_sections",
        "rope.scaling.type",
    )
    cases = list[Case]()
    for key in keys:
        for value in (0, 33, 2**32 - 1, [100] * 4):
            path = tmp_path / f"{len(cases)}.gguf"
            write_drafter(path, DrafterSpec(metadata={f"dflash.{key}": value}))
            cases.append({"path": str(path)})
    ended = outcomes("drafter", tiny_llama, tiny_drafter, tmp_path, cases)
    assert [end for end in ended if end[1] not in ("ok", "refused")] == []


def test_files_that_would_stop_the_process_are_refused(
    tiny_llama: Path, tiny_drafter: Path, tmp_path: Path
) -> None:
    # llama.cpp calls an empty text [EMPTY_i], and asserts that all texts differ.
    twice = {"tokenizer.ggml.tokens": ["", "[EMPTY_0]", *vocabulary()[2:]]}
    drafters = [
        DrafterSpec(draft_vocab=96, tensors={"d2t": np.zeros(0, np.int64)}),
        DrafterSpec(metadata=twice),
    ]
    cases = [
        {"path": str(write_drafter(tmp_path / f"{i}.gguf", spec))}
        for i, spec in enumerate(drafters)
    ]
    ended = outcomes("drafter", tiny_llama, tiny_drafter, tmp_path, cases)
    case = {"path": str(write_llama(tmp_path / "target.gguf", TargetSpec(metadata=twice)))}
    ended += outcomes("target", tiny_llama, tiny_drafter, tmp_path, [case])
    assert [end for _, end in ended] == ["refused"] * 3


def test_a_target_cut_anywhere_is_refused(
    tiny_llama: Path, tiny_drafter: Path, tmp_path: Path
) -> None:
    ended = outcomes("target", tiny_llama, tiny_drafter, tmp_path, cuts(tiny_llama, 60))
    assert [end for end in ended if end[1] != "refused"] == []
