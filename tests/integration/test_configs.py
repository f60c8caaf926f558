"""Every config in the package: the CPU-scale ones train, those of the paper's rows can be loaded."""

import json
import os
import warnings
from pathlib import Path

import pytest

from freshper.envs import make_env
from freshper.training import load_config, train
from freshper.training.config_file import make_config, merged
from freshper.training.presets import config_names

SMALL = {
    "run": {"iterations": 2, "sample_every": 1},
    "rollout": {"episodes": 4},
    "warm_start": {"updates": 8, "batch_size": 2},
    "optimizer": {"warmup_updates": 0},
    "replay": {"batch_size": 4},
    "eval": {"every": 2, "episodes": 2},
    "checkpoint": {"every": 0},
    "log": {"tensorboard": False},
}
PAPER = [name for name in config_names() if name.startswith("paper/")]
TWINS = [name for name in config_names() if not name.startswith("paper/")]
DATA = os.environ.get("FRESHPER_TEST_DATA", "")
SAMPLES = {"gsm8k": "gsm8k_test_sample.jsonl", "aime": "aime24.jsonl", "nq-search": "nq_open_dev_sample.jsonl"}


def test_every_row_of_the_paper_has_a_config():
    tasks = {load_config(name).run.task for name in PAPER}
    assert tasks == {
        "nq-search",
        "aime",
        "sokoban-simple",
        "sokoban-hard",
        "frozenlake",
        "frozenlake-image",
        "geoqa",
        "gsm8k",
        "cliffwalking",
    }


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_settings_are_those_of_the_paper(name):
    config = load_config(name)
    assert config.policy.model.startswith("Qwen/Qwen2.5-")
    assert (config.rollout.episodes, config.rollout.group_size) == (1024, 8)
    assert (config.optimizer.learning_rate, config.clip.low, config.kl.weight) == (1e-6, 0.2, 0.0)
    assert (config.replay.alpha, config.replay.capacity, config.algorithm.entropy) == (0.6, 50_000, 0.0)
    expected = {"frozenlake": 1000.0, "frozenlake-image": 1000.0}.get(config.run.task, 500.0)
    assert config.replay.freshness.tau == expected or config.run.task.startswith("sokoban")


@pytest.mark.parametrize("name", TWINS)
def test_two_iterations_of_every_cpu_config(name, tmp_path, monkeypatch):
    monkeypatch.setenv("FRESHPER_CACHE", str(tmp_path / "cache"))
    settings = merged(load_config(name).model_dump(), merged(SMALL, {"run": {"folder": str(tmp_path / "run")}}))
    result = train(make_config(settings))
    assert result.status == "finished"
    rows = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2]
    assert all(row["rollout/errors"] == 0 for row in rows)
    assert rows[-1]["replay/updates"] > 0


@pytest.mark.skipif(not DATA, reason="FRESHPER_TEST_DATA names no folder of real data samples")
@pytest.mark.parametrize("task", SAMPLES)
def test_the_tasks_read_real_data(task, tmp_path):
    """The questions are real; the first ones of both splits are asked and answered wrongly."""
    options = {"data": str(Path(DATA) / SAMPLES[task])}
    if task == "aime":
        options |= {"question": "problem", "answer": "answer"}
    if task == "nq-search":
        corpus = tmp_path / "corpus.jsonl"
        corpus.write_text(
            "".join(json.dumps({"id": n, "contents": f"passage {n} on a thing"}) + "\n" for n in range(9))
        )
        options["corpus"] = str(corpus)
    questions = set()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for split in ("train", "eval"):
            env = make_env(task, split, **options)
            for seed in range(5):
                questions.add(env.reset(seed))
                outcome = env.step("<answer> 123456789 </answer>")
                assert (outcome.valid, outcome.success) == (True, False)
    assert len(questions) > 4
