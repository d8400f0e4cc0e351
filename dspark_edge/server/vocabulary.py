"""A model's vocabulary and metadata, loaded without its weights.

So text becomes tokens and prompts are rendered outside the engine's thread, and also while the
model is not in memory. Thread-safe: nothing changes after loading. Refuses to know requests.
"""

from __future__ import annotations

import ctypes
import weakref
from pathlib import Path

import llama_cpp

from ..errors import ModelError


def utf8(text: str) -> bytes:
    """A text as bytes. Raises ValueError when it is not Unicode (lone surrogates)."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError("the text is not Unicode: it has lone surrogates") from error


class Vocabulary:
    """Tokens of one GGUF file."""

    __slots__ = ("__weakref__", "_model", "_vocab", "n_tokens")

    def __init__(self, path: Path) -> None:
        """Raises ModelError when llama.cpp cannot read the file."""
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not model:
            raise ModelError(f"model {path.name} is not a GGUF that llama.cpp can read")
        weakref.finalize(self, llama_cpp.llama_model_free, model)
        self._model = model
        self._vocab = llama_cpp.llama_model_get_vocab(model)
        self.n_tokens = int(llama_cpp.llama_vocab_n_tokens(self._vocab))

    def tokenize(self, text: str, *, add_special: bool) -> list[int]:
        """Token ids; control tokens written out in the text become those tokens.

        Raises ValueError when the text is not Unicode.
        """
        data = utf8(text)
        n_max = len(data) + 2  # a token has at least a byte; begin and end come on top
        while True:
            tokens = (llama_cpp.llama_token * n_max)()
            n = llama_cpp.llama_tokenize(
                self._vocab, data, len(data), tokens, n_max, add_special, True
            )
            if n >= 0:
                return list(tokens[:n])
            n_max = -n

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        """Bytes of a token; control tokens have none unless `special`. Raises ValueError."""
        if not 0 <= token < self.n_tokens:
            raise ValueError(f"token id is {token}; this model has ids 0 to {self.n_tokens - 1}")
        n_max = 64
        while True:
            piece = ctypes.create_string_buffer(n_max)
            n = llama_cpp.llama_token_to_piece(self._vocab, token, piece, n_max, 0, special)
            if n >= 0:
                return bytes(piece.raw[:n])
            n_max = -n

    def text_of(self, tokens: list[int]) -> str:
        """The text that token ids stand for, control tokens written out. Raises ValueError."""
        data = b"".join(self.token_bytes(token, special=True) for token in tokens)
        return data.decode("utf-8", errors="replace")

    def metadata(self, key: str) -> str:
        """A scalar of the GGUF as text; "" when there is none."""
        n_max = 1 << 12
        while True:
            value = ctypes.create_string_buffer(n_max)
            n = llama_cpp.llama_model_meta_val_str(self._model, key.encode(), value, n_max)
            if n < n_max:
                return value.raw[: max(n, 0)].decode("utf-8", errors="replace")
            n_max = n + 1

    @property
    def begin_text(self) -> str:
        """The begin token written out, or ""."""
        return self._written(llama_cpp.llama_vocab_bos(self._vocab))

    @property
    def end_text(self) -> str:
        """The end token written out, or ""."""
        return self._written(llama_cpp.llama_vocab_eos(self._vocab))

    def _written(self, token: int) -> str:
        return self.text_of([token]) if token >= 0 else ""
