"""The emission rule against numpy: the chain, the shared noise, exact distributions, no bias."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from dspark_edge import _core
from dspark_edge.scheduler import choose_lengths

Array = NDArray[np.float32]
Row = NDArray[np.float64]
N_SEEDS = 20_000
P_TINY = (0.45, 0.25, 0.15, 0.1, 0.05)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """What draw_token is asked to do, in the words of SamplingConfig."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_last_n: int = 64
    penalty_from: int = 0
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def config(self) -> _core.SamplingConfig:
        return _core.SamplingConfig(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repeat_penalty=self.repeat_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            penalty_last_n=self.penalty_last_n,
            penalty_from=self.penalty_from,
            seed=self.seed,
            logit_bias=list(self.logit_bias),
        )


def noise(seed: int, position: int, n: int) -> Row:
    return np.array([_core.gumbel_noise(seed, position, token) for token in range(n)])


def scores(logits: Array, chain: Chain, position: int, before: Sequence[int]) -> Row:
    """z / temperature + noise, -inf where the chain forbids; logits themselves at temperature 0."""
    z = np.array(logits, np.float32)
    counted = before[chain.penalty_from :]
    window = counted[len(counted) - min(len(counted), chain.penalty_last_n) :]
    for token in set(window):
        z[token] = (
            z[token] * np.float32(chain.repeat_penalty)
            if z[token] <= 0
            else z[token] / np.float32(chain.repeat_penalty)
        )
        count = np.float32(window.count(token))
        z[token] -= count * np.float32(chain.frequency_penalty) + np.float32(chain.presence_penalty)
    for token, bias in chain.logit_bias:
        z[token] += np.float32(bias)
    if chain.temperature == 0:
        return z.astype(np.float64)
    floor = -math.inf
    if 0 < chain.top_k < len(z):
        floor = float(np.sort(z)[-chain.top_k])
    if chain.top_p < 1:
        kept = np.sort(z[z >= floor].astype(np.float64))[::-1]
        mass = np.cumsum(np.exp(kept - kept[0]))
        floor = float(kept[np.argmax(mass >= chain.top_p * mass[-1])])
    if chain.min_p > 0:
        floor = max(floor, float(z.max()) + math.log(chain.min_p))
    scaled = z.astype(np.float64) * float(np.float32(1) / np.float32(chain.temperature))
    return np.where(z >= floor, scaled + noise(chain.seed, position, len(z)), -math.inf)


def assert_same_draw(
    logits: Array, chain: Chain, *, position: int = 7, before: Sequence[int] = ()
) -> None:
    token, margin = _core.draw_token(logits, chain.config(), position, list(before))
    expected = scores(logits, chain, position, before)
    assert token == int(expected.argmax())
    second, first = np.sort(expected)[-2:]
    unit = chain.temperature or 1.0
    if second == -math.inf:  # one survivor of the truncation: its lead over what was cut off
        uncut = scores(logits, replace(chain, temperature=0.0), position, before)
        second, first = np.sort(uncut)[-2:]
        unit = 1.0
    assert margin == pytest.approx((first - second) * unit, rel=1e-5, abs=1e-5 * unit)


def frequencies(chain_of: dict[str, float], logits: Array) -> NDArray[np.int64]:
    counts = np.zeros(len(logits), np.int64)
    for seed in range(N_SEEDS):
        config = _core.SamplingConfig(temperature=1.0, seed=seed, **chain_of)  # type: ignore[arg-type]
        counts[_core.draw_token(logits, config, 3)[0]] += 1
    return counts


def log_p(p: Sequence[float]) -> Array:
    return np.log(np.array(p)).astype(np.float32)


# ---------------------------------------------------------------- the chain


@pytest.mark.parametrize("n", [1, 2, 17, 255, 256, 257, 1000, 49_152])
def test_winner_and_margin_of_a_random_row_equal_the_reference(n: int) -> None:
    random = np.random.default_rng(n)
    for seed in range(3 if n > 10_000 else 40):
        logits = (random.standard_normal(n) * 4).astype(np.float32)
        for temperature in (0.0, 0.3, 1.0, 1.7):
            chain = Chain(temperature=temperature, seed=seed)
            if n == 1:
                assert _core.draw_token(logits, chain.config(), 7) == (0, math.inf)
            else:
                assert_same_draw(logits, chain, position=seed)


