"""A request's sampling parameters as the core takes them.

Refuses to know requests and rounds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from llama_cpp.llama_grammar import json_schema_to_gbnf

from ._core import SamplingConfig
from .sequence import SamplingParams


def sampling_config(
    params: SamplingParams, *, seed: int, n_prompt: int, end_tokens: Iterable[int]
) -> SamplingConfig:
    """seed: the one to use, since params may leave it open. n_prompt: the prompt's tokens.
    end_tokens: the model's own.

    Raises ValueError for a json_schema that cannot become a grammar; the core checks the rest.
    """
    bias = list(params.logit_bias.items())
    if params.ignore_eos:
        bias += [(token, -math.inf) for token in end_tokens]
    return SamplingConfig(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repeat_penalty=params.repeat_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        penalty_last_n=params.penalty_last_n,
        penalty_from=0 if params.penalize_prompt else n_prompt,
        seed=seed,
        logit_bias=bias,
        grammar=params.grammar or _grammar_of(params.json_schema),
        n_logprobs=-1 if params.logprobs is None else params.logprobs,
    )


def _grammar_of(schema: Mapping[str, Any] | str | None) -> str:
    if schema is None:
        return ""
    try:
        return str(json_schema_to_gbnf(schema if isinstance(schema, str) else json.dumps(schema)))
    except Exception as error:  # the converter raises whatever it trips over
        raise ValueError(f"json_schema cannot be turned into a grammar: {error!r:.200}") from error
