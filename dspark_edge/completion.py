"""One completion in llama-cpp-python's terms: its parameters to ours, our chunks to its responses.

Refuses to know conversations, and where the parameters come from.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import llama_cpp
from llama_cpp import Llama

from .engine import Engine
from .errors import ContextFullError
from .sequence import Chunk, SamplingParams, TokenLogprob

Response = dict[str, Any]

# What cannot be honoured unless it says "off", with the reason.
_NEUTRAL: dict[str, tuple[object, str]] = {
    "suffix": (None, "nothing is filled in here"),
    "typical_p": (1.0, "the sampler chain has no such step"),
    "tfs_z": (1.0, "the sampler chain has no such step"),
    "mirostat_mode": (0, "the sampler chain has no such step"),
    "stopping_criteria": (None, "tokens are checked several at a time; use stop"),
    "logits_processor": (None, "logits stay in llama.cpp; use logit_bias or grammar"),
}


class Completion:
    """One completion, not begun yet. Raises ValueError as AcceleratedLlama.create_completion."""

    def __init__(
        self, llama: Llama, engine: Engine, prompt: str | Sequence[int], given: dict[str, Any]
    ) -> None:
        """given: all parameters of llama_cpp.Llama.create_completion but prompt and stream."""
        for name, (neutral, reason) in _NEUTRAL.items():
            if given[name] != neutral:
                raise ValueError(
                    f"{name} is {given[name]!r:.80}, which accelerate does not honour: {reason}; "
                    f"leave it at {neutral!r}, or call the Llama itself"
                )
        if given["repeat_penalty"] != 1.0 and given["logit_bias"]:
            raise ValueError(
                "repeat_penalty and logit_bias are both given, which accelerate does not honour: "
                "llama-cpp-python adds the bias before it divides by the penalty, the sampler "
                "chain here after; give one, or frequency_penalty, or call the Llama itself"
            )
        if given["echo"] and (given["logprobs"] is not None or not isinstance(prompt, str)):
            raise ValueError("echo works with a text as prompt, and without logprobs")
        self._engine = engine
        self._vocab = llama._model.vocab
        self._prompt = prompt
        self._echo = bool(given["echo"])
        self._tokens = _prompt_tokens(llama, prompt)
        if len(self._tokens) >= engine.n_ctx:
            raise ContextFullError(
                f"prompt has {len(self._tokens)} tokens but the context holds {engine.n_ctx}, the "
                "reply included; give accelerate() a larger n_ctx or shorten it"
            )
        seed = given["seed"]
        if seed is None:  # as llama-cpp-python: each call's seed follows from the one before
            seed = random.Random(llama._seed).randint(0, 2**32)
        n_room = engine.n_ctx - len(self._tokens)
        self._params = _params(given | {"seed": seed}, n_room, llama.last_n_tokens_size)
        engine.check(self._params)
        llama.set_seed(seed)
        self._head = {
            "id": f"cmpl-{uuid.uuid4()}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": given["model"] if given["model"] is not None else llama.model_path,
        }
        self._ids: list[int] = []
        self._n_chars = len(prompt)  # as llama-cpp-python: of a list, its tokens
        self._finish_reason = "length"

    def whole(self) -> Response:
        """The completion as one response."""
        texts: list[str] = []
        logprobs: list[Response] = []
        for text, told in self._run():
            texts.append(text)
            logprobs += [told] if told else []
        text = "".join(texts)
        if self._echo and isinstance(self._prompt, str):
            text = self._prompt + text
        n_prompt, n_completion = len(self._tokens), len(self._ids)
        usage = {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_completion,
            "total_tokens": n_prompt + n_completion,
        }
        joined = _joined(logprobs) if self._params.logprobs is not None else None
        return self._response(text, joined, self._finish_reason) | {"usage": usage}

    def stream(self) -> Iterator[Response]:
        """The completion as one response per round, and a last one with the finish reason."""
        for text, told in self._run():
            if text or told:
                yield self._response(text, told, None)
        yield self._response("", None, self._finish_reason)

    def _response(self, text: str, logprobs: Response | None, reason: str | None) -> Response:
        choice = {"text": text, "index": 0, "logprobs": logprobs, "finish_reason": reason}
        return self._head | {"choices": [choice]}

    def _run(self) -> Iterator[tuple[str, Response | None]]:
        """(text, log-probabilities) of each round."""
        stream = self._engine.generate(self._tokens, self._params)
        try:
            for chunk in stream:
                ids = [t for t in chunk.token_ids if not self._is_end(t)]
                told = self._logprobs(chunk.logprobs[: len(ids)]) if chunk.logprobs else None
                self._ids += ids
                if chunk.finish_reason == "stop":
                    self._finish_reason = "stop"
                yield self._text(chunk), told
        finally:
            stream.close()  # aborts the request when nobody wants the rest

    def _is_end(self, token: int) -> bool:
        return bool(llama_cpp.llama_vocab_is_eog(self._vocab, token))

    def _text(self, chunk: Chunk) -> str:
        """The chunk's text. Half a character at the end is left out, as llama-cpp-python does."""
        if chunk.finish_reason is None or not chunk.text.endswith("\ufffd"):
            return chunk.text
        raw = b"".join(self._engine.token_bytes(token) for token in self._ids)
        is_whole = raw.decode("utf-8", errors="ignore").endswith("\ufffd")
        return chunk.text if is_whole else chunk.text.rstrip("\ufffd")

    def _logprobs(self, listed: Sequence[TokenLogprob]) -> Response | None:
        """llama-cpp-python's lists for some tokens; their texts one by one."""
        told = _joined([])
        for each in listed:
            text = self._text_of(each.token_id)
            told["tokens"].append(text)
            told["text_offset"].append(self._n_chars)
            told["token_logprobs"].append(each.logprob)
            top = {self._text_of(token): logprob for token, logprob in each.top}
            told["top_logprobs"].append(top | {text: each.logprob})
            self._n_chars += len(text)
        return told if listed else None

    def _text_of(self, token: int) -> str:
        return self._engine.token_bytes(token).decode("utf-8", errors="ignore")