@pytest.mark.parametrize(
    "chain",
    [
        Chain(top_k=1),
        Chain(top_k=40),
        Chain(top_k=100_000),
        Chain(top_p=0.9),
        Chain(top_p=1e-6),
        Chain(min_p=0.05),
        Chain(min_p=1.0),
        Chain(top_k=50, top_p=0.8, min_p=0.02, temperature=0.7),
        Chain(top_k=3, top_p=0.999, temperature=1.5),
    ],
    ids=str,
)
@pytest.mark.parametrize("n", [5, 300, 49_152])
def test_truncated_draws_equal_the_reference(chain: Chain, n: int) -> None:
    random = np.random.default_rng(1)
    for position in range(2 if n > 10_000 else 30):
        logits = (random.standard_normal(n) * 3).astype(np.float32)
        assert_same_draw(logits, chain, position=position)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "penalties",
    [
        {"repeat_penalty": 1.3},
        {"frequency_penalty": 0.7},
        {"presence_penalty": -1.5},
        {"repeat_penalty": 0.8, "frequency_penalty": 0.2, "presence_penalty": 0.4},
        {"repeat_penalty": 2.0, "penalty_last_n": 3},
        {"repeat_penalty": 2.0, "penalty_last_n": 0},
        {"repeat_penalty": 2.0, "penalty_from": 76},
        {"presence_penalty": 1.5, "penalty_from": 70, "penalty_last_n": 4},
        {"frequency_penalty": 0.7, "penalty_from": 80},
        {"repeat_penalty": 2.0, "penalty_from": 81},
    ],
    ids=str,
)
def test_penalised_draws_equal_the_reference(
    penalties: dict[str, float], temperature: float
) -> None:
    random = np.random.default_rng(2)
    chain = Chain(temperature=temperature, **penalties)  # type: ignore[arg-type]
    for position in range(30):
        logits = random.standard_normal(40).astype(np.float32)
        before = random.integers(0, 40, 80).tolist()
        assert_same_draw(logits, chain, position=position, before=before)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_biased_draws_equal_the_reference(temperature: float) -> None:
    random = np.random.default_rng(3)
    bias = ((3, 2.5), (4, -math.inf), (5, -2.0), (3, 0.5))
    chain = Chain(temperature=temperature, logit_bias=bias, top_k=0 if temperature == 0 else 6)
    for position in range(30):
        assert_same_draw(random.standard_normal(12).astype(np.float32), chain, position=position)


def test_at_temperature_zero_a_tie_goes_to_the_lower_token_with_margin_zero() -> None:
    row = [0.0, 5.0, 1.0, 5.0]
    assert _core.draw_token(np.array(row, np.float32), _core.SamplingConfig(), 0) == (1, 0.0)


def test_all_tokens_tied_are_decided_by_the_noise_alone() -> None:
    for n in (3, 300, 5000):
        assert_same_draw(np.full(n, 2.0, np.float32), Chain(seed=n))


def test_tokens_tied_at_the_edge_of_top_k_and_top_p_all_stay() -> None:
    row = np.array([3.0] + [1.0] * 5 + [0.0] * 5, np.float32)
    for position in range(50):
        assert_same_draw(row, Chain(top_k=2), position=position)
        assert_same_draw(row, Chain(top_p=0.7), position=position)


def test_rows_with_minus_infinity_draw_among_the_rest() -> None:
    random = np.random.default_rng(4)
    for position in range(30):
        row = random.standard_normal(600).astype(np.float32)
        row[random.permutation(600)[:590]] = -np.inf
        for chain in (Chain(), Chain(top_k=20), Chain(top_p=0.5), Chain(temperature=0.0)):
            assert_same_draw(row, chain, position=position)


def test_a_single_allowed_token_wins_with_an_infinite_margin() -> None:
    row = np.full(600, -np.inf, np.float32)
    row[417] = -3.0
    for temperature in (0.0, 1.0):
        chain = Chain(temperature=temperature, top_p=0.5)
        assert _core.draw_token(row, chain.config(), 1) == (417, math.inf)


