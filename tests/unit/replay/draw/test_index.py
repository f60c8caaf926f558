"""The index of one task: every tree against a slow reference over random histories, and its moving parts."""

import itertools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from freshper import Exponential, NoDecay
from freshper.errors import ConfigError
from freshper.replay.draw.index import PriorityIndex
from freshper.replay.draw.sampler import PrioritySampler
from freshper.replay.freshness import Floored, Freshness, PowerLaw

DECAYS: dict[str, Freshness] = {
    "none": NoDecay(),
    "exponential": Exponential(3.0),
    "max_age": Exponential(30.0, max_age=25),
    "power": PowerLaw(5.0, 2.0),
    "floor": Floored(Exponential(4.0), 1e-3),
    "function": lambda ages: np.where(ages < 40, 1.0 - ages / 41.0, 0.0),
}


class Reference:
    """Items as they are, in plain Python; logs in extended precision."""

    def __init__(self, freshness: Freshness, alpha: float) -> None:
        self.freshness, self.alpha, self.now = freshness, alpha, 0
        self.items: dict[int, tuple[float, int, int]] = {}  # slot: base, version, rank

    def log_fresh(self, slot: int) -> np.longdouble:
        age = self.now - self.items[slot][1]
        rate = getattr(self.freshness, "rate", None)
        if rate is not None:
            ended = getattr(self.freshness, "max_age", None) is not None and age > self.freshness.max_age  # type: ignore[attr-defined]
            return np.longdouble(-np.inf) if ended else -np.longdouble(age) * np.longdouble(rate)
        with np.errstate(divide="ignore"):
            return np.longdouble(np.log(np.asarray(self.freshness(np.array([age])), dtype=np.float64)[0]))

    def logs(self, name: str) -> dict[int, np.longdouble]:
        """Log of what the trees hold, of the drawable items; of "lowest" also of the others, as -inf."""
        logs = {}
        for slot, (base, _, _) in self.items.items():
            fresh = self.log_fresh(slot)
            dead = base == 0 or fresh == -np.inf
            if dead and name != "lowest":
                continue
            log_base = np.longdouble(-np.inf) if dead else np.log(np.longdouble(base))
            logs[slot] = {
                "weights": self.alpha * (log_base + fresh) if not dead else log_base,
                "freshness": self.alpha * fresh if not dead else log_base,
                "lowest": log_base + fresh if not dead else log_base,
                "least": self.alpha * (log_base + fresh) if not dead else log_base,
                "least_base": log_base,
            }[name]
        return logs

    def probabilities(self, name: str, slots: int) -> NDArray[np.float64]:
        logs = self.logs(name)
        chances = np.zeros(slots)
        if logs:
            top = max(logs.values())
            weights = {slot: np.exp(value - top) for slot, value in logs.items()}
            for slot, weight in weights.items():
                chances[slot] = weight / sum(weights.values())
        return chances


def agree(sampler: PrioritySampler, reference: Reference) -> None:
    index = sampler.indexes[0]
    capacity = sampler.table.capacity
    for name, tree in index.sums.items():
        want = reference.probabilities(name, capacity)
        got = tree.leaves() / tree.total if tree.total else tree.leaves()
        np.testing.assert_allclose(got, want, rtol=2e-12, atol=1e-290, err_msg=name)
    assert index.drawable == len(reference.logs("weights"))
    assert set(np.flatnonzero(sampler.table.alive).tolist()) == set(reference.logs("weights"))
    for name in ("lowest", "least", "least_base"):
        logs = reference.logs(name)
        found = index.smallest(name)
        if not logs:
            assert found is None
            continue
        assert found is not None
        least = min(logs.values())
        assert logs[found[0]] == least or logs[found[0]] - least < 1e-9
        if name == "lowest" and logs[found[0]] == least:  # of exact equals, the oldest
            equals = [slot for slot, value in logs.items() if value == least]
            ranks = {slot: reference.items[slot][2] for slot in equals}
            same = len({reference.items[slot][:2] for slot in equals}) == 1 or least == -np.inf
            assert not same or ranks[found[0]] == min(ranks.values())


