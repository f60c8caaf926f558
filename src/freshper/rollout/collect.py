"""Many episodes in lockstep, multi-turn, token in / token out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from freshper.envs.core import Env, Outcome
from freshper.errors import ConfigError, EnvError, PolicyError
from freshper.policies.core import Policy, Reply
from freshper.trajectory import SamplingParams, StopReason, Trajectory, Turn


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on an episode, each at least 1. ``max_turns`` None leaves it to the environment."""

    max_reply_tokens: int
    max_episode_tokens: int
    max_turns: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_reply_tokens", "max_episode_tokens", "max_turns"):
            limit = getattr(self, name)
            if limit is not None and limit < 1:
                raise ConfigError(f"{name} {limit} must be at least 1: no episode could have a turn")


@dataclass(frozen=True, slots=True)
class Start:
    """What an episode starts from: the seed of its level, and the group of episodes that share it."""

    seed: int
    group: str


@dataclass(frozen=True, slots=True)
class TranscriptTurn:
    """A turn as text, for people to read."""

    observation: str
    reply: str
    reward: float
    valid: bool


@dataclass(frozen=True, slots=True)
class Transcript:
    """An episode as text, with how it ended; ``error`` names what broke, if something did."""

    turns: tuple[TranscriptTurn, ...]
    final_observation: str
    success: bool
    stop_reason: StopReason
    error: str | None = None

    @property
    def episode_return(self) -> float:
        """Sum of the turn rewards."""
        return float(sum(turn.reward for turn in self.turns))


@dataclass(frozen=True, slots=True)
class Rollout:
    """What came of a collection: ``trajectories`` of whole episodes, and a transcript of every episode started.

    Episodes that ended in an error have a transcript and no trajectory.
    """

    trajectories: tuple[Trajectory, ...]
    transcripts: tuple[Transcript, ...]

    @property
    def errors(self) -> tuple[Transcript, ...]:
        """The episodes that broke."""
        return tuple(t for t in self.transcripts if t.stop_reason is StopReason.ERROR)


def collect(
    envs: Sequence[Env],
    policy: Policy,
    starts: Sequence[Start],
    *,
    limits: Limits,
    sampling: SamplingParams,
    seed: int,
) -> Rollout:
    """Play one episode per start, ``envs[i]`` on ``starts[i]``, all in step; ``seed`` decides the sampling.

    Episodes that have ended leave the batch. A failing environment ends its own episode only.
    """
    if not 0 < len(starts) <= len(envs):
        raise ConfigError(f"{len(starts)} episodes were asked for with {len(envs)} environments: 1 to that many")
    if len({id(env) for env in envs[: len(starts)]}) < len(starts):
        raise ConfigError("two episodes share an environment object: each needs its own, it runs one at a time")
    episodes = [_Episode(env, start, policy, limits) for env, start in zip(envs, starts, strict=False)]
    conversations = policy.begin(len(episodes), sampling, seed)
    for episode in episodes:
        episode.begin()
    while rows := [row for row, episode in enumerate(episodes) if episode.stop_reason is None]:
        running = [episodes[row] for row in rows]
        replies = conversations.reply(rows, [e.prompt for e in running], [e.reply_room for e in running])
        for episode, reply in zip(running, replies, strict=True):
            episode.take(reply)
    return Rollout(
        trajectories=tuple(e.trajectory(sampling) for e in episodes if e.stop_reason is not StopReason.ERROR),
        transcripts=tuple(e.transcript() for e in episodes),
    )


