"""How the package and its commands begin: nothing heavy before its time, Ctrl-C at any moment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pexpect
import pytest
from terminal import CTRL_C, PATIENCE_S, chat_environment

import dspark_edge
import dspark_edge.__main__

HEAVY = ("numpy", "llama_cpp", "prompt_toolkit", "rich", "jinja2", "psutil", "dspark_edge._core")


def python(code: str, tmp_path: Path) -> str:
    """What a fresh process prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=chat_environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("argument", ["--help", "--nonsense"])
def test_the_chat_reads_its_arguments_before_it_imports_what_is_slow(
    tmp_path: Path, argument: str
) -> None:
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['chat', {argument!r}]\n"
        "try:\n"
        "    runpy.run_module('dspark_edge.chat', run_name='__main__')\n"
        "except SystemExit:\n"
        f"    print([name for name in {HEAVY} if name in sys.modules])\n"
    )
    assert python(code, tmp_path).splitlines()[-1] == "[]"


@pytest.mark.parametrize("arguments", [["list"], ["--help"], ["pull", "no-such-name"]], ids=str)
def test_model_commands_that_read_no_model_import_nothing_heavy(
    tmp_path: Path, arguments: list[str]
) -> None:
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['models', *{arguments}]\n"
        "try:\n"
        "    runpy.run_module('dspark_edge.models', run_name='__main__')\n"
        "except SystemExit:\n"
        f"    print([name for name in {HEAVY} if name in sys.modules])\n"
    )
    assert python(code, tmp_path).splitlines()[-1] == "[]"


def test_a_script_imports_nothing_that_only_a_terminal_needs(
    tmp_path: Path, tiny_llama: Path
) -> None:
    how = ["--model", str(tiny_llama), "--drafter", "none", "--ctx", "64", "--threads", "1"]
    how += ["--max-tokens", "4", "--prompt", "Hi"]
    code = (
        "import sys\n"
        "from dspark_edge.chat import main\n"
        f"assert main({how}) == 0\n"
        "print()\n"
        "print([name for name in ('prompt_toolkit', 'rich') if name in sys.modules])\n"
    )
    assert python(code, tmp_path).splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "code", "stream"), [(["--help"], 0, 0), ([], 2, 1), (["nonsense"], 2, 1)]
)
def test_the_command_names_its_parts(
    arguments: list[str],
    code: int,
    stream: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What was asked for is an answer; after a mistake it is a complaint."""
    monkeypatch.setattr(sys, "argv", ["dspark-edge", *arguments])
    monkeypatch.setattr(dspark_edge.__main__, "end_on_ctrl_c", lambda: None)
    assert dspark_edge.__main__.main() == code
    assert "{chat,serve,bench,models,distill}" in capsys.readouterr()[stream]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"n_threads": "2"}, "n_threads is '2'; it must be 1 to"),
        ({"limits": 3}, "limits is 3; give a dspark_edge.Limits"),
    ],
)
def test_an_engine_refuses_options_of_another_type(
    options: dict[str, Any], says: str, tiny_llama: Path
) -> None:
    with pytest.raises(ValueError, match=says):
        dspark_edge.Engine(tiny_llama, **options)


def test_every_public_name_is_there_and_no_other() -> None:
    for name in dspark_edge.__all__:
        value = getattr(dspark_edge, name)
        assert value.__module__.startswith("dspark_edge."), name
    assert set(dspark_edge.__all__) <= set(dir(dspark_edge))
    with pytest.raises(AttributeError, match="no attribute 'engines'"):
        _ = dspark_edge.engines


def test_the_extension_cannot_be_imported_in_front_of_llama_cpp(tmp_path: Path) -> None:
    # It would load a second copy of llama.cpp, or none.
    code = (
        "import sys, dspark_edge\n"
        "assert 'llama_cpp' not in sys.modules\n"
        "from dspark_edge._core import BlockDecoder\n"
        "print('llama_cpp' in sys.modules, BlockDecoder.__name__)\n"
    )
    assert python(code, tmp_path) == "True BlockDecoder\n"


def test_an_extension_of_another_llama_cpp_is_refused_with_the_way_out(tmp_path: Path) -> None:
    code = (
        "import llama_cpp\n"
        "llama_cpp.__version__ = '0.0.1'\n"
        "try:\n"
        "    import dspark_edge.engine\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    said = python(code, tmp_path)
    assert "but 0.0.1 is installed; reinstall it: pip install" in said


@pytest.mark.parametrize(
    "module",
    [
        *("dspark_edge.chat.options", "dspark_edge.chat.app", "numpy", "llama_cpp.llama_cpp"),
        *("jinja2", "dspark_edge._core", "dspark_edge.engine", "dspark_edge.chat.talk"),
    ],
)
def test_ctrl_c_before_the_prompt_ends_the_chat_with_130_and_no_traceback(
    tmp_path: Path, tiny_llama: Path, module: str
) -> None:
    # Behind talk the model loads. Later the prompt may have come, where Ctrl-C clears the line.
    child = pexpect.spawn(
        sys.executable,
        ["-X", "importtime", "-m", "dspark_edge.chat", "--model", str(tiny_llama), "--ctx", "64"],
        env=chat_environment(tmp_path),
        timeout=PATIENCE_S,
        encoding="utf-8",
    )
    try:
        child.expect(rf"\| +{module}\r")
        child.send(CTRL_C)
        child.expect(pexpect.EOF)
        child.close()
    finally:
        child.close(force=True)
    assert "Traceback" not in (child.before or "")
    assert "KeyboardInterrupt" not in (child.before or "")
    assert child.exitstatus == 130
