"""The background refresh: nobody waits for it, nothing is lost meanwhile, and it fails loudly."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from freshper import Exponential, NoDecay, ReplayBuffer, Trajectory
from freshper.errors import ConfigError, RefreshError
from freshper.replay.draw.keying import Keying
from freshper.replay.draw.sampler import PrioritySampler
from freshper.replay.draw.tasks import TaskReplay
from freshper.replay.freshness import PowerLaw

Make = Callable[..., Trajectory]
PATIENCE = 60.0  # seconds until a test that hangs is called failed


class Gate:
    """f = 1 / (1 + age / 10), which a thread other than the maker's computes only when it may."""

    def __init__(self) -> None:
        self.entered, self.release = threading.Event(), threading.Event()
        self.release.set()
        self.error: Exception | None = None
        self.passes: list[int] = []
        self._maker = threading.get_ident()

    def __call__(self, ages: NDArray[np.int64]) -> NDArray[np.float64]:
        if threading.get_ident() != self._maker:
            self.entered.set()
            assert self.release.wait(PATIENCE)
            self.passes.append(int(ages.max(initial=0)))
            if self.error is not None:
                raise self.error
        return 1 / (1 + ages / 10.0)

    def hold(self) -> None:
        self.entered.clear()
        self.release.clear()

    def wait_until_held(self) -> None:
        assert self.entered.wait(PATIENCE)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.release.set()  # or the interpreter would wait for the thread


def own_return(trajectory: Trajectory) -> float:
    return trajectory.episode_return


def buffer_of(freshness: Any, make: Make, items: int = 40, **arguments: Any) -> ReplayBuffer:
    settings = {"capacity": 300, "priority": own_return, "alpha": 1.0, "refresh": "background"} | arguments
    buffer = ReplayBuffer(freshness=freshness, **settings)
    buffer.add([make(1.0 + at % 7, at) for at in range(items)], policy_version=items)
    return buffer


def held_pass(gate: Gate, make: Make, **arguments: Any) -> ReplayBuffer:
    """A buffer at version 60 whose index is of version 50, with a pass for 60 in its middle."""
    buffer = buffer_of(gate, make, **arguments)
    buffer.sample(4, policy_version=50)
    gate.hold()
    buffer.sample(4, policy_version=60)
    gate.wait_until_held()
    return buffer


def expected(buffer: ReplayBuffer, version: int, alpha: float = 1.0) -> dict[int, float]:
    """P(i) by key at the freshness of ``version``, from what the buffer says of its items."""
    core = buffer._core
    slots = core.store.occupied()
    ages = np.maximum(version - core.sampler.versions[slots], 0)
    weights = (core.sampler.bases[slots] / (1 + ages / 10.0)) ** alpha
    return dict(zip(core.store.keys[slots].tolist(), (weights / weights.sum()).tolist(), strict=True))


def check_probabilities(buffer: ReplayBuffer, want: dict[int, float]) -> None:
    got = dict(zip(buffer.keys().tolist(), buffer.probabilities().tolist(), strict=True))
    assert got.keys() == want.keys()
    np.testing.assert_allclose(list(got.values()), [want[key] for key in got], rtol=1e-12)


def test_the_first_draw_is_made_at_once(gate: Gate, make_trajectory: Make) -> None:
    buffer = buffer_of(gate, make_trajectory)
    batch = buffer.sample(30, policy_version=50)
    assert batch.index_version == 50
    assert gate.passes == []
    want = expected(buffer, 50)
    np.testing.assert_allclose(batch.probabilities, [want[key] for key in batch.keys.tolist()], rtol=1e-12)


def test_later_draws_are_exact_for_the_version_that_they_name(gate: Gate, make_trajectory: Make) -> None:
    """Whichever pass has been taken by then."""
    buffer = buffer_of(gate, make_trajectory)
    seen = set()
    for version in range(50, 120):
        batch = buffer.sample(8, policy_version=version)
        want = expected(buffer, batch.index_version)
        np.testing.assert_allclose(batch.probabilities, [want[key] for key in batch.keys.tolist()], rtol=1e-12)
        np.testing.assert_array_equal(batch.ages, version - buffer._core.sampler.versions[batch.keys % 300])
        assert 50 <= batch.index_version <= version
        seen.add(batch.index_version)
        if version % 10 == 0:
            buffer.wait_for_refresh()
    for _ in range(2):  # a pass for an older version may have been under way
        buffer.wait_for_refresh()
        buffer.sample(1, policy_version=120)
    assert buffer.sample(1, policy_version=120).index_version == 120
    assert len(seen) >= 7
    check_probabilities(buffer, expected(buffer, 120))
    buffer.close()


