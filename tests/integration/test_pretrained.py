"""Models from folders through the real command: train, resume, evaluate, export, load with transformers."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from freshper import cli

_spec = importlib.util.spec_from_file_location(
    "model_zoo", Path(__file__).parents[1] / "unit" / "policies" / "model_zoo.py"
)
zoo = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(zoo)

SETTINGS = {
    "run.iterations": 2,
    "rollout.episodes": 4,
    "rollout.max_reply_tokens": 6,
    "rollout.max_episode_tokens": 2000,
    "rollout.max_turns": 2,
    "policy.parallel": 2,
    "optimizer.learning_rate": 1e-3,
    "optimizer.token_budget": 4000,
    "replay.batch_size": 4,
    "eval.episodes": 2,
    "eval.every": 2,
    "checkpoint.every": 1,
}
ADAPTERS = {"lora.rank": 4, "kl.weight": 0.1}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Kind -> the folder of a small model of that kind."""
    folder = tmp_path_factory.mktemp("models")

    def folder_of(kind):
        if not (folder / kind).exists():
            zoo.write_model(folder / kind, kind, max_position_embeddings=2048)
        return folder / kind

    return folder_of


def flags(**settings):
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def run(models, folder, kind="llama", **more):
    words = ["train", "frozenlake", "--model", str(models(kind)), "--run.folder", str(folder)]
    return cli.main([*words, *flags(**(SETTINGS | more))])


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("kind", "more"),
    [("llama", {}), ("qwen2", ADAPTERS), ("gpt2", {}), ("gemma2", {"optimizer.token_budget": 2000}), ("opt", {})],
)
def test_a_model_of_any_kind_trains_on_fresh_and_replayed_episodes(models, tmp_path, kind, more):
    assert run(models, tmp_path / "run", kind, **more) == 0
    lines = rows(tmp_path / "run")
    assert [line["policy_version"] for line in lines] == [3, 6]
    for line in lines:
        assert line["fresh/logprob_gap"] < 1e-3
        assert line["fresh/skipped"] == line["replay/skipped"] == 0
        assert line["fresh/grad_norm"] > 0 or line["rollout/score_std"] == 0
    assert ("fresh/reference_kl" in lines[-1]) is (more is ADAPTERS)


@pytest.mark.parametrize("more", [{}, ADAPTERS])
def test_a_trained_policy_is_evaluated_and_exported(models, tmp_path, capsys, more):
    folder, out = tmp_path / "run", tmp_path / "out"
    assert run(models, folder, **more) == 0
    capsys.readouterr()
    assert cli.main(["eval", str(folder), "--episodes", "2", "--which", "last", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["policy_version"] == 6
    assert cli.main(["export", str(folder), str(out), "--which", "last", *(["--merge"] if more else [])]) == 0
    exported = AutoModelForCausalLM.from_pretrained(out)
    before = AutoModelForCausalLM.from_pretrained(models("llama"))
    moved = [
        not torch.equal(new, old)
        for new, old in zip(exported.state_dict().values(), before.state_dict().values(), strict=True)
    ]
    assert any(moved)


def test_it_goes_on_bit_for_bit_after_an_interruption(models, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    more = ADAPTERS | {"run.iterations": 4}
    assert run(models, whole, **more) == 0
    assert run(models, parts, **(more | {"run.iterations": 2})) == 0
    assert cli.main(["train", str(parts), "--resume", "--run.iterations", "4"]) == 0
    for one, other in zip(rows(whole), rows(parts), strict=True):
        assert {k: v for k, v in one.items() if not k.startswith("time/")} == {
            k: v for k, v in other.items() if not k.startswith("time/")
        }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout.max_episode_tokens": 4000}, "exceeds the 2048 tokens that"),
        ({"policy.device": "cuda"}, "sees none here"),
        ({"lora.rank": 4, "lora.targets": "nowhere"}, "match no linear layer"),
        ({"policy.dtype": "float16"}, "overflows"),
    ],
)
def test_what_cannot_work_is_one_line_before_anything_is_loaded(models, tmp_path, capsys, settings, message):
    models("llama")
    capsys.readouterr()
    assert run(models, tmp_path / "run", **settings) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
