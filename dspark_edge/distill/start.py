"""A drafter file as the start of training: its weights, and what it can draft.

Refuses to know the training loop.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize

from ..errors import ModelError
from .export import LAYER_MATRICES, LAYER_NORMS
from .model import Drafter, unit_rows
from .settings import Shape
from .vocabulary import Ids

TARGET_LAYERS = "dflash.target_layers"
MASK_TOKEN = "tokenizer.ggml.mask_token_id"


class StartFile:
    """An opened drafter that training goes on from. Raises ModelError when it cannot be read."""

    def __init__(self, path: Path) -> None:
        try:
            reader = GGUFReader(path)
        except (OSError, ValueError, IndexError) as error:
            raise ModelError(f"drafter {path} cannot be read: {error}") from error
        self._path = path
        self._tensors = {
            tensor.name: np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
            for tensor in reader.tensors
            if tensor.name != "d2t"
        }
        self._facts = {name: field.contents() for name, field in reader.fields.items()}
        ids = [tensor.data for tensor in reader.tensors if tensor.name == "d2t"]
        n_vocab = len(self._facts.get("tokenizer.ggml.tokens", ()))
        self.draft_ids = np.array(ids[0] if ids else range(n_vocab), dtype=np.int64)

    @property
    def taps(self) -> tuple[int, ...] | None:
        """Target layers that it reads, where it tells."""
        layers = self._facts.get(TARGET_LAYERS)
        if not isinstance(layers, list) or not all(isinstance(each, int) for each in layers):
            return None
        return tuple(layers)

    def fitted(self, shape: Shape) -> Shape:
        """The shape with what is this file's to say: its mask token.

        Raises ModelError unless it is one of the shape that is to be trained.
        """
        self._check(shape)
        mask_token = self._facts.get(MASK_TOKEN)
        if not isinstance(mask_token, int) or not 0 <= mask_token < shape.n_vocab:
            raise ModelError(
                f"drafter {self._path} has {MASK_TOKEN} {mask_token}; it must be one of "
                f"{shape.n_vocab} tokens; begin without --start-from"
            )
        return replace(shape, mask_token=mask_token)

    def fill(self, drafter: Drafter, ids: Ids) -> None:
        """Copies its weights. drafter: of the same shape, on the CPU, before its first step; ids:
        its draft tokens. What the file cannot draft starts without a Markov term."""
        with torch.no_grad():
            for name, parameter in drafter.named_parameters():
                if name != "markov_w2":
                    parameter.copy_(self._weight(name, drafter).reshape(parameter.shape))
            _, ours, theirs = np.intersect1d(ids, self.draft_ids, return_indices=True)
            drafter.markov_w2.zero_()
            drafter.markov_w2[ours] = self._tensor("markov_w2.weight")[theirs]

    def _weight(self, name: str, drafter: Drafter) -> torch.Tensor:
        if name == "fc":  # features are divided by their scale in training
            return self._tensor("fc.weight") * drafter.feature_rms
        if name == "markov_p":  # W1 = E P, so P is what comes nearest
            embedding = unit_rows(drafter.embedding.float())
            nearest: torch.Tensor = torch.linalg.lstsq(embedding, self._tensor("markov_w1.weight"))[
                0
            ]
            return nearest
        return self._tensor(_name_in_file(name))

    def _tensor(self, name: str) -> torch.Tensor:
        return torch.from_numpy(self._tensors[name])

    def _check(self, shape: Shape) -> None:
        wanted: dict[str, object] = {
            "general.architecture": "dflash",
            "dflash.embedding_length": shape.n_embd,
            "dflash.block_count": shape.n_layer,
            "dflash.block_size": shape.block_size,
            "dflash.feed_forward_length": shape.n_ff,
            "dflash.attention.head_count": shape.n_head,
            "dflash.attention.head_count_kv": shape.n_head_kv,
            "dflash.attention.key_length": shape.head_dim,
            TARGET_LAYERS: list(shape.taps),
            "dflash.sample_from_anchor": True,
        }
        for key, value in wanted.items():
            if self._facts.get(key) != value:
                raise ModelError(
                    f"drafter {self._path} has {key} {self._facts.get(key)}, but {value} is to be "
                    "trained; give the same shape, or begin without --start-from"
                )
        sizes = {
            "markov_w1.weight": (shape.n_vocab, shape.rank),
            "markov_w2.weight": (len(self.draft_ids), shape.rank),
            "conf_proj.weight": (1, shape.n_embd + shape.rank),
        }
        for name, size in sizes.items():
            tensor = self._tensors.get(name)
            if tensor is None or tensor.size != size[0] * size[1]:
                found = "no such tensor" if tensor is None else f"{tensor.shape}"
                raise ModelError(
                    f"drafter {self._path} has {name}: {found}, but {size} is to be trained; "
                    "give the same --rank, or begin without --start-from"
                )


def _name_in_file(name: str) -> str:
    """Of a parameter's name in the drafter."""
    fixed = {
        "enc_norm.weight": "enc.output_norm.weight",
        "output_norm.weight": "output_norm.weight",
        "confidence": "conf_proj.weight",
        "confidence_bias": "conf_proj.bias",
    }
    if name in fixed:
        return fixed[name]
    _, index, part = name.split(".", 2)
    part = part.removesuffix(".weight")
    if part not in LAYER_NORMS + LAYER_MATRICES:
        raise ValueError(f"parameter {name} stands in no file")
    return f"blk.{index}.{part}.weight"
