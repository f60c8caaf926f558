"""From settings to parts, seeds, and evaluations."""

import hashlib

import pytest

from freshper.envs import make_env
from freshper.policies.scripted import ScriptedPolicy
from freshper.replay.freshness import Exponential, NoDecay
from freshper.training import evaluate as room
from freshper.training.build import make_buffer, sampling_of, starts
from freshper.training.config_file import make_config
from freshper.training.evaluate import evaluate, evaluate_both
from freshper.training.sections import RolloutConfig
from freshper.training.seeds import derive_seed
from freshper.training.tasks import limits_of
from freshper.trajectory import SamplingParams


def test_a_seed_is_the_hash_of_its_path_for_ever():
    digest = hashlib.sha256(b"3/level/7/0").digest()
    assert derive_seed(3, "level", 7, 0) == int.from_bytes(digest[:8], "big") >> 1
    assert 0 <= derive_seed(3, "level", 7, 0) < 2**63


def test_seeds_of_different_uses_differ():
    paths = [(s, use, i) for s in range(3) for use in ("level", "sampling", "replay", "eval") for i in range(5)]
    assert len({derive_seed(*path) for path in paths}) == len(paths)


@pytest.mark.parametrize("group_size", [1, 2, 4])
def test_starts_come_in_groups_that_share_a_level(group_size):
    config = make_config({"rollout": {"episodes": 8, "group_size": group_size}})
    given = starts(config, 3)
    assert len(given) == 8
    groups = {start.group: start.seed for start in given}
    assert len(groups) == len(set(groups.values())) == 8 // group_size
    assert [start.seed for start in given] == [groups[start.group] for start in given]
    assert all([s.group for s in given].count(group) == group_size for group in groups)
    assert not set(groups) & {start.group for start in starts(config, 4)}


def test_starts_depend_on_the_seed_and_the_iteration_alone():
    """T8."""
    base = make_config({"rollout": {"episodes": 4}})
    other = make_config(
        {"rollout": {"episodes": 4, "temperature": 0.5}, "replay": {"ratio": 0}, "run": {"arm": "x", "iterations": 9}}
    )
    assert starts(base, 2) == starts(other, 2)
    assert {s.seed for s in starts(base, 2)}.isdisjoint(s.seed for s in starts(base, 3))
    reseeded = make_config({"rollout": {"episodes": 4}, "run": {"seed": 1}})
    assert {s.seed for s in starts(base, 2)}.isdisjoint(s.seed for s in starts(reseeded, 2))


def test_the_buffer_is_the_one_of_the_settings():
    replay = {"capacity": 77, "priority": "advantage", "alpha": 0.3, "eps": 0.2, "freshness": {"tau": 5}}
    buffer = make_buffer(make_config({"replay": replay}))
    assert (buffer.capacity, buffer.priority, buffer.alpha, buffer.eps) == (77, "advantage", 0.3, 0.2)
    assert buffer.freshness == Exponential(5.0)
    assert make_buffer(make_config({"replay": {"freshness": {"kind": "none"}}})).freshness == NoDecay()


def test_sampling_and_limits_are_those_of_the_settings():
    rollout = RolloutConfig(temperature=0.7, top_p=0.9, top_k=5, max_reply_tokens=3, max_episode_tokens=99)
    assert sampling_of(rollout) == SamplingParams(0.7, 0.9, 5)
    limits = limits_of(rollout)
    assert (limits.max_reply_tokens, limits.max_episode_tokens, limits.max_turns) == (3, 99, None)
    assert limits_of(RolloutConfig(max_turns=4)).max_turns == 4


@pytest.fixture
def right():
    """A policy that always goes right."""
    return ScriptedPolicy(lambda observation: "<answer>Right</answer>")


ROOMY = make_config(
    {
        "run": {"task": "frozenlake"},
        "rollout": {"max_reply_tokens": 100, "max_episode_tokens": 10_000},
        "policy": {"model": "elsewhere"},
        "eval": {"episodes": 5, "seed": 1},
    }
)


def test_an_evaluation_plays_each_of_its_levels_once_whatever_the_chunks(right, monkeypatch):
    whole = evaluate(right, ROOMY, 7, 5, greedy=True)
    monkeypatch.setattr(room, "EPISODES_AT_ONCE", 3)
    parts = evaluate(right, ROOMY, 7, 5, greedy=True)
    assert parts == whole
    first = [transcript.turns[0].observation for transcript in whole.transcripts]
    levels = [make_env("frozenlake", split="eval").reset(derive_seed(5, "eval level", n)) for n in range(7)]
    assert first == levels
    assert whole.success == pytest.approx(sum(t.success for t in whole.transcripts) / 7)
    assert whole.score == pytest.approx(sum(t.episode_return for t in whole.transcripts) / 7)


def test_the_seed_of_an_evaluation_decides_its_levels(right):
    played = [evaluate(right, ROOMY, 5, seed, greedy=True).transcripts for seed in (1, 1, 2)]
    assert played[0] == played[1] != played[2]


def test_both_kinds_are_measured_on_the_same_levels(right):
    numbers, played = evaluate_both(right, ROOMY)
    assert numbers.keys() == {"errors", "sampled_success", "sampled_score", "greedy_success", "greedy_score"}
    assert numbers["sampled_score"] == numbers["greedy_score"] == played.score
    assert played == evaluate(right, ROOMY, 5, 1, greedy=False)
