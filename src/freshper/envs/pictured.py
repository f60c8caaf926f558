"""FrozenLake and Sokoban as pictures: the levels and rules of the text tasks, seen instead of read."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from freshper.envs.core import Split, with_options
from freshper.envs.frozenlake import PRESETS as _LAKES
from freshper.envs.frozenlake import FrozenLakeEnv, FrozenLakeSpec
from freshper.envs.render import Painter, Shape, check_pixels
from freshper.envs.sokoban import PRESETS as _ROOMS
from freshper.envs.sokoban import SokobanEnv, SokobanSpec
from freshper.errors import EnvError

LAKE_CAPTION = "The picture shows the lake."
ROOM_CAPTION = "The picture shows the room."


@dataclass(frozen=True, slots=True)
class FrozenLakeImageSpec(FrozenLakeSpec):
    """Settings of FrozenLake with pictures of ``pixels`` x ``pixels``."""

    pixels: int = 64

    def __post_init__(self) -> None:
        FrozenLakeSpec.__post_init__(self)
        check_pixels(self.pixels, self.size, self.size)


@dataclass(frozen=True, slots=True)
class SokobanImageSpec(SokobanSpec):
    """Settings of Sokoban with pictures of ``pixels`` x ``pixels``."""

    pixels: int = 64

    def __post_init__(self) -> None:
        SokobanSpec.__post_init__(self)
        check_pixels(self.pixels, self.height, self.width)


class FrozenLakeImageEnv(FrozenLakeEnv):
    """FrozenLake seen in a picture: the levels, rules and rewards of the text task.

    Observation: one PNG of ``pixels`` x ``pixels`` (64 by default: 16 for each cell of a 4x4 lake) and the text
    "The picture shows the lake." Pale blue cells are frozen, a dark blue disk is a hole, the green cell with a white
    flag is the goal, the red figure is the player; its head alone is seen in a hole.

    Actions, rewards, end: those of :class:`~freshper.envs.frozenlake.FrozenLakeEnv`.

    Parameters: those of the text task, and ``pixels`` (64 to 448, at least 8 a cell). A seed gives the level that it
    gives in the text task with the same settings, in the same split.

    Source: the paper's FrozenLake for vision-language models; the drawings are our own.
    """

    legend = (
        "The picture shows the lake in cells: pale blue is frozen, a dark blue disk is a hole, the green cell with a "
        "white flag is the goal, the red figure is you."
    )

    def __init__(self, spec: FrozenLakeImageSpec, task: str, split: Split) -> None:
        super().__init__(spec, task, split)
        self._pixels = spec.pixels
        self._shown = ""

    def images(self) -> tuple[bytes, ...]:
        """The picture of the observation that was returned last. Raises :class:`EnvError` before ``reset``."""
        return (_picture(LAKE, self._shown, self._pixels, self.task),)

    def _observation(self) -> str:
        self._shown = self._level()
        return LAKE_CAPTION


class SokobanImageEnv(SokobanEnv):
    """Sokoban seen in a picture: the levels, rules and rewards of the text task.

    Observation: one PNG of ``pixels`` x ``pixels`` (64 by default: 16 for each cell of a 4x4 room) and the text
    "The picture shows the room." Gray bricks are wall, a pink ring is a target, a brown crate is a box, a green one
    a box on a target, the blue figure is the player, with the ring around it on a target. A margin is wall, too.

    Actions, rewards, end: those of :class:`~freshper.envs.sokoban.SokobanEnv`.

    Parameters: those of the text task, and ``pixels`` (64 to 448, at least 8 a cell). A seed gives the level that it
    gives in the text task with the same settings, in the same split.

    Source: the paper's Sokoban; the drawings are our own.
    """

    legend = (
        "The picture shows the room in cells: gray bricks are wall, a pink ring is a target, a brown crate is a box, "
        "a green crate is a box on a target, the blue figure is you. Beyond the edge of the picture is wall."
    )

    def __init__(self, spec: SokobanImageSpec, task: str, split: Split) -> None:
        super().__init__(spec, task, split)
        self._pixels = spec.pixels
        self._shown = ""

    def images(self) -> tuple[bytes, ...]:
        """The picture of the observation that was returned last. Raises :class:`EnvError` before ``reset``."""
        return (_picture(ROOM, self._shown, self._pixels, self.task),)

    def _observation(self) -> str:
        self._shown = self._level()
        return ROOM_CAPTION


def _picture(painter: Painter, shown: str, pixels: int, task: str) -> bytes:
    if not shown:
        raise EnvError(f"{task}: images() before any observation; call reset(seed) first")
    return painter.paint(shown, pixels)


def make_frozenlake_image(spec: FrozenLakeImageSpec, task: str, split: Split, **options: Any) -> FrozenLakeImageEnv:
    """A preset with some settings changed; ``options`` are fields of :class:`FrozenLakeImageSpec`."""
    return FrozenLakeImageEnv(with_options(spec, options), task, split)


def make_sokoban_image(spec: SokobanImageSpec, task: str, split: Split, **options: Any) -> SokobanImageEnv:
    """A preset with some settings changed; ``options`` are fields of :class:`SokobanImageSpec`."""
    return SokobanImageEnv(with_options(spec, options), task, split)


def _settings(spec: FrozenLakeSpec | SokobanSpec) -> dict[str, Any]:
    return {field.name: getattr(spec, field.name) for field in fields(spec)}


FROZENLAKE_PRESETS: dict[str, tuple[FrozenLakeImageSpec, str]] = {
    f"{task}-image": (
        FrozenLakeImageSpec(**_settings(_LAKES[task][0]), pixels=pixels),
        f"Seen in a picture of {pixels} pixels: {_LAKES[task][1]}",
    )
    for task, pixels in (("frozenlake", 64), ("frozenlake-8x8", 128))
}
SOKOBAN_PRESETS: dict[str, tuple[SokobanImageSpec, str]] = {
    f"{task}-image": (
        SokobanImageSpec(**_settings(_ROOMS[task][0]), pixels=pixels),
        f"Seen in a picture of {pixels} pixels: {_ROOMS[task][1]}",
    )
    for task, pixels in (("sokoban", 64), ("sokoban-simple", 96), ("sokoban-hard", 128))
}


def _box(left: float, top: float, right: float, bottom: float, color: tuple[int, int, int]) -> Shape:
    return Shape("rectangle", (left, top, right, bottom), color)


def _disk(left: float, top: float, right: float, bottom: float, color: tuple[int, int, int]) -> Shape:
    return Shape("ellipse", (left, top, right, bottom), color)


def _tile(color: tuple[int, int, int], line: tuple[int, int, int]) -> tuple[Shape, ...]:
    """A cell with a thin line around it."""
    return _box(0, 0, 16, 16, line), _box(0.5, 0.5, 15.5, 15.5, color)


def _figure(color: tuple[int, int, int], dark: tuple[int, int, int]) -> tuple[Shape, ...]:
    """Somebody from the front: shoulders and a head."""
    return (
        _disk(3.5, 7, 12.5, 18, dark),
        _disk(4.25, 7.75, 11.75, 17, color),
        _disk(4.75, 1.5, 11.25, 8, dark),
        _disk(5.5, 2.25, 10.5, 7.25, color),
    )


def _crate(color: tuple[int, int, int], dark: tuple[int, int, int]) -> tuple[Shape, ...]:
    """A box with a frame and one board across."""
    return (
        _box(1.5, 1.5, 14.5, 14.5, dark),
        _box(2.5, 2.5, 13.5, 13.5, color),
        Shape("polygon", (2.5, 11.75, 11.75, 2.5, 13.5, 2.5, 13.5, 4.25, 4.25, 13.5, 2.5, 13.5), dark),
    )


_ICE = _tile((222, 239, 250), (176, 207, 228))
_WATER = (*_ICE, _disk(1.5, 1.5, 14.5, 14.5, (96, 140, 190)), _disk(2.5, 2.5, 13.5, 13.5, (18, 44, 96)))
_MEADOW = (
    *_tile((74, 172, 92), (48, 132, 66)),
    _box(4, 2, 5.25, 14, (250, 250, 250)),
    Shape("polygon", (5, 2, 13.5, 5, 5, 8.5), (250, 250, 250)),
)
_SKATER = _figure((232, 72, 44), (150, 34, 20))
_HEAD = (_disk(4.75, 4.75, 11.25, 11.25, (150, 34, 20)), _disk(5.5, 5.5, 10.5, 10.5, (232, 72, 44)))

LAKE = Painter(
    {
        "_": _ICE,
        "O": _WATER,
        "G": _MEADOW,
        "P": (*_ICE, *_SKATER),
        "X": (*_WATER, *_HEAD),
        "Q": (*_MEADOW, *_SKATER),
    },
    margin=(110, 150, 186),
)

_STONE, _MORTAR = (106, 112, 126), (74, 79, 92)
_BRICKS = (
    _box(0, 0, 16, 16, _MORTAR),
    *(_box(left, 0.5, left + 7, 7.5, _STONE) for left in (0.5, 8.5)),
    *(_box(left, 8.5, right, 15.5, _STONE) for left, right in ((0, 4), (5, 11), (12, 16))),
)
_PAVED = _tile((242, 234, 216), (220, 208, 184))
_RING = (*_PAVED, _disk(1.5, 1.5, 14.5, 14.5, (226, 66, 128)), _disk(4.5, 4.5, 11.5, 11.5, (242, 234, 216)))
_MAN = _figure((44, 112, 226), (22, 60, 140))

ROOM = Painter(
    {
        "#": _BRICKS,
        "_": _PAVED,
        "O": _RING,
        "X": (*_PAVED, *_crate((196, 136, 72), (128, 80, 34))),
        "*": (*_PAVED, *_crate((92, 182, 84), (44, 116, 46))),
        "P": (*_PAVED, *_MAN),
        "S": (*_RING, *_MAN),
    },
    margin=_MORTAR,
)
