"""Demonstrations without log-probs: no loss with importance ratios takes them, and nothing changes when one comes."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from freshper.errors import TrajectoryError
from freshper.learning.learner import Learner
from freshper.trajectory import SamplingParams


def unknown(trajectory):
    return replace(trajectory, behavior_logprobs=None, logprobs_known=False)


def state_of(learner):
    """Weights, optimizer and clock."""
    weights = torch.cat([p.detach().flatten() for p in learner.model.parameters()])
    moments = [part["exp_avg"].clone() for part in learner.state_dict()["optimization"]["optimizer"]["state"].values()]
    return weights, moments, learner.version, learner.learning_rate


@pytest.mark.parametrize("places", [[0], [2], [1, 3, 4]])
def test_an_update_refuses_a_demonstration_and_changes_nothing(new_model, random_batch, places):
    learner = Learner(new_model(), learning_rate=1e-3, total_updates=10, schedule="linear", patience=1)
    batch = random_batch(5)
    learner.update(batch)
    before, training = state_of(learner), learner.model.training
    mixed = [unknown(t) if place in places else t for place, t in enumerate(batch)]
    message = rf"trajectory {places[0]} of the batch \({len(places)} of 5 in all\) has logprobs_known=False.*record the"
    with pytest.raises(TrajectoryError, match=message):
        learner.update(mixed)
    after = state_of(learner)
    assert torch.equal(before[0], after[0])
    assert all(torch.equal(one, other) for one, other in zip(before[1], after[1], strict=True))
    assert before[2:] == after[2:]
    assert learner.model.training == training
    assert learner.update(batch).applied  # it was no failed update: patience is 1


def test_a_refused_batch_does_not_use_up_the_warning_about_truncation(new_model, random_batch):
    learner = Learner(new_model(), learning_rate=1e-3, total_updates=10)
    batch = random_batch(2, sampling=SamplingParams(top_p=0.9))
    with pytest.raises(TrajectoryError, match="logprobs_known=False"):
        learner.update([unknown(batch[0])])
    with pytest.warns(UserWarning, match="importance ratios are biased"):
        learner.update(batch)


def test_a_demonstration_can_be_scored_and_then_learned_from(new_model, random_batch):
    """With the log-probs of the present policy it counts as sampled from it: every ratio starts at 1."""
    learner = Learner(new_model(), learning_rate=1e-3, total_updates=10)
    batch = random_batch(4)
    scores = learner.score([unknown(t) for t in batch])
    for score, known in zip(scores, learner.score(batch), strict=True):
        np.testing.assert_array_equal(score, known)
    scored = [
        replace(unknown(t), behavior_logprobs=score, logprobs_known=True)
        for t, score in zip(batch, scores, strict=True)
    ]
    update = learner.update(scored)
    assert update.applied
    np.testing.assert_allclose(update.log_ratios, 0, atol=1e-4)
