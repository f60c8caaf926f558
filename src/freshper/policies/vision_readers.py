"""Which Hugging Face models read pictures here, and what each family of them needs to see."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freshper.errors import ConfigError, MissingExtraError, PolicyError
from freshper.policies.vision import GridReader, ImageReader, open_picture

GRID_KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
TILE_KINDS = ("idefics3", "smolvlm")
FAMILIES = (*GRID_KINDS, *TILE_KINDS)
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_TILE_MARK = "<fake_token_around_image>"
_KEPT_BYTES = 128 * 2**20  # of tiles: reading a picture again costs more than finding it


Span = tuple[int, int]


class FamilyReader(ImageReader, Protocol):
    """An :class:`ImageReader` for the chat template and the engines of a family.

    ``picture`` is the one token, as text, that the chat template writes for a picture; ``placeholder`` the id that
    features are put in the place of.
    """

    picture: str
    placeholder: int

    def expansion(self, image: bytes) -> list[int]:
        """What stands in the place of ``picture``: for some families the template writes the marks around it."""
        ...

    def spans(self, tokens: Sequence[int], images: Sequence[bytes]) -> list[Span]:
        """Where each picture stands in ``tokens``. Raises :class:`PolicyError` where one has no place."""
        ...

    def seen(
        self, tokens: Tensor, images: Sequence[Sequence[bytes]], spans: Sequence[Sequence[Span]]
    ) -> dict[str, Tensor]:
        """:meth:`inputs` without position ids, for ``tokens`` (b, T) that may go on a conversation."""
        ...

    def positions(self, length: int, images: Sequence[bytes], spans: Sequence[Span]) -> NDArray[np.int64] | None:
        """Position ids (3, length) that begin at 0; None where they just count, as for text."""
        ...


class FamilyGridReader(GridReader):
    """Qwen2-VL, Qwen2.5-VL, Qwen3-VL: a grid of patches; the template writes the marks of its begin and end."""

    def __init__(self, processor: Any, tokenizer: Any, config: Any) -> None:
        self.placeholder = int(config.image_token_id)
        self.picture = str(tokenizer.convert_ids_to_tokens(self.placeholder))
        begin, end = int(config.vision_start_token_id), int(config.vision_end_token_id)
        super().__init__(processor, begin=begin, placeholder=self.placeholder, end=end)

    def expansion(self, image: bytes) -> list[int]:
        """See :class:`FamilyReader`."""
        return self.tokens(image)[1:-1]


class TileReader:
    """Idefics3 and SmolVLM: square tiles of the picture and one of the whole, each a fixed number of placeholders.

    Positions count on as for text.
    """

    def __init__(self, processor: Any, tokenizer: Any, config: Any) -> None:
        """Raises :class:`ConfigError` where the processor cuts other tiles than the model was made for."""
        vision = config.vision_config
        made_for, cut = int(vision.image_size), int(processor.max_image_size["longest_edge"])
        if made_for != cut:
            raise ConfigError(
                f"preprocessor_config.json cuts pictures into tiles of {cut} pixels, the model takes {made_for}: "
                "its features would not fit the placeholders"
            )
        self.processor = processor
        self.placeholder = int(config.image_token_id)
        self.picture = str(tokenizer.convert_ids_to_tokens(self.placeholder))
        self._tokenizer = tokenizer
        self._mark = int(tokenizer.convert_tokens_to_ids(_TILE_MARK))
        self._per_tile = (made_for // int(vision.patch_size)) ** 2 // int(config.scale_factor) ** 2
        self._kept: OrderedDict[bytes, tuple[list[int], Tensor, Tensor]] = OrderedDict()
        self._kept_bytes = 0

    def tokens(self, image: bytes) -> list[int]:
        """See :class:`freshper.policies.vision.ImageReader`."""
        return list(self._read(image)[0])

    def expansion(self, image: bytes) -> list[int]:
        """See :class:`FamilyReader`: all of them."""
        return self.tokens(image)

    def spans(self, tokens: Sequence[int], images: Sequence[bytes]) -> list[Span]:
        """See :class:`FamilyReader`: the first places, in order, that hold just that picture, marks included."""
        row, reached, found = np.asarray(tokens), 0, []
        begins = np.flatnonzero(row == self._mark) if images else row[:0]
        for number, image in enumerate(images):
            wanted = self._read(image)[0]
            places = (int(place) for place in begins if place >= reached)
            start = next((place for place in places if np.array_equal(row[place : place + len(wanted)], wanted)), None)
            if start is None:
                raise PolicyError(
                    f"a conversation of {len(row)} tokens has no place for picture {number} of {len(images)}, "
                    f"{len(wanted)} tokens long: it was encoded by another model, or its pictures got lost"
                )
            reached = start + len(wanted)
            found.append((start, reached))
        return found

    def positions(
        self,
        length: int,  # noqa: ARG002 - what other families need
        images: Sequence[bytes],  # noqa: ARG002
        spans: Sequence[Span],  # noqa: ARG002
    ) -> None:
        """See :class:`FamilyReader`."""
        return

    def inputs(self, tokens: Tensor, images: Sequence[Sequence[bytes]]) -> dict[str, Tensor]:
        """See :class:`freshper.policies.vision.ImageReader`: the tiles of all rows, and which of their pixels count."""
        rows = tokens.cpu().numpy()
        return self.seen(tokens, images, [self.spans(row, own) for row, own in zip(rows, images, strict=True)])

    def seen(
        self, tokens: Tensor, images: Sequence[Sequence[bytes]], spans: Sequence[Sequence[Span]]
    ) -> dict[str, Tensor]:
        """See :class:`FamilyReader`. A placeholder that was sampled is read as the mark around pictures."""
        given: dict[str, Tensor] = {}
        stray = (tokens == self.placeholder).cpu()
        for line, own in zip(stray, spans, strict=True):
            for start, stop in own:
                line[start:stop] = False
        if bool(stray.any()):
            given["input_ids"] = tokens.masked_fill(stray.to(tokens.device), self._mark)
        read = [self._read(image) for shown in images for image in shown]
        if read:
            # The model takes tiles in order, whatever row they belong to: one row of them needs no padding.
            given["pixel_values"] = torch.cat([tiles for _, tiles, _ in read])[None].to(tokens.device)
            given["pixel_attention_mask"] = torch.cat([mask for _, _, mask in read])[None].to(tokens.device)
        return given

    def _read(self, image: bytes) -> tuple[list[int], Tensor, Tensor]:
        """Tokens; tiles (n, 3, height, width); which of their pixels count (n, height, width)."""
        if image in self._kept:
            self._kept.move_to_end(image)
            return self._kept[image]
        cut = self.processor(images=[[open_picture(image)]], return_row_col_info=True, do_pad=True, return_tensors="pt")
        text = self._spelled(int(cut["rows"][0][0]), int(cut["cols"][0][0]))
        tokens = self._tokenizer.encode(text, add_special_tokens=False)
        self._kept[image] = read = (tokens, cut["pixel_values"][0], cut["pixel_attention_mask"][0])
        self._kept_bytes += read[1].nbytes + read[2].nbytes
        while self._kept_bytes > _KEPT_BYTES and len(self._kept) > 1:
            _, (_, *oldest) = self._kept.popitem(last=False)
            self._kept_bytes -= sum(tensor.nbytes for tensor in oldest)
        return read

    def _spelled(self, rows: int, columns: int) -> str:
        from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

        return str(
            get_image_prompt_string(
                rows,
                columns,
                self._per_tile,
                fake_token_around_image=_TILE_MARK,
                image_token=self.picture,
                global_image_token="<global-img>",
            )
        )


def reads_pictures(config: Any) -> bool:
    """Whether a transformers config is that of an image-text model of a family that is known here."""
    return config.model_type in FAMILIES


def auto_class(config: Any) -> Any:
    """The class of transformers that builds and loads the model of ``config``."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if reads_pictures(config) else AutoModelForCausalLM


