"""The tiny llama and its drafter in numpy float32, written from the papers and llama.cpp's graphs.

Independent of llama.cpp: reads weights with gguf, knows the two tiny architectures and no batching.
Sources: DSpark (arXiv 2607.05147), DFlash (arXiv 2602.06036), src/models/{llama,dflash}.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray

Array = NDArray[np.float32]
IntArray = NDArray[np.int64]


class GgufFile:
    """Metadata by full key, tensors as float32 [n_out, n_in] (int64 stays int64)."""

    def __init__(self, path: Path) -> None:
        reader = GGUFReader(path)
        self._fields = {name: field.contents() for name, field in reader.fields.items()}
        self.tensors: dict[str, NDArray[np.generic]] = {}
        for tensor in reader.tensors:
            is_index = tensor.data.dtype == np.int64
            values = tensor.data if is_index else dequantize(tensor.data, tensor.tensor_type)
            self.tensors[tensor.name] = np.array(values)
        self.arch = str(self._fields["general.architecture"])

    def value(self, key: str, default: object = None) -> object:
        """`key` may start with a dot: then the architecture goes in front."""
        return self._fields.get(self.arch + key if key.startswith(".") else key, default)

    def number(self, key: str) -> float:
        value = self.value(key)
        assert isinstance(value, int | float), f"{key} is {value!r}"
        return float(value)

    def weight(self, name: str) -> Array:
        return self.tensors[f"{name}.weight"].astype(np.float32)


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention shape and rope of one model; `interleaved` = llama.cpp's NORM, else NEOX."""

    n_head: int
    n_head_kv: int
    dim: int
    freq_base: float
    eps: float
    interleaved: bool

    @classmethod
    def read(cls, file: GgufFile, *, interleaved: bool) -> Heads:
        return cls(
            n_head=int(file.number(".attention.head_count")),
            n_head_kv=int(file.number(".attention.head_count_kv")),
            dim=int(file.number(".attention.key_length")),
            freq_base=file.number(".rope.freq_base"),
            eps=file.number(".attention.layer_norm_rms_epsilon"),
            interleaved=interleaved,
        )

    def rope(self, x: Array, positions: IntArray) -> Array:
        """Rotate [n, heads, dim]: pair i turns by position * freq_base ** (-2i / dim)."""
        rate = self.freq_base ** (-np.arange(0, self.dim, 2, dtype=np.float64) / self.dim)
        angle = positions[:, None, None] * rate
        cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        half = self.dim // 2
        first = slice(0, None, 2) if self.interleaved else slice(0, half)
        second = slice(1, None, 2) if self.interleaved else slice(half, None)
        out = np.empty_like(x)
        out[..., first] = x[..., first] * cos - x[..., second] * sin
        out[..., second] = x[..., first] * sin + x[..., second] * cos
        return out

    def attend(self, q: Array, k: Array, v: Array, visible: NDArray[np.bool_]) -> Array:
        """q [n, n_head, dim] over k, v [m, n_head_kv, dim]; visible [n, m] -> [n, n_head * dim]."""
        share = self.n_head // self.n_head_kv
        k, v = np.repeat(k, share, axis=1), np.repeat(v, share, axis=1)
        scores = np.einsum("nhd,mhd->hnm", q, k) / np.float32(np.sqrt(self.dim))
        scores = np.where(visible[None], scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed = np.einsum("hnm,mhd->nhd", weights, v).reshape(len(q), -1)
        return np.asarray(mixed, np.float32)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    rms = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps))
    return np.asarray(x / rms * weight, np.float32)


def sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)), np.float32)


def feed_forward(file: GgufFile, block: str, x: Array, eps: float) -> Array:
    h = rms_norm(x, file.weight(f"{block}.ffn_norm"), eps)
    gate = h @ file.weight(f"{block}.ffn_gate").T
    up = h @ file.weight(f"{block}.ffn_up").T
    return np.asarray((gate * sigmoid(gate) * up) @ file.weight(f"{block}.ffn_down").T, np.float32)