def test_r29_what_is_pushed_while_a_refresh_runs_keeps_its_own_priority(gate: Gate, make_trajectory: Make) -> None:
    buffer = held_pass(gate, make_trajectory)
    old = buffer.keys()
    bases = 0.5 + np.arange(128) / 64
    new = buffer.add([make_trajectory(base, 20 + at % 40) for at, base in enumerate(bases)], policy_version=60)
    buffer.update_priorities(old[:10], np.linspace(3, 4, 10))
    buffer.update_priorities(new[:5], np.full(5, 9.0))
    buffer.remove(old[10:20])
    batch = buffer.sample(64, policy_version=61, beta=1.0, toward="freshness")  # makes a tree that the pass has not
    assert batch.index_version == 50
    want = expected(buffer, 50)
    np.testing.assert_allclose(batch.probabilities, [want[key] for key in batch.keys.tolist()], rtol=1e-12)
    assert buffer.summary()["index_version"] == 50
    assert not gate.release.is_set()  # all that was done while the pass stood still
    gate.release.set()
    buffer.wait_for_refresh()
    check_probabilities(buffer, expected(buffer, 60))
    core = buffer._core
    got = core.sampler.bases[core.store.find(new)]
    np.testing.assert_array_equal(got, np.where(np.arange(128) < 5, 9.0, bases))
    assert buffer.summary()["index_version"] == 60
    tree = core.sampler.indexes[0].tree
    assert tree.total == pytest.approx(float(np.sum(tree.leaves())), rel=1e-13)
    buffer.close()


def test_what_is_evicted_or_expires_while_a_refresh_runs_stays_away(gate: Gate, make_trajectory: Make) -> None:
    buffer = held_pass(gate, make_trajectory, capacity=40, max_age=45)
    buffer.add([make_trajectory(5.0, 60) for _ in range(15)], policy_version=62)
    assert len(buffer) == 38  # 15 of 40 evicted, and what is older than version 17
    gate.release.set()
    buffer.wait_for_refresh()
    check_probabilities(buffer, expected(buffer, 60))
    assert buffer.drawable == len(buffer) == 38
    buffer.close()


def test_only_one_pass_runs_and_the_next_is_for_the_newest_version(gate: Gate, make_trajectory: Make) -> None:
    buffer = held_pass(gate, make_trajectory)
    for version in (70, 80, 90):
        assert buffer.sample(2, policy_version=version).index_version == 50
    gate.release.set()
    buffer.wait_for_refresh()
    gate.passes.clear()
    assert buffer.sample(2, policy_version=90).index_version == 60
    buffer.wait_for_refresh()
    assert gate.passes == [90]  # asked once, about items of which the oldest is of version 0
    assert buffer.sample(2, policy_version=90).index_version == 90
    gate.passes.clear()
    buffer.sample(2, policy_version=90)
    buffer.wait_for_refresh()
    assert gate.passes == []  # nothing was due
    buffer.close()


@pytest.mark.parametrize("change", ["tau", "static", "alpha"])
def test_settings_that_change_while_a_refresh_runs_are_not_undone(
    gate: Gate, make_trajectory: Make, change: str
) -> None:
    buffer = held_pass(gate, make_trajectory)
    if change == "alpha":
        buffer.set_alpha(0.5)
    else:
        buffer.set_freshness(PowerLaw(10.0) if change == "tau" else Exponential(9.0))
    after = buffer.probabilities()
    gate.release.set()
    buffer.wait_for_refresh()
    np.testing.assert_array_equal(buffer.probabilities(), after)
    assert buffer.sample(2, policy_version=60).index_version == 60
    if change != "static":
        check_probabilities(buffer, expected(buffer, 60, 0.5 if change == "alpha" else 1.0))
    buffer.update_priorities(buffer.keys()[:3], [1.0, 2.0, 3.0])
    buffer.sample(2, policy_version=75)
    buffer.wait_for_refresh()
    assert buffer.sample(2, policy_version=75).index_version == 75
    buffer.close()


