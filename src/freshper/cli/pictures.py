"""Pictures for people: in a terminal as colored half blocks, or as files in a folder."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from freshper.cli.terminal import say
from freshper.errors import ConfigError, EnvError, MissingExtraError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_LOWER_HALF = "\u2584"  # the upper half shows the background
_SMALLEST_VIEW = 32  # pixels; in fewer nothing is recognized, so a smaller terminal scrolls
_LINES_OF_TEXT = 6  # that should stay in sight beside a picture


class PictureShow:
    """Shows the pictures of an episode, turn by turn, and keeps them in ``folder`` if there is one.

    Raises :class:`ConfigError` for a folder that holds something already.
    """

    def __init__(self, console: Console, folder: Path | None) -> None:
        self._console = console
        self._folder = folder
        self.saved = 0
        if folder is None:
            return
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(
                f"{folder} exists and is no empty folder: pictures of several episodes would mix there; name a new one"
            )
        folder.mkdir(parents=True, exist_ok=True)

    def show(self, images: Sequence[bytes], turn: str) -> None:
        """Show the pictures that belong to a turn; ``turn`` names their files."""
        for number, image in enumerate(images, start=1):
            where = f"--save-images DIR keeps it; {len(image):,} bytes"
            if self._folder is not None:
                suffix = "jpg" if image.startswith(b"\xff\xd8") else "png"
                path = self._folder / f"{turn}{'' if len(images) == 1 else f'-{number}'}.{suffix}"
                path.write_bytes(image)
                self.saved += 1
                where = str(path)
            if self._console.is_terminal and self._console.color_system is not None:
                self._console.print(half_blocks(image, self._room()), soft_wrap=True)
            say(self._console, f"picture ({where})", "dim")

    def _room(self) -> int:
        """The longest side of a picture that fits the terminal, where a pixel is a column wide and half a line high."""
        return max(_SMALLEST_VIEW, min(self._console.width, 2 * (self._console.height - _LINES_OF_TEXT)))


def half_blocks(image: bytes, longest: int) -> Text:
    """An encoded picture as characters, two pixels one above the other each; shrunk to ``longest`` pixels a side.

    Raises :class:`EnvError` for bytes that are no picture.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("pillow", "vision") from error
    from rich.color import Color
    from rich.style import Style
    from rich.text import Text

    try:
        picture = Image.open(io.BytesIO(image)).convert("RGB")
    except (OSError, RuntimeError, SyntaxError, ValueError) as error:
        raise EnvError(
            f"a task showed {len(image)} bytes that begin with {image[:8]!r}: no picture ({error})"
        ) from error
    factor = -(-max(picture.size) // longest)  # a whole number, so that cells of equal size stay so
    picture = picture.reduce(factor)
    width, height = picture.size
    colors = picture.tobytes()

    def color(column: int, row: int) -> Color:
        at = 3 * (min(row, height - 1) * width + column)
        return Color.from_rgb(*colors[at : at + 3])

    text = Text()
    for row in range(0, height, 2):
        for column in range(width):
            text.append(_LOWER_HALF, Style(color=color(column, row + 1), bgcolor=color(column, row)))
        if row + 2 < height:
            text.append("\n")
    return text
