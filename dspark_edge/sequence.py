"""One request: its parameters, its tokens, its statistics, and the chunks that come out of it.

Refuses to know: models, caches and rounds. `tokens` is prompt and reply; the last one is the
anchor, which is in no cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from .ledger import DraftLedger
from .text import TextStream

if TYPE_CHECKING:
    from ._core import LookupIndex, SamplingConfig

FinishReason = Literal["stop", "length", "context_full", "abort", "error"]

MAX_SEED = 2**64 - 1
MAX_COUNT = 2**31 - 1


@dataclass(slots=True, frozen=True, kw_only=True)
class SamplingParams:
    """How a reply is sampled, in OpenAI's words.

    temperature: 0 (the likeliest token) to 100; below 0.001 it counts as 0. top_k, top_p, min_p:
    0, 1, 0 are off. Penalties look at the last `penalty_last_n` tokens, those of the prompt
    included unless penalize_prompt is False. seed: None draws a new one; the same seed gives the
    same text. logprobs: number of likeliest tokens to report with each token. grammar: GBNF with a
    rule `root`; json_schema: a JSON schema as dict or text. ignore_eos: never end by the model's
    own end tokens. Raises ValueError; the ranges that depend on the model are checked when a
    request is added.
    """

    temperature: float = 0.7
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_last_n: int = 64
    penalize_prompt: bool = True
    seed: int | None = None
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    grammar: str | None = None
    json_schema: Mapping[str, Any] | str | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        self._check_types()
        TextStream(self.stop)  # checks the stop strings
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed is {self.seed}; it must be 0 to {MAX_SEED}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be at least 1")
        if self.logprobs is not None and not 0 <= self.logprobs <= 100:
            raise ValueError(f"logprobs is {self.logprobs}; it must be 0 to 100")
        if self.grammar is not None and self.json_schema is not None:
            raise ValueError("grammar and json_schema are both given; give one")
        for name, value in (("top_k", self.top_k), ("penalty_last_n", self.penalty_last_n)):
            if not 0 <= value <= MAX_COUNT:
                raise ValueError(f"{name} is {value}; it must be 0 to {MAX_COUNT}")
        for token in self.logit_bias:
            if not isinstance(token, int) or not 0 <= token <= MAX_COUNT:
                raise ValueError(f"logit_bias has token {token}; ids are 0 to {MAX_COUNT}")

    def _check_types(self) -> None:
        for name in ("seed", "max_tokens", "logprobs", "top_k", "penalty_last_n"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise ValueError(f"{name} is {value!r}; it must be a whole number")
        for name in (
            *("temperature", "top_p", "min_p"),
            *("repeat_penalty", "frequency_penalty", "presence_penalty"),
        ):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise ValueError(f"{name} is {value!r}; it must be a number")
        if not isinstance(self.penalize_prompt, bool):
            raise ValueError(
                f"penalize_prompt is {self.penalize_prompt!r}; it must be true or false"
            )
        for stop in () if isinstance(self.stop, str) else self.stop:
            if not isinstance(stop, str):
                raise ValueError(f"stop holds {stop!r}; it must hold strings")


@dataclass(slots=True)
class Stats:
    """What one request has cost and gained so far. Times in seconds."""

    seed: int = 0
    n_prompt: int = 0
    n_reused: int = 0  # prompt tokens that were in the cache already
    n_tokens: int = 0  # emitted
    n_rounds: int = 0
    n_drafted: int = 0  # proposed by the drafter
    n_verified: int = 0  # of those, sent to the target
    n_accepted: int = 0
    ttft_s: float = 0.0  # from the request to its first token
    prefill_s: float = 0.0
    decode_s: float = 0.0  # wall time of the rounds that this request took part in
    own_s: float = 0.0  # of those, outside llama.cpp
    min_margin: float = math.inf  # smallest lead of an emitted token, in logits
    speculation: str = ""  # state and reason, set when the request ends

    @property
    def tau(self) -> float:
        """Tokens per round, bonus token included."""
        return self.n_tokens / self.n_rounds if self.n_rounds else 0.0

    @property
    def tps(self) -> float:
        """Emitted tokens per second of decoding, prefill left out."""
        return self.n_tokens / self.decode_s if self.decode_s > 0.0 else 0.0

    @property
    def acceptance(self) -> float:
        """Share of the verified draft tokens that were accepted."""
        return self.n_accepted / self.n_verified if self.n_verified else 0.0


class TokenLogprob(NamedTuple):
    """Natural logarithm of a token's probability before the sampler chain, with alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Chunk(NamedTuple):
    """What one round added to one reply. `stats` is live: it goes on changing with the request."""

    request_id: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stats: Stats
    n_accepted: int = 0  # the first n_accepted of token_ids were drafted
    logprobs: tuple[TokenLogprob, ...] = ()
    error: str = ""  # with finish_reason "error"


@dataclass(slots=True, eq=False)
class Request:
    """A request and the sequence that it runs on.

    tokens: prompt and reply so far. All but the last are or will be in the cache of `seq_id`.
    sampling: params as the core takes them.
    """

    id: int
    tokens: list[int]
    params: SamplingParams
    sampling: SamplingConfig
    end_tokens: frozenset[int]
    stats: Stats
    text: TextStream
    started_s: float
    seq_id: int = -1  # -1: still queued
    finish_reason: FinishReason | None = None
    is_suspect: bool = False  # a pass that it took part in failed and emptied its sequence
    ledger: DraftLedger = field(default_factory=DraftLedger)
    lookup: LookupIndex | None = None

    @property
    def n_past(self) -> int:
        """Tokens that belong into the cache."""
        return len(self.tokens) - 1

    def n_draft_room(self, n_ctx: int) -> int:
        """Draft tokens that may be verified without passing n_ctx or max_tokens."""
        room = n_ctx - len(self.tokens)
        if self.params.max_tokens is not None:
            # The bonus token comes on top of the accepted ones.
            room = min(room, self.params.max_tokens - self.stats.n_tokens - 1)
        return max(room, 0)

    def take(
        self, token_ids: Sequence[int], bytes_of: Callable[[int], bytes], n_ctx: int
    ) -> tuple[str, int]:
        """Append emitted tokens up to the first that ends the reply; sets finish_reason.

        Returns the text that is now safe to show and how many tokens were taken: an end token, a
        completed stop string or a limit in the middle of an accepted run drops what follows it.
        """
        shown: list[str] = []
        n_taken = 0
        for token in token_ids:
            self.tokens.append(token)
            self.stats.n_tokens += 1
            n_taken += 1
            if token in self.end_tokens:
                self.finish_reason = "stop"
            else:
                shown.append(self.text.push(bytes_of(token)))
                if self.text.stopped:
                    self.finish_reason = "stop"
                elif self.stats.n_tokens == self.params.max_tokens:
                    self.finish_reason = "length"
                elif len(self.tokens) > n_ctx:
                    self.finish_reason = "context_full"
            if self.finish_reason is not None:
                shown.append(self.text.flush())
                break
        return "".join(shown), n_taken
