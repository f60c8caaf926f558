"""Trajectories that share a row: exact where it is allowed, refused where it would not be."""

from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from freshper.learning import packing as room
from freshper.learning.batching import micro_batches
from freshper.learning.logprobs import TokenLogprobs
from freshper.learning.packing import block_mask, needs_padding_mask, packed_inputs, packing_of, padded_inputs

CPU, VOCAB = torch.device("cpu"), 40
SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "initializer_range": 0.3}
SIZES |= {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
SHORT = {"vocab_size": VOCAB, "hidden_size": 16, "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 1}
GPT2 = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "initializer_range": 0.3}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 1}
OPT = SIZES | {"ffn_dim": 24, "word_embed_proj_dim": 16, "init_std": 0.3, "dropout": 0.0}
WINDOW = {"sliding_window": 3, "head_dim": 8}
CLASSES = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}
EXACT = {
    "Llama": ("Llama", SIZES),
    "Llama, eager attention": ("Llama", SIZES | {"attn_implementation": "eager"}),
    "Qwen2": ("Qwen2", SIZES),
    "GPT2: absolute positions": ("GPT2", GPT2),
    "OPT: absolute positions, shifted": ("OPT", OPT),
    "Mistral without a window": ("Mistral", SIZES | {"sliding_window": None}),
}
REFUSED = {
    "Gemma2: half its layers have a window": ("Gemma2", SIZES | WINDOW),
    "Gemma3: likewise": ("Gemma3Text", SIZES | WINDOW),
    "Mistral with a window": ("Mistral", SIZES | {"sliding_window": 3}),
    "Bloom: biases by distance, no position ids": ("Bloom", SHORT | {"n_layer": 2, "n_head": 2}),
    "Mamba: recurrent": ("Mamba", SHORT | {"num_hidden_layers": 2, "state_size": 4}),
}


def make(name, sizes):
    config = getattr(transformers, f"{name}Config")(**sizes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return getattr(transformers, CLASSES.get(name, f"{name}ForCausalLM"))(config)


def only(trajectories):
    (batch,) = micro_batches(trajectories, np.ones(len(trajectories)), 10_000, CPU)
    return batch


@pytest.mark.parametrize("case", EXACT)
def test_a_packed_row_gives_what_every_trajectory_gives_alone(case, random_batch):
    """Logits at the places that predict; within the rounding of float32."""
    model = make(*EXACT[case]).eval()
    assert packing_of(model) == "mask"
    batch = only(trajectories := random_batch(5))
    inputs = packed_inputs(batch, "mask", model.config._attn_implementation, torch.float32)
    assert inputs.input_ids.shape == (1, sum(map(len, trajectories)))
    logits = model(input_ids=inputs.input_ids, use_cache=False, **inputs.arguments).logits[0, inputs.positions]
    alone = []
    for row in batch.rows:
        tokens = torch.tensor(trajectories[row].tokens.astype(np.int64))[None]
        mask = torch.tensor(trajectories[row].response_mask)
        alone.append(model(input_ids=tokens, use_cache=False).logits[0, :-1][mask[1:]])
    torch.testing.assert_close(logits, torch.cat(alone), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_exact_is_refused(case, random_batch):
    model = make(*REFUSED[case])
    assert packing_of(model) == "none"
    scorer = TokenLogprobs(model, packing=True, small_vocabulary=0)
    batch = only(random_batch(4))
    want = TokenLogprobs(model)(batch, 1.0).logprobs  # padded, all logits, with a mask
    torch.testing.assert_close(scorer(batch, 1.0).logprobs, want, rtol=1e-5, atol=2e-5)


class Leaky(transformers.LlamaForCausalLM):
    """Ignores the mask it is given: a token sees its neighbor in the row."""

    def forward(self, input_ids, position_ids=None, attention_mask=None, **kwargs):
        return super().forward(input_ids, use_cache=False)


class Restless(transformers.LlamaForCausalLM):
    """Has no use for position ids, but every token knows where in the row it stands."""

    def forward(self, input_ids, position_ids=None, attention_mask=None, **kwargs):
        output = super().forward(input_ids, attention_mask=attention_mask, use_cache=False)
        output.logits = output.logits + torch.arange(input_ids.shape[1])[None, :, None].cos()
        return output


class Narrow(transformers.LlamaForCausalLM):
    """Takes no mask of four dimensions."""

    def forward(self, input_ids, position_ids=None, attention_mask=None, **kwargs):
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ValueError(attention_mask.shape)
        return super().forward(input_ids, attention_mask=attention_mask, use_cache=False)


@pytest.mark.parametrize("kind", [Leaky, Restless, Narrow])
def test_a_model_that_no_rule_knows_is_found_out_by_trial(kind):
    torch.manual_seed(0)
    assert packing_of(kind(transformers.LlamaConfig(**SIZES))) == "none"
    assert packing_of(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))) == "mask"