def random_change(sampler: PrioritySampler, reference: Reference, rng: np.random.Generator, ranks: Any) -> None:
    capacity = sampler.table.capacity
    match rng.choice(["put", "bases", "remove", "advance", "change"], p=[0.35, 0.3, 0.1, 0.2, 0.05]):
        case "put":
            slots = rng.permutation(capacity)[: rng.integers(1, 5)]
            occupied = np.array([slot for slot in slots if slot in reference.items], dtype=np.int64)
            sampler.remove(occupied)
            bases = rng.choice([0.0, 1e-30, 0.5, 1.0, 7.0], len(slots)) * rng.choice([1.0, rng.random() + 0.5])
            versions = np.maximum(reference.now - rng.integers(0, 12, len(slots)), 0)
            given = np.array([next(ranks) for _ in slots])
            sampler.put(slots, bases, versions, ranks=given)
            items = zip(bases.tolist(), versions.tolist(), given.tolist(), strict=True)
            reference.items.update(zip(slots.tolist(), items, strict=True))
        case "bases" if reference.items:
            slots = rng.permutation(list(reference.items))[: rng.integers(1, 5)]
            bases = rng.choice([0.0, 1e-3, 1.0, 20.0], len(slots))
            sampler.set_bases(slots, bases)
            for slot, base in zip(slots.tolist(), bases.tolist(), strict=True):
                reference.items[slot] = (base, *reference.items[slot][1:])
        case "remove" if reference.items:
            slots = rng.permutation(list(reference.items))[: rng.integers(1, 4)]
            sampler.remove(slots)
            for slot in slots.tolist():
                del reference.items[slot]
        case "advance":
            reference.now += int(rng.choice([0, 1, 3, 12, 60, 2000], p=[0.1, 0.4, 0.3, 0.15, 0.04, 0.01]))
            sampler.advance(reference.now)
            sampler.refresh()
        case "change":
            reference.alpha = float(rng.choice([0.3, 0.6, 1.0]))
            sampler.indexes[0].change(reference.freshness, reference.alpha, reference.now)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_every_tree_agrees_with_the_definition_through_any_history(decay: str, alpha: float) -> None:
    rng, ranks = np.random.default_rng(7), itertools.count()
    sampler, reference = PrioritySampler(11, DECAYS[decay], alpha, 0), Reference(DECAYS[decay], alpha)
    for number in range(250):
        if number == 60:
            sampler.indexes[0].freshness_tree()
        sampler.refresh()
        random_change(sampler, reference, rng, ranks)
        agree(sampler, reference)


def test_only_items_of_its_own_are_in_an_index() -> None:
    sampler = PrioritySampler(6, [NoDecay(), NoDecay()], 1.0, 0, shares=[np.nan] * 2, caps=[1.0] * 2)
    owners = np.array([0, 1, 0, 1, 1, 0], dtype=np.int16)
    sampler.put(np.arange(6), np.arange(1.0, 7.0), np.zeros(6, dtype=np.int64), owners)
    first, second = sampler.indexes
    np.testing.assert_allclose(first.tree.leaves(), [1, 0, 3, 0, 0, 6], rtol=1e-15)
    np.testing.assert_allclose(second.tree.leaves(), [0, 2, 0, 4, 5, 0], rtol=1e-15)
    assert (first.drawable, second.drawable) == (3, 3)
    assert (first.smallest("lowest"), second.smallest("least_base")) == ((0, 0.0), (1, np.log(2.0)))
    np.testing.assert_array_equal(first.holds(np.arange(6)), owners == 0)
    for index in sampler.indexes:
        index.rebuild()
    np.testing.assert_allclose(first.tree.leaves() / first.tree.total, [0.1, 0, 0.3, 0, 0, 0.6], rtol=1e-14)


def test_a_slot_that_changes_its_task_counts_once() -> None:
    sampler = PrioritySampler(3, [NoDecay(), NoDecay()], 1.0, 0, shares=[np.nan] * 2, caps=[1.0] * 2)
    for owner in (0, 1, 0, 1):
        sampler.put(np.array([1]), np.array([2.0]), np.array([0]), np.array([owner], dtype=np.int16))
        assert [index.drawable for index in sampler.indexes] == [owner == 0, owner == 1]
        assert [index.tree.total for index in sampler.indexes] == [2.0 * (owner == 0), 2.0 * (owner == 1)]
        sampler.remove(np.array([1]))
        assert sampler.drawable == 0


