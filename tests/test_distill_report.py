"""The page about a finished drafter: its figures, its picture, and what it says of more data."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from dspark_edge.distill import trial as trial_module
from dspark_edge.distill.chart import Panel, Series, svg
from dspark_edge.distill.evaluate import Acceptance
from dspark_edge.distill.outlook import outlook
from dspark_edge.distill.parity import Parity
from dspark_edge.distill.report import Facts, markdown, picture, verdict, write_report
from dspark_edge.distill.settings import Shape
from dspark_edge.distill.train import Point
from dspark_edge.distill.trial import Calibrated, SetSpeed, Speed, Trial
from dspark_edge.lookup_cache import LookupTexts
from dspark_edge.reliability import Judgement, reliability

NAME = "{http://www.w3.org/2000/svg}"


def curve_of(taus: list[float]) -> list[Point]:
    """Points at 1000, 2000, 4000 ... anchors."""
    return [
        Point(60.0 * i, 1000 * 2**i, 4.0 - 0.2 * i, 0.9 - 0.05 * i, 0.6, tau, tau - 0.1)
        for i, tau in enumerate(taus)
    ]


TEN = Speed(100, 10.0)
CURVE = curve_of([1.0, 1.0, 1.1, 1.3, 1.4, 1.5, 1.6, 1.7])


def judgement(estimate: float) -> Judgement:
    """Half of 40 outcomes came true in each of two positions."""
    each = reliability([estimate] * 40, [True, False] * 20)
    return Judgement(survival=each, by_position=[each, each])


def facts_in(folder: Path, trial: Trial, curve: list[Point]) -> Facts:
    drafter = folder / "a model-dspark.gguf"
    drafter.write_bytes(b"x" * 2_000_000)
    return Facts(
        target_name="model",
        target_file="model.gguf",
        target_hash="abc",
        drafter=drafter,
        shape=Shape(
            n_vocab=300,
            n_embd=64,
            n_layer=2,
            n_head=4,
            n_head_kv=2,
            head_dim=16,
            n_ff=96,
            rank=8,
            block_size=2,
            taps=(1, 2),
            eps=1e-5,
            rope_base=1e4,
            mask_token=3,
        ),
        kind="q8_0",
        n_sequences=9,
        n_tokens=900,
        n_draft=200,
        covered=0.98,
        n_anchors=curve[-1].n_anchors,
        data_s=60.0,
        trained_s=120.0,
        curve=curve,
        acceptance=Acceptance([0.5, 0.4], [0.45, 0.35], 1.7, 1.6, 500),
        parity=Parity(8, 0.01, 0.001, 0),
        looked_up=LookupTexts(np.arange(7, dtype=np.int32), np.array([3, 4], np.int32)),
        trial=trial,
    )


# ---------------------------------------------------------------- what more data would bring


def test_a_straight_curve_goes_on_as_it_was() -> None:
    found = outlook(CURVE)
    assert found is not None
    assert (found.n_points, found.from_anchors, found.n_anchors) == (4, 16_000, 128_000)
    assert found.slope == pytest.approx(0.1)
    assert found.slope_error == pytest.approx(0.0, abs=1e-9)
    assert found.gained_at(512_000) == pytest.approx((0.9, 0.0), abs=1e-9)


def test_errors_are_those_of_least_squares_and_grow_with_the_distance() -> None:
    """Residuals of a line through 0.4, 0.6, 0.5, 0.7 worked out by hand: slope 0.08, rest 0.018."""
    found = outlook(curve_of([1.0, 1.0, 1.0, 1.0, 1.4, 1.6, 1.5, 1.7]))
    assert found is not None
    assert found.slope == pytest.approx(0.08)
    assert found.slope_error == pytest.approx((0.018 / 2 / 5) ** 0.5)
    now, later = found.gained_at(128_000), found.gained_at(1_024_000)
    assert now == pytest.approx((0.67, (0.009 / 4 + 0.009 / 5 * 1.5**2) ** 0.5))
    assert later == pytest.approx((0.91, (0.009 / 4 + 0.009 / 5 * 4.5**2) ** 0.5))


def test_few_points_or_points_of_one_place_say_nothing() -> None:
    assert outlook([]) is None
    assert outlook(curve_of([1.0, 1.1, 1.2, 1.3, 1.4, 1.5])) is None
    assert outlook([CURVE[-1]] * 8) is None


# ---------------------------------------------------------------- the picture


def test_losses_fall_and_tau_rises_in_the_picture(tmp_path: Path) -> None:
    root = ElementTree.fromstring(picture(CURVE))
    assert root.tag == f"{NAME}svg"
    lines = [
        [tuple(map(float, pair.split(","))) for pair in (line.get("points") or "").split()]
        for line in root.iter(f"{NAME}polyline")
    ]
    assert [len(line) for line in lines] == [8, 8, 8, 8, 8, 2]
    cross_entropy, variation, _, greedy, _, extrapolated = lines
    for line in lines:
        assert [x for x, _ in line] == sorted({x for x, _ in line})
    steps = [b[0] - a[0] for a, b in pairwise(greedy)]
    assert steps == pytest.approx([steps[0]] * 7, abs=0.11)  # doublings: the axis is logarithmic
    assert cross_entropy[0][1] < cross_entropy[-1][1]  # down the page
    assert variation[0][1] < variation[-1][1]
    assert greedy[0][1] > greedy[-1][1] > extrapolated[-1][1]
    texts = [text for element in root.iter(f"{NAME}text") for text in element.itertext()]
    assert {"Held-out tau", "anchors seen", "extrapolated", "1k", "100k"} <= set(texts)


@pytest.mark.parametrize("points", [[(5.0, 1.0)], [(1.0, 0.0), (1e9, 0.0)], [(2.0, -1.0), (3, 1)]])
def test_any_curve_can_be_drawn(points: list[tuple[float, float]]) -> None:
    """One point, a flat line, a narrow axis: none may divide by an empty range."""
    panel = Panel(title="a < b & c", x_label="x", series=[Series(name="s", points=points)])
    root = ElementTree.fromstring(svg([panel]))
    (line,) = root.iter(f"{NAME}polyline")
    for pair in (line.get("points") or "").split():
        x, y = map(float, pair.split(","))
        assert 0.0 <= x <= 300.0
        assert 0.0 <= y <= 240.0


# ---------------------------------------------------------------- the page


def test_the_page_tells_speed_by_set_and_calibration_by_position(tmp_path: Path) -> None:
    sets = [
        SetSpeed("chat", 2, TEN, Speed(110, 10.0), Speed(100, 5.0), Speed(90, 10.0), 1.5),
        SetSpeed("code", 1, TEN, Speed(110, 10.0), Speed(50, 10.0), Speed(90, 10.0), 3.0),
    ]
    calibrated = Calibrated(tmp_path / "c.json", judgement(0.75), judgement(0.5))
    facts = facts_in(tmp_path, Trial(calibrated, sets), CURVE)
    page = write_report(facts)
    text = page.read_text()
    assert "| chat | 2 | 10.0 | 11.0 | 20.0 | 2.00 | 9.0 | 1.50 |" in text
    assert "| code | 1 | 10.0 | 11.0 | 5.0 | 0.50 | 9.0 | 3.00 |" in text
    assert "| all | 3 | 10.0 | 11.0 | 10.0 | 1.00 | 9.0 | 2.00 |" in text
    assert "| all | 40 | 25.0 | 0.0 |" in text
    assert "| 2 | 40 | 25.0 | 0.0 |" in text
    assert "Not worth using here: 1.00 times" in text
    assert "On model.gguf, in tokens per second." in text
    assert "| 8 blocks, same tokens; largest difference" in text
    assert "each doubling gave 0.100 (standard error 0.000)" in text
    assert "an extrapolation" in text
    assert "| 4 times the anchors | 0.900 | 0.000 |" in text
    assert "| 2 | 0.400 | 0.350 |" in text
    assert "![the training curve](a%20model-dspark.svg)" in text
    assert "| lookup cache | a model-dspark.lookup.npz: 7 tokens in 2 of the replies" in text
    assert page.with_suffix(".svg").read_text() == picture(CURVE)


def test_a_drafter_that_learns_its_text_by_heart_is_told_so(tmp_path: Path) -> None:
    taus = [1.0, 1.3, 1.5, 1.62, 1.7, 1.69]
    page = markdown(facts_in(tmp_path, Trial(), curve_of(taus)))
    assert "| training | 32000 anchors in 2.0 minutes, 35.6 for each reply token |" in page
    assert "by heart" not in page  # a curve wavers by so much
    taus[-1] = 1.67
    page = markdown(facts_in(tmp_path, Trial(), curve_of(taus)))
    assert "best, 1.700, after 16000 anchors (17.8 for each reply token), and is 1.670 now" in page
    curve = curve_of(taus)
    curve[-1].sampled_tau = 1.65  # the loss has turned to that
    assert "by heart" not in markdown(facts_in(tmp_path, Trial(), curve))


def test_ties_are_told_with_the_tokens(tmp_path: Path) -> None:
    facts = facts_in(tmp_path, Trial(), CURVE)
    facts.parity = Parity(8, 0.01, 0.001, 2)
    assert "8 blocks, same tokens but from 2 ties on; largest" in markdown(facts)


def test_what_was_not_found_out_is_said(tmp_path: Path) -> None:
    trial = Trial(notices=[trial_module.TOO_LATE])
    facts = facts_in(tmp_path, trial, CURVE[:3])
    facts.looked_up = "none, as it would hold secrets"
    text = markdown(facts)
    assert "| lookup cache | none, as it would hold secrets |" in text
    assert "Speed was not measured: too little time was left." in text
    assert "None; the runtime learns while it runs." in text
    assert f"Note: {trial_module.TOO_LATE}" in text
    assert "too few points" in text
    assert "extrapolat" not in text


@pytest.mark.parametrize(
    ("lookup", "auto", "said"),
    [
        (TEN, Speed(104, 10.0), "Worth using here: 1.04 times as fast"),
        (TEN, Speed(102, 10.0), "Not worth using here: 1.02 times the speed"),
        (Speed(90, 10.0), Speed(102, 10.0), "Not worth using here: 1.02 times the speed"),
        (Speed(120, 10.0), Speed(122, 10.0), "Not worth using here: 1.22 times the speed"),
        (Speed(120, 10.0), Speed(130, 10.0), "Worth using here: 1.30 times as fast"),
        (TEN, Speed(), "Speed was not measured"),
        (Speed(), TEN, "Speed was not measured"),
    ],
)
def test_the_verdict_is_what_the_drafter_itself_brings(
    lookup: Speed, auto: Speed, said: str
) -> None:
    sets = [SetSpeed("chat", 1, TEN, lookup, auto)]
    assert verdict(Trial(sets=sets)).startswith(said)


def test_a_page_that_cannot_be_written_names_the_drafter_that_is_there(tmp_path: Path) -> None:
    facts = facts_in(tmp_path, Trial(), CURVE)
    facts.drafter.with_suffix(".svg").mkdir()
    with pytest.raises(OSError, match=r"svg cannot be written; the drafter itself is .*gguf"):
        write_report(facts)
