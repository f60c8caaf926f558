"""Trajectory: the record of one episode, the unit of storage. Frozen, numpy only, validated when made."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from freshper.errors import TrajectoryError  # a record that validates itself needs the error it raises

MAX_POLICY_VERSION = 2**63 - 1  # versions are kept as int64


def _integer(name: str, value: object) -> int:
    """A plain int, also from numpy's: a record of plain values can always be saved."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TrajectoryError(f"{name} {value!r} must be an int")
    return int(value)


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, (bool, str, bytes)):
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        raise TrajectoryError(f"{name} {value!r} must be a number") from None
    except OverflowError:
        raise TrajectoryError(f"{name} is far too large for a float") from None


class StopReason(StrEnum):
    """Why an episode ended. A closed list."""

    TERMINATED = "terminated"  # the environment ended it
    TURN_LIMIT = "turn_limit"  # the limit on turns was reached
    TOKEN_LIMIT = "token_limit"  # no room for another observation and reply
    ERROR = "error"  # the environment or a tool failed; never enters a buffer


@dataclass(frozen=True, slots=True)
class Turn:
    """One observation and one reply, as spans into the tokens of a trajectory.

    Observation tokens are ``[start, reply_start)``, reply tokens ``[reply_start, end)``; ``reward`` is what
    the environment gave for the reply, ``images`` how many of the trajectory's images the observation shows.
    """

    start: int
    reply_start: int
    end: int
    reward: float
    images: int = 0

    def __post_init__(self) -> None:
        put = object.__setattr__  # the dataclass is frozen; this is its own construction
        for name in ("start", "reply_start", "end", "images"):
            put(self, name, _integer(f"{name} of a turn", getattr(self, name)))
        put(self, "reward", _number("reward of a turn", self.reward))


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How reply tokens were sampled. ``top_k`` 0 and ``top_p`` 1 switch truncation off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "temperature", _number("temperature", self.temperature))
        put(self, "top_p", _number("top_p", self.top_p))
        put(self, "top_k", _integer("top_k", self.top_k))
        if not (np.isfinite(self.temperature) and self.temperature >= 0):
            raise TrajectoryError(f"temperature {self.temperature} must be >= 0 (0 is greedy)")
        if not 0 < self.top_p <= 1:
            raise TrajectoryError(f"top_p {self.top_p} must be in (0, 1]")
        if self.top_k < 0:
            raise TrajectoryError(f"top_k {self.top_k} must be >= 0 (0 switches it off)")

    @property
    def truncated(self) -> bool:
        """Whether the distribution that was sampled from is not the full softmax."""
        return self.top_p < 1 or self.top_k > 0


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One episode as it was sampled: token in, token out.

    Shapes: T tokens. ``tokens`` (T,) int32 holds observations and replies in order; ``response_mask`` (T,)
    bool is true exactly on sampled tokens; ``behavior_logprobs`` (T,) float32 are the log-probabilities
    under the distribution that was sampled from, in nats, 0 off the mask. ``advantages`` and ``td_errors``
    (T,) float32 are optional columns, 0 off the mask. The arrays are copied and made read-only.

    ``policy_version`` is the number of optimizer updates behind the policy that wrote the **oldest** turn.
    ``group`` names the start (task and seed) that sibling trajectories share. ``images`` are encoded (PNG,
    JPEG, ...), in the order in which the observations show them.

    A demonstration whose writer recorded no log-probabilities is marked with ``logprobs_known=False`` and
    ``behavior_logprobs=None``; the column is then NaN on the mask, and every loss with importance ratios
    refuses the trajectory.

    Raises :class:`TrajectoryError` when the parts do not fit together.
    """

    tokens: NDArray[np.int32]
    response_mask: NDArray[np.bool_]
    behavior_logprobs: NDArray[np.float32]
    turns: tuple[Turn, ...]
    stop_reason: StopReason
    success: bool
    policy_version: int
    task: str
    group: str
    seed: int
    sampling: SamplingParams = SamplingParams()
    advantages: NDArray[np.float32] | None = None
    td_errors: NDArray[np.float32] | None = None
    images: tuple[bytes, ...] = ()
    logprobs_known: bool = True

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "tokens", _tokens(self.tokens))
        put(self, "response_mask", _mask(self.response_mask))
        if not self.logprobs_known:
            put(self, "behavior_logprobs", _unknown_logprobs(self.behavior_logprobs, self.response_mask))
        elif self.behavior_logprobs is None:
            raise TrajectoryError(
                "behavior_logprobs is missing: record the log-probs of the sampling engine when it samples; "
                "without them importance ratios would silently be wrong (a demonstration that has none says "
                "logprobs_known=False)"
            )
        for name in ("behavior_logprobs", "advantages", "td_errors"):
            column = getattr(self, name)
            if column is not None and (self.logprobs_known or name != "behavior_logprobs"):
                put(self, name, _column(name, column, self.response_mask))
        if np.any(self.behavior_logprobs > 1e-4):
            worst = float(self.behavior_logprobs.max())
            raise TrajectoryError(f"behavior_logprobs holds {worst:.3g}: a log-probability is at most 0")
        put(self, "turns", tuple(self.turns))
        put(self, "images", _images(self.images))
        put(self, "stop_reason", _stop_reason(self.stop_reason))
        _check_turns(self)
        put(self, "policy_version", _integer("policy_version (optimizer updates applied)", self.policy_version))
        put(self, "seed", _integer("seed", self.seed))
        if not 0 <= self.policy_version <= MAX_POLICY_VERSION:
            raise TrajectoryError(f"policy_version {self.policy_version} must lie in [0, 2^63)")
        if not -(2**63) <= self.seed < 2**63:
            raise TrajectoryError(f"seed {self.seed} must lie in [-2^63, 2^63): seeds are kept as int64")
        for name in ("success", "logprobs_known"):
            if not isinstance(getattr(self, name), (bool, np.bool_)):
                raise TrajectoryError(f"{name} {getattr(self, name)!r} must be true or false")
            put(self, name, bool(getattr(self, name)))
        for name in ("task", "group"):
            if not isinstance(getattr(self, name), str):
                raise TrajectoryError(f"{name} {getattr(self, name)!r} must be a str")

    def __len__(self) -> int:
        """Number of tokens T."""
        return len(self.tokens)

    @property
    def episode_return(self) -> float:
        """Sum of the turn rewards, undiscounted."""
        return float(sum(turn.reward for turn in self.turns))

    @property
    def response_length(self) -> int:
        """Number of sampled tokens."""
        return int(self.response_mask.sum())

    def with_columns(
        self,
        *,
        advantages: NDArray[np.floating[Any]] | None = None,
        td_errors: NDArray[np.floating[Any]] | None = None,
    ) -> Trajectory:
        """A copy that carries the given (T,) columns; a column left out keeps its value."""
        changes: dict[str, Any] = {"advantages": advantages, "td_errors": td_errors}
        given: dict[str, Any] = {name: column for name, column in changes.items() if column is not None}
        return replace(self, **self._logprobs(), **given)

    def at_turn(self, number: int) -> Trajectory:
        """One turn as a trajectory of its own: its observation is everything before the reply, earlier replies too.

        Only the reply of that turn is under the mask, and the return is the turn's own reward; success,
        policy version and group stay those of the episode.
        """
        turn = self.turns[number]
        mask = np.zeros(turn.end, dtype=np.bool_)
        mask[turn.reply_start :] = True
        columns: dict[str, Any] = {
            name: np.where(mask, column[: turn.end], np.float32(0))
            for name in ("behavior_logprobs", "advantages", "td_errors")
            if (column := getattr(self, name)) is not None
        }
        shown = sum(earlier.images for earlier in self.turns[: range(len(self.turns))[number] + 1])
        return replace(
            self,
            **columns | self._logprobs(),
            tokens=self.tokens[: turn.end],
            response_mask=mask,
            turns=(Turn(0, turn.reply_start, turn.end, turn.reward, shown),),
            images=self.images[:shown],
        )

    def _logprobs(self) -> dict[str, Any]:
        """What a copy is told of log-probs that are unknown."""
        return {} if self.logprobs_known else {"behavior_logprobs": None}


def _array(name: str, values: ArrayLike, dtype: type[np.generic] | None = None) -> NDArray[Any]:
    try:
        with np.errstate(over="ignore"):  # too large for the dtype becomes inf, which is refused by name
            return np.array(values, dtype=dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise TrajectoryError(f"{name} is no array of numbers: {error}") from None


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    array.setflags(write=False)
    return array


def _tokens(values: ArrayLike) -> NDArray[np.int32]:
    array = _array("tokens", values)
    if array.ndim != 1 or array.size == 0:
        raise TrajectoryError(f"tokens has shape {array.shape}: it must be (T,) with T >= 1")
    if not np.issubdtype(array.dtype, np.integer):
        raise TrajectoryError(f"tokens has dtype {array.dtype}: token ids are integers")
    if array.min() < 0 or array.max() > np.iinfo(np.int32).max:
        raise TrajectoryError(f"token ids run from {array.min()} to {array.max()}: they must lie in [0, 2^31)")
    return _frozen(array.astype(np.int32))


def _mask(values: ArrayLike) -> NDArray[np.bool_]:
    array = _array("response_mask", values)
    if array.dtype != np.bool_ and not np.isin(array, (0, 1)).all():
        raise TrajectoryError("response_mask must hold only true and false")
    return _frozen(array.astype(np.bool_))


def _column(name: str, values: ArrayLike, mask: NDArray[np.bool_]) -> NDArray[np.float32]:
    given = _array(name, values)
    if given.dtype.kind not in "iuf":
        raise TrajectoryError(f"{name} is no array of numbers: its dtype is {given.dtype}")
    array = _array(name, given, np.float32)
    if array.shape != mask.shape:
        raise TrajectoryError(f"{name} has shape {array.shape}, response_mask {mask.shape}: one value per token")
    if not np.isfinite(array).all():
        at = int(np.flatnonzero(~np.isfinite(array))[0])
        raise TrajectoryError(f"{name}[{at}] is {array[at]}: every value must be finite")
    if np.any(array[~mask] != 0):
        at = int(np.flatnonzero((array != 0) & ~mask)[0])
        raise TrajectoryError(f"{name}[{at}] is {array[at]} on a token that was not sampled: it must be 0 there")
    return _frozen(array)


def _unknown_logprobs(given: object, mask: NDArray[np.bool_]) -> NDArray[np.float32]:
    if given is not None:
        raise TrajectoryError("logprobs_known is False, but behavior_logprobs were given: leave one of them out")
    return _frozen(np.where(mask, np.float32(np.nan), np.float32(0)))


def _images(values: Any) -> tuple[bytes, ...]:
    if not isinstance(values, (tuple, list)):
        raise TrajectoryError(f"images is {type(values).__name__}: pass a sequence of encoded pictures, () for none")
    images = tuple(values)
    for number, image in enumerate(images):
        if not isinstance(image, bytes) or not image:
            what = "empty" if isinstance(image, bytes) else type(image).__name__
            raise TrajectoryError(f"image {number} is {what}: pass the bytes of an encoded picture (PNG, JPEG, ...)")
    return images


def _stop_reason(value: Any) -> StopReason:
    try:
        return StopReason(value)
    except ValueError:
        known = ", ".join(reason.value for reason in StopReason)
        raise TrajectoryError(f"unknown stop_reason {value!r}; known: {known}") from None


def _check_turns(trajectory: Trajectory) -> None:
    """The turns tile the tokens, and the mask is true exactly on their replies."""
    length = len(trajectory.tokens)
    if trajectory.response_mask.shape != (length,):
        raise TrajectoryError(f"response_mask has shape {trajectory.response_mask.shape}, tokens ({length},)")
    if not trajectory.turns:
        raise TrajectoryError("a trajectory has at least one turn")
    if strange := [turn for turn in trajectory.turns if not isinstance(turn, Turn)]:
        raise TrajectoryError(f"turns holds {strange[0]!r}: write Turn(start, reply_start, end, reward)")
    expected = np.zeros(length, dtype=np.bool_)
    position = 0
    for number, turn in enumerate(trajectory.turns):
        if not (turn.start == position and turn.start <= turn.reply_start < turn.end <= length):
            raise TrajectoryError(
                f"turn {number} spans {turn.start}:{turn.reply_start}:{turn.end}; it must start at {position}, "
                f"hold at least one reply token and end within {length} tokens"
            )
        if turn.images < 0:
            raise TrajectoryError(f"turn {number} shows {turn.images} images: it must be >= 0")
        if not np.isfinite(turn.reward):
            raise TrajectoryError(f"turn {number} has reward {turn.reward}: it must be finite")
        expected[turn.reply_start : turn.end] = True
        position = turn.end
    if position != length:
        raise TrajectoryError(f"the turns end at token {position} of {length}: every token belongs to a turn")
    shown = sum(turn.images for turn in trajectory.turns)
    if shown != len(trajectory.images):
        raise TrajectoryError(f"the turns show {shown} images, but the trajectory holds {len(trajectory.images)}")
    if not np.array_equal(expected, trajectory.response_mask):
        at = int(np.flatnonzero(expected != trajectory.response_mask)[0])
        raise TrajectoryError(f"response_mask differs from the reply spans at token {at}: only sampled tokens count")
