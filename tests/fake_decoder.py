"""A block decoder made of scripts: the next token is a pure function of the tokens before it.

Owns what the engine needs of one: sequences, their caches, passes and failures on demand. Checks
at every call what the real one relies on, and counts. Knows nothing of models, logits and noise.
"""

from __future__ import annotations

import json
import random
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

from dspark_edge import Engine
from dspark_edge._core import BlockDecoder
from dspark_edge.cost import CostTable
from dspark_edge.device import Reading
from dspark_edge.errors import ContextFullError, DecodeError, PairError
from dspark_edge.governor import Governor
from dspark_edge.loading import Loaded
from dspark_edge.pressure import Limits
from dspark_edge.speculation import Mode, Proposer, Speculation

MB = 10**6
END = 256  # ids below are bytes
N_VOCAB = 300  # ids from 257 on mean what `pieces` says
Script = Callable[[Sequence[int]], int]
DraftScript = Callable[[Sequence[int], int], list[int]]


def letters(before: Sequence[int]) -> int:
    """A target that says letters: each depends on all tokens before it."""
    return ord("a") + zlib.crc32(array("i", before).tobytes()) % 26


def saying(text: str | Sequence[int], n_prompt: int, after: int = END) -> Script:
    """A target that answers a prompt of n_prompt tokens with a text, and then ends."""
    tokens = list(text.encode()) if isinstance(text, str) else list(text)
    return lambda before: [*tokens, after][min(len(before) - n_prompt, len(tokens))]


def repeating(period: int) -> Script:
    """A target that repeats its own last `period` tokens: what prompt lookup is made for."""
    return lambda before: before[-period]


def oracle(target: Script) -> DraftScript:
    """A drafter that is always right."""

    def draft(before: Sequence[int], n_draft: int) -> list[int]:
        text = list(before)
        for _ in range(n_draft):
            text.append(target(text))
        return text[len(before) :]

    return draft


def wrong(target: Script) -> DraftScript:
    """A drafter that is never right."""
    return lambda before, n_draft: [(token + 1) % 256 for token in oracle(target)(before, n_draft)]


def mixed(target: Script, rho: float, seed: int = 0) -> DraftScript:
    """A drafter whose token at a position is right with probability rho."""

    def draft(before: Sequence[int], n_draft: int) -> list[int]:
        right = oracle(target)(before, n_draft)
        draws = [random.Random(f"{seed} {len(before) + k}").random() for k in range(n_draft)]
        return [t if u < rho else (t + 1) % 256 for t, u in zip(right, draws, strict=True)]

    return draft


def silent(before: Sequence[int], n_draft: int) -> list[int]:
    """A drafter that proposes nothing."""
    return []


@dataclass(slots=True)
class FakeDraft:
    tokens: list[int]
    confidence: list[float]
    certainty: list[float]


@dataclass(slots=True)
class FakeVerdict:
    tokens: list[int]
    n_accepted: int
    margins: list[float]
    logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    error: str = ""


