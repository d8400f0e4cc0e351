"""Tool calls: enforced by grammar where they are required, and parsed back out of the text.

Two forms: Hermes and Qwen write <tool_call>{"name": ..., "arguments": ...}</tool_call>, Llama a
bare {"name": ..., "parameters": ...}. Refuses to know templates and streams.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..thoughts import THINK, THINK_END
from .json_schema import grammar_of
from .prompts import ToolStyle
from .schemas import Tool
from .settings import Limits

CALL, CALL_END = "<tool_call>", "</tool_call>"
NO_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
THOUGHT_RULE = 'thought ::= ( [^<] | "<" [^/] )* "' + THINK_END + r'" [ \n]*'


@dataclass(slots=True, frozen=True)
class Call:
    """One call in a reply. arguments: JSON text."""

    name: str
    arguments: str
    id: str

    def to_json(self, index: int | None = None) -> dict[str, Any]:
        """OpenAI's form; with an index that of a stream."""
        function = {"name": self.name, "arguments": self.arguments}
        call = {"id": self.id, "type": "function", "function": function}
        return call if index is None else {"index": index, **call}


def call_grammar(tools: Sequence[Tool], style: ToolStyle, *, parallel: bool, limits: Limits) -> str:
    """GBNF for a reply that calls one of the tools, or several where the form allows it."""
    key = "parameters" if style == "llama" else "arguments"

    def wrap(schemas: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {"name": {"const": tool.function.name}, key: schema},
                    "required": ["name", key],
                    "additionalProperties": False,
                }
                for tool, schema in zip(tools, schemas, strict=True)
            ]
        }

    given = [tool.function.parameters or NO_PARAMETERS for tool in tools]
    grammar = renamed_root(grammar_of(given, wrap, "tools", limits), "call")
    if style == "llama":
        return f"root ::= call\n{grammar}"
    wrapped = rf'"{CALL}\n" call "\n{CALL_END}"'
    more = rf' ( "\n" {wrapped} )*' if parallel else ""
    return f"root ::= {wrapped}{more}\n{grammar}"


def after_thought(grammar: str, *, is_thinking: bool) -> str:
    """The grammar behind a thought: one that the prompt has begun, or one that may be there."""
    inner = renamed_root(grammar, "answer")
    begin = "thought" if is_thinking else f'( "{THINK}" thought )?'
    return f"root ::= {begin} answer\n{THOUGHT_RULE}\n{inner}"


def renamed_root(grammar: str, name: str) -> str:
    """A grammar whose first rule has another name. No rule of ours refers to its root."""
    lines = grammar.split("\n")
    return "\n".join(
        f"{name} ::= {line[len('root ::= ') :]}" if line.startswith("root ::= ") else line
        for line in lines
    )


def parse_call(text: str, names: frozenset[str]) -> Call | None:
    """The call that a JSON text makes, or None when it makes none of the tools known."""
    try:
        value = json.loads(text, strict=False)  # models write line ends into strings
    except (ValueError, RecursionError):
        return None
    return _call_of(value, names)


def parse_bare_calls(text: str, names: frozenset[str]) -> list[Call]:
    """The calls of a whole reply in Llama's form; [] when it is anything else."""
    decoder = json.JSONDecoder(strict=False)
    rest = text.strip().removeprefix("<|python_tag|>").lstrip()
    calls: list[Call] = []
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            return []
        call = _call_of(value, names)
        if call is None:
            return []
        calls.append(call)
        rest = rest[end:].lstrip(" \n;")
    return calls


def _call_of(value: object, names: frozenset[str]) -> Call | None:
    if not isinstance(value, dict) or value.get("name") not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the arguments as JSON text
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, dict):
        return None
    try:
        # Escaped, because half of a surrogate pair cannot be sent otherwise.
        written = json.dumps(arguments, allow_nan=False)
    except (ValueError, RecursionError):  # NaN and Infinity are no JSON
        return None
    return Call(str(value["name"]), written, f"call_{secrets.token_hex(12)}")
