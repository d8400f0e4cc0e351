"""Sets of prompts by name: our own in dspark_edge/prompts, or a file of JSON lines.

Of a conversation only the first turn is a prompt here: later ones would depend on the reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..engine import Engine
from ..errors import ModelError
from .block_recorder import read_prompts

FOLDER = Path(__file__).parent.parent / "prompts"
OWN_SETS = ("chat", "code", "math", "edit")


@dataclass(slots=True, frozen=True)
class PromptSet:
    """User messages under a name."""

    name: str
    texts: list[str]


def load_prompt_set(name: str, max_prompts: int | None = None) -> PromptSet:
    """One of OWN_SETS, or a file whose lines have "turns" (texts) or "prompt" (text).

    Raises ValueError when there is no such set or a line is bad, OSError.
    """
    path = FOLDER / f"{name}.jsonl" if name in OWN_SETS else Path(name).expanduser()
    if not path.is_file():
        raise ValueError(f"--prompts {name} is not a file; give one, or {', '.join(OWN_SETS)}")
    return PromptSet(path.stem, [turns[0] for turns in read_prompts(path)[:max_prompts]])


def tokenize(engine: Engine, prompts: PromptSet, max_tokens: int) -> list[list[int]]:
    """Token ids of each prompt as the model's chat template puts it; as it is without a template.

    Raises ValueError when a prompt and its reply may not fit into the context.
    """
    rendered = [_tokens(engine, text) for text in prompts.texts]
    for number, tokens in enumerate(rendered, start=1):
        if len(tokens) + max_tokens > engine.n_ctx:
            raise ValueError(
                f"{prompts.name} prompt {number} has {len(tokens)} tokens, which with "
                f"--max-tokens {max_tokens} pass the context of {engine.n_ctx}; raise --ctx"
            )
    return rendered


def _tokens(engine: Engine, text: str) -> list[int]:
    try:
        rendered = engine.render([{"role": "user", "content": text}])
    except ModelError:  # a base model
        return engine.tokenize(text)
    return engine.tokenize(rendered, add_special=False)


def in_groups(n_prompts: int, n_seq: int) -> list[list[int]]:
    """Indexes of the prompts that run side by side; the last group is filled up from the first."""
    starts: Sequence[int] = range(0, n_prompts, n_seq)
    return [[(start + i) % n_prompts for i in range(n_seq)] for start in starts]
