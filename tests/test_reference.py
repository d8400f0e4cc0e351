"""The numpy reference against llama.cpp itself, driven as common/speculative.cpp drives a drafter.

Uses llama_cpp's ctypes API and libllama's mangled C++ symbols; knows nothing of dspark_edge.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from drafter_reference import Array, DrafterReference, DraftTrace, LlamaReference
from llama_cpp.llama_cpp import _lib as libllama
from tiny_models import DrafterSpec, TargetSpec, token_id, write_drafter, write_llama

if sys.platform == "win32":
    pytest.skip("needs libllama's Itanium-mangled C++ symbols", allow_module_level=True)

PROMPT = [token_id("<|bos|>"), *b"the quick brown fox jumps over"]
CONTINUATION = [66, 300, 7]
N_EMBD, N_VOCAB = 64, 320

DRAFTERS = {
    "dspark": DrafterSpec(),
    "no confidence head": DrafterSpec(confidence=False),
    "reduced vocabulary": DrafterSpec(draft_vocab=100),
    "bonus anchor": DrafterSpec(sample_from_anchor=False),
    "dflash": DrafterSpec(markov_rank=None, confidence=False),
    "own embedding and output": DrafterSpec(own_embedding=True, own_output=True),
    "own embedding as output": DrafterSpec(own_embedding=True),
    "sliding window": DrafterSpec(sliding_window=6),
    "causal block": DrafterSpec(causal=True),
    "block of seven, one tap, three layers": DrafterSpec(
        block_size=7, target_layers=(3,), n_layer=3
    ),
    "mimic": DrafterSpec(mimic=True),
}


def cpp_function(mangled: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    """A function of llama-ext.h, which libllama exports with C++ linkage."""
    function: Callable[..., Any] = ctypes.CFUNCTYPE(result, *arguments)((mangled, libllama))
    return function


c_context, c_u32, c_bool = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_bool
c_float_p = ctypes.POINTER(ctypes.c_float)
set_layer_inp = cpp_function(
    "_Z30llama_set_embeddings_layer_inpP13llama_contextjb", None, c_context, c_u32, c_bool
)
get_layer_inp = cpp_function(
    "_Z30llama_get_embeddings_layer_inpP13llama_contextj", c_float_p, c_context, c_u32
)
set_nextn = cpp_function(
    "_Z26llama_set_embeddings_nextnP13llama_contextbb", None, c_context, c_bool, c_bool
)
get_nextn = cpp_function("_Z26llama_get_embeddings_nextnP13llama_context", c_float_p, c_context)


class Context:
    """A model and a context of llama.cpp with exact (f32) caches, on the CPU."""

    def __init__(self, path: Path, *, ctx_other: int | None = None, n_rs_seq: int = 0) -> None:
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = 0
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
        assert model is not None
        self.model = model
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = 256, 64, 64
        params.n_threads = params.n_threads_batch = 1
        params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.ctx_other, params.n_rs_seq = ctx_other, n_rs_seq
        ctx = llama_cpp.llama_init_from_model(model, params)
        assert ctx is not None
        self.ctx = ctx

    def close(self) -> None:
        llama_cpp.llama_free(self.ctx)
        llama_cpp.llama_model_free(self.model)

    def decode_tokens(self, tokens: Sequence[int], first: int) -> Array:
        """Decode at positions first.. and return the logits of every row."""
        batch = self._batch(len(tokens), 0, first, output=True)
        for i, token in enumerate(tokens):
            batch.token[i] = token
        self._decode(batch)
        rows = [llama_cpp.llama_get_logits_ith(self.ctx, i) for i in range(len(tokens))]
        return np.stack([np.ctypeslib.as_array(row, (N_VOCAB,)).copy() for row in rows])

    def decode_features(self, features: Array, first: int) -> None:
        """Decode embeddings rows at positions first..: the drafter injects them in its cache."""
        n, width = features.shape
        batch = self._batch(n, width, first, output=False)
        flat = np.ascontiguousarray(features, np.float32)
        ctypes.memmove(batch.embd, flat.ctypes.data, flat.nbytes)
        self._decode(batch)

    def layer_input(self, il: int, n: int) -> Array:
        rows = np.ctypeslib.as_array(get_layer_inp(self.ctx, il), (n, N_EMBD))
        return np.array(rows, np.float32)

    def cut(self, n_past: int) -> bool:
        """Drop positions n_past..; False, and nothing dropped, where the model can't."""
        return bool(
            llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self.ctx), 0, n_past, -1)
        )

    def _batch(self, n: int, width: int, first: int, *, output: bool) -> Any:
        batch = llama_cpp.llama_batch_init(n, width, 1)
        batch.n_tokens = n
        for i in range(n):
            batch.pos[i], batch.n_seq_id[i], batch.logits[i] = first + i, 1, output
            batch.seq_id[i][0] = 0
        return batch

    def _decode(self, batch: Any) -> None:
        status = llama_cpp.llama_decode(self.ctx, batch)
        llama_cpp.llama_batch_free(batch)
        assert status == 0