def find_reader(folder: Path, name: str, config: Any, tokenizer: Any) -> FamilyReader:
    """The reader for the model in ``folder``, from its image processor: pillow's, so nothing needs torchvision.

    Raises :class:`ConfigError` where the folder has no image processor or one that does not fit the model, and
    :class:`MissingExtraError` without pillow.
    """
    from transformers import AutoImageProcessor
    from transformers.utils import is_vision_available

    if not is_vision_available():
        raise MissingExtraError("pillow", "vision")
    try:
        processor = AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError) as error:
        gist = " ".join(str(error).split())[:200]
        raise ConfigError(f"the image processor of model {name!r} cannot be read: {gist}") from error
    token = tokenizer.convert_ids_to_tokens(int(config.image_token_id))
    if not token or int(config.image_token_id) == 0:  # 0 is what shorter rows are filled up with
        raise ConfigError(
            f"model {name!r} puts pictures in the place of token {config.image_token_id}, which its tokenizer cannot "
            "write: the two do not belong together"
        )
    if config.model_type in GRID_KINDS:
        return FamilyGridReader(processor, tokenizer, config)
    return TileReader(processor, tokenizer, config)


def processor_files(folder: Path) -> dict[str, bytes]:
    """The files of a model's folder that belong to its processor: a saved policy takes them along as they are."""
    return {name: (folder / name).read_bytes() for name in _PROCESSOR_FILES if (folder / name).exists()}


def processor_template(folder: Path) -> str | None:
    """The chat template that a folder keeps with its processor, where the tokenizer has none of its own file."""
    if (folder / "chat_template.jinja").exists():
        return None  # the tokenizer reads it
    for file in ("chat_template.json", "processor_config.json"):
        if (folder / file).exists():
            template = json.loads((folder / file).read_text(encoding="utf-8")).get("chat_template")
            if isinstance(template, str):
                return template
    return None
