"""When the trees run compiled, what a missing or broken numba does, and many processes that start at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freshper.errors import ConfigError, MissingExtraError
from freshper.replay.draw import compiled, kernels
from freshper.replay.draw.min_tree import MinTree
from freshper.replay.draw.sum_tree import SumTree

LARGE = compiled.WORTHWHILE


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Nothing loaded yet, no switch set; the kernels that other tests compiled are forgotten and come back anew."""
    monkeypatch.delenv(compiled.SWITCH, raising=False)
    caches: list[Any] = [compiled._numba, compiled._twin, compiled._warn_once]
    for cache in caches:
        cache.cache_clear()
    yield monkeypatch
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def numba(fresh: pytest.MonkeyPatch) -> Any:
    return pytest.importorskip("numba", reason="the compiled trees need the extra fast")


def fake_numba(folder: Path, text: str) -> dict[str, str]:
    """An environment in which ``import numba`` finds this text."""
    (folder / "numba").mkdir()
    (folder / "numba" / "__init__.py").write_text(text)
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


def python(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA_", compiled.SWITCH))}
    return subprocess.run(
        [sys.executable, "-c", program], env=clean | environment, capture_output=True, text=True, check=False
    )


def test_the_kernels_are_plain_python_too() -> None:
    """By hand, on a tree of two blocks."""
    leaves = np.array([1.0, 2, 0, 4, 0, 0, 0, 8, 0, 0, 0, 0, 16, 0, 0, 32])
    nodes = np.zeros(4)
    kernels.sum_all(nodes, leaves)
    np.testing.assert_array_equal(nodes, [0, 63, 15, 48])
    slots, places = np.empty(7, dtype=np.int64), np.array([0.5, 1.0, 3.0, 14.9, 15.0, 31.0, 62.9])
    assert not kernels.find_slots(nodes, leaves, places, False, slots)
    np.testing.assert_array_equal(slots, [0, 1, 3, 7, 12, 15, 15])
    np.testing.assert_array_equal(places, [1, 2, 4, 8, 16, 32, 32])
    halves = np.array([0.25, 0.75])  # of 31.5 each
    assert not kernels.find_slots(nodes, leaves, halves, True, slots[:2])
    np.testing.assert_array_equal(slots[:2], [7, 15])
    np.testing.assert_array_equal(halves, [8 / 63, 32 / 63])
    assert kernels.write_leaves(nodes, leaves, 16, np.array([15, 1]), np.array([64.0, 0.0]))
    np.testing.assert_array_equal(nodes, [0, 93, 13, 80])
    assert (leaves[1], leaves[15]) == (0, 64)
    items = np.zeros(16, dtype=kernels.ITEM)
    items["base"][[3, 15]], items["factor"] = [7.0, 9.0], 0.5
    changed = np.array([3, 0, 3]), np.array([0.0, 25.0, 16.0]), np.array([0.0, 5.0, 4.0])
    assert kernels.write_items(nodes, leaves, items, *changed) == (92.5, 2, 1)  # slot 3 falls to 0 and rises again
    np.testing.assert_array_equal(nodes, [0, 92.5, 12.5, 80])
    assert (leaves[0], leaves[3], items["base"][0], items["base"][3]) == (2.5, 2.0, 25.0, 16.0)
    ratios = np.empty(3)
    kernels.ratios_to_least(np.array([0.5, 0.25, 1.0]), ratios)
    np.testing.assert_array_equal(ratios, [0.5, 1.0, 0.25])


@pytest.mark.parametrize("choice", [False, True])
def test_a_mass_that_rounding_leads_astray_is_led_back(choice: bool, numba: Any) -> None:
    """An edge that lies one bit beyond the sum of its leaves: a plain walk ends in an empty slot."""
    tree = SumTree(20, compiled=choice)
    tree.set(np.array([0, 8, 16]), np.log([1.0, 2.0, 4.0]))
    tree.nodes[4] = np.nextafter(1.0, 2.0)  # the first block: 1 and a bit
    masses = np.array([1.0, 1.5, 3.5])
    slots, weights = tree.locate(masses)
    np.testing.assert_array_equal(slots, [0, 8, 16])
    np.testing.assert_array_equal(weights, [1.0, 2.0, 4.0])


def test_strata_are_drawn_the_same_by_both_versions(numba: Any) -> None:
    rng = np.random.default_rng(0)
    keys = rng.normal(scale=3, size=1000)
    keys[rng.random(1000) < 0.5] = -np.inf
    trees = [SumTree(1000, compiled=choice) for choice in (False, True)]
    for tree in trees:
        tree.rebuild(keys)
    for count in (1, 7, 256, 5000):
        positions = rng.random(count)
        drawn = [tree.locate_strata(positions.copy()) for tree in trees]
        (slots, chances), (compiled_slots, compiled_chances) = drawn
        np.testing.assert_array_equal(compiled_slots, slots)
        assert compiled_chances.tobytes() == chances.tobytes()
        np.testing.assert_array_equal(chances, trees[0].weights(slots) / trees[0].total)
        edges = np.cumsum(trees[0].leaves()) / trees[0].total
        np.testing.assert_array_equal(slots, np.searchsorted(edges, (np.arange(count) + positions) / count, "right"))


@pytest.mark.parametrize("slots", [[3], [0, -1], [1, 2**62]])
def test_a_slot_outside_is_refused_before_anything_is_written(slots: list[int], numba: Any) -> None:
    tree = SumTree(3, compiled=True)
    tree.set(np.arange(3), np.zeros(3))
    before = tree.nodes.tobytes() + tree.cells.tobytes()
    with pytest.raises(IndexError, match="capacity 3: nothing was written"):
        tree.set(np.array(slots), np.ones(len(slots)))
    with pytest.raises(ValueError, match="1 weights for 2 slots: nothing was written"):
        tree.set_leaves(np.array([0, 1]), np.ones(1))
    assert tree.nodes.tobytes() + tree.cells.tobytes() == before


def test_views_and_read_only_arrays_are_taken_as_they_come(numba: Any) -> None:
    trees = [SumTree(10, compiled=choice) for choice in (False, True)]
    slots, keys = np.arange(20)[::2] // 2, np.linspace(-1, 1, 20)[::2]
    slots.flags.writeable = keys.flags.writeable = False
    masses = np.linspace(0, 5, 30)[::3]
    masses.flags.writeable = False
    for tree in trees:
        tree.set(slots, keys)
    np.testing.assert_array_equal(trees[1].leaves(), trees[0].leaves())
    np.testing.assert_array_equal(trees[1].find(masses), trees[0].find(masses))
    least = MinTree(10, compiled=True)
    least.set(slots[::-1], keys, slots)
    assert least.smallest() == (9, -1.0)


def test_large_trees_are_compiled_and_small_ones_are_not(numba: Any) -> None:
    assert SumTree(LARGE).compiled
    assert MinTree(LARGE).compiled
    assert not SumTree(LARGE - 1).compiled
    assert SumTree(2, compiled=True).compiled
    assert not SumTree(LARGE, compiled=False).compiled


@pytest.mark.parametrize("value", ["0", "1"])
def test_the_switch_decides_where_no_argument_does(value: str, numba: Any, fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv(compiled.SWITCH, value)
    for capacity in (2, LARGE):
        assert SumTree(capacity).compiled is (value == "1")
        assert MinTree(capacity).compiled is (value == "1")
        assert SumTree(capacity, compiled=True).compiled
        assert not SumTree(capacity, compiled=False).compiled


@pytest.mark.parametrize("value", ["true", "2", " 1"])
def test_a_switch_that_says_something_else_is_refused(value: str, fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv(compiled.SWITCH, value)
    with pytest.raises(ConfigError, match="must be 1"):
        SumTree(2)


def test_without_numba_large_trees_run_on_numpy_and_an_order_names_the_extra(fresh: pytest.MonkeyPatch) -> None:
    fresh.setitem(sys.modules, "numba", None)  # type: ignore[arg-type]  # how Python marks a module that is not there
    assert not SumTree(LARGE).compiled
    with pytest.raises(MissingExtraError, match=r"freshper\[fast\]"):
        SumTree(2, compiled=True)
    fresh.setenv(compiled.SWITCH, "1")
    with pytest.raises(MissingExtraError, match=r"freshper\[fast\]"):
        MinTree(2)


def test_a_kernel_that_does_not_compile_warns_once_and_an_order_is_an_error(
    numba: Any, fresh: pytest.MonkeyPatch
) -> None:
    fresh.setattr(compiled, "_signature", lambda function, numba: numba.types.void(numba.types.unicode_type))
    with pytest.warns(RuntimeWarning, match=r"runs on numpy: numba is installed but cannot compile find_slots") as seen:
        assert not SumTree(LARGE).compiled
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not SumTree(LARGE).compiled
    with pytest.raises(ConfigError, match=f"cannot compile .*pip install -U .*{compiled.SWITCH}=0"):
        SumTree(2, compiled=True)


BUILD = f"""
import warnings
warnings.simplefilter("always")
from freshper.replay.draw.sum_tree import SumTree
print(SumTree({LARGE}).compiled, SumTree({LARGE}).compiled)
"""


@pytest.mark.parametrize(
    "text",
    [
        "raise ImportError('Numba needs NumPy 1.0 or less. Got NumPy 2.4.')",
        "raise OSError('libllvmlite.so: cannot open shared object file')",
        "import another_module_that_is_missing",
        "import types; config = types.SimpleNamespace(DISABLE_JIT=0)",
    ],
    ids=["version", "library", "dependency", "empty"],
)
def test_a_broken_numba_warns_once_and_numpy_does_the_work(text: str, tmp_path: Path) -> None:
    environment = fake_numba(tmp_path, text)
    done = python(BUILD, **environment)
    assert done.stdout == "False False\n", done.stderr
    assert done.stderr.count("RuntimeWarning: the replay index runs on numpy: numba is installed but") == 1
    ordered = python(BUILD, **environment, **{compiled.SWITCH: "1"})
    assert ordered.returncode == 1
    assert "ConfigError: numba is installed but" in ordered.stderr
    assert f"{compiled.SWITCH}=0" in ordered.stderr


def test_numbas_own_switch_is_obeyed_in_silence_unless_an_order_contradicts() -> None:
    pytest.importorskip("numba", reason="the compiled trees need the extra fast")
    done = python(BUILD, NUMBA_DISABLE_JIT="1")
    assert (done.stdout, done.stderr) == ("False False\n", "")
    assert (
        "ConfigError: compiled trees were asked for"
        in python(BUILD, NUMBA_DISABLE_JIT="1", **{compiled.SWITCH: "1"}).stderr
    )


def test_numba_is_loaded_by_the_first_tree_that_wants_it_and_not_before() -> None:
    pytest.importorskip("numba", reason="the compiled trees need the extra fast")
    program = f"""
import sys
import freshper
from freshper.replay.draw.sum_tree import SumTree
from freshper.replay.draw.min_tree import MinTree
SumTree({LARGE - 1}), MinTree({LARGE - 1}), SumTree({LARGE}, compiled=False)
print("numba" in sys.modules)
SumTree({LARGE})
print("numba" in sys.modules)
"""
    assert python(program).stdout == "False\nTrue\n"


COLD = """
import hashlib, json, sys
import numpy as np
from freshper.replay.draw.min_tree import MinTree
from freshper.replay.draw.sum_tree import SumTree
print("ready", flush=True)
sys.stdin.readline()
rng = np.random.default_rng(0)
sums, least = SumTree(1000, compiled=True), MinTree(1000, compiled=True)
digest = hashlib.sha256()
for _ in range(20):
    slots, keys = rng.permutation(1000)[:50], rng.normal(size=50)
    sums.set(slots, keys)
    least.set(slots, keys, slots)
    digest.update(sums.nodes.tobytes() + sums.find(rng.random(50) * sums.total).tobytes())
print(json.dumps([digest.hexdigest(), least.smallest()]))
"""


def test_eight_processes_start_at_once_on_an_empty_cache(tmp_path: Path) -> None:
    """numba's cache on disk is not safe in this case, so nothing may come to lie in it."""
    pytest.importorskip("numba", reason="the compiled trees need the extra fast")
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", COLD],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for _ in range(8)
    ]  # fmt: skip
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=120) for process in started]
    assert [(process.returncode, errors) for process, (_, errors) in zip(started, outputs, strict=True)] == [
        (0, "")
    ] * 8
    results = [json.loads(output) for output, _ in outputs]
    assert all(result == results[0] for result in results)
    assert list(tmp_path.iterdir()) == []


def test_threads_that_build_their_first_trees_together_share_one_compilation(
    numba: Any, fresh: pytest.MonkeyPatch
) -> None:
    together, trees = threading.Barrier(6), []

    def build() -> None:
        together.wait()
        trees.append(SumTree(50, compiled=True))

    threads = [threading.Thread(target=build) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(trees) == 6
    assert {tree._twins for tree in trees} == {trees[0]._twins}
    assert compiled._twin.cache_info().misses == 3


def test_the_interpreter_is_free_while_a_kernel_runs(numba: Any) -> None:
    """A thread gets its turn while kernels run, although nothing else would ever make the main thread give way."""
    tree = SumTree(500_000, compiled=True)
    tree.restore(np.ones(500_000), 0.0)
    assert tree._twins is not None
    sum_all = tree._twins[2]
    gate, turns = threading.Lock(), []

    def take_a_turn() -> None:
        with gate:
            turns.append("taken")

    gate.acquire()
    thread = threading.Thread(target=take_a_turn)
    thread.start()
    old = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        gate.release()
        for _ in range(3000):
            sum_all(tree.nodes, tree.cells)
            if turns:
                break
        taken = list(turns)
    finally:
        sys.setswitchinterval(old)
        thread.join()
    assert taken == ["taken"]