class LlamaReference:
    """The tiny llama target: one causal pass over a whole prompt, no cache."""

    def __init__(self, path: Path) -> None:
        self.file = GgufFile(path)
        self.heads = Heads.read(self.file, interleaved=True)
        self.n_layer = int(self.file.number(".block_count"))

    def forward(self, tokens: Sequence[int]) -> tuple[Array, Array]:
        """Logits [n, n_vocab] and layer inputs [n_layer + 1, n, n_embd], the last the head's."""
        file, heads, n = self.file, self.heads, len(tokens)
        positions = np.arange(n)
        visible = positions[None, :] <= positions[:, None]
        x = file.weight("token_embd")[list(tokens)]
        inputs = [x]
        for il in range(self.n_layer):
            block = f"blk.{il}"
            h = rms_norm(x, file.weight(f"{block}.attn_norm"), heads.eps)
            q, k, v = (
                (h @ file.weight(f"{block}.attn_{name}").T).reshape(n, -1, heads.dim)
                for name in "qkv"
            )
            q, k = heads.rope(q, positions), heads.rope(k, positions)
            x = x + heads.attend(q, k, v, visible) @ file.weight(f"{block}.attn_output").T
            x = x + feed_forward(file, block, x, heads.eps)
            inputs.append(x)
        logits = rms_norm(x, file.weight("output_norm"), heads.eps) @ file.weight("output").T
        return logits, np.stack(inputs)


@dataclass(frozen=True, slots=True)
class DraftTrace:
    """One block, draft slots only: a bonus anchor's slot is left out.

    base and logits [n_slots, n_vocab] without and with the Markov bias, -inf outside the draft
    vocabulary; hidden [n_slots, n_embd] after the final norm; tokens [n_slots] = argmax of logits;
    confidence [n_slots] in 0..1, or None without a head.
    """

    base: Array
    logits: Array
    hidden: Array
    tokens: list[int]
    confidence: Array | None


