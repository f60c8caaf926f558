"""Whole runs: the seed decides them, observing changes nothing, and every arm does what its name says."""

import dataclasses
import json
import warnings
from collections import defaultdict

import numpy as np
import pytest

from freshper import ReplayBuffer
from freshper.learning.learner import Learner
from freshper.policies.tiny import TinyPolicy
from freshper.training import ARMS, train
from freshper.training.arms import apply_arm
from freshper.training.tasks import play

RATIO = 2


@pytest.fixture
def run(small, tmp_path):
    """Trains the small config with an arm and changes; returns the run folder."""

    def train_arm(name, arm="freshper", listen=None, note=None, **changes):
        changes["run"] = {"folder": str(tmp_path / name)} | changes.get("run", {})
        outcome = train(apply_arm(small(**changes), arm), on_iteration=listen, note=note)
        assert outcome.status == "finished"
        return outcome.folder

    return train_arm


@pytest.fixture
def updates(monkeypatch):
    """The batch of every optimizer update that is made, as it was given to the learner."""
    seen = []
    update = Learner.update

    def spy(self, trajectories, sampling_weights=None, **options):
        seen.append((tuple(trajectories), sampling_weights))
        return update(self, trajectories, sampling_weights, **options)

    monkeypatch.setattr(Learner, "update", spy)
    return seen


def test_the_same_seed_gives_the_same_run(run, rows, weights):
    first, second = run("first"), run("second")
    assert rows(first) == rows(second)
    assert weights(first / "model" / "last") == weights(second / "model" / "last")
    for name in ("samples.jsonl", "drift.jsonl"):
        assert (first / name).read_text() == (second / name).read_text()


def test_another_seed_gives_another_run_from_the_same_warm_start(run, rows, weights, result):
    first, second = run("first"), run("second", run={"seed": 1})
    before = [result(folder)["warm_start"] for folder in (first, second)]
    assert before[0] == before[1]
    assert rows(first)[0] != rows(second)[0]
    assert weights(first / "model" / "last") != weights(second / "model" / "last")


def test_observing_changes_nothing(run, rows, weights):
    """T7: listeners, notes, samples and evaluations leave the training as it is."""
    heard, noted = [], []
    watched = run(
        "watched",
        listen=heard.append,
        note=noted.append,
        run={"sample_every": 1},
        eval={"every": 1, "episodes": 7, "seed": 3},
    )
    quiet = run("quiet", run={"sample_every": 1000}, eval={"every": 1000, "episodes": 1})
    assert len(heard) == 3
    assert noted
    assert len((watched / "samples.jsonl").read_text().splitlines()) == 6
    assert len((quiet / "samples.jsonl").read_text().splitlines()) == 2
    ignored = ("time/", "eval/")
    assert rows(watched, ignored) == rows(quiet, ignored)
    assert weights(watched / "model" / "last") == weights(quiet / "model" / "last")


def test_a_listener_hears_exactly_what_is_written(run, rows):
    heard = []
    folder = run("heard", listen=heard.append)
    assert [json.loads(json.dumps(row)) for row in heard] == rows(folder, without=("nothing",))


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_makes_the_promised_number_of_updates(run, rows, result, updates, arm):
    iterations = 3
    changes = {"replay": {"ratio": RATIO, "batch_size": 1 if arm == "success-only" else 4}}
    folder = run(arm, arm, **changes, rollout={"episodes": 8}, run={"iterations": iterations})
    lines = rows(folder)
    replays = [int(line.get("replay/updates", 0)) for line in lines]
    fresh = 1 + RATIO if arm == "epochs" else 1
    if arm in ("on-policy", "epochs"):
        assert replays == [0] * iterations
    elif arm != "success-only":
        assert replays == [RATIO] * iterations
    assert [line["policy_version"] for line in lines] == list(np.cumsum([fresh + replay for replay in replays]))
    assert len(updates) == lines[-1]["policy_version"] == result(folder)["policy_version"]
    assert TinyPolicy.load(folder / "model" / "last").version == lines[-1]["policy_version"]
    assert [line["episodes"] for line in lines] == [8, 16, 24]


