"""The cached warm start: when it is built, when it is not, and what happens to a damaged one."""

import json
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from freshper.errors import ConfigError, DivergedError, EnvError, SnapshotError
from freshper.policies.tiny import build_model
from freshper.training import warm_start
from freshper.training.arms import ARMS, apply_arm
from freshper.training.config_file import make_config
from freshper.training.evaluate import evaluate
from freshper.training.presets import load_config
from freshper.training.warm_start import warm_started_policy

# What a build needs longest for is left out: it is copied from one real build.


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """An empty cache for one test."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("FRESHPER_CACHE", str(folder))
    return folder


@pytest.fixture(scope="module")
def built(small, tmp_path_factory):
    """A folder as a real build fills it."""
    warm_started_policy(small())
    only = [path for path in warm_start.cache_folder().iterdir() if path.name.endswith(warm_start._key(small()))]
    return shutil.copytree(only[0], tmp_path_factory.mktemp("built") / "policy")


@pytest.fixture
def builds(built, own_cache, monkeypatch):
    """Every build that is made, as the thread count in it; the result is the copied one."""
    made = []

    def build(config, folder, note):
        made.append(torch.get_num_threads())
        shutil.copytree(built, folder, dirs_exist_ok=True)

    monkeypatch.setattr(warm_start, "_build", build)
    return made


def _weights(policy):
    return {name: tensor.numpy().tobytes() for name, tensor in policy.model.state_dict().items()}


def _names(cache):
    return sorted(path.name for path in cache.iterdir())


def test_a_cached_start_is_not_built_again(small, builds, own_cache):
    said = []
    first = warm_started_policy(small(), said.append)
    assert len(said) == 1
    assert str(own_cache) in said[0]
    said.clear()
    second = warm_started_policy(small(), said.append)
    assert len(builds) == 1
    assert not said
    assert _weights(first) == _weights(second)
    assert first.version == 0
    assert len(_names(own_cache)) == 1


CHANGES = [
    {"run": {"task": "sokoban"}},
    {"tiny": {"hidden_size": 32}},
    {"tiny": {"layers": 2}},
    {"tiny": {"heads": 4}},
    {"tiny": {"context": 512}},
    {"warm_start": {"updates": 61}},
    {"warm_start": {"batch_size": 17}},
    {"warm_start": {"learning_rate": 2e-2}},
    {"warm_start": {"seed": 1}},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_what_decides_the_result_is_part_of_the_key(small, builds, own_cache, change):
    warm_started_policy(small())
    warm_started_policy(small(**change))
    assert len(builds) == 2
    assert len(_names(own_cache)) == 2


@pytest.mark.parametrize("library", ["freshper", "numpy", "torch", "transformers", "tokenizers"])
def test_another_version_of_a_library_builds_anew(small, builds, monkeypatch, library):
    version = warm_start.version
    warm_started_policy(small())
    monkeypatch.setattr(warm_start, "version", lambda name: "9.9" if name == library else version(name))
    warm_started_policy(small())
    assert len(builds) == 2


def test_changed_code_builds_anew(small, builds, monkeypatch):
    warm_started_policy(small())
    monkeypatch.setattr(warm_start, "_code_fingerprint", lambda: "another")
    warm_started_policy(small())
    assert len(builds) == 2


def test_the_code_that_counts_is_there():
    package = Path(warm_start.__file__).parents[1]
    covered = {file.relative_to(package).as_posix() for pattern in warm_start._CODE for file in package.glob(pattern)}
    assert all(list(package.glob(pattern)) for pattern in warm_start._CODE)
    assert covered >= {"envs/frozenlake.py", "policies/tiny.py", "training/seeds.py", "training/warm_start.py"}


def test_all_arms_and_seeds_share_one_start(small, builds):
    for seed in (0, 1):
        for arm in ARMS:
            other = {"run": {"seed": seed, "iterations": 7}, "optimizer": {"learning_rate": 1e-3}, "eval": {"seed": 9}}
            other["rollout"] = {"temperature": 0.9, "max_turns": 3}
            warm_started_policy(apply_arm(small(**other), arm))
    assert len(builds) == 1


def test_it_is_built_with_one_thread_whoever_asks(small, builds):
    """Sums of floats depend on the number of threads: `compare` and `train` must build the same."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        warm_started_policy(small())
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert builds == [1]


