"""An exported drafter in llama.cpp itself: loaded as its own draft-dspark loads one, and served.

The server is asked only where the environment variable DSPARK_LLAMA_SERVER names one.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import llama_cpp
import numpy as np
import torch
from tiny_models import TargetSpec, token_id, write_llama

from dspark_edge import SamplingParams
from dspark_edge.bench.llama_server import LlamaServer, flags_for
from dspark_edge.bench.programs import Question
from dspark_edge.distill.build import new_drafter
from dspark_edge.distill.clock import Clock
from dspark_edge.distill.collect import Collector
from dspark_edge.distill.export import export
from dspark_edge.distill.settings import DataSettings, TrainSettings
from dspark_edge.distill.shards import ShardStore
from dspark_edge.distill.target_file import TargetFile
from dspark_edge.distill.train import Trainer

SERVER = os.environ.get("DSPARK_LLAMA_SERVER", "")
BLOCK, N_CTX, N_DRAFT = 4, 256, 200
N_STEPS = 30


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("target") / "t.gguf", TargetSpec(layer_gain=0.1))


@pytest.fixture(scope="module")
def drafter(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained for seconds; q8_0, with a vocabulary of its own."""
    folder = tmp_path_factory.mktemp("drafter")
    file = TargetFile(target)
    shape = file.shape(n_layer=2, block_size=BLOCK, rank=32, taps=None)
    clock = Clock(folder / "clock.json", 3600.0)
    store = ShardStore(folder / "shards", limit_bytes=1 << 40)
    data = DataSettings(n_seq=8, max_prompt=64, max_reply=32)
    collector = Collector(file, shape, data, n_threads=1)
    collector.collect(store, clock, given=[], work=folder, share=1.0, max_sequences=32)
    collector.close()
    made, vocabulary, _ = new_drafter(
        file, shape, store, n_draft_max=N_DRAFT, device=torch.device("cpu"), seed=1
    )
    trainer = Trainer(made, vocabulary, store, TrainSettings(), folder / "checkpoint.pt")
    trainer.train(clock, share=1.0, max_steps=N_STEPS)
    path = folder / "d.gguf"
    export(made, vocabulary, file, path, kind="q8_0", provenance={})
    return path


def loaded(stack: ExitStack, path: Path, other: Any = None) -> tuple[Any, Any]:
    """Model and context. other: the target's context, of a drafter."""
    params = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    assert model, path
    stack.callback(llama_cpp.llama_model_free, model)
    how = llama_cpp.llama_context_default_params()
    how.n_ctx, how.n_seq_max, how.n_threads, how.n_threads_batch = N_CTX, 1, 1, 1
    if other is not None:  # as common/speculative.cpp makes a block drafter's context
        how.n_ctx = llama_cpp.llama_n_ctx(other)
        how.n_rs_seq = 0
        how.ctx_other = other
        how.n_outputs_max = how.n_outputs_max_per_seq = BLOCK + 1
    context = llama_cpp.llama_init_from_model(model, how)
    assert context, path
    stack.callback(llama_cpp.llama_free, context)
    return model, context


def metadata(model: Any, key: str) -> str:
    buffer = ctypes.create_string_buffer(64)
    assert llama_cpp.llama_model_meta_val_str(model, key.encode(), buffer, len(buffer)) >= 0, key
    return buffer.value.decode()


def test_llama_cpp_loads_the_file_as_its_own_drafter_and_drafts_a_block(
    target: Path, drafter: Path
) -> None:
    """A missing tensor or key fails the load; a wrong one would draft nothing of use."""
    with ExitStack() as stack:
        _, target_context = loaded(stack, target)
        model, context = loaded(stack, drafter, target_context)
        assert metadata(model, "general.architecture") == "dflash"
        assert metadata(model, "dflash.block_size") == str(BLOCK)
        assert metadata(model, "dflash.sample_from_anchor") == "true"
        assert metadata(model, "dflash.has_confidence_head") == "true"
        vocabulary = llama_cpp.llama_model_get_vocab(model)
        mask = token_id("<|mask|>")
        assert llama_cpp.llama_vocab_mask(vocabulary) == mask
        llama_cpp.llama_set_causal_attn(context, False)
        batch = llama_cpp.llama_batch_init(BLOCK, 0, 1)
        stack.callback(llama_cpp.llama_batch_free, batch)
        batch.n_tokens = BLOCK
        for slot, token in enumerate([ord("t"), *[mask] * (BLOCK - 1)]):
            batch.token[slot], batch.pos[slot] = token, slot
            batch.n_seq_id[slot], batch.seq_id[slot][0], batch.logits[slot] = 1, 0, True
        assert llama_cpp.llama_decode(context, batch) == 0
        n_vocab = llama_cpp.llama_vocab_n_tokens(vocabulary)
        for slot in range(BLOCK):
            logits = np.ctypeslib.as_array(
                llama_cpp.llama_get_logits_ith(context, slot), (n_vocab,)
            )
            assert np.isfinite(logits).sum() >= N_DRAFT // 2
            assert np.isfinite(logits.max())


@pytest.mark.skipif(not SERVER, reason="DSPARK_LLAMA_SERVER names no llama-server")
def test_llama_server_accepts_what_the_file_drafts(target: Path, drafter: Path) -> None:
    flags = flags_for(target, n_ctx=N_CTX, n_threads=1, drafter=drafter, n_max=BLOCK)
    server = LlamaServer("llama-server", SERVER, flags)
    try:
        prompt = Question("", [*b"the and"])
        reply = server.reply(prompt, SamplingParams(max_tokens=64, temperature=0.0))
    finally:
        server.close()
    assert reply.n_rounds is not None
    n_accepted = reply.n_decoded - reply.n_rounds
    assert n_accepted > 0
