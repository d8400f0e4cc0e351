"""BlockDecoder on tiny models: drafts equal the numpy reference, speculation never changes a token.

Plain decoding (verifying the anchor alone) is the oracle. Passes of different width differ in the
last bits, so a text may leave plain's only where plain's winner led by less than EPSILON.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from drafter_reference import DrafterReference, DraftTrace, LlamaReference
from tiny_models import DrafterSpec, TargetSpec, token_id, write_drafter, write_lfm2, write_llama

from dspark_edge import _core
from dspark_edge.errors import ContextFullError

EPSILON = 1e-3  # logits
# The decoder's caches are f16: against the float32 reference that costs up to 2e-3 of confidence
# (test_reference, with f32 caches, holds 1e-4); q8_0 weights cost more.
CACHE_TOLERANCE, QUANT_TOLERANCE = 2.5e-3, 6e-3
DRAFT_LEAD = 0.05  # logits: a draft whose lead is below this may differ from the reference's
N_CANDIDATES = 256  # tokens that get the correction of the graph's chain (markov_head.cpp)
PROMPT = [token_id("<|bos|>"), *b"the quick brown fox jumps over"]
OTHER_PROMPT = [token_id("<|bos|>"), *b"lorem ipsum"]
MAX_VERIFY_LEN = 7
TEMPERATURES = (0.0, 0.7, 1.0)
TARGETS = ("tiny_llama", "tiny_gemma3", "tiny_lfm2", "tiny_mamba")
SHALLOW = TargetSpec(layer_gain=0.1)  # a mimic is often right about it

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
    "block of two": DrafterSpec(block_size=2),
    "block of seven, one tap, three layers": DrafterSpec(
        block_size=7, target_layers=(3,), n_layer=3
    ),
    "mimic": DrafterSpec(mimic=True),
    "quantised": DrafterSpec(quant="q8_0", markov_rank=32),
    "half precision, reduced, bonus anchor": DrafterSpec(
        quant="f16", draft_vocab=200, sample_from_anchor=False
    ),
}

Drafts = Callable[[list[int]], list[int]]


@dataclass(slots=True)
class Text:
    """What a sequence emitted, with the lead of each token and the logprobs, if asked for."""

    tokens: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    n_accepted: int = 0
    n_rounds: int = 0

    def add(self, verdict: _core.Verdict) -> None:
        assert verdict.error == ""
        assert len(verdict.tokens) == len(verdict.margins) == verdict.n_accepted + 1
        self.tokens += verdict.tokens
        self.margins += verdict.margins
        self.logprobs += verdict.logprobs
        self.n_accepted += verdict.n_accepted
        self.n_rounds += 1


def make_decoder(
    target: Path,
    drafter: Path | None = None,
    *,
    n_ctx: int = 256,
    n_seq: int = 1,
    n_threads: int = 1,
    max_verify_len: int = MAX_VERIFY_LEN,
    n_batch: int = 64,
    chain_in_graph: bool = False,
) -> _core.BlockDecoder:
    return _core.BlockDecoder(
        _core.DecoderConfig(
            target_path=str(target),
            drafter_path=str(drafter or ""),
            n_ctx=n_ctx,
            n_seq=n_seq,
            n_threads=n_threads,
            n_batch=n_batch,
            max_verify_len=max_verify_len,
            chain_in_graph=chain_in_graph,
        )
    )


def start(
    decoder: _core.BlockDecoder,
    sampling: _core.SamplingConfig,
    *,
    prompt: Sequence[int] = PROMPT,
    seq_id: int = 0,
) -> int:
    """Open a sequence with a prompt in it; the anchor is returned."""
    decoder.open_sequence(seq_id, sampling)
    for chunk in range(0, len(prompt) - 1, decoder.n_batch):
        decoder.prefill(seq_id, prompt[chunk : min(chunk + decoder.n_batch, len(prompt) - 1)])
    return prompt[-1]


def go_on(
    decoder: _core.BlockDecoder, anchor: int, n: int, drafts: Drafts | None = None, seq_id: int = 0
) -> Text:
    """At least n tokens from `anchor`; `drafts` sees the text so far."""
    text = Text()
    while len(text.tokens) < n:
        guess = drafts(text.tokens) if drafts else []
        verdict = decoder.verify([seq_id], [[anchor, *guess]])[0]
        text.add(verdict)
        anchor = verdict.tokens[-1]
    return text


def generate(
    decoder: _core.BlockDecoder,
    sampling: _core.SamplingConfig,
    n: int,
    drafts: Drafts | None = None,
    *,
    prompt: Sequence[int] = PROMPT,
) -> Text:
    text = go_on(decoder, start(decoder, sampling, prompt=prompt), n, drafts)
    decoder.close_sequence(0)
    return text


def assert_same_text(text: Text, plain: Text) -> None:
    """Equal as far as both go, or first different where plain's lead was below EPSILON."""
    for i, (a, b) in enumerate(zip(text.tokens, plain.tokens, strict=False)):
        if a == b:
            continue
        lead = plain.margins[i]
        assert lead < EPSILON, f"token {i} is {a}, plain has {b} with a lead of {lead}"
        warnings.warn(f"a tie: token {i}, plain's lead {lead} < {EPSILON}", stacklevel=2)
        return


def oracle(plain: Text, verify_len: int) -> Drafts:
    return lambda text: plain.tokens[len(text) : len(text) + verify_len]


def wrong(plain: Text, verify_len: int) -> Drafts:
    return lambda text: [(token + 1) % 256 for token in oracle(plain, verify_len)(text)]


def mixed(plain: Text, verify_len: int) -> Drafts:
    random = np.random.default_rng(verify_len)
    return lambda text: [
        token if random.random() < 0.7 else (token + 1) % 256
        for token in oracle(plain, verify_len)(text)
    ]


