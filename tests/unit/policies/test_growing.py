"""The cache that is written in place holds what transformers' own would hold."""

import numpy as np
import pytest
import torch
from transformers import DynamicCache, LlamaConfig, Qwen2Config

from freshper.errors import PolicyError
from freshper.policies.growing import (
    GrowingLayer,
    Placement,
    SlotLayer,
    accepted_arguments,
    growing_cache,
    special_layers,
)

CONFIG = LlamaConfig(num_hidden_layers=2, hidden_size=8, num_attention_heads=2, vocab_size=5)


@pytest.mark.parametrize("seed", range(3))
def test_it_holds_what_was_appended(seed):
    generator = torch.Generator().manual_seed(seed)
    ours, theirs = growing_cache(CONFIG), DynamicCache(config=CONFIG)
    rows = 6
    for columns in (3, 1, 1, 1, 7, 1, 20, 1, 1):
        for layer in range(2):
            states = [torch.randn(rows, 2, columns, 4, generator=generator) for _ in range(2)]
            got, want = ours.update(*states, layer), theirs.update(*states, layer)
            assert all(torch.equal(one, two) for one, two in zip(got, want, strict=True))
            assert all(one.is_contiguous() or one.stride(-1) == 1 for one in got)
        assert ours.get_seq_length() == theirs.get_seq_length()
        assert ours.layers[0].get_mask_sizes(1) == theirs.layers[0].get_mask_sizes(1)
        if columns == 7:
            keep = torch.tensor([0, 2, 5])
            ours.batch_select_indices(keep)
            theirs.batch_select_indices(keep)
            rows = 3
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        assert torch.equal(mine.keys, other.keys)
        assert torch.equal(mine.values, other.values)


def test_one_more_column_moves_nothing():
    """Most of the time: the buffers double, so that all copies together are fewer than two of the whole."""
    layer = GrowingLayer()
    held = [layer.update(torch.zeros(2, 2, 1, 4), torch.zeros(2, 2, 1, 4)) for _ in range(64)]
    assert len({keys.data_ptr() for keys, _ in held}) == 7  # all still held, so no address is used twice
    assert held[32][1].data_ptr() == held[63][1].data_ptr()


def test_what_it_returned_before_stays_as_it_was():
    layer = GrowingLayer()
    first, _ = layer.update(torch.ones(1, 1, 3, 2), torch.ones(1, 1, 3, 2))
    for _ in range(5):
        layer.update(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2))
    assert torch.equal(first, torch.ones(1, 1, 3, 2))


@pytest.mark.parametrize("first", [0, 3])
def test_rows_that_are_added_are_zeros(first):
    layer = GrowingLayer()
    if first:
        layer.update(torch.ones(2, 1, first, 2), torch.ones(2, 1, first, 2))
    layer.batch_append(2)
    layer.batch_append(0)
    keys, values = layer.update(torch.full((4, 1, 1, 2), 5.0), torch.full((4, 1, 1, 2), 6.0))
    assert keys[:, 0, :, 0].tolist() == [[1.0] * first + [5.0]] * 2 + [[0.0] * first + [5.0]] * 2
    assert values[3, 0, :, 1].tolist() == [0.0] * first + [6.0]


SLIDING = {"num_hidden_layers": 2, "use_sliding_window": True, "sliding_window": 4}


def test_special_layers_are_named_and_refused():
    config = Qwen2Config(**SLIDING, layer_types=["full_attention", "sliding_attention"])
    assert special_layers(config) == ["DynamicSlidingWindowLayer"]
    assert special_layers(CONFIG) == []
    with pytest.raises(PolicyError, match="DynamicSlidingWindowLayer"):
        growing_cache(config)


def place(tokens, width, chosen=None):
    """A placement of (row, query, slot, column) tuples."""
    numbers = torch.tensor(tokens).T
    return Placement(*numbers, width, None if chosen is None else torch.tensor(chosen))


def test_a_slot_holds_its_own_tokens_at_their_positions():
    """Random writes to random slots, against plain lists."""
    rng = np.random.default_rng(0)
    placements = []
    layer, held = SlotLayer(4, placements), [[] for _ in range(4)]
    for turn in range(60):
        if turn % 3 == 0:  # some slots alone, each with some new tokens, padded on the left
            slots = sorted(rng.choice(4, rng.integers(1, 5), replace=False).tolist())
            news = rng.integers(1, 5, len(slots)).tolist()
        else:  # all in place, of which some have nothing new
            slots, news = list(range(4)), [1, *rng.integers(0, 2, 3).tolist()]
        queries = max(news)
        states = torch.from_numpy(rng.normal(size=(len(slots), 2, queries, 3)).astype(np.float32))
        tokens = []
        for row, (slot, new) in enumerate(zip(slots, news, strict=True)):
            for query in range(queries - new, queries):
                tokens.append((row, query, slot, len(held[slot])))
                held[slot].append(states[row, :, query])
        width = max(len(held[slot]) for slot in slots)
        placements[:] = [place(tokens, width, slots if turn % 3 == 0 else None)]
        keys, values = layer.update(states, -states)
        assert keys.shape == (len(slots), 2, width, 3)
        assert torch.equal(keys, -values)
        for row, slot in enumerate(slots):
            if held[slot]:
                assert torch.equal(keys[row, :, : len(held[slot])], torch.stack(held[slot], 1))


def test_what_a_mask_hides_is_finite():
    """Room that was never written: 0 x NaN would be NaN."""
    placements = [place([(0, 0, 0, 6)], 7)]
    keys, _ = SlotLayer(2, placements).update(torch.ones(2, 1, 1, 4), torch.ones(2, 1, 1, 4))
    assert keys.isfinite().all()
    assert keys[1].count_nonzero() == 0


def test_a_slot_can_be_moved():
    placements = [place([(0, 0, 0, 0), (1, 0, 1, 0), (2, 0, 2, 0)], 1)]
    layer = SlotLayer(3, placements)
    states = torch.arange(3.0).reshape(3, 1, 1, 1)
    layer.update(states, states)
    layer.move(2, 0)
    placements[:] = [place([(1, 0, 1, 1)], 2)]
    keys, values = layer.update(torch.full((2, 1, 1, 1), 9.0), torch.full((2, 1, 1, 1), 9.0))
    assert keys[:, 0, :, 0].tolist() == values[:, 0, :, 0].tolist() == [[2, 0], [1, 9]]


def test_arguments_are_looked_up_in_the_model():
    class Model(torch.nn.Module):
        def forward(self, input_ids, past_key_values=None, logits_to_keep=0):
            raise NotImplementedError

    class Wrapper(torch.nn.Module):
        def get_base_model(self):
            return Model()

        def forward(self, *args, **kwargs):
            raise NotImplementedError

    class Compiled(torch.nn.Module):
        """What torch.compile returns, as far as it matters."""

        def __init__(self):
            super().__init__()
            self._orig_mod = Model()

        def forward(self, *args, **kwargs):
            raise NotImplementedError

    for model in (Model(), Wrapper(), Compiled()):
        arguments = accepted_arguments(model)
        assert (arguments.cache, arguments.position_ids, arguments.logits_to_keep) == ("past_key_values", False, True)
        assert arguments.cached("it") == {"use_cache": True, "past_key_values": "it", "logits_to_keep": 1}
        assert arguments.cached(None) == {"use_cache": True, "logits_to_keep": 1}
