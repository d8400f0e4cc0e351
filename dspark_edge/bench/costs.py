"""Cost tables by name: the ones shipped in dspark_edge/costs, or a file of the user's own.

A shipped table says where it was measured, or that it is an assumption about machines of a kind.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from ..cost import CostTable


@dataclass(slots=True, frozen=True)
class NamedCost:
    """A cost table and what is known of it. measured: of the verify curve, else it is assumed."""

    name: str
    source: str
    measured: bool
    assumption: str | None
    table: CostTable


def shipped_costs() -> list[str]:
    """Names of the tables that come with the package."""
    folder = resources.files("dspark_edge") / "costs"
    return sorted(
        f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json")
    )


def load_cost(name: str) -> NamedCost:
    """A shipped table by its name, or a JSON file by its path.

    A file holds what the shipped ones do, or just CostTable.to_json(), or is a cache of the engine.
    Raises ValueError when there is no such table or it is malformed.
    """
    path = Path(name)
    if name in shipped_costs():
        text = (resources.files("dspark_edge") / "costs" / f"{name}.json").read_text("utf-8")
    elif path.is_file():
        text = path.read_text("utf-8")
    else:
        raise ValueError(
            f"no cost table {name!r}; pass a JSON file or one of: {', '.join(shipped_costs())}"
        )
    try:
        return _named(json.loads(text), path.stem)
    except ValueError as error:
        raise ValueError(f"cost table {name}: {error}") from None


def _named(data: Any, stem: str) -> NamedCost:
    if not isinstance(data, dict) or "table" not in data:
        data = {"table": data}
    return NamedCost(
        name=str(data.get("name", stem)),
        source=str(data.get("source", "a file without a source")),
        measured=bool(data.get("measured", True)),
        assumption=data.get("assumption"),
        table=CostTable.from_json(data["table"]),
    )
