"""Sampling from Hugging Face image-text models: the engines of text models, whose passes look at pictures too."""

from __future__ import annotations

import io
import logging
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from freshper.errors import PolicyError
from freshper.policies.core import Conversations, SeeingConversations
from freshper.policies.engines import Engine, played
from freshper.policies.growing import special_layers
from freshper.policies.reencode import ReencodingConversations, Sight
from freshper.policies.slots import SlotConversations
from freshper.policies.vision_readers import FamilyReader, Span
from freshper.trajectory import SamplingParams

logger = logging.getLogger("freshper.policies")


class _Gallery:
    """The pictures of some conversations, and where in their tokens they stand."""

    def __init__(self, count: int, reader: FamilyReader) -> None:
        self.reader = reader
        self._shown: list[list[tuple[Span, bytes]]] = [[] for _ in range(count)]

    def spans_of(self, prompt: Sequence[int], images: Sequence[bytes]) -> list[Span]:
        """Raises :class:`PolicyError` where prompt and pictures do not belong together."""
        return self.reader.spans(prompt, images)

    def hang(self, row: int, start: int, spans: Sequence[Span], images: Sequence[bytes]) -> None:
        """The conversation goes on at token ``start`` with a prompt that shows ``images`` at ``spans``."""
        self._shown[row] += [
            ((start + first, start + last), image) for (first, last), image in zip(spans, images, strict=True)
        ]

    def forget(self, row: int) -> None:
        """The conversation has ended."""
        self._shown[row] = []

    def since(self, row: int, start: int) -> tuple[list[Span], list[bytes]]:
        """The pictures at or behind token ``start``; spans count from there."""
        later = [(span, image) for span, image in self._shown[row] if span[0] >= start]
        return [(first - start, last - start) for (first, last), _ in later], [image for _, image in later]

    def positions(self, length: int, spans: Sequence[Span], images: Sequence[bytes]) -> NDArray[np.int64]:
        """Position ids (3, length) that begin at 0."""
        own = self.reader.positions(length, images, spans)
        return np.broadcast_to(np.arange(length), (3, length)) if own is None else own

    def given(
        self,
        ids: Tensor,
        spans: Sequence[Sequence[Span]],
        images: Sequence[Sequence[bytes]],
        positions: NDArray[np.int64],
    ) -> dict[str, Tensor]:
        """Tokens (B, Q), positions (3, B, Q), in one row for models that count, and pixels."""
        counts = self.reader.positions(0, (), ()) is None
        own = torch.from_numpy(positions[0] if counts else positions).to(ids.device)
        return {"input_ids": ids, "position_ids": own} | self.reader.seen(ids, images, spans)


class SeeingSlots(SlotConversations):
    """:class:`~freshper.policies.slots.SlotConversations` with pictures: each is read once, with its prompt."""

    def __init__(
        self,
        model: nn.Module,
        end_tokens: Sequence[int],
        count: int,
        sampling: SamplingParams,
        *,
        seed: int,
        max_positions: int | None,
        slots: int,
        reader: FamilyReader,
    ) -> None:
        super().__init__(model, end_tokens, count, sampling, seed=seed, max_positions=max_positions, slots=slots)
        self._gallery = _Gallery(count, reader)
        self._next = [0] * count  # the position of each row's next token: a picture of many tokens takes few
        self._pass: list[tuple[int, int, int, int]] = []  # of the rows of a pass: its line, row, length and new tokens

    def submit(self, row: int, prompt: Sequence[int], max_tokens: int, images: Sequence[bytes] = ()) -> None:
        """See :class:`freshper.policies.core.SeeingConversations`."""
        spans = self._gallery.spans_of(prompt, images)
        super().submit(row, prompt, max_tokens)
        self._gallery.hang(row, self._book.lengths[row], spans, images)

    def close_row(self, row: int) -> None:
        """See :class:`freshper.policies.core.Conversations`."""
        super().close_row(row)
        self._gallery.forget(row)

    def _beginning(self, number: int) -> tuple[int, ...]:  # noqa: ARG002
        return ()  # two prompts of the same tokens may show different pictures

    def _encode(self, active: list[int], *, chosen: bool) -> Tensor:
        lines = range(len(active)) if chosen else active
        slots = [self._at(number) for number in active]
        self._pass = [(line, slot.row, slot.length, len(slot.pending)) for line, slot in zip(lines, slots, strict=True)]
        return super()._encode(active, chosen=chosen)

    def _reads(self, ids: Tensor, positions: Tensor) -> dict[str, Tensor]:
        count, queries = positions.shape
        places = np.zeros((3, count, queries), dtype=np.int64)
        spans: list[list[Span]] = [[] for _ in range(count)]
        images: list[list[bytes]] = [[] for _ in range(count)]
        for line, row, length, new in self._pass:
            own_spans, images[line] = self._gallery.since(row, length)
            own = self._gallery.positions(new, own_spans, images[line])
            first = 0 if length == 0 else self._next[row]  # 0 again when it comes back to a slot
            padding = queries - new
            places[:, line, padding:] = own + first
            self._next[row] = first + int(own.max()) + 1
            spans[line] = [(padding + start, padding + stop) for start, stop in own_spans]
        return self._gallery.given(ids, spans, images, places)


