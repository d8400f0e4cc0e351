"""Other programs that bench compare runs: what each is asked, and what comes back.

Refuses to know which there are, how they are reached, and what is made of the replies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from ..sequence import SamplingParams, Stats
from .measure import GroupRun, Round

Tokenize: TypeAlias = Callable[[str], list[int]]  # a text without special tokens added
BytesOf: TypeAlias = Callable[[int], bytes]
# told: seconds come from the program; arrival: from when pieces of its stream came.
Clock: TypeAlias = Literal["told", "arrival"]


@dataclass(slots=True, frozen=True)
class Question:
    """A user message, and the token ids that the target's chat template makes of it."""

    text: str
    token_ids: list[int]


@dataclass(slots=True, frozen=True, kw_only=True)
class Reply:
    """What a program answered. token_ids: None where it tells text only.

    n_decoded, n_rounds: tokens and target passes after the first token; None: not told.
    """

    text: str
    token_ids: list[int] | None
    n_decoded: int
    n_rounds: int | None
    ttft_s: float
    decode_s: float  # from the first token to the last


class Program(Protocol):
    """One way to get replies. about: its version, command or address, for the report."""

    name: str
    clock: Clock
    about: dict[str, Any]

    def reply(self, question: Question, params: SamplingParams) -> Reply:
        """The whole reply to a question, nothing reused from earlier ones where that can be said.

        Raises OSError or ValueError naming the program when there is none.
        """

    def close(self) -> None:
        """Frees it, and ends what was started."""


def as_run(reply: Reply, token_ids: list[int]) -> GroupRun:
    """The reply in the form that our own modes' runs have; 0 rounds where they are not told."""
    n_rounds = reply.n_rounds or 0
    stats = Stats(n_tokens=reply.n_decoded, n_rounds=n_rounds, ttft_s=reply.ttft_s)
    return GroupRun([token_ids], [stats], rounds=[Round(0, reply.n_decoded, reply.decode_s)])


def ids_beside(
    ours: Sequence[int], reply: Reply, bytes_of: BytesOf, tokenize: Tokenize
) -> list[int]:
    """Token ids of a reply, so that they can be compared with ours to the same question.

    A text alone does not tell how it was cut: as far as it is ours, it is cut like ours.
    """
    if reply.token_ids is not None:
        return reply.token_ids
    theirs = reply.text.rstrip("\N{REPLACEMENT CHARACTER}")
    text = b"".join(map(bytes_of, ours)).decode("utf-8", errors="ignore")
    if theirs == text:
        return list(ours)
    rest = theirs.encode("utf-8")
    n_same = 0
    for token in ours:
        piece = bytes_of(token)
        if not piece or not rest.startswith(piece):
            break
        rest = rest[len(piece) :]
        n_same += 1
    return [*ours[:n_same], *tokenize(rest.decode("utf-8", errors="ignore"))]