@pytest.mark.parametrize("chain", [Chain(top_p=0.5), Chain(top_k=1), Chain(min_p=0.9)], ids=str)
def test_the_margin_of_a_lone_survivor_is_its_lead_over_what_was_cut_off(chain: Chain) -> None:
    row = np.array([1.0, 4.0, 1.5, -2.0], np.float32)
    for temperature in (0.5, 1.0):
        config = replace(chain, temperature=temperature).config()
        assert _core.draw_token(row, config, 1) == (1, 2.5)


def test_a_row_without_an_allowed_token_gives_token_minus_one() -> None:
    row = np.full(600, -np.inf, np.float32)
    for temperature in (0.0, 1.0):
        assert _core.draw_token(row, Chain(temperature=temperature).config(), 1)[0] == -1


@pytest.mark.parametrize("temperature", [0.002, 0.01, 20.0, 100.0])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_extreme_temperatures_and_scales_equal_the_reference(
    temperature: float, scale: float
) -> None:
    random = np.random.default_rng(5)
    for position in range(10):
        row = (random.standard_normal(3000) * scale).astype(np.float32)
        assert_same_draw(row, Chain(temperature=temperature), position=position)


def test_a_temperature_below_a_thousandth_is_greedy() -> None:
    row = np.array([1.0, 1.0001, 0.0], np.float32)
    for seed in range(50):
        token, _ = _core.draw_token(row, _core.SamplingConfig(temperature=1e-4, seed=seed), 0)
        assert token == 1


def test_the_row_given_is_left_as_it_was() -> None:
    row = np.arange(5, dtype=np.float32)
    chain = Chain(repeat_penalty=2.0, logit_bias=((1, 9.0),))
    _core.draw_token(row, chain.config(), 0, [3, 4])
    assert row.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


# ---------------------------------------------------------------- the distribution


def test_draws_follow_the_exact_distribution() -> None:
    counts = frequencies({}, log_p(P_TINY))
    assert stats.chisquare(counts, np.array(P_TINY) * N_SEEDS).pvalue > 0.01


@pytest.mark.parametrize(
    ("truncation", "n_kept"),
    [({"top_k": 3}, 3), ({"top_p": 0.6}, 2), ({"min_p": 0.3}, 3), ({"top_k": 3, "top_p": 0.7}, 2)],
    ids=str,
)
def test_truncated_draws_follow_the_exact_distribution(
    truncation: dict[str, float], n_kept: int
) -> None:
    counts = frequencies(truncation, log_p(P_TINY))
    p = np.array(P_TINY[:n_kept]) / sum(P_TINY[:n_kept])
    assert counts[n_kept:].sum() == 0
    assert stats.chisquare(counts[:n_kept], p * N_SEEDS).pvalue > 0.01


def test_temperature_sharpens_the_distribution_exactly() -> None:
    p = np.array(P_TINY) ** 2
    counts = np.zeros(5, np.int64)
    for seed in range(N_SEEDS):
        config = _core.SamplingConfig(temperature=0.5, seed=seed)
        counts[_core.draw_token(log_p(P_TINY), config, 3)[0]] += 1
    assert stats.chisquare(counts, p / p.sum() * N_SEEDS).pvalue > 0.01


def test_positions_of_one_seed_follow_the_exact_distribution() -> None:
    counts = np.zeros(5, np.int64)
    config = _core.SamplingConfig(temperature=1.0, seed=11)
    for position in range(N_SEEDS):
        counts[_core.draw_token(log_p(P_TINY), config, position)[0]] += 1
    assert stats.chisquare(counts, np.array(P_TINY) * N_SEEDS).pvalue > 0.01


def test_pairs_of_neighbouring_positions_are_independent() -> None:
    table = np.zeros((3, 3))
    for seed in range(N_SEEDS):
        config = _core.SamplingConfig(temperature=1.0, seed=seed)
        first, second = (
            _core.draw_token(log_p((0.5, 0.3, 0.2)), config, position)[0] for position in (8, 9)
        )
        table[first, second] += 1
    assert stats.chi2_contingency(table).pvalue > 0.01


# ---------------------------------------------------------------- the noise


def streams() -> dict[str, Row]:
    """The noise walked along each of its three keys, and along neighbours of them."""
    n = N_SEEDS
    return {
        "tokens": noise(1, 5, n),
        "tokens, next position": noise(1, 6, n),
        "tokens, next seed": noise(2, 5, n),
        "tokens, seed 2^63": noise(2**63, 5, n),
        "positions": np.array([_core.gumbel_noise(1, i, 5) for i in range(n)]),
        "positions, next token": np.array([_core.gumbel_noise(1, i, 6) for i in range(n)]),
        "seeds": np.array([_core.gumbel_noise(i, 1, 5) for i in range(n)]),
        "seeds, next position": np.array([_core.gumbel_noise(i, 2, 5) for i in range(n)]),
    }