def drafter_of(decoder: _core.BlockDecoder, anchor: int, verify_len: int = 99) -> Drafts:
    return lambda text: decoder.draft([0], [text[-1] if text else anchor])[0].tokens[:verify_len]


def sampled(temperature: float, seed: int = 5) -> _core.SamplingConfig:
    return _core.SamplingConfig(temperature=temperature, seed=seed)


@pytest.fixture(scope="module")
def shallow_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("shallow")
    return (
        write_llama(folder / "target.gguf", SHALLOW),
        write_drafter(folder / "drafter.gguf", DrafterSpec(target=SHALLOW, mimic=True)),
    )


# ---------------------------------------------------------------- drafts equal the reference


@dataclass(slots=True)
class Parity:
    """A decoder and the reference of its pair, held at the same place of the same text."""

    decoder: _core.BlockDecoder
    reference: DrafterReference
    spec: DrafterSpec
    target: LlamaReference
    text: list[int] = field(default_factory=lambda: list(PROMPT))

    def feed_reference(self) -> int:
        """All committed tokens afresh: everything but the anchor."""
        n_past = len(self.text) - 1
        assert self.decoder.n_past(0) == n_past
        _, inputs = self.target.forward(self.text)
        features = np.concatenate([inputs[il] for il in self.spec.target_layers], axis=1)
        self.reference.clear()
        self.reference.inject(features[:n_past], range(n_past))
        return n_past

    def advance(self, n_right: int, n_wrong: int) -> None:
        """A verify that accepts n_right draft tokens of n_right + n_wrong."""
        text = list(self.text)
        for _ in range(n_right + 1):
            text.append(int(self.target.forward(text)[0][-1].argmax()))
        guess = text[len(self.text) : -1] + [(text[-1] + 1) % 256] * n_wrong
        verdict = self.decoder.verify([0], [[self.text[-1], *guess]])[0]
        assert verdict.n_accepted == n_right
        self.text += verdict.tokens


def make_parity(
    spec: DrafterSpec,
    target: Path,
    folder: Path,
    sampling: _core.SamplingConfig,
    *,
    chain_in_graph: bool,
) -> Parity:
    path = write_drafter(folder / "drafter.gguf", spec)
    decoder = make_decoder(target, path, chain_in_graph=chain_in_graph)
    start(decoder, sampling)
    return Parity(decoder, DrafterReference(path, target), spec, LlamaReference(target))


def assert_same_confidence(draft: _core.Draft, trace: DraftTrace, spec: DrafterSpec) -> None:
    if trace.confidence is None:
        assert draft.confidence == []
        return
    tolerance = QUANT_TOLERANCE if spec.quant == "q8_0" else CACHE_TOLERANCE
    np.testing.assert_allclose(draft.confidence, trace.confidence, atol=tolerance, rtol=0)


@pytest.mark.parametrize("chain_in_graph", [False, True], ids=["host", "graph"])
@pytest.mark.parametrize("spec", DRAFTERS.values(), ids=DRAFTERS.keys())
def test_greedy_drafts_equal_the_reference_after_each_round(
    spec: DrafterSpec, chain_in_graph: bool, tiny_llama: Path, tmp_path: Path
) -> None:
    parity = make_parity(spec, tiny_llama, tmp_path, sampled(0.0), chain_in_graph=chain_in_graph)
    for n_right, n_wrong in ((2, 3), (0, 1), (0, 0), (5, 0), (1, 6), (0, 4)):
        n_past, anchor = parity.feed_reference(), parity.text[-1]
        draft = parity.decoder.draft([0], [anchor])[0]
        trace = parity.reference.draft(anchor, n_past, previous=[anchor, *draft.tokens[:-1]])
        top = np.sort(trace.logits, axis=1)
        leads = top[:, -1] - top[:, -2]
        for token, expected, lead in zip(draft.tokens, trace.tokens, leads, strict=True):
            assert token == expected or lead < DRAFT_LEAD
        np.testing.assert_allclose(draft.certainty, leads, atol=2 * DRAFT_LEAD, rtol=0)
        assert_same_confidence(draft, trace, spec)
        parity.advance(n_right, n_wrong)


@pytest.mark.parametrize("chain_in_graph", [False, True], ids=["host", "graph"])
@pytest.mark.parametrize("spec", DRAFTERS.values(), ids=DRAFTERS.keys())
def test_sampled_drafts_equal_the_reference_over_the_tokens_drawn(
    spec: DrafterSpec, chain_in_graph: bool, tiny_llama: Path, tmp_path: Path
) -> None:
    sampling = sampled(1.0, seed=3)
    parity = make_parity(spec, tiny_llama, tmp_path, sampling, chain_in_graph=chain_in_graph)
    n_corrected = 0
    for _ in range(6):
        n_past, anchor = parity.feed_reference(), parity.text[-1]
        draft = parity.decoder.draft([0], [anchor])[0]
        trace = parity.reference.draft(anchor, n_past, previous=[anchor, *draft.tokens[:-1]])
        greedy = parity.reference.draft(anchor, n_past)
        for slot, token in enumerate(draft.tokens):
            # Behind the graph's chain, the likeliest candidates of its row are corrected.
            n_corrected_columns = N_CANDIDATES if chain_in_graph else len(greedy.logits[slot])
            floor = np.sort(greedy.logits[slot])[-n_corrected_columns]
            row = np.where(greedy.logits[slot] >= floor, trace.logits[slot], greedy.logits[slot])
            drawn, lead = _core.draw_token(row, sampling, n_past + 1 + slot)
            assert token == drawn or lead < DRAFT_LEAD
            assert draft.certainty[slot] == pytest.approx(lead, abs=2 * DRAFT_LEAD)
        assert_same_confidence(draft, trace, spec)
        n_corrected += draft.tokens[:-1] != greedy.tokens[:-1]
        verdict = parity.decoder.verify([0], [[anchor, *draft.tokens[:2]]])[0]
        parity.text += verdict.tokens
    assert n_corrected > 0 or len(draft.tokens) == 1