@dataclass(slots=True)
class _Episode:
    """One running episode: what has been said so far, in tokens and in text."""

    env: Env
    start: Start
    policy: Policy
    limits: Limits
    prompt: list[int] = field(default_factory=list)  # the turn that waits for a reply
    tokens: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    texts: list[TranscriptTurn] = field(default_factory=list)
    observation: str = ""
    success: bool = False
    stop_reason: StopReason | None = None
    error: str | None = None
    version: int = 0

    @property
    def reply_room(self) -> int:
        """Tokens that the next reply may have."""
        room = self.limits.max_episode_tokens - len(self.tokens) - len(self.prompt)
        return min(self.limits.max_reply_tokens, room)

    def begin(self) -> None:
        """Reset the environment and show its first observation."""
        self.version = self.policy.version
        try:
            observation = _text(self.env.reset(self.start.seed))
            instructions = _text(self.env.instructions)
        except Exception as error:  # noqa: BLE001 - whatever an environment raises is data, never the end of the run
            self._fail(error)
            return
        self._show(observation, instructions)

    def take(self, reply: Reply) -> None:
        """Play the reply to the waiting turn."""
        if not 1 <= len(reply.tokens) == len(reply.logprobs) <= self.reply_room:
            raise PolicyError(
                f"a reply has {len(reply.tokens)} tokens and {len(reply.logprobs)} log-probs: it must have 1 to "
                f"{self.reply_room} of each"
            )
        text = self.policy.decode(reply.tokens)
        try:
            outcome = _whole(self.env.step(text))
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(error)
            return
        start = len(self.tokens)
        reply_start = start + len(self.prompt)
        self.tokens += [*self.prompt, *reply.tokens]
        self.mask += [False] * len(self.prompt) + [True] * len(reply.tokens)
        self.logprobs += [0.0] * len(self.prompt) + list(reply.logprobs)
        self.turns.append(Turn(start, reply_start, len(self.tokens), outcome.reward))
        self.texts.append(TranscriptTurn(self.observation, text, outcome.reward, outcome.valid))
        if outcome.done:
            self.observation, self.success = outcome.observation, outcome.success
            self.stop_reason = StopReason.TERMINATED
        elif len(self.turns) == self.limits.max_turns:
            self.observation = outcome.observation
            self.stop_reason = StopReason.TURN_LIMIT
        else:
            self._show(outcome.observation, None)

    def _show(self, observation: str, instructions: str | None) -> None:
        self.observation = observation
        self.prompt = self.policy.encode_turn(observation, instructions)
        if self.reply_room >= 1:
            return
        if self.turns:
            self.stop_reason = StopReason.TOKEN_LIMIT
        else:
            limit = self.limits.max_episode_tokens
            self._fail(ConfigError(f"the first turn has {len(self.prompt)} tokens, max_episode_tokens is {limit}"))

    def _fail(self, error: Exception) -> None:
        self.stop_reason = StopReason.ERROR
        self.error = f"{type(error).__name__}: {error}"

    def trajectory(self, sampling: SamplingParams) -> Trajectory:
        """The record of a whole episode."""
        assert self.stop_reason is not None
        return Trajectory(
            tokens=np.array(self.tokens, dtype=np.int32),
            response_mask=np.array(self.mask, dtype=np.bool_),
            behavior_logprobs=np.array(self.logprobs, dtype=np.float32),
            turns=tuple(self.turns),
            stop_reason=self.stop_reason,
            success=self.success,
            policy_version=self.version,
            task=self.env.task,
            group=self.start.group,
            seed=self.start.seed,
            sampling=sampling,
        )

    def transcript(self) -> Transcript:
        """The episode as text."""
        assert self.stop_reason is not None
        return Transcript(tuple(self.texts), self.observation, self.success, self.stop_reason, self.error)


def _whole(outcome: object) -> Outcome:
    """The outcome in plain values. Raises :class:`EnvError` when it is none: half an episode is never learned from."""
    if not isinstance(outcome, Outcome):
        raise EnvError(f"step() returned {outcome!r}: it must return an Outcome")
    reward = float(outcome.reward)
    if not math.isfinite(reward):
        raise EnvError(f"reward {reward} must be finite")
    for name in ("done", "success", "valid"):
        if not isinstance(getattr(outcome, name), (bool, np.bool_)):
            raise EnvError(f"{name} {getattr(outcome, name)!r} must be true or false")
    return Outcome(_text(outcome.observation), reward, bool(outcome.done), bool(outcome.success), bool(outcome.valid))


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise EnvError(f"{value!r} must be text")
    value.encode()  # lone surrogates raise here; a tokenizer could not take them
    return value