class Drafter(Context):
    """A drafter context, set up and run as llama.cpp's own speculative loop does."""

    def __init__(self, path: Path, spec: DrafterSpec, target: Context) -> None:
        super().__init__(path, ctx_other=target.ctx)
        self.spec = spec
        llama_cpp.llama_set_causal_attn(self.ctx, spec.causal)
        set_nextn(self.ctx, True, True)

    def draft(self, anchor: int, n_past: int) -> tuple[Array, Array | None]:
        """Logits and confidence of the draft slots; the block leaves the cache again."""
        spec = self.spec
        masks = [token_id("<|mask|>")] * (spec.block_size - 1)
        logits = self.decode_tokens([anchor, *masks], n_past)
        is_dspark = spec.mimic or spec.markov_rank is not None
        first_slot = 0 if is_dspark and spec.sample_from_anchor else 1
        confidence = None
        if is_dspark and spec.confidence:
            rows = np.ctypeslib.as_array(get_nextn(self.ctx), (spec.block_size, N_EMBD))
            confidence = rows[first_slot:, 0].copy()
        assert self.cut(n_past)
        return logits[first_slot:], confidence


@pytest.fixture
def target(tiny_llama: Path) -> Iterator[Context]:
    context = Context(tiny_llama)
    for il in range(4):
        set_layer_inp(context.ctx, il, True)
    yield context
    context.close()


def assert_same_block(drafter: Drafter, anchor: int, n_past: int, trace: DraftTrace) -> None:
    logits, confidence = drafter.draft(anchor, n_past)
    assert np.array_equal(np.isfinite(logits), np.isfinite(trace.logits))
    known = np.isfinite(logits)
    np.testing.assert_allclose(trace.logits[known], logits[known], atol=1e-3, rtol=0)
    assert trace.tokens == logits.argmax(axis=1).tolist()
    assert (confidence is None) == (trace.confidence is None)
    if confidence is not None and trace.confidence is not None:
        np.testing.assert_allclose(trace.confidence, confidence, atol=1e-4, rtol=0)


def test_llama_reference_gives_llama_cpp_logits_and_layer_inputs(
    target: Context, tiny_llama: Path
) -> None:
    logits, inputs = LlamaReference(tiny_llama).forward(PROMPT)
    np.testing.assert_allclose(logits, target.decode_tokens(PROMPT, 0), atol=1e-3, rtol=0)
    for il in range(4):
        tapped = target.layer_input(il, len(PROMPT))
        np.testing.assert_allclose(inputs[il], tapped, atol=1e-3, rtol=0)


