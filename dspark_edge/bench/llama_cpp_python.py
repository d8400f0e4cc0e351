"""llama-cpp-python's high-level API as a program of bench compare: plain, or with prompt lookup.

Refuses to know what it is compared with.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from typing import Any

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from ..models import target_path
from ..sequence import SamplingParams
from .modes import Setup
from .programs import Clock, Question, Reply


class LlamaCppPython:
    """`Llama.create_completion`, streamed, in this process."""

    clock: Clock = "arrival"

    def __init__(
        self, name: str, setup: Setup, *, n_lookup: int | None = None, flash_attn: bool = False
    ) -> None:
        """n_lookup: tokens that its lookup class drafts; None: no lookup.

        flash_attn: its default is off, unlike llama.cpp's, and rounds otherwise: on SmolLM2 that
        alone moved logits by up to one, and so texts. Raises ValueError.
        """
        self.name = name
        self.about: dict[str, Any] = {
            "version": llama_cpp.__version__,
            "flash_attn": flash_attn,
            "draft_model": None
            if n_lookup is None
            else f"LlamaPromptLookupDecoding(num_pred_tokens={n_lookup})",
        }
        lookup = None if n_lookup is None else LlamaPromptLookupDecoding(num_pred_tokens=n_lookup)
        self._llama = _Noting(
            str(target_path(setup.target)),
            n_ctx=setup.n_ctx,
            n_threads=setup.n_threads,
            n_threads_batch=setup.n_threads,
            n_gpu_layers=-1,
            flash_attn=flash_attn,
            draft_model=lookup,
            verbose=False,
        )

    def reply(self, question: Question, params: SamplingParams) -> Reply:
        """As Program has it; the clock is that of the stream's pieces."""
        llama = self._llama
        llama.n_tokens = 0  # else the prompt of a repeat would be found in the cache
        llama.noted, llama.n_evals = [], 0
        start = time.perf_counter()
        stream: Any = llama.create_completion(
            question.token_ids,
            stream=True,
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=params.seed,
        )
        text = [next(stream)["choices"][0]["text"]]
        first = last = time.perf_counter()
        n_first, n_evals_first = len(llama.noted), llama.n_evals
        for piece in stream:
            text.append(piece["choices"][0]["text"])
            last = time.perf_counter()
        return Reply(
            text="".join(text),
            # It goes past max_tokens where a character is still incomplete.
            token_ids=llama.noted[: params.max_tokens],
            n_decoded=len(llama.noted) - n_first,
            n_rounds=llama.n_evals - n_evals_first,
            ttft_s=first - start,
            decode_s=last - first,
        )

    def close(self) -> None:
        """Frees the model."""
        self._llama.close()


class _Noting(llama_cpp.Llama):
    """Notes the tokens and counts the passes, since the stream tells text only."""

    noted: list[int]
    n_evals: int = 0

    def generate(self, *args: Any, **kwargs: Any) -> Generator[int, Sequence[int] | None, None]:
        """Llama's, whose twenty parameters are its own business."""
        for token in super().generate(*args, **kwargs):
            self.noted.append(token)
            yield token

    def eval(self, tokens: Sequence[int]) -> None:
        """Llama's: one pass, as a prompt is shorter than a batch or was counted before."""
        self.n_evals += 1
        super().eval(tokens)
