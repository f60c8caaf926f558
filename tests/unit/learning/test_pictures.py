"""Trajectories with pictures in the learner: scored as they were sampled, however they are cut, mixed and stored."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from freshper import ReplayBuffer
from freshper.envs import make_env
from freshper.errors import ConfigError, PolicyError
from freshper.learning import Learner, Objective, reinforce_plus_plus
from freshper.learning.batching import micro_batches
from freshper.learning.logprobs import TokenLogprobs
from freshper.policies.tiny_vision import (
    TinyVisionPolicy,
    build_processor,
    build_seeing_model,
    build_seeing_tokenizer,
)
from freshper.rollout.collect import Limits, Start, collect
from freshper.trajectory import SamplingParams

CPU = torch.device("cpu")
TASKS = ("frozenlake-image", "frozenlake")
WAYS = {  # through the whole of the logits, the head in chunks, and the model's own forward in parts
    "plain": {},
    "head": {"small_vocabulary": 0, "chunk_elements": 4000},
    "rows": {"small_vocabulary": 0, "keep_elements": 60_000},
    "tokens": {"small_vocabulary": 0, "keep_elements": 2_000},
}


@pytest.fixture(scope="module")
def policy():
    texts = ["The picture shows the lake.", *(f"<answer> {way} </answer>" for way in ("Left", "Down", "Right", "Up"))]
    tokenizer = build_seeing_tokenizer(texts * 9)
    model = build_seeing_model(tokenizer, hidden_size=32, layers=2, heads=2, context=512, seed=0)
    return TinyVisionPolicy(model, tokenizer, build_processor())


@pytest.fixture(scope="module")
def episodes(policy):
    """Of 1 to 3 turns, of a task with a picture a turn and of one without any."""
    found = []
    for task in TASKS:
        for turns in (1, 2, 3):
            envs = [make_env(task) for _ in range(2)]
            starts = [Start(10 * turns + place, f"{task}-{turns}") for place in range(2)]
            how = {"limits": Limits(6, 400, turns), "sampling": SamplingParams(), "seed": turns}
            found += collect(envs, policy, starts, **how).trajectories
    assert sorted({len(episode.images) for episode in found}) == [0, 1, 2, 3]
    rng = np.random.default_rng(0)
    return [t.with_columns(advantages=np.where(t.response_mask, rng.normal(size=len(t)), 0)) for t in found]


def scores(policy, episodes, way="plain", budget=3000, **changes):
    with pytest.MonkeyPatch.context() as patch:
        if way in ("rows", "tokens"):  # as for a model whose head is not known
            patch.setattr("freshper.learning.logprobs.find_head", lambda model: None)
        scorer = TokenLogprobs(policy.model, **WAYS[way] | {"pictures": policy.picture_inputs} | changes)
    found = [np.empty(0)] * len(episodes)
    with torch.no_grad():
        for batch in scorer.split(episodes, np.ones(len(episodes)), budget, CPU):
            for row, line in zip(batch.rows, scorer(batch, 1.0).logprobs, strict=True):
                found[row] = line[: len(episodes[row])].numpy()
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("budget", [300, 3000])
def test_the_learner_scores_what_the_sampler_recorded(policy, episodes, way, budget):
    for values, episode in zip(scores(policy, episodes, way, budget), episodes, strict=True):
        np.testing.assert_allclose(values, episode.behavior_logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("stored", [False, True])
def test_an_episode_out_of_the_buffer_scores_as_it_went_in(policy, episodes, tmp_path, stored):
    """T16, also through a saved buffer: pictures come back by their hash, in their order, to their turns."""
    buffer = ReplayBuffer(64, seed=0)
    buffer.add(episodes, policy_version=0)
    if stored:
        buffer.save(tmp_path / "buffer")
        buffer.close()
        buffer = ReplayBuffer.load(tmp_path / "buffer")
    drawn = buffer.sample(40, policy_version=0).trajectories
    before = {
        episode.tokens.tobytes(): values for episode, values in zip(episodes, scores(policy, episodes), strict=True)
    }
    assert {len(episode.images) for episode in drawn} == {0, 1, 2, 3}
    for episode, values in zip(drawn, scores(policy, drawn), strict=True):
        np.testing.assert_allclose(values, before[episode.tokens.tobytes()], rtol=0, atol=1e-5)
    buffer.close()


def test_pictures_belong_to_their_rows(policy, episodes):
    """Another last picture changes what follows it, and nothing else in the batch."""
    pictured = [episode for episode in episodes if len(episode.images) == 3]
    [other] = [episode for episode in episodes if len(episode.images) == 1][:1]
    changed = [replace(pictured[0], images=(*pictured[0].images[:2], other.images[0])), *pictured[1:]]
    one, two = scores(policy, pictured), scores(policy, changed)
    last = pictured[0].turns[-1].reply_start
    np.testing.assert_array_equal(one[0][:last], two[0][:last])
    assert np.abs(one[0][last:] - two[0][last:]).max() > 1e-3
    np.testing.assert_array_equal(one[1], two[1])


@pytest.mark.parametrize("way", ["plain", "head"])
def test_text_alone_is_scored_bit_for_bit_as_without_what_reads_pictures(policy, episodes, way):
    texts = [episode for episode in episodes if not episode.images]
    for seeing, blind in zip(scores(policy, texts, way), scores(policy, texts, way, pictures=None), strict=True):
        np.testing.assert_array_equal(seeing, blind)


def test_micro_batches_carry_the_pictures_of_their_rows(episodes):
    batches = list(micro_batches(episodes, np.ones(len(episodes)), 300, CPU))
    assert len(batches) > 2
    for batch in batches:
        assert batch.images == tuple(episodes[row].images for row in batch.rows)
        assert batch.pictured == any(batch.images)
    assert {batch.pictured for batch in batches} == {True, False}


@pytest.mark.parametrize("packing", [None, True])
def test_pictures_are_never_packed(policy, episodes, packing):
    """A budget that packing could fill is left unfilled where a row shows a picture."""
    scorer = TokenLogprobs(policy.model, pictures=policy.picture_inputs, packing=packing)
    texts = [episode for episode in episodes if not episode.images]
    for batch in scorer.split(episodes, np.ones(len(episodes)), 300, CPU):
        assert batch.tokens.numel() <= 300
        assert scorer._inputs(batch).input_ids.shape[0] == len(batch.rows) or not batch.pictured
    values = scores(policy, episodes, packing=packing)
    for value, episode in zip(values, episodes, strict=True):
        np.testing.assert_allclose(value, episode.behavior_logprobs, rtol=0, atol=1e-5)
    if packing and scorer.packing != "none":
        [batch] = scorer.split(texts, np.ones(len(texts)), 3000, CPU)
        assert scorer._inputs(batch).input_ids.shape[0] == 1


def gradient(policy, episodes, budget):
    learner = Learner(
        policy.model, learning_rate=1e-3, total_updates=1, token_budget=budget, pictures=policy.picture_inputs
    )
    result = learner.update(episodes, accept=lambda metrics, ratios: "only looked at")
    assert result.skipped
    return result


def test_the_gradient_does_not_depend_on_the_budget(policy, episodes):
    whole, cut = (gradient(policy, episodes, budget) for budget in (10_000, 200))
    assert whole.metrics["grad_norm"] == pytest.approx(cut.metrics["grad_norm"], rel=1e-4)
    np.testing.assert_allclose(whole.log_ratios, 0, atol=1e-4)
    np.testing.assert_allclose(cut.log_ratios, 0, atol=1e-4)


def test_an_update_moves_what_sees_and_what_speaks(episodes):
    texts = ["The picture shows the lake."]
    tokenizer = build_seeing_tokenizer(texts)
    policy = TinyVisionPolicy(
        build_seeing_model(tokenizer, hidden_size=16, layers=1, heads=1, context=512, seed=0),
        tokenizer,
        build_processor(),
    )
    envs = [make_env("frozenlake-image") for _ in range(4)]
    starts = [Start(seed, str(seed)) for seed in range(4)]
    rollout = collect(envs, policy, starts, limits=Limits(6, 500, 2), sampling=SamplingParams(), seed=0)
    paid = [
        replace(t, turns=tuple(replace(turn, reward=float(row)) for turn in t.turns))
        for row, t in enumerate(rollout.trajectories)
    ]
    learner = Learner(policy.model, learning_rate=1e-2, total_updates=5, pictures=policy.picture_inputs)
    before = {name: value.detach().clone() for name, value in policy.model.named_parameters()}
    assert learner.update(reinforce_plus_plus(paid)).applied
    still = {name for name, value in policy.model.named_parameters() if torch.equal(value, before[name])}
    assert still == set()


def test_pictures_without_what_reads_them_are_refused(policy, episodes):
    learner = Learner(copy.deepcopy(policy.model), learning_rate=1e-3, total_updates=1)
    with pytest.raises(ConfigError, match=r"\d pictures in a batch, and nothing that reads them"):
        learner.update(episodes)
    assert learner.update([episode for episode in episodes if not episode.images]).applied is True


def test_a_lost_picture_is_refused(policy, episodes):
    [episode] = [episode for episode in episodes if len(episode.images) == 3][:1]
    shuffled = replace(episode, images=(*episode.images[:2], make_large()))
    with pytest.raises(PolicyError, match="no place for picture 2 of 3"):
        scores(policy, [shuffled])


def make_large():
    env = make_env("frozenlake-image", pixels=128)
    env.reset(0)
    return env.images()[0]


def test_the_reference_model_sees_too(policy, episodes):
    learner = Learner(
        policy.model, objective=Objective(kl=0.1), learning_rate=1e-3, total_updates=1, pictures=policy.picture_inputs
    )
    for values, episode in zip(learner.score_reference(episodes), episodes, strict=True):
        np.testing.assert_allclose(values, episode.behavior_logprobs, rtol=0, atol=1e-5)
    assert learner.update(episodes, accept=lambda metrics, ratios: "no").metrics["kl"] == pytest.approx(0, abs=1e-6)
