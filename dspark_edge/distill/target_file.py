"""What a drafter takes from its target's GGUF: numbers, rows of embedding and head, tokenizer.

Reads the file with gguf, by memory map. Refuses to know llama.cpp and training.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, ReaderField, ReaderTensor, TokenType
from gguf.quants import dequantize

from ..errors import ModelError
from .settings import Shape

Floats = npt.NDArray[np.float32]
N_TAPS = 5
SPECIAL_IDS = ("bos", "eos", "eot", "eom", "padding", "unknown", "separator")


class TargetFile:
    """An opened target. Raises ModelError when no drafter can be made for it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = GGUFReader(path)
        except (OSError, ValueError, IndexError) as error:
            raise ModelError(f"model {path} cannot be read: {error}") from error
        self.fields: dict[str, ReaderField] = dict(self._reader.fields)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.arch = str(self._value("general.architecture", ""))
        self._check_head()
        self._embedding = self._tensor("token_embd.weight")
        self._head = self._tensors.get("output.weight", self._embedding)
        self.n_vocab = len(self._embedding.data)
        self.n_embd = self.number("embedding_length")
        self.n_layer = self.number("block_count")

    def number(self, key: str, default: int | None = None) -> int:
        """A whole number of the architecture; of a list (one per layer) the largest."""
        value = self._value(f"{self.arch}.{key}", default)
        if isinstance(value, list):
            value = max(value)
        if not isinstance(value, int):
            raise ModelError(f"model {self.path} has no {self.arch}.{key}")
        return value

    @property
    def name(self) -> str:
        """The target's own name, or its file's."""
        return str(self._value("general.name", self.path.stem))

    @property
    def licence(self) -> str:
        """As the file states it; "" when it doesn't."""
        return str(self._value("general.license", ""))

    @property
    def n_ctx_train(self) -> int:
        """Tokens of context that the target was trained for."""
        return self.number("context_length", 4096)

    def embedding_rows(self, tokens: npt.NDArray[np.int64] | slice) -> Floats:
        """[n, n_embd]."""
        return _rows(self._embedding, tokens)

    def head_rows(self, tokens: npt.NDArray[np.int64] | slice) -> Floats:
        """[n, n_embd]: a token's logit is its row times the hidden state."""
        return _rows(self._head, tokens)

    def shape(
        self, *, n_layer: int, block_size: int, rank: int, taps: Sequence[int] | None
    ) -> Shape:
        """A drafter for this target. taps: None for evenly spread ones.

        Raises ValueError for layers that the target does not have, or that are named twice.
        """
        if taps and (len(set(taps)) < len(taps) or not 0 <= min(taps) <= max(taps) < self.n_layer):
            raise ValueError(
                f"--taps is {' '.join(map(str, taps))}; it must be different layers from 0 to "
                f"{self.n_layer - 1}"
            )
        n_head = self.number("attention.head_count")
        base = self._value(f"{self.arch}.rope.freq_base", 10000.0)
        eps = self._value(f"{self.arch}.attention.layer_norm_rms_epsilon", 1e-5)
        return Shape(
            n_vocab=self.n_vocab,
            n_embd=self.n_embd,
            n_layer=n_layer,
            n_head=n_head,
            n_head_kv=self.number("attention.head_count_kv", n_head),
            head_dim=self.number("attention.key_length", self.n_embd // n_head),
            n_ff=_rounded(self.n_embd * 4 // 3, 64),
            rank=rank,
            block_size=block_size,
            taps=tuple(taps) if taps else spread_taps(self.n_layer),
            eps=float(str(eps)),
            rope_base=float(str(base)),
            mask_token=self.mask_token(),
        )

    def mask_token(self) -> int:
        """The token that stands for "not yet known" in a block: one that texts do not use."""
        own = self._value("tokenizer.ggml.mask_token_id", None)
        if isinstance(own, int):
            return own
        taken = {self._value(f"tokenizer.ggml.{name}_token_id", None) for name in SPECIAL_IDS}
        template = str(self._value("tokenizer.chat_template", ""))
        texts = self._list("tokenizer.ggml.tokens")
        types = self._list("tokenizer.ggml.token_type")
        for wanted in (TokenType.UNUSED, TokenType.CONTROL):
            for token, (text, kind) in enumerate(zip(texts, types, strict=False)):
                if kind == wanted and token not in taken and str(text) not in template:
                    return token
        return self.n_vocab - 1

    def _check_head(self) -> None:
        for key in ("logit_scale", "final_logit_softcapping", "embedding_scale"):
            if self._value(f"{self.arch}.{key}", None) is not None:
                raise ModelError(
                    f"architecture '{self.arch}' with {key} is not supported by distill: its head "
                    "or embedding is not a plain matrix; use lookup"
                )

    def _tensor(self, name: str) -> ReaderTensor:
        if name not in self._tensors:
            raise ModelError(f"model {self.path} has no tensor {name}; give a whole language model")
        return self._tensors[name]

    def _value(self, key: str, default: object) -> object:
        field = self.fields.get(key)
        return default if field is None else field.contents()

    def _list(self, key: str) -> list[object]:
        value = self._value(key, [])
        return value if isinstance(value, list) else []


def spread_taps(n_layer: int) -> tuple[int, ...]:
    """Up to N_TAPS layers from near the first to near the last."""
    first, last = (2, n_layer - 2) if n_layer >= 8 else (min(1, n_layer - 1), n_layer - 1)
    wanted = np.linspace(first, last, min(N_TAPS, last - first + 1)).round()
    return tuple(dict.fromkeys(int(layer) for layer in wanted))


def _rounded(number: int, step: int) -> int:
    return max(step, (number + step // 2) // step * step)


def _rows(tensor: ReaderTensor, tokens: npt.NDArray[np.int64] | slice) -> Floats:
    return np.array(dequantize(tensor.data[tokens], tensor.tensor_type), dtype=np.float32)
