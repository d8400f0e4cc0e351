"""Tiny random GGUF files for tests: four targets and a drafter that share one tokenizer.

Each tensor comes from a generator keyed by (seed, name): a spec always gives the same file, and a
changed field leaves the other tensors alone. Writes files only; loading them is the tests' job.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from numpy.typing import NDArray

Array = NDArray[np.float32]
AnyArray = NDArray[np.generic]

_NORMAL, _CONTROL = 1, 3  # tokenizer.ggml.token_type
_PAIRS = (  # split on blanks
    "th he in er an re on at en nd ti es or te of ed is it al ar st to nt ng se ha as ou io le "
    "ve co me de hi ri ro ic ne ea ra ce"
)
_SPACED = ("Ġ t", "Ġ a", "Ġ s", "Ġ i", "Ġ o", "Ġ w", "Ġ c", "Ġ the", "Ġ in", "Ġ of", "Ġ to")
_WHOLE = ("th e", "in g", "an d", "er s")
SPECIAL = ("<|bos|>", "<|eos|>", "<|mask|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSpec:
    """A target's shape; `metadata` and `tensors` replace entries of the file, None drops one."""

    n_layer: int = 4
    n_embd: int = 64
    n_head: int = 4
    n_head_kv: int = 2
    n_ff: int = 96
    n_ctx_train: int = 4096
    sliding_window: int = 16  # gemma3 only, on every second layer from the first
    layer_gain: float = 1.0  # near 0 the next token depends on the last one alone
    logit_std: float = 3.0
    special_gain: float = 0.1  # scale of the special tokens' logits: small keeps <|eos|> away
    seed: int = 1
    metadata: Mapping[str, object] = field(default_factory=dict)
    tensors: Mapping[str, AnyArray | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterSpec:
    """A drafter for `target`; `metadata` and `tensors` as in TargetSpec."""

    target: TargetSpec = TargetSpec()
    arch: str = "dflash"
    block_size: int = 4
    n_layer: int = 2
    n_embd: int | None = None  # None: the target's
    target_layers: tuple[int, ...] = (1, 2)
    markov_rank: int | None = 8  # None: DFlash
    confidence: bool = True
    draft_vocab: int | None = None  # reduced head: brings d2t and an output of its own
    sample_from_anchor: bool = True
    own_embedding: bool = False
    own_output: bool = False
    sliding_window: int | None = None  # on every second layer from the first
    causal: bool = False
    quant: str | None = None  # "q8_0" or "f16": fc and the Markov matrices
    mimic: bool = False  # Markov head = the llama target's own bigram logits (rank n_embd)
    seed: int = 2
    metadata: Mapping[str, object] = field(default_factory=dict)
    tensors: Mapping[str, AnyArray | None] = field(default_factory=dict)


def vocabulary() -> list[str]:
    """The shared tokens in id order: 256 bytes (id = byte), merged words, special tokens."""
    merged = [merge.replace(" ", "") for merge in _merges()]
    return [_byte_text(byte) for byte in range(256)] + merged + list(SPECIAL)


def token_id(text: str) -> int:
    """Id of a token of the shared vocabulary, by its text."""
    return vocabulary().index(text)


def write_llama(path: Path, spec: TargetSpec = TargetSpec()) -> Path:
    """A llama: full attention, rope on interleaved pairs; taps allowed."""
    metadata = _attention_metadata("llama", spec)
    metadata["llama.rope.dimension_count"] = spec.n_embd // spec.n_head
    return _write(path, "llama", spec, metadata, _llama_tensors(spec))


def write_gemma3(path: Path, spec: TargetSpec = TargetSpec()) -> Path:
    """A gemma3: sliding window on every second layer; llama.cpp aborts if its layers are tapped."""
    metadata = _attention_metadata("gemma3", spec) | {
        "gemma3.attention.sliding_window": spec.sliding_window,
        "gemma3.attention.sliding_window_pattern": 2,
        "gemma3.rope.freq_base_swa": 1000.0,
    }
    weights = _Weights(spec.seed, spec.layer_gain)
    tensors = _ends(weights, spec)
    for il in range(spec.n_layer):
        tensors |= _attention(weights, il, spec, qk_norm=True) | _ffn(weights, il, spec)
        for name in ("post_attention_norm", "post_ffw_norm"):
            # The embedding enters scaled by sqrt(n_embd): a block must weigh as much.
            block_scale = spec.layer_gain * np.sqrt(spec.n_embd)
            tensors |= weights.norm(f"blk.{il}.{name}.weight", spec.n_embd, float(block_scale))
    return _write(path, "gemma3", spec, metadata, tensors)


def write_lfm2(path: Path, spec: TargetSpec = TargetSpec()) -> Path:
    """An lfm2: short convolutions and attention in turn; rolls back with n_rs_seq; taps allowed."""
    l_cache = 3
    metadata = _attention_metadata("lfm2", spec) | {
        "lfm2.attention.head_count_kv": [spec.n_head_kv * (il % 2) for il in range(spec.n_layer)],
        "lfm2.shortconv.l_cache": l_cache,
    }
    weights = _Weights(spec.seed, spec.layer_gain)
    tensors = _ends(weights, spec, output_norm="token_embd_norm.weight")
    for il in range(spec.n_layer):
        tensors |= _ffn(weights, il, spec)
        if il % 2:
            tensors |= _attention(weights, il, spec, qk_norm=True)
            continue
        n, block = spec.n_embd, f"blk.{il}"
        tensors |= weights.norm(f"{block}.attn_norm.weight", n)
        tensors |= weights.matrix(f"{block}.shortconv.conv.weight", n, l_cache)
        tensors |= weights.matrix(f"{block}.shortconv.in_proj.weight", 3 * n, n)
        tensors |= weights.matrix(f"{block}.shortconv.out_proj.weight", n, n, 2 * spec.layer_gain)
    return _write(path, "lfm2", spec, metadata, tensors)


def write_mamba(path: Path, spec: TargetSpec = TargetSpec()) -> Path:
    """A mamba: recurrent, no rollback; llama.cpp aborts if its layers are tapped."""
    n, d_inner, d_conv, d_state, dt_rank = spec.n_embd, 2 * spec.n_embd, 4, 16, 4
    metadata = _common_metadata("mamba", spec) | {
        "mamba.feed_forward_length": 0,
        "mamba.attention.head_count": 0,
        "mamba.ssm.conv_kernel": d_conv,
        "mamba.ssm.inner_size": d_inner,
        "mamba.ssm.state_size": d_state,
        "mamba.ssm.time_step_rank": dt_rank,
    }
    weights = _Weights(spec.seed, spec.layer_gain)
    tensors = _ends(weights, spec)
    for il in range(spec.n_layer):
        block = f"blk.{il}"
        tensors |= weights.norm(f"{block}.attn_norm.weight", n)
        tensors |= weights.matrix(f"{block}.ssm_in.weight", 2 * d_inner, n)
        tensors |= weights.matrix(f"{block}.ssm_conv1d.weight", d_inner, d_conv)
        tensors |= weights.vector(f"{block}.ssm_conv1d.bias", d_inner, 0.1)
        tensors |= weights.matrix(f"{block}.ssm_x.weight", dt_rank + 2 * d_state, d_inner)
        tensors |= weights.matrix(f"{block}.ssm_dt.weight", d_inner, dt_rank)
        tensors |= weights.vector(f"{block}.ssm_dt.bias", d_inner, 0.1)
        decay = np.tile(-np.arange(1, d_state + 1, dtype=np.float32), (d_inner, 1))
        tensors[f"{block}.ssm_a"] = decay
        tensors[f"{block}.ssm_d"] = np.ones(d_inner, np.float32)
        tensors |= weights.matrix(f"{block}.ssm_out.weight", n, d_inner, 2 * spec.layer_gain)
    return _write(path, "mamba", spec, metadata, tensors)


def write_drafter(path: Path, spec: DrafterSpec = DrafterSpec()) -> Path:
    """A DSpark drafter (or DFlash, without a Markov head); rope on half-split pairs."""
    body = _drafter_body(spec)
    rank = body.n_embd if spec.mimic else spec.markov_rank
    key = spec.arch
    metadata = _attention_metadata(key, body) | {
        f"{key}.block_size": spec.block_size,
        f"{key}.target_layers": list(spec.target_layers),
        f"{key}.sample_from_anchor": spec.sample_from_anchor,
        f"{key}.has_confidence_head": spec.confidence and rank is not None,
        f"{key}.attention.causal": spec.causal,
    }
    if spec.sliding_window is not None:
        pattern = [il % 2 == 0 for il in range(spec.n_layer)]
        metadata[f"{key}.attention.sliding_window"] = spec.sliding_window
        metadata[f"{key}.attention.sliding_window_pattern"] = pattern
    tensors = _drafter_tensors(spec, body, rank)
    quantised = ("fc.weight", "markov_w1.weight", "markov_w2.weight") if spec.quant else ()
    return _write(path, key, spec, metadata, tensors, dict.fromkeys(quantised, spec.quant or ""))


def _drafter_body(spec: DrafterSpec) -> TargetSpec:
    """The drafter's own transformer, in a target's words."""
    target = spec.target
    return TargetSpec(
        n_layer=spec.n_layer,
        n_embd=spec.n_embd or target.n_embd,
        n_head=target.n_head,
        n_head_kv=target.n_head_kv,
        n_ff=target.n_ff,
        n_ctx_train=target.n_ctx_train,
        logit_std=target.logit_std,
        special_gain=target.special_gain,
        seed=spec.seed,
    )


def _drafter_tensors(spec: DrafterSpec, body: TargetSpec, rank: int | None) -> dict[str, AnyArray]:
    weights = _Weights(spec.seed, 1.0)
    n, n_vocab = body.n_embd, len(vocabulary())
    n_taps = len(spec.target_layers)
    n_draft = spec.draft_vocab or n_vocab
    d2t = np.sort(weights.random("d2t").permutation(n_vocab)[:n_draft]).astype(np.int64)
    tensors: dict[str, AnyArray] = {}
    tensors |= weights.matrix("fc.weight", n, n_taps * n)
    tensors |= weights.norm("enc.output_norm.weight", n)
    # A mimic's backbone whispers, so that its Markov head decides.
    tensors |= weights.norm("output_norm.weight", n, 0.05 if spec.mimic else 1.0)
    for il in range(spec.n_layer):
        tensors |= _attention(weights, il, body, qk_norm=True) | _ffn(weights, il, body)
    if spec.own_embedding:
        tensors["token_embd.weight"] = _ends(weights, body)["token_embd.weight"]
    if spec.own_output or spec.draft_vocab is not None:
        tensors["output.weight"] = _ends(weights, body)["output.weight"][d2t]
    if spec.draft_vocab is not None:
        tensors["d2t"] = d2t
    if rank is not None:
        tensors |= weights.matrix("markov_w1.weight", n_vocab, rank, np.sqrt(rank))
        tensors |= weights.matrix("markov_w2.weight", n_draft, rank, body.logit_std)
    if spec.mimic:
        tensors["markov_w1.weight"], w2 = _bigram(spec.target)
        tensors["markov_w2.weight"] = w2[d2t]
    if rank is not None and spec.confidence:
        tensors |= weights.matrix("conf_proj.weight", 1, n + rank, 1.5)
        tensors["conf_proj.bias"] = np.full(1, 0.5, np.float32)
    return tensors


def _bigram(target: TargetSpec) -> tuple[Array, Array]:
    """W1 [n_vocab, n_embd], W2 [n_vocab, n_embd]: the target's logits were it to have no layers."""
    tensors = _llama_tensors(target)
    embedding = tensors["token_embd.weight"].astype(np.float32)
    rms = np.sqrt(np.mean(embedding**2, axis=1, keepdims=True) + 1e-5)
    w1 = embedding / rms * tensors["output_norm.weight"].astype(np.float32)
    return w1.astype(np.float32), tensors["output.weight"].astype(np.float32)


class _Weights:
    """Named random tensors of one seed, each as a one-entry dict ready to merge."""

    def __init__(self, seed: int, layer_gain: float) -> None:
        self.seed = seed
        self.layer_gain = layer_gain

    def random(self, name: str) -> np.random.Generator:
        return np.random.default_rng([self.seed, zlib.crc32(name.encode())])

    def vector(self, name: str, n: int, std: float) -> dict[str, AnyArray]:
        return {name: (self.random(name).standard_normal(n) * std).astype(np.float32)}

    def matrix(
        self, name: str, n_out: int, n_in: int, gain: float | np.floating = 1.0
    ) -> dict[str, AnyArray]:
        """[n_out, n_in], ne = {n_in, n_out}: maps unit-variance rows to variance gain^2."""
        values = self.random(name).standard_normal((n_out, n_in)) * (float(gain) / np.sqrt(n_in))
        return {name: values.astype(np.float32)}

    def norm(self, name: str, n: int, scale: float = 1.0) -> dict[str, AnyArray]:
        values = scale * (1.0 + 0.1 * self.random(name).standard_normal(n))
        return {name: values.astype(np.float32)}


def _llama_tensors(spec: TargetSpec) -> dict[str, AnyArray]:
    weights = _Weights(spec.seed, spec.layer_gain)
    tensors = _ends(weights, spec)
    for il in range(spec.n_layer):
        tensors |= _attention(weights, il, spec, qk_norm=False) | _ffn(weights, il, spec)
    return tensors


def _ends(
    weights: _Weights, spec: TargetSpec, output_norm: str = "output_norm.weight"
) -> dict[str, AnyArray]:
    """Embedding, final norm and output: not tied, or the last token would repeat for ever."""
    n, n_vocab = spec.n_embd, len(vocabulary())
    tensors = weights.matrix("token_embd.weight", n_vocab, n, np.sqrt(n))
    tensors |= weights.norm(output_norm, n)
    output = weights.matrix("output.weight", n_vocab, n, spec.logit_std)["output.weight"]
    row_gain = np.ones((n_vocab, 1), np.float32)
    row_gain[n_vocab - len(SPECIAL) :] = spec.special_gain
    return tensors | {"output.weight": output.astype(np.float32) * row_gain}


def _attention(
    weights: _Weights, il: int, spec: TargetSpec, *, qk_norm: bool
) -> dict[str, AnyArray]:
    block, n, dim = f"blk.{il}", spec.n_embd, spec.n_embd // spec.n_head
    tensors = weights.norm(f"{block}.attn_norm.weight", n)
    tensors |= weights.matrix(f"{block}.attn_q.weight", n, n, 1.5)
    tensors |= weights.matrix(f"{block}.attn_k.weight", spec.n_head_kv * dim, n, 1.5)
    tensors |= weights.matrix(f"{block}.attn_v.weight", spec.n_head_kv * dim, n)
    tensors |= weights.matrix(f"{block}.attn_output.weight", n, n, 2 * weights.layer_gain)
    if qk_norm:
        tensors |= weights.norm(f"{block}.attn_q_norm.weight", dim, 1.5)
        tensors |= weights.norm(f"{block}.attn_k_norm.weight", dim, 1.5)
    return tensors


def _ffn(weights: _Weights, il: int, spec: TargetSpec) -> dict[str, AnyArray]:
    block, n = f"blk.{il}", spec.n_embd
    tensors = weights.norm(f"{block}.ffn_norm.weight", n)
    tensors |= weights.matrix(f"{block}.ffn_gate.weight", spec.n_ff, n)
    tensors |= weights.matrix(f"{block}.ffn_up.weight", spec.n_ff, n)
    tensors |= weights.matrix(f"{block}.ffn_down.weight", n, spec.n_ff, 2 * weights.layer_gain)
    return tensors


def _common_metadata(arch: str, spec: TargetSpec) -> dict[str, object]:
    tokens = vocabulary()
    n_special = len(SPECIAL)
    return {
        "general.architecture": arch,
        "general.name": f"tiny {arch}",
        f"{arch}.block_count": spec.n_layer,
        f"{arch}.context_length": spec.n_ctx_train,
        f"{arch}.embedding_length": spec.n_embd,
        f"{arch}.vocab_size": len(tokens),
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [_NORMAL] * (len(tokens) - n_special) + [_CONTROL] * n_special,
        "tokenizer.ggml.merges": list(_merges()),
        "tokenizer.ggml.bos_token_id": token_id("<|bos|>"),
        "tokenizer.ggml.eos_token_id": token_id("<|eos|>"),
        "tokenizer.ggml.eot_token_id": token_id("<|end|>"),
        "tokenizer.ggml.mask_token_id": token_id("<|mask|>"),
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def _attention_metadata(arch: str, spec: TargetSpec) -> dict[str, object]:
    dim = spec.n_embd // spec.n_head
    return _common_metadata(arch, spec) | {
        f"{arch}.feed_forward_length": spec.n_ff,
        f"{arch}.attention.head_count": spec.n_head,
        f"{arch}.attention.head_count_kv": spec.n_head_kv,
        f"{arch}.attention.key_length": dim,
        f"{arch}.attention.value_length": dim,
        f"{arch}.rope.freq_base": 10000.0,
    }


def _merges() -> tuple[str, ...]:
    return tuple(f"{pair[0]} {pair[1]}" for pair in _PAIRS.split()) + _WHOLE + _SPACED


def _byte_text(byte: int) -> str:
    """GPT-2's printable stand-in for a byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if byte in printable:
        return chr(byte)
    hidden = [b for b in range(256) if b not in printable]
    return chr(256 + hidden.index(byte))


def _write(
    path: Path,
    arch: str,
    spec: TargetSpec | DrafterSpec,
    metadata: Mapping[str, object],
    tensors: Mapping[str, AnyArray],
    quant: Mapping[str, str] | None = None,
) -> Path:
    """Apply the spec's replacements and write the file; `quant` names a type for some tensors."""
    metadata = {**metadata, **spec.metadata}
    merged: dict[str, AnyArray | None] = {**tensors, **spec.tensors}
    writer = GGUFWriter(path, str(metadata.pop("general.architecture", None) or arch))
    for key, value in metadata.items():
        if value is not None:
            _add_value(writer, key, value)
    for name, values in merged.items():
        if values is None:
            continue
        kind = (quant or {}).get(name)
        if kind == "q8_0":
            q8_0 = GGMLQuantizationType.Q8_0
            writer.add_tensor(name, quantize(values, q8_0), raw_dtype=q8_0)
        else:
            writer.add_tensor(name, values.astype(np.float16) if kind == "f16" else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_value(writer: GGUFWriter, key: str, value: object) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)
        case _:
            raise TypeError(f"metadata {key} is a {type(value).__name__}; pass a scalar or a list")