class SeeingReencoding(ReencodingConversations):
    """:class:`~freshper.policies.reencode.ReencodingConversations` with pictures: all are read again in every turn."""

    def __init__(
        self,
        model: nn.Module,
        end_tokens: Sequence[int],
        count: int,
        sampling: SamplingParams,
        *,
        seed: int,
        max_positions: int | None,
        slots: int,
        padded: bool = True,
        reader: FamilyReader,
    ) -> None:
        super().__init__(
            model, end_tokens, count, sampling, seed=seed, max_positions=max_positions, slots=slots, padded=padded
        )
        self._gallery = _Gallery(count, reader)

    def submit(self, row: int, prompt: Sequence[int], max_tokens: int, images: Sequence[bytes] = ()) -> None:
        """See :class:`freshper.policies.core.SeeingConversations`."""
        spans = self._gallery.spans_of(prompt, images)
        super().submit(row, prompt, max_tokens)
        self._gallery.hang(row, self._book.lengths[row], spans, images)

    def close_row(self, row: int) -> None:
        """See :class:`freshper.policies.core.Conversations`."""
        super().close_row(row)
        self._gallery.forget(row)

    def _sight(self, rows: Sequence[int], whole: Sequence[Sequence[int]]) -> Sight:
        width = max(map(len, whole))
        positions = np.zeros((3, len(rows), width), dtype=np.int64)
        spans: list[list[Span]] = []
        images: list[list[bytes]] = []
        behind = np.zeros((len(rows), 1), dtype=np.int64)  # by how much positions stay behind the count of tokens
        for line, (row, tokens) in enumerate(zip(rows, whole, strict=True)):
            own_spans, own_images = self._gallery.since(row, 0)
            own = self._gallery.positions(len(tokens), own_spans, own_images)
            padding = width - len(tokens)
            positions[:, line, padding:] = own
            behind[line] = len(tokens) - 1 - own.max()
            spans.append([(padding + start, padding + stop) for start, stop in own_spans])
            images.append(own_images)
        nothing: list[list[Any]] = [[] for _ in rows]

        def look(ids: Tensor, counted: Tensor) -> dict[str, Tensor]:
            if ids.shape[1] == width and width > 1:
                return self._gallery.given(ids, spans, images, positions)
            after = np.broadcast_to(counted.cpu().numpy() - behind, (3, len(rows), 1))
            return self._gallery.given(ids, nothing, nothing, np.ascontiguousarray(after))

        return look


