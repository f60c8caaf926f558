"""A trainer of your own with freshper's buffer: numpy only, a minute of code, a few seconds of running.

The task: a prompt of one number in 0..9, a reply of two digit tokens; reward 1 when the digits add up to the
prompt. The policy is a table of logits, the update a policy gradient with PPO's clip. Everything that has to do with
replay is marked (1) to (5), and is the same around any model.
"""

from __future__ import annotations

import argparse

import numpy as np
from numpy.typing import NDArray

from freshper import Exponential, ReplayBuffer, SampledBatch, Trajectory, Turn

EPISODES, REPLAYS, BATCH = 16, 3, 32
LEARNING_RATE, CLIP = 4.0, 0.2
PROMPT = 10  # tokens 0-9 are digits, 10 + n is the prompt n

Floats = NDArray[np.float64]


class Policy:
    """Logits (prompt, digits so far, next digit), and the number of updates they have had: the policy version."""

    def __init__(self) -> None:
        self.logits = np.zeros((10, 11, 10))
        self.version = 0

    def logprobs(self, prompts: NDArray[np.int64], before: NDArray[np.int64]) -> Floats:
        """log pi of every next digit, (n, 10)."""
        chosen = self.logits[prompts, before]
        normalized: Floats = chosen - np.logaddexp.reduce(chosen, axis=-1, keepdims=True)
        return normalized


def play(policy: Policy, rng: np.random.Generator) -> list[Trajectory]:
    """A batch of episodes, each with what replay needs: log-probs recorded when sampling, and the version. (1)"""
    prompts = rng.integers(0, 10, EPISODES)
    digits, logprobs = [], []
    before = np.full(EPISODES, 10)  # no digit yet
    for _ in range(2):
        choice = policy.logprobs(prompts, before)
        digit = (np.exp(choice).cumsum(axis=1) < rng.random((EPISODES, 1))).sum(axis=1).clip(max=9)
        digits.append(digit)
        logprobs.append(choice[np.arange(EPISODES), digit])
        before = digit
    rewards = (digits[0] + digits[1] == prompts).astype(float)
    baseline = rewards.mean()
    episodes = []
    for n in range(EPISODES):
        advantage = rewards[n] - baseline  # kept with the trajectory: its own batch is what it is relative to
        episodes.append(
            Trajectory(
                tokens=[PROMPT + prompts[n], digits[0][n], digits[1][n]],
                response_mask=[False, True, True],
                behavior_logprobs=[0.0, logprobs[0][n], logprobs[1][n]],
                advantages=[0.0, advantage, advantage],
                turns=(Turn(0, 1, 3, rewards[n]),),
                stop_reason="terminated",
                success=bool(rewards[n]),
                policy_version=policy.version,
                task="sum",
                group=f"prompt-{prompts[n]}",
                seed=n,
            )
        )
    return episodes


def update(policy: Policy, trajectories: tuple[Trajectory, ...], weights: Floats) -> Floats:
    """One optimizer update with both corrections; returns log(pi/mu) of every trajectory, before the update. (2)"""
    tokens = np.array([trajectory.tokens for trajectory in trajectories]).astype(np.int64)
    behavior = np.array([trajectory.behavior_logprobs for trajectory in trajectories])[:, 1:]
    advantages = np.array([trajectory.advantages for trajectory in trajectories])[:, 1:]
    prompts = tokens[:, 0] - PROMPT
    log_ratios, gradient = np.zeros(len(tokens)), np.zeros_like(policy.logits)
    for at, before in ((0, np.full(len(tokens), 10)), (1, tokens[:, 1])):
        digit = tokens[:, at + 1]
        choice = policy.logprobs(prompts, before)
        log_ratio = choice[np.arange(len(tokens)), digit] - behavior[:, at]
        log_ratios += log_ratio
        ratio, advantage = np.exp(np.clip(log_ratio, -20, 20)), advantages[:, at]
        open_to_change = np.where(advantage >= 0, ratio <= 1 + CLIP, ratio >= 1 - CLIP)
        step = weights * ratio * advantage * open_to_change / len(tokens)
        push = -np.exp(choice) * step[:, None]
        push[np.arange(len(tokens)), digit] += step
        np.add.at(gradient, (prompts, before), push)
    policy.logits += LEARNING_RATE * gradient
    policy.version += 1
    return log_ratios


def train(iterations: int, *, epochs: int, replays: int, seed: int) -> list[float]:
    """Success rate of every iteration; ``epochs`` updates on the fresh batch and ``replays`` on replayed ones each."""
    rng, policy = np.random.default_rng(seed), Policy()
    buffer = ReplayBuffer(2_000, priority="reward", freshness=Exponential(tau=30), alpha=0.6, seed=seed)
    success = []
    for _ in range(iterations):
        fresh = play(policy, rng)
        success.append(float(np.mean([trajectory.success for trajectory in fresh])))
        for _ in range(epochs):
            update(policy, tuple(fresh), np.ones(len(fresh)))
        buffer.add(fresh, policy_version=policy.version)  # (3)
        for _ in range(replays):
            batch: SampledBatch = buffer.sample(BATCH, policy_version=policy.version)  # (4)
            log_ratios = update(policy, batch.trajectories, batch.sampling_weights)
            buffer.observe(batch, log_ratios)  # (5) what drift_by_age and freshness="auto" live on
    for one in buffer.drift_by_age():
        print(f"  age {one.age_low}-{one.age_high}: ESS {one.ess_fraction:.2f}, KL {one.kl:.3f} nats (n {one.n})")
    return success


def main() -> None:
    """The same episodes used once, used four times at once, and replayed later."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--iterations", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for name, epochs, replays in (("on-policy", 1, 0), ("epochs", 1 + REPLAYS, 0), ("replay", 1, REPLAYS)):
        success = train(arguments.iterations, epochs=epochs, replays=replays, seed=arguments.seed)
        print(f"{name}: success {np.mean(success[-20:]):.2f} in the last 20 iterations")


if __name__ == "__main__":
    main()
