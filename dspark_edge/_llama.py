"""Loads llama_cpp before the extension, and checks that both mean the same llama.cpp.

The order matters: the extension then uses the libllama that llama_cpp has loaded. In the other
order the process would hold two copies with separate state. So this stands in the way of whoever
imports the extension, and of nothing else: llama_cpp is slow to import and not always needed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ExtensionFileLoader, ModuleSpec, PathFinder
from types import ModuleType

_EXTENSION = f"{__package__}._core"


class LlamaFirst:
    """Finds the extension for Python's import; see importlib.abc.MetaPathFinder."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The extension, behind llama_cpp; None for any other module."""
        if name != _EXTENSION:
            return None
        import llama_cpp as llama_cpp

        _be_quiet()
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Checked(name, spec.origin)
        return spec


class _Checked(ExtensionFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        """Raises ImportError for an extension of another llama.cpp."""
        import llama_cpp

        super().exec_module(module)
        if module.built_against != llama_cpp.__version__:
            raise ImportError(
                f"dspark_edge was built against llama-cpp-python {module.built_against} but "
                f"{llama_cpp.__version__} is installed; reinstall it: "
                "pip install --force-reinstall --no-deps --no-cache-dir dspark-edge"
            )


def _be_quiet() -> None:
    """llama-cpp-python prints every line of llama.cpp's log until somebody chooses a level."""
    import logging

    log = logging.getLogger("llama-cpp-python")
    if log.level == logging.NOTSET:
        log.setLevel(logging.CRITICAL)


sys.meta_path.insert(0, LlamaFirst)
