"""The subset of JSON schema that is enforced: what goes beyond it is refused by name.

Refuses to know grammars, but for what their converter would ignore or choke on.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from .errors import ApiError
from .settings import Limits

ANNOTATIONS = frozenset(
    (
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$schema", "$id", "$comment", "$defs", "definitions"),
    )
)
BY_TYPE: Mapping[str, frozenset[str]] = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "string": frozenset({"pattern", "format", "minLength", "maxLength"}),
    "number": frozenset(),
    "integer": frozenset(),
    "boolean": frozenset(),
    "null": frozenset(),
}
FORMATS = frozenset({"date", "time", "date-time", "uuid"})
COUNTS = ("minItems", "maxItems", "minLength", "maxLength")
MAX_PATTERN_LEN = 256
# JSON's \u escapes that mean the same character in a grammar: U+0080 on, without surrogates.
NOT_ASCII = re.compile(
    r"\\u(00[89a-f][0-9a-f]|0[1-9a-f][0-9a-f]{2}|[1-9a-ce-f][0-9a-f]{3}|d[0-7][0-9a-f]{2})"
)


def _n_optional(pattern: str) -> int:
    """Parts of a pattern that may be left out or go on, repeated groups written out; or more."""
    factor = math.prod(int(low_or_high[-1]) for low_or_high in _bounds(r"\)", pattern))
    ranges = sum(int(high) - int(low) for low, high in _bounds("", pattern))
    return max(factor, 1) * (sum(map(pattern.count, "?*+|")) + max(ranges, 0))


def _bounds(before: str, pattern: str) -> list[tuple[str, str]]:
    found = re.findall(before + r"\{\s*(\d{0,4})\s*(,?)\s*(\d{0,4})\s*\}", pattern)
    return [(low or "0", high or (low or "0")) for low, _, high in found]


class SchemaChecker:
    """Copies one schema, keeping what the converter honours; its definitions get names of their
    own, since the converter would mix up those of two schemas."""

    def __init__(self, name: str, limits: Limits, *, prefix: str, defs: dict[str, Any]) -> None:
        self._name = name
        self._limits = limits
        self._prefix = prefix
        self._defs = defs
        self._names: dict[str, str] = {}
        self._n_nodes = 0

    def root(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """The copy of a whole schema; its definitions go into `defs`. Raises ApiError."""
        found: dict[str, Any] = {}
        for key in ("$defs", "definitions"):
            given = schema.get(key, {})
            if not isinstance(given, dict):
                self._refuse(f"{key} is not an object")
            for name, definition in given.items():
                found[f"#/{key}/{name}"] = definition
        self._names = {ref: f"{self._prefix}-{i}" for i, ref in enumerate(found)}
        for ref, definition in found.items():
            self._defs[self._names[ref]] = self._node(definition, 1)
        return self._node(schema, 0)

    def _node(self, node: Any, depth: int) -> dict[str, Any]:
        self._count_nodes(1)
        if depth > self._limits.schema_depth:
            self._refuse(f"the schema is deeper than {self._limits.schema_depth}")
        if not isinstance(node, dict):
            self._refuse("a part of the schema is not an object")
        keys = {key: value for key, value in node.items() if key not in ANNOTATIONS}
        if "$ref" in keys:
            self._only(keys, "$ref")
            return {"$ref": self._reference(keys["$ref"])}
        for union in ("anyOf", "oneOf", "allOf"):
            if union in keys:
                return self._union(keys, union, depth)
        for fixed in ("const", "enum"):
            if fixed in keys:
                return self._fixed(keys, fixed)
        return self._typed(keys, depth)

    def _count_nodes(self, n: int) -> None:
        self._n_nodes += n
        if self._n_nodes > self._limits.schema_nodes:
            self._refuse(f"the schema has more than {self._limits.schema_nodes} parts")

    def _reference(self, ref: object) -> str:
        if not isinstance(ref, str) or ref not in self._names:
            self._refuse(f"$ref {ref!r:.80} is none of the schema's $defs")
        return f"#/$defs/{self._names[ref]}"

    def _union(self, keys: Mapping[str, Any], union: str, depth: int) -> dict[str, Any]:
        self._only(keys, union)
        options = keys[union]
        if not isinstance(options, list) or not options:
            self._refuse(f"{union} is not a list of schemas")
        if union == "allOf":
            if len(options) > 1:
                self._refuse("allOf of several schemas is not enforced here; merge them")
            return self._node(options[0], depth + 1)
        return {"anyOf": [self._node(option, depth + 1) for option in options]}

    def _fixed(self, keys: Mapping[str, Any], fixed: str) -> dict[str, Any]:
        self._only(keys, fixed, "type")
        values = keys["enum"] if fixed == "enum" else [keys["const"]]
        if not isinstance(values, list) or not values:
            self._refuse("enum is not a list of values")
        self._count_nodes(len(values))
        for value in values:
            self._literal(json.dumps(value), f"{fixed} value")
        return {"enum": values}

    def _typed(self, keys: Mapping[str, Any], depth: int) -> dict[str, Any]:
        kind = keys.get("type")
        if isinstance(kind, list):
            options = [self._of_types(keys, option) for option in kind]
            if not options:
                self._refuse("type is an empty list")
            return {"anyOf": [self._node(option, depth + 1) for option in options]}
        if kind is None:
            kind = next((k for k, known in BY_TYPE.items() if known & keys.keys()), None)
        if kind is None:
            self._only(keys)
            return {"$ref": self._any_value()}
        if not isinstance(kind, str) or kind not in BY_TYPE:
            self._refuse(f"type is {kind!r:.40}; it must be one of {', '.join(BY_TYPE)}")
        self._only(keys, "type", *BY_TYPE[kind])
        for count in COUNTS:
            self._count(keys, count)
        if kind == "object":
            return self._object(keys, depth)
        if kind == "array":
            return self._array(keys, depth)
        return self._string(keys) if kind == "string" else {"type": kind}

    def _of_types(self, keys: Mapping[str, Any], kind: Any) -> dict[str, Any]:
        """The schema for one of several types: with the keywords that belong to it."""
        others = {key for name, known in BY_TYPE.items() if name != kind for key in known}
        return {key: value for key, value in keys.items() if key not in others} | {"type": kind}

    def _any_value(self) -> str:
        kinds = ["string", "number", "boolean", "null", "object", "array"]
        self._defs["any-json"] = {"anyOf": [{"type": kind} for kind in kinds]}
        return "#/$defs/any-json"

    def _object(self, keys: Mapping[str, Any], depth: int) -> dict[str, Any]:
        properties, required = keys.get("properties", {}), keys.get("required", [])
        more = keys.get("additionalProperties")
        if not isinstance(properties, dict):
            self._refuse("properties is not an object")
        if not isinstance(required, list) or not all(isinstance(k, str) for k in required):
            self._refuse("required is not a list of names")
        missing = next((key for key in required if key not in properties), None)
        if missing is not None:
            self._refuse(f"required property {missing!r:.80} is not among the properties")
        self._optional(len(set(properties) - set(required)), "properties")
        for key in properties:
            self._literal(json.dumps(key), "property name")
        if not properties and more in (None, True):
            return {"type": "object"}
        return {
            "type": "object",
            "properties": {k: self._node(v, depth + 1) for k, v in properties.items()},
            "required": required,
            "additionalProperties": self._more(more, depth),
        }

    def _more(self, more: Any, depth: int) -> Any:
        if more is None or more is False:
            return False
        return {"$ref": self._any_value()} if more is True else self._node(more, depth + 1)

    def _array(self, keys: Mapping[str, Any], depth: int) -> dict[str, Any]:
        if "prefixItems" in keys:
            self._only(keys, "type", "prefixItems")
            items = keys["prefixItems"]
            if not isinstance(items, list) or not items:
                self._refuse("prefixItems is not a list of schemas")
            return {"type": "array", "prefixItems": [self._node(i, depth + 1) for i in items]}
        counts = {key: keys[key] for key in ("minItems", "maxItems") if key in keys}
        most = counts.get("maxItems", self._limits.repetitions)
        if most < max(counts.get("minItems", 0), 1):
            self._refuse("maxItems is 0 or below minItems")
        return {"type": "array", "items": self._node(keys.get("items", {}), depth + 1), **counts}

    def _string(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        if "pattern" in keys:
            self._only(keys, "type", "pattern")
            pattern = keys["pattern"]
            if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN_LEN:
                self._refuse(f"pattern is not text of at most {MAX_PATTERN_LEN} characters")
            most = self._limits.repetitions
            if any(len(n) > 4 or int(n) > most for n in re.findall(r"[{,]\s*(\d+)", pattern)):
                self._refuse(f"pattern repeats something more than {most} times")
            self._optional(_n_optional(pattern), "pattern")
            try:
                re.compile(pattern)  # the converter lets unbalanced brackets through
            except re.error as error:
                self._refuse(f"pattern cannot become a grammar: {error}")
        if "format" in keys:
            self._only(keys, "type", "format")
            if keys["format"] not in FORMATS:
                self._refuse(f"format {keys['format']!r:.40} is none of {', '.join(FORMATS)}")
        if keys.get("maxLength", self._limits.repetitions) < keys.get("minLength", 0):
            self._refuse("maxLength is below minLength")
        return dict(keys) | {"type": "string"}

    def _count(self, keys: Mapping[str, Any], key: str) -> None:
        value, most = keys.get(key, 0), self._limits.repetitions
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
            self._refuse(f"{key} is {value!r:.40}; it must be 0 to {most}")

    def _optional(self, n: int, what: str) -> None:
        """llama.cpp follows every way through a grammar at once; optional parts multiply them."""
        if n > self._limits.n_optional:
            most = self._limits.n_optional
            self._refuse(f"{what}: {n} parts may be left out; the limit is {most}")

    def _literal(self, text: str, what: str) -> None:
        """Text that the converter copies into the grammar without escaping backslashes."""
        if "\\" in NOT_ASCII.sub("", text):
            self._refuse(f"{what} {text:.80} needs an escape in JSON, which cannot be enforced")

    def _only(self, keys: Mapping[str, Any], *known: str) -> None:
        other = next((key for key in keys if key not in known), None)
        if other is not None:
            beside = f" beside {known[0]}" if known else ""
            self._refuse(f"keyword {other!r:.80} is not enforced here{beside}")

    def _refuse(self, why: str) -> NoReturn:
        raise ApiError(400, f"{self._name}: {why}", param=self._name, code="unsupported_schema")
