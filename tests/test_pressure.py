"""The order of giving up and of coming back, its timers, and its reasons, all in simulation."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from dspark_edge.device import Gpu, Reading
from dspark_edge.pressure import RELEASES, STEPS, Action, Limits
from dspark_edge.pressure_policy import PressurePolicy

MB = 10**6
GB = 10**9
TOTAL = 8 * GB  # floor 300 MB, gone above 375 MB, scarce below 150 MB, no longer above 187.5 MB
UP_TO_SHRINK = STEPS[:5]


def ram(free_mb: float, total_bytes: int = TOTAL) -> Reading:
    return Reading(ram_free_bytes=round(free_mb * MB), ram_total_bytes=total_bytes)


def heat(temperature_c: float, *, is_throttled: bool | None = None) -> Reading:
    return Reading(temperature_c=temperature_c, trip_c=99.0, is_throttled=is_throttled)


def moves(actions: Iterable[Action]) -> list[str]:
    return [("+" if a.is_on else "-") + a.kind for a in actions]


def run(policy: PressurePolicy, reading: Reading, seconds: Iterable[int]) -> list[tuple[int, str]]:
    """(second, move) for each transition."""
    return [(s, move) for s in seconds for move in moves(policy.observe(reading, s))]


def after(reading: Reading) -> PressurePolicy:
    """A policy that has seen this at second 0."""
    policy = PressurePolicy()
    policy.observe(reading, 0.0)
    return policy


def pressed(policy: PressurePolicy, steps: Sequence[str]) -> None:
    """Low memory from second 0 until the steps are in force."""
    for second in range(0, 2 * len(steps), 2):
        policy.observe(ram(200), second)
    assert [a.kind for a in policy.in_force] == list(steps)


# ---------------------------------------------------------------- memory


def test_low_memory_takes_steps_in_order_and_gives_each_time_to_show() -> None:
    assert run(PressurePolicy(), ram(212), range(20)) == [
        (0, "+shorten"),
        (2, "+park"),
        (4, "+release_context"),
        (6, "+release_weights"),
        (8, "+shrink_idle"),
    ]


def test_the_reason_for_a_step_has_the_numbers() -> None:
    assert PressurePolicy().observe(ram(212), 0.0) == [
        Action("shorten", True, "free memory 212 MB is below 300 MB", 0.5)
    ]


def test_scarce_memory_takes_every_step_at_once_and_refuses_requests() -> None:
    actions = PressurePolicy().observe(ram(149), 0.0)
    assert moves(actions) == [f"+{step}" for step in STEPS]
    assert actions[-1] == Action("refuse", True, "free memory 149 MB is below 150 MB", 10.0)


def test_steps_stop_where_memory_is_enough_again() -> None:
    policy = PressurePolicy()
    assert run(policy, ram(212), range(3)) == [(0, "+shorten"), (2, "+park")]
    assert run(policy, ram(310), range(3, 500)) == []  # neither low nor clear


def test_steps_come_back_in_reverse_after_their_re_arm_times() -> None:
    policy = after(ram(100))
    assert run(policy, ram(2000), range(1, 400)) == [
        (11, "-refuse"),
        (121, "-shrink_idle"),
        (123, "-release_weights"),
        (125, "-release_context"),
        (127, "-park"),
        (129, "-shorten"),
    ]
    assert policy.in_force == ()


def test_the_reason_for_coming_back_has_the_numbers() -> None:
    policy = after(ram(212))
    policy.observe(ram(612), 1.0)
    assert policy.observe(ram(712), 31.0) == [
        Action("shorten", False, "free memory 712 MB is above 375 MB, for 30 s")
    ]


def test_pressure_that_returns_starts_the_re_arm_time_again() -> None:
    policy = PressurePolicy()
    pressed(policy, UP_TO_SHRINK)
    assert run(policy, ram(900), range(10, 120)) == []
    assert run(policy, ram(310), [120]) == []
    assert run(policy, ram(900), range(121, 250)) == [
        (241, "-shrink_idle"),
        (243, "-release_weights"),
        (245, "-release_context"),
        (247, "-park"),
        (249, "-shorten"),
    ]


def test_time_without_observations_is_not_time_without_pressure() -> None:
    policy = after(ram(212))
    assert policy.observe(ram(900), 1000.0) == []
    assert moves(policy.observe(ram(900), 1030.0)) == ["-shorten"]


def test_the_drafter_waits_for_room_for_itself() -> None:
    limits = Limits(drafter_context_bytes=100 * MB, drafter_weights_bytes=200 * MB)
    policy = PressurePolicy(limits)
    pressed(policy, UP_TO_SHRINK)
    assert run(policy, ram(674), range(10, 1000)) == [(130, "-shrink_idle")]
    assert run(policy, ram(675), range(1000, 1500))[0] == (1120, "-release_weights")


def test_a_large_machine_has_a_floor_by_share_and_a_small_one_an_eighth() -> None:
    cases = [
        (ram(1279, 64 * GB), "free memory 1279 MB is below 1280 MB"),
        (ram(63.9, 512 * MB), "free memory 63 MB is below 64 MB"),
        (Reading(ram_free_bytes=299 * MB), "free memory 299 MB is below 300 MB"),
    ]
    for reading, reason in cases:
        assert PressurePolicy().observe(reading, 0.0)[0].reason == reason
    assert PressurePolicy().observe(ram(1280, 64 * GB), 0.0) == []
    assert PressurePolicy().observe(ram(64, 512 * MB), 0.0) == []


def test_each_discrete_gpu_has_its_own_floor_and_a_shared_one_none() -> None:
    reading = Reading(
        ram_free_bytes=4 * GB,
        ram_total_bytes=TOTAL,
        gpus=(
            Gpu("MTL0", 10 * MB, 8 * GB, True),
            Gpu("CUDA0", 2 * GB, 8 * GB, False),
            Gpu("CUDA1", 150 * MB, 8 * GB, False),
        ),
    )
    actions = PressurePolicy().observe(reading, 0.0)
    assert [a.reason for a in actions] == ["free memory of CUDA1 150 MB is below 200 MB"]


def test_what_is_not_told_is_no_pressure() -> None:
    policy = after(ram(212))
    assert run(policy, Reading(), range(1, 40)) == [(31, "-shorten")]
    assert policy.in_force == ()


def test_a_sensor_that_went_silent_is_named_when_its_step_is_lifted() -> None:
    policy = after(ram(212))
    policy.observe(Reading(), 1.0)
    assert policy.observe(Reading(), 31.0)[0].reason == "free memory is no longer told, for 30 s"


def test_steps_that_do_not_apply_are_left_out() -> None:
    policy = PressurePolicy(steps=("refuse", "park"))
    assert run(policy, ram(212), range(20)) == [(0, "+park")]
    assert run(policy, ram(100), [20]) == [(20, "+refuse")]
    assert run(policy, ram(2000), range(21, 100)) == [(31, "-refuse"), (51, "-park")]


def test_an_action_says_what_it_does_and_why() -> None:
    why = "free memory 212 MB is below 300 MB"
    texts = [Action("park", True, why).text, Action("park", False, "enough").text]
    assert texts == [f"drafting is parked: {why}", "no longer: drafting is parked: enough"]
    bar = Action("raise_bar", True, "on battery", 1.1).text
    assert bar == "drafts must promise more: on battery"


# ---------------------------------------------------------------- heat, time, queue


def test_heat_shortens_and_parks_and_gives_nothing_else_up() -> None:
    policy = PressurePolicy()
    assert run(policy, heat(94.0), range(60)) == [(0, "+shorten"), (2, "+park")]
    assert run(policy, heat(89.0), range(60, 200)) == []
    assert run(policy, heat(88.9), range(200, 300)) == [(230, "-park"), (232, "-shorten")]


def test_the_reasons_for_heat_have_the_numbers() -> None:
    hot = PressurePolicy().observe(heat(95.5), 0.0)[0].reason
    throttled = PressurePolicy().observe(heat(80.0, is_throttled=True), 0.0)[0].reason
    untold = PressurePolicy().observe(Reading(is_throttled=True), 0.0)[0].reason
    assert hot == "temperature 95.5 C has reached 94.0 C (trip point 99.0 C)"
    assert throttled == "the device is throttled at 80.0 C"
    assert untold == "the device is throttled"


def test_a_temperature_without_a_trip_point_is_no_pressure() -> None:
    assert PressurePolicy().observe(Reading(temperature_c=99.0), 0.0) == []


def test_slow_rounds_count_after_three_seconds() -> None:
    policy = PressurePolicy()
    seen = [
        (s, move)
        for s in range(10)
        for move in moves(policy.observe(Reading(), s, n_active=1, slowdown=1.8))
    ]
    assert seen == [(3, "+shorten"), (5, "+park")]
    assert policy.in_force[0].reason == (
        "rounds take 1.80x their profiled time, above 1.50x for 3 s"
    )


def test_one_round_in_time_restarts_the_three_seconds() -> None:
    policy = PressurePolicy()
    for second, slowdown in enumerate([1.8, 1.8, 1.8, 1.5, 1.8, 1.8, 1.8]):
        assert policy.observe(Reading(), second, n_active=1, slowdown=slowdown) == []


def test_a_slowdown_between_the_limits_keeps_steps_as_they_are() -> None:
    policy = PressurePolicy()
    for second in range(4):
        policy.observe(Reading(), second, n_active=1, slowdown=1.8)
    for second in range(4, 200):
        assert policy.observe(Reading(), second, n_active=1, slowdown=1.3) == []
    policy.observe(Reading(), 200, n_active=1, slowdown=1.2)
    lifted = policy.observe(Reading(), 230, n_active=1, slowdown=1.0)
    assert lifted == [
        Action("shorten", False, "rounds take 1.00x their profiled time, below 1.20x, for 30 s")
    ]


def test_a_slowdown_says_nothing_while_nothing_runs() -> None:
    policy = PressurePolicy()
    for second in range(20):
        assert policy.observe(Reading(), second, n_active=0, slowdown=9.0) == []


def test_a_long_queue_shortens_then_refuses_and_keeps_the_drafter() -> None:
    policy = PressurePolicy()
    actions = [a for s in range(9) for a in policy.observe(Reading(), s, queue_len=9, n_active=2)]
    assert moves(actions) == ["+shorten", "+refuse"]
    assert actions[1].reason == "9 requests wait, more than 8 for 2 active"


def test_a_queue_must_halve_before_requests_are_let_in() -> None:
    policy = PressurePolicy()
    for second in range(3):
        policy.observe(Reading(), second, queue_len=9, n_active=2)
    for second in range(3, 50):
        assert policy.observe(Reading(), second, queue_len=5, n_active=2) == []
    policy.observe(Reading(), 50, queue_len=4, n_active=2)
    lifted = policy.observe(Reading(), 60, queue_len=3, n_active=2)
    assert lifted == [Action("refuse", False, "3 requests wait, at most 4, for 10 s")]


def test_the_retry_hint_counts_down_once_the_pressure_is_gone() -> None:
    policy = PressurePolicy()
    assert policy.retry_s(0.0) is None
    policy.observe(ram(100), 0.0)
    assert policy.retry_s(5.0) == 10
    policy.observe(ram(900), 6.0)
    assert [policy.retry_s(s) for s in (6.0, 9.5, 15.9)] == [10, 7, 1]
    policy.observe(ram(900), 16.0)
    assert policy.retry_s(16.0) is None


def test_memory_lifts_nothing_that_heat_still_needs() -> None:
    policy = after(ram(100))
    hot = Reading(ram_free_bytes=4 * GB, ram_total_bytes=TOTAL, temperature_c=96.0, trip_c=99.0)
    lifted = [move for _, move in run(policy, hot, range(1, 500))]
    assert lifted == ["-refuse", "-shrink_idle", "-release_weights", "-release_context"]
    assert [a.kind for a in policy.in_force] == ["shorten", "park"]


# ---------------------------------------------------------------- what the scheduler reads


def test_the_budget_shrinks_to_half_the_drafts_and_to_the_anchors_when_parked() -> None:
    policy = PressurePolicy()
    assert policy.max_batch_tokens(3, 7, 64) == 64
    policy.observe(ram(212), 0.0)
    assert policy.max_batch_tokens(3, 7, 64) == 13
    assert policy.max_batch_tokens(3, 7, 12) == 12
    assert policy.max_batch_tokens(3, 16, 64) == 3 + 12  # long copies are rare: half of the usual
    policy.observe(ram(212), 2.0)
    assert policy.max_batch_tokens(3, 7, 64) == 3


def test_on_battery_drafts_must_promise_more_and_nothing_is_parked() -> None:
    policy = PressurePolicy()
    moved = policy.observe(Reading(on_battery=True, battery_percent=63.0), 0.0)
    assert moved == [Action("raise_bar", True, "on battery at 63 %", 1.1)]
    assert policy.bar == 1.1
    assert policy.max_batch_tokens(1, 7, 64) == 64
    moved = policy.observe(Reading(on_battery=True, battery_percent=19.0), 1.0)
    assert moved == [Action("raise_bar", True, "on battery at 19 %, below 20 %", 1.25)]


def test_the_bar_falls_once_the_charger_has_stayed_in() -> None:
    policy = after(Reading(on_battery=True))
    for second in range(1, 40):
        assert policy.observe(Reading(on_battery=second % 20 == 0), second) == []
    policy.observe(Reading(on_battery=True), 40)
    policy.observe(Reading(on_battery=False), 41)
    moved = policy.observe(Reading(on_battery=False), 71)
    assert moved == [Action("raise_bar", False, "not on battery, for 30 s", 1.0)]
    assert policy.bar == 1.0


def test_a_battery_around_its_limit_does_not_move_the_bar_to_and_fro() -> None:
    policy = PressurePolicy()
    n_moves = 0
    for second in range(1000):
        percent = 19.5 + (second // 50) % 2
        n_moves += len(policy.observe(Reading(on_battery=True, battery_percent=percent), second))
    assert n_moves == 1
    assert policy.bar == 1.25


def test_steps_and_the_bar_are_listed_together() -> None:
    policy = after(Reading(ram_free_bytes=212 * MB, on_battery=True))
    assert [a.kind for a in policy.in_force] == ["shorten", "raise_bar"]


# ---------------------------------------------------------------- asked by other threads


class Lifted(dict[str, Any]):
    """Steps in force, of which another thread lifts each as soon as it was found there."""

    def __contains__(self, step: object) -> bool:
        is_there = super().__contains__(step)
        self.pop(str(step), None)
        return is_there


def test_steps_that_are_lifted_while_they_are_listed_do_not_fail() -> None:
    policy = after(ram(149))
    policy._taken = Lifted(policy._taken)  # type: ignore[assignment]
    assert [a.kind for a in policy.in_force] == list(STEPS)


class OnceClear:
    """A refusal that nothing needs, and that another thread finds needed in the next moment."""

    def __init__(self) -> None:
        self._seen = iter([5.0])

    @property
    def clear_since_s(self) -> float | None:
        return next(self._seen, None)


def test_a_retry_hint_survives_pressure_that_returns_meanwhile() -> None:
    policy = after(ram(149))
    policy._taken["refuse"] = OnceClear()  # type: ignore[assignment]
    assert policy.retry_s(8.0) == 7


# ---------------------------------------------------------------- soaks


def checked_moves(readings: Iterable[Reading]) -> list[tuple[int, Action]]:
    """All transitions of a run at one observation a second, each checked against the state so far.

    A step is taken when no higher one is in force, and lifted when it is the highest.
    """
    policy = PressurePolicy()
    in_force: list[str] = []
    seen = []
    for second, reading in enumerate(readings):
        for action in policy.observe(reading, second):
            if action.is_on:
                assert all(STEPS.index(action.kind) > STEPS.index(s) for s in in_force)
                in_force.append(action.kind)
            else:
                assert in_force.pop() == action.kind
            assert action.reason
            seen.append((second, action))
        assert [a.kind for a in policy.in_force] == in_force
    return seen


def test_fifty_spells_of_pressure_are_taken_in_order_and_lifted_in_reverse() -> None:
    mild = [ram(250)] * 20 + [ram(2000)] * 180
    deep = [ram(250)] * 5 + [ram(90)] * 15 + [ram(2000)] * 180
    seen = checked_moves((mild + deep) * 25)
    up = [f"+{step}" for step in UP_TO_SHRINK]
    down = [f"-{step}" for step in reversed(UP_TO_SHRINK)]
    assert moves(a for _, a in seen) == (up + down + [*up, "+refuse", "-refuse", *down]) * 25


def test_pressure_that_comes_faster_than_the_re_arm_time_does_not_flap() -> None:
    seen = checked_moves(([ram(250)] * 10 + [ram(2000)] * 100) * 50 + [ram(2000)] * 200)
    up = [f"+{step}" for step in UP_TO_SHRINK]
    assert moves(a for _, a in seen) == up + [f"-{step}" for step in reversed(UP_TO_SHRINK)]


def test_noise_around_the_floor_takes_each_step_once() -> None:
    noise = random.Random(7)
    seen = checked_moves(ram(noise.uniform(260, 380)) for _ in range(3000))
    assert moves(a for _, a in seen) == [f"+{step}" for step in UP_TO_SHRINK]


def test_in_hours_of_random_memory_no_step_comes_back_before_its_re_arm_time() -> None:
    noise, free_mb, readings = random.Random(11), 500.0, []
    for _ in range(8_000):
        free_mb = min(1500.0, max(20.0, free_mb + noise.gauss(0.0, 30.0)))
        readings.append(ram(free_mb))
    taken_s: dict[str, int] = {}
    counts: Counter[str] = Counter()
    for second, action in checked_moves(readings):
        counts[action.kind] += 1
        if action.is_on:
            taken_s[action.kind] = second
        else:
            rearm_s = 120 if action.kind in RELEASES else 10 if action.kind == "refuse" else 30
            assert second - taken_s[action.kind] >= rearm_s
    assert [counts[step] for step in STEPS] == [4, 4, 4, 4, 4, 10]


def test_under_every_pressure_at_once_the_actions_add_up_to_what_is_in_force() -> None:
    noise, policy, in_force = random.Random(5), PressurePolicy(), dict[str, Action]()
    n_moves = 0
    for second in range(10_000):
        is_rough = second % 1000 < 400
        reading = Reading(
            ram_free_bytes=round(noise.uniform(100, 500) * MB) if is_rough else 2 * GB,
            temperature_c=noise.uniform(60, 99) if is_rough else 60.0,
            trip_c=99.0,
            on_battery=is_rough,
        )
        for action in policy.observe(
            reading,
            second,
            queue_len=noise.randrange(12) if is_rough else 0,
            n_active=2,
            slowdown=noise.uniform(1.0, 2.0) if is_rough else 1.0,
        ):
            assert action.is_on != (action.kind in in_force)
            n_moves += 1
            if action.is_on:
                in_force[action.kind] = action
            else:
                steps = [step for step in STEPS if step in in_force]
                assert action.kind in ("raise_bar", steps[-1])
                del in_force[action.kind]
        kinds = [*STEPS, "raise_bar"]
        assert list(policy.in_force) == [in_force[kind] for kind in kinds if kind in in_force]
    assert n_moves == 140
    assert in_force == {}


def test_the_same_observations_give_the_same_actions() -> None:
    noise = random.Random(3)
    readings = [ram(noise.uniform(50, 1000)) for _ in range(500)]
    assert checked_moves(readings) == checked_moves(readings)


def test_a_clock_that_goes_back_counts_as_standing_still() -> None:
    policy = PressurePolicy()
    policy.observe(ram(212), 10.0)
    assert policy.observe(ram(212), 5.0) == []
    assert moves(policy.observe(ram(212), 12.0)) == ["+park"]


# ---------------------------------------------------------------- limits


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"batch_factor": 1.5}, r"batch_factor 1\.5 is outside 0\.\.1"),
        ({"min_free_share": 0.5}, r"min_free_share 0\.5 is outside 0\.\.0\.125"),
        ({"battery_bar": 0.9}, r"battery_bar 0\.9 must be at least 1"),
        ({"low_battery_bar": 1.0}, r"battery_bar 1\.1 must be at least 1 and at most"),
        ({"max_slowdown": 1.1}, r"max_slowdown 1\.1 is below 1\.25"),
        ({"max_queue": 0}, r"max_queue 0 must be at least 1"),
    ],
)
def test_limits_out_of_range_are_refused(limits: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Limits(**limits)  # type: ignore[arg-type]
