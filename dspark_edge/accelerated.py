"""accelerate(llama): a llama_cpp.Llama's own calls, run through our engine on the same weights.

Owns what an Engine cannot take over from a Llama, and the calls' signatures. Chat goes through
llama-cpp-python's own chat handlers, which call `create_completion` here. Refuses to know what a
completion looks like (completion.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import llama_cpp
from llama_cpp import Llama, llama_chat_format

from .completion import Completion, Response
from .engine import Engine
from .speculation import Mode

_COMPLETION = inspect.signature(Llama.create_completion)
_CHAT = inspect.signature(Llama.create_chat_completion)
# Where llama-cpp-python makes a criterion that stops at the end token, which ends replies anyway.
_TEMPLATE = "Jinja2ChatFormatter."
_INIT = inspect.signature(Llama.__init__).parameters
# Set on the Llama's context, so that a context of ours would compute something else.
_YARN = ("yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow")
_CONTEXT = (
    *("rope_scaling_type", "rope_freq_base", "rope_freq_scale", "yarn_orig_ctx", *_YARN),
    *("attention_type", "type_k", "type_v"),
)


def accelerate(
    llama: Llama,
    *,
    drafter: str | Path | None = "auto",
    n_ctx: int | None = None,
    speculation: Mode = "auto",
    cost_cache: Path | None = None,
) -> AcceleratedLlama:
    """A stand-in for a `llama_cpp.Llama` that generates with speculation, on the same weights.

    llama: must stay open; its own context is left alone. drafter, speculation, cost_cache: as for
    Engine. n_ctx: tokens the new context holds, None for as many as the llama's. At temperature 0
    the text is the llama's own, but for tokens that tie within rounding; above it is drawn from the
    same distribution with other noise, and a seed given to the Llama or to a call gives the same
    text again. engine.notices says what may make a difference: attention
    without flash_attn rounds differently, a draft_model is not used.
    Raises as Engine does, and ValueError for a llama whose context has settings that ours has not.
    """
    if not isinstance(llama, Llama):
        raise ValueError(f"llama is a {type(llama).__name__}; give a llama_cpp.Llama")
    _check_context(llama)
    engine = Engine(
        llama,
        drafter=drafter,
        n_ctx=llama.n_ctx() if n_ctx is None else n_ctx,
        n_seq=1,
        n_threads=llama.n_threads,
        speculation=speculation,
        cost_cache=cost_cache,
    )
    engine.notices.extend(_notices(llama))
    return AcceleratedLlama(llama, engine)


def _notices(llama: Llama) -> list[str]:
    notices = []
    if llama.context_params.flash_attn_type == llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED:
        notices.append(
            "this Llama was made with flash_attn=False, our context chooses for itself: two tokens "
            "that nearly tie may swap; Llama(flash_attn=True) computes the same here as there"
        )
    if llama.draft_model is not None:
        notices.append("this Llama's draft_model is not used: drafts are made here")
    for name in _YARN:
        # The Llama sets these for any model, our context takes the model's own.
        own, its = _model_says(llama, name), getattr(llama.context_params, name)
        if own is not None and own != its:
            notices.append(f"{name} is {own} in the model, used here, and {its} in this Llama")
    return notices


def _model_says(llama: Llama, name: str) -> float | None:
    arch = llama.metadata.get("general.architecture", "")
    value = llama.metadata.get(f"{arch}.rope.scaling.{name}")
    return None if value is None else float(value)


def _check_context(llama: Llama) -> None:
    default = llama_cpp.llama_context_default_params()
    for name in _CONTEXT:
        value = getattr(llama.context_params, name)
        if value not in (getattr(default, name), _INIT[name].default):
            raise ValueError(f"this Llama was made with {name}={value}, which is not taken over")
    if llama.lora_path:
        raise ValueError(f"this Llama has a LoRA adapter ({llama.lora_path}), not taken over")
    if isinstance(
        llama.chat_handler,
        llama_chat_format.Llava15ChatHandler | llama_chat_format.MTMDChatHandler,
    ):
        raise ValueError("this Llama's chat handler takes images, which are not taken over")


class AcceleratedLlama:
    """`create_completion`, `create_chat_completion` and calls, as `llama_cpp.Llama` has them.

    Anything else asked of it is answered by the llama itself, on its own context. engine: for what
    llama-cpp-python has no word for, e.g. `engine.speculation_state`.
    """

    def __init__(self, llama: Llama, engine: Engine) -> None:
        self._llama = llama
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llama, name)

    def __enter__(self) -> AcceleratedLlama:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Frees the engine; the llama stays open."""
        self.engine.close()

    def n_ctx(self) -> int:
        """Tokens that the engine's context holds."""
        return self.engine.n_ctx

    def create_chat_completion(self, *args: Any, **options: Any) -> Response | Iterator[Response]:
        """As llama_cpp.Llama.create_chat_completion: parameters, defaults and responses.

        Raises as `create_completion` does.
        """
        given = _arguments(_CHAT, self, args, options)
        llama = self._llama
        name = llama.chat_format or ""
        handler: Any = (
            llama.chat_handler
            or llama._chat_handlers.get(name)
            or llama_chat_format.get_chat_completion_handler(name)
        )
        reply: Response | Iterator[Response] = handler(llama=self, **given)
        return reply

    def create_chat_completion_openai_v1(self, *args: Any, **options: Any) -> Any:
        """As llama_cpp.Llama's, which makes `create_chat_completion`'s responses the openai
        package's own objects. Raises as `create_completion` does."""
        wrap: Any = Llama.create_chat_completion_openai_v1
        return wrap(self, *args, **options)  # it calls our create_chat_completion

    def create_completion(self, *args: Any, **options: Any) -> Response | Iterator[Response]:
        """As llama_cpp.Llama.create_completion: parameters, defaults and responses.

        Raises TypeError for a parameter that there is not, ValueError naming one that cannot be
        honoured or is out of range, and as Engine.generate does.
        """
        given = _arguments(_COMPLETION, self, args, options)
        criteria = given["stopping_criteria"]
        if criteria and all(each.__qualname__.startswith(_TEMPLATE) for each in criteria):
            given["stopping_criteria"] = None
        prompt, streams = given.pop("prompt"), given.pop("stream")
        completion = Completion(self._llama, self.engine, prompt, given)
        return completion.stream() if streams else completion.whole()

    __call__ = create_completion


def _arguments(
    signature: inspect.Signature, self: object, args: Any, options: dict[str, Any]
) -> dict[str, Any]:
    bound = signature.bind(self, *args, **options)
    bound.apply_defaults()
    return {name: value for name, value in bound.arguments.items() if name != "self"}
