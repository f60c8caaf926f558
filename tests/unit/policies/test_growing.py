"""The cache that is written in place holds what transformers' own would hold."""

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, Qwen2Config

from freshper.policies.growing import GrowingLayer, growing_cache

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


def test_special_layers_stay_as_they_are():
    config = Qwen2Config(
        num_hidden_layers=2,
        use_sliding_window=True,
        sliding_window=4,
        layer_types=["full_attention", "sliding_attention"],
    )
    kinds = [type(layer).__name__ for layer in growing_cache(config).layers]
    assert kinds == ["GrowingLayer", "DynamicSlidingWindowLayer"]
