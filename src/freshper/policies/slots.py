"""Continuous sampling: as an episode ends its slot is given to the next one; the cache is kept across turns."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from freshper.errors import ConfigError, PolicyError
from freshper.policies.core import Reply, RowBook
from freshper.policies.growing import Placement, SlotLayer, accepted_arguments, special_layers
from freshper.policies.sampling import check_finite, draw_tokens, row_stream
from freshper.trajectory import SamplingParams

PREFILL_TOKENS = 16_384  # prompt tokens, padding included, that are read in one pass: bounds its memory
_SHORT = 32  # tokens: padding prompts up to this length costs less than another pass


@dataclass(slots=True, eq=False)
class _Slot:
    """One conversation in the cache, and the reply that it is saying."""

    row: int
    stream: np.random.Generator
    text: list[int] = field(default_factory=list)  # all its tokens
    length: int = 0  # how many of them are in the cache
    pending: list[int] = field(default_factory=list)  # known, but not yet in the cache
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    limit: int = 0  # of the reply; 0: it says nothing now
    uniform: list[float] = field(default_factory=list)  # one number for every token up to the limit

    def ask(self, prompt: Sequence[int], limit: int) -> None:
        self.text += prompt
        self.pending += prompt
        self.limit = limit
        self.uniform = self.stream.random(limit).tolist()

    def say(self, token: int, logprob: float) -> None:
        self.text.append(token)
        self.pending = [token]
        self.tokens.append(token)
        self.logprobs.append(logprob)

    def be_silent(self) -> None:
        self.tokens, self.logprobs, self.limit = [], [], 0

    def leave_cache(self) -> None:
        self.length, self.pending = 0, list(self.text)


class SlotConversations:
    """Conversations of a transformers causal LM of which at most ``slots`` are in the cache at once.

    Every slot has its own length: token p of a conversation lies in column p, a mask (B, 1, Q, K) lets a token at
    position p see columns 0 to p, so rows need no common padding and only new tokens are ever encoded. A prompt is
    read by its own row, beside others that wait; then the row joins those that decode. A conversation keeps its
    slot from its first turn until it is closed; only when others wait and nobody who has a slot asks for a reply, it
    makes room, and is read again later. Each row has its own stream of random numbers, decided by ``seed`` and the
    row, so who runs beside it changes a reply no more than rounding does: log-probs in their last bits, and a token
    when a draw falls on the edge between two (at times where a large vocabulary is nearly uniform).

    While prompts are read nobody decodes, so rows that arrive wait for company until their waiting, summed over rows
    and passes, has cost as much as that: one pass of every row that speaks. (With one arrival a pass, sqrt(2 slots)
    come together, which makes the sum of both costs least.)

    Attention that takes no such mask (FlashAttention) is replaced by ``sdpa`` while sampling.
    """

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
    ) -> None:
        """Raises :class:`PolicyError` for layers that are not plain attention, :class:`ConfigError` without slots."""
        if slots < 1:
            raise ConfigError(f"slots {slots} must be at least 1: no conversation could run")
        if special := special_layers(model.config):
            raise PolicyError(f"a cache of slots cannot serve this model: it has layers of {special}")
        self._model: Any = model
        self._end_tokens = frozenset(end_tokens)
        self._sampling = sampling
        self._seed = seed
        self._book = RowBook(count, max_positions)
        self._capacity = min(slots, count)
        self._waited = 0  # decoding passes that rows with unread prompts have waited, summed over these rows
        self._slots: list[_Slot | None] = []  # the first ones; those above are free
        self._entering: deque[int] = deque()  # rows that wait for a slot
        self._parked: dict[int, _Slot] = {}  # conversations that had to make room
        self._placements: list[Placement] = []
        self._cache: Any = DynamicCache(config=model.config)
        self._cache.layers = [SlotLayer(self._capacity, self._placements) for _ in self._cache.layers]
        self._arguments = accepted_arguments(model).cached(self._cache)
        self._device = next(model.parameters()).device
        self._attention = usable_attention(model)

    def submit(self, row: int, prompt: Sequence[int], max_tokens: int) -> None:
        """See :class:`freshper.policies.core.Conversations`."""
        self._book.submit(row, prompt, max_tokens)
        slot = next((slot for slot in self._slots if slot and slot.row == row), None)
        if slot is None:
            self._entering.append(row)
        else:
            slot.ask(prompt, max_tokens)

    def close_row(self, row: int) -> None:
        """See :class:`freshper.policies.core.Conversations`; its slot is free."""
        self._book.close(row)
        self._parked.pop(row, None)
        for number, slot in enumerate(self._slots):
            if slot and slot.row == row:
                self._slots[number] = None

    @torch.inference_mode()
    def finished(self) -> list[tuple[int, Reply]]:
        """See :class:`freshper.policies.core.Conversations`; a call is one forward pass."""
        self._admit()
        asking: list[int] = []  # their prompts have not been read yet
        speaking: list[int] = []  # they are in the middle of a reply
        for number, slot in enumerate(self._slots):
            if slot is not None and slot.limit > 0:
                (speaking if slot.tokens else asking).append(number)
        if asking and self._waited >= len(speaking):
            self._waited = 0
            active = self._some_of(asking)
            logits = self._read(active)
        elif speaking:
            self._waited += len(asking)
            active = speaking
            logits = self._encode(active, chosen=False)
        else:
            return []
        slots = [self._at(number) for number in active]
        self._say(slots, logits)
        return [reply for slot in slots if (reply := self._ended(slot))]

    def _admit(self) -> None:
        """Give free slots to rows that wait; when none waits, move the last ones down, so that fewer rows are run."""
        if (
            self._entering
            and len(self._slots) == self._capacity
            and not any(slot and slot.limit for slot in self._slots)
        ):
            self._make_room()
        for number in range(self._capacity):
            if not self._entering:
                break
            if number == len(self._slots):
                self._slots.append(None)
            if self._slots[number] is None:
                row = self._entering.popleft()
                slot = self._slots[number] = self._parked.pop(row, None) or _Slot(row, row_stream(self._seed, row))
                slot.ask(self._book.waiting[row].prompt, self._book.waiting[row].max_tokens)
        while None in self._slots:
            last = self._slots.pop()
            if last is not None:
                free = self._slots.index(None)
                self._slots[free] = last
                for layer in self._cache.layers:
                    layer.move(len(self._slots), free)

    def _make_room(self) -> None:
        """Let silent conversations leave, as many as wait to enter: else nothing would ever move."""
        silent = [number for number, slot in enumerate(self._slots) if slot]
        for number in silent[: len(self._entering)]:
            slot = self._at(number)
            slot.leave_cache()
            self._parked[slot.row] = slot
            self._slots[number] = None

    def _some_of(self, asking: list[int]) -> list[int]:
        """Rows whose prompts are read in one pass: the longest ones first, not much longer than the shortest."""
        sizes = {number: len(self._at(number).pending) for number in asking}
        asking = sorted(asking, key=lambda number: -sizes[number])
        longest = sizes[asking[0]]
        together = [number for number in asking if longest <= _SHORT or 2 * sizes[number] >= longest]
        return sorted(together[: max(1, PREFILL_TOKENS // longest)])

    def _read(self, active: list[int]) -> Tensor:
        """Logits (len(active), V) after the prompts of ``active`` slots. Those that begin alike are read once."""
        firsts: dict[tuple[int, ...], int] = {}
        read_by = [firsts.setdefault(key, number) if (key := self._beginning(number)) else number for number in active]
        readers = list(dict.fromkeys(read_by))
        logits = self._encode(readers, chosen=True)
        if len(readers) == len(active):
            return logits
        copied = [(reader, number) for reader, number in zip(read_by, active, strict=True) if reader != number]
        for _, number in copied:
            slot = self._at(number)
            slot.length, slot.pending = len(slot.pending), []
        sources, targets = torch.tensor(copied, device=self._device).T
        columns = max(self._at(number).length for _, number in copied)
        for layer in self._cache.layers:
            layer.copy(sources, targets, columns)
        return logits[[readers.index(reader) for reader in read_by]]

    def _beginning(self, number: int) -> tuple[int, ...]:
        """The prompt of a slot where it begins a conversation and may be read for others too; else nothing."""
        slot = self._at(number)
        return () if slot.length else tuple(slot.pending)

    def _at(self, number: int) -> _Slot:
        slot = self._slots[number]
        assert slot is not None
        return slot

    def _encode(self, active: list[int], *, chosen: bool) -> Tensor:
        """Run the pending tokens of ``active`` slots; returns the logits (len(active), V) after them.

        ``chosen`` runs these slots alone, on a copy of what they hold; otherwise all slots are run in place, each has
        one pending token, and what the others yield means nothing. Queries are padded on the left, so the last column
        is every row's last.
        """
        if not chosen:
            return self._decode(active)
        slots = [self._at(number) for number in active]
        news = np.array([len(slot.pending) for slot in slots])
        lengths = np.array([slot.length for slot in slots])
        count, queries, width = len(active), int(news.max()), int((lengths + news).max())
        # Of every new token: its number among those of its row, and where it stands in the pass and in the cache.
        inside = np.arange(news.sum()) - np.repeat(news.cumsum() - news, news)
        real_rows, real_queries = np.repeat(np.arange(count), news), inside + np.repeat(queries - news, news)
        columns = inside + np.repeat(lengths, news)
        ids, positions = np.zeros((2, count, queries), dtype=np.int64)
        ids[real_rows, real_queries] = [token for slot in slots for token in slot.pending]
        positions[real_rows, real_queries] = columns
        for slot in slots:
            slot.length += len(slot.pending)
            slot.pending = []
        places = np.stack([real_rows, real_queries, np.repeat(active, news), columns])
        real = torch.from_numpy(places).to(self._device)
        only = torch.tensor(active, device=self._device)
        self._placements[:] = [Placement(real[0], real[1], real[2], real[3], width, only)]
        both = torch.from_numpy(np.stack([ids, positions])).to(self._device)
        return self._run(both[0], both[1], width)

    def _decode(self, active: list[int]) -> Tensor:
        """:meth:`_encode` of one token each, all slots in place."""
        slots = [self._at(number) for number in active]
        lengths, tokens = [slot.length for slot in slots], [slot.pending[0] for slot in slots]
        for slot in slots:
            slot.length += 1
            slot.pending = []
        width = max(lengths) + 1
        given = np.zeros((3, len(self._slots)), dtype=np.int64)
        given[:, active] = active, lengths, tokens
        numbers, columns, ids = torch.from_numpy(given).to(self._device)
        every = len(active) == len(self._slots)
        real = (numbers, columns) if every else (numbers[active], columns[active])
        self._placements[:] = [Placement(real[0], None, *real, width, None)]
        logits = self._run(ids[:, None], columns[:, None], width)
        return logits if every else logits[active]

    def _run(self, ids: Tensor, positions: Tensor, width: int) -> Tensor:
        visible = torch.arange(width, device=self._device) <= positions[:, None, :, None]  # (B, 1, Q, K)
        mask = visible
        if self._attention != "sdpa":  # eager attention adds the mask
            dtype = self._model.dtype
            mask = torch.zeros(visible.shape, dtype=dtype, device=self._device)
            mask.masked_fill_(~visible, torch.finfo(dtype).min)
        with attention(self._model, self._attention):
            output = self._model(attention_mask=mask, **self._reads(ids, positions), **self._arguments)
        logits: Tensor = output.logits[:, -1]
        return logits

    def _reads(self, ids: Tensor, positions: Tensor) -> dict[str, Tensor]:
        """What the pass under way reads: tokens (B, Q) and their positions."""
        return {"input_ids": ids, "position_ids": positions}

    def _say(self, slots: Sequence[_Slot], logits: Tensor) -> None:
        """Sample a token for each of these slots. The one place that waits for the device."""
        uniform = torch.from_numpy(np.array([slot.uniform[len(slot.tokens)] for slot in slots]))
        tokens, logprobs = draw_tokens(logits, self._sampling, uniform.to(self._device)[:, None])
        said, values = tokens.tolist(), logprobs.tolist()
        check_finite(all(map(math.isfinite, values)))
        for slot, token, value in zip(slots, said, values, strict=True):
            slot.say(token, value)

    def _ended(self, slot: _Slot) -> tuple[int, Reply] | None:
        if slot.tokens[-1] not in self._end_tokens and len(slot.tokens) < slot.limit:
            return None
        answer = self._book.answer(slot.row, slot.tokens, slot.logprobs, self._end_tokens)
        slot.be_silent()
        return answer


def usable_attention(model: Any) -> str:
    """The attention implementation to sample with: the model's own if it takes a mask of four dimensions."""
    own = model.config._attn_implementation
    if own in ("sdpa", "eager"):
        return str(own)
    return "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"


@contextlib.contextmanager
def attention(model: Any, implementation: str) -> Iterator[None]:
    """Run ``model`` with another attention implementation; its own comes back."""
    own = model.config._attn_implementation
    if own == implementation:
        yield
        return
    model.config._attn_implementation = implementation
    try:
        yield
    finally:
        model.config._attn_implementation = own