def test_the_first_of_two_builders_is_kept_and_both_succeed(small, builds, own_cache, monkeypatch):
    build, folders = warm_start._build, []

    def overtaken(config, folder, note):
        build(config, folder, note)
        (folder / "slow").touch()
        monkeypatch.setattr(warm_start, "_build", build)
        folders.append(warm_started_policy(small()))  # the other one, from begin to end

    monkeypatch.setattr(warm_start, "_build", overtaken)
    slow = warm_started_policy(small())
    assert _weights(slow) == _weights(folders[0])
    (name,) = _names(own_cache)
    assert not (own_cache / name / "slow").exists()


def test_a_half_built_folder_is_never_used(small, builds, own_cache, monkeypatch):
    build = warm_start._build

    def interrupted(config, folder, note):
        build(config, folder, note)
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(warm_start, "_build", interrupted)
    with pytest.raises(KeyboardInterrupt):
        warm_started_policy(small())
    assert _names(own_cache) == []
    # What a killed process leaves behind.
    (own_cache / ".building-abc" / "policy").mkdir(parents=True)
    monkeypatch.setattr(warm_start, "_build", build)
    assert warm_started_policy(small()).version == 0
    assert len(builds) == 2


def _remove(name):
    return lambda folder: (folder / name).unlink()


def _garble(name):
    def damage(folder):
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 0xFF
        (folder / name).write_bytes(content)

    return damage


def _cut(name):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:50])


def _empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()


FILES = ("config.json", "model.safetensors", "tokenizer.json", "freshper.json")
DAMAGES = (
    {f"{name} missing": _remove(name) for name in FILES}
    | {f"{name} garbled": _garble(name) for name in ("config.json", "model.safetensors", "tokenizer.json")}
    | {f"{name} cut": _cut(name) for name in ("model.safetensors", "tokenizer.json")}
    | {"empty": _empty}
)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_start_is_built_again_and_said(small, builds, own_cache, damage):
    healthy = _weights(warm_started_policy(small()))  # before the damage: loaded weights are a map of the file
    (name,) = _names(own_cache)
    damage(own_cache / name)
    said = []
    repaired = warm_started_policy(small(), said.append)
    assert "built again" in said[0]
    assert name in said[0]
    assert _weights(repaired) == healthy
    assert _names(own_cache) == [name]
    warm_started_policy(small())
    assert len(builds) == 2


def test_a_build_that_fails_again_is_an_error_that_names_the_folder(small, builds, own_cache, monkeypatch):
    monkeypatch.setattr(warm_start, "_build", lambda config, folder, note: (folder / "nothing").touch())
    with pytest.raises(SnapshotError, match="holds no whole policy") as caught:
        warm_started_policy(small())
    assert str(own_cache) in str(caught.value)


def test_a_cache_that_cannot_be_written_is_a_clear_error(small, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FRESHPER_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ConfigError, match="set FRESHPER_CACHE to a folder that can be written"):
        warm_started_policy(small())


def test_demonstrations_that_do_not_fit_are_refused_and_nothing_is_kept(small, own_cache):
    with pytest.raises(ConfigError, match=r"rollout\.max_episode_tokens is 5: raise it"):
        warm_started_policy(small(rollout={"max_episode_tokens": 5}))
    assert _names(own_cache) == []


def test_a_start_that_diverges_is_an_error_and_not_kept(small, own_cache, monkeypatch):
    damaged = build_model(300, hidden_size=16, layers=1, heads=2, context=256, seed=0)
    with torch.no_grad():
        next(damaged.parameters()).fill_(torch.nan)
    monkeypatch.setattr(warm_start, "build_model", lambda *args, **shape: damaged)
    with pytest.raises(DivergedError, match=r"lower warm_start\.learning_rate"):
        warm_started_policy(small())
    assert _names(own_cache) == []


