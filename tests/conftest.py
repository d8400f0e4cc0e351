"""Shared fixtures: the tiny files of tiny_models, written once per test run."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

import pytest
from tiny_models import (
    DrafterSpec,
    write_drafter,
    write_gemma3,
    write_lfm2,
    write_llama,
    write_mamba,
)

# Before llama.cpp's threads exist: they spin while waiting, which starves whoever shares the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Started in the background of a shell, or by nohup, this process ignores signals, and so would its
# children: tests that send signals need them as a terminal has them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# llama_cpp prints everything of llama.cpp that this logger's level lets through.
logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama") / "llama.gguf")


@pytest.fixture(scope="session")
def tiny_gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gemma3(tmp_path_factory.mktemp("gemma3") / "gemma3.gguf")


@pytest.fixture(scope="session")
def tiny_lfm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lfm2(tmp_path_factory.mktemp("lfm2") / "lfm2.gguf")


@pytest.fixture(scope="session")
def tiny_mamba(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mamba(tmp_path_factory.mktemp("mamba") / "mamba.gguf")


@pytest.fixture(scope="session")
def tiny_drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DSpark drafter of block 4 for tiny_llama: random, so hardly ever right."""
    return write_drafter(tmp_path_factory.mktemp("drafter") / "drafter.gguf", DrafterSpec())
