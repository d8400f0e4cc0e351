"""Runs CMake for dspark_edge._core; everything else about the package is in pyproject.toml."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).parent.resolve()


def site_packages_of_llama_cpp() -> Path:
    """The folder that holds llama_cpp/, include/llama.h and the libraries."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise SystemExit(
            "llama-cpp-python is needed to build: pip install llama-cpp-python==0.3.36"
        )
    return Path(spec.origin).parent.parent


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        module = Path(self.get_ext_fullpath(ext.name)).resolve()
        build = Path(self.build_temp).resolve() / ext.name
        # CMake remembers the tools of pip's build environment, and that is another one each time.
        shutil.rmtree(build, ignore_errors=True)
        build.mkdir(parents=True)
        configure = [
            "cmake",
            "-S",
            str(HERE),
            "-B",
            str(build),
            "-G",
            "Ninja",
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DDSPARK_LLAMA_ROOT={site_packages_of_llama_cpp()}",
            f"-DDSPARK_LLAMA_CPP_PYTHON_VERSION={importlib.metadata.version('llama-cpp-python')}",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={module.parent}",
        ]
        subprocess.run(configure, check=True)
        jobs = str(os.cpu_count() or 1)
        subprocess.run(["cmake", "--build", str(build), "--parallel", jobs], check=True)
        # Python run from a checkout imports the package beside it, not the installed one.
        in_checkout = HERE / "dspark_edge" / module.name
        if in_checkout != module:
            shutil.copy2(module, in_checkout)


setup(
    ext_modules=[Extension("dspark_edge._core", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
