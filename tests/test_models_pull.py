"""Fetching from the hub, against one on this machine: resume, checksum, and being off-line."""

from __future__ import annotations

import fcntl
import hashlib
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("huggingface_hub")

from fake_hub import Hub, serve

from dspark_edge.errors import ModelError
from dspark_edge.models.pull import RemoteFile, choose, pull

CONTENT = bytes(range(256)) * 40_000  # 10 MB
REPO = "me/tiny-GGUF"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    from huggingface_hub import constants

    cache = tmp_path / "cache"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    files = {"tiny-Q4_K_M.gguf": CONTENT, "tiny-Q8_0.gguf": b"GGUF", "README.md": b"# tiny"}
    with serve({REPO: files}) as served:
        yield served


def test_a_file_is_fetched_whole_and_only_once(hub: Hub) -> None:
    path = pull(REPO, ("*Q4_K_M*.gguf",), endpoint=hub.endpoint)
    assert path.name == "tiny-Q4_K_M.gguf"
    assert path.read_bytes() == CONTENT
    assert len(hub.ranges) == 1
    assert pull(REPO, ("*Q4_K_M*.gguf",), endpoint=hub.endpoint) == path
    assert len(hub.ranges) == 1


def test_a_broken_download_goes_on_where_it_stopped(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 20)
    hub.cut_after = 5_000_000
    assert pull(REPO, ("tiny-Q4_K_M.gguf",), endpoint=hub.endpoint).read_bytes() == CONTENT
    assert hub.ranges == ["", f"bytes={4 << 20}-"]


def test_what_an_ended_process_left_is_used_by_the_next(hub: Hub, tmp_path: Path) -> None:
    blobs = tmp_path / "cache" / "models--me--tiny-GGUF" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{hashlib.sha256(CONTENT).hexdigest()}.part").write_bytes(CONTENT[:3_000_000])
    path = pull(REPO, ("tiny-Q4_K_M.gguf",), endpoint=hub.endpoint)
    assert path.read_bytes() == CONTENT
    assert hub.ranges == ["bytes=3000000-"]
    assert not list(blobs.glob("*.part"))


def test_wrong_bytes_are_removed_and_said(hub: Hub, tmp_path: Path) -> None:
    hub.corrupt = True
    with pytest.raises(ModelError, match="SHA-256"):
        pull(REPO, ("tiny-Q4_K_M.gguf",), endpoint=hub.endpoint)
    assert not list((tmp_path / "cache").rglob("*.gguf"))
    hub.corrupt = False
    assert pull(REPO, ("tiny-Q4_K_M.gguf",), endpoint=hub.endpoint).read_bytes() == CONTENT


def test_the_token_goes_to_the_hub_and_not_to_where_it_keeps_files(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    pull(REPO, ("tiny-Q8_0.gguf",), endpoint=hub.endpoint)
    assert hub.authorizations == ["Bearer hf_secret"]  # a private file needs it
    with serve(hub.repos) as storage:
        hub.storage = storage.endpoint
        path = pull(REPO, ("tiny-Q4_K_M.gguf",), endpoint=hub.endpoint)
        assert path.read_bytes() == CONTENT
        assert storage.authorizations == [None]


def test_several_files_are_named_and_none_is_guessed(hub: Hub) -> None:
    with pytest.raises(ModelError, match=r"--file NAME: tiny-Q4_K_M\.gguf \(10 MB\)"):
        pull(REPO, ("*.gguf",), endpoint=hub.endpoint)
    with pytest.raises(ModelError, match=r"it has tiny-Q4_K_M\.gguf, tiny-Q8_0\.gguf"):
        pull(REPO, ("*F16*",), endpoint=hub.endpoint)


def test_the_preferred_pattern_wins() -> None:
    files = [RemoteFile(REPO, name, 1, "") for name in ("a-Q8_0.gguf", "a-Q4_K_M.gguf")]
    assert choose(REPO, files, ("*Q4_K_M*.gguf", "*Q8_0*.gguf")).name == "a-Q4_K_M.gguf"
    assert choose(REPO, files[:1], ("*Q4_K_M*.gguf", "*Q8_0*.gguf")).name == "a-Q8_0.gguf"


def test_a_repository_that_is_not_there_is_named(hub: Hub) -> None:
    with pytest.raises(ModelError, match="me/nothing is not on"):
        pull("me/nothing", ("*.gguf",), endpoint=hub.endpoint)


def run_pull(**env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dspark_edge.models", "pull", REPO],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **env},
    )


def test_off_line_is_said_without_retries() -> None:
    # Port 1 of this machine refuses; with retries of the library this would wait and say less.
    done = run_pull(HF_ENDPOINT="http://127.0.0.1:1")
    assert done.returncode == 1
    assert "cannot be reached" in done.stderr
    assert "are you off-line?" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_hubs_offline_switch_is_respected(hub: Hub) -> None:
    done = run_pull(HF_HUB_OFFLINE="1", HF_ENDPOINT=hub.endpoint)
    assert done.returncode == 1
    assert "HF_HUB_OFFLINE is set" in done.stderr
    assert hub.ranges == []


def test_progress_is_shown_in_a_terminal_and_the_path_printed(hub: Hub, tmp_path: Path) -> None:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    env = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "dspark_edge.models", "pull", REPO, "--file", "*Q4_K_M*"]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=slave, text=True, check=True, env=os.environ | env
    )
    os.close(slave)
    shown = os.read(master, 1 << 16).decode(errors="replace")
    os.close(master)
    assert Path(done.stdout.strip()).read_bytes() == CONTENT
    assert "100%" in shown