def seeing_conversations_for(
    model: nn.Module,
    reader: FamilyReader,
    end_tokens: Sequence[int],
    count: int,
    sampling: SamplingParams,
    *,
    seed: int,
    max_positions: int | None,
    slots: int,
) -> SeeingConversations:
    """As :func:`freshper.policies.engines.conversations_for`, for an image-text model and its ``reader``."""
    engine = seeing_engine_of(model, reader)
    model.eval()
    made: Any = engine.build(
        model, end_tokens, count, sampling, seed=seed, max_positions=max_positions, slots=slots, reader=reader
    )
    conversations: SeeingConversations = made
    return conversations


_engines: weakref.WeakKeyDictionary[nn.Module, Engine] = weakref.WeakKeyDictionary()


def seeing_engine_of(model: nn.Module, reader: FamilyReader) -> Engine:
    """The engine for ``model``, chosen once by a trial with pictures, as :func:`freshper.policies.engines.engine_of`.

    Raises :class:`PolicyError` when none gives right log-probs.
    """
    known = _engines.get(model)
    if known is not None:
        return known
    was_training = model.training
    model.eval()
    try:
        engine = _engines[model] = _first_right(model, reader)
    finally:
        model.train(was_training)
    logger.info("%s samples, pictures in sight, %s", type(model).__name__, engine.reason)
    return engine


def _first_right(model: Any, reader: FamilyReader) -> Engine:
    problems: list[str] = []
    if special := special_layers(model.config):
        problems.append(f"layers of {special} cannot be appended to row by row")
    elif not (wrong := seeing_trial(model, reader, SeeingSlots)):
        return Engine(SeeingSlots, "with a cache that is kept across turns: all its layers are plain attention")
    else:
        problems.append(f"a kept cache gives {wrong}")
    for padded, how in ((True, "together"), (False, "by equal length")):
        build = partial(SeeingReencoding, padded=padded)
        if not (wrong := seeing_trial(model, reader, build)):
            again = f"by reading each conversation again in every turn, rows {how}: {'; '.join(problems)}"
            return Engine(build, again)
        problems.append(f"rows {how} give {wrong}")
    raise PolicyError(f"no engine samples from {type(model).__name__} with right log-probs: {'; '.join(problems)}")


def seeing_trial(model: Any, reader: FamilyReader, build: Any) -> str:
    """What is wrong with the log-probs of an engine, or an empty text: two rows, two turns, pictures in both."""
    wide, high = _noise(96, 64, 0), _noise(48, 80, 1)
    shown: list[list[list[bytes]]] = [[[wide], []], [[high], [wide, high]]]  # by turn and row
    words = [[[5, 3, 9, 4, 7], [6, 8]], [[4], [9, 5, 3]]]
    size = int(model.get_input_embeddings().weight.shape[0])
    prompts = [
        [
            [token for image in images for token in [*reader.tokens(image), *text[:1]]] + [t % size for t in text]
            for images, text in zip(pictures, turn, strict=True)
        ]
        for pictures, turn in zip(shown, words, strict=True)
    ]
    rows = [[image for turn in shown for image in turn[row]] for row in (0, 1)]

    def opened(*arguments: Any, **settings: Any) -> Conversations:
        return _Showing(build(*arguments, reader=reader, **settings), shown)

    def given(row: int, tokens: Tensor) -> dict[str, Tensor]:
        return {"input_ids": tokens} | reader.inputs(tokens, [rows[row]])

    return played(model, opened, prompts, given)


class _Showing:
    """Conversations that add the pictures of each turn to its prompt by themselves."""

    def __init__(self, inner: SeeingConversations, shown: Sequence[Sequence[Sequence[bytes]]]) -> None:
        self._inner = inner
        self._shown = shown
        self._turns = [0] * len(shown[0])
        self.finished = inner.finished
        self.close_row = inner.close_row

    def submit(self, row: int, prompt: Sequence[int], max_tokens: int) -> None:
        self._inner.submit(row, prompt, max_tokens, self._shown[self._turns[row]][row])
        self._turns[row] += 1


def _noise(width: int, height: int, seed: int) -> bytes:
    """A picture in which nothing is alike, so that one read in another's place is noticed."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize((width, height), Image.Resampling.NEAREST).save(file, "PNG")
    return file.getvalue()
