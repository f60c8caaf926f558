"""Settings of a buffer: what is refused, what is described, and what must be given again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freshper import AutoTau, Exponential, Floored, NoDecay, PowerLaw, ReplayBuffer, TaskReplay, Trajectory
from freshper.errors import ConfigError, UnknownNameError
from freshper.replay.draw.tasks import check_decay
from freshper.replay.settings import BufferSettings, as_auto, starting_decay

Make = Callable[..., Trajectory]
PLAIN: dict[str, Any] = {
    "capacity": 8,
    "priority": "reward",
    "freshness": NoDecay(),
    "alpha": 0.6,
    "eps": 0.1,
    "unit": "trajectory",
    "evict": "fifo",
    "max_bytes": None,
    "max_uses": None,
    "max_age": None,
    "tasks": None,
    "refresh": "sync",
    "seed": 0,
}


def own(ages: Any) -> Any:
    return 1 / (1.0 + np.asarray(ages))


def other(ages: Any) -> Any:
    return 1 / (2.0 + np.asarray(ages))


def own_priority(trajectory: Trajectory) -> float:
    return float(len(trajectory))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("capacity", 0, "capacity 0 must be an int >= 1"),
        ("capacity", 2.0, "capacity 2.0"),
        ("max_bytes", 0, "max_bytes 0 must be an int >= 1"),
        ("max_bytes", 1e9, "max_bytes 1000000000.0"),
        ("max_uses", 0, "max_uses 0 must be an int >= 1"),
        ("max_uses", True, "max_uses True"),
        ("max_age", -1, "max_age -1 must be an int >= 0"),
        ("seed", -1, "seed -1 must be an int >= 0"),
        ("seed", 0.0, "seed 0.0"),
        ("alpha", -0.1, "alpha -0.1"),
        ("eps", -0.1, "eps -0.1"),
        ("unit", "turns", r"unknown unit 'turns'. Did you mean 'turn'\?"),
        ("evict", "lowst", r"unknown eviction 'lowst'. Did you mean 'lowest'\?"),
        ("refresh", "async", "unknown way to refresh 'async'.* background, sync"),
        ("priority", "rewards", "Did you mean 'reward'"),
        ("freshness", "Auto", "freshness 'Auto': the only one by name is 'auto'"),
        ("freshness", 500.0, "freshness 500.0 must be a decay"),
        ("tasks", {}, "tasks is empty"),
        ("tasks", {"a": 0.5}, "tasks holds 'a': 0.5"),
        ("tasks", {1: TaskReplay()}, "tasks holds 1: "),
        ("tasks", {"a": TaskReplay(share=0.6), "b": TaskReplay(share=0.5)}, "the shares of the tasks sum to 1.1"),
    ],
)
def test_a_value_out_of_range_is_refused_and_named(name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BufferSettings(**PLAIN | {name: value})
    with pytest.raises(ConfigError, match=message):
        ReplayBuffer(**PLAIN | {name: value})


@pytest.mark.parametrize(("name", "value"), [("unit", "x"), ("evict", "x"), ("refresh", "x")])
def test_unknown_names_are_unknown_names(name: str, value: Any) -> None:
    with pytest.raises(UnknownNameError):
        BufferSettings(**PLAIN | {name: value})


def test_numpy_numbers_are_numbers_and_can_be_described() -> None:
    got = BufferSettings(**PLAIN | {"capacity": np.int32(5), "max_age": np.int64(0), "alpha": np.float32(0.5)})
    assert [type(value) for value in (got.capacity, got.max_age, got.alpha)] == [int, int, float]
    assert (got.capacity, got.max_age, got.alpha) == (5, 0, 0.5)


SAVED: list[dict[str, Any]] = [
    {},
    {"unit": "group", "evict": "group", "max_bytes": 10**6, "max_uses": 3, "max_age": 9, "seed": 4, "eps": 0.0},
    {"freshness": Exponential(3.0, max_age=4)},
    {"freshness": Floored(PowerLaw(2.0, 0.5), 0.1), "refresh": "background", "priority": "success"},
    {"tasks": {"b": TaskReplay(NoDecay(), share=0.3, quota=0.4), "a": TaskReplay(max_share=0.7)}},
]


@pytest.mark.parametrize("changes", SAVED)
def test_a_description_gives_the_same_settings(changes: dict[str, Any]) -> None:
    settings = BufferSettings(**PLAIN | changes)
    again = BufferSettings.from_description(settings.describe(), None, None)
    assert again == settings
    assert list(again.tasks or {}) == list(settings.tasks or {})  # the order is the order of the indexes


def test_auto_is_described_with_what_it_was_given() -> None:
    auto = AutoTau(tau=20.0, target=0.2, memory=300)
    for decay, state in (("auto", AutoTau().state()), (auto, auto.state())):
        settings = BufferSettings(**PLAIN | {"tasks": {"a": TaskReplay(decay)}})
        again = BufferSettings.from_description(settings.describe(), None, None)
        fitted = as_auto(again.decays()[0])
        assert fitted is not None
        assert fitted is not auto  # each buffer fits its own
        assert fitted.state() == state
        assert starting_decay(again.decays()[0], fitted) == Exponential(state["tau"])
    assert as_auto(NoDecay()) is None
    assert starting_decay(own, None) is own
    with pytest.raises(ConfigError, match="no tau to begin with"):
        starting_decay("auto", None)


def test_functions_must_be_given_again_and_only_then() -> None:
    described = BufferSettings(**PLAIN | {"priority": own_priority, "freshness": own}).describe()
    again = BufferSettings.from_description(described, own_priority, other)
    assert (again.priority, again.freshness) == (own_priority, other)
    for given, message in [
        ((None, own), "priority was a function: pass it to load"),
        ((own_priority, None), r"decay \(freshness\) was a function: pass it to load"),
        ((own_priority, {"a": own}), r"decay \(freshness\) was a function"),
        ((own_priority, {"": own, "a": own}), "load was given a freshness for 'a', which the buffer has not"),
    ]:
        with pytest.raises(ConfigError, match=message):
            BufferSettings.from_description(described, *given)
    looked_at = BufferSettings.from_description(described, None, None, look_only=True)
    with pytest.raises(ConfigError, match="priority was a function: to add a trajectory"):
        looked_at.priority(Trajectory)  # type: ignore[operator, arg-type]
    np.testing.assert_array_equal(looked_at.freshness(np.array([0, 900])), [1.0, 1.0])  # type: ignore[operator]
    plain = BufferSettings(**PLAIN).describe()
    with pytest.raises(ConfigError, match="priority was 'reward'; load was given 'success'"):
        BufferSettings.from_description(plain, "success", None)
    with pytest.raises(
        ConfigError, match=r"was NoDecay\(\); load was given NoDecay\(\): leave it out, and call set_freshness"
    ):
        BufferSettings.from_description(plain, None, NoDecay())


def test_functions_are_given_by_task() -> None:
    tasks = {"a": TaskReplay(own), "b": TaskReplay(), "c": TaskReplay(Exponential(2.0))}
    described = BufferSettings(**PLAIN | {"tasks": tasks}).describe()
    assert BufferSettings.from_description(described, None, {"a": other}).decays() == [
        other,
        NoDecay(),
        Exponential(2.0),
    ]
    with pytest.raises(ConfigError, match=r"decay \(task a\) was a function"):
        BufferSettings.from_description(described, None, None)
    with pytest.raises(ConfigError, match="for 'b', which the buffer has not"):
        BufferSettings.from_description(described, None, {"a": own, "b": own})
    with pytest.raises(ConfigError, match=r"decay \(task c\) was .*leave it out"):
        BufferSettings.from_description(described, None, {"a": own, "c": own})


@pytest.mark.parametrize("decay", ["auto", AutoTau(), NoDecay(), own])
def test_what_is_a_decay_is_taken(decay: Any) -> None:
    check_decay(decay)


def test_a_decay_that_was_changed_is_the_one_that_is_saved(make_trajectory: Make, tmp_path: Path) -> None:
    """From a named one to a function, of one task; and from "auto" to a fixed one, which ends the fitting."""
    buffer = ReplayBuffer(4, freshness="auto", tasks={"test": TaskReplay(Exponential(4.0)), "z": TaskReplay()})
    buffer.add([make_trajectory(version=version) for version in range(4)], policy_version=4)
    buffer.set_freshness(own, task="test")
    buffer.set_freshness(Exponential(7.0), task="z")
    buffer.set_alpha(0.9)
    buffer.save(tmp_path / "b")
    with pytest.raises(ConfigError, match=r"decay \(task test\) was a function"):
        ReplayBuffer.load(tmp_path / "b")
    loaded = ReplayBuffer.load(tmp_path / "b", freshness={"test": own})
    assert (loaded.freshness_of("test"), loaded.freshness_of("z")) == (own, Exponential(7.0))
    assert (loaded.alpha, loaded._core.autos) == (0.9, {})
    np.testing.assert_array_equal(loaded.probabilities(), buffer.probabilities())
    with pytest.raises(ConfigError, match="task 'q' was asked for; this buffer has the tasks test, z: name one"):
        buffer.set_freshness(NoDecay(), task="q")
    with pytest.raises(ConfigError, match="task None was asked for"):
        buffer.set_freshness(NoDecay())
    with pytest.raises(ConfigError, match="this buffer has no tasks: leave it out"):
        ReplayBuffer(2).set_freshness(NoDecay(), task="q")


UNHASHABLE: list[Any] = [["fifo"], {}, np.array(["fifo", "x"]), np.ones(3), None, 3]


@pytest.mark.parametrize("value", UNHASHABLE)
@pytest.mark.parametrize("name", ["unit", "evict", "refresh", "priority"])
def test_names_of_another_type_are_unknown_names(name: str, value: Any) -> None:
    with pytest.raises(UnknownNameError, match="Known: "):
        BufferSettings(**PLAIN | {name: value})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("capacity", 2**40 + 1, f"capacity {2**40 + 1} must be <= {2**40}"),
        ("capacity", 10**4000, "capacity an int of 13288 bits must be <= "),
        ("capacity", "8", "capacity '8' must be an int"),
        ("max_bytes", 2**63, "max_bytes .* must be <= "),
        ("max_age", 10**400, "max_age .* must be <= "),
        ("seed", -(10**4000), "seed .* must be an int >= 0"),
        ("alpha", "0.6", "alpha '0.6' must be a number"),
        ("eps", None, "eps None must be a number"),
        ("tasks", "ab", "tasks 'ab' must be a mapping"),
        ("tasks", 3, "tasks 3 must be a mapping"),
        ("tasks", [("a", TaskReplay())], "tasks .* must be a mapping"),
        ("freshness", np.ones(10**5), "freshness ndarray of dtype .* must be a decay"),
    ],
)
def test_values_of_another_type_or_size_are_refused_and_named(name: str, value: Any, message: str) -> None:
    for make in (BufferSettings, ReplayBuffer):
        with pytest.raises(ConfigError, match=message) as told:
            make(**PLAIN | {name: value})
        assert len(str(told.value)) < 500


def test_the_largest_capacity_is_a_setting() -> None:
    assert BufferSettings(**PLAIN | {"capacity": 2**40}).capacity == 2**40


def test_a_buffers_own_decay_is_checked_where_every_task_has_another() -> None:
    with pytest.raises(ConfigError, match="the only one by name is 'auto'"):
        BufferSettings(**PLAIN | {"freshness": "x", "tasks": {"a": TaskReplay(NoDecay())}})


def test_a_priority_that_was_saved_is_to_be_left_out_whichever_it_is() -> None:
    described = BufferSettings(**PLAIN).describe()
    for given in ("reward", "success", own_priority):
        with pytest.raises(ConfigError, match=r"priority was 'reward'; load was given .*: leave it out$"):
            BufferSettings.from_description(described, given, None)


@pytest.mark.parametrize("switch", ["0", "1"])
@pytest.mark.parametrize("read_only", [False, True])
def test_items_that_a_saved_function_had_ruled_out_are_counted_once_they_have_a_weight(
    read_only: bool, switch: str, make_trajectory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaded with a decay that rules out nothing, or to look only."""
    monkeypatch.setenv("FRESHPER_COMPILED", switch)
    buffer = ReplayBuffer(4, freshness=lambda ages: np.where(ages < 10, 1.0, 0.0), alpha=1.0)
    buffer.add([make_trajectory(1.0, 0), make_trajectory(1.0, 0), make_trajectory(1.0, 20)], policy_version=20)
    buffer.sample(1, policy_version=20)
    buffer.save(tmp_path / "b")
    loaded = ReplayBuffer.load(tmp_path / "b", freshness=None if read_only else NoDecay(), read_only=read_only)
    assert loaded.summary()["drawable"] == 1
    loaded.update_priorities(loaded.keys(), [2.0, 2.0, 0.0])
    assert loaded.summary()["drawable"] == 2
    np.testing.assert_allclose(loaded.probabilities(), [0.5, 0.5, 0.0])
    loaded.update_priorities(loaded.keys(), [0.0, 1.0, 3.0])
    assert loaded.summary()["drawable"] == 2
