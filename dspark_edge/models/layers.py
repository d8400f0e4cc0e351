"""What llama.cpp keeps per layer for a model: keys and values, or a recurrent state.

From metadata alone (llama-hparams.cpp and the filters in llama-model.cpp's create_memory). Refuses
to know contexts and devices.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ModelError
from .gguf_header import GgufHeader

MAX_LAYERS = 512  # as llama.cpp
# Without a cache of tokens, and those whose states llama.cpp can roll back (llama-arch.cpp).
RECURRENT = ("mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7")
ROLLS_BACK = (
    "bailingmoe3",
    "deepseek4",
    "glm5-next",
    "kimi-k3",
    "lfm2",
    "lfm2moe",
    "nemotron_h",
    "nemotron_h_moe",
    "qwen35",
    "qwen35moe",
    "qwen4exp",
)
# Every n-th layer attends, the others keep a state, where the file does not list them.
INTERVAL = ("minimax-01", "qwen35", "qwen35moe", "qwen3next", "qwen4exp")
DEFAULT_INTERVAL = 4
DEFAULT_CONV_KERNEL = 4  # of Kimi's layers


@dataclass(slots=True, frozen=True)
class Layer:
    """kv_values: K and V together, per token. state_values: float32, per sequence and snapshot."""

    kv_values: int
    state_values: int
    is_swa: bool


def layers_of(header: GgufHeader) -> list[Layer]:
    """One entry per layer of the file, in order. Raises ModelError for a number that cannot be."""
    n_layer = header.count("block_count")
    if not 0 < n_layer <= MAX_LAYERS:
        raise ModelError(f"{header.path} has {n_layer} layers; it must have 1 to {MAX_LAYERS}")
    n_kv = n_layer - header.count("attention.shared_kv_layers")  # later ones use earlier ones'
    is_recurrent = _recurrent_layers(header, n_layer)
    keeps_both = header.arch == "falcon-h1"
    state = _state_values(header)
    layers = []
    for il in range(n_layer):
        is_swa = _is_swa(header, il)
        attends = keeps_both or not is_recurrent[il]
        layers.append(
            Layer(
                kv_values=_kv_values(header, il, is_swa) if attends and il < n_kv else 0,
                state_values=state if is_recurrent[il] else 0,
                is_swa=is_swa,
            )
        )
    return layers


def n_heads(header: GgufHeader, il: int, key: str = "attention.head_count") -> int:
    """Heads of one layer; with key "attention.head_count_kv", those of its keys and values."""
    value = header.of_arch(key)
    if value is None and key != "attention.head_count":
        return n_heads(header, il)
    if isinstance(value, list):
        return int(value[il]) if il < len(value) else 0
    return int(value) if isinstance(value, int) else 0


def head_size(header: GgufHeader, il: int, is_swa: bool, which: str = "key") -> int:
    """Values of one head of one layer; `which` is key or value."""
    n_head = n_heads(header, il) or max(1, header.count("attention.head_count"))
    size = header.count(f"attention.{which}_length", header.count("embedding_length") // n_head)
    return header.count(f"attention.{which}_length_swa", size) if is_swa else size


def has_window(header: GgufHeader) -> bool:
    """Whether some layers look back over a window only (a cache of their own in llama.cpp)."""
    return header.count("attention.sliding_window") > 0


def _kv_values(header: GgufHeader, il: int, is_swa: bool) -> int:
    n_kv_heads = n_heads(header, il, "attention.head_count_kv")
    n_keys = n_kv_heads * head_size(header, il, is_swa)
    if header.count("attention.key_length_mla") > 0:  # one compressed row, no values
        return n_keys
    return n_keys + n_kv_heads * head_size(header, il, is_swa, "value")


def _is_swa(header: GgufHeader, il: int) -> bool:
    if not has_window(header):
        return False
    pattern = header.of_arch("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        return il < len(pattern) and bool(pattern[il])
    if isinstance(pattern, int) and pattern > 0:
        return il % pattern < pattern - 1  # the last one of each group sees everything
    return True  # not in the file: the architecture's own pattern; the sizes are the same


def _recurrent_layers(header: GgufHeader, n_layer: int) -> list[bool]:
    arch = header.arch
    listed = header.of_arch("attention.recurrent_layers")
    if arch in RECURRENT or arch == "falcon-h1":
        return [True] * n_layer
    if isinstance(listed, list):
        return [il < len(listed) and bool(listed[il]) for il in range(n_layer)]
    if arch in INTERVAL:
        interval = header.count("full_attention_interval", DEFAULT_INTERVAL)
        n_trunk = n_layer - header.count("nextn_predict_layers")
        return [il < n_trunk and il % interval != interval - 1 for il in range(n_layer)]
    if _state_values(header) == 0:
        return [False] * n_layer
    return [n_heads(header, il, "attention.head_count_kv") == 0 for il in range(n_layer)]


def _state_values(header: GgufHeader) -> int:
    """n_embd_r + n_embd_s of llama-hparams.cpp: what one recurrent layer remembers."""
    n_embd = header.count("embedding_length")
    if wkv := header.count("wkv.head_size"):
        return header.count("token_shift_count", 2) * n_embd + n_embd * wkv
    if l_cache := header.count("shortconv.l_cache"):
        return n_embd * (l_cache - 1)
    kernel = header.count("ssm.conv_kernel")
    if kda := header.count("kda.head_dim"):
        width = header.count("attention.head_count") * kda
        return 3 * ((kernel or DEFAULT_CONV_KERNEL) - 1) * width + width * kda
    inner, state = header.count("ssm.inner_size"), header.count("ssm.state_size")
    n_conv = inner + 2 * header.count("ssm.group_count") * state
    return max(0, kernel - 1) * n_conv + state * inner
