"""Draws, their probabilities, and the weights that correct them."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from freshper import Exponential, NoDecay
from freshper.errors import ConfigError, SamplingError, UnknownNameError
from freshper.replay.draw.item_table import last_of_each
from freshper.replay.draw.sampler import (
    NORMALIZATIONS,
    TOWARD,
    PrioritySampler,
    check_alpha,
    check_correction,
)
from freshper.replay.freshness import Freshness, PowerLaw

ALL4 = np.arange(4)


def sampler_of(
    bases: Any, versions: Any = None, freshness: Freshness | None = None, alpha: float = 1.0, seed: int = 0
) -> PrioritySampler:
    bases = np.asarray(bases, dtype=np.float64)
    versions = np.zeros(len(bases), dtype=np.int64) if versions is None else np.asarray(versions, dtype=np.int64)
    sampler = PrioritySampler(len(bases), freshness or NoDecay(), alpha, seed)
    sampler.put(np.arange(len(bases)), bases, versions)
    return sampler


def by_definition(bases: Any, versions: Any, tau: float, alpha: float) -> NDArray[np.float64]:
    versions = np.asarray(versions, dtype=np.float64)
    scaled = (np.asarray(bases) * np.exp((versions - versions.max()) / tau)) ** alpha
    return scaled / scaled.sum()


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, 2.5])
@pytest.mark.parametrize("tau", [0.5, 12.0, 500.0])
def test_probabilities_follow_the_definition(alpha: float, tau: float) -> None:
    bases, versions = [3.0, 0.1, 11.0, 1.0], [3, 7, 0, 7]
    sampler = sampler_of(bases, versions, Exponential(tau), alpha)
    np.testing.assert_allclose(sampler.probabilities(ALL4), by_definition(bases, versions, tau, alpha), rtol=1e-13)


def test_a_draw_tells_the_probabilities_of_the_tree_that_it_was_drawn_from() -> None:
    sampler = sampler_of([1, 2, 3, 4], [0, 1, 2, 3], Exponential(2.0))
    slots, probabilities = sampler.draw(1000)
    np.testing.assert_array_equal(probabilities, sampler.probabilities(slots))
    assert set(slots) == {0, 1, 2, 3}


def test_set_bases_keeps_versions() -> None:
    sampler = sampler_of([1, 1, 1, 1], [0, 4, 8, 12], Exponential(4.0))
    sampler.set_bases(np.array([3, 0]), np.array([0.5, 7.0]))
    want = by_definition([7, 1, 1, 0.5], [0, 4, 8, 12], 4.0, 1.0)
    np.testing.assert_allclose(sampler.probabilities(ALL4), want, rtol=1e-13)


def test_drawable_counts_positive_bases_through_every_change() -> None:
    sampler = PrioritySampler(4, NoDecay(), 1.0, 0)
    counts = [sampler.drawable]
    for bases in ([0, 0], [1, 0], [1, 1], [0, 2], [0, 0], [5e-324, 0]):
        sampler.put(np.array([1, 3]), np.array(bases, dtype=np.float64), np.zeros(2, dtype=np.int64))
        counts.append(sampler.drawable)
        assert sampler.drawable == np.count_nonzero(sampler.bases)
    assert counts == [0, 0, 1, 2, 1, 0, 1]


def test_nothing_drawable_is_said() -> None:
    sampler = sampler_of([0.0, 0.0, 0.0, 0.0])
    np.testing.assert_array_equal(sampler.probabilities(ALL4), np.zeros(4))
    with pytest.raises(SamplingError, match=r"a draw of 3 .* no stored item has a positive priority \(capacity 4\)"):
        sampler.draw(3)


@pytest.mark.parametrize("alpha", [-0.1, np.nan, np.inf, 1e7])
def test_alpha_out_of_range_is_refused(alpha: float) -> None:
    with pytest.raises(ConfigError, match=r"alpha .* must lie in \[0, 1e\+06\]"):
        PrioritySampler(4, NoDecay(), alpha, 0)


@pytest.mark.parametrize("seed", [-1, 1.5, True, None, "0", np.random.default_rng(0)])
def test_a_seed_that_is_no_count_is_refused(seed: Any) -> None:
    """A Generator too: two buffers would share its state."""
    with pytest.raises(ConfigError, match="must be an int >= 0"):
        PrioritySampler(4, NoDecay(), 1.0, seed)


def test_numpy_integers_are_seeds() -> None:
    first, second = sampler_of([1, 2, 3, 4], seed=np.int64(9)), sampler_of([1, 2, 3, 4], seed=9)
    np.testing.assert_array_equal(first.draw(50)[0], second.draw(50)[0])


@pytest.mark.parametrize("extreme", [1e-6, 1e300])
def test_the_largest_alpha_and_rate_keep_every_key_finite(extreme: float) -> None:
    sampler = sampler_of([5e-324, 1.7e308, 1.0, 2.0], [0, 2**63 - 1, 2**63 - 1, 7], Exponential(extreme), 1e6)
    np.testing.assert_array_equal(sampler.probabilities(ALL4), [0, 1, 0, 0])


@pytest.mark.parametrize("beta", [-0.1, np.nan, np.inf])
def test_beta_out_of_range_is_refused(beta: float) -> None:
    with pytest.raises(ConfigError, match=r"beta .* must be finite and >= 0"):
        check_correction(beta, "uniform", "none")


def test_unknown_corrections_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'freshness'"):
        check_correction(1.0, "freshnes", "none")  # type: ignore[arg-type]
    with pytest.raises(UnknownNameError, match="Did you mean 'batch_max'"):
        check_correction(1.0, "uniform", "batchmax")  # type: ignore[arg-type]


@pytest.mark.parametrize("toward", TOWARD)
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_beta_zero_is_no_correction(toward: Any, normalization: Any) -> None:
    sampler = sampler_of([1, 2, 3, 4], [0, 1, 2, 3], Exponential(1.0))
    weights = sampler.sampling_weights(*sampler.draw(20), 0.0, toward, normalization)
    np.testing.assert_array_equal(weights, np.ones(20))


@pytest.mark.parametrize("toward", TOWARD)
@pytest.mark.parametrize("beta", [0.4, 1.0])
def test_weights_are_the_ratio_of_the_target_to_the_draw(toward: Any, beta: float) -> None:
    bases, versions, tau, alpha = np.array([1.0, 2.0, 0.5, 4.0]), [0, 3, 5, 9], 4.0, 0.6
    sampler = sampler_of(bases, versions, Exponential(tau), alpha)
    target = np.full(4, 0.25) if toward == "uniform" else by_definition(np.ones(4), versions, tau, alpha)
    want = (target / by_definition(bases, versions, tau, alpha)) ** beta
    drawn = sampler.probabilities(ALL4)
    np.testing.assert_allclose(sampler.sampling_weights(ALL4, drawn, beta, toward, "none"), want, rtol=1e-13)
    largest = sampler.sampling_weights(ALL4, drawn, beta, toward, "batch_max")
    np.testing.assert_allclose(largest, want / want.max(), rtol=1e-13)
    assert largest.max() == 1.0
    mean = sampler.sampling_weights(ALL4, drawn, beta, toward, "mean")
    np.testing.assert_allclose(mean, want / want.mean(), rtol=1e-13)
    assert mean.mean() == pytest.approx(1.0, rel=1e-15)


def test_full_correction_toward_uniform_gives_the_uniform_mean() -> None:
    """Sum of P_i w_i x_i is the plain mean: freshness is cancelled with the priority (method.md, 2)."""
    bases, values = np.array([1.0, 2.0, 0.5, 4.0]), np.array([3.0, -1.0, 10.0, 0.0])
    sampler = sampler_of(bases, [0, 3, 5, 9], Exponential(4.0), 0.6)
    drawn = sampler.probabilities(ALL4)
    weights = sampler.sampling_weights(ALL4, drawn, 1.0, "uniform", "none")
    assert drawn @ (weights * values) == pytest.approx(values.mean(), rel=1e-13)


def test_full_correction_toward_freshness_keeps_the_freshness() -> None:
    bases, values = np.array([1.0, 2.0, 0.5, 4.0]), np.array([3.0, -1.0, 10.0, 0.0])
    sampler = sampler_of(bases, [0, 3, 5, 9], Exponential(4.0), 0.6)
    drawn = sampler.probabilities(ALL4)
    weights = sampler.sampling_weights(ALL4, drawn, 1.0, "freshness", "none")
    fresh = by_definition(np.ones(4), [0, 3, 5, 9], 4.0, 0.6)
    assert drawn @ (weights * values) == pytest.approx(fresh @ values, rel=1e-13)


def test_items_that_are_never_drawn_are_no_target() -> None:
    sampler = sampler_of([1.0, 0.0, 3.0, 0.0], [0, 100, 2, 100], Exponential(2.0))
    slots = np.array([0, 2])
    drawn = sampler.probabilities(slots)
    for toward, target in (("uniform", [0.5, 0.5]), ("freshness", by_definition([1, 1], [0, 2], 2.0, 1.0))):
        weights = sampler.sampling_weights(slots, drawn, 1.0, toward, "none")  # type: ignore[arg-type]
        np.testing.assert_allclose(weights, np.asarray(target) / drawn, rtol=1e-13)


def test_the_freshness_index_follows_every_change() -> None:
    """It is made when first asked for, and must then see adds, evictions, zeros and re-bases."""
    sampler = sampler_of([1, 2, 3, 4], [0, 1, 2, 3], Exponential(2.0))
    sampler.sampling_weights(*sampler.draw(4), 1.0, "freshness", "none")
    changes = [([0], [5.0], [4]), ([1, 2], [0.0, 1.0], [5, 5]), ([3], [1e-9], [400]), ([3], [0.0], [400])]
    for slots, bases, versions in [*changes, ([1], [2.0], [3])]:
        sampler.put(np.array(slots), np.array(bases), np.array(versions))
        live = np.flatnonzero(sampler.bases)
        fresh = by_definition(np.ones(len(live)), sampler.versions[live], 2.0, 1.0)
        drawn = sampler.probabilities(live)
        shown = drawn > 1e-200
        got = sampler.sampling_weights(live[shown], drawn[shown], 1.0, "freshness", "none")
        np.testing.assert_allclose(got, fresh[shown] / drawn[shown], rtol=1e-12)


def test_the_freshness_index_has_a_range_of_its_own() -> None:
    """A tiny base hides a leap of the versions from the index of priorities: 5e-324 weighs as much as 744 tau."""
    sampler = sampler_of([1, 2, 3, 4], [0, 1, 2, 3], Exponential(1.0))
    sampler.sampling_weights(*sampler.draw(4), 1.0, "freshness", "none")
    for base in (5e-324, 0.0):  # comes, and is gone
        sampler.put(np.array([3]), np.array([base]), np.array([763]))
        slots = np.arange(3)
        drawn = sampler.probabilities(slots)
        got = sampler.sampling_weights(slots, drawn, 1.0, "freshness", "batch_max")
        np.testing.assert_allclose(got, [1.0, 1 / 2, 1 / 3], rtol=1e-12)


def test_state_and_restore_make_the_same_weights_bit_for_bit() -> None:
    """The freshness index has a reference of its own, which a fresh index would not choose again."""
    sampler = sampler_of([1, 2, 3, 4], [0, 1, 2, 3], Exponential(2.0), 0.7, seed=5)
    sampler.sampling_weights(*sampler.draw(4), 1.0, "freshness", "none")
    sampler.put(np.array([1]), np.array([0.3]), np.array([19]))
    facts, arrays = sampler.state(ALL4)
    other = PrioritySampler(4, Exponential(2.0), 0.7, 0)
    other.restore(ALL4, facts, arrays)
    assert other.drawable == sampler.drawable
    for _ in range(20):
        mine, theirs = sampler.draw(7), other.draw(7)
        np.testing.assert_array_equal(mine[0], theirs[0])
        np.testing.assert_array_equal(mine[1], theirs[1])
        weights = [each.sampling_weights(*mine, 0.4, "freshness", "none") for each in (sampler, other)]
        np.testing.assert_array_equal(*weights)


@pytest.mark.parametrize("last", [0, 1, 2])
def test_a_rebase_takes_the_newest_drawable_item_as_the_epoch(last: int) -> None:
    versions = [10, 20, 30]
    sampler = sampler_of([float(number <= last) for number in range(3)], versions, Exponential(5.0))
    sampler.indexes[0].rebuild()
    assert sampler.indexes[0].keying.epoch == versions[last]


def test_a_rebase_of_nothing_starts_at_zero() -> None:
    sampler = sampler_of([0.0, 0.0], [5, 6], Exponential(5.0))
    sampler.indexes[0].rebuild()
    assert sampler.indexes[0].keying.epoch == 0
    assert sampler.indexes[0].tree.total == 0.0


NONE = np.nan
SHARING = {
    "by mass": {"shares": [NONE, NONE, NONE], "caps": [1.0, 1.0, 1.0]},
    "one share": {"shares": [0.6, NONE, NONE], "caps": [1.0, 1.0, 1.0]},
    "all shared": {"shares": [0.2, 0.3, 0.5], "caps": [1.0, 1.0, 1.0]},
    "one without": {"shares": [0.2, 0.8, NONE], "caps": [1.0, 1.0, 1.0]},
    "capped": {"shares": [NONE, 0.3, NONE], "caps": [0.1, 1.0, 1.0]},
    "all capped": {"shares": [NONE, NONE, NONE], "caps": [0.3, 0.2, 0.1]},
}


def several_tasks(bases: NDArray[np.float64], sharing: str, alpha: float) -> PrioritySampler:
    """12 items of three tasks at version 40; the last task decays by a function."""
    decays: list[Freshness] = [Exponential(9.0), NoDecay(), PowerLaw(5.0)]
    sampler = PrioritySampler(12, decays, alpha, 0, **SHARING[sharing])  # type: ignore[arg-type]
    versions = np.array([0, 30, 35, 40] * 3)
    sampler.put(np.arange(12), bases, versions, np.repeat([0, 1, 2], 4).astype(np.int16))
    sampler.advance(40)
    sampler.refresh()
    return sampler


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("toward", TOWARD)
@pytest.mark.parametrize("beta", [0.4, 1.0])
def test_weights_over_several_tasks_are_the_ratio_of_two_distributions(sharing: str, toward: Any, beta: float) -> None:
    """The target toward freshness is what would be drawn if all drawable items had base 1, shared alike."""
    bases = np.random.default_rng(6).exponential(size=12) + 0.05
    bases[[3, 4]] = 0
    sampler = several_tasks(bases, sharing, 0.6)
    chances = sampler.probabilities(np.arange(12))
    flat = several_tasks((bases > 0).astype(np.float64), sharing, 0.6).probabilities(np.arange(12))
    drawn = np.flatnonzero(chances)
    target = flat[drawn] if toward == "freshness" else np.full(len(drawn), 1 / len(drawn))
    want = (target / chances[drawn]) ** beta
    some = np.array([0, 2, 5])  # of what can be drawn; the largest of all is not always among them
    scales = {"none": 1.0, "batch_max": want[some].max(), "mean": want[some].mean(), "buffer_max": want.max()}
    for normalization, scale in scales.items():
        slots = drawn[some]
        got = sampler.sampling_weights(slots, chances[slots], beta, toward, normalization)  # type: ignore[arg-type]
        np.testing.assert_allclose(got, want[some] / scale, rtol=1e-12, err_msg=normalization)


def test_a_freshness_that_underflows_in_one_task_makes_no_weight_up() -> None:
    """A task whose freshness is e^-1381 of the other's, and whose bases make up for it."""
    decays: list[Freshness] = [Exponential(1.0), NoDecay()]
    sampler = PrioritySampler(2, decays, 1.0, 0, shares=[NONE, NONE], caps=[1.0, 1.0])
    sampler.put(np.arange(2), np.array([1e300, 1e-300]), np.zeros(2, dtype=np.int64), np.array([0, 1], dtype=np.int16))
    sampler.advance(1381)
    chances = sampler.probabilities(np.arange(2))
    assert 0.1 < chances.min() < chances.max() < 1
    weights = sampler.sampling_weights(np.arange(2), chances, 0.5, "freshness", "none")
    np.testing.assert_allclose(weights, np.sqrt(np.exp([-1381, 0]) / chances), rtol=1e-9, atol=1e-290)
    scaled = sampler.sampling_weights(np.array([0, 0]), chances[[0, 0]], 1.0, "freshness", "mean")
    np.testing.assert_array_equal(scaled, [1.0, 1.0])