def test_greedy_chain_survives_a_draft_that_is_never_verified(
    tiny_llama: Path, tiny_drafter: Path
) -> None:
    decoder = make_decoder(tiny_llama, tiny_drafter)
    anchor = start(decoder, sampled(0.0))
    first = decoder.draft([0], [anchor])[0].tokens
    assert [decoder.draft([0], [anchor])[0].tokens for _ in range(3)] == [first] * 3
    assert decoder.n_past(0) == len(PROMPT) - 1


def test_drafts_with_penalties_and_bias_obey_them(tiny_llama: Path, tiny_drafter: Path) -> None:
    decoder = make_decoder(tiny_llama, tiny_drafter)
    anchor = start(decoder, _core.SamplingConfig(logit_bias=[(77, 100.0)]))
    assert decoder.draft([0], [anchor])[0].tokens == [77] * 4
    decoder.open_sequence(0, _core.SamplingConfig(logit_bias=[(t, -np.inf) for t in range(320)]))
    assert decoder.draft([0], [anchor])[0].tokens == []


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 1},
        {"top_p": 0.5},
        {"min_p": 1.0},
        {"logit_bias": [(t, -np.inf) for t in range(320) if t != 77]},
    ],
    ids=("top_k", "top_p", "min_p", "logit_bias"),
)
def test_a_draft_of_the_only_token_left_has_a_finite_certainty(
    options: dict[str, object], tiny_llama: Path, tiny_drafter: Path
) -> None:
    decoder = make_decoder(tiny_llama, tiny_drafter)
    anchor = start(decoder, sampled(0.0))
    greedy = decoder.draft([0], [anchor])[0]
    decoder.open_sequence(0, _core.SamplingConfig(temperature=1.0, **options))  # type: ignore[arg-type]
    draft = decoder.draft([0], [anchor])[0]
    assert np.isfinite(draft.certainty).all()
    assert len(draft.certainty) == 4
    if "top_k" in options:
        assert draft.tokens == greedy.tokens
        assert draft.certainty == pytest.approx(greedy.certainty, abs=1e-4)


# ---------------------------------------------------------------- speculation changes no token


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("name", TARGETS)
def test_every_verify_len_and_any_draft_gives_the_plain_text(
    name: str, n_threads: int, request: pytest.FixtureRequest
) -> None:
    decoder = make_decoder(request.getfixturevalue(name), n_threads=n_threads)
    n, lengths = (24, range(MAX_VERIFY_LEN + 1)) if n_threads == 1 else (10, range(1, 8, 3))
    for temperature in TEMPERATURES:
        plain = generate(decoder, sampled(temperature), n)
        for verify_len, script in itertools.product(lengths, (oracle, wrong, mixed)):
            text = generate(decoder, sampled(temperature), n, script(plain, verify_len))
            assert_same_text(text, plain)
            if script is wrong:
                assert text.n_accepted == 0
            if script is oracle and verify_len > 0:
                assert text.n_rounds < n
    assert (decoder.n_rebuilds > 0) == (name == "tiny_mamba")
    assert decoder.can_roll_back == (name != "tiny_mamba")


@pytest.mark.parametrize("n_threads", [1, 2])
def test_a_real_drafter_gives_the_plain_text_and_is_sometimes_right(
    shallow_pair: tuple[Path, Path], n_threads: int
) -> None:
    decoder = make_decoder(*shallow_pair, n_threads=n_threads)
    for temperature in TEMPERATURES:
        for verify_len in range(5):
            plain = generate(decoder, sampled(temperature), 40)
            anchor = start(decoder, sampled(temperature))
            text = go_on(decoder, anchor, 40, drafter_of(decoder, anchor, verify_len))
            decoder.close_sequence(0)
            assert_same_text(text, plain)
            assert (text.n_accepted > 0) == (verify_len > 0)


def test_two_hundred_seeds_give_the_plain_text(shallow_pair: tuple[Path, Path]) -> None:
    decoder = make_decoder(*shallow_pair)
    for seed in range(200):
        plain = generate(decoder, sampled(1.0, seed), 6)
        anchor = start(decoder, sampled(1.0, seed))
        text = go_on(decoder, anchor, 6, drafter_of(decoder, anchor))
        decoder.close_sequence(0)
        assert_same_text(text, plain)


@pytest.mark.parametrize(
    "options",
    [
        {"repeat_penalty": 1.5, "frequency_penalty": 0.3, "presence_penalty": 0.2},
        {"repeat_penalty": 3.0, "penalty_last_n": 5, "temperature": 1.0},
        {"logit_bias": [(101, 6.0), (116, -6.0), (32, -np.inf)]},
        {"top_k": 8, "top_p": 0.9, "min_p": 0.05, "temperature": 0.8},
        {"grammar": 'root ::= ("yes" | "no" | [a-f] [0-9])+', "temperature": 1.0},
        {"grammar": "root ::= [^x]* ", "temperature": 0.7, "repeat_penalty": 1.2},
        {"grammar": 'root ::= "é"+ ', "temperature": 1.0},
    ],
    ids=str,
)
def test_every_sampling_option_gives_the_plain_text(
    options: dict[str, object], shallow_pair: tuple[Path, Path]
) -> None:
    decoder = make_decoder(*shallow_pair)
    sampling = _core.SamplingConfig(seed=9, **options)  # type: ignore[arg-type]
    plain = generate(decoder, sampling, 30)
    for script in (oracle, mixed, wrong):
        assert_same_text(generate(decoder, sampling, 30, script(plain, 7)), plain)
    anchor = start(decoder, sampling)
    assert_same_text(go_on(decoder, anchor, 30, drafter_of(decoder, anchor)), plain)


