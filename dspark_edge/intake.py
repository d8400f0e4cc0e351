"""What callers give, made into what rounds can run: text to tokens, messages to prompts, requests.

Owns the checks of prompts and parameters. Refuses to know queues, rounds and pressure.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Mapping, Sequence
from functools import cache
from operator import index

from ._core import BlockDecoder, LookupIndex, SamplingConfig
from .errors import ContextFullError
from .prompt import ChatTemplate
from .sampling import sampling_config
from .sequence import Request, SamplingParams, Stats
from .speculation import Speculation
from .text import TextStream


class Intake:
    """A decoder's vocabulary, chat template and limits. Threads may use it while a round runs.

    n_ctx: tokens one sequence can hold. token_bytes: bytes of a token; control tokens have none.
    """

    __slots__ = (
        "_decoder",
        "_end_tokens",
        "_ids",
        "_speculation",
        "_template",
        "n_ctx",
        "token_bytes",
    )

    def __init__(self, decoder: BlockDecoder, speculation: Speculation) -> None:
        self._decoder = decoder
        self._speculation = speculation
        self._template: ChatTemplate | None = None
        self._ids = itertools.count()
        self.n_ctx = decoder.n_ctx
        self._end_tokens = frozenset(decoder.eog_tokens)
        self.token_bytes = cache(decoder.token_bytes)

    def tokenize(self, text: str, *, add_special: bool = True) -> list[int]:
        """As Engine.tokenize."""
        try:
            return self._decoder.tokenize(text.encode("utf-8"), add_special)
        except UnicodeEncodeError as error:
            raise ValueError(f"the text is not Unicode: {error}") from error

    def is_end(self, token: int) -> bool:
        """As Engine.is_end."""
        return token in self._end_tokens

    def render(self, messages: Sequence[Mapping[str, object]]) -> str:
        """As Engine.render."""
        if self._template is None:
            self._template = ChatTemplate(
                self._decoder.metadata("tokenizer.chat_template"),
                bos=self._special_text(self._decoder.bos_token),
                eos=self._special_text(self._decoder.eos_token),
            )
        return self._template.render(messages)

    def _special_text(self, token: int) -> str:
        if token < 0:
            return ""
        return self._decoder.token_bytes(token, special=True).decode("utf-8", errors="replace")

    def sampling(
        self, params: SamplingParams, *, seed: int = 0, n_prompt: int = 0
    ) -> SamplingConfig:
        """The parameters as the core takes them, for a prompt of n_prompt tokens.

        Raises ValueError when one is out of range, or a grammar does not parse.
        """
        sampling = sampling_config(
            params, seed=seed, n_prompt=n_prompt, end_tokens=self._end_tokens
        )
        self._decoder.check_sampling(sampling)
        return sampling

    def request(self, prompt: str | Sequence[int], params: SamplingParams | None) -> Request:
        """A new request, checked; raises as Engine.add, but for pressure."""
        params = params or SamplingParams()
        tokens = self._prompt_tokens(prompt)
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        return Request(
            id=next(self._ids),
            tokens=tokens,
            params=params,
            sampling=self.sampling(params, seed=seed, n_prompt=len(tokens)),
            end_tokens=frozenset() if params.ignore_eos else self._end_tokens,
            stats=Stats(seed=seed, n_prompt=len(tokens)),
            text=TextStream(params.stop),
            started_s=time.perf_counter(),
            lookup=LookupIndex() if self._speculation.looks_up else None,
        )

    def _prompt_tokens(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, bytes):
            raise ValueError("the prompt is bytes; give a str or a list of token ids")
        try:
            tokens = (
                self.tokenize(prompt) if isinstance(prompt, str) else [index(t) for t in prompt]
            )
        except TypeError as error:
            raise ValueError(f"the prompt is no str or list of token ids: {error}") from error
        if not tokens:
            raise ValueError("the prompt is empty; give at least one token")
        if len(tokens) > self.n_ctx:
            raise ContextFullError(
                f"prompt has {len(tokens)} tokens but the context holds {self.n_ctx}; "
                f"pass a larger n_ctx or shorten it"
            )
        n_vocab = self._decoder.n_vocab
        bad = next((t for t in tokens if not 0 <= t < n_vocab), None)
        if bad is not None:
            raise ValueError(f"token id is {bad}; this model has ids 0 to {n_vocab - 1}")
        return tokens
