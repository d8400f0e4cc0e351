"""Layer inputs and the head's input of the target's passes, against the numpy target."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from drafter_reference import LlamaReference, rms_norm
from tiny_models import token_id

from dspark_edge import ModelError
from dspark_edge._core import BlockDecoder, DecoderConfig, SamplingConfig

PROMPT = [token_id("<|bos|>"), *b"the quick brown fox"]
LAYERS = [1, 3]
TOLERANCE = 0.05  # f16 caches; values of one layer and the next differ by about 1


def make_decoder(
    target: Path,
    *,
    drafter: str = "",
    n_seq: int = 2,
    own_cells: bool = False,
    max_verify_len: int = 0,
) -> BlockDecoder:
    return BlockDecoder(
        DecoderConfig(
            target_path=str(target),
            drafter_path=drafter,
            n_ctx=64,
            n_seq=n_seq,
            n_threads=1,
            max_verify_len=max_verify_len,
            own_cells=own_cells,
        )
    )


def reference_rows(target: Path, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Features [n, 2 * n_embd] and the head's inputs [n, n_embd]."""
    reference = LlamaReference(target)
    _, inputs = reference.forward(tokens)
    features = np.concatenate([inputs[layer] for layer in LAYERS], axis=1)
    norm = reference.file.weight("output_norm")
    return features, rms_norm(inputs[-1], norm, reference.heads.eps)


def assert_rows_of_one_pass(
    decoder: BlockDecoder, target: Path, prompts: dict[int, list[int]]
) -> None:
    """A pass over the last token of each sequence's prompt gives a row of each in their order."""
    decoder.tap(LAYERS)
    for seq_id, prompt in prompts.items():
        decoder.open_sequence(seq_id, SamplingConfig())
        decoder.prefill(seq_id, prompt[:-1])
    decoder.verify(list(prompts), [[prompt[-1]] for prompt in prompts.values()])
    features, hidden = decoder.tapped_rows()
    for row, prompt in enumerate(prompts.values()):
        expected_features, expected_hidden = reference_rows(target, prompt)
        np.testing.assert_allclose(features[row], expected_features[-1], atol=TOLERANCE)
        np.testing.assert_allclose(hidden[row], expected_hidden[-1], atol=TOLERANCE)


def test_a_prefill_gives_the_inputs_of_the_tapped_layers(tiny_llama: Path) -> None:
    decoder = make_decoder(tiny_llama)
    decoder.tap(LAYERS)
    decoder.open_sequence(0, SamplingConfig())
    decoder.prefill(0, PROMPT)
    features, hidden = decoder.tapped_rows()
    np.testing.assert_allclose(features, reference_rows(tiny_llama, PROMPT)[0], atol=TOLERANCE)
    assert hidden.size == 0


def test_a_pass_over_two_sequences_gives_a_row_of_each_in_their_order(tiny_llama: Path) -> None:
    assert_rows_of_one_pass(make_decoder(tiny_llama), tiny_llama, {1: PROMPT[:8], 0: PROMPT})


def test_sequences_with_cells_of_their_own_see_the_same(tiny_llama: Path) -> None:
    """With a gap between their numbers too: llama.cpp then makes a pass of each run of them."""
    prompts = {0: PROMPT, 1: PROMPT[2:], 3: PROMPT[:4]}
    decoder = make_decoder(tiny_llama, n_seq=4, own_cells=True)
    assert_rows_of_one_pass(decoder, tiny_llama, prompts)


def test_with_cells_of_their_own_passes_are_in_rising_order_and_even(tiny_llama: Path) -> None:
    """llama.cpp would give the rows of another order."""
    decoder = make_decoder(tiny_llama, n_seq=3, own_cells=True, max_verify_len=1)
    for seq_id in range(3):
        decoder.open_sequence(seq_id, SamplingConfig())
        decoder.prefill(seq_id, PROMPT)
    for seq_ids, tokens in (([1, 0, 2], [[5]] * 3), ([0, 1, 2], [[5, 6], [5], [5]])):
        with pytest.raises(ValueError, match="in rising order and have equally many tokens"):
            decoder.verify(seq_ids, tokens)


def test_tapping_changes_no_token(tiny_llama: Path) -> None:
    texts = []
    for layers in ([], LAYERS):
        decoder = make_decoder(tiny_llama)
        decoder.tap(layers)
        decoder.open_sequence(0, SamplingConfig(temperature=1.0, seed=3))
        decoder.prefill(0, PROMPT[:-1])
        tokens = [PROMPT[-1]]
        for _ in range(24):
            tokens += decoder.verify([0], [[tokens[-1]]])[0].tokens
        texts.append(tokens)
    assert texts[0] == texts[1]


def test_rows_are_gone_after_tapping_stops_and_after_a_measured_pass(tiny_llama: Path) -> None:
    decoder = make_decoder(tiny_llama)
    decoder.tap(LAYERS)
    decoder.open_sequence(0, SamplingConfig())
    decoder.prefill(0, PROMPT)
    decoder.time_step(2, 4)
    with pytest.raises(ValueError, match="no tapped rows"):
        decoder.tapped_rows()
    decoder.tap([])
    decoder.prefill(0, [5])
    with pytest.raises(ValueError, match="call tap, then run a pass"):
        decoder.tapped_rows()


def test_what_cannot_be_tapped_is_refused(
    tiny_llama: Path, tiny_gemma3: Path, tiny_drafter: Path
) -> None:
    with pytest.raises(ModelError, match="layer to tap is 4; this target has layers 0 to 3"):
        make_decoder(tiny_llama).tap([4])
    with pytest.raises(ModelError, match="layer to tap is -1"):
        make_decoder(tiny_llama).tap([-1])
    with pytest.raises(ModelError, match="cannot tap the layers of architecture 'gemma3'"):
        make_decoder(tiny_gemma3).tap([1])
    with pytest.raises(ValueError, match="without a drafter"):
        make_decoder(tiny_llama, drafter=str(tiny_drafter)).tap([1])