def test_grammar_text_matches_the_grammar(shallow_pair: tuple[Path, Path]) -> None:
    decoder = make_decoder(*shallow_pair)
    sampling = _core.SamplingConfig(temperature=1.0, grammar='root ::= ("yes" | "no")+')
    anchor = start(decoder, sampling)
    text = go_on(decoder, anchor, 40, drafter_of(decoder, anchor))
    written = b"".join(decoder.token_bytes(token) for token in text.tokens).decode()
    assert written.replace("yes", "").replace("no", "") in ("", "y", "ye", "n")


def test_a_grammar_that_leaves_no_token_says_so(tiny_llama: Path) -> None:
    decoder = make_decoder(tiny_llama)
    bias = [(token, -np.inf) for token in range(320) if token != 120]
    sampling = _core.SamplingConfig(grammar='root ::= "xx" "y"', logit_bias=bias)
    anchor = start(decoder, sampling)
    verdict = decoder.verify([0], [[anchor, 120, 120, 120]])[0]
    assert verdict.tokens == [120, 120]
    assert verdict.n_accepted == 2
    assert verdict.error == (
        f"no token is allowed at position {len(PROMPT) + 2}: "
        "the grammar or the logit biases leave none"
    )


def test_a_grammar_that_fails_ends_its_own_sequence_only(tiny_llama: Path) -> None:
    # llama.cpp allows a piece that goes on where a token is due, and throws when it takes it.
    decoder = make_decoder(tiny_llama, n_seq=2)
    sampling = _core.SamplingConfig(
        grammar='root ::= "a" !<[0]>*', logit_bias=[(token_id("as"), 100.0)]
    )
    anchor = start(decoder, sampling)
    other = start(decoder, sampled(0.0), prompt=OTHER_PROMPT, seq_id=1)
    failed, fine = decoder.verify([0, 1], [[anchor, 97, 97], [other]])
    assert failed.tokens == []
    assert failed.error.startswith(f"drawing failed at position {len(PROMPT)}: Unexpected empty")
    assert failed.error.endswith("; write the grammar in another way")
    alone = make_decoder(tiny_llama)
    (plain,) = alone.verify([0], [[start(alone, sampled(0.0), prompt=OTHER_PROMPT)]])
    assert (fine.tokens, fine.error) == (plain.tokens, "")
    assert [decoder.n_past(seq_id) for seq_id in (0, 1)] == [len(PROMPT), len(OTHER_PROMPT)]
    again = decoder.verify([0], [[97]])[0]
    assert again.error.startswith(f"no token is allowed at position {len(PROMPT) + 1}")


def test_the_seed_decides_the_text_and_nothing_else_does(tiny_llama: Path) -> None:
    decoder = make_decoder(tiny_llama)
    texts = [generate(decoder, sampled(1.0, seed), 12).tokens for seed in (1, 1, 2, 2**64 - 1)]
    assert texts[0] == texts[1]
    assert len({tuple(text) for text in texts}) == 3


def test_logprobs_under_speculation_equal_plain_ones(shallow_pair: tuple[Path, Path]) -> None:
    decoder = make_decoder(*shallow_pair)
    for temperature in (0.0, 1.0):
        sampling = _core.SamplingConfig(temperature=temperature, n_logprobs=3, repeat_penalty=1.1)
        plain = generate(decoder, sampling, 20)
        text = generate(decoder, sampling, 20, mixed(plain, 7))
        assert text.tokens[:20] == plain.tokens[:20]
        for token, a, b in zip(plain.tokens, text.logprobs, plain.logprobs, strict=False):
            assert len(b) == 4
            assert a[0][0] == b[0][0] == token
            assert [t for t, _ in a] == [t for t, _ in b]
            np.testing.assert_allclose([p for _, p in a], [p for _, p in b], atol=5e-4)
            assert b[1][1] >= b[2][1] >= b[3][1]
            assert b[0][1] < 0


def test_logprobs_are_those_of_the_targets_own_distribution(tiny_llama: Path) -> None:
    decoder = make_decoder(tiny_llama)
    anchor = start(decoder, _core.SamplingConfig(n_logprobs=320))
    listed = decoder.verify([0], [[anchor]])[0].logprobs[0][1:]
    logits = LlamaReference(tiny_llama).forward(PROMPT)[0][-1].astype(np.float64)
    expected = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    np.testing.assert_allclose([expected[t] for t, _ in listed], [p for _, p in listed], atol=2e-2)
    assert sum(np.exp(p) for _, p in listed) == pytest.approx(1.0, abs=1e-4)


def test_no_logprobs_are_kept_unless_asked_for(tiny_llama: Path) -> None:
    decoder = make_decoder(tiny_llama)
    anchor = start(decoder, sampled(0.0))
    assert decoder.verify([0], [[anchor]])[0].logprobs == []


# ---------------------------------------------------------------- many sequences


def alone(decoder: _core.BlockDecoder, prompt: list[int], temperature: float, n: int) -> Text:
    return generate(decoder, sampled(temperature), n, prompt=prompt)


@pytest.mark.parametrize("name", TARGETS)
def test_sequences_of_one_pass_equal_each_alone(name: str, request: pytest.FixtureRequest) -> None:
    target = request.getfixturevalue(name)
    decoder = make_decoder(target, n_seq=4)
    prompts = [PROMPT, OTHER_PROMPT, PROMPT[:9], [token_id("<|bos|>"), 65]]
    temperatures = [0.0, 0.7, 1.0, 0.0]
    single = make_decoder(target)
    plain = [alone(single, p, t, 48) for p, t in zip(prompts, temperatures, strict=True)]
    scripts = [oracle(plain[0], 7), mixed(plain[1], 3), wrong(plain[2], 5), oracle(plain[3], 1)]
    anchors = [
        start(decoder, sampled(t), prompt=p, seq_id=i)
        for i, (p, t) in enumerate(zip(prompts, temperatures, strict=True))
    ]
    texts = [Text() for _ in prompts]
    for round_ in range(12):
        # Another set and order of sequences each round.
        present = [i for i in (2, 0, 3, 1) if (round_ + i) % 3 or round_ % 2]
        verify_tokens = [[anchors[i], *scripts[i](texts[i].tokens)] for i in present]
        for i, verdict in zip(present, decoder.verify(present, verify_tokens), strict=True):
            texts[i].add(verdict)
            anchors[i] = verdict.tokens[-1]
    for text, expected in zip(texts, plain, strict=True):
        assert text.n_rounds >= 6
        assert_same_text(text, expected)


