"""How much memory a model takes once it is loaded: an estimate per part, from the file's head.

Weights, keys and values, and states are exact (csrc/model_pair.cpp sets the contexts up as assumed
here); compute buffers are bounded from above. Refuses to know how much memory there is.
"""

from __future__ import annotations

from dataclasses import dataclass

from .gguf_header import GgufHeader, Tensor
from .layers import ROLLS_BACK, has_window, head_size, layers_of, n_heads

# Architectures whose estimate has been checked against what llama.cpp allocates.
CHECKED = ("dflash", "gemma3", "lfm2", "llama", "mamba", "qwen3", "qwen3moe")
UNCHECKED_FACTOR = 2  # on the compute buffers of other ones

# csrc/model_pair.cpp and block_drafter.cpp.
INJECT_ROWS = 32
PROFILE_WIDTH = 32
PENDING_ROWS = 128  # per sequence
CELLS_PAD = 256  # llama.cpp rounds contexts up
MIN_BATCH = 512  # tokens of one pass that a decoder is made for, at least

KV_BYTES = 2  # f16, llama.cpp's default for keys and values
F32_BYTES = 4
INPUT_BYTES = 64  # positions, ids and cache indices of one token
MASK_BYTES = 2  # f16: flash attention, which llama.cpp takes wherever a device has it
VOCABULARY_BYTES = 400  # per token: text, scores, maps
RUNTIME_BYTES = 16 << 20  # graphs, schedulers, thread buffers of a context
TENSOR_PAD = 256  # of a tensor in a GPU's buffer


@dataclass(slots=True, frozen=True)
class Part:
    """One line of the plan; a part can lie on both sides."""

    name: str
    ram_bytes: int = 0
    vram_bytes: int = 0


@dataclass(slots=True, frozen=True, kw_only=True)
class Setting:
    """How the pair is to be loaded; as in DecoderConfig, n_ctx being tokens per sequence.

    has_gpu: whether llama.cpp sees one. is_loaded: the target's weights are in memory already.
    repacked: tensor types that this build keeps a second, rearranged copy of on the CPU.
    """

    n_ctx: int
    n_seq: int = 1
    max_verify_len: int = 8
    n_gpu_layers: int = -1
    has_gpu: bool = False
    is_loaded: bool = False
    repacked: frozenset[str] = frozenset()

    @property
    def n_rows(self) -> int:
        """Rows of logits at most in one target pass."""
        return max(PROFILE_WIDTH, self.n_seq * (1 + self.max_verify_len))

    @property
    def n_batch(self) -> int:
        """Tokens in one target pass at most, as loading.py asks for them."""
        return max(MIN_BATCH, self.n_seq * (1 + self.max_verify_len))

    @property
    def n_cells(self) -> int:
        """Tokens that the target's cache holds, all sequences together."""
        return _padded(max(self.n_ctx * self.n_seq, self.n_batch))


