"""/v1/completions: plain texts or token ids continued.

Refuses to know conversations, the engine's thread and HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .answer import Asked, Plan
from .errors import refused
from .figures import Extras, Usage, check_prompt, check_tokens, finite
from .hub import Served
from .jobs import Piece
from .params import choices_of, sampling_of
from .schemas import CompletionRequest
from .settings import Limits

FINISH = {"stop": "stop", "length": "length", "context_full": "length", "abort": "stop"}


def asked_of(body: CompletionRequest, limits: Limits) -> Asked:
    """What a completion request wants. Raises ApiError for what can be told without the model."""
    prompts = _prompts(body)
    n_jobs = len(prompts) * (body.n or 1)
    if not prompts:
        raise refused("prompt", "it is empty; give at least one text")
    if n_jobs > limits.n_choices:
        raise refused("n", f"{n_jobs} choices are too many; the limit is {limits.n_choices}")
    if body.stream_options is not None and not body.stream:
        raise refused("stream_options", "it means something only with stream")
    if body.echo and (body.logprobs is not None or not all(isinstance(p, str) for p in prompts)):
        raise refused("echo", "it works with texts, and without logprobs")
    return Asked(
        model=body.model,
        n_jobs=n_jobs,
        streams=bool(body.stream),
        user=body.user,
        plan=lambda served: _plan(body, prompts, limits, served),
    )


def _prompts(body: CompletionRequest) -> list[str | list[int]]:
    """One text, several, one list of ids, or several."""
    given = body.prompt
    if isinstance(given, str):
        return [given]
    ids = [each for each in given if isinstance(each, int)]
    if ids:
        return [ids]
    return [each for each in given if not isinstance(each, int)]


def _plan(
    body: CompletionRequest, prompts: list[str | list[int]], limits: Limits, served: Served
) -> Plan:
    n = body.n or 1
    params = sampling_of(
        body, limits, max_tokens=body.max_tokens, logprobs=body.logprobs, grammar=None
    )
    jobs = []
    for prompt in prompts:
        if isinstance(prompt, str):
            tokens = check_prompt(prompt, served, limits, add_special=True, name="prompt")
        else:
            tokens = check_tokens(prompt, served, name="prompt")
        jobs += [(tokens, each) for each in choices_of(params, n)]
    echoed = [p for p in prompts if isinstance(p, str)] if body.echo else []
    return Plan(jobs, CompletionReply(body, served, len(jobs), echoed))


@dataclass(slots=True)
class _Choice:
    """One continuation, as far as it has come."""

    extras: Extras
    text: str = ""
    finish_reason: str | None = None
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[str, float]] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    n_chars: int = 0  # of the tokens above
    n_told: int = 0  # tokens whose log-probabilities a stream has told
    n_shown: int = 0  # characters that a stream has told


class CompletionReply:
    """The choices of one text completion."""

    def __init__(
        self, body: CompletionRequest, served: Served, n_choices: int, echoed: list[str]
    ) -> None:
        """echoed: prompts to put in front of their continuations, or []."""
        n = body.n or 1
        options = body.stream_options
        self._vocabulary = served.text.vocabulary
        self._wants_logprobs = body.logprobs is not None
        self._usage = Usage(
            "text_completion",
            served.entry.id,
            n_per_prompt=n,
            tells=bool(options and options.include_usage),
        )
        tells_pieces = bool(options and options.include_pieces)
        self._choices = [
            _Choice(
                Extras(self._vocabulary if tells_pieces else None),
                text=echoed[i // n] if echoed else "",
            )
            for i in range(n_choices)
        ]

    def is_over(self, index: int) -> bool:
        """Never before the engine says so."""
        return False

    def push(self, index: int, piece: Piece) -> dict[str, Any] | None:
        """The stream's event for a piece; None when there is nothing to say of it yet."""
        choice = self._choices[index]
        self._usage.add(index, piece)
        choice.extras.add(piece)
        choice.text += piece.text
        self._take_logprobs(choice, piece)
        if piece.finish_reason is not None:
            choice.finish_reason = FINISH.get(piece.finish_reason, "stop")
        if choice.n_shown == len(choice.text) and choice.finish_reason is None:
            return None
        told = {
            "index": index,
            "text": choice.text[choice.n_shown :],
            "finish_reason": choice.finish_reason,
            "logprobs": self._logprobs(choice, choice.n_told),
        }
        choice.n_shown, choice.n_told = len(choice.text), len(choice.tokens)
        is_last = choice.finish_reason is not None
        return self._usage.event([told], choice.extras.tell(piece, is_last=is_last))

    def last_events(self) -> list[dict[str, Any]]:
        """What a stream says when all choices have ended."""
        return self._usage.last_events()

    def whole(self) -> dict[str, Any]:
        """The reply as one object."""
        return self._usage.whole(
            [
                {
                    "index": i,
                    "text": choice.text,
                    "finish_reason": choice.finish_reason,
                    "logprobs": self._logprobs(choice, 0),
                }
                for i, choice in enumerate(self._choices)
            ]
        )

    def _take_logprobs(self, choice: _Choice, piece: Piece) -> None:
        if not self._wants_logprobs:
            return
        for each in piece.logprobs:
            text = self._text_of(each.token_id)
            choice.tokens.append(text)
            choice.token_logprobs.append(finite(each.logprob))
            choice.top_logprobs.append(
                {self._text_of(token): finite(logprob) for token, logprob in each.top}
            )
            choice.offsets.append(choice.n_chars)
            choice.n_chars += len(text)

    def _logprobs(self, choice: _Choice, begin: int) -> dict[str, Any] | None:
        if not self._wants_logprobs:
            return None
        return {
            "tokens": choice.tokens[begin:],
            "token_logprobs": choice.token_logprobs[begin:],
            "top_logprobs": choice.top_logprobs[begin:],
            "text_offset": choice.offsets[begin:],
        }

    def _text_of(self, token: int) -> str:
        return self._vocabulary.text_of([token])
