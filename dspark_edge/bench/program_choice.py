"""Which programs bench compare runs beside our modes, from its options.

Nothing is started here: bad options are refused before anything loads.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeAlias

from .._core import DrafterFile
from ..errors import PairError
from ..models import target_path
from .block_recorder import drafter_path
from .llama_cpp_python import LlamaCppPython
from .llama_server import LlamaServer, check_executable, flags_for
from .modes import Setup
from .openai_url import OpenAIUrl, check_url
from .programs import Program, Tokenize
from .shared import say

LLAMA_CPP_PYTHON = (  # name, tokens of a lookup, flash attention (which all the others have on)
    ("llama-cpp-python", None, False),  # as it comes
    ("llama-cpp-python:flash", None, True),
    ("llama-cpp-python:lookup:10", 10, True),  # its default
    ("llama-cpp-python:lookup:2", 2, True),  # what its documentation advises for a CPU
)

Openers: TypeAlias = Mapping[str, Callable[[Tokenize], Program]]  # by name


def choose_programs(args: argparse.Namespace, setup: Setup) -> Openers:
    """All that are asked for, in the order in which they take turns. Raises ValueError, OSError."""
    openers: dict[str, Callable[[Tokenize], Program]] = {}
    for name, n_lookup, flash_attn in LLAMA_CPP_PYTHON:
        openers[name] = partial(_open_llama_cpp_python, name, setup, n_lookup, flash_attn)
    if args.llama_server is not None:
        executable = check_executable(args.llama_server)
        for name, flags in _llama_server(setup).items():
            openers[name] = partial(_open_llama_server, name, executable, flags)
    api_key = None if args.api_key_file is None else args.api_key_file.read_text("utf-8").strip()
    for url in args.url:
        openers[check_url(url)] = partial(_open_url, url, api_key)
    for name in args.skip:
        if name not in openers:
            raise ValueError(f"--skip is {name!r}; the programs are {', '.join(openers)}")
    return {name: opener for name, opener in openers.items() if name not in args.skip}


def _llama_server(setup: Setup) -> dict[str, list[str]]:
    """Command lines by name: plain, and with the drafter at its default and at the full block."""
    flags = partial(
        flags_for, target_path(setup.target), n_ctx=setup.n_ctx, n_threads=setup.n_threads
    )
    plain = {"llama-server": flags(drafter=None, n_max=None)}
    try:
        drafter: Path = drafter_path(setup.target, setup.drafter)
    except PairError as error:
        say(f"llama-server runs plain only: {error}")
        return plain
    n_block = DrafterFile(str(drafter)).n_draft
    return plain | {
        "llama-server:dspark": flags(drafter=drafter, n_max=None),
        f"llama-server:dspark:{n_block}": flags(drafter=drafter, n_max=n_block),
    }


def _open_llama_cpp_python(
    name: str, setup: Setup, n_lookup: int | None, flash_attn: bool, tokenize: Tokenize
) -> Program:
    return LlamaCppPython(name, setup, n_lookup=n_lookup, flash_attn=flash_attn)


def _open_llama_server(name: str, executable: str, flags: list[str], tokenize: Tokenize) -> Program:
    return LlamaServer(name, executable, flags)


def _open_url(url: str, api_key: str | None, tokenize: Tokenize) -> Program:
    return OpenAIUrl(url, tokenize, api_key)


def add_program_options(command: argparse.ArgumentParser) -> None:
    """Adds what choose_programs reads."""
    add = command.add_argument
    add("--llama-server", metavar="PATH", default=None, help="run plain, and with the drafter")
    add("--url", action="append", default=[], help="a server with OpenAI's API; may be repeated")
    add("--api-key-file", type=Path, default=None, metavar="FILE", help="a key for --url")
    add("--skip", action="append", default=[], metavar="NAME", help="a program to leave out")
