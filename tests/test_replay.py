"""bench replay: exact on small texts by hand and by brute force; the policies on shipped tables."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from synthetic_trace import WRONG, header, one_round, recording

from dspark_edge import Engine, SamplingParams
from dspark_edge.bench.__main__ import main
from dspark_edge.bench.costs import NamedCost, load_cost, shipped_costs
from dspark_edge.bench.oracles import BestPath, Oracle
from dspark_edge.bench.policies import (
    Choice,
    Fixed,
    Offer,
    Ours,
    Threshold,
    Times,
    admit_while_rising,
    depth_of,
)
from dspark_edge.bench.recorded import HOW_TO_RECORD, Text, texts_of
from dspark_edge.bench.replay import compare, n_policies, simulate
from dspark_edge.confidence import SurvivalModel
from dspark_edge.cost import CostTable
from dspark_edge.probing import PROBE_DRAFTS
from dspark_edge.scheduler import choose_lengths
from dspark_edge.signals import FEATURES
from dspark_edge.trace import Trace, TraceBlock, TraceWriter, read_trace

FLAT = ("apple-laptop-8b", "desktop-gpu-8b", "jetson-orin-8b")
FALLING = ("gemma-3-270m-q4_k_m-2cpu", "smollm2-135m-q4_0-2cpu")  # 8 rows cost less than 7

# Milliseconds: pass of 1, 2, 3 tokens 10, 12, 14; draft pass 3; the rest 1.
TABLE = CostTable(
    verify={0: {1: 0.010, 2: 0.012, 3: 0.014, 4: 0.017}}, draft={1: 0.003}, other_s=0.001
)


def trace_of(n_right: Sequence[int], block: int = 3, request: int = 0) -> Trace:
    """A text of len(n_right) tokens; the block at i has n_right[i] right ones, then wrong ones."""
    text = list(range(100, 100 + len(n_right)))
    rounds = []
    for i, right in enumerate(n_right):
        ahead = [text[min(i + k, len(text) - 1)] for k in range(block)]
        tokens = [t + (0 if k < right else WRONG) for k, t in enumerate(ahead)]
        confidence = [0.9 if k < right else 0.2 for k in range(block)]
        drafted = TraceBlock(
            proposer="drafter", tokens=tokens, confidence=confidence, certainty=[1.0] * block
        )
        line = one_round(i, 20 + i, [text[i]], [drafted])
        line.sequences[0].request = request
        rounds.append(line)
    return Trace(header=header(block), rounds=rounds, events=[])


def texts(n_right: Sequence[int], block: int = 3) -> list[Text]:
    return texts_of(trace_of(n_right, block))


def test_plain_decoding_takes_a_one_token_pass_for_each_token() -> None:
    outcome = simulate(texts([3] * 10), Fixed("", 0), Times(TABLE))
    assert outcome.seconds == pytest.approx(10 * 0.011)
    assert (outcome.n_tokens, outcome.n_rounds, outcome.n_drafted) == (10, 10, 0)


def test_fixed_length_2_on_ten_tokens_by_hand() -> None:
    # Three rounds gain three tokens each; the last token has no room for a draft.
    outcome = simulate(texts([3] * 10), Fixed("drafter", 2), Times(TABLE))
    assert outcome.seconds == pytest.approx(3 * (0.003 + 0.014 + 0.001) + 0.011)
    assert (outcome.n_tokens, outcome.n_rounds, outcome.n_drafted) == (10, 4, 3)
    assert outcome.tau == 2.5


def test_rejected_tokens_are_paid_for_but_not_gained() -> None:
    # One of two is right: five rounds of two tokens, the last with room for one draft token.
    outcome = simulate(texts([1] * 10), Fixed("drafter", 2), Times(TABLE))
    assert outcome.seconds == pytest.approx(4 * (0.003 + 0.014 + 0.001) + 0.003 + 0.012 + 0.001)
    assert (outcome.n_verified, outcome.n_accepted) == (9, 5)


def test_a_threshold_stops_at_the_first_doubtful_token() -> None:
    outcome = simulate(texts([1] * 10), Threshold("drafter", 0.5), Times(TABLE))
    assert (outcome.n_verified, outcome.n_accepted) == (5, 5)


def test_two_texts_side_by_side_share_their_passes() -> None:
    both = texts([0] * 6) + texts([0] * 4)
    outcome = simulate(both, Fixed("", 0), Times(TABLE), n_seq=2)
    assert outcome.seconds == pytest.approx(4 * 0.013 + 2 * 0.011)
    assert (outcome.n_tokens, outcome.tau) == (10, 1.0)


def test_a_block_is_as_right_as_the_text_says_and_leaves_room_for_the_bonus() -> None:
    (text,) = texts([2, 0, 3, 3])
    assert [[(len(p.signals.tokens), p.n_correct) for p in at] for at in text.proposals] == [
        [(3, 2)],
        [(2, 0)],
        [(1, 1)],
        [],
    ]


def test_a_trace_that_was_not_recorded_for_replay_says_how_to_record() -> None:
    made = trace_of([1, 1, 1])
    made.rounds[0].sequences[0].emitted = [100, 101]
    with pytest.raises(ValueError, match=r"round 0 emitted 2 tokens.*verify_len=0"):
        texts_of(made)
    gap = trace_of([1, 1, 1])
    gap.rounds[1].sequences[0].position = 30
    with pytest.raises(ValueError, match="jumps to position 30 where 21 follows"):
        texts_of(gap)
    bare = trace_of([1, 1, 1])
    for line in bare.rounds:
        line.sequences[0].blocks = []
    with pytest.raises(ValueError, match="holds no blocks"):
        texts_of(bare)


# ---------------------------------------------------------------- oracle


def fastest(n_right: Sequence[int], table: CostTable, block: int) -> float:
    """Seconds of the fastest way through the text, by trying every sequence of lengths."""

    def from_here(at: int) -> float:
        left = len(n_right) - at
        if left == 0:
            return 0.0
        ways = [table.verify_s(1, 0) + table.other_s + from_here(at + 1)]
        for verify_len in range(1, min(block, left - 1) + 1):
            gained = 1 + min(verify_len, n_right[at])
            seconds = table.draft_s(1) + table.verify_s(1 + verify_len, 0) + table.other_s
            ways.append(seconds + from_here(at + gained))
        return min(ways)

    return from_here(0)


@pytest.mark.parametrize("seed", range(20))
def test_the_oracle_is_the_fastest_way_there_is(seed: int) -> None:
    rng = random.Random(seed)
    n_right = [rng.randrange(4) for _ in range(8)]
    widths = {b: rng.uniform(0.005, 0.02) for b in (1, 2, 3, 4)}  # jagged
    table = CostTable(verify={0: widths}, draft={1: rng.uniform(0.0005, 0.005)}, other_s=0.0001)
    small, times = texts(n_right), Times(table)
    outcome = simulate(small, BestPath(small, times), times)
    assert outcome.seconds == pytest.approx(fastest(n_right, table, 3))


def test_no_policy_beats_the_oracle() -> None:
    for name in shipped_costs():
        for key, values in report(name, 2.0, True)["policies"].items():
            assert values["over_oracle"] <= 1.0 + 1e-9, (name, key)


def test_side_by_side_the_oracle_is_ahead_too() -> None:
    made = texts_of(recording(n_texts=4, n_tokens=100, quality=1.0))
    for name in (*FLAT, *FALLING):
        policies = compare(made, load_cost(name), n_seq=3)["policies"]
        assert max(values["over_oracle"] for values in policies.values()) == 1.0, name


def test_the_greedy_oracle_is_near_the_fastest_way() -> None:
    made = texts_of(recording(n_texts=1, n_tokens=200))
    for name in shipped_costs():
        times = Times(load_cost(name).table)
        best = simulate(made, BestPath(made, times), times).seconds
        assert best <= simulate(made, Oracle(), times).seconds <= 1.05 * best, name


# ---------------------------------------------------------------- policies on shipped tables


@cache
def recorded(quality: float, lookup: bool, exact: bool = False) -> tuple[Text, ...]:
    return tuple(texts_of(recording(n_texts=5, quality=quality, lookup=lookup, exact=exact)))


@cache
def report(cost: str, quality: float, lookup: bool) -> dict[str, Any]:
    return compare(recorded(quality, lookup), load_cost(cost))


@pytest.mark.parametrize("cost", shipped_costs())
@pytest.mark.parametrize("lookup", [False, True])
def test_ours_is_near_the_best_policy_in_hindsight(cost: str, lookup: bool) -> None:
    assert report(cost, 2.0, lookup)["ours_over_best"] >= 0.95
    assert report(cost, 2.0, lookup)["policies"]["plain"]["over_plain"] == 1.0


@pytest.mark.parametrize("cost", FALLING)
@pytest.mark.parametrize("lookup", [False, True])
def test_ours_beats_algorithm_1_where_a_wider_pass_is_cheaper(cost: str, lookup: bool) -> None:
    made = texts_of(recording(n_texts=10, quality=2.0, lookup=lookup))
    policies = compare(made, load_cost(cost))["policies"]
    rivals = [values["tps"] for name, values in policies.items() if "algorithm 1" in name]
    assert policies["ours"]["tps"] > max(rivals)


class Believer:
    """Verifies what is best when the stated confidences are the true chances. Always drafts."""

    def choose(self, offers: Sequence[Offer], times: Times) -> Choice:
        (offer,) = offers
        proposal, survival = offer.proposals.get("drafter"), list[float]()
        for c in (proposal.signals.confidence or []) if proposal else []:
            survival.append((survival[-1] if survival else 1.0) * c)
        plan = choose_lengths(
            [survival],
            lambda batch_tokens: times.verify_s(batch_tokens, depth_of(offers)),
            draft_s=times.table.draft_s(1),
            other_s=times.table.other_s,
            max_batch_tokens=64,
        )
        return Choice(proposal is not None, [(proposal, plan.verify_lens[0])])

    def learn(self, sequence: int, position: int, tokens: Sequence[int]) -> None:
        return

    def finish(self, sequence: int) -> None:
        return


@pytest.mark.parametrize("cost", FLAT)
def test_on_flat_curves_ours_is_near_one_that_knows_the_true_chances(cost: str) -> None:
    # Not even true chances reach the oracle, which knows outcomes: a failure prints how near.
    times = Times(load_cost(cost).table)
    informed = simulate(recorded(2.0, False, True), Believer(), times).tps
    policies = report(cost, 2.0, False)["policies"]
    assert policies["ours"]["tps"] >= 0.95 * informed, informed / policies["oracle"]["tps"]


@pytest.mark.parametrize("cost", FLAT)
def test_on_flat_curves_ours_is_within_a_tenth_of_the_oracle_where_drafts_are_mostly_right(
    cost: str,
) -> None:
    # A tau of 6.5 with blocks of 7. What drafts get wrong, only an oracle knows beforehand.
    made, times = recorded(4.5, False, True), Times(load_cost(cost).table)
    ours = simulate(made, Ours(SurvivalModel(7), times), times)
    assert 6.0 < ours.tau < 7.0
    assert ours.tps >= 0.9 * simulate(made, BestPath(made, times), times).tps


def test_the_oracle_of_lengths_drafts_always_and_verifies_what_is_right() -> None:
    outcome = simulate(texts([2, 2, 2, 0, 0, 0]), Oracle(always_drafts=True), Times(TABLE))
    # Three tokens by the first block, then one a round; each of the four rounds drafts but the last
    # one, which has no room.
    assert (outcome.n_tokens, outcome.n_rounds, outcome.n_drafted) == (6, 4, 3)
    assert (outcome.n_verified, outcome.n_accepted) == (2, 2)
    policies = report("desktop-gpu-8b", 2.0, True)["policies"]
    assert policies["ours"]["tps"] < policies["oracle of lengths"]["tps"]
    assert policies["oracle of lengths"]["tps"] <= policies["oracle"]["tps"]


@pytest.mark.parametrize("injection_drafts", [0.0, 8.0])
def test_a_probe_takes_its_injection_and_is_as_rare_as_that_asks(injection_drafts: float) -> None:
    made, times = texts([0] * 2000), Times(TABLE)
    outcome = simulate(
        made, Ours(SurvivalModel(3), times, injection_drafts=injection_drafts), times
    )
    plain_s = simulate(made, Fixed("", 0), times).seconds
    n_trial = 8
    n_probes = (outcome.n_drafted - n_trial) // PROBE_DRAFTS
    # Half a percent of 10 ms a round pays for 6 ms of drafts, with 24 of injection or without.
    assert n_probes == (16 if injection_drafts == 0.0 else 4)
    probes_s = n_probes * 0.003 * (PROBE_DRAFTS + injection_drafts)
    assert outcome.seconds - plain_s == pytest.approx(n_trial * 0.003 + probes_s, rel=0.1)


def test_a_useless_drafter_costs_little() -> None:
    made = texts_of(recording(n_texts=4, quality=-9.0, lookup=False))
    for name in shipped_costs():
        over_plain = compare(made, load_cost(name))["policies"]["ours"]["over_plain"]
        assert over_plain >= 0.97, name


def test_algorithm_1_stops_where_theta_first_falls_and_the_global_search_does_not() -> None:
    widths = {1: 10.0, 2: 12.0, 3: 30.0, 4: 12.5}
    survival = [[0.9, 0.88, 0.87]]
    assert admit_while_rising(survival, lambda b: widths[b]) == [1]
    plan = choose_lengths(
        survival, lambda b: widths[b], draft_s=0.0, other_s=0.0, max_batch_tokens=8
    )
    assert plan.verify_lens == (3,)


# ---------------------------------------------------------------- cost tables and the command


def test_every_shipped_table_says_where_it_is_from_and_what_it_assumes() -> None:
    costs = [load_cost(name) for name in shipped_costs()]
    assert len(costs) == 10
    assert {cost.name for cost in costs if not cost.measured} == set(FLAT)
    for cost in costs:
        assert cost.name in shipped_costs()
        assert cost.source
        assert cost.assumption
        assert cost.table.draft_s(1) > 0.0


def test_a_bare_cost_table_is_read_too_and_a_broken_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(TABLE.to_json()))
    cost = load_cost(str(path))
    assert (cost.name, cost.table.verify_s(3, 0)) == ("mine", 0.014)
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"cost table .*mine\.json: cost table must have version"):
        load_cost(str(path))
    with pytest.raises(ValueError, match="no cost table 'nowhere'; pass a JSON file or one of: ap"):
        load_cost("nowhere")


def test_the_report_compares_with_plain_best_and_oracle() -> None:
    cost = NamedCost(name="t", source="s", measured=True, assumption=None, table=TABLE)
    result = compare(texts([3] * 10), cost)
    assert result["best"] == "drafter, fixed 3"
    fixed = result["policies"]["drafter, fixed 3"]
    # Four tokens a round, then two: 4 + 4 + 2.
    seconds = 2 * (0.003 + 0.017 + 0.001) + (0.003 + 0.012 + 0.001)
    assert fixed["tps"] == pytest.approx(10 / seconds)
    assert fixed["over_plain"] == pytest.approx(0.11 / seconds)
    assert (fixed["over_best"], fixed["drafted"]) == (1.0, 1.0)


@pytest.mark.parametrize("n_seq", [1, 2])
def test_the_bar_of_a_replay_ends_full(n_seq: int) -> None:
    """Else the time left that it shows is wrong."""
    cost = NamedCost(name="t", source="s", measured=True, assumption=None, table=TABLE)
    made = recorded(0.5, lookup=True) if n_seq == 1 else texts([3] * 10)
    steps: list[None] = []
    result = compare(made, cost, n_seq, advance=lambda: steps.append(None))
    assert len(steps) == n_policies(made)
    assert len(result["policies"]) <= len(steps)  # of thresholds only the best is told


def test_a_calibration_is_where_our_estimates_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = recording(n_texts=1, n_tokens=60)
    with TraceWriter(tmp_path / "t") as writer:
        for line in (made.header, *made.rounds):
            writer.write(line)
    model = SurvivalModel(7)
    hopeless = [-9.0 if name in ("drafter", "lookup") else 0.0 for name in FEATURES]
    for slot in range(7):
        model.set_slot(slot, hopeless, [1e6] * len(FEATURES))
    (tmp_path / "c").write_text(json.dumps({"survival": model.to_json()}))
    command = ["replay", str(tmp_path / "t"), "--calibration", str(tmp_path / "c")]
    assert main([*command, "--cost", FLAT[0]]) == 0
    policies = json.loads(capsys.readouterr().out)["costs"][0]["policies"]
    assert policies["drafter, algorithm 1"]["verify_len"] == 0.0
    (tmp_path / "c").write_text("{}")
    assert main(command) == 1


def test_the_command_prints_a_table_and_one_json_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = recording(n_texts=2, n_tokens=40)
    with TraceWriter(tmp_path / "t") as writer:
        for line in (made.header, *made.rounds):
            writer.write(line)
    command = ["replay", str(tmp_path / "t"), "--cost", "jetson-orin-8b", "--sequences", "2"]
    assert main(command) == 0
    output = capsys.readouterr()
    result = json.loads(output.out)
    assert (result["n_texts"], result["n_tokens"], result["n_seq"]) == (2, 80, 2)
    assert result["costs"][0]["cost"] == "jetson-orin-8b"
    assert "assumption: Nothing here was measured" in output.err
    assert main(["replay", str(tmp_path / "t"), "--sequences", "0"]) == 1


# ---------------------------------------------------------------- recorded by an engine


def record(target: Path, drafter: Path, path: Path, **how: Any) -> str:
    """The trace of 12 tokens of a real engine."""
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with Engine(target, drafter=drafter, n_ctx=128, n_seq=1, n_threads=1, **how) as engine:
        engine.trace_to(path)
        list(engine.generate("the quick brown fox and the quick", params))
    return str(path)


def test_what_is_recorded_as_the_message_says_is_replayed(
    tiny_llama: Path, tiny_drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert HOW_TO_RECORD == 'record with speculation="always", verify_len=0'
    how: dict[str, Any] = {"speculation": "always", "verify_len": 0}
    trace = record(tiny_llama, tiny_drafter, tmp_path / "trace.jsonl", **how)
    assert main(["replay", trace, "--cost", "smollm2-135m-f32-2cpu"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["n_texts"], report["n_tokens"]) == (1, 12)
    policies = report["costs"][0]["policies"].keys()
    assert {"plain", "ours", "oracle", "drafter, fixed 1", "lookup, fixed 1"} <= policies


@pytest.mark.parametrize("mode", ["off", "always", "auto"])
def test_a_trace_of_every_mode_can_be_read(
    mode: str, tiny_llama: Path, tiny_drafter: Path, tmp_path: Path
) -> None:
    """Passes are timed for "auto" alone: the others have no cost table to tell."""
    path = tmp_path / "trace.jsonl"
    how = {"speculation": mode, "cost_cache": tmp_path}
    trace = read_trace(record(tiny_llama, tiny_drafter, path, **how))
    assert (trace.header.cost is not None) is (mode == "auto")
    assert sum(len(s.emitted) for line in trace.rounds for s in line.sequences) == 12


def test_a_calibration_that_is_none_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = trace_of([1, 0, 0])
    with TraceWriter(tmp_path / "trace") as writer:
        for line in (made.header, *made.rounds):
            writer.write(line)
    file = tmp_path / "fit.json"
    file.write_text("not JSON")
    assert main(["replay", str(tmp_path / "trace"), "--calibration", str(file)]) == 1
    assert f"error: --calibration {file}: " in capsys.readouterr().err
