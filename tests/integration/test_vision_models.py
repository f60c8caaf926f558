"""Image-text models from folders: collected, stored, taken back and learned from; and through the real command."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from freshper import ReplayBuffer, cli
from freshper.envs import make_env
from freshper.errors import ConfigError
from freshper.learning.learner import Learner
from freshper.learning.logprobs import TokenLogprobs
from freshper.policies.hf import policy_of
from freshper.policies.loading import load_model
from freshper.policies.lora import Lora
from freshper.rollout.collect import Limits, Start, collect
from freshper.trajectory import SamplingParams


def _zoo(name):
    path = Path(__file__).parents[1] / "unit" / "policies" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


zoo, text_zoo = _zoo("vision_zoo"), _zoo("model_zoo")
CPU = torch.device("cpu")
TASK = "frozenlake-image"
LIMITS = Limits(max_reply_tokens=5, max_episode_tokens=1500, max_turns=3)
SETTINGS = {
    "run.iterations": 2,
    "rollout.episodes": 4,
    "rollout.max_reply_tokens": 6,
    "rollout.max_episode_tokens": 1500,
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
    """Family -> the folder of a small model of it."""
    folder = tmp_path_factory.mktemp("models")

    def folder_of(family):
        if not (folder / family).exists():
            zoo.write_model(folder / family, family)
        return folder / family

    return folder_of


@pytest.fixture(params=zoo.FAMILIES)
def policy(models, request):
    return policy_of(load_model(str(models(request.param)), device="cpu"), 3, slots=2)


def played(policy, count=4):
    """Episodes of unequal lengths and numbers of pictures, with advantages."""
    envs = [make_env(TASK, split="train") for _ in range(count)]
    trajectories = []
    for turns in (1, 3):
        limits = Limits(LIMITS.max_reply_tokens, LIMITS.max_episode_tokens, turns)
        starts = [Start(seed, f"group-{seed}") for seed in range(turns, turns + count)]
        rollout = collect(envs, policy, starts, limits=limits, sampling=SamplingParams(), seed=turns)
        assert rollout.errors == ()
        trajectories += rollout.trajectories
    rng = np.random.default_rng(0)
    return [t.with_columns(advantages=np.where(t.response_mask, rng.normal(size=len(t)), 0)) for t in trajectories]


def scored(policy, trajectories, budget=3000, **arguments):
    """The learner's log-probs of the sampled tokens, by trajectory."""
    scorer = TokenLogprobs(policy.model, pictures=policy.picture_inputs, **arguments)
    found = [None] * len(trajectories)
    with torch.no_grad():
        for batch in scorer.split(trajectories, np.ones(len(trajectories)), budget, CPU):
            values = scorer(batch, 1.0).logprobs
            for line, row in enumerate(batch.rows):
                found[row] = values[line, : batch.lengths[line]].numpy()
    return found


@pytest.mark.parametrize("arguments", [{}, {"small_vocabulary": 0, "chunk_elements": 4000}])
def test_an_episode_out_of_the_buffer_scores_as_it_went_in(policy, arguments):
    """T16: the same pictures, positions and pixels; and the learner agrees with the sampler."""
    before = played(policy)
    assert {len(t.images) for t in before} == {1, 3}
    buffer = ReplayBuffer(64, seed=0)
    buffer.add(before, policy_version=3)
    drawn = buffer.sample(16, policy_version=3)
    went_in, came_out = (
        dict(zip(map(_name, ts), scored(policy, ts, **arguments), strict=True)) for ts in (before, drawn.trajectories)
    )
    assert len(came_out) > 4
    for name, values in came_out.items():
        np.testing.assert_allclose(values, went_in[name], rtol=0, atol=1e-5)
    for trajectory in before:
        np.testing.assert_allclose(went_in[_name(trajectory)], trajectory.behavior_logprobs, rtol=0, atol=1e-4)


def _name(trajectory):
    return (trajectory.tokens.tobytes(), trajectory.images)


def test_another_picture_scores_otherwise(policy):
    last = played(policy)[-1]
    other = replace(last, images=(*last.images[:-1], zoo.picture(5)))
    one, changed = (scored(policy, [trajectory])[0] for trajectory in (last, other))
    start = last.turns[-1].reply_start
    np.testing.assert_array_equal(one[:start], changed[:start])
    assert np.abs(one[start:] - changed[start:]).max() > 1e-3


