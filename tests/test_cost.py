"""The cost table: interpolation, correction, profile, and a cache that never gets in the way."""

from __future__ import annotations

import itertools
import json
import timeit
from collections.abc import Callable

import pytest

from dspark_edge.cost import CostTable, profile
from dspark_edge.scheduler import choose_lengths

JAGGED_S = {1: 0.0147, 4: 0.0329, 5: 0.0519, 7: 0.0613, 8: 0.049}


def a_table(curve: dict[int, float], *, draft: dict[int, float] | None = None) -> CostTable:
    return CostTable(verify={0: curve}, draft=draft)


def test_a_measured_width_costs_what_was_measured() -> None:
    table = a_table(JAGGED_S)
    assert [table.verify_s(b, 0) for b in JAGGED_S] == list(JAGGED_S.values())


def test_between_measured_widths_the_cost_is_linear() -> None:
    assert a_table({1: 1.0, 3: 2.0}).verify_s(2, 0) == 1.5


def test_beyond_the_last_width_the_last_slope_goes_on() -> None:
    assert a_table({1: 1.0, 2: 2.0, 4: 3.0}).verify_s(8, 0) == 5.0


def test_beyond_a_falling_end_the_cost_stays_level() -> None:
    assert a_table({7: 3.0, 8: 2.0}).verify_s(32, 0) == 2.0


def test_below_the_first_width_the_cost_is_that_of_the_first() -> None:
    assert a_table({4: 3.0, 8: 5.0}).verify_s(1, 0) == 3.0


def test_a_look_at_many_widths_takes_about_as_long_as_at_few() -> None:
    few, many = (a_table({2 * n: 0.001 * n for n in range(1, most)}) for most in (10, 20_000))

    def fastest_s(table: CostTable) -> float:
        return min(timeit.repeat(lambda: table.verify_s(9, 0), number=20, repeat=50))

    assert fastest_s(many) < 10.0 * fastest_s(few)  # 1.4; sorted for each look, 160


def test_a_single_width_is_a_cost_per_token() -> None:
    assert a_table({2: 3.0}).verify_s(4, 0) == 6.0


def test_a_depth_bucket_is_512_tokens_wide() -> None:
    table = CostTable(verify={0: {1: 1.0}, 1: {1: 2.0}, 2: {1: 3.0}, 3: {1: 4.0}})
    depths = (0, 511, 512, 1023, 1024, 1535, 1536, 2047)
    assert [table.verify_s(1, d) for d in depths] == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0]


def test_a_depth_without_data_costs_what_the_nearest_one_does() -> None:
    table = CostTable(verify={0: {1: 1.0}, 4: {1: 3.0}})
    assert [table.verify_s(1, d) for d in (600, 3000, 100_000)] == [1.0, 3.0, 3.0]


def test_an_empty_table_says_so() -> None:
    with pytest.raises(ValueError, match=r"cost table is empty; profile\(\) it"):
        CostTable().verify_s(1, 0)


def test_drafts_that_need_no_pass_cost_nothing() -> None:
    assert a_table({1: 1.0}).draft_s(4) == 0.0


def test_draft_passes_are_read_by_sequences() -> None:
    table = a_table({1: 1.0}, draft={1: 0.1, 3: 0.2})
    assert [table.draft_s(n) for n in (1, 2, 3, 4)] == pytest.approx([0.1, 0.15, 0.2, 0.25])


def test_repeated_observations_become_the_cost() -> None:
    table = a_table({1: 1.0, 8: 4.0})
    for _ in range(60):
        table.observe_verify(8, 0, 3.0)
        table.observe_verify(1, 0, 1.0)
    assert table.verify_s(8, 0) == pytest.approx(3.0, rel=1e-2)
    assert table.verify_s(1, 0) == pytest.approx(1.0, rel=1e-2)


