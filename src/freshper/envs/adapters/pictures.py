"""Arrays of pixels as PNG."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from freshper.errors import EnvError, MissingExtraError


def encode_png(pixels: Any, longest: int, task: str) -> bytes:
    """The pixels, (height, width) or (height, width, 3 or 4) of uint8, as PNG; the same bytes for the same pixels.

    Args:
        pixels: the array.
        longest: its longer side is made this long; 0 leaves it.
        task: whose pixels they are, for the error.

    Raises:
        EnvError: It is no such array.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("pillow", "vision") from error
    array = np.asarray(pixels)
    flat = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))
    if array.dtype != np.uint8 or not flat or 0 in array.shape:
        raise EnvError(
            f"{task}: a picture must be (height, width) or (height, width, 3 or 4) of uint8, not {array.shape} of "
            f"{array.dtype}"
        )
    picture = Image.fromarray(array)
    if longest:
        scale = longest / max(picture.size)
        size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
        picture = picture.resize(size, Image.Resampling.BOX if scale < 1 else Image.Resampling.NEAREST)
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return buffer.getvalue()