class DrafterReference:
    """The drafter of one sequence: features in, blocks out; a block leaves nothing behind."""

    def __init__(self, drafter_path: Path, target_path: Path) -> None:
        self.file = GgufFile(drafter_path)
        target = GgufFile(target_path)
        self.heads = Heads.read(self.file, interleaved=False)
        self.n_layer = int(self.file.number(".block_count"))
        self.block_size = int(self.file.number(".block_size"))
        self.mask_token = int(self.file.number("tokenizer.ggml.mask_token_id"))
        self.causal = self.file.value(".attention.causal", False) is True
        self.window = self._window_per_layer()
        own = self.file.tensors
        self.embedding = (self.file if "token_embd.weight" in own else target).weight("token_embd")
        self.output = self._output(target)
        self.n_vocab = len(self.embedding)
        self.d2t = own["d2t"].astype(np.int64) if "d2t" in own else np.arange(self.n_vocab)
        self.is_dspark = "markov_w1.weight" in own
        self.first_slot = (
            0 if self.is_dspark and self.file.value(".sample_from_anchor", True) is True else 1
        )
        self.clear()

    def clear(self) -> None:
        """Forget all injected context."""
        shape = (0, self.heads.n_head_kv, self.heads.dim)
        self.positions: IntArray = np.zeros(0, np.int64)
        self.keys: list[Array] = [np.zeros(shape, np.float32)] * self.n_layer
        self.values: list[Array] = [np.zeros(shape, np.float32)] * self.n_layer

    def inject(self, features: Array, positions: Sequence[int]) -> None:
        """Add context: features [n, n_taps * n_embd] of the committed tokens at `positions`."""
        where = np.asarray(positions, np.int64)
        fused = rms_norm(
            features @ self.file.weight("fc").T, self.file.weight("enc.output_norm"), self.heads.eps
        )
        for il in range(self.n_layer):
            k, v = self._key_value(il, fused, where)
            self.keys[il] = np.concatenate([self.keys[il], k])
            self.values[il] = np.concatenate([self.values[il], v])
        self.positions = np.concatenate([self.positions, where])

    def draft(
        self, anchor: int, n_past: int, *, previous: Sequence[int] | None = None
    ) -> DraftTrace:
        """One block from `anchor` at position `n_past`.

        The Markov chain runs greedily, or over `previous`: for each draft slot the token before it
        (the first is the anchor).
        """
        hidden = self._backbone(anchor, n_past)[self.first_slot :]
        base = np.full((len(hidden), self.n_vocab), -np.inf, np.float32)
        base[:, self.d2t] = hidden @ self.output.T
        if not self.is_dspark:
            return DraftTrace(base, base, hidden, base.argmax(axis=1).tolist(), None)

        w1, w2 = self.file.weight("markov_w1"), self.file.weight("markov_w2")
        logits, tokens, conditions = base.copy(), list[int](), list[int]()
        for slot in range(len(hidden)):
            conditions.append(previous[slot] if previous else [anchor, *tokens][-1])
            logits[slot, self.d2t] += w2 @ w1[conditions[slot]]
            tokens.append(int(logits[slot].argmax()))
        confidence = self._confidence(hidden, w1[conditions])
        return DraftTrace(base, logits, hidden, tokens, confidence)

    def _backbone(self, anchor: int, n_past: int) -> Array:
        """Anchor and masks through the layers: hidden [block_size, n_embd] after the final norm."""
        file, heads, n = self.file, self.heads, self.block_size
        where = np.arange(n_past, n_past + n)
        x = self.embedding[[anchor] + [self.mask_token] * (n - 1)]
        if file.value(".embedding_scale") is not None:
            x = x * np.float32(file.number(".embedding_scale"))
        for il in range(self.n_layer):
            block = f"blk.{il}"
            h = rms_norm(x, file.weight(f"{block}.attn_norm"), heads.eps)
            q = (h @ file.weight(f"{block}.attn_q").T).reshape(n, heads.n_head, heads.dim)
            q = heads.rope(rms_norm(q, file.weight(f"{block}.attn_q_norm"), heads.eps), where)
            k, v = self._key_value(il, h, where)
            keys, values = np.concatenate([self.keys[il], k]), np.concatenate([self.values[il], v])
            visible = self._visible(where, il)
            x = x + heads.attend(q, keys, values, visible) @ file.weight(f"{block}.attn_output").T
            x = x + feed_forward(file, block, x, heads.eps)
        return rms_norm(x, file.weight("output_norm"), heads.eps)

    def _key_value(self, il: int, x: Array, positions: IntArray) -> tuple[Array, Array]:
        heads, block = self.heads, f"blk.{il}"
        k = (x @ self.file.weight(f"{block}.attn_k").T).reshape(-1, heads.n_head_kv, heads.dim)
        v = (x @ self.file.weight(f"{block}.attn_v").T).reshape(-1, heads.n_head_kv, heads.dim)
        k = rms_norm(k, self.file.weight(f"{block}.attn_k_norm"), heads.eps)
        return heads.rope(k, positions), v

    def _visible(self, where: IntArray, il: int) -> NDArray[np.bool_]:
        """[n, n_context + n]: everything, less what causality or the layer's window hides."""
        ahead = np.concatenate([self.positions, where])[None, :] - where[:, None]
        visible = np.ones(ahead.shape, bool)
        if self.causal:
            visible &= ahead <= 0
        window = self.window[il]
        if window is not None:
            # Looks back fewer than `window` positions and ahead without limit, as llama.cpp does.
            visible &= -ahead < window
        return visible

    def _window_per_layer(self) -> list[int | None]:
        window = self.file.value(".attention.sliding_window")
        if not isinstance(window, int):
            return [None] * self.n_layer
        pattern = self.file.value(".attention.sliding_window_pattern")
        assert isinstance(pattern, list)
        return [window if is_windowed else None for is_windowed in pattern]

    def _output(self, target: GgufFile) -> Array:
        """Own output, else own embedding, else the target's output."""
        for file, name in ((self.file, "output"), (self.file, "token_embd"), (target, "output")):
            if f"{name}.weight" in file.tensors:
                return file.weight(name)
        return target.weight("token_embd")

    def _confidence(self, hidden: Array, w1_rows: Array) -> Array | None:
        if "conf_proj.weight" not in self.file.tensors:
            return None
        logit = np.concatenate([hidden, w1_rows], axis=1) @ self.file.weight("conf_proj").ravel()
        if "conf_proj.bias" in self.file.tensors:
            logit = logit + self.file.tensors["conf_proj.bias"].astype(np.float32)
        return sigmoid(logit)
