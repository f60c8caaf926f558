"""The warm start of tasks that show pictures: the right kind of policy, taught by what it sees."""

import numpy as np
import pytest
import torch

from freshper.envs import make_env
from freshper.policies.tiny import TinyPolicy
from freshper.policies.tiny_vision import TinyVisionPolicy
from freshper.rollout.collect import Limits, Start, collect
from freshper.training.config_file import make_config, merged
from freshper.training.warm_start import _demonstration, _taught, clone, new_policy, warm_started_policy
from freshper.trajectory import SamplingParams

torch.set_num_threads(1)

SMALL = {
    "run": {"task": "frozenlake-image"},
    "tiny": {"hidden_size": 16, "layers": 1, "heads": 2, "context": 400},
    "warm_start": {"updates": 30, "batch_size": 4, "learning_rate": 1e-2},
    "rollout": {"max_episode_tokens": 400},
}


def small(**changes):
    return make_config(merged(SMALL, changes))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FRESHPER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def weights(policy):
    return {name: value.clone() for name, value in policy.model.state_dict().items()}


@pytest.mark.parametrize(("task", "kind"), [("frozenlake-image", TinyVisionPolicy), ("frozenlake", TinyPolicy)])
def test_the_task_decides_the_kind(task, kind, own_cache):
    """Built, and found in the cache again; both kinds side by side."""
    notes = []
    built = warm_started_policy(small(run={"task": task}), notes.append)
    assert type(built) is kind
    assert len(notes) > 1
    again = warm_started_policy(small(run={"task": task}), notes.append)
    assert type(again) is kind
    assert len(list(own_cache.iterdir())) == 1
    assert all(torch.equal(value, weights(again)[name]) for name, value in weights(built).items())


def test_a_clone_of_pictures_has_learned_the_format(own_cache):
    policy = warm_started_policy(small(warm_start={"updates": 60}))
    envs = [make_env("frozenlake-image", "eval") for _ in range(8)]
    starts = [Start(seed, str(seed)) for seed in range(8)]
    rollout = collect(envs, policy, starts, limits=Limits(8, 400), sampling=SamplingParams(), seed=0)
    turns = [turn for transcript in rollout.transcripts for turn in transcript.turns]
    assert np.mean([turn.valid for turn in turns]) > 0.6
    assert all(len(turn.images) == 1 for turn in turns)


def test_pictures_move_the_loss():
    """With the same words and demonstrations, a model that is shown black squares learns something else."""
    config = small()

    def taught(blind):
        policy = new_policy(["The picture shows the lake. <answer> Left </answer>"], config, sees=True)
        if blind:
            see = policy.reader._patches
            policy.reader._patches = lambda image: (np.zeros_like(see(image)[0]), see(image)[1])
        clone(policy, config, lambda note: None)
        return weights(policy)

    seen, again, blind = taught(False), taught(False), taught(True)
    assert all(torch.equal(value, again[name]) for name, value in seen.items())
    assert not any(torch.equal(value, blind[name]) for name, value in seen.items() if "visual" in name)


def solved(task, teacher, episodes=30):
    """How many of the teacher's episodes end well."""
    env, rng = make_env(task), np.random.default_rng(0)
    return sum(_ended_well(env, _demonstration(env, rng, teacher)) for _ in range(episodes))


def _ended_well(env, turns):
    """The env still stands where the demonstration has left it: at the goal there is nothing left to do."""
    return env._lake[env._cell] == "G" and len(turns) <= env.max_turns


def test_the_solver_teaches_the_shortest_way_and_the_demonstrator_does_not():
    for task in ("frozenlake-image", "frozenlake"):
        assert solved(task, "solver") == 30
        assert solved(task, "demonstrator") < 20


def test_the_teacher_decides_what_is_learned_and_where_it_is_kept(own_cache):
    demonstrated, solved = (
        warm_started_policy(small(warm_start={"updates": 5, "teacher": teacher}))
        for teacher in ("demonstrator", "solver")
    )
    assert len(list(own_cache.iterdir())) == 2
    assert not torch.equal(demonstrated.model.lm_head.weight, solved.model.lm_head.weight)


class Lost:
    """A task whose solver knows no way."""

    def solution(self):
        return None

    def demonstrate(self, rng):
        return "<answer> Left </answer>"


def test_where_the_solver_knows_no_way_the_demonstrator_speaks():
    assert _taught(Lost(), np.random.default_rng(0), "solver") == "<answer> Left </answer>"