def test_a_failure_is_raised_at_the_next_draw_and_the_buffer_lives_on(gate: Gate, make_trajectory: Make) -> None:
    buffer = held_pass(gate, make_trajectory)
    gate.error = ZeroDivisionError("no such decay")
    buffer.update_priorities(buffer.keys()[:2], [9.0, 9.0])
    gate.release.set()
    buffer._background._pass.exception(PATIENCE)  # type: ignore[union-attr]  # it has ended; nobody was told yet
    with pytest.raises(
        RefreshError, match=r"background refresh .* failed .*no such decay.*older policy version"
    ) as told:
        buffer.sample(4, policy_version=61)
    assert told.value.__cause__ is gate.error
    assert (buffer.policy_version, buffer.drawable) == (60, 40)
    assert buffer._core.sampler.indexes[0]._dirty is None  # nothing is remembered any more
    check_probabilities(buffer, expected(buffer, 50))
    buffer.sample(4, policy_version=61)  # tries again
    with pytest.raises(RefreshError):
        buffer.wait_for_refresh()
    buffer.wait_for_refresh()  # said once for each
    buffer.set_freshness(PowerLaw(10.0))
    assert buffer.sample(4, policy_version=61).index_version == 61
    check_probabilities(buffer, expected(buffer, 61))
    buffer.close()


def test_a_wrong_value_in_the_background_is_a_failure(make_trajectory: Make) -> None:
    buffer = buffer_of(lambda ages: np.where(ages == 55, 2.0, 1.0), make_trajectory)
    buffer.sample(1, policy_version=50)
    buffer.sample(1, policy_version=60)
    with pytest.raises(RefreshError, match=r"is 2\.0 at age 55") as told:
        buffer.wait_for_refresh()
    assert isinstance(told.value.__cause__, ConfigError)
    buffer.close()


def test_of_several_that_wait_for_a_failure_one_is_told(gate: Gate, make_trajectory: Make) -> None:
    buffer = held_pass(gate, make_trajectory)
    gate.error = ZeroDivisionError()
    told: list[RefreshError | None] = []

    def wait() -> None:
        try:
            buffer.wait_for_refresh()
            told.append(None)
        except RefreshError as error:
            told.append(error)

    threads = [threading.Thread(target=wait) for _ in range(8)]
    for thread in threads:
        thread.start()
    gate.release.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(told) == 8
    assert sum(error is not None for error in told) == 1
    buffer.close()


def test_a_buffer_that_is_closed_lets_the_running_pass_end(gate: Gate, make_trajectory: Make) -> None:
    buffer = held_pass(gate, make_trajectory)
    closer = threading.Thread(target=buffer.close)
    closer.start()
    assert buffer._background is not None
    running = buffer._background._pass
    assert running is not None
    assert running.running()
    gate.release.set()
    closer.join(PATIENCE)
    assert not closer.is_alive()
    assert running.done()
    assert running.exception() is None
    assert not [thread for thread in buffer._background._executor._threads if thread.is_alive()]


def test_a_buffer_that_was_never_drawn_from_closes(make_trajectory: Make) -> None:
    with buffer_of(PowerLaw(3.0), make_trajectory) as buffer:
        buffer.wait_for_refresh()
    assert len(buffer) == 40


def test_a_common_factor_is_never_recomputed(make_trajectory: Make) -> None:
    buffer = buffer_of(Exponential(9.0), make_trajectory)
    for version in (50, 60, 70):
        assert buffer.sample(4, policy_version=version).index_version == version
    assert buffer._background is not None
    assert buffer._background._pass is None
    buffer.close()


def test_with_several_tasks_only_those_that_need_it_lag(gate: Gate, make_trajectory: Make) -> None:
    tasks = {"a": TaskReplay(gate), "b": TaskReplay(Exponential(20.0)), "c": TaskReplay(PowerLaw(10.0))}
    buffer = ReplayBuffer(60, priority=own_return, alpha=1.0, tasks=tasks, refresh="background")
    buffer.add([make_trajectory(1.0 + at, at, task="abc"[at % 3]) for at in range(30)], policy_version=30)
    buffer.sample(2, policy_version=30)
    gate.hold()
    buffer.sample(2, policy_version=40)
    gate.wait_until_held()
    batch = buffer.sample(50, policy_version=45)
    assert batch.index_version == 30
    at = np.arange(30)

    def want(lagging: int, now: int) -> NDArray[np.float64]:
        slow, fast = 1 / (1 + (lagging - at) / 10), np.exp(-(now - at) / 20)
        weights = (1.0 + at) * np.where(at % 3 == 1, fast, slow)
        return weights / weights.sum()

    np.testing.assert_allclose(buffer.probabilities(), want(30, 45), rtol=1e-12)
    np.testing.assert_allclose(batch.probabilities, want(30, 45)[batch.keys], rtol=1e-12)
    gate.release.set()
    buffer.wait_for_refresh()
    np.testing.assert_allclose(buffer.probabilities(), want(40, 45), rtol=1e-12)
    buffer.close()