@pytest.mark.parametrize("writer", [write_llama, write_lfm2], ids=["llama", "lfm2"])
def test_drafts_of_one_pass_equal_each_alone(
    writer: Callable[[Path, TargetSpec], Path], tmp_path: Path
) -> None:
    target = writer(tmp_path / "target.gguf", TargetSpec())
    drafter = write_drafter(tmp_path / "drafter.gguf", DrafterSpec())
    prompts = [PROMPT, OTHER_PROMPT, PROMPT[:5]]
    together = make_decoder(target, drafter, n_seq=3)
    singles = [make_decoder(target, drafter) for _ in prompts]
    plain = [
        generate(single, sampled(0.0), 40, prompt=p)
        for single, p in zip(singles, prompts, strict=True)
    ]
    texts = [Text() for _ in prompts]
    anchors = list[int]()
    for i, prompt in enumerate(prompts):
        anchors.append(start(together, sampled(0.0), prompt=prompt, seq_id=i))
        start(singles[i], sampled(0.0), prompt=prompt)
    for round_ in range(6):
        drafts = together.draft([0, 1, 2], anchors)
        for i, draft in enumerate(drafts):
            expected = singles[i].draft([0], [anchors[i]])[0]
            assert draft.tokens == expected.tokens
            np.testing.assert_allclose(draft.confidence, expected.confidence, atol=1e-3)
        verify_tokens = [
            [anchors[i], *mixed(plain[i], (round_ + 3 * i) % 8)(texts[i].tokens)] for i in range(3)
        ]
        verdicts = together.verify([0, 1, 2], verify_tokens)
        for i, verdict in enumerate(verdicts):
            assert singles[i].verify([0], [verify_tokens[i]])[0].tokens == verdict.tokens
            texts[i].add(verdict)
            anchors[i] = verdict.tokens[-1]


def test_a_batch_narrower_than_the_drafters_blocks_is_enough(
    tiny_llama: Path, tmp_path: Path
) -> None:
    drafter = write_drafter(tmp_path / "drafter.gguf", DrafterSpec(block_size=64))
    decoder = make_decoder(tiny_llama, drafter, n_seq=4, n_batch=32)
    single = make_decoder(tiny_llama, drafter)
    start(single, sampled(0.0), prompt=OTHER_PROMPT)
    assert decoder.time_draft(4) > 0
    anchors = [start(decoder, sampled(0.0), prompt=OTHER_PROMPT, seq_id=i) for i in range(4)]
    expected = single.draft([0], anchors[:1])[0].tokens
    assert len(expected) == 64
    assert [d.tokens for d in decoder.draft([0, 1, 2, 3], anchors)] == [expected] * 4


# ---------------------------------------------------------------- going back


@pytest.mark.parametrize("n_keep", [0, 1, 5, 20, len(PROMPT) - 1, len(PROMPT) + 3])
@pytest.mark.parametrize("name", ["tiny_llama", "tiny_gemma3"])
def test_rewound_sequence_continues_as_a_fresh_one(
    name: str, n_keep: int, request: pytest.FixtureRequest
) -> None:
    target = request.getfixturevalue(name)
    decoder, fresh = make_decoder(target), make_decoder(target)
    plain = generate(fresh, sampled(1.0), 12)
    anchor = start(decoder, sampled(1.0))
    go_on(decoder, anchor, 12, mixed(plain, 5))
    kept = (PROMPT + plain.tokens)[:n_keep]
    assert decoder.rewind(0, n_keep) == n_keep
    assert decoder.n_past(0) == n_keep
    decoder.prefill(0, OTHER_PROMPT[:-1])
    text = go_on(decoder, OTHER_PROMPT[-1], 10)
    anchor = start(fresh, sampled(1.0), prompt=kept + OTHER_PROMPT)
    assert_same_text(text, go_on(fresh, anchor, 10))


@pytest.mark.parametrize("name", ["tiny_lfm2", "tiny_mamba"])
def test_recurrent_rewind_is_exact_or_empties_the_sequence(
    name: str, request: pytest.FixtureRequest
) -> None:
    target = request.getfixturevalue(name)
    decoder, fresh = make_decoder(target), make_decoder(target)
    plain = generate(fresh, sampled(0.0), 40)
    n_exact = 0
    for n_right, n_wrong, n_back in itertools.product((0, 2, 5), (0, 2), range(1, 9)):
        anchor = start(decoder, sampled(0.0))
        guess = plain.tokens[:n_right] + [(plain.tokens[n_right] + 1) % 256] * n_wrong
        decoder.verify([0], [[anchor, *guess]])
        n_past = len(PROMPT) + n_right
        assert decoder.n_past(0) == n_past
        n_left = decoder.rewind(0, n_past - n_back)
        assert n_left in (0, n_past - n_back)
        assert decoder.n_past(0) == n_left
        n_exact += n_left > 0
        kept = (PROMPT + plain.tokens)[:n_left]
        prompt = OTHER_PROMPT if n_left == 0 else kept + OTHER_PROMPT
        decoder.prefill(0, prompt[n_left:-1])
        text = go_on(decoder, prompt[-1], 8, mixed(plain, 3))
        expected_anchor = start(fresh, sampled(0.0), prompt=prompt)
        assert_same_text(text, go_on(fresh, expected_anchor, 8))
        fresh.close_sequence(0)
        decoder.close_sequence(0)
    assert (n_exact > 0) == (name == "tiny_lfm2")


