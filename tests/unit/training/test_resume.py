"""What a checkpoint holds of the parts, and how they go on from it."""

import random
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from freshper.errors import ConfigError, RunFolderError, SnapshotError
from freshper.training.checkpoint import Checkpoint, installed_libraries
from freshper.training.config_file import make_config
from freshper.training.resume import fingerprint, go_back, restore_run, run_state
from freshper.training.standing import Standing

CONFIG = make_config({"run": {"iterations": 10}, "eval": {"patience": 2, "every": 2}})


class Part:
    """Anything with a state."""

    def __init__(self, value=None):
        self.value = value
        self.model, self.version = f"model {value}", value

    def state(self):
        return {"value": self.value}

    def restore(self, state):
        self.value = state["value"]

    def state_dict(self):
        return self.state()

    def load_state_dict(self, state):
        self.restore(state)
        self.version = state["value"]


class Policy:
    def __init__(self):
        self.published = []

    def publish(self, model, version):
        self.published.append((model, version))


def _parts(learner, critic, guard):
    return SimpleNamespace(
        learner=Part(learner),
        estimator=SimpleNamespace(critic=critic and Part(critic)),
        guard=Part(guard),
        curriculum=Part(guard and 2 * guard),
        policy=Policy(),
    )


def _saved(state, libraries=None):
    return Checkpoint(
        Path("run/checkpoints/000004"), 4, state, installed_libraries() if libraries is None else libraries
    )


def _taken(critic=2):
    others = {"metrics": Part(4), "standing": Part(5)}
    folder = SimpleNamespace(config=CONFIG, positions=lambda: {"x": 7})
    return run_state(_parts(1, critic, 3), others, origin=[1.0, 2.0], folder=folder, row={"iteration": 4})


@pytest.fixture(autouse=True)
def generators():
    before = random.getstate(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    torch.set_rng_state(before[1])


@pytest.mark.parametrize("critic", [None, 2])
def test_every_part_goes_on(critic):
    state = _taken(critic)
    expected = random.random(), torch.rand(2).tolist()
    parts, metrics, standing = _parts(None, critic and -1, None), Part(), Part()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        restore_run(_saved(state), parts, {"metrics": metrics, "standing": standing}, origin=[1.0, 2.0])
    assert (parts.learner.value, parts.guard.value, metrics.value, standing.value) == (1, 3, 4, 5)
    assert parts.curriculum.value == 6
    assert critic is None or parts.estimator.critic.value == 2
    assert parts.policy.published == [("model None", 1)]  # the learner's model, with its weights as they were
    assert (random.random(), torch.rand(2).tolist()) == expected
    assert (state["row"], state["positions"]) == ({"iteration": 4}, {"x": 7})


def test_another_beginning_is_told():
    with pytest.warns(UserWarning, match="the policy that the run began with comes out differently now"):
        restore_run(_saved(_taken()), _parts(1, 1, 1), {}, origin=[1.0, 2.5])


def test_a_learner_of_another_kind_is_named(monkeypatch):
    def refuse(self, state):
        raise ConfigError("head.weight was saved with shape (3, 2), it is (3, 4)")

    monkeypatch.setattr(Part, "load_state_dict", refuse)
    with pytest.raises(SnapshotError, match=r"000004 does not fit the model of this run: head\.weight was saved"):
        restore_run(_saved(_taken()), _parts(1, 1, 1), {}, origin=[1.0, 2.0])


class Folder:
    """Remembers where it went back to."""

    def __init__(self, is_finished=False):
        self.path, self.is_finished, self.went_back = Path("run"), is_finished, []

    def go_back(self, positions, iteration):
        self.went_back.append((positions, iteration))


def _standing_after(iteration, scores=()):
    standing = Standing(CONFIG)
    standing.iteration = iteration
    for score in scores:
        standing.evaluated({"sampled_score": score})
    settings = CONFIG.model_dump(mode="json")
    return {"settings": settings, "standing": standing.state(), "positions": {"metrics.jsonl": 3}}


def test_folder_and_counters_stand_where_they_stood():
    standing, folder = Standing(CONFIG), Folder()
    go_back(_saved(_standing_after(4)), standing, folder, CONFIG)
    assert (standing.iteration, folder.went_back) == (4, [({"metrics.jsonl": 3}, 4)])


@pytest.mark.parametrize(
    ("iteration", "scores", "setting"), [(10, [], r"run\.iterations"), (6, [3.0, 2.0, 1.0], r"eval\.patience")]
)
def test_where_nothing_is_left_to_do_that_is_said(iteration, scores, setting):
    state = _standing_after(iteration, scores)
    folder = Folder(is_finished=True)
    complaint = f"finished after {iteration} iterations: to go on with it, raise {setting}"
    with pytest.raises(RunFolderError, match=complaint):
        go_back(_saved(state), Standing(CONFIG), folder, CONFIG)
    assert folder.went_back == []
    killed_before_its_result = Folder(is_finished=False)
    go_back(_saved(state), Standing(CONFIG), killed_before_its_result, CONFIG)
    assert killed_before_its_result.went_back
    more = make_config({"run": {"iterations": 11}, "eval": {"patience": 9, "every": 2}})
    go_back(_saved(state), Standing(more), folder, more)
    assert folder.went_back


def test_settings_that_were_edited_in_the_folder_are_noticed():
    edited = make_config({"run": {"iterations": 10, "seed": 3}, "eval": {"patience": 2, "every": 2}})
    folder = Folder()
    with pytest.raises(RunFolderError, match=r"run\.seed was 0, now 3"):
        go_back(_saved(_standing_after(4)), Standing(edited), folder, edited)
    assert folder.went_back == []


def test_other_libraries_are_told():
    there = installed_libraries()
    older = there | {"numpy": "1.26.0"}
    del older["torch"]
    with pytest.warns(UserWarning, match="may differ from those") as said:
        go_back(_saved(_standing_after(4), older), Standing(CONFIG), Folder(), CONFIG)
    text = str(said[0].message)
    assert f"numpy 1.26.0 is now {there['numpy']}" in text
    assert f"torch None is now {there['torch']}" in text
    assert "transformers" not in text


def _model(seed, width=3, name="a"):
    torch.manual_seed(seed)
    model = nn.Module()
    model.register_module(name, nn.Linear(width, 5000))
    return model


def test_a_fingerprint_tells_models_apart():
    same = fingerprint(_model(0))
    assert fingerprint(_model(0)) == same
    assert fingerprint(_model(1)) != same
    assert fingerprint(_model(0, width=4)) != same
    assert fingerprint(_model(0, name="ab")) != same
    assert fingerprint(_model(0).to(torch.bfloat16)) != same
    assert all(isinstance(number, float) for number in same)
