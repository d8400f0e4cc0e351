"""JSON schemas to grammars. The conversion is llama-cpp-python's.

Refuses to know which schemas are enforced (schema_check.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any

from llama_cpp.llama_grammar import json_schema_to_gbnf

from .errors import ApiError
from .schema_check import SchemaChecker
from .settings import Limits


def grammar_of(schemas: Sequence[Mapping[str, Any]], wrap: Any, name: str, limits: Limits) -> str:
    """GBNF with a rule `root` for JSON that fits wrap(schemas).

    wrap gets the schemas, checked and made ready to stand side by side in one. name: the parameter,
    for errors. Raises ApiError.
    """
    defs: dict[str, Any] = {}
    checked = [
        SchemaChecker(name, limits, prefix=f"def-{i}", defs=defs).root(schema)
        for i, schema in enumerate(schemas)
    ]
    _check_circles(defs, name)
    shape = wrap(checked)
    # Of a schema that is nothing but a reference the converter reads no definitions.
    whole = {"anyOf": [shape]} if "$ref" in shape else shape
    text = json.dumps({**whole, "$defs": defs})
    try:
        grammar = str(json_schema_to_gbnf(text))
    except Exception as error:  # the converter raises whatever it trips over
        why = f"the schema cannot be turned into a grammar: {str(error) or type(error).__name__}"
        raise _refused(name, why[:200]) from error
    n_bytes = len(grammar.encode("utf-8", errors="replace"))
    if n_bytes > limits.grammar_bytes:
        raise _refused(
            name, f"its grammar has {n_bytes} bytes; the limit is {limits.grammar_bytes}"
        )
    return grammar


def _check_circles(defs: Mapping[str, Any], name: str) -> None:
    """Raises ApiError when definitions lead back to themselves with nothing in between."""
    try:
        TopologicalSorter({key: _references(node) for key, node in defs.items()}).prepare()
    except CycleError as error:
        why = "definitions that only refer to each other make no grammar"
        raise _refused(name, why) from error


def _references(node: Mapping[str, Any]) -> set[str]:
    """The definitions that a checked schema may stand for as a whole."""
    if "$ref" in node:
        return {node["$ref"].removeprefix("#/$defs/")}
    return set().union(*map(_references, node.get("anyOf", ())))


def _refused(name: str, why: str) -> ApiError:
    return ApiError(400, f"{name}: {why}", param=name, code="unsupported_schema")
