"""Packing, padding and chunks are ways to compute: over random batches none of them changes a number."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from freshper.learning.batching import micro_batches
from freshper.learning.logprobs import TokenLogprobs
from freshper.learning.packing import block_mask, packed_inputs
from freshper.trajectory import StopReason, Trajectory, Turn

torch.set_num_threads(1)
CPU, VOCAB = torch.device("cpu"), 23
LLAMA = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA |= {"vocab_size": VOCAB, "initializer_range": 0.3, "pad_token_id": 0}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": VOCAB, "initializer_range": 0.3, "n_positions": 64}
torch.manual_seed(0)
MODELS = [LlamaForCausalLM(LlamaConfig(**LLAMA)).eval(), GPT2LMHeadModel(GPT2Config(**GPT2)).eval()]
PLAIN = [TokenLogprobs(model) for model in MODELS]

TURNS = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=4)
BATCHES = st.lists(TURNS, min_size=1, max_size=6)


def trajectories_of(shapes, seed):
    """Random tokens; each shape lists (observation, reply) lengths of its turns."""
    rng, made = np.random.default_rng(seed), []
    for shape in shapes:
        turns, mask = [], []
        for shown, said in shape:
            start = len(mask)
            mask += [False] * shown + [True] * said
            turns.append(Turn(start, start + shown, len(mask), 0.0))
        advantages = np.where(mask, rng.normal(size=len(mask)), 0)
        tokens, facts = rng.integers(0, VOCAB, len(mask)), (StopReason.TERMINATED, True, 0, "t", "g", 0)
        logprobs = np.where(mask, -1.0, 0.0)
        made.append(Trajectory(tokens, np.array(mask), logprobs, tuple(turns), *facts, advantages=advantages))
    return made


def outcome(scorer, trajectories, budget):
    """Log-probs of all rows end to end, and the gradient of their sum weighted by advantages."""
    scorer.model.zero_grad()
    values = [None] * len(trajectories)
    for batch in scorer.split(trajectories, np.ones(len(trajectories)), budget, CPU):
        logprobs = scorer(batch, 1.3).logprobs
        (logprobs * batch.advantages).sum().backward()
        for row, length, line in zip(batch.rows, batch.lengths, logprobs.detach(), strict=True):
            values[row] = line[:length]
    return torch.cat(values), torch.cat([p.grad.flatten() for p in scorer.model.parameters()])


@settings(max_examples=40, deadline=None)
@given(
    shapes=BATCHES,
    seed=st.integers(0, 2**32 - 1),
    which=st.integers(0, 1),
    packing=st.booleans(),
    chunk=st.integers(1, 12 * VOCAB),
    keep=st.sampled_from([0, 10**9]),
    room=st.integers(0, 100),
    pass_cost=st.integers(0, 60),
)
def test_no_way_of_computing_changes_a_number(*, shapes, seed, which, packing, chunk, keep, room, pass_cost):
    trajectories = trajectories_of(shapes, seed)
    budget = max(map(len, trajectories)) + room
    settings_ = {"chunk_elements": chunk, "keep_elements": keep, "packing": packing, "pass_cost": pass_cost}
    scorer = TokenLogprobs(MODELS[which], small_vocabulary=0, **settings_)
    assert scorer.packing == ("mask" if packing else "none")
    values, gradient = outcome(scorer, trajectories, budget)
    want, want_gradient = outcome(PLAIN[which], trajectories, 10_000)
    torch.testing.assert_close(values, want, rtol=1e-6, atol=2e-5)
    torch.testing.assert_close(gradient, want_gradient, rtol=1e-4, atol=1e-5 * float(want_gradient.abs().max()) + 1e-6)


@given(shapes=BATCHES, seed=st.integers(0, 2**32 - 1), packing=st.sampled_from(["mask", "varlen"]))
def test_a_packed_row_is_the_trajectories_end_to_end(shapes, seed, packing):
    trajectories = trajectories_of(shapes, seed)
    (batch,) = micro_batches(trajectories, np.ones(len(shapes)), 10_000, CPU)
    inputs = packed_inputs(batch, packing, "sdpa", torch.float32)
    ordered = [trajectories[row] for row in batch.rows]
    assert inputs.input_ids[0].tolist() == [int(token) for t in ordered for token in t.tokens]
    assert inputs.arguments["position_ids"][0].tolist() == [k for t in ordered for k in range(len(t))]
    sampled = np.concatenate([t.response_mask for t in ordered])
    assert inputs.positions.tolist() == (np.flatnonzero(sampled) - 1).tolist()
    if packing == "varlen":
        assert inputs.arguments["cu_seq_lens_q"].tolist() == [0, *np.cumsum([len(t) for t in ordered])]


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_a_token_sees_itself_and_what_was_before_it_in_its_own_trajectory(lengths):
    seen = block_mask(np.array(lengths), "sdpa", torch.float32, CPU)[0, 0]
    owners = [number for number, length in enumerate(lengths) for _ in range(length)]
    for query, row in enumerate(seen.tolist()):
        assert row == [owners[key] == owners[query] and key <= query for key in range(len(owners))]


@given(
    lengths=st.lists(st.integers(2, 50), min_size=1, max_size=30),
    room=st.integers(0, 300),
    pass_cost=st.none() | st.integers(0, 500),
    packed=st.booleans(),
)
def test_a_split_is_a_partition_within_the_budget(lengths, room, pass_cost, packed):
    trajectories = trajectories_of([[(1, length - 1)] for length in lengths], 0)
    budget = max(lengths) + room
    how = {"pass_cost": pass_cost, "packed": packed}
    batches = list(micro_batches(trajectories, np.ones(len(lengths)), budget, CPU, **how))
    order = [row for batch in batches for row in batch.rows.tolist()]
    assert order == sorted(range(len(lengths)), key=lambda row: -lengths[row])
    for batch in batches:
        assert (int(batch.lengths.sum()) if packed else batch.tokens.numel()) <= budget
