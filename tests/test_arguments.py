"""Limits of arguments, and messages in the command line's own words."""

from __future__ import annotations

import os

import llama_cpp
import pytest

from dspark_edge.arguments import check_ctx, check_threads, gpu_notice, in_flags


def test_threads_beyond_any_use_are_refused_with_both_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    for fine in (None, 1, 8):
        check_threads(fine)
    for wrong in (9, 500, 0, -1):
        with pytest.raises(ValueError, match=rf"^--threads is {wrong} but .* 2 processors; .* 8,"):
            check_threads(wrong)


def test_a_context_that_cannot_be_is_refused() -> None:
    check_ctx(8)
    for wrong in (7, 0, -1, 2**24 + 1):
        with pytest.raises(ValueError, match=f"^--ctx is {wrong}; it must be 8 to 16777216"):
            check_ctx(wrong)


def test_gpu_layers_are_noticed_only_where_they_were_asked_for_and_do_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(llama_cpp, "llama_supports_gpu_offload", lambda: False)
    assert "--gpu-layers 4 has no effect" in gpu_notice(4)
    assert gpu_notice(0) == gpu_notice(None) == ""
    monkeypatch.setattr(llama_cpp, "llama_supports_gpu_offload", lambda: True)
    assert gpu_notice(4) == ""


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("pass a larger n_ctx or shorten it", "pass a larger --ctx or shorten it"),
        ("tokens, inside n_ctx = 512", "tokens, inside --ctx 512"),
        ("pass --ctx 64 (n_ctx=64), the largest", "pass --ctx 64, the largest"),
        ("n_threads is 0", "--threads is 0"),
        ("my_n_ctx_too", "my_n_ctx_too"),
    ],
)
def test_parameters_are_named_as_the_command_line_names_them(said: str, shown: str) -> None:
    assert in_flags(ValueError(said)) == shown
