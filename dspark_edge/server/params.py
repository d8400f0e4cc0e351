"""From a request's fields to SamplingParams; what cannot be honoured is refused by name.

Refuses to know prompts and replies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..sequence import MAX_SEED, SamplingParams
from .errors import refused
from .schemas import SamplingFields
from .settings import Limits


def sampling_of(
    body: SamplingFields,
    limits: Limits,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    grammar: str | None,
) -> SamplingParams:
    """Raises ApiError for what goes beyond the limits, ValueError as SamplingParams does.

    Fields that the request leaves out keep SamplingParams' defaults. grammar: one that response
    format or tools ask for.
    """
    given = {
        name: value
        for name in (
            *("temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos"),
            *("frequency_penalty", "presence_penalty", "repeat_penalty", "penalty_last_n"),
            "penalize_prompt",
        )
        if (value := getattr(body, name)) is not None
    }
    return SamplingParams(
        **given,
        max_tokens=max_tokens,
        stop=_stops(body.stop, limits),
        logit_bias=_biases(body.logit_bias or {}, limits),
        logprobs=logprobs,
        grammar=grammar,
    )


def choices_of(params: SamplingParams, n: int) -> list[SamplingParams]:
    """Parameters for n choices: a given seed counts up, or all would say the same."""
    if params.seed is None:
        return [params] * n
    return [replace(params, seed=(params.seed + i) % (MAX_SEED + 1)) for i in range(n)]


def _stops(stop: str | list[str] | None, limits: Limits) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > limits.n_stops:
        raise refused("stop", f"there are {len(stops)} strings; the limit is {limits.n_stops}")
    longest = max(map(len, stops), default=0)
    if longest > limits.stop_len:
        raise refused("stop", f"one has {longest} characters; the limit is {limits.stop_len}")
    return stops


def _biases(biases: Mapping[str, float], limits: Limits) -> dict[int, float]:
    if len(biases) > limits.n_biases:
        raise refused(
            "logit_bias", f"there are {len(biases)} entries; the limit is {limits.n_biases}"
        )
    wrong = next((key for key in biases if not (key.isascii() and key.isdigit())), None)
    if wrong is not None:
        raise refused("logit_bias", f"{wrong!r:.40} is no token id")
    return {int(key[:20]): value for key, value in biases.items()}
