"""bench explain: what the table says of a small run, by hand; the plot; the missing extra."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
from synthetic_trace import header, one_round, recording

from dspark_edge.bench import explain_plot
from dspark_edge.bench.__main__ import main
from dspark_edge.bench.explain import explain, summary
from dspark_edge.cost import CostTable
from dspark_edge.errors import DsparkError
from dspark_edge.trace import Trace, TraceBlock, TraceEvent, TraceRound, TraceSequence, TraceWriter

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Drawn: TypeAlias = "Callable[[Trace], tuple[Axes, Axes]]"


def drafted_round(
    n: int, position: int, emitted: list[int], verify_len: int, *, state: str
) -> TraceRound:
    """A round that verified the first verify_len of the block 1, 2, 3, 4."""
    block = TraceBlock(proposer="drafter", tokens=[1, 2, 3, 4])
    line = one_round(n, position, emitted, [block])
    line.state, line.batch_tokens, line.predicted_s = state, 1 + verify_len, 0.0123
    sequence = line.sequences[0]
    sequence.verify_len, sequence.n_accepted = verify_len, len(emitted) - 1
    sequence.proposer = "drafter" if verify_len else None
    return line


def run() -> Trace:
    """Three rounds over the text 1 2 9 | 1 | 1 2 3 4 7: the second one is parked."""
    rounds = [
        drafted_round(0, 10, [1, 2, 9], 3, state="drafting: on trial (1 of 8 drafts)"),
        drafted_round(1, 13, [1], 0, state="parked: drafting promises 0.80x"),
        drafted_round(2, 14, [1, 2, 3, 4, 7], 4, state="drafting: promises 1.2x"),
        drafted_round(3, 19, [8], 4, state="drafting: promises 1.1x"),
    ]
    events = [TraceEvent(event="pressure", t_s=0.015, text="RAM is short")]
    cost = CostTable(verify={0: {1: 0.009, 8: 0.02}}, draft={1: 0.003}, other_s=0.0003)
    made = header(4, "auto")
    made.cost = cost.to_json()
    return Trace(header=made, rounds=rounds, events=events)


def saved(trace: Trace, path: Path) -> str:
    with TraceWriter(path) as writer:
        for line in (trace.header, *trace.rounds, *trace.events):
            writer.write(line)
    return str(path)


def test_tokens_rounds_and_tau_are_counted() -> None:
    report = summary(run())
    assert (report["n_rounds"], report["n_tokens"], report["tau"]) == (4, 10, 2.5)
    assert report["tps"] == pytest.approx(10 / (4 * 0.0123))
    assert report["time_shares"]["verify_s"] == pytest.approx(0.009 / 0.0123)


def test_a_state_change_has_its_reason_and_new_numbers_are_none() -> None:
    states = summary(run())["states"]
    assert [(s["state"], s["round"], s["n_rounds"], s["n_tokens"]) for s in states] == [
        ("drafting", 0, 1, 3),
        ("parked", 1, 1, 1),
        ("drafting", 2, 2, 6),
    ]
    assert states[1]["reason"] == "drafting promises 0.80x"


def test_block_use_counts_each_length_with_what_was_accepted_of_it() -> None:
    assert summary(run())["block_use"] == [
        {"proposer": None, "verify_len": 0, "n_rounds": 1, "n_accepted": 0.0},
        {"proposer": "drafter", "verify_len": 3, "n_rounds": 1, "n_accepted": 2.0},
        {"proposer": "drafter", "verify_len": 4, "n_rounds": 2, "n_accepted": 2.0},
    ]


def test_acceptance_by_position_is_read_from_the_text_also_where_nothing_was_verified() -> None:
    # Block by block: 1 2 right then 9; 1 right then 1; all four right; 8 at once.
    assert summary(run())["acceptance_by_position"] == {"drafter": [(3, 4), (2, 3), (1, 2), (1, 1)]}


def test_a_block_that_reaches_beyond_the_text_counts_as_far_as_it_was_seen() -> None:
    line = one_round(0, 10, [1], [TraceBlock(proposer="lookup", tokens=[1, 2], match_len=3)])
    report = summary(Trace(header=header(), rounds=[line], events=[]))
    assert report["acceptance_by_position"] == {"lookup": [(1, 1)]}


def test_the_median_error_of_the_predicted_round_time() -> None:
    trace = run()
    for line, factor in zip(trace.rounds, (1.0, 1.1, 0.7, 1.2), strict=True):
        line.predicted_s = factor * line.measured_s
    prediction = summary(trace)["prediction"]
    assert prediction["median_error"] == pytest.approx(0.15)
    assert prediction["by_batch_tokens"]["5"]["median_error"] == pytest.approx(0.25)


def test_a_trace_without_predictions_says_none() -> None:
    assert summary(recording(n_texts=1, n_tokens=5))["prediction"] is None


def test_requests_in_the_same_round_are_counted_each() -> None:
    trace = run()
    trace.rounds[0].sequences.append(TraceSequence(request=1, position=5, emitted=[4]))
    report = summary(trace)
    assert (report["n_requests"], report["n_tokens"], report["tau"]) == (2, 11, 2.2)


def test_alternatives_are_weighed_by_what_they_promised_and_what_came_of_it() -> None:
    trace = run()
    plain, without = (1, 1.0, 0.010), (1, 1.0, 0.010)
    trace.rounds[0].alternatives = [plain, without, (4, 3.0, 0.012)]  # gives 3 in 0.0123 s
    trace.rounds[1].alternatives = [plain, without]  # gives 1
    trace.rounds[2].alternatives = [plain, (5, 2.0, 0.016), (5, 1.0, 0.013)]  # gives 5
    plain_rate, without_rate, drafter_rate = summary(trace)["alternatives"]
    assert plain_rate == {
        "name": "nothing verified",
        "n_rounds": 3,
        "n_best": 1,
        "promised_tps": pytest.approx(100.0),
        "promised_tps_when_best": pytest.approx(100.0),
        "given_tps_when_best": pytest.approx(1 / 0.0123),
    }
    assert (without_rate["n_rounds"], without_rate["n_best"]) == (3, 1)
    assert without_rate["promised_tps"] == pytest.approx(4.0 / 0.036)
    assert without_rate["promised_tps_when_best"] == pytest.approx(125.0)
    assert without_rate["given_tps_when_best"] == pytest.approx(5 / 0.0123)
    assert (drafter_rate["n_rounds"], drafter_rate["n_best"]) == (2, 1)
    assert drafter_rate["promised_tps_when_best"] == pytest.approx(250.0)
    assert drafter_rate["given_tps_when_best"] == pytest.approx(3 / 0.0123)


def test_what_was_never_the_best_has_no_rates_of_its_own() -> None:
    trace = run()
    trace.rounds[0].alternatives = [(1, 1.0, 0.010), (4, 0.0, 0.0)]  # no plan takes no time
    assert summary(trace)["alternatives"] == []
    trace.rounds[1].alternatives = [(1, 1.0, 0.010), (4, 1.0, 0.020)]
    assert summary(trace)["alternatives"][1]["given_tps_when_best"] is None


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("variables", "shown"),
    [
        ({"TERM": "xterm"}, "\x1b[32m       2.00\x1b[0m\x1b[31m       1.00\x1b[0m"),
        (
            {"TERM": "xterm", "NO_COLOR": "1"},
            "drafter               3        1       2.00       1.00",
        ),
        ({"TERM": "dumb"}, "drafter               3        1       2.00       1.00"),
    ],
)
def test_accepted_and_rejected_tokens_are_coloured_on_a_terminal(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    shown: str,
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(["explain", saved(run(), tmp_path / "t")]) == 0
    assert shown in terminal.getvalue()
    assert ("\x1b" in terminal.getvalue()) == ("\x1b" in shown)


def test_the_table_names_states_events_and_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = run()
    trace.rounds[0].alternatives = [(1, 1.0, 0.010), (1, 1.0, 0.010), (4, 3.0, 0.012)]
    assert main(["explain", saved(trace, tmp_path / "t")]) == 0
    table = capsys.readouterr().err
    for part in (
        "4 rounds, 10 tokens",
        "parked: drafting promises 0.80x",
        "pressure: RAM is short",
        "drafter               3        1       2.00       1.00",
        "best with drafter           1       250.0          1     250.0   243.9",
        "75% of 4  67% of 3  50% of 2  100% of 1",
        "median error 0.0% of 4 rounds",
    ):
        assert part in table


def test_a_trace_without_rounds_says_what_to_do(tmp_path: Path) -> None:
    empty = Trace(header=header(), rounds=[], events=[])
    args = argparse.Namespace(trace=saved(empty, tmp_path / "t"), plot=None)
    with pytest.raises(ValueError, match="holds no rounds; record a longer run"):
        explain(args)


# ---------------------------------------------------------------- the plot


@pytest.fixture
def axes() -> Drawn:
    """Block use and costs, as they are drawn of a trace."""
    pytest.importorskip("matplotlib")

    def draw(trace: Trace) -> tuple[Axes, Axes]:
        over_time, costs = explain_plot.draw(trace).axes
        return over_time, costs

    return draw


def hex_of(artist: Any) -> str:
    from matplotlib.colors import to_hex

    return to_hex(artist.get_facecolor())


def test_the_bars_are_the_bonus_accepted_and_rejected_tokens_of_each_round(axes: Drawn) -> None:
    over_time, _ = axes(run())
    bars = {stack.get_label(): list(stack) for stack in over_time.containers}
    assert {name: [bar.get_height() for bar in own] for name, own in bars.items()} == {
        "bonus": [1, 1, 1, 1],
        "accepted": [2, 0, 4, 0],
        "rejected": [1, 0, 0, 4],
    }
    assert [bar.get_y() for bar in bars["rejected"]] == [3, 1, 5, 1]
    assert {name: {hex_of(bar) for bar in own} for name, own in bars.items()} == {
        "bonus": {explain_plot.BONUS},
        "accepted": {explain_plot.ACCEPTED},
        "rejected": {explain_plot.REJECTED},
    }
    for own in bars.values():
        assert [bar.get_x() for bar in own] == [0.0, 0.01, 0.02, 0.03]


def test_a_parked_stretch_is_shaded_and_an_event_is_a_line_with_its_text(axes: Drawn) -> None:
    over_time, _ = axes(run())
    bars = [bar for stack in over_time.containers for bar in stack]
    (shade,) = (patch for patch in over_time.patches if patch not in bars)
    assert (shade.get_x(), shade.get_x() + shade.get_width()) == (0.01, 0.02)
    (event,) = over_time.lines
    assert list(event.get_xdata()) == [0.015, 0.015]
    assert event.get_color() == explain_plot.EVENT
    assert [text.get_text() for text in over_time.texts] == ["RAM is short"]


def test_the_cost_curve_and_the_rounds_are_both_time_inside_llama_cpp(axes: Drawn) -> None:
    trace = run()
    for line, pass_s in zip(trace.rounds, (0.0085, 0.007, 0.006, 0.008), strict=True):
        line.pass_s = pass_s
    _, costs = axes(trace)
    (curve,) = costs.lines
    assert list(curve.get_xdata()) == list(range(1, 9))
    assert list(curve.get_ydata())[::7] == pytest.approx([9.0, 20.0])
    (rounds,) = costs.collections
    points = {b: ms for b, ms in rounds.get_offsets().tolist()}
    assert points == pytest.approx({4: 8.5, 1: 7.0, 5: 7.0})
    areas = dict(zip(points, rounds.get_sizes().tolist(), strict=True))
    assert areas == {4: 20 + 150, 1: 20 + 150, 5: 20 + 300}
    legend = [text.get_text() for text in costs.get_legend().get_texts()]
    assert legend == [
        "cost table at the start, depth 12",
        "median of rounds; area: how often chosen",
    ]


def test_rounds_of_an_older_trace_are_said_to_have_draws_in_them(axes: Drawn) -> None:
    _, costs = axes(run())
    (rounds,) = costs.collections
    assert rounds.get_offsets()[:, 1].tolist() == pytest.approx([9.0, 9.0, 9.0])
    assert "median of rounds, with draws" in costs.get_legend().get_texts()[1].get_text()


def test_the_plot_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plot.png"
    assert main(["explain", saved(run(), tmp_path / "t"), "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_plot_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    args = argparse.Namespace(trace=saved(run(), tmp_path / "t"), plot=str(tmp_path / "p.png"))
    with pytest.raises(DsparkError, match=r"pip install 'dspark-edge\[plot\]'"):
        explain(args)
