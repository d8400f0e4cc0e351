"""The file of a drafter's static lookup cache: known replies of its target, as token ids.

Owns the file and what is believed of it. Refuses to know how n-grams are found in the replies, and
where they come from.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .files import FILE_MODE, replace_file
from .models.pairing import lookup_cache_path

VERSION = 1
TOKENS_MAX = 4_000_000
FILE_BYTES_MAX = 8 * TOKENS_MAX  # ids and lengths of 4 bytes each, not compressed at all
HEADER_BYTES_MAX = 4096  # of an array; NumPy writes 128
N_IDS_OF_16_BIT, INT32_MAX = 1 << 16, (1 << 31) - 1
UINT_16, UINT_32 = np.dtype("<u2"), np.dtype("<u4")
VERSION_NAME, TOKENS_NAME, LENGTHS_NAME = "version", "tokens", "lengths"

Ints = npt.NDArray[np.int32]


@dataclass(slots=True, frozen=True)
class LookupTexts:
    """Replies, one after the other. tokens [n]: their ids; lengths [n_replies], each 1 or more, n
    together: of each reply in tokens."""

    tokens: Ints
    lengths: Ints


def save_lookup_texts(path: Path, replies: Iterable[Sequence[int] | Ints]) -> LookupTexts:
    """Write the replies, whole or not at all; the same ones give the same bytes.

    Raises ValueError (none, an empty one, ids that are not 0 or more, more than TOKENS_MAX tokens),
    OSError with an older file as it was.
    """
    texts = [np.asarray(reply, np.int64) for reply in replies]
    lengths = np.array([len(text) for text in texts], np.int64)
    if not lengths.all() or len(texts) == 0:
        raise ValueError("a lookup cache is made of replies, none of them empty; leave those out")
    tokens = np.concatenate(texts)
    if len(tokens) > TOKENS_MAX:
        raise ValueError(
            f"the replies have {len(tokens)} tokens, and a lookup cache holds {TOKENS_MAX}; give "
            "fewer"
        )
    if tokens.min() < 0 or tokens.max() > INT32_MAX:
        raise ValueError(
            f"token ids are {tokens.min()} to {tokens.max()}; they must be 0 to {INT32_MAX}"
        )
    file = io.BytesIO()
    arrays = {
        VERSION_NAME: np.array([VERSION], UINT_32),
        TOKENS_NAME: tokens.astype(UINT_16 if tokens.max() < N_IDS_OF_16_BIT else UINT_32),
        LENGTHS_NAME: lengths.astype(UINT_32),
    }
    np.savez_compressed(file, allow_pickle=False, **arrays)
    replace_file(path, file.getvalue(), mode=FILE_MODE)
    return LookupTexts(tokens.astype(np.int32), lengths.astype(np.int32))


def load_lookup_texts(drafter: Path, *, n_vocab: int, notices: list[str]) -> LookupTexts | None:
    """What save_lookup_texts left beside the drafter; ids are below n_vocab.

    None when there is none, or none that can be believed, which is added to `notices`; never
    raises. No array takes more memory than the limits allow, whatever the file claims.
    """
    path = lookup_cache_path(drafter)
    try:
        return _load(path, n_vocab)
    except FileNotFoundError:
        return None
    except Exception as error:  # zipfile and NumPy raise a dozen kinds on damaged files
        notices.append(
            f"lookup cache {path} cannot be used ({_in_words(error)}); lookup does without it: "
            "distill or reinstall to have it anew, or remove it"
        )
        return None


def told_of(drafter: Path, *, n_vocab: int) -> str:
    """In words, what lies beside the drafter; "" where nothing does. Never raises."""
    notices: list[str] = []
    texts = load_lookup_texts(drafter, n_vocab=n_vocab, notices=notices)
    if texts is None:
        return "".join(notices).removeprefix("lookup cache ")
    return f"{len(texts.tokens)} tokens in {len(texts.lengths)} replies, beside it"


def _in_words(error: Exception) -> str:
    return str(error) or type(error).__name__  # MemoryError and EOFError have no words


def _load(path: Path, n_vocab: int) -> LookupTexts:
    """Raises whatever opening, unpacking and parsing raise; ValueError for what is not allowed."""
    n_bytes = path.stat().st_size
    if not path.is_file():  # opening a pipe would wait for its writer
        raise ValueError("it is not a file")
    if n_bytes > FILE_BYTES_MAX:
        raise ValueError(f"it has {n_bytes} bytes, and {FILE_BYTES_MAX} are the most")
    with zipfile.ZipFile(path) as archive:
        version = _read(archive, VERSION_NAME, (UINT_32,), n_max=1)
        if version.tolist() != [VERSION]:
            raise ValueError(
                f"its version is {version.tolist()}, and only {[VERSION]} is known here"
            )
        tokens = _read(archive, TOKENS_NAME, (UINT_16, UINT_32), n_max=TOKENS_MAX)
        lengths = _read(archive, LENGTHS_NAME, (UINT_32,), n_max=TOKENS_MAX)
    if len(tokens) == 0:
        raise ValueError("it holds no tokens")
    if not lengths.all():
        raise ValueError("one of its replies is empty")
    if (n_told := lengths.sum(dtype=np.int64)) != len(tokens):
        raise ValueError(f"its replies have {n_told} tokens together, and it holds {len(tokens)}")
    if tokens.max() >= n_vocab:
        raise ValueError(f"it holds token id {tokens.max()} of a vocabulary of {n_vocab}")
    return LookupTexts(tokens.astype(np.int32), lengths.astype(np.int32))


def _read(
    archive: zipfile.ZipFile, name: str, dtypes: tuple[np.dtype[np.generic], ...], *, n_max: int
) -> npt.NDArray[np.unsignedinteger]:
    """An array of one dimension. NumPy's own reader would allocate what the header claims."""
    try:
        entry = archive.getinfo(f"{name}.npy")
    except KeyError:
        raise ValueError(f"it has no array {name}") from None
    # The other compressions unpack whole blocks, and those may hold a thousand times the limit.
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"its array {name} is compressed by method {entry.compress_type}")
    n_bytes_max = HEADER_BYTES_MAX + n_max * max(dtype.itemsize for dtype in dtypes)
    if entry.file_size > n_bytes_max:
        raise ValueError(
            f"its array {name} has {entry.file_size} bytes, and {n_bytes_max} are the most"
        )
    with archive.open(entry) as file:
        content = file.read(entry.file_size)  # read() alone would unpack more than was claimed
    header = io.BytesIO(content)
    if np.lib.format.read_magic(header) != (1, 0):
        raise ValueError(f"its array {name} is in another format of NumPy's")
    shape, _, dtype = np.lib.format.read_array_header_1_0(header, max_header_size=HEADER_BYTES_MAX)
    if dtype not in dtypes:
        raise ValueError(f"its array {name} is of type {dtype}")
    n_values = (len(content) - header.tell()) // dtype.itemsize
    if shape != (n_values,) or n_values > n_max:
        raise ValueError(
            f"its array {name} has {n_values} values and claims shape {shape}; {n_max} in a row "
            "are the most"
        )
    return np.frombuffer(content, dtype, count=n_values, offset=header.tell())
