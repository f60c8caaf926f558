"""How pictures get into a model: placeholder tokens in the conversation, and what its forward pass is given.

A picture is kept encoded (PNG, JPEG) wherever it goes: in a prompt, in a trajectory, in the buffer. Its pixels are
made again whenever a model reads it.
"""

from __future__ import annotations

import struct
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from io import BytesIO
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freshper.errors import EnvError, MissingExtraError, PolicyError

_PIXEL_BYTES = 128 * 2**20  # of patches that are kept: reading a picture again costs more than finding it
_NO_PICTURE = (
    EOFError,
    OSError,
    RuntimeError,
    SyntaxError,
    ValueError,
    struct.error,
    zlib.error,
)  # what pillow's decoders raise


class ImageReader(Protocol):
    """What one family of models needs to see: made once per model, from its processor."""

    def tokens(self, image: bytes) -> list[int]:
        """All tokens that stand for one encoded picture in a conversation, marks of its begin and end included.

        Raises :class:`EnvError` for bytes that are no picture: pictures come from environments.
        """
        ...

    def inputs(self, tokens: Tensor, images: Sequence[Sequence[bytes]]) -> dict[str, Tensor]:
        """Keyword arguments of the model's forward beside ``attention_mask``; ``input_ids`` are ``tokens`` if left out.

        ``tokens`` (b, T) are whole conversations, padded on the right, on the model's device; ``images`` are those
        of each row, in order. Pixel values are rebuilt from the encoded pictures, and so are the position ids of
        models that place pictures in a grid. ``input_ids`` are needed where a model has sampled a placeholder itself:
        no picture belongs there, so it must read another token, the same as when it sampled on.
        Raises :class:`PolicyError` where a row's pictures are not those that its placeholders stand for.
        """
        ...