@pytest.mark.parametrize("rank", [0, 4])
def test_a_fresh_and_a_replayed_update(models, rank):
    """All weights, the vision tower's too, or adapters in both."""
    for family in ("qwen2_5_vl", "smolvlm"):
        policy = policy_of(load_model(str(models(family)), device="cpu", lora=Lora(rank=rank)), 0, slots=4)
        learner = Learner(
            policy.model, total_updates=2, learning_rate=1e-3, token_budget=3000, pictures=policy.picture_inputs
        )
        before = {name: p.detach().clone() for name, p in policy.model.named_parameters() if p.requires_grad}
        fresh = played(policy)
        buffer = ReplayBuffer(64, seed=0)
        result = learner.update(fresh)
        assert np.abs(result.log_ratios).max() < 1e-3
        buffer.add(fresh, policy_version=learner.version)
        drawn = buffer.sample(8, policy_version=learner.version)
        result = learner.update(list(drawn.trajectories), drawn.sampling_weights)
        assert not result.skipped
        moved = {name for name, p in policy.model.named_parameters() if p.requires_grad and not p.equal(before[name])}
        assert any("vis" in name for name in moved)
        assert any("vis" not in name for name in moved)


def test_pictures_without_what_reads_them_are_refused(policy):
    learner = Learner(policy.model, total_updates=1, learning_rate=1e-3, token_budget=3000)
    with pytest.raises(ConfigError, match="nothing that reads them"):
        learner.update(played(policy))


def flags(**settings):
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def run(model, folder, task=TASK, **more):
    words = ["train", task, "--model", str(model), "--run.folder", str(folder)]
    return cli.main([*words, *flags(**(SETTINGS | more))])


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("qwen2_5_vl", {}),
        ("qwen2_vl", ADAPTERS),
        ("qwen3_vl", {"policy.gradient_checkpointing": "true"}),
        ("smolvlm", {"algorithm.advantage": "gae"}),
        ("idefics3", ADAPTERS | {"policy.dtype": "bfloat16", "policy.gradient_checkpointing": "true"}),
    ],
)
def test_every_family_trains_on_fresh_and_replayed_episodes(models, tmp_path, family, more):
    assert run(models(family), tmp_path / "run", **more) == 0
    lines = rows(tmp_path / "run")
    assert [line["policy_version"] for line in lines] == [3, 6]
    for line in lines:
        assert line["fresh/logprob_gap"] < (0.05 if "policy.dtype" in more else 1e-3)
        assert line["fresh/skipped"] == line["replay/skipped"] == 0
        assert line["fresh/grad_norm"] > 0 or line["rollout/score_std"] == 0


@pytest.mark.parametrize(("family", "more"), [("qwen2_5_vl", {}), ("smolvlm", ADAPTERS)])
def test_a_trained_model_is_evaluated_and_exported(models, tmp_path, capsys, family, more):
    folder, out = tmp_path / "run", tmp_path / "out"
    assert run(models(family), folder, **more) == 0
    capsys.readouterr()
    assert cli.main(["eval", str(folder), "--episodes", "2", "--which", "last", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["policy_version"] == 6
    assert cli.main(["export", str(folder), str(out), "--which", "last", *(["--merge"] if more else [])]) == 0
    exported = AutoModelForImageTextToText.from_pretrained(out)
    AutoImageProcessor.from_pretrained(out, backend="pil")
    before = AutoModelForImageTextToText.from_pretrained(models(family)).state_dict()
    assert any(not torch.equal(new, before[name]) for name, new in exported.state_dict().items())


@pytest.mark.parametrize(("family", "more"), [("qwen2_5_vl", ADAPTERS), ("smolvlm", {})])
def test_it_goes_on_bit_for_bit_after_an_interruption(models, tmp_path, family, more):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    more = more | {"eval.every": 1}
    assert run(models(family), whole, **more) == 0
    assert run(models(family), parts, **(more | {"run.iterations": 1})) == 0
    assert cli.main(["train", str(parts), "--resume", "--run.iterations", "2"]) == 0
    for one, other in zip(rows(whole), rows(parts), strict=True):
        assert {k: v for k, v in one.items() if not k.startswith("time/")} == {
            k: v for k, v in other.items() if not k.startswith("time/")
        }


def test_a_task_of_text_is_played_by_a_model_that_sees(models, tmp_path):
    assert run(models("qwen2_5_vl"), tmp_path / "run", task="frozenlake", **{"run.iterations": 1}) == 0
    assert rows(tmp_path / "run")[0]["fresh/logprob_gap"] < 1e-3


def test_a_model_of_text_alone_is_refused_for_pictures_before_it_is_loaded(tmp_path, capsys):
    text_zoo.write_model(tmp_path / "model", max_position_embeddings=2048)
    (tmp_path / "model" / "model.safetensors").unlink()
    capsys.readouterr()
    assert run(tmp_path / "model", tmp_path / "run") == 2
    error = capsys.readouterr().err
    assert "reads text alone" in error
    assert error.count("\n") == 1


def test_memory_is_estimated_for_a_model_that_sees(models, capsys):
    words = ["doctor", TASK, "--model", str(models("smolvlm")), "--no-run", *flags(**SETTINGS)]
    assert cli.main(words) == 0
    assert "activations of one pass" in capsys.readouterr().out