def test_noise_along_each_key_is_standard_gumbel() -> None:
    for name, stream in streams().items():
        assert stats.kstest(stream, "gumbel_r").pvalue > 0.01, name


def test_noise_streams_do_not_correlate_at_any_small_shift() -> None:
    all_streams = list(streams().items())
    limit = 4.5 / math.sqrt(N_SEEDS)
    for a, (name_a, first) in enumerate(all_streams):
        for name_b, second in all_streams[a:]:
            for shift in range(4):
                if first is second and shift == 0:
                    continue
                r = np.corrcoef(first[shift:], second[: N_SEEDS - shift])[0, 1]
                assert abs(r) < limit, f"{name_a} and {name_b}, shifted by {shift}: r = {r}"


def test_noise_streams_of_other_keys_share_no_run_of_values() -> None:
    base = noise(1, 5, N_SEEDS)
    for seed, position in ((1, 6), (2, 5), (5, 1), (2**32 + 1, 5), (1, 2**30)):
        # 20,000 values of 2^32 each: by chance they share 0.1 of them.
        assert len(np.intersect1d(base, noise(seed, position, N_SEEDS))) <= 3


def test_no_two_of_forty_thousand_keys_give_the_same_noise() -> None:
    first = {
        (_core.gumbel_noise(seed, position, 0), _core.gumbel_noise(seed, position, 1))
        for seed in range(200)
        for position in range(200)
    }
    assert len(first) == 40_000


# ---------------------------------------------------------------- drafting with the same noise


@pytest.mark.parametrize("sharpness", [0.3, 1.0, 3.0])
def test_shared_noise_draws_agree_at_least_as_often_as_the_bound_says(sharpness: float) -> None:
    random = np.random.default_rng(6)
    p, q = (stats.dirichlet.rvs([sharpness] * 8, random_state=random)[0] for _ in range(2))
    n_agree = 0
    for seed in range(N_SEEDS):
        config = _core.SamplingConfig(temperature=1.0, seed=seed)
        draws = [_core.draw_token(log_p(row), config, 4)[0] for row in (p, q)]
        n_agree += draws[0] == draws[1]
    tv = 0.5 * float(np.abs(p - q).sum())
    assert n_agree / N_SEEDS >= (1 - tv) / (1 + tv) - 0.01
    assert n_agree / N_SEEDS <= 1 - tv + 0.01


def test_a_scheduler_that_looks_at_the_drafts_does_not_bias_the_text() -> None:
    """SCENARIO 6 (DSpark, appendix A): rejection sampling would give P(A) = 0.85 here."""
    p, q = log_p((0.7, 0.3)), log_p((0.5, 0.5))
    seconds = {1: 1 / 1.0, 2: 1 / 0.5, 3: 1 / 0.45}
    n_first_a = n_second_a = n_second = 0
    lengths = set()
    for seed in range(N_SEEDS):
        config = _core.SamplingConfig(temperature=1.0, seed=seed)
        draft = [_core.draw_token(q, config, position)[0] for position in (1, 2)]
        c2 = 0.9 if draft[0] == 0 else 0.0
        plan = choose_lengths(
            [[0.8, 0.8 * c2]], lambda b: seconds[b], draft_s=0.0, other_s=0.0, max_batch_tokens=3
        )
        lengths.add((draft[0], plan.verify_lens))
        emitted: list[int] = []
        for position, guess in zip((1, 2, 3), [*draft[: plan.verify_lens[0]], None], strict=False):
            emitted.append(_core.draw_token(p, config, position)[0])
            if emitted[-1] != guess:
                break
        n_first_a += emitted[0] == 0
        if len(emitted) > 1:
            n_second += 1
            n_second_a += emitted[1] == 0
    assert lengths == {(0, (2,)), (1, (0,))}
    assert n_first_a / N_SEEDS == pytest.approx(0.70, abs=0.01)
    assert n_second_a / n_second == pytest.approx(0.70, abs=0.01)