def test_a_padding_mask_is_left_out_only_where_nothing_changes():
    class Forward(transformers.LlamaForCausalLM):
        """Every token sees the whole row, unless the padding is masked."""

        def forward(self, input_ids, attention_mask=None, **kwargs):
            output = super().forward(input_ids, attention_mask=attention_mask, use_cache=False)
            seen = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            output.logits = output.logits + (input_ids * seen).sum(1)[:, None, None]
            return output

    torch.manual_seed(0)
    assert needs_padding_mask(Forward(transformers.LlamaConfig(**SIZES)))
    for case in ("Llama", "GPT2: absolute positions", "OPT: absolute positions, shifted"):
        assert not needs_padding_mask(make(*EXACT[case]))
    for recipe in REFUSED.values():
        assert not needs_padding_mask(make(*recipe))


def test_padded_inputs_say_where_tokens_are_predicted(random_batch):
    batch = only(random_batch(5))
    inputs = padded_inputs(batch)
    assert torch.equal(inputs.input_ids.view(-1)[inputs.positions + 1], batch.tokens[batch.response_mask])
    assert inputs.arguments["attention_mask"] is batch.attention_mask
    assert padded_inputs(batch, mask=False).arguments == {}


def test_a_block_mask_is_as_sdpa_or_eager_attention_wants_it():
    lengths = np.array([2, 1])
    want = torch.tensor([[True, False, False], [True, True, False], [False, False, True]])
    assert torch.equal(block_mask(lengths, "sdpa", torch.float32, CPU), want[None, None])
    added = block_mask(lengths, "eager", torch.bfloat16, CPU)
    assert added.dtype == torch.bfloat16
    assert torch.equal(added == 0, want[None, None])
    assert float(added[~want[None, None]].max()) == torch.finfo(torch.bfloat16).min


class Flash(nn.Module):
    """A model of flash attention: it needs sequence bounds or a mask, and remembers what it was given."""

    def __init__(self, obeys=True):
        super().__init__()
        self.config = transformers.LlamaConfig(**SIZES | {"layer_types": ["sliding_attention", "full_attention"]})
        self.config._attn_implementation = "flash_attention_2"
        self.inner = make("Llama", SIZES)
        self.obeys, self.given = obeys, []

    def forward(self, input_ids, attention_mask=None, position_ids=None, use_cache=True, **kwargs):
        self.given.append(kwargs | {"position_ids": position_ids, "attention_mask": attention_mask})
        if "cu_seq_lens_q" not in kwargs:
            return self.inner(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        bounds = kwargs["cu_seq_lens_q"].tolist() if self.obeys else [0, input_ids.shape[1]]
        parts = [self.inner(input_ids=input_ids[:, a:b]).logits for a, b in pairwise(bounds)]
        return transformers.modeling_outputs.CausalLMOutputWithPast(logits=torch.cat(parts, 1))


def test_flash_attention_is_given_the_bounds_of_the_sequences(random_batch):
    """Sliding windows are its own affair there: they are not replaced by a mask."""
    model = Flash()
    assert packing_of(model) == "varlen"
    assert packing_of(Flash(obeys=False)) == "none"
    scorer = TokenLogprobs(model)
    assert scorer.packing == "none"  # a small vocabulary stays the straightforward way
    scorer = TokenLogprobs(model, packing=True)
    batch = only(random_batch(4))
    model.given.clear()
    got = scorer(batch, 1.0).logprobs
    (given,) = model.given
    bounds = np.concatenate([[0], np.cumsum(batch.lengths)])
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        assert given[name].dtype == torch.int32
        assert given[name].tolist() == bounds.tolist()
    assert given["max_length_q"] == given["max_length_k"] == int(batch.lengths.max())
    assert given["attention_mask"] is None
    assert given["position_ids"].tolist() == [[k for length in batch.lengths for k in range(length)]]
    want = TokenLogprobs(model.inner)(batch, 1.0).logprobs
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-5)


def test_transformers_takes_the_bounds_by_these_names():
    """Its flash attention goes by sequence bounds only when all four are there."""
    from transformers.modeling_flash_attention_utils import _flash_attention_forward

    calls = []

    def kernel(q, k, v, **arguments):
        calls.append(arguments)
        return q

    functions = ((None, kernel, None, None, None), (lambda **a: {"max_seqlen_q": a["max_seqlen_q"]}, None))
    states = torch.zeros(1, 5, 2, 4, dtype=torch.bfloat16)
    bounds = torch.tensor([0, 3, 5], dtype=torch.int32)
    target = "transformers.modeling_flash_attention_utils.lazy_import_flash_attention"
    names = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 3, "max_length_k": 3}
    with mock.patch(target, return_value=functions):
        _flash_attention_forward(states, states, states, None, query_length=5, is_causal=True, **names)
    assert calls[0]["cu_seqlens_q"] is bounds
    assert calls[0]["max_seqlen_q"] == 3


def test_packing_is_the_default_only_where_kernels_skip_what_is_masked(random_batch):
    model = make(*EXACT["Llama"])
    assert TokenLogprobs(model, small_vocabulary=0).packing == "none"
    assert TokenLogprobs(model, small_vocabulary=0, packing=True).packing == "mask"
    assert TokenLogprobs(model, packing=True).packing == "mask"
    with mock.patch.object(room, "_is_exact", return_value=True):
        model.config._attn_implementation = "flash_attention_2"
        assert packing_of(model) == "varlen"
        model.config._attn_implementation = "flex_attention"
        assert packing_of(model) == "none"