def test_one_outlier_moves_a_cost_by_a_bounded_ratio() -> None:
    table = a_table({1: 1.0, 8: 4.0})
    table.observe_verify(8, 0, 1000.0)
    assert table.verify_s(8, 0) == pytest.approx(4.0 * 2**0.25)
    assert table.verify_s(1, 0) == pytest.approx(1.0 * 2**0.2)


def test_a_slowed_machine_is_slower_at_every_width() -> None:
    table = a_table({1: 1.0, 8: 4.0})
    for _ in range(100):
        table.observe_verify(1, 0, 1.5)
    assert table.verify_s(1, 0) == pytest.approx(1.5)
    assert table.verify_s(8, 0) == pytest.approx(4.0 * 1.5**0.8)
    assert table.load == pytest.approx(1.5**0.8)


def test_a_busy_moment_at_one_width_hardly_bends_the_curve() -> None:
    table = a_table({1: 1.0, 5: 3.0}, draft={1: 0.4})
    for _ in range(10):
        table.observe_verify(1, 0, 50.0)
    assert table.verify_s(5, 0) / table.verify_s(1, 0) > 2.0
    assert table.draft_s(1) / table.verify_s(1, 0) > 0.27


def test_a_width_seen_for_the_first_time_becomes_an_entry() -> None:
    table = a_table({1: 1.0, 3: 3.0})
    table.observe_verify(2, 0, 1.0)
    assert table.verify_s(2, 0) == pytest.approx(2.0 * 0.5**0.25)


def test_the_first_observation_at_a_new_depth_scales_the_nearest_curve() -> None:
    table = a_table({1: 1.0, 8: 4.0})
    table.observe_verify(1, 5000, 1.5)
    assert [table.verify_s(b, 5000) for b in (1, 8)] == [1.5, 6.0]
    assert [table.verify_s(b, 0) for b in (1, 8)] == [1.0, 4.0]


def test_a_deeper_depth_inherits_what_was_learned_nearby() -> None:
    table = a_table({1: 1.0, 8: 4.0})
    table.observe_verify(1, 5000, 1.5)
    assert table.verify_s(8, 50_000) == 6.0


def test_an_outlier_at_a_new_depth_is_averaged_away() -> None:
    table = a_table({1: 1.0, 8: 4.0})
    table.observe_verify(1, 5000, 100.0)
    for _ in range(40):
        table.observe_verify(1, 5000, 1.5)
    assert table.verify_s(8, 5000) == pytest.approx(6.0, rel=0.03)


def pass_s(depth: int, doubles_at: int = 4000) -> float:
    return 0.01 * (1.0 + depth / doubles_at)


def conversation(table: CostTable, begin: int, end: int, slow: float = 1.0) -> list[float]:
    """The load after each plain round of a conversation that grows from begin to end tokens."""
    loads = []
    for depth in range(begin, end):
        table.observe_verify(1, depth, slow * pass_s(depth))
        loads.append(table.load)
    return loads


@pytest.mark.parametrize("n_leap", [0, 200])
def test_growth_with_depth_is_no_load_of_the_machine(n_leap: int) -> None:
    """n_leap: tokens of a user's message after every 100 of a reply."""
    table = a_table({1: pass_s(256), 8: 2.0 * pass_s(256)})
    for _ in range(2):  # conversations
        for begin in range(0, 4096, 100 + n_leap):
            assert max(conversation(table, begin, min(begin + 100, 4096))) < 1.1
    assert table.verify_s(1, 4095) == pytest.approx(pass_s(4095), rel=0.05)
    assert table.verify_s(8, 4095) == pytest.approx(2.0 * pass_s(4095), rel=0.15)
    assert table.verify_s(1, 0) == pytest.approx(pass_s(256), rel=0.15)


