"""bench run and profile: who runs when, what is counted, that another text fails, bad arguments."""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_decoder import END, FakeDecoder, Script, engine_on, letters, oracle, wrong
from scripted_modes import ScriptedModes

from dspark_edge import SamplingParams
from dspark_edge.bench import prompt_sets, run, run_plan, shared
from dspark_edge.bench.__main__ import main
from dspark_edge.bench.block_recorder import read_prompts
from dspark_edge.bench.busy import caveat
from dspark_edge.bench.costs import load_cost
from dspark_edge.bench.measure import GroupRun, Round, run_group
from dspark_edge.bench.modes import parse_modes
from dspark_edge.bench.prompt_sets import in_groups, load_prompt_set
from dspark_edge.bench.ratios import named_ratios, rows
from dspark_edge.bench.summary import Key, pair_ratios, row
from dspark_edge.sequence import Stats

ROW_KEYS = {
    *("mode", "sequences", "prompts", "decode_tps", "ratio_to_plain", "tau", "ttft_s"),
    *("acceptance_by_position", "own_ms_per_round", "peak_rss_bytes", "joules_per_token"),
    *("decode_tps_quartiles", "ratio_quartiles", "ratio_by_group", "speculation"),
}
REPORT_KEYS = {
    *("machine", "target", "drafter", "prompts", "same_text", "modes", "ratios", "differences"),
    *("settings", "notices", "energy_source", "cost", "busy"),
}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "then he said"}\n{"turns": ["on the one hand", "later"]}\n')
    return path


