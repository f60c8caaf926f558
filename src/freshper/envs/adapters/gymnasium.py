"""gymnasium's environments: observations as text or pictures, actions read from replies."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

from freshper.envs.adapters.base import AdaptedEnv, Played, SplitBy, adopt, clean
from freshper.envs.adapters.loading import load
from freshper.envs.adapters.pictures import encode_png
from freshper.envs.adapters.spaces import read_space, space_help, write_space
from freshper.envs.core import INVALID_REWARD, Split, write_action
from freshper.errors import ConfigError, MissingExtraError, UnknownNameError

Pictures = Literal["none", "render", "observation"]
MAX_TURNS = 100  # where gymnasium knows no limit


class TextWrapper:
    """How observations become text, and replies actions. Subclass it to change either, or the instructions.

    Args:
        env: gymnasium's environment.
        actions: names of the actions of a Discrete space, in their order; by default they are called by their numbers.
        digits: significant digits of numbers.
    """

    def __init__(self, env: Any, actions: Sequence[str] | None = None, digits: int = 3) -> None:
        self.env = env
        self.digits = digits
        self.actions = _names(env.action_space, actions)

    def instructions(self, max_turns: int) -> str:
        """What stands in the first turn: the actions, the turns, and how to reply."""
        choice = ", ".join(self.actions) if self.actions else space_help(self.env.action_space)
        example = self.actions[0] if self.actions else write_space(_sample(self.env.action_space), self.digits)
        return (
            f"You act in {self.env.spec.id if self.env.spec else type(self.env).__name__}. "
            f"You have {max_turns} turns, one action a turn: {choice}. A reply that cannot be read costs "
            f"{-INVALID_REWARD:g} and a turn. Reply like this: {write_action(example)}"
        )

    def show(self, observation: Any, info: Mapping[str, Any]) -> str:  # noqa: ARG002 - for subclasses
        """The text of an observation, never an empty one."""
        return write_space(observation, self.digits) or "(nothing)"

    def caption(self, observation: Any, info: Mapping[str, Any]) -> str:  # noqa: ARG002 - for subclasses
        """The text beside a picture."""
        return "The picture shows the state."

    def read(self, reply: str) -> Any:
        """The action that a reply names, in ``<answer>…</answer>``; None where there is none."""
        return read_space(self.env.action_space, reply, self.actions)


class GymnasiumEnv(AdaptedEnv):
    """An environment of gymnasium's.

    Observation: gymnasium's as text (numbers, lists, ``name: value`` lines), or a picture of it.

    Actions: in ``<answer>…</answer>``: a name or number of a Discrete space, a JSON list for Box, MultiDiscrete and
    MultiBinary, the text itself for Text. Other spaces need a :class:`TextWrapper` of one's own.

    Rewards and end: gymnasium's, and the limit of turns; a reply that cannot be read costs 0.15 and a turn, and the
    environment does not hear of it. Success: what the info says (``success``, ``is_success``), otherwise a return of
    ``success_return``, by default gymnasium's reward threshold; without one, an end (not a cut) with a return above 0.

    Parameters: ``max_turns`` (gymnasium's limit, otherwise 100); ``success_return``; ``split_by``; ``actions``, names
    of the actions, a list or a text with commas; ``digits`` (3); ``pictures``: "none", "render" (gymnasium's drawing)
    or "observation" (which then is a picture); ``pixels``, longest side of a picture, 0 (default) as it comes;
    ``wrapper``, MODULE:CLASS of a :class:`TextWrapper`; ``make``, a table of arguments of ``gymnasium.make``.

    Source: gymnasium (https://gymnasium.farama.org).
    """

    images: Callable[[], tuple[bytes, ...]]  # only one that shows pictures has it

    def __init__(
        self,
        task: str,
        split: Split,
        *,
        max_turns: int | None = None,
        success_return: float | None = None,
        split_by: SplitBy = "observation",
        actions: str | Sequence[str] | None = None,
        digits: int = 3,
        pictures: Pictures = "none",
        pixels: int = 0,
        wrapper: str | None = None,
        make: Mapping[str, Any] | None = None,
    ) -> None:
        if pictures not in get_args(Pictures):
            raise UnknownNameError("pictures", str(pictures), get_args(Pictures))
        if split_by == "env":
            raise ConfigError(f"{task}: split_by 'env': gymnasium's environments know no splits, use 'seed'")
        if pixels < 0 or digits < 1:
            raise ConfigError(f"{task}: pixels {pixels} must be >= 0 and digits {digits} >= 1")
        arguments = dict(make or {}) | ({"render_mode": "rgb_array"} if pictures == "render" else {})
        self._env = _make(task.partition(":")[2], arguments)
        names = [name.strip() for name in actions.split(",")] if isinstance(actions, str) else actions
        kind: Callable[..., TextWrapper] = load(wrapper) if wrapper else TextWrapper
        self._wrapper = kind(self._env, names, digits)
        spec = self._env.spec
        turns = (spec and spec.max_episode_steps) or MAX_TURNS if max_turns is None else max_turns
        super().__init__(
            task,
            split,
            instructions=self._wrapper.instructions(turns),
            max_turns=turns,
            success_return=(spec and spec.reward_threshold) if success_return is None else success_return,
            split_by=split_by,
        )
        self._pictures, self._pixels = pictures, pixels
        self._text = ""
        self._picture = b""
        if pictures != "none":
            self.images = self._images
        adopt(self, self._wrapper, "demonstrate", "solution")

    def _images(self) -> tuple[bytes, ...]:
        return (self._picture,) if self._picture else ()

    def _begin(self, seed: int) -> str:
        return self._show(*self._env.reset(seed=seed))

    def _play(self, reply: str) -> Played:
        action = self._wrapper.read(reply)
        if action is None:
            return Played(self._text, INVALID_REWARD, ended=False, valid=False)
        observation, reward, terminated, truncated, info = self._env.step(action)
        told = info.get("success", info.get("is_success"))
        return Played(
            self._show(observation, info),
            float(reward),
            bool(terminated),
            bool(truncated),
            success=None if told is None else bool(told),
        )

    def _show(self, observation: Any, info: Mapping[str, Any]) -> str:
        if self._pictures == "none":
            self._text = clean(self._wrapper.show(observation, info))
        else:
            seen = _render(self._env, self.task) if self._pictures == "render" else observation
            self._picture = encode_png(seen, self._pixels, self.task)
            self._text = clean(self._wrapper.caption(observation, info))
        return self._text


def make_gymnasium(task: str, split: Split, **options: Any) -> GymnasiumEnv:
    """The environment that ``gymnasium:ENV_ID`` names; see :class:`GymnasiumEnv` for the options."""
    known = set(GymnasiumEnv.__init__.__kwdefaults__ or ())
    for name in options:
        if name not in known:
            raise UnknownNameError(f"option of {task}", name, known)
    return GymnasiumEnv(task, split, **options)


def _sample(space: Any) -> Any:
    """One action, always the same."""
    space = copy.deepcopy(space)
    space.seed(0)
    return space.sample()


def _names(space: Any, actions: Sequence[str] | None) -> tuple[str, ...]:
    """Names of the actions of a Discrete space, none for another."""
    count = getattr(space, "n", None) if type(space).__name__ == "Discrete" else None
    if count is None:
        if actions:
            raise ConfigError(f"actions {list(actions)} name those of a Discrete space; this one is {space}")
        return ()
    if actions is None:
        return tuple(str(int(space.start) + number) for number in range(int(count)))
    if len(actions) != count or len({name.lower() for name in actions}) != count:
        raise ConfigError(f"actions {list(actions)} must be {count} different names, one for each action of {space}")
    return tuple(actions)


def _make(name: str, arguments: dict[str, Any]) -> Any:
    try:
        import gymnasium
    except ImportError as error:
        raise MissingExtraError("gymnasium", "train") from error
    try:
        return gymnasium.make(name, disable_env_checker=True, **arguments)
    except gymnasium.error.DependencyNotInstalled as error:
        raise ConfigError(f"gymnasium's {name} needs a library that is not installed: {error}") from error
    except (gymnasium.error.Error, ModuleNotFoundError, TypeError) as error:
        raise ConfigError(f"gymnasium cannot make {name!r}: {error}") from error


def _render(env: Any, task: str) -> Any:
    import gymnasium

    try:
        return env.render()
    except gymnasium.error.DependencyNotInstalled as error:
        raise ConfigError(f"{task}: drawing needs a library that is not installed: {error}") from error