@pytest.mark.parametrize("depth", [0, 200, 505, 512, 900, 4000])
@pytest.mark.parametrize("n_before", [0, 1])
def test_a_machine_that_turns_slow_is_told_from_depth(depth: int, n_before: int) -> None:
    """n_before: conversations over the same depths before."""
    table = a_table({1: pass_s(256), 8: 2.0 * pass_s(256)})
    for _ in range(n_before):
        conversation(table, 0, 4200)
    conversation(table, 0, depth)
    assert min(conversation(table, depth, depth + 100, slow=2.0)[20:]) > 1.5
    assert conversation(table, depth + 100, depth + 120)[-1] < 1.2


def test_an_empty_table_takes_its_first_observation_whole() -> None:
    table = CostTable()
    table.observe_verify(1, 0, 0.5)
    table.observe_draft(1, 0.25)
    table.observe_other(0.125)
    assert (table.verify_s(1, 0), table.draft_s(1), table.other_s) == (0.5, 0.25, 0.125)


def test_draft_and_own_time_are_corrected_in_ratio() -> None:
    table = CostTable(draft={1: 1.0}, other_s=1.0)
    table.observe_draft(1, 8.0)
    table.observe_other(8.0)
    assert table.draft_s(1) == pytest.approx(2**0.1)
    assert table.other_s == pytest.approx(2**0.2)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_an_observation_that_is_no_time_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="is not a time; it must be finite and at least 0"):
        a_table({1: 1.0}).observe_verify(1, 0, seconds)


def test_an_observation_of_0_s_does_not_break_the_table() -> None:
    table = a_table({1: 1.0})
    table.observe_verify(1, 0, 0.0)
    assert table.verify_s(1, 0) == pytest.approx(0.5**0.25)


def test_the_scheduler_finds_the_cheaper_wider_step_of_a_measured_table() -> None:
    table = a_table(JAGGED_S)
    survival = [0.9, 0.81, 0.73, 0.66, 0.59, 0.53, 0.48]
    plan = choose_lengths(
        [survival],
        lambda batch_tokens: table.verify_s(batch_tokens, 100),
        draft_s=0.005,
        other_s=0.0,
        max_batch_tokens=8,
    )
    by_length = [(1 + sum(survival[:n])) / (0.005 + table.verify_s(1 + n, 100)) for n in range(8)]
    assert plan.tps == pytest.approx(max(by_length))
    assert plan.verify_lens == (7,)


class FakeMachine:
    """Runs passes at scripted costs and keeps their order."""

    def __init__(self, step_s: Callable[[int], float]) -> None:
        self.step_s = step_s
        self.steps: list[tuple[int, int]] = []
        self.drafts: list[int] = []

    def time_step(self, n_tokens: int, depth: int) -> float:
        self.steps.append((n_tokens, depth))
        return self.step_s(n_tokens)

    def time_draft(self, n_seq: int) -> float:
        self.drafts.append(n_seq)
        return 0.001 * n_seq


def test_a_profile_measures_each_width_up_to_the_largest() -> None:
    machine = FakeMachine(lambda n: 0.001 * n)
    table = profile(machine.time_step, None, max_width=9, n_seq=1, depth=700)
    assert sorted(set(machine.steps)) == [(n, 700) for n in (1, 2, 3, 4, 5, 6, 7, 8, 9)]
    assert table.to_json()["verify"] == {"1": {str(n): 0.001 * n for n in range(1, 10)}}
    assert table.draft_s(1) == 0.0


def test_repeats_are_interleaved_after_one_pass_that_is_not_counted() -> None:
    machine = FakeMachine(lambda n: 0.001)
    profile(machine.time_step, machine.time_draft, max_width=3, n_seq=2, depth=0)
    assert [n for n, _ in machine.steps] == [1, 2, 3] * 6
    assert machine.drafts == [1, 2] * 6


def test_a_profile_takes_the_fastest_of_five_passes_and_knows_a_busy_machine() -> None:
    costs = iter([9.0, 0.3, 0.1, 0.2, 8.0, 0.25])
    table = profile(lambda n, d: next(costs), None, max_width=1, n_seq=1, depth=0, budget_s=99)
    assert table.verify_s(1, 0) == 0.1
    assert table.is_noisy