def test_recurrent_rewind_after_prefill_is_exact_or_empties_the_sequence(tiny_lfm2: Path) -> None:
    decoder, fresh = make_decoder(tiny_lfm2), make_decoder(tiny_lfm2)
    for n_back in (1, 3, 7, 8, 20):
        start(decoder, sampled(0.0))
        n_left = decoder.rewind(0, len(PROMPT) - 1 - n_back)
        prompt = PROMPT[:n_left] + OTHER_PROMPT
        decoder.prefill(0, prompt[n_left:-1])
        text = go_on(decoder, prompt[-1], 6)
        assert_same_text(text, go_on(fresh, start(fresh, sampled(0.0), prompt=prompt), 6))
        fresh.close_sequence(0)
        decoder.close_sequence(0)


@pytest.mark.parametrize("n_keep", [0, 3, 25, len(PROMPT) + 2])
@pytest.mark.parametrize("is_parked", [False, True])
def test_drafts_after_a_rewind_equal_those_of_a_fresh_decoder(
    n_keep: int, is_parked: bool, shallow_pair: tuple[Path, Path]
) -> None:
    decoder, fresh = make_decoder(*shallow_pair), make_decoder(*shallow_pair)
    anchor = start(decoder, sampled(0.0))
    text = go_on(decoder, anchor, 20, None if is_parked else drafter_of(decoder, anchor))
    decoder.rewind(0, n_keep)
    decoder.prefill(0, OTHER_PROMPT[:-1])
    prompt = (PROMPT + text.tokens)[:n_keep] + OTHER_PROMPT
    start(fresh, sampled(0.0), prompt=prompt)
    draft, expected = (d.draft([0], [OTHER_PROMPT[-1]])[0] for d in (decoder, fresh))
    assert draft.tokens == expected.tokens
    np.testing.assert_allclose(draft.confidence, expected.confidence, atol=1e-3)


@pytest.mark.parametrize("name", TARGETS)
def test_a_closed_sequence_leaves_nothing_to_the_next_request(
    name: str, request: pytest.FixtureRequest
) -> None:
    """SCENARIO 1, for the core's part."""
    target = request.getfixturevalue(name)
    decoder, fresh = make_decoder(target, n_ctx=512), make_decoder(target, n_ctx=512)
    long_prompt = (PROMPT * 14)[:400]
    generate(decoder, sampled(1.0, seed=1), 20, prompt=long_prompt)
    text = generate(decoder, sampled(1.0, seed=2), 20, prompt=PROMPT)
    assert_same_text(text, generate(fresh, sampled(1.0, seed=2), 20, prompt=PROMPT))


def test_drafts_of_a_reused_sequence_equal_those_of_a_fresh_decoder(
    shallow_pair: tuple[Path, Path],
) -> None:
    decoder = make_decoder(*shallow_pair, n_ctx=512)
    fresh = make_decoder(*shallow_pair, n_ctx=512)
    anchor = start(decoder, sampled(0.0), prompt=(PROMPT * 14)[:400])
    go_on(decoder, anchor, 20, drafter_of(decoder, anchor))
    decoder.close_sequence(0)
    texts = []
    for each in (decoder, fresh):
        anchor = start(each, sampled(0.0), prompt=OTHER_PROMPT)
        texts.append(go_on(each, anchor, 40, drafter_of(each, anchor)))
    assert texts[0].tokens == texts[1].tokens
    assert texts[0].n_accepted == texts[1].n_accepted > 0


def test_opening_an_open_sequence_changes_its_sampling_and_keeps_its_cache(
    tiny_llama: Path,
) -> None:
    decoder = make_decoder(tiny_llama)
    plain = generate(decoder, sampled(0.0), 6)
    anchor = start(decoder, sampled(1.0))
    decoder.open_sequence(0, sampled(0.0))
    assert decoder.n_past(0) == len(PROMPT) - 1
    assert go_on(decoder, anchor, 6).tokens == plain.tokens


# ---------------------------------------------------------------- ends


# A llama_decode in front of llama.cpp's: the pass that it was told of fails.
FAILING_SOURCE = """
#include <dlfcn.h>
struct batch { int n_tokens; void * fields[6]; };
static int (*decode)(void *, struct batch);
static int left, code;
void fail(const char * library, int nth_pass, int with_code) {
    decode = dlsym(dlopen(library, RTLD_NOW | RTLD_NOLOAD), "llama_decode");
    left = nth_pass;
    code = with_code;
}
int llama_decode(void * ctx, struct batch batch) {
    return left > 0 && --left == 0 ? code : decode(ctx, batch);
}
"""
FAILING_PASSES = """
import ctypes, json, sys
from pathlib import Path
from test_block_decoder import OTHER_PROMPT, PROMPT, make_decoder, sampled, start
from dspark_edge.errors import DecodeError

maps = open("/proc/self/maps").read().split()
library = next(word for word in maps if "/libllama.so" in word).encode()
fail = lambda nth_pass, code: ctypes.CDLL(None).fail(library, nth_pass, code)
fail(0, 0)
told = []
for path, code in (sys.argv[1], -3), (sys.argv[2], 1), (sys.argv[2], -3):
    decoder = make_decoder(Path(path), n_seq=2)
    anchors = [start(decoder, sampled(0.0), seq_id=seq_id) for seq_id in (0, 1)]
    fail(1, code)
    try:
        decoder.verify([0, 1], [[anchors[0], 1, 2], [anchors[1], 1, 2]])
    except DecodeError as error:
        told.append([str(error), decoder.n_past(0), decoder.n_past(1)])
decoder = make_decoder(Path(sys.argv[3]), n_seq=2)
anchors = [start(decoder, sampled(0.0), seq_id=seq_id) for seq_id in (0, 1)]
fail(2, -3)
wrong, right = decoder.verify([0, 1], [[anchors[0], 1], [anchors[1]]])
told.append([wrong, right, decoder.n_past(0), decoder.n_past(1)])
print(json.dumps(told))
"""