class Aside:
    """An index of a recomputed decay whose trees are computed aside for version 50, after writes in the middle."""

    def __init__(self) -> None:
        self.sampler = PrioritySampler(6, [PowerLaw(10.0), NoDecay()], 1.0, 0, shares=[np.nan] * 2, caps=[1.0] * 2)
        self.index = self.sampler.indexes[0]
        self.sampler.put(np.arange(4), np.array([1.0, 2.0, 3.0, 4.0]), np.array([0, 10, 20, 30]), _owners(0, 4))
        self.sampler.advance(30)
        self.sampler.refresh()

    def compute(self) -> Any:
        self.index.begin()
        return self.index.compute(Keying(self.index.keying.freshness, 1.0, epoch=50))

    def ask(self) -> None:
        """For all trees that are made when first asked for."""
        self.index.freshness_tree()
        for name in ("lowest", "least", "least_base"):
            self.index.smallest(name)

    def want(self, epoch: int) -> NDArray[np.float64]:
        table = self.sampler.table
        held = table.owners == 0
        weights = np.where(held, table.bases / (1 + (epoch - table.versions) / 10.0), 0.0)
        return weights / weights.sum()

    def got(self) -> NDArray[np.float64]:
        leaves = self.index.tree.leaves()
        return leaves / leaves.sum()


def _owners(owner: int, count: int) -> NDArray[np.int16]:
    return np.full(count, owner, dtype=np.int16)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("asked", ["before", "meanwhile", "after"])
def test_what_is_written_while_trees_are_computed_aside_is_in_them(before: bool, asked: str) -> None:
    """Whether a write came before the table was read or after, and whenever the other trees were first asked for."""
    aside = Aside()
    sampler, index = aside.sampler, aside.index
    if asked == "before":
        aside.ask()
    if before:
        index.begin()
    else:
        trees = aside.compute()
    sampler.set_bases(np.array([0]), np.array([9.0]))
    sampler.remove(np.array([1, 2]))
    sampler.put(np.array([2]), np.array([7.0]), np.array([0]), _owners(1, 1))  # another task moves in
    sampler.put(np.array([4, 5]), np.array([5.0, 0.0]), np.array([30, 30]), _owners(0, 2))
    if asked == "meanwhile":
        aside.ask()
    np.testing.assert_allclose(aside.got(), aside.want(30), rtol=1e-13)
    if before:
        trees = index.compute(Keying(index.keying.freshness, 1.0, epoch=50))
    index.adopt(trees)
    assert index.keying.epoch == 50
    np.testing.assert_allclose(aside.got(), aside.want(50), rtol=1e-13)
    assert index.drawable == 3
    np.testing.assert_array_equal(sampler.table.alive, [True, False, True, True, True, False])
    fresh = index.freshness_tree().leaves()
    np.testing.assert_allclose(fresh / fresh.sum(), np.array([1 / 6, 0, 0, 1 / 3, 1 / 3, 0]) / (5 / 6), rtol=1e-13)
    assert index.smallest("least_base") == (3, pytest.approx(np.log(4.0)))
    assert index.smallest("lowest") == (5, -np.inf)


@pytest.mark.parametrize("how", ["freshness", "alpha", "newer", "nothing"])
def test_trees_of_other_settings_or_of_an_older_version_are_not_taken(how: str) -> None:
    aside = Aside()
    trees: Any = aside.compute()
    freshness = aside.index.keying.freshness
    if how == "freshness":
        aside.index.change(PowerLaw(11.0), 1.0, 30)
    elif how == "alpha":
        aside.index.change(freshness, 0.5, 30)
    elif how == "newer":
        aside.index.change(freshness, 1.0, 60)
    else:
        trees = None
    keying, leaves = aside.index.keying, aside.index.tree.leaves().copy()
    aside.index.adopt(trees)
    assert aside.index.keying == keying
    np.testing.assert_array_equal(aside.index.tree.leaves(), leaves)
    aside.sampler.set_bases(np.array([0]), np.array([5.0]))
    assert aside.index._dirty is None  # nothing is remembered any more