def test_a_short_budget_still_measures_each_width_once() -> None:
    machine = FakeMachine(lambda n: 10.0 * n)
    table = profile(machine.time_step, None, max_width=2, n_seq=1, depth=0, budget_s=1.0)
    assert [n for n, _ in machine.steps] == [1, 2, 1, 2]
    assert [table.verify_s(n, 0) for n in (1, 2)] == [10.0, 20.0]


def test_a_budget_is_not_exceeded_by_another_sweep() -> None:
    machine = FakeMachine(lambda n: 1.0)
    profile(machine.time_step, None, max_width=1, n_seq=1, depth=0, budget_s=3.5)
    assert len(machine.steps) == 3


def test_a_profile_of_no_width_is_refused() -> None:
    with pytest.raises(ValueError, match="max_width 0 and n_seq 1 must be at least 1"):
        profile(lambda n, d: 1.0, None, max_width=0, n_seq=1, depth=0)


def full_table() -> CostTable:
    return CostTable(
        verify={0: JAGGED_S, 3: {1: 0.02, 8: 0.07}}, draft={1: 0.005, 2: 0.006}, other_s=0.0002
    )


def test_a_table_survives_json() -> None:
    written = full_table().to_json()
    assert CostTable.from_json(json.loads(json.dumps(written))).to_json() == written


def test_what_is_written_of_a_slowed_machine_costs_what_it_costs_now() -> None:
    table = full_table()
    table.observe_verify(2, 0, 0.032)
    table.observe_draft(1, 0.010)
    assert table.load > 1.1
    written = CostTable.from_json(table.to_json())
    assert [written.verify_s(b, 0) for b in (1, 2, 5, 8)] == pytest.approx(
        [table.verify_s(b, 0) for b in (1, 2, 5, 8)]
    )
    assert [written.draft_s(n) for n in (1, 2)] == [table.draft_s(n) for n in (1, 2)]


GOOD = full_table().to_json()


@pytest.mark.parametrize(
    "damaged",
    [
        None,
        [],
        {},
        {**GOOD, "extra": 1},
        {**GOOD, "version": 2},
        {**GOOD, "verify": {}},
        {**GOOD, "verify": []},
        {**GOOD, "verify": {"0": {}}},
        {**GOOD, "verify": {"0": {"0": 1.0}}},
        {**GOOD, "verify": {"0": {"x": 1.0}}},
        {**GOOD, "verify": {"0": {"01": 1.0}}},
        {**GOOD, "verify": {"-1": {"1": 1.0}}},
        {**GOOD, "verify": {"0": {"1": 0.0}}},
        {**GOOD, "verify": {"0": {"1": -1.0}}},
        {**GOOD, "verify": {"0": {"1": float("nan")}}},
        {**GOOD, "verify": {"0": {"1": float("inf")}}},
        {**GOOD, "verify": {"0": {"1": 10**400}}},
        {**GOOD, "verify": {"0": {"1": 0.01, "32": 1e308}}},  # infinite at width 100
        {**GOOD, "verify": {"0": {"1": 0.01, str(10**400): 0.02}}},  # no float holds that width
        {**GOOD, "draft": {"1": 1e308}},
        {**GOOD, "verify": {"0": {"1": "1.0"}}},
        {**GOOD, "verify": {"0": {"1": True}}},
        {**GOOD, "draft": None},
        {**GOOD, "other_s": None},
        {**GOOD, "other_s": -1.0},
    ],
)
def test_a_malformed_table_is_refused(damaged: object) -> None:
    with pytest.raises(ValueError, match="profile it anew"):
        CostTable.from_json(damaged)


def test_widths_are_dense_where_steps_are_expected() -> None:
    assert CostTable.WIDTHS[:8] == tuple(range(1, 9))
    assert all(a < b for a, b in itertools.pairwise(CostTable.WIDTHS))
