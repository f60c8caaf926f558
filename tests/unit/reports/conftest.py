"""Fabricates run folders as the training room writes them."""

import json
from pathlib import Path

import numpy as np
import pytest

GOAL = {"on-policy": 0.25, "epochs": 0.27, "per": 0.28, "freshper": 0.48}
OBSERVATION = "# # # # # #\n# _ _ _ _ #\n# _ P X _ #\n# _ _ _ O #\n# # # # # #"


def _part(rng, name, replayed):
    line = {
        "loss": rng.normal(0, 0.01),
        "clip_fraction": rng.uniform(0, 0.02) + 0.1 * replayed,
        "ratio_max": float(np.exp(abs(rng.normal(0, 0.2 + 2 * replayed)))),
        "entropy": 0.5 + rng.normal(0, 0.02),
        "grad_norm": float(np.exp(rng.normal(0, 0.3))),
        "learning_rate": 3e-4,
        "logprob_gap": abs(rng.normal(0, 1e-6)),
    }
    return {f"{name}/{key}": value for key, value in line.items()}


def _line(rng, i, n, arm, replay):
    success = 0.07 + (GOAL.get(arm, 0.3) - 0.07) * (1 - np.exp(-3 * i / n)) + rng.normal(0, 0.03)
    line = {
        "iteration": i,
        "episodes": 32 * i,
        "policy_version": (3 if replay else 1) * i,
        "tokens": 2_500 * i,
        "rollout/score": 12 * success - 1.5,
        "rollout/success": float(np.clip(success, 0, 1)),
        "rollout/turns": 9.5 - 3 * success,
        "rollout/invalid": 0.04 * float(np.exp(-3 * i / n)),
        "rollout/errors": 0,
        "time/iteration_s": 0.4 + 0.05 * rng.random(),
        "time/rollout_s": 0.2,
        "time/update_s": 0.15,
        "time/tokens_per_s": 12_000 + 400 * rng.normal(),
        **_part(rng, "fresh", 0),
    }
    if replay:
        line |= {
            **_part(rng, "replay", 1),
            "replay/age_mean": 18 * (1 - np.exp(-i / 10)) + rng.normal(0, 1),
            "replay/age_max": min(3.0 * i, 110),
            "replay/ess_fraction": 0.8 + rng.normal(0, 0.03),
            "replay/kl": 0.1 + abs(rng.normal(0, 0.02)),
            "replay/weight_mean": 1.0,
            "replay/weight_max": 1.0,
            "replay/size": min(32 * i, 2_000),
        }
    if i % 10 == 0 or i == n:
        for kind, gain in (("sampled", 0.0), ("greedy", 0.05)):
            line[f"eval/{kind}_success"] = success + gain - 0.01
            line[f"eval/{kind}_score"] = 12 * (success + gain) - 1.6
    return line


def _drift(rng, i):
    bins = []
    for low, high in ((1, 3), (4, 10), (11, 30), (31, 60), (61, 110)):
        if low <= 3 * i:
            kl = 0.006 * (low + high) / 2 * (1 + 0.1 * rng.normal())
            ess = float(np.exp(-kl) * 0.93)
            told = {"ess_fraction": ess, "kl": kl, "kl_reverse": 0.8 * kl, "clip_fraction": 0.1, "ratio_max": 9.0}
            bins.append({"age_low": low, "age_high": high, "n": 400, **told})
    return {"iteration": i, "bins": bins}


def _sample(rng, i, source):
    turns = [
        {"observation": OBSERVATION, "reply": f"<answer> {move} </answer>", "reward": reward}
        for move, reward in (("Right", -0.1), ("Down", -0.1), ("Right", 10.9))
    ]
    told = {"return": 10.7, "success": True, "stop_reason": "terminated"}
    return {"iteration": i, "source": source, **told, "turns": turns}


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def fabricate(folder: Path, *, arm="freshper", seed=0, iterations=150, status="finished", replay=None, extras=True):
    """A run folder; replay follows the arm, ``extras`` adds drift.jsonl and samples.jsonl."""
    replay = arm not in ("on-policy", "epochs") if replay is None else replay
    rng = np.random.default_rng([seed, *arm.encode()])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(
        f'[run]\ntask = "sokoban"\narm = "{arm}"\nseed = {seed}\n\n[replay]\nalpha = 0.6\ntau = 12.0\n'
    )
    lines = [_line(rng, i, iterations, arm, replay) for i in range(1, iterations + 1)]
    write_lines(folder / "metrics.jsonl", lines)
    if extras:
        if replay:
            write_lines(folder / "drift.jsonl", [_drift(rng, i) for i in range(5, iterations + 1, 5)])
        samples = [_sample(rng, i, s) for i in range(1, iterations + 1, 25) for s in ("fresh", "eval")]
        write_lines(folder / "samples.jsonl", samples)
    if status is not None:
        result = {
            "status": status,
            "iterations": iterations,
            "episodes": 32 * iterations,
            "policy_version": lines[-1]["policy_version"] if lines else 0,
            "seconds": 63.4,
            "warm_start": {"sampled_success": 0.0712, "greedy_success": 0.123, "sampled_score": -0.41},
            "eval": {"greedy_success": 0.9},
        }
        (folder / "result.json").write_text(json.dumps(result))
    return folder


def fabricate_compare(folder: Path, arms=("on-policy", "per", "freshper"), seeds=(0, 1, 2), skip=(), **run):
    """A compare folder; the (arm, seed) pairs in ``skip`` get no run folder."""
    folder.mkdir(parents=True, exist_ok=True)
    command = f"freshper compare sokoban --arms {','.join(arms)} --seeds {len(seeds)}"
    plan = {"task": "sokoban", "arms": list(arms), "seeds": list(seeds), "command": command}
    (folder / "compare.json").write_text(json.dumps(plan))
    for arm in arms:
        for seed in seeds:
            if (arm, seed) not in skip:
                fabricate(folder / arm / f"seed{seed}", arm=arm, seed=seed, **run)
    return folder


@pytest.fixture
def make_run(tmp_path):
    return lambda name="run", **options: fabricate(tmp_path / name, **options)


@pytest.fixture
def make_compare(tmp_path):
    return lambda name="compare", **options: fabricate_compare(tmp_path / name, **options)