def _joined(parts: Sequence[Response]) -> Response:
    names = ("tokens", "text_offset", "token_logprobs", "top_logprobs")
    return {name: [value for part in parts for value in part[name]] for name in names}


def _params(given: dict[str, Any], n_room: int, penalty_last_n: int) -> SamplingParams:
    """n_room: tokens that fit behind the prompt. Raises ValueError."""
    stop, limit = given["stop"] or (), given["max_tokens"]
    if given["temperature"] < 0:
        raise ValueError(f"temperature is {given['temperature']}; it must be 0 or more")
    return SamplingParams(
        temperature=given["temperature"],
        top_k=max(given["top_k"], 0),  # 0 and below mean off
        top_p=given["top_p"],
        min_p=given["min_p"],
        repeat_penalty=given["repeat_penalty"],
        frequency_penalty=given["frequency_penalty"],
        presence_penalty=given["presence_penalty"],
        penalty_last_n=max(penalty_last_n, 0),  # as llama.cpp: below 0 is off too
        penalize_prompt=False,  # llama-cpp-python's sampler never sees the prompt
        seed=given["seed"],
        max_tokens=min(limit, n_room) if limit is not None and limit > 0 else n_room,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        logit_bias={int(k): float(v) for k, v in (given["logit_bias"] or {}).items()},
        logprobs=given["logprobs"],
        grammar=given["grammar"]._grammar if given["grammar"] is not None else None,
    )


def _prompt_tokens(llama: Llama, prompt: str | Sequence[int]) -> list[int]:
    """The tokens that llama-cpp-python makes of a prompt."""
    if not isinstance(prompt, str):
        return list(prompt)
    model = llama._model
    begin, end = model.token_cls(), model.token_sep()
    has_end = end != -1 or model.add_eos_token()
    begin = begin if begin != -1 else llama.token_bos()
    end = end if end != -1 else llama.token_eos()
    begins = [begin] if model.add_bos_token() and begin != -1 else []
    text = prompt.encode("utf-8")
    tokens = llama.tokenize(text, add_bos=False, special=True) if text else []
    return [*begins, *tokens, *([end] if has_end else [])]
