"""Boards of symbols as pictures: one sprite a symbol, small PNG files, the same bytes for the same board."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Literal

from freshper.errors import ConfigError, EnvError, MissingExtraError

if TYPE_CHECKING:
    from PIL.Image import Image

MIN_PIXELS, MAX_PIXELS = 64, 448
MIN_CELL = 8  # pixels; in fewer the symbols look alike
UNITS = 16  # the side of a cell in the coordinates of a sprite

_FINER = 4  # sprites are drawn so many times larger, and averaged: smooth edges
_COMPRESSION = 6  # named, so that no other default of the library can change the files

Color = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Shape:
    """A colored form. ``points`` are x and y in turn, in sixteenths of a cell: two corners, or those of a polygon."""

    kind: Literal["rectangle", "ellipse", "polygon"]
    points: tuple[float, ...]
    color: Color


Sprite = tuple[Shape, ...]  # drawn in this order, the first below


def check_pixels(pixels: int, rows: int, columns: int) -> None:
    """Raise :class:`ConfigError` unless a board fits a picture of ``pixels`` x ``pixels`` so that it can be read."""
    longest = max(rows, columns)
    if isinstance(pixels, bool) or not isinstance(pixels, int) or not MIN_PIXELS <= pixels <= MAX_PIXELS:
        raise ConfigError(f"pixels {pixels!r} must be a whole number in [{MIN_PIXELS}, {MAX_PIXELS}]")
    if pixels // longest < MIN_CELL:
        raise ConfigError(
            f"pixels {pixels} leave {pixels // longest} for a cell of {rows}x{columns}: below {MIN_CELL} the symbols "
            f"look alike; choose at least {MIN_CELL * longest}"
        )


class Painter:
    """Paints boards of one kind of game.

    A picture is square, a cell a whole number of pixels, the same for all cells; what is left over is a margin
    around the board. The same board gives the same bytes in every process. With another release of Pillow the pixels
    stay the same (they are averages of plain forms; the tests hold their hash), while the compressed bytes may
    change: pictures that were stored keep theirs.
    """

    def __init__(self, sprites: Mapping[str, Sprite], margin: Color) -> None:
        self._sprites = dict(sprites)
        self._margin = margin
        self.paint = lru_cache(maxsize=2048)(self._paint)  # small worlds repeat; a picture is 1 to 8 KB

    def _paint(self, board: str, pixels: int) -> bytes:
        """The PNG of a board, its rows apart by line ends, as ``pixels`` x ``pixels``.

        Raises :class:`EnvError` for a symbol without a sprite.
        """
        rows = board.split("\n")
        check_pixels(pixels, len(rows), len(rows[0]))
        cell = pixels // max(len(rows), len(rows[0]))
        left, top = (pixels - cell * len(rows[0])) // 2, (pixels - cell * len(rows)) // 2
        picture = _pillow().new("RGB", (pixels, pixels), self._margin)
        for row, symbols in enumerate(rows):
            for column, symbol in enumerate(symbols):
                if symbol not in self._sprites:
                    raise EnvError(f"there is no picture of {symbol!r}; known symbols: {''.join(self._sprites)}")
                picture.paste(_sprite(self._sprites[symbol], cell), (left + cell * column, top + cell * row))
        file = io.BytesIO()
        picture.save(file, "PNG", compress_level=_COMPRESSION)
        return file.getvalue()


@lru_cache(maxsize=256)
def _sprite(sprite: Sprite, cell: int) -> Image:
    """A sprite of ``cell`` x ``cell`` pixels."""
    from PIL import ImageDraw

    side = cell * _FINER
    large = _pillow().new("RGB", (side, side))
    draw = ImageDraw.Draw(large)
    for shape in sprite:
        points = [round(value * side / UNITS) for value in shape.points]
        if shape.kind == "polygon":
            draw.polygon(points, fill=shape.color)
            continue
        left, top, right, bottom = points
        box = (left, top, max(right - 1, left), max(bottom - 1, top))  # Pillow's corners belong to the form
        (draw.rectangle if shape.kind == "rectangle" else draw.ellipse)(box, fill=shape.color)
    return large.reduce(_FINER)  # type: ignore[no-any-return, unused-ignore]


def _pillow() -> ModuleType:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("pillow", "vision") from error
    return Image
