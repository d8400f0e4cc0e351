"""What a measurement was made on, for its report."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import llama_cpp
import psutil

from .._core import device_memory

CPUINFO = Path("/proc/cpuinfo")


def describe_machine() -> dict[str, Any]:
    """System, processor, cores, memory, GPUs and the build of llama.cpp."""
    return {
        "system": platform.platform(),
        "cpu": _cpu_name(),
        "physical_cores": psutil.cpu_count(logical=False),
        "logical_cores": os.cpu_count(),
        "ram_bytes": psutil.virtual_memory().total,
        "devices": [device.name for device in device_memory()],
        "llama_cpp": llama_cpp.__version__,
        "llama_cpp_system": llama_cpp.llama_print_system_info().decode("utf-8", errors="replace"),
    }


def _cpu_name() -> str:
    try:
        lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model"):
            return value.strip()
    return platform.processor() or platform.machine()
