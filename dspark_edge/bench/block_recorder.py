"""Records what a drafter proposes at each position of a reply, and what the reply then was.

Decodes plainly, token by token, with a block drafted in front of each, and what lookup has for the
same place: so the text decides every slot of both. Refuses to know what recordings are used for.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from .._core import LookupIndex
from ..calibration import Recording
from ..choice import LONG_LOOKUP_LEN
from ..engine import Engine
from ..errors import PairError
from ..loading import load
from ..models import find_drafter, target_path
from ..sampling import sampling_config
from ..sequence import SamplingParams
from ..signals import DraftSignals

SEQ_ID = 0


def read_prompts(path: Path) -> list[list[str]]:
    """Conversations of user turns, from JSON lines with "turns" or "prompt".

    Raises ValueError (a bad line, no UTF-8, or no prompts), OSError.
    """
    prompts: list[list[str]] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}); save it as that") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path} line {number} is not JSON: {error}") from error
        turns = row.get("turns", [row.get("prompt")]) if isinstance(row, dict) else None
        if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
            raise ValueError(
                f'{path} line {number} has neither "turns" (texts) nor "prompt" (text)'
            )
        if not all(turn.strip() for turn in turns):
            raise ValueError(f"{path} line {number} has an empty turn; leave the line out")
        prompts.append(turns)
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    return prompts


class Recorder:
    """A pair, loaded to be recorded. Close it, or use it as a context manager."""

    def __init__(
        self, target: str, drafter: str, *, n_ctx: int = 2048, n_threads: int | None = None
    ) -> None:
        """target, drafter: as Engine takes them. Raises as Engine, PairError without a drafter."""
        self.drafter = drafter_path(target, drafter)
        loaded = load(
            target,
            drafter=self.drafter,
            n_ctx=n_ctx,
            n_seq=1,
            n_gpu_layers=-1,
            n_threads=n_threads,
            speculation="always",
            verify_len=0,
            cost_cache=None,
        )
        self.target_name = loaded.target_name
        self._decoder = loaded.decoder
        self._engine = Engine.from_loaded(loaded)
        self._end_tokens = frozenset(self._decoder.eog_tokens)

    @property
    def n_draft(self) -> int:
        """Draft tokens per block."""
        return self._decoder.n_draft

    def conversation(
        self, turns: Sequence[str], *, temperature: float, seed: int, max_tokens: int, source: str
    ) -> list[Recording]:
        """One recording for each turn; each reply joins the prompt of the next."""
        recordings: list[Recording] = []
        messages: list[dict[str, str]] = []
        for turn in turns:
            messages.append({"role": "user", "content": turn})
            prompt = self._engine.tokenize(self._engine.render(messages), add_special=False)
            if len(prompt) >= self._decoder.n_ctx:
                break
            params = SamplingParams(temperature=temperature, seed=seed)
            recording = Recording(temperature, [], [], source)
            self._reply(prompt, params, max_tokens, recording)
            recordings.append(recording)
            reply = b"".join(map(self._decoder.token_bytes, recording.tokens))
            text = reply.decode("utf-8", errors="replace")
            messages.append({"role": "assistant", "content": text})
        return recordings

    def _reply(
        self, prompt: Sequence[int], params: SamplingParams, max_tokens: int, into: Recording
    ) -> None:
        decoder = self._decoder
        config = sampling_config(
            params,
            seed=params.seed or 0,
            n_prompt=len(prompt),
            end_tokens=self._end_tokens,
        )
        decoder.open_sequence(SEQ_ID, config)
        decoder.rewind(SEQ_ID, 0)
        *before, anchor = prompt
        for begin in range(0, len(before), decoder.n_batch):
            decoder.prefill(SEQ_ID, before[begin : begin + decoder.n_batch])
        n_room = min(max_tokens, decoder.n_ctx - len(prompt))
        lookup = LookupIndex()
        lookup.extend(prompt)
        while len(into.tokens) < n_room and anchor not in self._end_tokens:
            draft = decoder.draft([SEQ_ID], [anchor])[0]
            into.drafts.append(
                DraftSignals(
                    tokens=draft.tokens,
                    confidence=draft.confidence or None,
                    certainty=draft.certainty,
                )
            )
            found = lookup.propose(LONG_LOOKUP_LEN)
            into.lookups.append(DraftSignals(found.tokens, None, found.agreement, found.match_len))
            anchor = decoder.verify([SEQ_ID], [[anchor]])[0].tokens[-1]
            into.tokens.append(anchor)
            lookup.extend([anchor])

    def close(self) -> None:
        """Frees the models."""
        self._engine.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def drafter_path(target: str, drafter: str) -> Path:
    """The drafter's file; "auto": the one that belongs to the target. Raises PairError."""
    if drafter != "auto":
        return Path(drafter).expanduser()
    found = find_drafter(target_path(target))
    if found is None:
        raise PairError(f"no drafter belongs to {target}; give --drafter FILE")
    return found
