"""Decays with age: their values, what is refused, and their descriptions."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from freshper import Exponential, NoDecay, ReplayBuffer, Trajectory
from freshper.errors import ConfigError, UnknownNameError
from freshper.replay.freshness import (
    Floored,
    Freshness,
    PowerLaw,
    check_freshness,
    describe_freshness,
    freshness_from,
    log_freshness,
    make_freshness,
    max_age_of,
    static_rate,
)

Make = Callable[..., Trajectory]
Filled = Callable[..., ReplayBuffer]


@dataclass(frozen=True)
class Custom:
    rate: Any

    def __call__(self, ages: Any) -> Any:
        return np.exp(-self.rate * np.asarray(ages))


class Doubled(Exponential):
    """A decay of a user, derived from ours, whose rate is not what it does."""

    @property
    def rate(self) -> float:
        return 2 / self.tau


class Squared(Exponential):
    """One that does what its rate says."""

    @property
    def rate(self) -> float:
        return 2 / self.tau

    def __call__(self, ages: Any) -> NDArray[np.float64]:
        return np.exp(-2 * np.asarray(ages) / self.tau)


@dataclass(frozen=True)
class Promise:
    """exp(-age / 500) up to ``end``, then 0; says that its end is ``max_age``."""

    end: float
    max_age: Any = None
    rate: float = 1 / 500

    def __call__(self, ages: Any) -> NDArray[np.float64]:
        ages = np.asarray(ages)
        return np.where(ages <= self.end, np.exp(-ages / 500), 0.0)


def test_exponential_is_the_formula_of_the_paper() -> None:
    ages = np.array([0, 1, 500, 1000])
    np.testing.assert_allclose(Exponential(500)(ages), np.exp(-ages / 500), rtol=1e-15)
    assert Exponential(500)(0) == 1.0
    assert Exponential(500)(500) == pytest.approx(1 / np.e, rel=1e-15)
    assert Exponential(500).rate == 1 / 500


def test_half_of_the_freshness_is_left_after_tau_ln_2_versions() -> None:
    assert Exponential(10.0)(10.0 * np.log(2)) == pytest.approx(0.5, rel=1e-14)


def test_no_decay_is_one_at_every_age_and_keeps_the_shape() -> None:
    np.testing.assert_array_equal(NoDecay()([[0, 10], [10**9, 3]]), np.ones((2, 2)))
    assert NoDecay().rate == 0.0


@pytest.mark.parametrize("decay", [Exponential(3.0), NoDecay()])
def test_the_rate_says_what_the_call_does(decay: Freshness) -> None:
    ages = np.arange(50)
    np.testing.assert_allclose(decay(ages), np.exp(-decay.rate * ages), rtol=1e-13)
    assert isinstance(decay, Freshness)


@pytest.mark.parametrize("tau", [0.0, -1.0, np.nan, np.inf, -np.inf, 5e-324, 1e-7])
def test_a_tau_without_a_usable_rate_is_refused(tau: float) -> None:
    with pytest.raises(ConfigError, match=r"tau .* must be finite and >= 1e-06 policy versions.*NoDecay"):
        Exponential(tau)


@pytest.mark.parametrize("tau", [1e-6, 1e-3, 1.0, 1e300])
def test_small_and_large_taus_have_a_finite_rate(tau: float) -> None:
    assert 0 < Exponential(tau).rate <= 1e6 * (1 + 1e-15)
    check_freshness(Exponential(tau))


@pytest.mark.parametrize("tau", [np.int64(500), np.float32(500), np.float64(500), 500])
def test_tau_becomes_a_plain_float_so_that_it_can_be_saved(tau: Any) -> None:
    described = '{"kind": "exponential", "tau": 500.0, "max_age": null}'
    assert json.dumps(describe_freshness(Exponential(tau))) == described


@pytest.mark.parametrize(
    "good",
    [
        Exponential(5),
        NoDecay(),
        Custom(0.0),
        Custom(np.float64(0.1)),
        Custom(1),
        Squared(2.0),
        Promise(40, 40),
        Promise(40, np.int64(40)),
        Promise(2_000, 2_000),
        Promise(np.inf),
        Exponential(1e-6, 0),
        Exponential(1e300, 2**63 - 1),
    ],
)
def test_a_decay_with_a_rate_that_is_kept_is_taken(good: object) -> None:
    check_freshness(good)
    assert isinstance(good, Freshness)


@pytest.mark.parametrize(
    "liar",
    [
        Doubled(2.0),
        Promise(40),  # an end that it does not name
        Promise(2_000),
        Promise(100_000),
        Promise(39, 40),
        Promise(41, 40),
        Promise(np.inf, 40),
        Promise(np.inf, rate=1 / 499),
        Promise(np.inf, rate=0.0),
        Promise(1_999, 2_000),
        Promise(2_001, 2_000),
    ],
)
def test_a_rate_or_a_max_age_that_lies_is_refused(liar: object) -> None:
    """The index relies on both and never asks the decay again."""
    with pytest.raises(ConfigError, match=r"but its values are not exp\(-rate \* age\).*leave the rate out"):
        check_freshness(liar)


@pytest.mark.parametrize("max_age", [-1, 2.0, True, "40"])
def test_a_max_age_that_is_no_age_is_refused(max_age: Any) -> None:
    with pytest.raises(ConfigError, match=r"max_age .* must be an int >= 0"):
        check_freshness(Promise(40, max_age))
    with pytest.raises(ConfigError, match=r"max_age .* must be an int >= 0"):
        Exponential(5.0, max_age)


@pytest.mark.parametrize("bad", ["exponential", None, Custom(-0.1), Custom(np.nan), Custom(np.inf), Custom(True)])
def test_what_is_no_decay_is_refused(bad: object) -> None:
    with pytest.raises(ConfigError, match=r"must be a decay: .*function of ages; a rate.* lies in \[0, 1e\+06\]"):
        check_freshness(bad)


@pytest.mark.parametrize(
    ("bad", "hint"),
    [
        (500, r"did you mean Exponential\(tau=500\)\?"),
        (2.5, r"did you mean Exponential\(tau=2.5\)\?"),
        (Exponential, "freshness Exponential must be a decay, not its class"),
        (NoDecay, "freshness NoDecay must be a decay, not its class"),
    ],
)
def test_a_number_or_a_class_is_answered_with_what_was_meant(bad: object, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        check_freshness(bad)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda ages: 1.0 + ages, "is 2.0 at age 1: it must lie in"),
        (lambda ages: -0.1 + np.zeros(len(ages)), "is -0.1 at age 0"),
        (lambda ages: np.where(ages == 100, np.nan, 1.0), "is nan at age 100"),
        (lambda ages: np.full(3, 0.5), r"returned shape \(3,\) for ages of shape \(8,\)"),
        (lambda ages: 0.5, r"returned shape \(\) for ages of shape"),
        (lambda ages: np.minimum(ages, 1), "is 0 at age 0: nothing could ever be drawn"),
    ],
)
def test_a_function_whose_values_are_no_freshness_is_refused(function: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_freshness(function)


def test_what_a_function_raises_itself_comes_through() -> None:
    with pytest.raises(TypeError, match="NoneType"):
        check_freshness(Custom(None))


def test_a_function_of_lists_or_of_small_floats_is_taken() -> None:
    check_freshness(lambda ages: [1.0 / (1 + age) for age in ages.tolist()])
    check_freshness(lambda ages: np.exp(-ages / 3).astype(np.float32))
    check_freshness(lambda ages: ages < 10)


def test_log_freshness_is_checked_where_it_is_used() -> None:
    def decay(ages: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.where(ages == 7, 1.5, np.where(ages > 20, 0.0, 0.5))

    check_freshness(decay)  # nothing is wrong at the ages that are tried
    np.testing.assert_array_equal(log_freshness(decay, np.array([0, 21])), [np.log(0.5), -np.inf])
    with pytest.raises(ConfigError, match=r"is 1\.5 at age 7: it must lie in"):
        log_freshness(decay, np.array([5, 6, 7, 8]))


def test_exponential_with_a_max_age_ends_there_and_nowhere_before() -> None:
    decay = Exponential(10.0, max_age=25)
    ages = np.array([0, 24, 25, 26, 10**9])
    np.testing.assert_array_equal(decay(ages), [*np.exp(-ages[:3] / 10.0), 0.0, 0.0])
    assert (static_rate(decay), max_age_of(decay)) == (0.1, 25)
    assert (static_rate(PowerLaw(3.0)), max_age_of(PowerLaw(3.0))) == (None, None)


def test_a_power_law_halves_twice_as_slowly_each_time() -> None:
    decay = PowerLaw(4.0, 1.0)
    np.testing.assert_allclose(decay([0, 4, 12, 28, 60]), [1, 1 / 2, 1 / 4, 1 / 8, 1 / 16], rtol=1e-15)
    np.testing.assert_allclose(PowerLaw(4.0, 0.5)([12, 60]), [1 / 2, 1 / 4], rtol=1e-15)


def test_a_floor_holds_what_is_below_and_leaves_the_rest() -> None:
    decay = Floored(Exponential(10.0, max_age=30), 0.05)
    np.testing.assert_allclose(decay([0, 10, 29, 30, 31, 10**6]), [1, np.exp(-1), np.exp(-2.9), 0.05, 0.05, 0.05])
    assert static_rate(decay) is None


@pytest.mark.parametrize("floor", [0.0, -0.1, 1.1, np.nan, np.inf, "low"])
def test_a_floor_out_of_range_is_refused(floor: Any) -> None:
    with pytest.raises(ConfigError, match="floor"):
        Floored(NoDecay(), floor)


def test_a_floor_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be a decay"):
        Floored("exponential", 0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["tau", "power"])
@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf, "x", None])
def test_a_power_law_out_of_range_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        PowerLaw(**({"tau": 3.0} | {name: value}))


FAMILIES = [
    Exponential(12.5),
    Exponential(1 / 3, 7),
    NoDecay(),
    PowerLaw(3.0, 0.7),
    Floored(Exponential(5.0, 9), 0.1),
    Floored(Floored(PowerLaw(2.0), 0.01), 0.02),
]


@pytest.mark.parametrize("decay", FAMILIES)
def test_every_family_is_one_at_age_zero_falls_and_can_be_checked(decay: Freshness) -> None:
    check_freshness(decay)
    values = np.asarray(decay(np.arange(1000)))
    assert values[0] == 1.0
    assert np.all(np.diff(values) <= 0)


@pytest.mark.parametrize("decay", FAMILIES)
def test_a_description_survives_json(decay: Freshness) -> None:
    assert freshness_from(json.loads(json.dumps(describe_freshness(decay)))) == decay


def test_descriptions_of_the_first_format_have_no_max_age() -> None:
    assert freshness_from({"kind": "exponential", "tau": 4.0}) == Exponential(4.0)


def test_an_unknown_description_is_refused() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown freshness 'linear'. .*Known: exponential, floor, none, power"):
        freshness_from({"kind": "linear"})


@pytest.mark.parametrize("decay", [Custom(0.5), Squared(2.0), Floored(Custom(0.5), 0.1), lambda ages: 1.0 / (1 + ages)])
def test_a_decay_of_the_user_has_no_description(decay: Freshness) -> None:
    """Not even one that is derived from ours: it would come back as its parent, with another rate."""
    assert describe_freshness(decay) is None


def test_make_freshness_knows_the_decays_that_need_no_refresh() -> None:
    assert make_freshness("exponential", 12.0) == Exponential(12.0)
    assert make_freshness("exponential", 12.0, 30) == Exponential(12.0, 30)
    assert make_freshness("none") == make_freshness("none", 12.0) == NoDecay()
    assert {describe_freshness(decay)["kind"] for decay in FAMILIES} == {"exponential", "none", "power", "floor"}  # type: ignore[index]


def test_make_freshness_refuses_an_unknown_name_and_offers_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown freshness 'exponental'. Did you mean 'exponential'\?"):
        make_freshness("exponental", 3.0)
    with pytest.raises(ConfigError, match="'exponential' needs a tau"):
        make_freshness("exponential")


@pytest.mark.parametrize("decay", [*FAMILIES, lambda ages: 1.0 / (1 + ages), Custom(0.25), Squared(3.0)])
def test_a_buffer_draws_by_any_decay(make_buffer: Filled, decay: Freshness) -> None:
    bases, versions = np.array([1.0, 2.0, 0.5, 3.0, 4.0]), np.array([0, 6, 8, 9, 9])
    buffer = make_buffer(bases, versions, freshness=decay, alpha=0.6)
    batch = buffer.sample(200, policy_version=12)
    want = (bases * np.asarray(decay(12 - versions))) ** 0.6
    want /= want.sum()
    np.testing.assert_allclose(buffer.probabilities(), want, rtol=1e-13, atol=1e-300)
    np.testing.assert_allclose(batch.probabilities, want[np.searchsorted(buffer.keys(), batch.keys)], rtol=1e-13)
    assert set(batch.keys.tolist()) <= set(buffer.keys()[want > 0].tolist())
    assert buffer.drawable == np.count_nonzero(want)


def test_a_value_that_is_wrong_at_a_later_age_is_refused_when_it_is_used_and_the_buffer_lives_on(
    make_buffer: Filled, make_trajectory: Make
) -> None:
    buffer = make_buffer([1.0, 2.0], [0, 1], capacity=9, freshness=lambda ages: np.where(ages == 7, 2.0, 0.5**ages))
    buffer.sample(4, policy_version=5)
    for version in (7, 8):
        with pytest.raises(ConfigError, match=r"is 2\.0 at age 7"):
            buffer.sample(4, policy_version=version)
    buffer.sample(4, policy_version=12)
    with pytest.raises(ConfigError, match=r"is 2\.0 at age 7"):  # an item that came 7 updates late
        buffer.add([make_trajectory(3.0, 11), make_trajectory(3.0, 5)], policy_version=12)
    assert (len(buffer), buffer.drawable) == (2, 2)
    np.testing.assert_allclose(buffer.probabilities(), [1 / 5, 4 / 5], rtol=1e-14)
    buffer.add([make_trajectory(4.0, 11)], policy_version=12)
    np.testing.assert_allclose(buffer.probabilities() @ [1, 1, 0], 5 / (5 + 4 * 2**11), rtol=1e-12)


@pytest.mark.parametrize("value", ["3", None, True, 10**400, 10**4000, np.ones(2), [3.0], 1j])
@pytest.mark.parametrize(("decay", "name"), [(Exponential, "tau"), (PowerLaw, "tau"), (PowerLaw, "power")])
def test_a_setting_of_a_decay_that_is_no_number_is_refused(decay: Any, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        decay(**({"tau": 3.0} | {name: value}))


@pytest.mark.parametrize("tau", [5e-324, 1e-300, 9e-7])
def test_a_power_law_whose_ages_could_overflow_is_refused(tau: float) -> None:
    with pytest.raises(ConfigError, match=r"tau .* of a power law must be finite and >= 1e-06"):
        PowerLaw(tau)


@pytest.mark.parametrize("tau", [1e-6, 1e300])
@pytest.mark.parametrize("power", [1e-300, 1.0, 1e300])
def test_a_power_law_of_any_other_size_is_one_at_age_0_and_falls(tau: float, power: float) -> None:
    values = PowerLaw(tau, power)(np.array([0, 1, 2**62]))
    assert 1.0 == values[0] >= values[1] >= values[2] >= 0


def test_a_max_age_beyond_every_age_is_refused() -> None:
    for max_age in (2**63, 10**400):
        with pytest.raises(ConfigError, match="max_age"):
            Exponential(5.0, max_age)
    assert Exponential(5.0, 2**63 - 1)([3])[0] == np.exp(-0.6)


def in_place(ages: NDArray[np.int64]) -> NDArray[np.float64]:
    ages += 1
    return 1.0 / ages


@pytest.mark.parametrize("decay", [in_place, Floored(in_place, 1e-3)])
def test_a_function_that_works_in_place_spoils_nothing(make_buffer: Filled, decay: Any) -> None:
    for _ in range(3):
        check_freshness(decay)  # at the same ages each time: 0 first
    ages = np.arange(5)
    np.testing.assert_allclose(log_freshness(decay, ages), -np.log1p(np.arange(5)))
    np.testing.assert_array_equal(ages, np.arange(5))
    buffer = make_buffer([1.0, 1.0, 1.0], [0, 1, 2], freshness=decay)
    for _ in range(2):
        buffer.sample(2, policy_version=2)
        np.testing.assert_allclose(buffer.probabilities(), np.array([2, 3, 6]) / 11)
    with pytest.raises(ConfigError, match=r"is 3\.0 at age 2: it must lie in"):
        check_freshness(twice_and_one_less)


def twice_and_one_less(ages: NDArray[np.int64]) -> NDArray[np.float64]:
    """1 up to age 1, then too much; the ages are gone by the time that this is said."""
    values = np.where(ages < 2, 1.0, 2.0 * ages - 1)
    ages[:] = -1
    return values


@pytest.mark.parametrize("value", ["0.5", None, 0.5j, b"1", np.datetime64(1, "s")])
def test_a_function_that_returns_no_numbers_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"the values of freshness .* must be numbers"):
        check_freshness(lambda ages: np.full(ages.shape, value))