@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="needs LD_PRELOAD and a compiler"
)
def test_a_failed_pass_empties_what_it_may_have_spoilt_and_keeps_what_was_drawn(
    tiny_llama: Path, tiny_lfm2: Path, tiny_mamba: Path, tmp_path: Path
) -> None:
    source, library = tmp_path / "failing.c", tmp_path / "failing.so"
    source.write_text(FAILING_SOURCE)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    run = subprocess.run(
        [sys.executable, "-c", FAILING_PASSES, *map(str, (tiny_llama, tiny_lfm2, tiny_mamba))],
        env=os.environ
        | {
            "LD_PRELOAD": str(library),
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
        },
        check=True,
        capture_output=True,
        text=True,
    )
    *failed, (wrong, right, *n_past) = json.loads(run.stdout.splitlines()[-1])
    n, start_of = len(PROMPT) - 1, "llama.cpp could not evaluate a batch of"
    as_before = "; the sequences are as before"
    # Only a recurrent state is in doubt, and not where llama.cpp says that nothing happened.
    assert failed == [
        [f"{start_of} 6 tokens (code -3){as_before}", n, n],
        [f"{start_of} 6 tokens (code 1, no free cells in the cache){as_before}", n, n],
        [
            f"{start_of} 6 tokens (code -3); sequence 0 had to be emptied; "
            "sequence 1 had to be emptied",
            0,
            0,
        ],
    ]
    # A cache that refuses to be cut is evaluated again, behind a pass whose tokens are drawn.
    wrong, right = _core.Verdict(*wrong), _core.Verdict(*right)
    assert wrong.tokens == right.tokens
    assert (len(right.tokens), right.error) == (1, "")
    assert wrong.error == (
        f"{start_of} {n + 1} tokens (code -3); sequence 0, which had to be evaluated again, "
        "is empty now"
    )
    assert n_past == [0, n + 1]


def test_nothing_behind_an_end_token_is_accepted(tiny_llama: Path) -> None:
    """SCENARIO 9: the bias makes the target end where the draft says so too."""
    decoder = make_decoder(tiny_llama)
    end = decoder.eos_token
    sampling = _core.SamplingConfig(logit_bias=[(end, 1000.0)])
    plain = generate(decoder, sampled(0.0), 3)
    anchor = start(decoder, sampled(0.0))
    decoder.verify([0], [[anchor, *plain.tokens[:2]]])
    n_past = decoder.n_past(0)
    decoder.open_sequence(0, sampling)
    verdict = decoder.verify([0], [[plain.tokens[2], end, end, 65]])[0]
    assert verdict.tokens == [end]
    assert verdict.n_accepted == 0
    assert decoder.n_past(0) == n_past + 1
    decoder.open_sequence(0, sampled(0.0))
    after = go_on(decoder, end, 5)
    fresh = generate(decoder_after(decoder), sampled(0.0), 5, prompt=[*PROMPT, *plain.tokens, end])
    assert_same_text(after, fresh)


def decoder_after(decoder: _core.BlockDecoder) -> _core.BlockDecoder:
    """The same decoder with its sequence emptied: as good as a new one (tested above)."""
    decoder.close_sequence(0)
    return decoder


@pytest.mark.parametrize("short_by", range(7))
def test_the_context_fills_to_its_last_token_and_then_says_so(
    short_by: int, shallow_pair: tuple[Path, Path]
) -> None:
    """SCENARIO 11, for the core's part: prompts of n_ctx-6 .. n_ctx tokens."""
    n_ctx = 64
    decoder = make_decoder(*shallow_pair, n_ctx=n_ctx)
    prompt = (PROMPT * 3)[: n_ctx - short_by]
    anchor = start(decoder, sampled(0.0), prompt=prompt)
    plain = generate(make_decoder(shallow_pair[0]), sampled(0.0), 16, prompt=prompt)
    text = Text()
    while decoder.n_past(0) < n_ctx:
        room = n_ctx - decoder.n_past(0) - 1
        draft = decoder.draft([0], [anchor])[0].tokens[:room]
        with pytest.raises(ContextFullError):
            decoder.verify([0], [[anchor] + [65] * (room + 1)])
        text.add(decoder.verify([0], [[anchor, *draft]])[0])
        anchor = text.tokens[-1]
    assert len(text.tokens) == short_by + 1
    assert_same_text(text, plain)
    decoder.draft([0], [anchor])
    with pytest.raises(ContextFullError) as caught:
        decoder.verify([0], [[anchor]])
    assert str(caught.value) == (
        "sequence 0 holds 64 tokens and 1 more do not fit into the context of 64; "
        "use a larger n_ctx or shorter text"
    )
    with pytest.raises(ContextFullError):
        decoder.prefill(0, [65])
    assert decoder.rewind(0, 40) == 40
    go_on(decoder, prompt[40], 5, drafter_of(decoder, prompt[40]))


def test_all_sequences_fill_their_contexts(shallow_pair: tuple[Path, Path]) -> None:
    decoder = make_decoder(*shallow_pair, n_ctx=32, n_seq=4, max_verify_len=7)
    prompts = [[*PROMPT[:20], 65 + i] for i in range(4)]
    anchors = [
        start(decoder, sampled(0.0), prompt=prompt, seq_id=i) for i, prompt in enumerate(prompts)
    ]
    while decoder.n_past(0) < 32:
        drafts = decoder.draft([0, 1, 2, 3], anchors)
        room = 31 - max(decoder.n_past(i) for i in range(4))
        live = [i for i in range(4) if decoder.n_past(i) < 32]
        verdicts = decoder.verify(
            live, [[anchors[i], *drafts[i].tokens[: max(room, 0)]] for i in live]
        )
        for i, verdict in zip(live, verdicts, strict=True):
            anchors[i] = verdict.tokens[-1]
    assert decoder.n_past(0) == 32


