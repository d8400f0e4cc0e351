"""More tiny targets, for the memory plan only: other shapes, not texts worth reading."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from tiny_models import (
    TargetSpec,
    _add_value,
    _attention,
    _attention_metadata,
    _ends,
    _ffn,
    _llama_tensors,
    _Weights,
    _write,
)

N_EXPERT, N_USED, N_FF_EXPERT = 8, 4, 64


def write_qwen3(path: Path, spec: TargetSpec) -> Path:
    """A qwen3: a llama with normed queries and keys."""
    weights = _Weights(spec.seed, spec.layer_gain)
    tensors = _ends(weights, spec)
    for il in range(spec.n_layer):
        tensors |= _attention(weights, il, spec, qk_norm=True) | _ffn(weights, il, spec)
    return _write(path, "qwen3", spec, _attention_metadata("qwen3", spec), tensors)


def write_qwen3moe(path: Path, spec: TargetSpec) -> Path:
    """A qwen3moe: eight small experts per layer, four of them used by a token."""
    weights = _Weights(spec.seed, spec.layer_gain)
    tensors = _ends(weights, spec)
    n = spec.n_embd
    for il in range(spec.n_layer):
        block = f"blk.{il}"
        tensors |= _attention(weights, il, spec, qk_norm=True)
        tensors |= weights.norm(f"{block}.ffn_norm.weight", n)
        tensors |= weights.matrix(f"{block}.ffn_gate_inp.weight", N_EXPERT, n)
        for name, shape in (
            ("ffn_gate_exps", (N_EXPERT, N_FF_EXPERT, n)),
            ("ffn_up_exps", (N_EXPERT, N_FF_EXPERT, n)),
            ("ffn_down_exps", (N_EXPERT, n, N_FF_EXPERT)),
        ):
            values = weights.random(f"{block}.{name}").standard_normal(shape) / np.sqrt(shape[-1])
            tensors[f"{block}.{name}.weight"] = values.astype(np.float32)
    metadata = _attention_metadata("qwen3moe", spec) | {
        "qwen3moe.expert_count": N_EXPERT,
        "qwen3moe.expert_used_count": N_USED,
        "qwen3moe.expert_feed_forward_length": N_FF_EXPERT,
    }
    return _write(path, "qwen3moe", spec, metadata, tensors)


def write_q4_0_llama(path: Path, spec: TargetSpec) -> Path:
    """A llama with its matrices in Q4_0, a type that llama.cpp rearranges for some CPUs."""
    q4_0 = GGMLQuantizationType.Q4_0
    writer = GGUFWriter(path, "llama")
    metadata = _attention_metadata("llama", spec) | {"llama.rope.dimension_count": 16}
    metadata.pop("general.architecture")
    for key, value in metadata.items():
        _add_value(writer, key, value)
    for name, values in _llama_tensors(spec).items():
        if values.ndim == 2:
            writer.add_tensor(name, quantize(values, q4_0), raw_dtype=q4_0)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
