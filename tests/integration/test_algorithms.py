"""Every estimator, loss, aggregation, KL and mix through the real trainer, fresh and replayed."""

import json
import math

import pytest

from freshper.errors import DivergedError
from freshper.training import train
from freshper.training.config_file import merged

GROUPS = {"rollout": {"group_size": 4}}
CASES = {
    "reinforce++-baseline": merged(GROUPS, {"algorithm": {"advantage": "reinforce++-baseline"}}),
    "grpo": merged(GROUPS, {"algorithm": {"advantage": "grpo", "aggregation": "sequence"}}),
    "grpo without std": merged(GROUPS, {"algorithm": {"advantage": "grpo-no-std", "loss": "cispo"}}),
    "dr-grpo": merged(GROUPS, {"algorithm": {"advantage": "dr-grpo", "aggregation": "fixed"}}),
    "rloo": merged(GROUPS, {"algorithm": {"advantage": "rloo", "loss": "reinforce"}}),
    "gspo": merged(
        GROUPS,
        {"algorithm": {"advantage": "grpo", "loss": "gspo", "aggregation": "sequence"}, "clip": {"low": 3e-4}},
    ),
    "truncated-is": {"algorithm": {"loss": "truncated-is", "entropy": 0.01}, "clip": {"truncation": 1.5}},
    "asymmetric": {"clip": {"low": 0.2, "high": 0.28, "dual": 0}},
    "ess scaling": {"algorithm": {"ess_scaling": True}},
    "kl in the loss": {"kl": {"weight": 0.05, "estimator": "k2"}},
    "kl in the reward": {"kl": {"weight": 0.05, "estimator": "k1", "place": "reward"}},
    "value head": {"algorithm": {"advantage": "gae"}, "replay": {"priority": "td_error"}},
    "value model": {
        "algorithm": {"advantage": "gae"},
        "critic": {"kind": "model"},
        "replay": {"priority": "advantage"},
    },
    "value head, kl in the reward": {
        "algorithm": {"advantage": "gae"},
        "kl": {"weight": 0.05, "estimator": "k1", "place": "reward"},
    },
    "shared prompts": merged(
        GROUPS, {"algorithm": {"advantage": "grpo", "entropy": 0.01}, "policy": {"share_prompts": True}}
    ),
    "groups": merged(
        GROUPS, {"algorithm": {"advantage": "grpo"}, "storage": {"unit": "group"}, "replay": {"batch_size": 2}}
    ),
    "backfill": merged(
        GROUPS,
        {
            "algorithm": {"advantage": "grpo"},
            "storage": {"unit": "group"},
            "replay": {"batch_size": 2},
            "mix": {"backfill": True},
        },
    ),
    "mix": {"mix": {"share": 0.4}, "storage": {"evict": "lowest", "max_uses": 3}},
}


@pytest.fixture(scope="module")
def histories(small, tmp_path_factory):
    """Case -> metrics of each iteration, each run once."""
    done = {}

    def run(case):
        if case not in done:
            folder = tmp_path_factory.mktemp("run") / "run"
            fixed = {"run": {"folder": str(folder), "iterations": 4}, "checkpoint": {"every": 0}}
            train(small(**merged({"rollout": {"episodes": 8}}, merged(CASES[case], fixed))))
            done[case] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return done[case]

    return run


@pytest.mark.parametrize("case", CASES)
def test_it_trains_on_fresh_and_replayed_trajectories(histories, case):
    rows = histories(case)
    assert len(rows) == 4
    assert all(rows[-1][f"{kind}/skipped"] == 0 for kind in ("fresh", "replay"))
    assert rows[-1]["policy_version"] >= 4 + 2
    for row in rows:
        assert all(value is None or math.isfinite(value) for value in row.values())
    assert any(row["fresh/grad_norm"] > 0 for row in rows)
    assert any(row.get("replay/grad_norm", 0) > 0 for row in rows)


def test_sampler_and_learner_agree_whatever_is_learned(histories):
    gaps = {case: max(row.get("fresh/logprob_gap", 0) for row in histories(case)) for case in CASES}
    assert max(gaps.values()) < 1e-3, gaps


@pytest.mark.parametrize("case", ["value head", "value model"])
def test_a_critic_is_fitted_to_fresh_and_replayed_trajectories(histories, case):
    rows = histories(case)
    for kind in ("fresh", "replay"):
        losses = [row[f"{kind}/value_loss"] for row in rows if f"{kind}/value_loss" in row]
        assert len(losses) >= 2
        assert all(loss > 0 for loss in losses)
        assert any(row.get(f"{kind}/explained_variance", 0) != 0 for row in rows)


@pytest.mark.parametrize(("ratio", "uses"), [(4, 2), (3, 1)])
def test_replay_pauses_when_its_items_are_used_up(small, tmp_path, ratio, uses):
    settings = {"rollout": {"episodes": 8}, "replay": {"batch_size": 8, "ratio": ratio}, "storage": {"max_uses": uses}}
    train(small(**merged(settings, {"run": {"folder": str(tmp_path / "run")}})))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    assert all(0 < row["replay/updates"] < ratio for row in rows)


def test_an_ill_critic_ends_the_run_with_advice(small, tmp_path):
    settings = {"algorithm": {"advantage": "gae"}, "critic": {"learning_rate": 1e30}, "guard": {"patience": 2}}
    # Values of any size make advantages of any size: either may be the first that is not finite.
    with pytest.raises(DivergedError, match=r"in a row"):
        train(small(**merged(settings, {"run": {"folder": str(tmp_path / "run"), "iterations": 8}})))


def test_the_kl_grows_from_nothing(histories):
    assert histories("kl in the loss")[0]["fresh/reference_kl"] == pytest.approx(0, abs=1e-6)
    assert histories("kl in the loss")[-1]["fresh/reference_kl"] > 0
    assert histories("kl in the reward")[0]["fresh/reward_kl"] == pytest.approx(0, abs=1e-4)
    assert histories("kl in the reward")[-1]["fresh/reward_kl"] != 0


def test_what_is_mixed_in_is_counted(histories):
    mixed = [row["fresh/mixed"] for row in histories("mix")]
    assert mixed[0] == 0  # nothing is stored yet
    assert mixed[-1] > 0
    assert all(row["fresh/backfilled"] <= row["fresh/groups_equal"] * 2 for row in histories("backfill"))