@pytest.mark.parametrize(
    "slots", [[], [4], [1, 3, 9], [1, 1, 3, 3, 3, 9], [9, 1, 9, 3, 1], [5, 5, 5, 5], [2, 1], [1, 2, 2, 1]]
)
def test_of_a_slot_that_occurs_several_times_the_last_value_stays(slots: list[int]) -> None:
    values = np.arange(len(slots)) + 0.5
    expected = dict(zip(slots, values.tolist(), strict=True))
    kept, chosen = last_of_each(np.array(slots, dtype=np.int64), values)
    assert len(kept) == len(set(slots))
    assert dict(zip(kept.tolist(), chosen.tolist(), strict=True)) == expected


@pytest.mark.parametrize("switch", ["0", "1"])
def test_values_that_are_too_few_are_refused(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    monkeypatch.setenv("FRESHPER_COMPILED", switch)
    sampler = PrioritySampler(3, NoDecay(), 1.0, seed=0)
    sampler.put(np.arange(3), np.ones(3), np.zeros(3, dtype=np.int64))
    with pytest.raises((ValueError, IndexError)):
        sampler.set_bases(np.array([0, 1, 2]), np.array([5.0, 6.0]))
    np.testing.assert_array_equal(sampler.probabilities(np.arange(3)), np.full(3, 1 / 3))


@pytest.mark.parametrize("alpha", [0.0, 0.7, 1.0, 2.5])
@pytest.mark.parametrize("rate", [0.0, 0.01, 40.0])
@pytest.mark.parametrize("spread", [1.0, 200.0])
def test_both_versions_of_the_index_write_the_same_bits(alpha: float, rate: float, spread: float) -> None:
    """Random histories of one task; the compiled pass and numpy's must leave the same trees and counts.

    Other trees that somebody has asked for change no bit of the drawn one, and all of it is what logarithms say.
    """
    pytest.importorskip("numba")
    decay = Exponential(1 / rate) if rate else NoDecay()
    for seed in range(3):
        results = []
        for switch, others in (("0", False), ("1", False), ("0", True), ("1", True)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("FRESHPER_COMPILED", switch)
                results.append(_history(seed, decay, alpha, spread, others=others))
            assert results[-1]["compiled"] is (switch == "1")
        for result in results[1:]:
            for name in ("leaves", "slots", "chances", "weights"):
                np.testing.assert_array_equal(result[name], results[0][name], err_msg=name)
            assert result["facts"] == results[0]["facts"]


def _history(seed: int, freshness: Freshness, alpha: float, spread: float, *, others: bool) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    sampler = PrioritySampler(37, freshness, alpha, seed=1)
    index = sampler.indexes[0]
    drawn, chances, weights = [], [], []
    for version in range(60):
        slots = rng.choice(37, size=8, replace=False)
        bases = rng.choice([0.0, 1e-12, 0.5, 3.0], size=8) * np.exp(rng.normal(scale=spread, size=8).clip(-600, 600))
        sampler.put(slots, bases, np.full(8, version * int(rng.integers(1, 9))))
        sampler.set_bases(slots[[0, 1, 0]], np.exp(rng.normal(scale=spread, size=3).clip(-600, 600)))
        if others and version == 20:
            index.freshness_tree()
            index.smallest("lowest")
        if version % 7 == 3:
            sampler.remove(slots[3:5])
        if sampler.drawable:
            one, chance = sampler.draw(5)
            drawn.append(one)
            chances.append(chance)
            weights.append(sampler.sampling_weights(one, chance, 0.4, "uniform", "batch_max"))
            _check_exact(sampler, alpha)
    facts = (sampler.drawable, index.tree.reference, index.keying.epoch)
    found = {"leaves": index.tree.leaves().copy(), "slots": np.array(drawn), "chances": np.array(chances)}
    return found | {"weights": np.array(weights), "facts": facts, "compiled": index.tree.compiled}


def _check_exact(sampler: PrioritySampler, alpha: float) -> None:
    """P(i) against 80-bit logarithms, wherever it is above 1e-250."""
    table = sampler.table
    assert sampler.drawable == np.count_nonzero(table.bases) == np.count_nonzero(table.alive)
    rate = sampler.indexes[0].keying.rate
    here = np.flatnonzero(table.bases)
    bases, versions = table.bases[here].astype(np.longdouble), table.versions[here].astype(np.longdouble)
    logs = np.longdouble(alpha) * (np.log(bases) + versions * np.longdouble(rate))
    exact = np.exp(logs - logs.max())
    exact /= exact.sum()
    chances = sampler.probabilities(here)
    seen = exact > 1e-250
    np.testing.assert_allclose(chances[seen], exact[seen].astype(np.float64), rtol=2e-12)
    assert (chances[~seen] < 1e-249).all()


NO_NUMBERS: list[Any] = ["1", None, True, np.ones(2), np.ones(1), [1.0], {}, 1j, 10**400]


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_an_alpha_or_a_beta_that_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="alpha"):
        check_alpha(value)
    with pytest.raises(ConfigError, match="beta"):
        check_correction(value, "uniform", "none")


@pytest.mark.parametrize("value", [None, 3, ["uniform"], {}, np.array(["uniform", "none"]), np.ones(3)])
@pytest.mark.parametrize("name", ["toward", "normalization", "method"])
def test_names_of_another_type_are_unknown(name: str, value: Any) -> None:
    with pytest.raises(UnknownNameError, match="Known: "):
        check_correction(**({"beta": 1.0, "toward": "uniform", "normalization": "none"} | {name: value}))


@pytest.mark.parametrize("value", [0, 1, np.float32(0.5), np.int64(1)])
def test_numbers_of_any_kind_are_alphas(value: Any) -> None:
    assert (type(check_alpha(value)), check_alpha(value)) == (float, value)
