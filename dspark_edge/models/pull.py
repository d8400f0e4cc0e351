"""Fetches a GGUF from the Hugging Face hub, with progress and resume, and checks its bytes.

Through huggingface_hub and into its cache. Refuses to know what is inside a file and what it pairs
with.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from ..errors import ModelError
from .pairing import hub_cache

CONNECT_S = 10  # until a server must have answered
CHUNK_BYTES = 1 << 20
DEFAULT_PORTS = {"http": 80, "https": 443}
LISTED = 12  # file names that a message shows at most


@dataclass(slots=True, frozen=True)
class RemoteFile:
    """A file of a repository; sha256 as the hub states it, "" when it does not."""

    repo: str
    name: str
    n_bytes: int
    sha256: str


def pull(repo: str, patterns: Sequence[str], *, endpoint: str | None = None) -> Path:
    """Fetches the file of the repository that fits the first pattern that fits any; returns its
    path in the hub's cache. A partial file goes on where it stopped.

    Raises ModelError: off-line, no such repository, no or several such files, wrong checksum, or
    huggingface_hub is not installed.
    """
    try:
        import huggingface_hub
        from huggingface_hub import constants
    except ImportError as error:
        raise ModelError(
            'huggingface_hub is not installed; pip install "dspark-edge[hub]" brings it'
        ) from error
    where = endpoint or os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
    if constants.HF_HUB_OFFLINE:
        raise ModelError(f"{repo} cannot be fetched: HF_HUB_OFFLINE is set; unset it")
    _check_reachable(where)
    try:
        api = huggingface_hub.HfApi(endpoint=where)
        listed = [
            RemoteFile(repo, item.path, item.size, item.lfs.sha256 if item.lfs else "")
            for item in api.list_repo_tree(repo, recursive=True)
            if isinstance(item, huggingface_hub.RepoFile)
        ]
        wanted = choose(repo, listed, patterns)
        path = _fetch(wanted, where)
    except ModelError:
        raise
    except Exception as error:  # of three libraries below, in their own classes
        raise ModelError(_reason(repo, where, error)) from error
    return path


def _fetch(wanted: RemoteFile, endpoint: str) -> Path:
    """Into the hub's cache. The library alone forgets a partial file when its process ends, so the
    bytes are fetched and checked here first; it then finds them and makes the rest of its cache."""
    from huggingface_hub import (
        file_download,
        get_hf_file_metadata,
        hf_hub_download,
        hf_hub_url,
        try_to_load_from_cache,
    )
    from huggingface_hub.utils._headers import build_hf_headers

    url = hf_hub_url(wanted.repo, wanted.name, endpoint=endpoint)
    remote = get_hf_file_metadata(url, timeout=CONNECT_S, endpoint=endpoint)
    cached = try_to_load_from_cache(
        wanted.repo, wanted.name, cache_dir=hub_cache(), revision=remote.commit_hash
    )
    blobs = hub_cache() / f"models--{wanted.repo.replace('/', '--')}" / "blobs"
    blob = blobs / str(remote.etag)
    if not isinstance(cached, str) and not blob.exists():
        blobs.mkdir(parents=True, exist_ok=True)
        part = blob.with_suffix(".part")
        with part.open("ab") as file:
            file_download.http_get(
                remote.location,
                file,
                resume_size=file.tell(),
                # The signed address of another server needs none, and that server must not get it.
                headers=build_hf_headers(
                    token=None if _origin(remote.location) == _origin(endpoint) else False
                ),
                expected_size=remote.size,
                displayed_filename=wanted.name,
            )
        check_bytes(part, wanted)
        part.replace(blob)
    return Path(
        hf_hub_download(
            wanted.repo,
            wanted.name,
            cache_dir=hub_cache(),
            endpoint=endpoint,
            etag_timeout=CONNECT_S,
        )
    )


def choose(repo: str, files: Sequence[RemoteFile], patterns: Sequence[str]) -> RemoteFile:
    """The one file that fits; an exact name wins over a pattern. Raises ModelError."""
    names = [file.name for file in files]
    for pattern in patterns:
        fitting = [f for f in files if fnmatch.fnmatch(Path(f.name).name, pattern)]
        fitting = [f for f in files if f.name == pattern] or fitting
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            shown = ", ".join(f"{f.name} ({f.n_bytes / 1e6:.0f} MB)" for f in fitting[:LISTED])
            raise ModelError(f"{repo} has {len(fitting)} such files; pass --file NAME: {shown}")
    ggufs = [name for name in names if name.endswith(".gguf")]
    shown = ", ".join(ggufs[:LISTED]) or "no GGUF at all (convert it first)"
    raise ModelError(f"{repo} has no file {' or '.join(patterns)}; it has {shown}")


def check_bytes(path: Path, wanted: RemoteFile) -> None:
    """Compares size and SHA-256 with the hub's; a wrong file is removed, and ModelError raised."""
    n_bytes = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    if n_bytes == wanted.n_bytes and wanted.sha256 in ("", digest.hexdigest()):
        return
    path.unlink(missing_ok=True)
    raise ModelError(
        f"{wanted.name} of {wanted.repo} came with {n_bytes} bytes, SHA-256 "
        f"{digest.hexdigest()[:16]}..., but the hub states {wanted.n_bytes} and "
        f"{wanted.sha256[:16]}...; it was removed: pull it again"
    )


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or DEFAULT_PORTS.get(parts.scheme)


def _check_reachable(endpoint: str) -> None:
    """One connection, so that being off-line is said at once and not after retries."""
    url = urlsplit(endpoint)
    if os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy"):
        return  # the proxy is asked instead, by huggingface_hub
    port = url.port or DEFAULT_PORTS.get(url.scheme, 80)
    try:
        socket.create_connection((url.hostname or "", port), timeout=CONNECT_S).close()
    except OSError as error:
        raise ModelError(
            f"the hub at {endpoint} cannot be reached: {error}; are you off-line? Files on this "
            "disk can be used by their path"
        ) from error


def _reason(repo: str, endpoint: str, error: Exception) -> str:
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    name = type(error).__name__
    if "RepositoryNotFound" in name:
        return f"{repo} is not on {endpoint}, or not public; check the name"
    if "GatedRepo" in name:
        return f"{repo} asks for consent on its page first; then run: hf auth login"
    return f"{repo} could not be fetched: {first_line}; try again, it goes on where it stopped"