def test_epochs_reuses_the_fresh_batch_and_replay_does_not(run, updates):
    run("epochs", "epochs", run={"iterations": 2})
    batches = [[id(trajectory) for trajectory in batch] for batch, _ in updates]
    assert batches[0] == batches[1] == batches[2]
    assert batches[3] == batches[4] == batches[5] != batches[0]
    assert all(weights is None for _, weights in updates)


def _content(trajectory):
    """Everything that a trajectory is, to the bit."""
    columns = ("tokens", "response_mask", "behavior_logprobs", "advantages")
    rest = (trajectory.turns, trajectory.policy_version, trajectory.seed, trajectory.group, trajectory.success)
    return (*(getattr(trajectory, name).tobytes() for name in columns), *rest)


def test_replay_uses_the_advantages_of_the_collection(run, updates):
    """T1, T2: what is replayed is what was collected, advantages and behavior log-probs included."""
    run("freshper", run={"iterations": 3})
    fresh = {_content(trajectory) for batch, weights in updates if weights is None for trajectory in batch}
    replayed = [trajectory for batch, weights in updates if weights is not None for trajectory in batch]
    assert len(replayed) == 3 * RATIO * 4
    assert {_content(trajectory) for trajectory in replayed} <= fresh
    assert any(np.any(trajectory.advantages != 0) for trajectory in replayed)


def test_success_only_waits_for_enough_successes_and_replays_nothing_else(run, rows, updates):
    folder = run("success", "success-only", rollout={"episodes": 16}, replay={"batch_size": 8}, run={"iterations": 5})
    lines = rows(folder)
    successes = np.cumsum([line["rollout/success"] * 16 for line in lines]).round()
    expected = [RATIO if so_far >= 8 else 0 for so_far in successes]
    assert [line["replay/updates"] for line in lines] == expected
    assert expected[0] == 0 < expected[-1], "both phases have to occur"
    assert all(trajectory.success for batch, weights in updates if weights is not None for trajectory in batch)


def test_freshness_draws_younger_trajectories(run, rows):
    ages = {}
    for arm in ("per", "freshper"):
        folder = run(
            arm,
            arm,
            run={"iterations": 8},
            rollout={"episodes": 8},
            replay={"batch_size": 32, "freshness": {"tau": 2.0}},
        )
        ages[arm] = np.mean([line["replay/age_mean"] for line in rows(folder)[-4:]])
    assert ages["freshper"] < 0.6 * ages["per"]


def test_the_sampling_correction_reaches_the_learner(run, rows, updates):
    folder = run("corrected", "per-is", run={"iterations": 3})
    drawn = [weights for _, weights in updates if weights is not None]
    assert all(weights.max() == 1.0 for weights in drawn)
    assert any(weights.min() < 1.0 for weights in drawn)
    means = [np.mean(drawn[RATIO * n : RATIO * (n + 1)]) for n in range(3)]
    assert [line["replay/weight_mean"] for line in rows(folder)] == pytest.approx(means)


def test_priorities_are_updated_with_the_measure_that_set_them(run, monkeypatch):
    """T6: reward and advantage at collection do not change, so neither do the priorities of what was drawn."""
    told = []
    update = ReplayBuffer.update_priorities

    def spy(self, keys, base_priorities):
        before = self.probabilities()
        outcome = update(self, keys, base_priorities)
        told.append((outcome.updated, outcome.refused.size, np.array_equal(before, self.probabilities())))
        return outcome

    monkeypatch.setattr(ReplayBuffer, "update_priorities", spy)
    for priority in ("reward", "advantage"):
        run(priority, replay={"priority": priority})
    assert len(told) == 2 * 3 * RATIO
    assert all(updated > 0 and refused == 0 and unchanged for updated, refused, unchanged in told)


def test_metrics_of_fresh_and_replay_updates_have_names_of_their_own(run, rows):
    """T12."""
    line = rows(run("freshper", eval={"every": 1}), without=("nothing",))[0]
    spaces = defaultdict(set)
    for name in line:
        space, _, rest = name.rpartition("/")
        spaces[space].add(rest)
    assert spaces.keys() == {"", "rollout", "fresh", "replay", "eval", "time"}
    assert spaces[""] == {"iteration", "episodes", "policy_version", "tokens"}
    both = spaces["fresh"] & spaces["replay"]
    assert both >= {"loss", "grad_norm", "clip_fraction", "ratio_max", "entropy", "learning_rate", "skipped"}
    assert all(line[f"fresh/{name}"] != line[f"replay/{name}"] for name in ("loss", "grad_norm", "ratio_max"))
    on_policy = rows(run("on-policy", "on-policy"))[0]
    assert not any(name.startswith("replay/") for name in on_policy)