def exponential_index(capacity: int, max_age: int | None = None) -> tuple[PrioritySampler, PriorityIndex]:
    sampler = PrioritySampler(capacity, Exponential(10.0, max_age), 1.0, 0)
    return sampler, sampler.indexes[0]


def test_an_item_beyond_the_max_age_is_drawn_no_more_from_the_first_version_on() -> None:
    sampler, index = exponential_index(4, max_age=5)
    sampler.put(np.arange(4), np.ones(4), np.array([0, 1, 1, 3]))
    for now, drawable in ((3, 4), (5, 4), (6, 3), (7, 1), (8, 1), (9, 0), (10**12, 0)):
        sampler.advance(now)
        assert index.drawable == drawable, now
        assert np.count_nonzero(index.tree.leaves()) == drawable
    sampler.put(np.array([0]), np.ones(1), np.array([10**12 - 6]))  # too old when it comes
    sampler.set_bases(np.array([1]), np.array([9.0]))  # an update makes nothing young again
    assert index.drawable == 0
    sampler.put(np.array([2]), np.ones(1), np.array([10**12 - 5]))
    assert index.drawable == 1


def test_a_new_tenant_of_a_slot_does_not_expire_with_the_old_one() -> None:
    sampler, index = exponential_index(2, max_age=5)
    sampler.put(np.array([0]), np.ones(1), np.array([0]))
    sampler.remove(np.array([0]))
    sampler.put(np.array([0]), np.ones(1), np.array([4]))
    sampler.advance(6)
    assert index.drawable == 1
    sampler.advance(10)
    assert index.drawable == 0


def test_a_max_age_that_comes_or_goes_on_a_live_index_is_kept() -> None:
    sampler, index = exponential_index(4)
    sampler.put(np.arange(4), np.ones(4), np.array([0, 10, 20, 30]))
    sampler.advance(30)
    index.change(Exponential(10.0, 15), 1.0, 30)
    assert np.flatnonzero(sampler.table.alive).tolist() == [2, 3]
    sampler.advance(36)
    assert np.flatnonzero(sampler.table.alive).tolist() == [3]
    index.change(Exponential(10.0, 30), 1.0, 36)
    assert np.flatnonzero(sampler.table.alive).tolist() == [1, 2, 3]
    index.change(NoDecay(), 1.0, 36)
    sampler.advance(1000)
    assert index.drawable == 4


def test_what_is_watched_for_its_age_does_not_grow() -> None:
    """Neither with updates of priorities nor with items that leave before they are too old."""
    sampler, index = exponential_index(8, max_age=10**9)
    for now in range(3000):
        sampler.advance(now)
        sampler.remove(np.array([now % 8]))
        sampler.put(np.array([now % 8]), np.ones(1), np.array([now]))
        sampler.set_bases(np.arange(min(now + 1, 8)), np.ones(min(now + 1, 8)))
    assert len(index._expiring) <= 2 * 8 + 1024
    sampler.advance(10**9 + 2996)
    assert np.flatnonzero(sampler.table.alive).tolist() == sorted(now % 8 for now in range(2996, 3000))


def test_what_is_left_when_heavy_items_leave_is_exact() -> None:
    """The weights of the others had underflowed, and nothing is written after the heavy ones are gone."""
    sampler, index = exponential_index(4)
    sampler.put(np.arange(4), np.array([1.0, 3.0, 1.0, 1.0]), np.array([0, 0, 8_000, 20_000]))
    index.freshness_tree()
    assert sampler.probabilities(np.arange(4)).tolist() == [0, 0, 0, 1]
    sampler.remove(np.array([3]))
    sampler.remove(np.array([2]))
    np.testing.assert_allclose(sampler.probabilities(np.arange(4)), [0.25, 0.75, 0, 0], rtol=1e-13)
    np.testing.assert_allclose(index.freshness_tree().leaves(), [1, 1, 0, 0], rtol=1e-13)