@dataclass(slots=True, eq=False)
class FakeDecoder:
    """The part of BlockDecoder that Engine and Speculation use.

    broken: sequences whose passes, of the kinds in broken_in, raise DecodeError; with `empties`
    such a pass empties the sequences that were in it, as happens with a recurrent target.
    n_lookup: tokens that lookup may propose beside the drafter in mode "auto".
    refuses_rewind: a cut empties the sequence. after: called at the end of each verify. in_memory:
    which parts of the drafter are there; load_fails: none of them comes back.
    """

    target: Script = letters
    drafter: DraftScript | None = None  # None: the oracle
    n_ctx: int = 512
    n_seq: int = 4
    n_batch: int = 512
    n_draft: int = 4
    n_lookup: int = 0
    pieces: dict[int, bytes] = field(default_factory=dict)
    template: str = ""
    broken: set[int] = field(default_factory=set)
    broken_in: Sequence[str] = ("prefill", "verify")
    empties: bool = False
    refuses_rewind: bool = False
    draft_fails: bool = False
    load_fails: bool = False
    dead_end: int = -1  # position at which no token is allowed
    after: Callable[[], None] = lambda: None
    closed: bool = False
    decode_s: float = 0.0
    caches: dict[int, list[int]] = field(default_factory=dict)
    anchors: dict[int, int] = field(default_factory=dict)  # the only one a sequence may go on with
    passes: list[tuple[str, int]] = field(default_factory=list)  # kind, tokens in it
    n_rejections: int = 0
    n_injected: int = 0  # tokens of prompts that the drafter was given whole
    in_memory: set[str] = field(default_factory=lambda: {"weights", "context"})
    eog_tokens: list[int] = field(default_factory=lambda: [END])
    bos_token: int = -1
    eos_token: int = END
    n_vocab: int = N_VOCAB

    # ------------------------------------------------------------ the drafter's memory

    @property
    def has_drafter(self) -> bool:
        return "context" in self.in_memory

    def memory_use(self) -> SimpleNamespace:
        return SimpleNamespace(
            drafter_model_bytes=40 * MB if "weights" in self.in_memory else 0,
            drafter_context_bytes=20 * MB if "context" in self.in_memory else 0,
            drafter_compute_bytes=10 * MB if "context" in self.in_memory else 0,
        )

    def release_drafter_context(self) -> None:
        self.in_memory.discard("context")

    def release_drafter(self) -> None:
        self.in_memory.clear()

    def load_drafter_weights(self) -> None:
        if self.load_fails:
            raise PairError("drafter gone.gguf: the file is missing, empty or not readable")
        self.in_memory.add("weights")

    def load_drafter(self) -> None:
        self.load_drafter_weights()
        self.in_memory.add("context")

    # ------------------------------------------------------------ counts

    @property
    def max_verify_len(self) -> int:
        return max(self.n_draft, self.n_lookup)

    def n_passes(self, kind: str) -> int:
        return sum(name == kind for name, _ in self.passes)

    def n_tokens(self, kind: str) -> int:
        return sum(n for name, n in self.passes if name == kind)

    # ------------------------------------------------------------ text

    def tokenize(self, text: bytes, add_special: bool = True) -> list[int]:
        return list(text)

    def token_bytes(self, token: int, special: bool = False) -> bytes:
        if token < 256:
            return bytes([token])
        return b"<end>" if token == END and special else self.pieces.get(token, b"")

    def metadata(self, key: str) -> str:
        return self.template if key == "tokenizer.chat_template" else ""

    # ------------------------------------------------------------ sequences

    def check_sampling(self, sampling: object) -> None:
        assert not self.closed

    def open_sequence(self, seq_id: int, sampling: object) -> None:
        assert not self.closed
        assert 0 <= seq_id < self.n_seq
        self.caches.setdefault(seq_id, [])
        self.anchors.pop(seq_id, None)

    def n_past(self, seq_id: int) -> int:
        return len(self._cache(seq_id))

    def rewind(self, seq_id: int, n_keep: int) -> int:
        cache = self._cache(seq_id)
        assert 0 <= n_keep <= len(cache), f"rewind to {n_keep} of {len(cache)}"
        if n_keep == len(cache):
            return n_keep
        del cache[0 if self.refuses_rewind else n_keep :]
        self.anchors.pop(seq_id, None)
        return len(cache)

    def save_sequence(self, seq_id: int) -> bytes:
        assert not self.closed
        return json.dumps(self._cache(seq_id)).encode()

    def restore_sequence(self, seq_id: int, blob: bytes) -> list[int]:
        cache = self._cache(seq_id)
        tokens: list[int] = json.loads(blob)  # a ValueError, as of a damaged one
        cache[:] = tokens
        self.anchors.pop(seq_id, None)
        return tokens

    def close(self) -> None:
        self.closed = True

    # ------------------------------------------------------------ passes

    def prefill(self, seq_id: int, tokens: Sequence[int], for_drafter: bool = True) -> None:
        cache = self._cache(seq_id)
        assert 1 <= len(tokens) <= self.n_batch
        assert len(cache) + len(tokens) < self.n_ctx, "a prompt leaves room for its anchor"
        self.passes.append(("prefill", len(tokens)))
        self.n_injected += len(tokens) if for_drafter else 0
        self._maybe_fail([seq_id])
        cache += tokens

    def draft(self, seq_ids: Sequence[int], anchors: Sequence[int]) -> list[FakeDraft]:
        self._check_round(seq_ids, anchors)
        assert self.in_memory == {"weights", "context"}, "the drafter is released"
        self.passes.append(("draft", len(seq_ids)))
        if self.draft_fails:
            raise DecodeError("the drafter's cache is broken")
        script = self.drafter or oracle(self.target)
        drafts = [
            script([*self._cache(s), a], self.n_draft)
            for s, a in zip(seq_ids, anchors, strict=True)
        ]
        return [FakeDraft(d, [0.9] * len(d), [5.0] * len(d)) for d in drafts]

    def verify(
        self, seq_ids: Sequence[int], verify_tokens: Sequence[Sequence[int]]
    ) -> list[FakeVerdict]:
        self._check_round(seq_ids, [tokens[0] for tokens in verify_tokens])
        n_tokens = sum(map(len, verify_tokens))
        assert n_tokens <= self.n_batch, f"{n_tokens} tokens in one pass"
        for seq_id, tokens in zip(seq_ids, verify_tokens, strict=True):
            assert len(tokens) <= 1 + self.max_verify_len
            if len(self._cache(seq_id)) + len(tokens) > self.n_ctx:
                raise ContextFullError(f"sequence {seq_id} has no room for {len(tokens)} tokens")
        self.passes.append(("verify", n_tokens))
        self._maybe_fail(seq_ids)
        verdicts = [self._emit(s, t) for s, t in zip(seq_ids, verify_tokens, strict=True)]
        self.after()
        return verdicts

    def _emit(self, seq_id: int, verify_tokens: Sequence[int]) -> FakeVerdict:
        cache = self._cache(seq_id)
        verdict = FakeVerdict([], 0, [])
        for drafted in [*verify_tokens[1:], None]:
            cache.append(verify_tokens[verdict.n_accepted])
            if len(cache) == self.dead_end:
                verdict.error = "no token is allowed"
                return verdict
            token = self.target(cache)
            verdict.tokens.append(token)
            verdict.margins.append(1.0 + len(cache))
            if token != drafted or token in self.eog_tokens:
                self.n_rejections += drafted is not None
                break
            verdict.n_accepted += 1
        self.anchors[seq_id] = verdict.tokens[-1]
        return verdict

    def _check_round(self, seq_ids: Sequence[int], anchors: Sequence[int]) -> None:
        assert len(set(seq_ids)) == len(seq_ids) == len(anchors) > 0
        for seq_id, anchor in zip(seq_ids, anchors, strict=True):
            self._cache(seq_id)
            expected = self.anchors.get(seq_id, anchor)
            assert anchor == expected, f"anchor {anchor} of sequence {seq_id}, not {expected}"

    def _maybe_fail(self, seq_ids: Sequence[int]) -> None:
        if self.broken.isdisjoint(seq_ids) or self.passes[-1][0] not in self.broken_in:
            return
        if self.empties:
            for seq_id in seq_ids:
                self._cache(seq_id).clear()
        raise DecodeError(f"llama.cpp could not evaluate sequences {list(seq_ids)}")

    def _cache(self, seq_id: int) -> list[int]:
        assert not self.closed, "the decoder is closed"
        assert seq_id in self.caches, f"sequence {seq_id} is not open"
        return self.caches[seq_id]


