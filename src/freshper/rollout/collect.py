"""Many episodes at once, multi-turn, token in / token out."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from freshper.envs.core import Env, Outcome
from freshper.errors import ConfigError, EnvError, PolicyError
from freshper.policies.core import Conversations, Policy, Reply
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
    parallel: int | None = None,
    env_threads: int = 0,
) -> Rollout:
    """Play one episode per start, ``envs[i]`` on ``starts[i]``; ``seed`` decides the sampling.

    At most ``parallel`` episodes run at once (None: all); as one ends the next begins, in the order of ``starts``,
    which is also the order of the result. Each reply is played as soon as the engine hands it out. With
    ``env_threads`` 0 an environment answers before sampling goes on; with more, that many threads step
    environments (one call at a time each) while the other rows are sampled: for environments that wait for a
    disk, a tool or a network. The order in which answers come in may then change a log-prob in its last bits.

    A failing environment ends its own episode only.
    """
    if not 0 < len(starts) <= len(envs):
        raise ConfigError(f"{len(starts)} episodes were asked for with {len(envs)} environments: 1 to that many")
    if len({id(env) for env in envs[: len(starts)]}) < len(starts):
        raise ConfigError("two episodes share an environment object: each needs its own, it runs one at a time")
    if parallel is not None and parallel < 1:
        raise ConfigError(f"parallel {parallel} must be at least 1: no episode could run")
    if env_threads < 0:
        raise ConfigError(f"env_threads {env_threads} must be at least 0 (0: no threads)")
    episodes = [_Episode(env, start, policy, limits) for env, start in zip(envs, starts, strict=False)]
    conversations = policy.begin(len(episodes), sampling, seed)
    with _Environments(env_threads) as environments:
        _play(episodes, conversations, environments, parallel or len(episodes))
    return Rollout(
        trajectories=tuple(e.trajectory(sampling) for e in episodes if e.stop_reason is not StopReason.ERROR),
        transcripts=tuple(e.transcript() for e in episodes),
    )


def _play(
    episodes: Sequence[_Episode], conversations: Conversations, environments: _Environments, parallel: int
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
                conversations.submit(row, episode.prompt, episode.reply_room)
                asking.add(row)
            else:
                conversations.close_row(row)
                running.remove(row)


@dataclass(frozen=True, slots=True)
class _Opening:
    """What an environment shows when it has been reset."""

    observation: str
    instructions: str


_Answer = _Opening | Outcome | Exception


class _Environments:
    """Runs calls of environments, at once or in threads, and keeps the answers until they are asked for."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "freshper-env") if threads else None
        self._calls: dict[int, Future[_Answer]] = {}
        self._answers: list[tuple[int, _Answer]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)

    def call(self, row: int, function: Callable[[], _Answer]) -> None:
        """Make the call of ``row``'s environment. A request to stop, as Ctrl-C is, comes through; see _attempt."""
        if self._pool:
            self._calls[row] = self._pool.submit(_attempt, function)
        else:
            self._answers.append((row, _attempt(function)))

    def answers(self, *, wait: bool) -> list[tuple[int, _Answer]]:
        """Answers that have come since, with their rows, lowest first; ``wait`` for one if there are none."""
        if wait and self._calls:
            wait_for(self._calls.values(), return_when=FIRST_COMPLETED)
        for row in sorted(row for row, call in self._calls.items() if call.done()):
            self._answers.append((row, self._calls.pop(row).result()))
        answers, self._answers = self._answers, []
        return answers


def _attempt(function: Callable[[], _Answer]) -> _Answer:
    try:
        return function()
    except Exception as error:  # noqa: BLE001 - whatever an environment raises is data, never the end of the run
        return error


@dataclass(slots=True)
class _Episode:
    """One episode: what has been said so far, in tokens and in text.

    ``begin`` and ``hear`` return the call that the environment must answer, ``go_on`` takes its answer. Only that
    call may run in another thread: the tokenizer stays in this one.
    """

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
        return lambda: _Opening(_text(self.env.reset(self.start.seed)), _text(self.env.instructions))

    def hear(self, reply: Reply) -> Callable[[], Outcome]:
        """Plays the reply to the waiting turn."""
        if not 1 <= len(reply.tokens) == len(reply.logprobs) <= self.reply_room:
            raise PolicyError(
                f"a reply has {len(reply.tokens)} tokens and {len(reply.logprobs)} log-probs: it must have 1 to "
                f"{self.reply_room} of each"
            )
        self.said, self.text = reply, self.policy.decode(reply.tokens)
        return lambda: _whole(self.env.step(self.text))

    def go_on(self, answer: _Answer) -> None:
        """Show what the environment answered, or end."""
        if isinstance(answer, Exception):
            self._fail(answer)
        elif isinstance(answer, _Opening):
            self._show(answer.observation, answer.instructions)
        else:
            self._record(answer)
            if answer.done:
                self.observation, self.success = answer.observation, answer.success
                self.stop_reason = StopReason.TERMINATED
            elif len(self.turns) == self.limits.max_turns:
                self.observation = answer.observation
                self.stop_reason = StopReason.TURN_LIMIT
            else:
                self._show(answer.observation, None)

    def _record(self, outcome: Outcome) -> None:
        assert self.said is not None
        start = len(self.tokens)
        reply_start = start + len(self.prompt)
        self.tokens += [*self.prompt, *self.said.tokens]
        self.mask += [False] * len(self.prompt) + [True] * len(self.said.tokens)
        self.logprobs += [0.0] * len(self.prompt) + list(self.said.logprobs)
        self.turns.append(Turn(start, reply_start, len(self.tokens), outcome.reward))
        self.texts.append(TranscriptTurn(self.observation, self.text, outcome.reward, outcome.valid))

    def _show(self, observation: str, instructions: str | None) -> None:
        self.observation = observation
        cut = self.said is not None and self.said.cut
        self.prompt = self.policy.encode_turn(observation, instructions, cut=cut)
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