# ---------------------------------------------------------------- life


def test_a_borrowed_llama_gives_the_plain_text_and_lives_on(
    shallow_pair: tuple[Path, Path],
) -> None:
    llama = llama_cpp.Llama(
        str(shallow_pair[0]), n_ctx=128, n_threads=1, n_gpu_layers=0, verbose=False
    )
    decoder = _core.BlockDecoder(
        _core.DecoderConfig(
            target_address=llama_cpp_address(llama),
            drafter_path=str(shallow_pair[1]),
            n_ctx=256,
            n_seq=1,
            n_threads=1,
        )
    )
    plain = generate(make_decoder(shallow_pair[0]), sampled(0.7), 20)
    anchor = start(decoder, sampled(0.7))
    assert_same_text(go_on(decoder, anchor, 20, drafter_of(decoder, anchor)), plain)
    decoder.close()
    assert llama.tokenize(b"the", add_bos=False) == [token_id("the")]
    llama.eval(PROMPT)
    llama.close()


def llama_cpp_address(llama: llama_cpp.Llama) -> int:
    """The llama_model* that a Llama holds."""
    address = llama.model
    return address if isinstance(address, int) else int(address.value)


def test_after_releasing_the_drafter_the_text_goes_on_as_plain(
    shallow_pair: tuple[Path, Path],
) -> None:
    decoder = make_decoder(*shallow_pair)
    plain = generate(decoder, sampled(0.7), 40)
    anchor = start(decoder, sampled(0.7))
    text = go_on(decoder, anchor, 15, drafter_of(decoder, anchor))
    before = decoder.memory_use()
    assert before.drafter_model_bytes > 0
    decoder.release_drafter()
    assert not decoder.has_drafter
    assert decoder.memory_use().drafter_model_bytes == 0
    with pytest.raises(ValueError, match="the drafter is released; call load_drafter first"):
        decoder.draft([0], [text.tokens[-1]])
    rest = go_on(decoder, text.tokens[-1], 15, lambda so_far: [65, 66])
    text.tokens += rest.tokens
    assert_same_text(text, plain)
    decoder.rewind(0, 5)
    decoder.release_drafter()
    decoder.prefill(0, PROMPT[5:-1])
    assert_same_text(go_on(decoder, PROMPT[-1], 20), plain)


@pytest.mark.parametrize("name", TARGETS)
def test_timing_passes_leave_the_open_sequences_as_they_were(
    name: str, request: pytest.FixtureRequest
) -> None:
    decoder = make_decoder(request.getfixturevalue(name), n_seq=2)
    plain = generate(decoder, sampled(1.0), 20)
    anchor = start(decoder, sampled(1.0))
    text = go_on(decoder, anchor, 10, mixed(plain, 4))
    for n_tokens, depth in ((1, 0), (8, 100), (32, 100), (3, 0), (16, 240)):
        assert decoder.time_step(n_tokens, depth) > 0
    rest = go_on(decoder, text.tokens[-1], 10)
    text.tokens += rest.tokens
    assert_same_text(text, plain)
    start(decoder, sampled(1.0), seq_id=1)
    assert_same_text(go_on(decoder, anchor, 20, seq_id=1), plain)


def test_timing_drafts_leaves_the_sequences_as_they_were(shallow_pair: tuple[Path, Path]) -> None:
    decoder = make_decoder(*shallow_pair, n_seq=2)
    fresh = make_decoder(*shallow_pair, n_seq=2)
    assert decoder.time_draft(1) > 0
    assert decoder.time_step(5, 50) > 0
    assert decoder.time_draft(2) > 0
    texts = []
    for each in (decoder, fresh):
        anchor = start(each, sampled(0.0))
        texts.append(go_on(each, anchor, 30, drafter_of(each, anchor)))
    assert texts[0].tokens == texts[1].tokens
    assert texts[0].n_accepted == texts[1].n_accepted


def test_decode_time_is_counted(tiny_llama: Path) -> None:
    decoder = make_decoder(tiny_llama)
    assert decoder.decode_s == 0.0
    generate(decoder, sampled(0.0), 4)
    assert 0.0 < decoder.decode_s < 60.0


def test_a_decoder_says_what_it_holds(tiny_llama: Path, tiny_drafter: Path) -> None:
    decoder = make_decoder(tiny_llama, tiny_drafter, n_seq=3, n_ctx=100)
    assert (decoder.n_ctx, decoder.n_seq, decoder.n_batch) == (100, 3, 64)
    assert (decoder.max_verify_len, decoder.n_vocab, decoder.n_ctx_train) == (7, 320, 4096)
    assert (decoder.block_size, decoder.n_draft, decoder.has_confidence) == (4, 4, True)
    assert decoder.eog_tokens == [token_id("<|eos|>"), token_id("<|end|>")]
    assert decoder.bos_token == token_id("<|bos|>")
    assert decoder.no_roll_back_reason == ""
    assert decoder.metadata("general.name") == "tiny llama"
    assert decoder.metadata("no.such.key") == ""
    assert decoder.tokenize("the", add_special=False) == [token_id("the")]
    assert decoder.tokenize("<|end|>") == [token_id("<|bos|>"), token_id("<|end|>")]
    assert decoder.token_bytes(token_id("<|end|>")) == b""
    assert decoder.token_bytes(token_id("<|end|>"), special=True) == b"<|end|>"
    assert decoder.token_bytes(0xC3) == b"\xc3"
