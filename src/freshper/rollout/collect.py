"""Many episodes at once, multi-turn, token in / token out."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from freshper.envs.core import Env, Outcome, Pictured
from freshper.errors import ConfigError, EnvError, PolicyError
from freshper.policies.core import Conversations, Policy, Reply, SeeingPolicy
from freshper.rollout.env_calls import EnvCalls
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
    """A turn as text and ``images``, for people to read."""

    observation: str
    reply: str
    reward: float
    valid: bool
    images: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Transcript:
    """An episode as text, with how it ended and what was measured; ``error`` names what broke, if something did."""

    turns: tuple[TranscriptTurn, ...]
    final_observation: str
    success: bool
    stop_reason: StopReason
    error: str | None = None
    task: str = ""
    measures: Mapping[str, float] = field(default_factory=dict)
    final_images: tuple[bytes, ...] = ()

    @property
    def episode_return(self) -> float:
        """Sum of the turn rewards."""
        return float(sum(turn.reward for turn in self.turns))


@dataclass(frozen=True, slots=True)
class Rollout:
    """What came of a collection: ``trajectories`` of whole episodes, and a transcript of every episode started.

    Episodes that ended in an error have a transcript and no trajectory. ``hung`` are the numbers of environments
    that ran out of time: they may still be at work, and must be replaced.
    """

    trajectories: tuple[Trajectory, ...]
    transcripts: tuple[Transcript, ...]
    hung: tuple[int, ...] = ()

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
    parallel: int | None = None,
    env_threads: int = 0,
    env_timeout: float | None = None,
) -> Rollout:
    """Play one episode per start, ``envs[i]`` on ``starts[i]``; ``seed`` decides the sampling.

    At most ``parallel`` episodes run at once (None: all); as one ends the next begins, in the order of ``starts``,
    which is also the order of the result. Each reply is played as soon as the engine hands it out. With
    ``env_threads`` 0 an environment answers before sampling goes on; with more, that many threads step
    environments (one call at a time each) while the other rows are sampled: for environments that wait for a
    disk, a tool or a network. The order in which answers come in may then change a log-prob in its last bits.

    A failing environment ends its own episode only, and so does one that takes longer than ``env_timeout`` seconds
    over a reset or a reply: it is left behind, see :class:`~freshper.rollout.env_calls.EnvCalls`.
    """
    if not 0 < len(starts) <= len(envs):
        raise ConfigError(f"{len(starts)} episodes were asked for with {len(envs)} environments: 1 to that many")
    if len({id(env) for env in envs[: len(starts)]}) < len(starts):
        raise ConfigError("two episodes share an environment object: each needs its own, it runs one at a time")
    if parallel is not None and parallel < 1:
        raise ConfigError(f"parallel {parallel} must be at least 1: no episode could run")
    seeing = policy if isinstance(policy, SeeingPolicy) else None
    pictured = [env if isinstance(env, Pictured) else None for env in envs[: len(starts)]]  # takes longer than a step
    if seeing is None and (shown := [env for env in pictured if env is not None]):
        raise ConfigError(
            f"task {shown[0].task!r} shows pictures, and {type(policy).__name__} reads none: choose an image-text "
            "model, or the task's text version"
        )
    episodes = [
        _Episode(env, shows, start, policy, limits) for env, shows, start in zip(envs, pictured, starts, strict=False)
    ]
    conversations = policy.begin(len(episodes), sampling, seed)
    with EnvCalls[_Answer](env_threads, env_timeout) as environments:
        _play(episodes, conversations, environments, parallel or len(episodes))
        hung = tuple(sorted(environments.hung))
    return Rollout(
        trajectories=tuple(e.trajectory(sampling) for e in episodes if e.stop_reason is not StopReason.ERROR),
        transcripts=tuple(e.transcript() for e in episodes),
        hung=hung,
    )


def _play(
    episodes: Sequence[_Episode], conversations: Conversations, environments: EnvCalls[_Answer], parallel: int
) -> None:
    """Run every episode to its end: the engine samples, the environments answer, who ends makes room."""
    waiting = deque(range(len(episodes)))
    running: set[int] = set()  # rows whose episode has begun and not ended
    asking: set[int] = set()  # of these, rows that wait for a reply
    while waiting or running:
        while waiting and len(running) < parallel:
            row = waiting.popleft()
            running.add(row)
            environments.call(row, episodes[row].begin())
        if asking:
            for row, reply in conversations.finished():
                if row not in asking:
                    raise PolicyError(f"a reply came for row {row}, which did not ask for one")
                asking.remove(row)
                environments.call(row, episodes[row].hear(reply))
        for row, answer in environments.answers(wait=not asking):
            episode = episodes[row]
            episode.go_on(answer)
            if episode.stop_reason is None:
                shown: dict[str, Any] = {"images": episode.images} if episode.images else {}
                conversations.submit(row, episode.prompt, episode.reply_room, **shown)
                asking.add(row)
            else:
                conversations.close_row(row)
                running.remove(row)


@dataclass(frozen=True, slots=True)
class _Opening:
    """What an environment shows when it has been reset."""

    observation: str
    instructions: str
    images: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class _Answered:
    """What an environment answers to a reply."""

    outcome: Outcome
    images: tuple[bytes, ...]


_Answer = _Opening | _Answered


@dataclass(slots=True)
class _Episode:
    """One episode: what has been said so far, in tokens and in text.

    ``begin`` and ``hear`` return the call that the environment must answer, ``go_on`` takes its answer. Only that
    call may run in another thread: the tokenizer stays in this one.
    """

    env: Env
    pictured: Pictured | None  # the same, where it shows pictures
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
    images: tuple[bytes, ...] = ()  # of that observation
    shown: list[bytes] = field(default_factory=list)  # the pictures of all turns that have their reply
    measures: Mapping[str, float] = field(default_factory=dict)
    said: Reply | None = None  # the reply that the environment has not answered yet
    text: str = ""  # the same, as the environment hears it
    success: bool = False
    stop_reason: StopReason | None = None
    error: str | None = None
    version: int = 0

    @property
    def reply_room(self) -> int:
        """Tokens that the next reply may have."""
        room = self.limits.max_episode_tokens - len(self.tokens) - len(self.prompt)
        return min(self.limits.max_reply_tokens, room)

    def begin(self) -> Callable[[], _Opening]:
        """Resets the environment."""
        self.version = self.policy.version

        def reset() -> _Opening:
            observation = _text(self.env.reset(self.start.seed))
            return _Opening(observation, _text(self.env.instructions), self._pictures())

        return reset

    def hear(self, reply: Reply) -> Callable[[], _Answered]:
        """Plays the reply to the waiting turn."""
        if not 1 <= len(reply.tokens) == len(reply.logprobs) <= self.reply_room:
            raise PolicyError(
                f"a reply has {len(reply.tokens)} tokens and {len(reply.logprobs)} log-probs: it must have 1 to "
                f"{self.reply_room} of each"
            )
        self.said, self.text = reply, self.policy.decode(reply.tokens)
        return lambda: _Answered(_whole(self.env.step(self.text)), self._pictures())

    def go_on(self, answer: _Answer | Exception) -> None:
        """Show what the environment answered, or end."""
        if isinstance(answer, Exception):
            self._fail(answer)
            return
        if isinstance(answer, _Opening):
            self.observation, self.images = answer.observation, answer.images
            self._show(answer.instructions)
            return
        outcome = answer.outcome
        self._record(outcome)
        self.observation, self.images, self.measures = outcome.observation, answer.images, outcome.measures
        if outcome.done:
            self.success = outcome.success
            self.stop_reason = StopReason.TERMINATED
        elif len(self.turns) == self.limits.max_turns:
            self.stop_reason = StopReason.TURN_LIMIT
        else:
            self._show(None)

    def _pictures(self) -> tuple[bytes, ...]:
        return () if self.pictured is None else _images(self.pictured)

    def _record(self, outcome: Outcome) -> None:
        assert self.said is not None
        start = len(self.tokens)
        reply_start = start + len(self.prompt)
        self.tokens += [*self.prompt, *self.said.tokens]
        self.mask += [False] * len(self.prompt) + [True] * len(self.said.tokens)
        self.logprobs += [0.0] * len(self.prompt) + list(self.said.logprobs)
        self.turns.append(Turn(start, reply_start, len(self.tokens), outcome.reward, len(self.images)))
        self.shown += self.images
        self.texts.append(TranscriptTurn(self.observation, self.text, outcome.reward, outcome.valid, self.images))

    def _show(self, instructions: str | None) -> None:
        cut = self.said is not None and self.said.cut
        shown: dict[str, Any] = {"images": self.images} if self.images else {}
        try:
            self.prompt = self.policy.encode_turn(self.observation, instructions, cut=cut, **shown)
        except EnvError as error:  # a picture that cannot be decoded
            self._fail(error)
            return
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
            images=tuple(self.shown),
        )

    def transcript(self) -> Transcript:
        """The episode as text."""
        assert self.stop_reason is not None
        return Transcript(
            tuple(self.texts),
            self.observation,
            self.success,
            self.stop_reason,
            self.error,
            task=self.env.task,
            measures=self.measures,
            final_images=self.images,
        )


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
    measures = {str(name): float(value) for name, value in outcome.measures.items()}
    if strange := [name for name, value in measures.items() if not math.isfinite(value)]:
        raise EnvError(f"measure {strange[0]!r} is {measures[strange[0]]}: it must be finite")
    return Outcome(
        _text(outcome.observation), reward, bool(outcome.done), bool(outcome.success), bool(outcome.valid), measures
    )


def _images(env: Pictured) -> tuple[bytes, ...]:
    """The pictures of what the environment shows now."""
    images = tuple(env.images())
    if not all(isinstance(image, bytes) and image for image in images):
        raise EnvError(f"images() returned {images!r:.200}: it must return encoded pictures, as bytes")
    return images


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise EnvError(f"{value!r} must be text")
    value.encode()  # lone surrogates raise here; a tokenizer could not take them
    return value
