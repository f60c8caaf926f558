"""Decays with age, and their descriptions."""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from freshper import Exponential, NoDecay
from freshper.errors import ConfigError, SnapshotError, UnknownNameError
from freshper.replay.freshness import (
    FRESHNESS_KINDS,
    Freshness,
    check_freshness,
    describe_freshness,
    freshness_from,
    make_freshness,
)


@dataclass(frozen=True)
class Custom:
    rate: Any

    def __call__(self, ages: Any) -> Any:
        return np.exp(-self.rate * np.asarray(ages))


class Halved(Exponential):
    """A decay of a user, derived from ours."""

    @property
    def rate(self) -> float:
        return 0.5 / self.tau


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
    assert json.dumps(describe_freshness(Exponential(tau))) == '{"kind": "exponential", "tau": 500.0}'


@pytest.mark.parametrize("good", [Exponential(5), NoDecay(), Custom(0.0), Custom(np.float64(0.1)), Halved(2.0)])
def test_a_decay_with_a_rate_is_taken(good: object) -> None:
    check_freshness(good)
    assert isinstance(good, Freshness)


@pytest.mark.parametrize(
    "bad", ["exponential", 500, Exponential, Custom(-0.1), Custom(np.nan), Custom(np.inf), Custom("x"), Custom(None)]
)
def test_what_is_no_decay_is_refused(bad: object) -> None:
    with pytest.raises(ConfigError, match=r"must be a decay with a rate in \[0, 1e\+06\]"):
        check_freshness(bad)


def test_make_freshness_knows_every_kind() -> None:
    assert make_freshness("exponential", 12.0) == Exponential(12.0)
    assert make_freshness("none") == NoDecay()
    assert make_freshness("none", 12.0) == NoDecay()
    assert set(FRESHNESS_KINDS) == {"exponential", "none"}


def test_make_freshness_refuses_an_unknown_name_and_offers_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown freshness 'exponental'. Did you mean 'exponential'\?"):
        make_freshness("exponental", 3.0)
    with pytest.raises(ConfigError, match="'exponential' needs a tau"):
        make_freshness("exponential")


@pytest.mark.parametrize("decay", [Exponential(12.5), Exponential(1 / 3), NoDecay()])
def test_a_description_survives_json(decay: Freshness) -> None:
    assert freshness_from(json.loads(json.dumps(describe_freshness(decay)))) == decay


@pytest.mark.parametrize("decay", [Custom(0.5), Halved(2.0)])
def test_a_decay_of_the_user_cannot_be_described(decay: Freshness) -> None:
    """Not even one that is derived from ours: it would come back as its parent, with another rate."""
    with pytest.raises(SnapshotError, match=f"{type(decay).__name__} is not a decay of freshper"):
        describe_freshness(decay)
