"""Small models and random trajectories for the tests of this room."""

import numpy as np
import pytest
import torch

from freshper.policies.tiny import build_model
from freshper.trajectory import SamplingParams, StopReason, Trajectory, Turn

torch.set_num_threads(1)

VOCAB = 40


def _model(seed=0):
    model = build_model(VOCAB, hidden_size=32, layers=2, heads=2, context=128, seed=seed)
    with torch.no_grad():  # random weights of the usual size; a clear preference makes every test sharper
        model.lm_head.weight.mul_(2.0)
    return model


def _trajectory(rng, count=3, *, credited=True, temperature=1.0, **parts):
    """Random tokens and log-probs; observations of 1 to 4 tokens, replies of 1 to 5."""
    tokens, mask, spans = [], [], []
    for _ in range(count):
        start, shown, said = len(tokens), int(rng.integers(1, 5)), int(rng.integers(1, 6))
        tokens += rng.integers(0, VOCAB, shown + said).tolist()
        mask += [False] * shown + [True] * said
        spans.append(Turn(start, start + shown, len(tokens), float(rng.normal())))
    mask = np.array(mask)
    whole = {
        "tokens": tokens,
        "response_mask": mask,
        "behavior_logprobs": np.where(mask, -rng.uniform(0.5, 6.0, len(mask)), 0),
        "turns": tuple(spans),
        "stop_reason": StopReason.TERMINATED,
        "success": False,
        "policy_version": 0,
        "task": "test",
        "group": "test/0",
        "seed": 0,
        "sampling": SamplingParams(temperature=temperature),
        "advantages": np.where(mask, rng.normal(size=len(mask)), 0) if credited else None,
    }
    return Trajectory(**(whole | parts))


def _batch(size=6, seed=0, *, longest=5, **parts):
    """Trajectories of 1 to ``longest`` turns."""
    rng = np.random.default_rng(seed)
    return [_trajectory(rng, int(rng.integers(1, longest + 1)), **parts) for _ in range(size)]


def _paid(*rewards, seed=0):
    """A trajectory with these turn rewards."""
    trajectory = _trajectory(np.random.default_rng(seed), len(rewards), credited=False)
    spans = zip(trajectory.turns, rewards, strict=True)
    turns = tuple(Turn(turn.start, turn.reply_start, turn.end, reward) for turn, reward in spans)
    return _trajectory(np.random.default_rng(seed), len(rewards), credited=False, turns=turns)


@pytest.fixture(scope="session")
def new_model():
    return _model


@pytest.fixture(scope="session")
def random_batch():
    return _batch


@pytest.fixture(scope="session")
def paid():
    return _paid