def target_parts(target: GgufHeader, setting: Setting, n_taps: int = 0) -> list[Part]:
    """What the target takes; n_taps: layers that a drafter reads."""
    gpu = _Offload(target, setting)
    parts = [] if setting.is_loaded else _weights(target, setting, gpu)
    parts += _caches(target, setting.n_cells, setting, gpu)
    n_embd, n_vocab = target.count("embedding_length"), n_vocab_of(target)
    n_tokens = min(setting.n_cells, max(setting.n_batch, 2 + setting.max_verify_len))
    n_rows = min(n_tokens, setting.n_rows)
    n_tokens = -(-n_tokens // setting.n_seq) * setting.n_seq  # llama.cpp plans for equal shares
    row_bytes = n_tokens * F32_BYTES
    inputs = n_tokens * (INPUT_BYTES + n_masks(target) * setting.n_cells * MASK_BYTES)
    ends = n_rows * n_vocab * F32_BYTES + 2 * n_embd * row_bytes
    compute = inputs + max(_width(target) * row_bytes, ends) + n_taps * n_embd * row_bytes
    if target.arch not in CHECKED:
        compute *= UNCHECKED_FACTOR
    host = inputs + 2 * n_embd * row_bytes
    parts.append(gpu.compute("compute buffers", compute, host))
    rows = n_rows * n_vocab * F32_BYTES + n_taps * n_embd * setting.n_batch * F32_BYTES
    parts.append(Part("logits and tapped rows", rows))
    parts.append(Part("vocabulary and runtime", n_vocab * VOCABULARY_BYTES + RUNTIME_BYTES))
    return parts


def drafter_parts(drafter: GgufHeader, target: GgufHeader, setting: Setting) -> list[Part]:
    """What the drafter takes beside its target."""
    gpu = _Offload(drafter, setting)
    block = max(1, drafter.count("block_size"))
    n_tokens = max(INJECT_ROWS, setting.n_seq * block)
    n_cells = _padded(max((setting.n_ctx + block) * setting.n_seq, n_tokens))
    parts = _weights(drafter, setting, gpu) + _caches(drafter, n_cells, setting, gpu)
    n_embd, n_vocab = drafter.count("embedding_length"), n_vocab_of(target)
    n_feature = n_taps_of(drafter) * n_embd
    # A chain of Markov steps keeps the base, what is joined so far, and the next join.
    is_chained = n_tokens <= block * setting.n_seq and _has(drafter, "markov_w1.weight")
    n_copies = 1 + 2 * is_chained + _has(drafter, "d2t")
    row_bytes = n_tokens * F32_BYTES
    inputs = n_tokens * (INPUT_BYTES + n_masks(drafter) * n_cells * MASK_BYTES)
    width = max(_width(drafter), n_feature + 2 * n_embd)
    compute = inputs + n_copies * n_vocab * row_bytes + width * row_bytes
    parts.append(gpu.compute("compute buffers", compute, inputs + 2 * n_feature * row_bytes))
    rows = setting.n_seq * block * (n_vocab + n_embd) * F32_BYTES
    parts.append(Part("logits", rows))
    pending = (setting.n_seq * PENDING_ROWS + n_tokens) * n_feature * F32_BYTES
    parts.append(Part("features of committed tokens", pending))
    parts.append(Part("vocabulary and runtime", n_vocab * VOCABULARY_BYTES + RUNTIME_BYTES))
    return parts


def n_vocab_of(header: GgufHeader) -> int:
    """Tokens of the vocabulary."""
    return header.length("tokenizer.ggml.tokens") or header.count("vocab_size")


def n_taps_of(drafter: GgufHeader) -> int:
    """Target layers that the drafter reads."""
    taps = drafter.of_arch("target_layers")
    return len(taps) if isinstance(taps, list) else 0


def n_masks(header: GgufHeader) -> int:
    """Attention masks in one graph: one per cache of keys and values."""
    if not any(layer.kv_values for layer in layers_of(header)):
        return 0
    return 2 if has_window(header) else 1


def _padded(n: int) -> int:
    return -(-n // CELLS_PAD) * CELLS_PAD


def _has(header: GgufHeader, name: str) -> bool:
    return any(tensor.name == name for tensor in header.tensors)


class _Offload:
    """Which layers lie on the GPU: the last n_gpu_layers, the output counting as one."""

    def __init__(self, header: GgufHeader, setting: Setting) -> None:
        n_all = header.count("block_count") + 1
        wanted = n_all if setting.n_gpu_layers < 0 else min(n_all, setting.n_gpu_layers)
        self.n_gpu = wanted if setting.has_gpu else 0
        self.first = n_all - self.n_gpu  # layers from here on; the output is layer n_all - 1
        self.has_output = self.n_gpu > 0

    def has_layer(self, il: int) -> bool:
        return il >= self.first

    def has_tensor(self, name: str) -> bool:
        if name.startswith("blk."):
            number = name.split(".")[1]
            return number.isdecimal() and self.has_layer(int(number))
        return self.has_output and not name.startswith(("token_embd.", "per_layer_token_embd."))

    def compute(self, name: str, n_bytes: int, host_bytes: int) -> Part:
        """With all layers on the GPU only inputs and outputs are left for the host."""
        if self.n_gpu == 0:
            return Part(name, n_bytes)
        return Part(name, host_bytes if self.first == 0 else n_bytes, n_bytes)


def _weights(header: GgufHeader, setting: Setting, gpu: _Offload) -> list[Part]:
    on_gpu = [t for t in header.tensors if gpu.has_tensor(t.name)]
    on_cpu = [t for t in header.tensors if not gpu.has_tensor(t.name)]
    vram = sum(-(-t.n_bytes // TENSOR_PAD) * TENSOR_PAD for t in on_gpu)
    copies = 0
    tied = next((t for t in header.tensors if t.name == "token_embd.weight"), None)
    if tied and header.arch != "dflash" and not _has(header, "output.weight"):
        # The embedding is the output as well: a second copy where the two want other memory.
        if gpu.has_output:
            vram += tied.n_bytes
        elif _is_repacked(tied, setting):
            copies += tied.n_bytes
    is_input = "token_embd.weight"
    copies += sum(t.n_bytes for t in on_cpu if t.name != is_input and _is_repacked(t, setting))
    # Each file is mapped from its first to its last CPU tensor, repacked ones included.
    mapped = 0
    for part in {t.part for t in on_cpu}:
        plain = [t for t in on_cpu if t.name == is_input or not _is_repacked(t, setting)]
        here = [t for t in plain if t.part == part]
        ends = [t.offset + t.n_bytes for t in here]
        mapped += max(ends, default=0) - min((t.offset for t in here), default=0)
    parts = [Part("weights", mapped, vram)]
    if copies:
        parts.append(Part("weights rearranged for the CPU", copies))
    return parts


def _is_repacked(tensor: Tensor, setting: Setting) -> bool:
    """ggml-cpu/repack.cpp: matrices of a repacked type whose rows come in eights."""
    is_matrix = tensor.name.endswith(".weight") and 2 <= len(tensor.shape) <= 3
    return is_matrix and tensor.type in setting.repacked and tensor.shape[1] % 8 == 0


def _caches(header: GgufHeader, n_cells: int, setting: Setting, gpu: _Offload) -> list[Part]:
    sizes = {"KV cache": [0, 0], "KV cache, sliding window": [0, 0], "recurrent states": [0, 0]}
    n_snapshots = 1 + (setting.max_verify_len if header.arch in ROLLS_BACK else 0)
    for il, layer in enumerate(layers_of(header)):
        side = 1 if gpu.has_layer(il) else 0
        # The window's cache is as long as the other one: swa_full in csrc/model_pair.cpp.
        name = "KV cache, sliding window" if layer.is_swa else "KV cache"
        sizes[name][side] += layer.kv_values * n_cells * KV_BYTES
        n_states = setting.n_seq * n_snapshots
        sizes["recurrent states"][side] += layer.state_values * n_states * F32_BYTES
    return [Part(name, *both) for name, both in sizes.items() if any(both)]


def _width(header: GgufHeader) -> int:
    """Float32 values per token that are alive at once inside a layer, from above."""
    n_embd, n_ff = header.count("embedding_length"), header.count("feed_forward_length")
    widest = 4 * n_embd + 3 * n_ff
    for il in range(header.count("block_count")):
        is_swa = has_window(header)
        n_query = n_heads(header, il) * head_size(header, il, is_swa)
        n_kv = n_heads(header, il, "attention.head_count_kv") * head_size(header, il, is_swa)
        widest = max(widest, 4 * n_embd + 3 * n_query + 4 * n_kv)
    n_used = header.count("expert_used_count")
    if n_used:
        n_inner = n_used * header.count("expert_feed_forward_length", n_ff)
        n_shared = header.count("expert_shared_feed_forward_length")
        n_routing = 4 * header.count("expert_count")
        widest = max(widest, (4 + 2 * n_used) * n_embd + 3 * (n_inner + n_shared) + n_routing)
    inner = header.count("ssm.inner_size")
    if inner:
        widest = max(widest, 4 * n_embd + 5 * inner + 4 * header.count("ssm.state_size"))
    n_per_layer = header.count("embedding_length_per_layer_input")
    return widest + 3 * n_per_layer * header.count("block_count")
