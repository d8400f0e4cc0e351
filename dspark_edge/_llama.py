"""Loads llama_cpp before the extension, and checks that both mean the same llama.cpp.

The order matters: the extension then uses the libllama that llama_cpp has loaded. In the other
order the process would hold two copies with separate state.
"""

import logging

import llama_cpp

from . import _core

if _core.built_against != llama_cpp.__version__:
    raise ImportError(
        f"dspark_edge was built against llama-cpp-python {_core.built_against} but "
        f"{llama_cpp.__version__} is installed; reinstall it: "
        "pip install --force-reinstall --no-deps --no-cache-dir dspark-edge"
    )

# llama-cpp-python prints every line of llama.cpp's log until somebody chooses a level.
_log = logging.getLogger("llama-cpp-python")
if _log.level == logging.NOTSET:
    _log.setLevel(logging.CRITICAL)