class GridReader:
    """Reads pictures for the Qwen2-VL and Qwen2.5-VL families.

    A picture of h x w merged patches is ``begin``, h w times ``placeholder``, ``end``. Text advances the three rows of
    position ids together. A picture that begins at position p has p in the first row, p + its line in the second,
    p + its column in the third; what follows goes on at p + max(h, w).

    Args:
        processor: the image processor of transformers, pillow's (no torchvision): it resizes, normalizes and cuts.
        begin, placeholder, end: token ids.
    """

    def __init__(self, processor: Any, *, begin: int, placeholder: int, end: int) -> None:
        self.processor = processor
        self._begin, self._placeholder, self._end = begin, placeholder, end
        self._merge = int(processor.merge_size)
        self._kept: OrderedDict[bytes, tuple[NDArray[np.float32], tuple[int, int, int]]] = OrderedDict()
        self._kept_bytes = 0

    def tokens(self, image: bytes) -> list[int]:
        """See :class:`ImageReader`."""
        height, width = self._merged(image)
        return [self._begin, *[self._placeholder] * (height * width), self._end]

    def inputs(self, tokens: Tensor, images: Sequence[Sequence[bytes]]) -> dict[str, Tensor]:
        """See :class:`ImageReader`: pixel values, their grids, token types and position ids (3, b, T)."""
        rows = tokens.cpu().numpy()
        spans = [self.spans(row, shown) for row, shown in zip(rows, images, strict=True)]
        given = self.seen(tokens, images, spans)
        if any(images):
            parts = [self.positions(len(row), own, at) for row, own, at in zip(rows, images, spans, strict=True)]
            positions = np.stack(parts, 1)
            given["position_ids"] = torch.from_numpy(positions).to(tokens.device)
        return given

    def spans(self, tokens: Sequence[int] | NDArray[np.int64], images: Sequence[bytes]) -> list[tuple[int, int]]:
        """Where the placeholders of each picture stand: the first places, in order, that hold just that picture.

        Raises :class:`PolicyError` where there is no such place.
        """
        row = np.asarray(tokens)
        found: list[tuple[int, int]] = []
        begins = iter(np.flatnonzero(row == self._begin).tolist() if images else ())
        for number, image in enumerate(images):
            wanted = self.tokens(image)
            for place in begins:
                if np.array_equal(row[place : place + len(wanted)], wanted):
                    found.append((place + 1, place + len(wanted) - 1))
                    break
            else:
                raise PolicyError(
                    f"a conversation of {len(row)} tokens has no place for picture {number} of {len(images)}, "
                    f"{len(wanted)} tokens long: it was encoded by another model, or its pictures got lost"
                )
        return found

    def seen(
        self, tokens: Tensor, images: Sequence[Sequence[bytes]], spans: Sequence[Sequence[tuple[int, int]]]
    ) -> dict[str, Tensor]:
        """The inputs without position ids, of conversations (b, T) or of what goes on with them.

        A placeholder outside the ``spans`` was sampled: the mark of a picture's end is read in its place.
        """
        given: dict[str, Tensor] = {}
        is_image = tokens == self._placeholder
        real = np.zeros(tokens.shape, dtype=np.bool_)
        for line, own in zip(real, spans, strict=True):
            for start, stop in own:
                line[start:stop] = True
        stray = is_image & ~torch.from_numpy(real).to(tokens.device)
        if bool(stray.any()):
            given["input_ids"] = tokens.masked_fill(stray, self._end)
        pictures = [self._patches(image) for shown in images for image in shown]
        if pictures:
            pixels = np.concatenate([patches for patches, _ in pictures])
            given["pixel_values"] = torch.from_numpy(pixels).to(tokens.device)
            given["image_grid_thw"] = torch.tensor([grid for _, grid in pictures], device=tokens.device)
            given["mm_token_type_ids"] = (is_image & ~stray).int()
        return given

    def positions(self, length: int, images: Sequence[bytes], spans: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
        """Position ids (3, length) that begin at 0; what comes next stands one behind the largest."""
        parts: list[NDArray[np.int64]] = []
        reached = following = 0  # the token, and the position, up to which the parts go
        for image, (start, stop) in zip(images, spans, strict=True):
            parts.append(np.broadcast_to(np.arange(following, following + start - reached), (3, start - reached)))
            following += start - reached
            height, width = self._merged(image)
            lines, columns = np.divmod(np.arange(stop - start), width)
            parts.append(np.stack([np.zeros_like(lines), lines, columns]) + following)
            reached, following = stop, following + max(height, width)
        parts.append(np.broadcast_to(np.arange(following, following + length - reached), (3, length - reached)))
        return np.concatenate(parts, axis=1)

    def _merged(self, image: bytes) -> tuple[int, int]:
        """Lines and columns of placeholders."""
        _, height, width = self._patches(image)[1]
        return height // self._merge, width // self._merge

    def _patches(self, image: bytes) -> tuple[NDArray[np.float32], tuple[int, int, int]]:
        """Normalized pixels (patches, values of a patch), in the order of merged blocks, and their (t, h, w) grid."""
        if image in self._kept:
            self._kept.move_to_end(image)
            return self._kept[image]
        picture = open_picture(image)
        try:
            cut = self.processor(images=[picture], return_tensors="np")
        except ValueError as error:  # an aspect ratio that no grid can hold
            raise EnvError(f"a picture of {picture.width} x {picture.height} pixels cannot be read: {error}") from error
        frames, height, width = cut["image_grid_thw"][0].tolist()
        self._kept[image] = read = (cut["pixel_values"], (frames, height, width))
        self._kept_bytes += read[0].nbytes
        while self._kept_bytes > _PIXEL_BYTES and len(self._kept) > 1:
            _, (oldest, _) = self._kept.popitem(last=False)
            self._kept_bytes -= oldest.nbytes
        return read


def open_picture(image: bytes) -> Any:
    """A pillow image in RGB from its encoded bytes. Raises :class:`EnvError` where they are no whole picture."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("pillow", "vision") from error
    try:
        with Image.open(BytesIO(image)) as opened:
            # A palette's transparency must become an alpha channel first, or pillow warns.
            return (opened.convert("RGBA") if "transparency" in opened.info else opened).convert("RGB")
    except (*_NO_PICTURE, Image.DecompressionBombError) as error:
        raise EnvError(
            f"{len(image)} bytes ({image[:8]!r}...) are no picture that can be decoded: {error!r}"
        ) from error