def test_the_weak_start_speaks_the_format_and_is_weak(small):
    config = small()
    policy = warm_started_policy(config)
    played = evaluate(policy, config, 100, 5, greedy=False)
    assert _valid_share(played) > 0.75  # after a tenth of the usual updates
    assert 0.05 < played.success < 0.6


@pytest.mark.slow
@pytest.mark.parametrize("task", ["sokoban", "frozenlake"])
def test_the_presets_start_speaks_the_format_and_is_weak(task):
    config = load_config(task)
    policy = warm_started_policy(config)
    played = evaluate(policy, config, 200, 5, greedy=False)
    assert _valid_share(played) > 0.98
    assert 0.05 < played.success < 0.5


def _valid_share(played):
    return np.mean([turn.valid for transcript in played.transcripts for turn in transcript.turns])


SCRIPT = """
import hashlib, json, sys
from freshper.training.config_file import make_config
from freshper.training.warm_start import warm_started_policy
policy = warm_started_policy(make_config(json.loads(sys.argv[1])))
weights = b"".join(tensor.numpy().tobytes() for tensor in policy.model.state_dict().values())
print(json.dumps(hashlib.sha256(weights).hexdigest()))
"""


def test_two_processes_that_build_at_once_both_succeed_with_the_same_result(small, own_cache, start):
    config = small(warm_start={"updates": 3}).model_dump_json()
    both = [start("-c", SCRIPT, config) for _ in range(2)]
    said = [process.communicate(timeout=100) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    first, second = (json.loads(out) for out, _ in said)
    assert first == second
    (name,) = _names(own_cache)
    assert name.startswith("frozenlake-")


@pytest.mark.parametrize("form", ["alone", "in a mixture"])
def test_a_demonstrator_of_ones_own_that_changed_is_cloned_again(form, tmp_path, monkeypatch):
    source = tmp_path / f"owngame{form[:2]}.py"
    name = f"{source.stem}:Game"
    source.write_text(
        "class Game:\n    def reset(self, seed): return 'x'\n    def step(self, reply): return 'y', 0.0, True\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    weights = {"env": {"options": {"weights": {name: 1.0}}}, "run": {"task": "mixture"}}
    config = make_config({"run": {"task": name}} if form == "alone" else weights)
    before = warm_start._key(config)
    assert warm_start._key(config) == before
    source.write_text(source.read_text() + "\n# another\n")
    assert warm_start._key(config) != before


HANGING = """
import time

class Game:
    task = "hanging"
    max_turns = 2

    def reset(self, seed):
        return "x" * (seed % 7 + 1)

    def step(self, reply):
        time.sleep(600)

    def solution(self):
        return ["left"]

    def demonstrate(self, rng):
        return "<answer>left</answer>"
"""


def test_a_demonstration_that_hangs_ends_in_one_line_and_nothing_is_kept(tmp_path, own_cache, monkeypatch):
    (tmp_path / "hanginggame.py").write_text(HANGING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    config = make_config({"run": {"task": "hanginggame:Game"}, "env": {"timeout": 0.3}})
    with pytest.raises(EnvError, match=r"a demonstration of hanginggame:Game took more than 0\.3 s"):
        warm_started_policy(config)
    assert _names(own_cache) == []


def test_a_demonstration_that_hangs_can_be_interrupted(tmp_path, start, until):
    (tmp_path / "hanginggame.py").write_text(HANGING.replace("time.sleep", "print('asleep', flush=True); time.sleep"))
    words = ["train", "hanginggame:Game", "--env.timeout", "0", "--run.folder", str(tmp_path / "run")]
    with (tmp_path / "out").open("w") as out:
        training = start("-m", "freshper", *words, stdout=out)
        until(lambda: "asleep" in (tmp_path / "out").read_text(), training)
        training.send_signal(signal.SIGTERM)
        assert training.wait(timeout=60) == 130
