"""On-policy REINFORCE++ in a page, from the papers alone: what replay ratio 0 must equal bit for bit.

It shares with the package what samples (the policy, ``collect``) and nothing of what learns: advantages, loss, clipping
and AdamW are written out here.
"""

import numpy as np
import torch

from freshper.envs import make_env
from freshper.rollout.collect import Limits, Start, collect
from freshper.training.seeds import derive_seed
from freshper.trajectory import SamplingParams


def train(policy, config, iterations):
    """Train ``policy`` in place for so many iterations of one update each."""
    envs = [make_env(config.run.task, split="train") for _ in range(config.rollout.episodes)]
    limits = Limits(config.rollout.max_reply_tokens, config.rollout.max_episode_tokens)
    adamw = AdamW(list(policy.model.parameters()), config.optimizer)
    for iteration in range(1, iterations + 1):
        seed = config.run.seed
        starts = [Start(derive_seed(seed, "level", iteration, n), f"{iteration}-{n}") for n in range(len(envs))]
        sampled = collect(
            envs,
            policy,
            starts,
            limits=limits,
            sampling=SamplingParams(),
            seed=derive_seed(seed, "sampling", iteration),
        )
        loss = surrogate(policy.model, sampled.trajectories, config.clip.low)
        adamw.update(torch.autograd.grad(loss, adamw.parameters))
        policy.publish(policy.model, iteration)


def advantages_of(trajectories):
    """Per trajectory and sampled token: the rewards still to come, normalized over all sampled tokens of the batch."""
    returns = []
    for trajectory in trajectories:
        rewards = [turn.reward for turn in trajectory.turns]
        lengths = [turn.end - turn.reply_start for turn in trajectory.turns]
        to_go = np.cumsum(rewards[::-1])[::-1]
        returns.append(np.repeat(to_go, lengths))
    together = np.concatenate(returns)
    return [(values - together.mean()) / together.std() for values in returns]


def surrogate(model, trajectories, clip):
    """PPO's clipped loss, averaged over the sampled tokens of the batch."""
    advantages = advantages_of(trajectories)
    order = sorted(range(len(trajectories)), key=lambda row: -len(trajectories[row]))
    width = len(trajectories[order[0]])
    tokens = torch.zeros(len(order), width, dtype=torch.long)
    present = torch.zeros(len(order), width, dtype=torch.long)
    sampled = torch.zeros(len(order), width, dtype=torch.bool)
    for row, index in enumerate(order):
        trajectory = trajectories[index]
        tokens[row, : len(trajectory)] = torch.tensor(trajectory.tokens)
        present[row, : len(trajectory)] = 1
        sampled[row, : len(trajectory)] = torch.tensor(trajectory.response_mask)
    gains = torch.tensor(np.concatenate([advantages[index] for index in order]), dtype=torch.float32)
    old = torch.tensor(np.concatenate([_sampled_logprobs(trajectories[index]) for index in order]))

    logits = model(input_ids=tokens, attention_mask=present, use_cache=False).logits
    logprobs = torch.log_softmax(logits[:, :-1], -1).gather(-1, tokens[:, 1:, None])[..., 0]
    ratio = torch.exp(logprobs[sampled[:, 1:]] - old)
    too_far = torch.where(gains > 0, ratio > 1 + clip, ratio < 1 - clip)
    return -torch.where(too_far, ratio.detach().clamp(1 - clip, 1 + clip), ratio).mul(gains).mean()


def _sampled_logprobs(trajectory):
    return trajectory.behavior_logprobs[trajectory.response_mask]


class AdamW:
    """Loshchilov & Hutter (arXiv 1711.05101), after the gradients were scaled down to the largest norm allowed."""

    def __init__(self, parameters, settings):
        self.parameters = parameters
        self.settings = settings
        self.means = [torch.zeros_like(parameter) for parameter in parameters]
        self.squares = [torch.zeros_like(parameter) for parameter in parameters]
        self.updates = 0

    @torch.no_grad()
    def update(self, gradients):
        """One step against the gradients."""
        s = self.settings
        self.updates += 1
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]))
        shrink = torch.clamp(s.max_grad_norm / (norm + 1e-6), max=1.0)
        rate = s.learning_rate / (1 - s.beta1**self.updates)
        root = (1 - s.beta2**self.updates) ** 0.5
        for parameter, gradient, mean, square in zip(self.parameters, gradients, self.means, self.squares, strict=True):
            scaled = gradient * shrink
            mean.lerp_(scaled, 1 - s.beta1)
            square.mul_(s.beta2).addcmul_(scaled, scaled, value=1 - s.beta2)
            parameter.mul_(1 - s.learning_rate * s.weight_decay)
            parameter.addcdiv_(mean, square.sqrt() / root + 1e-8, value=-rate)