class FixedCost(CostTable):
    """Costs that stay as given, so that decisions depend on no clock."""

    def __init__(
        self, *, verify_ms: Sequence[float] = (), draft_ms: float = 0.0, other_ms: float = 0.0
    ) -> None:
        """verify_ms: of 1, 2, 3 ... batch_tokens, flat beyond them. Default: each width 10 ms."""
        curve = dict(enumerate(verify_ms or (10.0, 10.0), start=1))
        super().__init__(
            verify={0: {n: ms / 1e3 for n, ms in curve.items()}},
            draft={1: draft_ms / 1e3, 2: draft_ms / 1e3} if draft_ms else {},
            other_s=other_ms / 1e3,
        )

    def observe_verify(self, batch_tokens: int, depth: int, seconds: float) -> None:
        assert seconds >= 0.0

    def observe_draft(self, n_seq: int, seconds: float) -> None:
        assert seconds >= 0.0

    def observe_other(self, seconds: float) -> None:
        assert seconds >= 0.0


@dataclass(slots=True)
class Machine:
    """A machine with a clock, whose free memory is what a test says."""

    free_mb: float = 4000.0
    total_mb: float = 8000.0  # floor 300 MB, scarce below 150 MB, gone above 375 MB
    on_battery: bool | None = None
    now_s: float = 0.0
    n_readings: int = 0

    def read(self) -> Reading:
        self.n_readings += 1
        return Reading(
            ram_free_bytes=round(self.free_mb * MB),
            ram_total_bytes=round(self.total_mb * MB),
            on_battery=self.on_battery,
        )

    def governor(
        self, decoder: BlockDecoder, speculation: Speculation, limits: Limits | None = None
    ) -> Governor:
        return Governor(
            decoder,
            speculation,
            limits or Limits(),
            source=self.read,
            clock=lambda: self.now_s,
        )


def engine_on(
    decoder: FakeDecoder,
    mode: Mode = "always",
    proposer: Proposer | None = "drafter",
    *,
    cost: CostTable | None = None,
    verify_len: int | None = None,
    machine: Machine | None = None,
    limits: Limits | None = None,
) -> Engine:
    """An engine on the fake, with the speculation that goes with it.

    machine: whose pressure is acted on, within `limits`; None: nobody's.
    """
    speculation = Speculation(
        mode=mode,
        proposer=proposer,
        off_reason="" if proposer else "no drafter was asked for",
        drafter=decoder,
        cost=cost or FixedCost(draft_ms=1.0),
        n_max=decoder.n_draft,
        verify_len=verify_len,
        n_lookup=decoder.n_lookup,
    )
    real = cast(BlockDecoder, decoder)
    return Engine.from_loaded(
        Loaded(
            decoder=real,
            speculation=speculation,
            target_name="scripted",
            drafter_name=proposer or "none",
            governor=machine.governor(real, speculation, limits) if machine else None,
        )
    )
