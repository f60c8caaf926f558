"""T5: replay ratio 0 is on-policy training, bit for bit, as an independent loop does it."""

import pytest
import torch

from freshper.policies.tiny import TinyPolicy
from freshper.training import train
from freshper.training.warm_start import warm_started_policy

ITERATIONS = 5


def _weights(policy):
    return {name: tensor.numpy().tobytes() for name, tensor in policy.model.state_dict().items()}


@pytest.fixture(scope="module", params=[0, 7], ids=lambda seed: f"seed{seed}")
def independent(request, small, minimal_on_policy):
    """A config, the warm start it begins with, and what the independent loop makes of it."""
    config = small(run={"seed": request.param, "iterations": ITERATIONS}, replay={"ratio": 0})
    torch.set_num_threads(1)
    policy = warm_started_policy(config)
    before = _weights(policy)
    minimal_on_policy.train(policy, config, ITERATIONS)
    return config, before, _weights(policy)


def test_ratio_0_equals_an_independent_on_policy_loop_bit_for_bit(independent, tmp_path):
    config, before, expected = independent
    run = config.run.model_copy(update={"folder": str(tmp_path / "run")})
    outcome = train(config.model_copy(update={"run": run}))
    policy = TinyPolicy.load(outcome.folder / "model" / "last")
    assert policy.version == ITERATIONS
    assert _weights(policy) == expected
    assert all(before[name] != expected[name] for name in before), "something did not learn, so nothing was shown"


def test_with_ratio_0_no_setting_of_replay_matters(independent, tmp_path):
    config, _, expected = independent
    values = config.model_dump()
    values["run"]["folder"] = str(tmp_path / "run")
    values["replay"] |= {"priority": "success", "alpha": 0.0, "capacity": 5, "batch_size": 1}
    values["replay"]["correction"] |= {"beta_start": 0.4, "beta_end": 1.0}
    outcome = train(type(config).model_validate(values))
    assert _weights(TinyPolicy.load(outcome.folder / "model" / "last")) == expected