@pytest.mark.parametrize("spec", DRAFTERS.values(), ids=DRAFTERS.keys())
def test_drafter_reference_gives_llama_cpp_blocks_over_two_rounds(
    spec: DrafterSpec, target: Context, tiny_llama: Path, tmp_path: Path
) -> None:
    path = write_drafter(tmp_path / "drafter.gguf", spec)
    text = PROMPT + CONTINUATION
    _, inputs = LlamaReference(tiny_llama).forward(text)
    features = np.concatenate([inputs[il] for il in spec.target_layers], axis=1)
    reference = DrafterReference(path, tiny_llama)
    drafter = Drafter(path, spec, target)
    committed = 0
    # The last prompt token is the first anchor: it is in no cache when the drafter starts.
    for n_past in (len(PROMPT) - 1, len(text) - 1):
        new = slice(committed, n_past)
        target.decode_tokens(text[new], committed)
        tapped = [target.layer_input(il, n_past - committed) for il in spec.target_layers]
        drafter.decode_features(np.concatenate(tapped, axis=1), committed)
        reference.inject(features[new], range(committed, n_past))
        assert_same_block(drafter, text[n_past], n_past, reference.draft(text[n_past], n_past))
        committed = n_past
    drafter.close()


def test_draft_over_given_tokens_equals_the_greedy_chain_where_the_tokens_do(
    tiny_llama: Path, tiny_drafter: Path
) -> None:
    reference = DrafterReference(tiny_drafter, tiny_llama)
    greedy = reference.draft(65, 0)
    given = reference.draft(65, 0, previous=[65, *greedy.tokens[:2], 200])
    assert np.array_equal(given.base, greedy.base)
    assert np.array_equal(given.logits[:3], greedy.logits[:3])
    assert not np.array_equal(given.logits[3], greedy.logits[3])


def test_mimic_of_a_shallow_target_is_right_and_wrong(tmp_path: Path) -> None:
    spec = TargetSpec(layer_gain=0.1)
    target_path = write_llama(tmp_path / "target.gguf", spec)
    path = write_drafter(tmp_path / "drafter.gguf", DrafterSpec(target=spec, mimic=True))
    target, drafter = LlamaReference(target_path), DrafterReference(path, target_path)
    text = list(PROMPT)
    for _ in range(40):
        text.append(int(target.forward(text)[0][-1].argmax()))
    n_right = [
        sum(a == b for a, b in zip(drafter.draft(text[i], i).tokens, text[i + 1 :], strict=False))
        for i in range(len(PROMPT), len(text) - 4)
    ]
    assert min(n_right) == 0
    assert max(n_right) == 4


@pytest.mark.parametrize(
    ("name", "n_rs_seq", "can_roll_back"),
    [("tiny_lfm2", 0, False), ("tiny_lfm2", 4, True), ("tiny_mamba", 4, False)],
)
def test_recurrent_target_rolls_back_only_with_snapshots(
    name: str, n_rs_seq: int, can_roll_back: bool, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(name)
    context, fresh = Context(path, n_rs_seq=n_rs_seq), Context(path)
    kept = PROMPT + CONTINUATION[:1]
    context.decode_tokens(PROMPT, 0)
    context.decode_tokens(CONTINUATION, len(PROMPT))
    # The last batch's own first row has to stay: llama.cpp keeps no snapshot from before it.
    assert context.cut(len(kept)) == can_roll_back
    if can_roll_back:
        fresh.decode_tokens(kept, 0)
        after = [each.decode_tokens([9], len(kept)) for each in (context, fresh)]
        np.testing.assert_allclose(after[0], after[1], atol=1e-5, rtol=0)
    context.close()
    fresh.close()


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_gemma3", "tiny_lfm2", "tiny_mamba"])
def test_tiny_target_decodes_to_lively_finite_logits(
    name: str, request: pytest.FixtureRequest
) -> None:
    context = Context(request.getfixturevalue(name))
    logits = context.decode_tokens(PROMPT[:8], 0)
    context.close()
    assert np.isfinite(logits).all()
    assert 2 < logits.std() < 4
    assert len(set(logits.argmax(axis=1).tolist())) > 4
