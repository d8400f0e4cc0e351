"""What a GGUF file is, in words: from its head, without loading a weight."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from .._core import DrafterFile
from ..errors import PairError
from ..lookup_cache import told_of
from .gguf_header import GgufHeader, read_model
from .layers import has_window, layers_of
from .memory_estimate import KV_BYTES, n_vocab_of

TEMPLATE_SHOWN = 60  # characters


def describe(path: Path) -> list[tuple[str, str]]:
    """Facts as (name, value), in the order to show them. Raises ModelError."""
    header = read_model(path)
    n_values = 0
    types: Counter[str] = Counter()
    for tensor in header.tensors:
        size = 1
        for n in tensor.shape:
            size *= n
        n_values += size
        types[tensor.type] += tensor.n_bytes
    facts = [
        ("file", f"{path}, {header.n_file_bytes / 1e6:.1f} MB, GGUF version {header.version}"),
        ("name", str(header.metadata.get("general.name", "not given"))),
        ("architecture", header.arch or "not given"),
        ("licence", str(header.metadata.get("general.license", "not given"))),
        ("size", f"{n_values / 1e6:.1f} million values in {len(header.tensors)} tensors"),
        ("types", ", ".join(f"{name} {n / 1e6:.1f} MB" for name, n in types.most_common())),
        ("layers", _layers(header)),
        ("trained for", f"{header.count('context_length')} tokens of context"),
        ("vocabulary", _vocabulary(header)),
    ]
    if header.arch == "dflash":
        return facts + _drafter(path, header)
    return [*facts, ("chat template", _template(header))]


def _layers(header: GgufHeader) -> str:
    layers = layers_of(header)
    n_attending = sum(layer.kv_values > 0 for layer in layers)
    text = f"{len(layers)} of width {header.count('embedding_length')}"
    if len(layers) > n_attending:
        text += f", {len(layers) - n_attending} of them recurrent or without a cache"
    if has_window(header):
        text += f", sliding window {header.count('attention.sliding_window')}"
    kv_bytes = sum(layer.kv_values for layer in layers) * KV_BYTES
    return f"{text}; {kv_bytes / 1e3:.1f} kB of KV cache per token"


def _vocabulary(header: GgufHeader) -> str:
    kind = header.metadata.get("tokenizer.ggml.model", "none")
    return f"{n_vocab_of(header)} tokens, tokenizer {kind}"


def _template(header: GgufHeader) -> str:
    template = header.metadata.get("tokenizer.chat_template")
    if not isinstance(template, str):
        return "none: a base model, or one for plain continuation"
    thinking = ", mentions thinking" if "think" in template else ""
    start = " ".join(template.split())[:TEMPLATE_SHOWN]
    return f"{len(template)} characters{thinking}: {start}..."


def _drafter(path: Path, header: GgufHeader) -> list[tuple[str, str]]:
    try:
        file = DrafterFile(str(path))
    except PairError as error:
        return [("drafter", f"not usable: {error}")]
    kind = "DSpark" if file.has_markov_head else "DFlash (no Markov head)"
    n_draft_vocab = next((t.shape[0] for t in header.tensors if t.name == "d2t"), 0)
    own = [name for name in ("token_embd", "output") if _has(header, f"{name}.weight")]
    return [
        ("drafter", f"{kind}, block_size {file.block_size}, {file.n_draft} draft tokens a pass"),
        ("reads", "inputs of target layers " + ", ".join(map(str, file.target_layers))),
        ("anchor", "slot 0 drafts" if file.sample_from_anchor else "slot 0 is the bonus anchor"),
        ("confidence head", "yes" if file.has_confidence else "no"),
        ("draft vocabulary", f"{n_draft_vocab} tokens (d2t)" if n_draft_vocab else "all tokens"),
        ("own tensors", ", ".join(own) or "none: embedding and output are the target's"),
        ("lookup cache", told_of(path, n_vocab=n_vocab_of(header)) or "none beside it"),
    ]


def _has(header: GgufHeader, name: str) -> bool:
    return any(tensor.name == name for tensor in header.tensors)