class Bench(ScriptedModes):
    """The command on scripted engines: which were opened, who ran, what came out."""

    def __init__(self, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        super().__init__()
        self.ran: list[tuple[str, int]] = []  # mode, max_tokens
        self._capsys = capsys
        patch.setattr(run, "open_mode", self.open)
        patch.setattr(run, "run_group", self._run_group)

    def _run_group(self, engine: Any, ids: Any, params: Any, meter: Any = None) -> GroupRun:
        self.ran.append((self.name_of(engine), params[0].max_tokens))
        return run_group(engine, ids, params, meter)

    def __call__(self, *arguments: str) -> tuple[int, dict[str, Any], str]:
        code = main(["run", "--no-memory", "--n-ctx", "512", *arguments])
        shown = self._capsys.readouterr()
        return code, json.loads(shown.out) if shown.out else {}, shown.err


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Bench:
    return Bench(monkeypatch, capsys)


# ---------------------------------------------------------------- the whole command


def test_a_tiny_pair_is_measured_in_all_modes(
    tiny_llama: Path,
    tiny_drafter: Path,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, picture = tmp_path / "report.json", tmp_path / "report.png"
    modes = "plain,fixed:2,fixed:max,fixed-lookup:3,lookup,auto"
    code = main(
        f"run --target {tiny_llama} --drafter {tiny_drafter} --prompts {prompts} --modes {modes} "
        f"--max-tokens 8 --repeats 2 --sequences 1,2 --n-ctx 128 --threads 1 --ignore-eos "
        f"--cost-cache {tmp_path} --json {file} --plot {picture}".split()
    )
    out = capsys.readouterr().out
    report = json.loads(out.splitlines()[-1])
    assert code == 0, "the tiny pair gave another text"
    assert report.keys() >= REPORT_KEYS
    assert json.loads(file.read_text()) == report
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert report["prompts"] == {"mine": 2}
    assert report["drafter"] == tiny_drafter.name
    assert [(line["mode"], line["sequences"]) for line in report["modes"]] == [
        (mode, n) for n in (1, 2) for mode in modes.split(",")
    ]
    for line in report["modes"]:
        assert line.keys() >= ROW_KEYS
        assert line["decode_tps"] > 0 < line["ttft_s"]
        assert line["peak_rss_bytes"] > 1e6
    plain, fixed = report["modes"][0], report["modes"][1]
    assert plain["ratio_to_plain"] == plain["tau"] == 1.0
    assert plain["acceptance_by_position"] == []
    assert len(fixed["acceptance_by_position"]) == 2


def test_the_table_names_each_mode(bench: Bench, prompts: Path) -> None:
    _, _, err = bench("--prompts", str(prompts), "--modes", "plain,fixed:3", "--repeats", "1")
    assert "plain" in err
    assert "fixed:3" in err
    assert "same text in all modes" in err


def test_quick_is_short_whatever_the_sets_hold(bench: Bench, monkeypatch: Any) -> None:
    """Twelve prompts and long replies would pass a minute."""
    monkeypatch.setattr(run, "peaks", lambda *_: {("plain", 1): 7, ("fixed:2", 1): 8})
    assert main(["run", "--quick", "--modes", "plain,fixed:2", "--n-ctx", "512"]) == 0
    n_warm_up, n_repeats, n_prompts = 1, 3, 2
    assert bench.ran == [("plain", 32), ("fixed:2", 32)] * (n_warm_up + n_repeats * n_prompts)


def test_quick_leaves_alone_what_was_asked_for(bench: Bench, prompts: Path) -> None:
    """It would be overruled silently."""
    arguments = ["--prompts", str(prompts), "--modes", "plain", "--quick"]
    _, report, _ = bench(*arguments, "--max-tokens", "9", "--max-prompts", "1")
    settings = report["settings"]
    assert (settings["max_tokens"], settings["repeats"], report["prompts"]) == (9, 3, {"mine": 1})


@pytest.mark.parametrize("more", [[], ["--fresh"]])
def test_on_a_slow_machine_quick_has_fewer_repeats(
    more: list[str], bench: Bench, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A minute is promised there too; one repeat there must be."""
    monkeypatch.setattr(run_plan, "QUICK_S", -1.0)
    _, report, err = bench("--quick", "--prompts", str(prompts), "--modes", "plain", *more)
    assert len(report["modes"][0]["decode_tps_by_repeat"]) == 1
    assert "1 of 3 repeats" in err


def test_repeats_end_with_their_time() -> None:
    args = argparse.ArgumentParser()
    run_plan.add_options(args)
    plan = run_plan.make_plan(args.parse_args(["--quick"]))
    times = iter([129.0, 131.0])
    assert list(plan.repeat_numbers(100.0, lambda: next(times))) == [0, 1]
    assert len(list(run_plan.make_plan(args.parse_args([])).repeat_numbers(-1e9))) == 5


def test_a_busy_machine_is_told_under_the_table_and_in_the_report(
    bench: Bench, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else ratios of chance would be read as results."""

    class Busy:
        def share(self) -> float:
            return 0.31

    monkeypatch.setattr(run, "Others", Busy)
    _, report, err = bench("--prompts", str(prompts), "--modes", "plain", "--repeats", "1")
    assert "other programs took 31% of the processors" in report["busy"]
    assert err.rstrip().splitlines()[-1] == caveat(report["busy"])


def test_each_run_waits_for_the_machine_to_cool_down(
    bench: Bench, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("dspark_edge.bench.run.time.sleep", waits.append)
    arguments = ["--modes", "plain,auto", "--repeats", "2", "--cool-down", "1.5"]
    bench("--prompts", str(prompts), *arguments)
    assert waits == [1.5] * (2 * 2 * 2)  # modes, repeats, prompts


class Counter:
    """A meter that counts how often it is read: a joule each time."""

    source = "a counter"
    is_closed = False

    def __init__(self) -> None:
        self._joules = 0.0

    def joules(self) -> float:
        self._joules += 1.0
        return self._joules

    def close(self) -> None:
        self.is_closed = True


def test_energy_is_reported_by_token(
    bench: Bench, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = Counter()
    monkeypatch.setattr(run, "find_meter", lambda: meter)
    arguments = ["--modes", "plain", "--max-tokens", "11", "--repeats", "3", "--ignore-eos"]
    _, report, err = bench("--prompts", str(prompts), *arguments)
    assert report["energy_source"] == "a counter"
    # Read when the clock starts and when it stops: 1 joule for the 10 tokens after the first.
    assert report["modes"][0]["joules_per_token"] == pytest.approx(0.1)
    assert " 0.10 " in err
    assert meter.is_closed


def test_the_plot_has_speeds_costs_and_acceptance(
    bench: Bench, prompts: Path, tmp_path: Path
) -> None:
    """matplotlib notes each text of an SVG beside its outlines."""
    picture = tmp_path / "report.svg"
    arguments = ["--modes", "plain,fixed:2,auto", "--repeats", "2", "--plot", str(picture)]
    bench("--prompts", str(prompts), *arguments)
    drawn = picture.read_text()
    curve = "target pass by cost table, depth 256"
    for text in ("tokens per second", curve, "ms of a round", "share right", "fixed:2", "mine, 1"):
        assert f"<!-- {text} -->" in drawn


def test_a_report_becomes_a_markdown_table(
    bench: Bench, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    arguments = ["--modes", "plain,fixed:2", "--sequences", "1,2", "--repeats", "1"]
    _, report, _ = bench("--prompts", str(prompts), *arguments, "--json", str(file))
    assert main(["tables", str(file)]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| mine")]
    assert [row.split(" | ")[1:4] for row in rows] == [
        [str(line["sequences"]), line["mode"], f"{line['decode_tps']:.1f}"]
        for line in report["modes"]
    ]


def test_a_run_too_short_to_be_clocked_says_so(bench: Bench, prompts: Path) -> None:
    arguments = ["--modes", "plain", "--repeats", "1", "--sequences", "2", "--max-tokens", "2"]
    _, report, err = bench("--prompts", str(prompts), *arguments)
    said = "mine, 2 sequences, plain: a reply ended before all had begun"
    assert said in err
    assert any(said in notice for notice in report["notices"])
    assert report["modes"][0]["decode_tps"] is None


def test_copies_of_one_prompt_side_by_side_are_told(bench: Bench, prompts: Path) -> None:
    """Nobody has the same conversation twice at a time: such a row flatters lookup and caches."""
    arguments = ["--prompts", str(prompts), "--modes", "plain", "--repeats", "1"]
    _, _, err = bench(*arguments, "--sequences", "1,2,4")
    said = "mine has 2 prompt(s), so copies run side by side"
    assert [line for line in err.splitlines() if said in line] == [f"mine, 4 sequence(s): {said}"]


def test_modes_take_turns_at_each_group_and_warm_up_apart(bench: Bench, prompts: Path) -> None:
    """Else a slow minute of the machine hits one mode alone."""
    arguments = ["--modes", "plain,fixed:2,auto", "--max-tokens", "40", "--repeats", "2"]
    bench("--prompts", str(prompts), *arguments)
    warm_up, measured = bench.ran[:3], bench.ran[3:]
    assert warm_up == [(mode, run.WARM_UP_TOKENS) for mode in ("plain", "fixed:2", "auto")]
    # 2 repeats of 2 prompts
    assert measured == 4 * [(mode, 40) for mode in ("plain", "fixed:2", "auto")]


def test_engines_stay_open_unless_fresh_ones_are_asked_for(bench: Bench, prompts: Path) -> None:
    arguments = ["--prompts", str(prompts), "--modes", "plain,auto", "--repeats", "3"]
    bench(*arguments)
    assert bench.opened == ["plain", "auto"]
    bench.opened.clear()
    bench(*arguments, "--fresh")
    assert bench.opened == ["plain", "auto"] * 4  # the first pair warms up


def test_several_sets_are_reported_apart_and_together(
    bench: Bench, prompts: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "a third text"}\n')
    arguments = ["--prompts", str(prompts), "--prompts", str(other), "--repeats", "1"]
    _, report, _ = bench(*arguments, "--modes", "plain,fixed:1")
    assert [(line["prompts"], line["mode"]) for line in report["modes"]] == [
        (name, mode) for name in ("mine", "other", "all") for mode in ("plain", "fixed:1")
    ]
    tokens = [line["n_tokens"] for line in report["modes"] if line["mode"] == "plain"]
    assert tokens[2] == tokens[0] + tokens[1] > 0


# ---------------------------------------------------------------- same text


SECOND = b"on the one hand"  # the second prompt of `prompts`


def off_at(position: int, token: int = ord("!")) -> Script:
    """Says letters, but this token at a position of the reply to SECOND."""
    length = len(SECOND) + position
    return lambda before: (
        token
        if len(before) == length and bytes(before[: len(SECOND)]) == SECOND
        else letters(before)
    )


def test_another_text_fails_and_says_where(bench: Bench, prompts: Path) -> None:
    bench.scripts["auto"] = off_at(5)
    code, report, err = bench("--prompts", str(prompts), "--modes", "plain,auto", "--repeats", "2")
    assert code == 1
    assert report["same_text"] is False
    assert report["is_failed"] is True
    (found,) = report["differences"]
    assert (found["prompts"], found["prompt"], found["position"]) == ("mine", 2, 5)
    assert found["modes"] == ["plain", "auto"]
    assert found["token_ids"][1] == ord("!")
    assert found["n_replies"] == 2
    # The scripted lead of a token is 1 and the length of the text before it.
    assert found["min_margin"] == 1.0 + len(SECOND) + 5
    assert "ANOTHER TEXT: mine prompt 2, 1 sequence(s): auto differs from plain at token 5" in err
    assert "TEXTS DIFFER in 2 replies" in err


def test_a_tie_is_told_but_does_not_fail(bench: Bench, prompts: Path) -> None:
    bench.scripts["auto"] = off_at(5)
    arguments = ["--prompts", str(prompts), "--modes", "plain,auto", "--repeats", "1"]
    code, report, err = bench(*arguments, "--tie", "1000")
    assert code == 0
    assert report["same_text"] is False
    assert report["is_failed"] is False
    assert report["differences"][0]["is_tie"] is True
    assert "a tie: mine prompt 2" in err


def test_a_reply_that_ends_early_is_another_text(bench: Bench, prompts: Path) -> None:
    """Zipping both replies would find them equal."""
    bench.scripts["auto"] = off_at(4, token=END)
    code, report, _ = bench("--prompts", str(prompts), "--modes", "plain,auto", "--repeats", "1")
    assert code == 1
    assert report["differences"][0]["position"] == 4


# ---------------------------------------------------------------- one group


def params(n: int) -> SamplingParams:
    return SamplingParams(max_tokens=n, temperature=0.0, seed=1)


def test_the_clock_runs_while_all_requests_run() -> None:
    """Else evaluating prompts would count as decoding, and a fast reply's end as slowness."""
    engine = engine_on(FakeDecoder(n_seq=2), "off", None)
    result = run_group(engine, [list(b"a first one"), list(b"the second")], [params(6)] * 2)
    assert [len(reply) for reply in result.replies] == [6, 6]
    # The second prompt is evaluated a step later: by then the first reply has two tokens.
    # The first ends when the second has one token to go.
    assert result.n_tokens == 4 + 4
    assert [each.batch_tokens for each in result.rounds] == [2, 2, 2, 2]


@pytest.mark.parametrize(("drafter", "n_right"), [(oracle(letters), 4), (wrong(letters), 0)])
def test_acceptance_counts_what_was_judged(drafter: Any, n_right: int) -> None:
    engine = engine_on(FakeDecoder(drafter=drafter, n_draft=4), "always")
    result = run_group(engine, [list(b"a prompt")], [params(11)])
    n_whole = 2 if n_right else 10  # rounds with room for at least one draft token
    if n_right:
        assert result.positions == [[n_whole, n_whole]] * 4
    else:
        assert result.positions == [[0, n_whole], *([[0, 0]] * 3)]


def test_no_prompt_is_reused_from_an_earlier_run() -> None:
    """Else the time to the first token of a repeat would be that of a cached prompt."""
    engine = engine_on(FakeDecoder(n_seq=2), "off", None)
    prompts = [list(b"a first prompt"), list(b"a second one")]
    for _ in range(2):
        result = run_group(engine, prompts, [params(4)] * 2)
        assert [stats.n_reused for stats in result.stats] == [0, 0]


def test_the_last_group_is_filled_up_from_the_first_prompts() -> None:
    assert in_groups(5, 2) == [[0, 1], [2, 3], [4, 0]]
    assert in_groups(1, 3) == [[0, 0, 0]]


# ---------------------------------------------------------------- figures


def ran(n_tokens: int, seconds: float) -> GroupRun:
    stats = Stats(n_tokens=n_tokens, n_rounds=n_tokens, ttft_s=0.5, own_s=n_tokens * 1e-3)
    return GroupRun([[]], [stats], rounds=[Round(1, n_tokens, seconds)])


def test_ratios_are_taken_pair_by_pair() -> None:
    """The ratio of medians would be 1 here: both modes were slow in one repeat, not the same."""
    slow_second = [[ran(10, 1.0)], [ran(10, 4.0)], [ran(10, 2.0)]]
    even = [[ran(10, 2.0)], [ran(10, 2.0)], [ran(10, 2.0)]]
    assert pair_ratios(slow_second, even) == [2.0, 0.5, 1.0]
    runs = {Key(1, "chat", "plain"): even, Key(1, "chat", "auto"): slow_second}
    line = rows(runs, ["chat"])[1]
    assert line["ratio_to_plain"] == 1.0
    assert line["ratio_quartiles"] == [0.75, 1.5]
    assert line["decode_tps"] == 5.0
    assert line["own_ms_per_round"] == pytest.approx(1.0)


def test_a_run_that_was_not_clocked_has_no_speed_instead_of_none_at_all() -> None:
    key = Key(8, "chat", "auto")
    unclocked, clocked = [ran(0, 0.0)], [ran(20, 1.0)]
    unclocked[0].rounds.clear()
    assert row(key, [unclocked], [clocked])["decode_tps"] is None
    assert row(key, [unclocked], [clocked])["ratio_to_plain"] is None
    both = row(key, [unclocked, clocked], [clocked, clocked])
    assert (both["decode_tps"], both["ratio_by_repeat"]) == (20.0, [1.0])


def test_without_plain_there_is_no_ratio() -> None:
    (line,) = rows({Key(1, "chat", "auto"): [[ran(10, 1.0)]]}, ["chat"])
    assert line["ratio_to_plain"] is None


def test_auto_is_compared_with_the_fastest_fixed_mode() -> None:
    seconds = {"plain": 2.0, "fixed:1": 1.0, "fixed:2": 1.6, "auto": 0.8}
    runs = {Key(1, "chat", mode): [[ran(10, s)]] for mode, s in seconds.items()}
    modes = parse_modes(",".join(seconds))
    (ratio,) = named_ratios(runs, ["chat"], modes, ("auto", "best-fixed"))
    assert ratio["modes"] == ["auto", "fixed:1"]
    assert ratio["median"] == pytest.approx(1.25)


# ---------------------------------------------------------------- prompt sets


@pytest.mark.parametrize("name", prompt_sets.OWN_SETS)
def test_our_prompt_sets_are_small_and_well_formed(name: str) -> None:
    texts = load_prompt_set(name).texts
    assert 10 <= len(texts) <= 16
    assert all(text.strip() == text for text in texts)
    if name == "edit":  # what is to be repeated: 80 to 250 tokens of about four characters
        assert all(320 <= len(text) <= 1000 for text in texts)


def test_no_prompt_is_in_two_sets_or_in_the_calibration_set() -> None:
    """Survival estimates are fitted on the calibration set: measuring on it would flatter them."""
    texts = [text for name in prompt_sets.OWN_SETS for text in load_prompt_set(name).texts]
    fitted = read_prompts(prompt_sets.FOLDER / "calibration.jsonl")
    texts += [turn for turns in fitted for turn in turns]
    folded = [" ".join(text.lower().split()) for text in texts]
    assert len(set(folded)) == len(folded)


# ---------------------------------------------------------------- progress


class Screen(io.StringIO):
    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_bar_is_drawn_on_a_terminal_only(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Screen(is_terminal=is_terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    with shared.progress(3, "measuring") as advance:
        advance()
        advance()
    assert ("measuring" in screen.getvalue()) is is_terminal
    # The time left is known from the second step on.
    assert (re.search(r"\d:\d\d:\d\d", screen.getvalue()) is not None) is is_terminal


# ---------------------------------------------------------------- bench profile


def test_a_profile_is_a_cost_file_that_replay_reads(
    tiny_llama: Path, tiny_drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, picture = tmp_path / "cost.json", tmp_path / "cost.png"
    code = main(
        f"profile --target {tiny_llama} --drafter {tiny_drafter} --n-ctx 256 --threads 1 "
        f"--sequences 2 --json {file} --plot {picture}".split()
    )
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 0
    assert json.loads(file.read_text()) == report
    cost = load_cost(str(file))
    assert cost.measured
    assert cost.table.to_json() == report["table"]
    assert cost.table.verify_s(8, 0) > 0 < cost.table.draft_s(2)
    assert cost.table.other_s > 0
    assert picture.read_bytes().startswith(b"\x89PNG")


# ---------------------------------------------------------------- bad arguments


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--modes plain,warp", "'warp'"),
        ("--modes fixed:0", "'fixed:0'"),
        ("--modes fixed", "'fixed'"),
        ("--modes plain,plain", "plain twice"),
        ("--modes fixed:2,fixed:02", "fixed:2 twice"),
        ("--prompts nowhere", "nowhere"),
        ("--prompts chat --prompts chat", "chat is taken twice"),
        ("--sequences 1,x", "--sequences"),
        ("--sequences 0", "--sequences"),
        ("--repeats 0", "--repeats is 0"),
        ("--max-tokens 1", "--max-tokens is 1"),
        ("--max-prompts 0", "--max-prompts is 0"),
        ("--cool-down nan", "--cool-down"),
        ("--cool-down 1e300", "--cool-down is 1e+300"),
        ("--tie nan", "--tie is nan"),
        ("--threads 9999", "--threads is 9999"),
        ("--ctx 4", "--ctx is 4"),
        ("--json .", "folder"),
        ("--seed -1", "seed is -1"),
        ("--ratio-of auto", "'auto'"),
        ("--ratio-of auto/best-fixed --modes plain,auto", "best-fixed"),
        ("--plot report.xyz", "report.xyz"),
        ("--plot no/such/folder/x.png", "folder"),
        ("--max-tokens 500", "--ctx"),
    ],
)
def test_bad_arguments_are_refused_in_one_line_before_anything_runs(
    arguments: str, says: str, bench: Bench
) -> None:
    code, report, err = bench(*arguments.split())
    assert code == 1
    assert report == {}
    assert says in err
    assert err.count("\n") == 1
    assert bench.ran == []


def test_a_fixed_length_beyond_the_block_is_refused(
    tiny_llama: Path, tiny_drafter: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would be measured as the whole block under another name."""
    arguments = f"run --target {tiny_llama} --drafter {tiny_drafter} --prompts {prompts}"
    assert main([*arguments.split(), "--modes", "fixed:9", "--threads", "1"]) == 1
    assert "at most 4 tokens" in capsys.readouterr().err
