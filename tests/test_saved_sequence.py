"""Sequences as bytes: what goes on after a restore is what would have gone on without it.

On tiny models. A blob that is cut off, damaged or of other models must be an error: llama.cpp would
abort on some of them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import pytest
from test_block_decoder import PROMPT, TARGETS, make_decoder
from tiny_models import DrafterSpec, TargetSpec, write_drafter, write_lfm2, write_llama

from dspark_edge import _core
from dspark_edge.errors import DecodeError
from dspark_edge.models.memory_estimate import PENDING_ROWS

SHALLOW = TargetSpec(layer_gain=0.1)  # a mimic is often right about it
N_BEFORE, N_AFTER = 20, 60  # tokens emitted before and after the save
GREEDY = _core.SamplingConfig()
CHECKSUM_AT, CHECKED_FROM = 16, 24  # csrc/saved_sequence.cpp: Header
BUILD_AT, COUNTS_AT, HEADER_BYTES = 24, 56, 112
N_TOKENS, N_INJECTED, N_PENDING = (COUNTS_AT + 8 * i for i in (2, 3, 4))

Rounds = list[tuple[list[int], list[int]]]  # per round: what was drafted, what was emitted


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("shallow") / "shallow.gguf", SHALLOW)


@pytest.fixture(scope="module")
def mimic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = DrafterSpec(target=SHALLOW, mimic=True)
    return write_drafter(tmp_path_factory.mktemp("mimic") / "mimic.gguf", spec)


@pytest.fixture(scope="module")
def blob(shallow: Path, mimic: Path) -> bytes:
    return saved_and_continued(shallow, mimic, GREEDY)[0]


def begin(
    decoder: _core.BlockDecoder, sampling: _core.SamplingConfig, seq_id: int = 0
) -> list[int]:
    decoder.open_sequence(seq_id, sampling)
    decoder.prefill(seq_id, PROMPT[:-1])
    return PROMPT[:]


def emit(decoder: _core.BlockDecoder, tokens: list[int], n: int, seq_id: int = 0) -> Rounds:
    """Goes on from tokens, whose last is the anchor, until n more are there."""
    rounds: Rounds = []
    end = len(tokens) + n
    while len(tokens) < end:
        drafted: list[int] = []
        if decoder.has_drafter:
            drafted = decoder.draft([seq_id], [tokens[-1]])[0].tokens
        verdict = decoder.verify([seq_id], [[tokens[-1], *drafted]])[0]
        tokens += verdict.tokens
        rounds.append((drafted, verdict.tokens))
    return rounds


def saved_and_continued(
    target: Path, drafter: Path | None, sampling: _core.SamplingConfig, n_undrafted: int = 0
) -> tuple[bytes, list[int], Rounds]:
    """A blob, the tokens with the anchor at that moment, and how the same decoder went on.

    n_undrafted: rounds without a draft before the save, whose features then wait.
    """
    decoder = make_decoder(target, drafter)
    tokens = begin(decoder, sampling)
    emit(decoder, tokens, N_BEFORE)
    for _ in range(n_undrafted):
        tokens += decoder.verify([0], [[tokens[-1]]])[0].tokens
    blob = decoder.save_sequence(0)
    at_save = tokens[:]
    return blob, at_save, emit(decoder, tokens, N_AFTER)


def sealed(blob: bytes | bytearray) -> bytes:
    """The blob with the checksum that belongs to it, computed as saved_sequence.cpp does."""
    content = bytes(blob[CHECKED_FROM:])
    total = len(content)
    for (word,) in struct.iter_unpack("<Q", content + bytes(-len(content) % 8)):
        total = (total ^ word) * 0x9E3779B97F4A7C15 % 2**64
        total ^= total >> 32
    return bytes(blob[:CHECKSUM_AT]) + struct.pack("<Q", total) + content


def changed(blob: bytes, at: int, content: bytes) -> bytes:
    return sealed(blob[:at] + content + blob[at + len(content) :])


def refusal(decoder: _core.BlockDecoder, blob: bytes) -> str:
    """Why a blob is refused with ValueError; what the sequence holds stays as it was."""
    n_past = decoder.n_past(0)
    with pytest.raises(ValueError, match=r"the saved sequence|token id") as caught:
        decoder.restore_sequence(0, blob)
    assert decoder.n_past(0) == n_past
    return str(caught.value)


# ---------------------------------------------------------------- going on


@pytest.mark.parametrize("n_undrafted", [0, 30])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_restored_sequence_drafts_and_emits_as_if_it_had_never_stopped(
    shallow: Path, mimic: Path, temperature: float, n_undrafted: int
) -> None:
    sampling = _core.SamplingConfig(temperature=temperature, seed=7)
    blob, tokens, expected = saved_and_continued(shallow, mimic, sampling, n_undrafted)
    decoder = make_decoder(shallow, mimic, n_seq=2, n_ctx=200)
    decoder.open_sequence(1, sampling)
    assert decoder.restore_sequence(1, blob) == tokens[:-1]
    assert decoder.n_past(1) == len(tokens) - 1
    assert emit(decoder, tokens, N_AFTER, seq_id=1) == expected
    assert sum(len(emitted) - 1 for _, emitted in expected) >= N_AFTER // 10  # drafts were accepted


@pytest.mark.parametrize(
    "spec",
    [
        DrafterSpec(target=SHALLOW, mimic=True, sliding_window=6),
        DrafterSpec(target=SHALLOW, confidence=False, draft_vocab=100),
        DrafterSpec(target=SHALLOW, markov_rank=None, confidence=False, target_layers=(3,)),
    ],
    ids=["sliding window", "reduced vocabulary", "dflash"],
)
def test_every_kind_of_drafter_goes_on(shallow: Path, spec: DrafterSpec, tmp_path: Path) -> None:
    drafter = write_drafter(tmp_path / "drafter.gguf", spec)
    blob, tokens, expected = saved_and_continued(shallow, drafter, GREEDY)
    decoder = make_decoder(shallow, drafter)
    decoder.open_sequence(0, GREEDY)
    decoder.restore_sequence(0, blob)
    assert emit(decoder, tokens, N_AFTER) == expected


@pytest.mark.parametrize("target", TARGETS)
def test_every_kind_of_target_goes_on(target: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(target)
    sampling = _core.SamplingConfig(temperature=0.7, seed=3)
    blob, tokens, expected = saved_and_continued(path, None, sampling)
    decoder = make_decoder(path)
    decoder.open_sequence(0, sampling)
    assert decoder.restore_sequence(0, blob) == tokens[:-1]
    assert emit(decoder, tokens, N_AFTER) == expected


def test_a_recurrent_pair_goes_on_with_its_drafts(tmp_path: Path) -> None:
    # Saved in the middle of rollbacks: the state that counts lies in a snapshot then.
    target = write_lfm2(tmp_path / "lfm2.gguf", SHALLOW)
    spec = DrafterSpec(target=SHALLOW, target_layers=(1, 2))
    drafter = write_drafter(tmp_path / "drafter.gguf", spec)
    blob, tokens, expected = saved_and_continued(target, drafter, GREEDY)
    decoder = make_decoder(target, drafter)
    decoder.open_sequence(0, GREEDY)
    decoder.restore_sequence(0, blob)
    # It cannot go back: the snapshots are not saved.
    assert emit(decoder, tokens, N_AFTER) == expected
    decoder.restore_sequence(0, blob)
    assert decoder.rewind(0, decoder.n_past(0) - 1) == 0


def test_a_restored_sequence_can_be_cut_and_continued(shallow: Path, mimic: Path) -> None:
    decoder = make_decoder(shallow, mimic)
    tokens = begin(decoder, GREEDY)
    emit(decoder, tokens, N_BEFORE)
    blob = decoder.save_sequence(0)
    n_keep = len(PROMPT) + 5
    after_cut = tokens[: n_keep + 1]
    assert decoder.rewind(0, n_keep) == n_keep
    expected = emit(decoder, after_cut[:], N_AFTER)
    other = make_decoder(shallow, mimic)
    other.open_sequence(0, GREEDY)
    other.restore_sequence(0, blob)
    assert other.rewind(0, n_keep) == n_keep
    assert emit(other, after_cut[:], N_AFTER) == expected


def test_a_restore_replaces_what_the_sequence_held(shallow: Path, mimic: Path, blob: bytes) -> None:
    expected = saved_and_continued(shallow, mimic, GREEDY)
    decoder = make_decoder(shallow, mimic, n_seq=2)
    for seq_id in (0, 1):
        emit(decoder, begin(decoder, GREEDY, seq_id), 3, seq_id)
    neighbour = decoder.n_past(0)
    decoder.restore_sequence(1, blob)
    assert emit(decoder, expected[1][:], N_AFTER, seq_id=1) == expected[2]
    assert decoder.n_past(0) == neighbour


def test_as_many_features_wait_as_the_memory_plan_counts(shallow: Path, mimic: Path) -> None:
    decoder = make_decoder(shallow, mimic)
    tokens = begin(decoder, GREEDY)
    waiting = []
    for _ in range(140):
        tokens += decoder.verify([0], [[tokens[-1]]])[0].tokens
        n_tokens, n_injected = struct.unpack_from("<2Q", decoder.save_sequence(0), N_TOKENS)
        waiting.append(n_tokens - n_injected)
    assert max(waiting) + 1 == PENDING_ROWS  # the last one comes and half of them go


# ---------------------------------------------------------------- refusals


@pytest.fixture
def decoder(shallow: Path, mimic: Path) -> _core.BlockDecoder:
    decoder = make_decoder(shallow, mimic)
    begin(decoder, GREEDY)
    return decoder


def test_a_blob_cut_off_anywhere_is_refused(decoder: _core.BlockDecoder, blob: bytes) -> None:
    for n_bytes in range(len(blob)):
        with pytest.raises(ValueError, match="the saved sequence"):
            decoder.restore_sequence(0, blob[:n_bytes])
    assert decoder.n_past(0) == len(PROMPT) - 1
    assert "damaged" in refusal(decoder, blob + b"\0")


def test_a_blob_with_any_byte_changed_is_refused(decoder: _core.BlockDecoder, blob: bytes) -> None:
    damaged = bytearray(blob)
    for at in range(len(blob)):
        damaged[at] ^= 1 << (at % 8)
        with pytest.raises(ValueError, match="the saved sequence"):
            decoder.restore_sequence(0, bytes(damaged))
        damaged[at] = blob[at]
    assert decoder.n_past(0) == len(PROMPT) - 1


def test_something_else_is_no_saved_sequence(decoder: _core.BlockDecoder) -> None:
    assert refusal(decoder, b"") == "the saved sequence has 0 bytes, less than its header"
    assert "it is something else" in refusal(decoder, b"GGUF" * 100)


def test_what_is_whole_but_does_not_fit_together_is_refused(
    decoder: _core.BlockDecoder, blob: bytes
) -> None:
    count = struct.Struct("<Q")
    n_injected, n_pending = (count.unpack_from(blob, at)[0] for at in (N_INJECTED, N_PENDING))
    assert sealed(blob) == blob
    assert "llama-cpp-python 9.9.9" in refusal(decoder, changed(blob, BUILD_AT, b"9.9.9\0"))
    assert "another byte order" in refusal(decoder, changed(blob, 8, b"\2\0\0\0"))
    assert "cut off" in refusal(decoder, changed(blob, COUNTS_AT, b"\xff" * 8))
    assert "features of" in refusal(decoder, changed(blob, N_INJECTED, count.pack(n_injected - 1)))
    assert "more tokens of the drafter" in refusal(
        decoder, changed(blob, N_INJECTED, count.pack(2**40))
    )
    id_bytes = sum(count.unpack_from(blob, COUNTS_AT + 8 * i)[0] for i in (0, 1))
    first_token = HEADER_BYTES + id_bytes
    assert "token id is 999999" in refusal(
        decoder, changed(blob, first_token, struct.pack("<i", 999999))
    )
    assert n_pending > 0


def test_a_state_that_llama_cpp_refuses_leaves_the_sequence_empty_and_usable(
    shallow: Path, mimic: Path, blob: bytes
) -> None:
    count = struct.Struct("<Q")
    ids, tokens, n_pending, n_target, n_drafter = (
        sum(count.unpack_from(blob, COUNTS_AT + 8 * i)[0] for i in (0, 1)),
        *(count.unpack_from(blob, COUNTS_AT + 8 * i)[0] for i in (2, 4, 5, 6)),
    )
    target_at = HEADER_BYTES + ids + 4 * tokens + 4 * n_pending
    assert target_at + n_target + n_drafter == len(blob)
    expected = saved_and_continued(shallow, mimic, GREEDY)
    decoder = make_decoder(shallow, mimic)
    for at in (target_at, target_at + 12, target_at + n_target, target_at + n_target + 12):
        begin(decoder, GREEDY)
        with pytest.raises(DecodeError, match="refuses the saved state"):
            decoder.restore_sequence(0, changed(blob, at, b"\x55\x55\x55\x55"))
        assert decoder.n_past(0) == 0
    decoder.restore_sequence(0, blob)
    assert emit(decoder, expected[1][:], N_AFTER) == expected[2]


def with_a_hole(blob: bytes) -> bytes:
    """The blob without the first pending feature: llama.cpp refuses what is put behind a hole."""
    count = struct.Struct("<Q")
    id_bytes = sum(count.unpack_from(blob, COUNTS_AT + 8 * i)[0] for i in (0, 1))
    n_tokens, n_injected, n_pending = struct.unpack_from("<3Q", blob, N_TOKENS)
    n_feature = n_pending // (n_tokens - n_injected)
    pending_at = HEADER_BYTES + id_bytes + 4 * n_tokens
    holed = bytearray(blob[:pending_at] + blob[pending_at + 4 * n_feature :])
    count.pack_into(holed, N_INJECTED, n_injected + 1)
    count.pack_into(holed, N_PENDING, n_pending - n_feature)
    return sealed(holed)


def test_a_drafter_that_cannot_take_a_prompt_does_not_end_its_request(
    shallow: Path, mimic: Path
) -> None:
    blob, tokens, _ = saved_and_continued(shallow, mimic, GREEDY, n_undrafted=30)
    decoder = make_decoder(shallow, mimic)
    decoder.open_sequence(0, GREEDY)
    decoder.restore_sequence(0, with_a_hole(blob))
    with pytest.raises(DecodeError, match="could not inject features"):
        decoder.draft([0], [tokens[-1]])
    prompt = [*tokens[-1:], *PROMPT, *PROMPT, *PROMPT, *PROMPT][:120]
    for begin_at in (0, 60):
        decoder.prefill(0, prompt[begin_at : begin_at + 60], for_drafter=True)
    assert decoder.n_past(0) == len(tokens) - 1 + len(prompt)
    assert decoder.draft([0], [PROMPT[0]])[0].tokens  # from the window: it has begun anew
    plain = make_decoder(shallow)
    plain.open_sequence(0, GREEDY)
    text = [*tokens[:-1], *prompt]
    for begin_at in range(0, len(text), 60):
        plain.prefill(0, text[begin_at : begin_at + 60])
    anchors = [[PROMPT[0]]]
    assert decoder.verify([0], anchors)[0].tokens == plain.verify([0], anchors)[0].tokens


def test_a_sequence_of_another_target_is_refused(mimic: Path, blob: bytes, tmp_path: Path) -> None:
    other = write_llama(tmp_path / "other.gguf", TargetSpec(n_layer=3))
    decoder = make_decoder(other)
    decoder.open_sequence(0, GREEDY)
    assert "is of another target" in refusal(decoder, blob)


def test_files_of_the_same_shape_are_told_apart_by_their_ids(shallow: Path, mimic: Path) -> None:
    def decoder(target_id: str, drafter_id: str) -> _core.BlockDecoder:
        made = _core.BlockDecoder(
            _core.DecoderConfig(
                target_path=str(shallow),
                drafter_path=str(mimic),
                n_ctx=256,
                n_seq=1,
                n_batch=64,
                n_threads=1,
                target_id=target_id,
                drafter_id=drafter_id,
            )
        )
        begin(made, GREEDY)
        return made

    blob = decoder("a 1", "b 2").save_sequence(0)
    assert "file a 1; this one is" in refusal(decoder("a 9", "b 2"), blob)
    assert "is of another drafter" in refusal(decoder("a 1", "b 9"), blob)
    assert decoder("a 1", "b 2").restore_sequence(0, blob) == PROMPT[:-1]


def test_a_drafter_is_not_left_blind(shallow: Path, mimic: Path, blob: bytes) -> None:
    # The target's part alone would be taken with a gap, and acceptance would drop.
    plain, tokens, expected = saved_and_continued(shallow, None, GREEDY)
    decoder = make_decoder(shallow, mimic)
    begin(decoder, GREEDY)
    assert "has no drafter state" in refusal(decoder, plain)
    # Without a drafter the target's part is all that is needed.
    decoder = make_decoder(shallow)
    decoder.open_sequence(0, GREEDY)
    decoder.restore_sequence(0, blob)
    rounds = emit(decoder, tokens[:], N_AFTER)
    assert [t for _, emitted in rounds for t in emitted] == [t for _, e in expected for t in e]


def test_more_tokens_than_the_context_holds_are_refused(
    shallow: Path, mimic: Path, blob: bytes
) -> None:
    decoder = make_decoder(shallow, mimic, n_ctx=40)
    begin(decoder, GREEDY)
    assert "tokens but the context holds 40; use a larger n_ctx" in refusal(decoder, blob)


def test_an_empty_or_closed_sequence_cannot_be_saved(shallow: Path) -> None:
    decoder = make_decoder(shallow)
    with pytest.raises(ValueError, match="sequence 0 is not open"):
        decoder.save_sequence(0)
    decoder.open_sequence(0, GREEDY)
    with pytest.raises(ValueError, match="sequence 0 holds no tokens to save"):
        decoder.save_sequence(0)
    with pytest.raises(ValueError, match="seq_id is 5"):
        decoder.restore_sequence(5, b"")


def test_a_released_drafter_saves_the_targets_part(shallow: Path, mimic: Path) -> None:
    decoder = make_decoder(shallow, mimic)
    begin(decoder, GREEDY)
    decoder.release_drafter()
    tokens: Sequence[int] = PROMPT[:-1]
    plain = make_decoder(shallow)
    plain.open_sequence(0, GREEDY)
    assert plain.restore_sequence(0, decoder.save_sequence(0)) == tokens
