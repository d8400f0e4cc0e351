"""A trained drafter as a GGUF file in llama.cpp's dflash layout, and back.

Owns names of tensors and metadata. Refuses to know training.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize

from .batch import DraftVocabulary
from .model import Drafter, unit_rows
from .settings import Kind, Shape
from .target_file import TargetFile

Array = npt.NDArray[np.float32]
Value = str | int | float
Q8_0_BLOCK = 32
ROWS_AT_ONCE = 8192
LAYER_MATRICES = (
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
)
LAYER_NORMS = ("attn_norm", "attn_q_norm", "attn_k_norm", "ffn_norm")
UNCOPIED = ("tokenizer.chat_template", "tokenizer.ggml.mask_token_id")


def export(
    drafter: Drafter,
    vocabulary: DraftVocabulary,
    target: TargetFile,
    path: Path,
    *,
    kind: Kind,
    provenance: Mapping[str, Value],
) -> None:
    """Writes the file, whole or not at all. kind: of matrices whose rows allow it, else f16.

    provenance: further metadata, by full key. Raises OSError.
    """
    temporary = path.with_name(path.name + ".part")
    writer = GGUFWriter(temporary, "dflash")
    _add_metadata(writer, drafter.shape, target, provenance)
    for name, values in _tensors(drafter, vocabulary):
        _add_tensor(writer, name, values, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(temporary, path)


def _add_metadata(
    writer: GGUFWriter, shape: Shape, target: TargetFile, provenance: Mapping[str, Value]
) -> None:
    writer.add_name(f"{target.name} DSpark drafter")
    if target.licence:
        writer.add_license(target.licence)
    writer.add_context_length(target.n_ctx_train)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layer)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(shape.eps)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_vocab_size(shape.n_vocab)
    writer.add_uint32("dflash.block_size", shape.block_size)
    writer.add_array("dflash.target_layers", list(shape.taps))
    writer.add_bool("dflash.sample_from_anchor", True)
    writer.add_bool("dflash.has_confidence_head", True)
    for key, value in provenance.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint64(key, value)
        else:
            writer.add_float32(key, value)
    for key, field in target.fields.items():
        if key.startswith("tokenizer.") and key not in UNCOPIED:
            is_list = field.types[0] == GGUFValueType.ARRAY
            inner = field.types[-1] if is_list else None
            writer.add_key_value(key, field.contents(), field.types[0], inner)
    writer.add_uint32("tokenizer.ggml.mask_token_id", shape.mask_token)


def _tensors(
    drafter: Drafter, vocabulary: DraftVocabulary
) -> Iterator[tuple[str, npt.NDArray[np.generic]]]:
    """By their names in the file: float32 [n_out, n_in]; d2t is int64 [n_draft]."""
    yield "fc.weight", _array(drafter.fc / drafter.feature_rms)  # features come as they are
    yield "enc.output_norm.weight", _array(drafter.enc_norm.weight)
    yield "output_norm.weight", _array(drafter.output_norm.weight)
    for index, layer in enumerate(drafter.layers):
        for name in LAYER_NORMS:
            yield f"blk.{index}.{name}.weight", _array(getattr(layer, name).weight)
        for name in LAYER_MATRICES:
            yield f"blk.{index}.{name}.weight", _array(getattr(layer, name))
    yield "markov_w1.weight", _markov_w1(drafter)
    yield "markov_w2.weight", _array(drafter.markov_w2)
    yield "conf_proj.weight", _array(drafter.confidence[None, :])
    yield "conf_proj.bias", _array(drafter.confidence_bias)
    if len(vocabulary) < drafter.shape.n_vocab:
        yield "output.weight", _array(drafter.head.float())
        yield "d2t", vocabulary.ids.cpu().numpy()


@torch.no_grad()
def _markov_w1(drafter: Drafter) -> Array:
    """E P, in parts: E at full precision may be large."""
    parts = [
        _array(unit_rows(rows.float()) @ drafter.markov_p)
        for rows in torch.split(drafter.embedding, ROWS_AT_ONCE)
    ]
    return np.concatenate(parts)


def _array(tensor: torch.Tensor) -> Array:
    return np.ascontiguousarray(tensor.detach().cpu().numpy())


def _add_tensor(writer: GGUFWriter, name: str, values: npt.NDArray[np.generic], kind: Kind) -> None:
    if values.ndim == 1 or name == "conf_proj.weight":
        writer.add_tensor(name, values)
    elif kind == "q8_0" and values.shape[1] % Q8_0_BLOCK == 0:
        q8_0 = GGMLQuantizationType.Q8_0
        writer.add_tensor(name, quantize(values, q8_0), raw_dtype=q8_0)
    else:
        writer.add_tensor(name, values.astype(np.float16))


# ---------------------------------------------------------------- back


def read_back(path: Path, shape: Shape, embedding: torch.Tensor, head: torch.Tensor) -> Drafter:
    """The drafter of an exported file, with the rounding that the file brought.

    head [n_draft, n_embd]: the target's, for a file without one of its own.
    """
    tensors = {
        tensor.name: torch.from_numpy(
            np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        )
        for tensor in GGUFReader(path).tensors
        if tensor.name != "d2t"
    }
    drafter = Drafter(
        shape,
        embedding,
        tensors.get("output.weight", head),
        torch.ones(shape.n_feature),
        markov_w1=tensors["markov_w1.weight"],
    )
    own: dict[str, torch.Tensor] = {
        "fc": tensors["fc.weight"],
        "enc_norm.weight": tensors["enc.output_norm.weight"],
        "output_norm.weight": tensors["output_norm.weight"],
        "markov_w2": tensors["markov_w2.weight"],
        "confidence": tensors["conf_proj.weight"].reshape(-1),
        "confidence_bias": tensors["conf_proj.bias"],
    }
    for index in range(shape.n_layer):
        for name in LAYER_NORMS:
            own[f"layers.{index}.{name}.weight"] = tensors[f"blk.{index}.{name}.weight"]
        for name in LAYER_MATRICES:
            own[f"layers.{index}.{name}"] = tensors[f"blk.{index}.{name}.weight"]
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if name in own:
                parameter.copy_(own[name])
    return drafter.eval()