@pytest.mark.parametrize("switch", ["0", "1"])
@pytest.mark.parametrize("last", [0.0, 1e-300])
def test_what_is_left_when_a_heavy_item_becomes_light_is_exact(
    last: float, switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a change of its base priority: the weights of the others had underflowed."""
    monkeypatch.setenv("FRESHPER_COMPILED", switch)
    sampler, _ = exponential_index(3)
    sampler.put(np.arange(3), np.array([1e-250, 3e-250, 1e250]), np.zeros(3, dtype=np.int64))
    sampler.set_bases(np.array([2]), np.array([last]))
    np.testing.assert_allclose(sampler.probabilities(np.arange(3)), [0.25, 0.75, last / 4e-250], rtol=1e-13)


@pytest.mark.parametrize("switch", ["0", "1"])
def test_denormal_bases_keep_their_digits(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRESHPER_COMPILED", switch)
    sampler = PrioritySampler(2, Exponential(1.0), 0.99, seed=0)
    sampler.put(np.arange(2), np.array([1e-300, 1.0]), np.array([700, 0]))
    sampler.set_bases(np.array([0]), np.array([1e-314]))
    logs = 0.99 * (np.log(np.array([1e-314, 1.0], np.longdouble)) + np.array([700, 0]))
    exact = np.exp(logs - np.logaddexp(*logs)).astype(np.float64)
    assert exact[0] > 1e-12
    np.testing.assert_allclose(sampler.probabilities(np.arange(2)), exact, rtol=1e-11)


@pytest.mark.parametrize("switch", ["0", "1"])
def test_what_damage_has_left_is_exact(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what was saved the heavy item is lost: the leaves of the others had underflowed."""
    monkeypatch.setenv("FRESHPER_COMPILED", switch)
    sampler, _ = exponential_index(3)
    sampler.put(np.arange(3), np.array([1.0, 3.0, 1.0]), np.array([0, 0, 20_000]))
    facts, arrays = sampler.state(np.arange(3))
    left, _ = exponential_index(3)
    left.restore(np.arange(2), facts, {name: values[:2] for name, values in arrays.items()})
    np.testing.assert_allclose(left.probabilities(np.arange(2)), [0.25, 0.75], rtol=1e-13)


@pytest.mark.parametrize("max_age", [None, 10**9])
def test_another_decay_is_exact_however_old_all_items_are(max_age: int | None) -> None:
    sampler = PrioritySampler(2, NoDecay(), 1.0, seed=0)
    sampler.put(np.arange(2), np.array([1.0, 1.0]), np.array([0, 1]))
    sampler.advance(10**8)
    sampler.indexes[0].change(Exponential(1.0, max_age=max_age), 1.0, 10**8)
    np.testing.assert_allclose(sampler.probabilities(np.arange(2)), [1 / (1 + np.e), np.e / (1 + np.e)], rtol=1e-14)


def test_a_leaf_is_that_of_a_rebuilt_tree_bit_for_bit() -> None:
    """Whatever was written beside it, also where some products would lose digits."""
    rng = np.random.default_rng(0)
    sampler = PrioritySampler(200, Exponential(3.0), 0.7, seed=0)
    versions = rng.integers(0, 4_000, 200)
    for _ in range(20):
        slots = rng.permutation(200)[: rng.integers(1, 50)]
        sampler.put(
            slots, np.exp(rng.normal(scale=40, size=len(slots))) * rng.integers(0, 2, len(slots)), versions[slots]
        )
    tree = sampler.indexes[0].tree
    rebuilt = sampler.indexes[0].compute(sampler.indexes[0].keying).sums["weights"]
    if tree.reference != rebuilt.reference:
        sampler.indexes[0].rebuild()
        slots = np.arange(0, 200, 3)
        sampler.set_bases(slots, sampler.bases[slots])
        tree, rebuilt = sampler.indexes[0].tree, sampler.indexes[0].compute(sampler.indexes[0].keying).sums["weights"]
    np.testing.assert_array_equal(tree.leaves(), rebuilt.leaves())


def test_a_function_is_asked_about_items_of_its_own_only() -> None:
    """Not about free slots, nor about items of another task, whose ages it may not know."""
    asked: list[int] = []

    def decay(ages: NDArray[np.int64]) -> NDArray[np.float64]:
        asked.extend(ages.tolist())
        return 1 / (1.0 + ages)

    sampler = PrioritySampler(8, [decay, NoDecay()], 1.0, 0, shares=[np.nan] * 2, caps=[1.0] * 2)
    sampler.advance(100)
    asked.clear()
    sampler.refresh()
    assert asked == []
    sampler.put(np.array([1, 2, 3]), np.ones(3), np.array([98, 50, 97]), np.array([0, 1, 0], dtype=np.int16))
    sampler.advance(104)
    asked.clear()
    sampler.refresh()
    assert asked == [6, 7]  # once each, whatever the number of trees
    sampler.indexes[0].smallest("lowest")
    sampler.indexes[0].freshness_tree()
    sampler.remove(np.array([1]))
    sampler.advance(110)
    asked.clear()
    sampler.refresh()
    assert asked == [13]


def test_a_change_that_fails_leaves_everything_as_it_was() -> None:
    sampler, index = exponential_index(3)
    sampler.put(np.arange(3), np.array([1.0, 2.0, 3.0]), np.array([0, 3, 6]))
    sampler.advance(1000)
    keying, leaves = index.keying, index.tree.leaves().copy()
    with pytest.raises(ConfigError, match=r"is 3\.0 at age 997"):
        index.change(lambda ages: np.where(ages == 997, 3.0, 1.0), 0.5, 1000)
    assert index.keying == keying
    np.testing.assert_array_equal(index.tree.leaves(), leaves)
    assert index.drawable == 3


def test_a_put_whose_freshness_fails_leaves_everything_as_it_was() -> None:
    sampler = PrioritySampler(3, lambda ages: np.where(ages == 7, 2.0, 1.0), 1.0, 0)  # type: ignore[arg-type]
    sampler.put(np.array([0]), np.ones(1), np.array([0]))
    sampler.advance(20)
    sampler.refresh()
    with pytest.raises(ConfigError, match=r"is 2\.0 at age 7"):
        sampler.put(np.array([1, 2]), np.ones(2), np.array([20, 13]))
    np.testing.assert_array_equal(sampler.table.owners, [0, -1, -1])
    assert sampler.drawable == np.count_nonzero(sampler.indexes[0].tree.leaves()) == 1


@pytest.mark.parametrize("alpha", [0.0, 1e-9, 1.0])
def test_the_lowest_priority_is_exact_however_far_the_clock_has_gone(alpha: float) -> None:
    """With a small alpha the draw needs no re-base for ages; the order of priorities does."""
    sampler = PrioritySampler(8, Exponential(0.5), alpha, 0)
    index = sampler.indexes[0]
    sampler.put(np.array([7]), np.ones(1), np.array([0]))
    assert index.smallest("lowest") == (7, 0.0)
    sampler.remove(np.array([7]))
    for start in (10**6, 10**12, 10**15):
        bases = np.array([1.0, 1.0 + 1e-9, 1.0 - 1e-9, 2.0])
        sampler.put(np.arange(4), bases, np.full(4, start))
        found = index.smallest("lowest")
        assert found is not None
        assert found[0] == 2


def test_keys_near_any_clock_differ_by_exactly_their_ages() -> None:
    """R18: versions are subtracted as integers, so only differences count, bit for bit."""
    ages = np.array([0, 1, 2, 3, 999, 12_345])
    keys = []
    for clock in (12_345, 10**7, 10**12, 2**62):
        sampler = PrioritySampler(6, Exponential(1e4), 0.6, 0)
        sampler.put(np.arange(6), np.linspace(0.5, 3, 6), clock - ages)
        sampler.indexes[0].rebuild()
        assert sampler.indexes[0].keying.epoch == clock
        keys.append(sampler.indexes[0].tree.leaves().copy())
    for other in keys[1:]:
        np.testing.assert_array_equal(other, keys[0])


@pytest.mark.parametrize("switch", ["0", "1"])
def test_what_is_written_under_another_decay_while_trees_are_computed_aside_is_in_them(
    switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decay that the pass began with comes back before the pass ends, at the same version."""
    monkeypatch.setenv("FRESHPER_COMPILED", switch)
    sampler = PrioritySampler(2, PowerLaw(10.0), 1.0, seed=0)
    sampler.put(np.arange(2), np.array([1.0, 2.0]), np.array([0, 40]))
    sampler.advance(50)
    sampler.refresh()
    (index,) = sampler.indexes
    index.begin()
    trees = index.compute(index.keying)
    index.change(NoDecay(), 1.0, 50)
    sampler.set_bases(np.arange(2), np.array([3.0, 1.0]))
    index.change(PowerLaw(10.0), 1.0, 50)
    index.adopt(trees)
    np.testing.assert_allclose(sampler.probabilities(np.arange(2)), [0.5, 0.5], rtol=1e-14)  # 3 / 6 and 1 / 2