def test_all_arms_of_a_seed_meet_the_same_levels_and_all_seeds_the_same_evaluation(run, monkeypatch):
    """T8."""
    met = defaultdict(list)

    def spying_on(place):
        def spy(config, envs, policy, starts, split, **options):
            met[place].append((tuple(starts), tuple(env.split for env in envs[: len(starts)]), options["seed"]))
            return play(config, envs, policy, starts, split, **options)

        return spy

    for place in ("iteration", "evaluate"):
        monkeypatch.setattr(f"freshper.training.{place}.play", spying_on(place))
    seen = {}
    for arm, seed in (("on-policy", 0), ("freshper", 0), ("freshper", 1)):
        run(f"{arm}{seed}", arm, run={"seed": seed})
        seen[arm, seed] = {place: met.pop(place) for place in ("iteration", "evaluate")}
    assert seen["on-policy", 0] == seen["freshper", 0]
    assert seen["freshper", 1]["evaluate"] == seen["freshper", 0]["evaluate"]
    levels = [
        {start.seed for starts, _, _ in seen["freshper", seed]["iteration"] for start in starts} for seed in (0, 1)
    ]
    assert len(levels[0]) == len(levels[1]) == 12
    assert not levels[0] & levels[1]
    assert {split for _, splits, _ in seen["freshper", 0]["iteration"] for split in splits} == {"train"}
    assert {split for _, splits, _ in seen["freshper", 0]["evaluate"] for split in splits} == {"eval"}


def test_the_schedule_counts_updates_replay_included(run, rows):
    """T4: the rate falls along all 3 x (1 + 2) updates, not along 3 iterations."""
    lines = rows(run("schedule", optimizer={"schedule": "linear", "learning_rate": 9e-4}))
    assert [line["fresh/learning_rate"] for line in lines] == pytest.approx([9e-4, 6e-4, 3e-4])
    assert [line["replay/learning_rate"] for line in lines] == pytest.approx([7e-4, 4e-4, 1e-4])


def test_sampler_and_learner_agree(run, rows):
    """T3."""
    gaps = [line["fresh/logprob_gap"] for line in rows(run("agree"))]
    assert len(gaps) == 3
    assert max(gaps) < 1e-5  # far below the limit of 1e-3: fp32 and the same weights


def test_a_sampler_that_reports_wrong_logprobs_is_noticed(run, rows, monkeypatch):
    """T3: 0.01 nats are enough for a warning, which comes once."""

    def tampered(*args, **options):
        rollout = play(*args, **options)
        wrong = [
            dataclasses.replace(t, behavior_logprobs=np.where(t.response_mask, t.behavior_logprobs - 0.01, 0))
            for t in rollout.trajectories
        ]
        return dataclasses.replace(rollout, trajectories=tuple(wrong))

    monkeypatch.setattr("freshper.training.iteration.play", tampered)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        folder = run("tampered")
    assert [line["fresh/logprob_gap"] for line in rows(folder)] == pytest.approx([0.01] * 3, abs=1e-4)
    said = [str(warning.message) for warning in caught if "sampler and learner disagree" in str(warning.message)]
    assert len(said) == 1
    assert "0.01 nats" in said[0]


def test_replay_drifts_and_the_drift_is_written_by_age(run):
    folder = run("drift", run={"iterations": 4, "sample_every": 2})
    records = [json.loads(line) for line in (folder / "drift.jsonl").read_text().splitlines()]
    assert [record["iteration"] for record in records] == [2, 4]
    assert all(0 < one["ess_fraction"] <= 1 and one["kl"] >= 0 for record in records for one in record["bins"])
    assert sum(one["n"] for one in records[-1]["bins"]) == 4 * RATIO * 4
