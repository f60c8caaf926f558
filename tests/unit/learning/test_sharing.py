"""Prompts that several trajectories begin with: computed once, and no number is another."""

import functools
import itertools
from dataclasses import replace
from importlib import util
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import transformers

from freshper.errors import ConfigError
from freshper.learning import sharing as room
from freshper.learning.batching import micro_batches
from freshper.learning.learner import Learner
from freshper.learning.logprobs import TokenLogprobs
from freshper.learning.objective import Objective
from freshper.learning.sharing import why_not_shared
from freshper.trajectory import Turn

SPEC = util.spec_from_file_location("packing_cases", Path(__file__).with_name("test_packing.py"))
cases = util.module_from_spec(SPEC)
SPEC.loader.exec_module(cases)
CPU, EXACT, REFUSED, make = cases.CPU, cases.EXACT, cases.REFUSED, cases.make
LLAMA = make(*EXACT["Llama"])


@pytest.fixture
def alike(random_batch):
    """Trajectories of several turns of which rows 0, 2 and 4 begin alike, and 1 and 3; 5 begins like nobody else."""

    prompts = [np.arange(3, 12), np.arange(20, 25), np.array([7, 8])]
    rows = random_batch(6, seed=4, longest=3)
    return [with_prompt(row, prompts[number % 2 if number < 5 else 2]) for number, row in enumerate(rows)]


def scored(scorer, trajectories, budget=10_000, **asked):
    """Log-probs of every trajectory, and the gradients of their sum weighted by advantages."""
    scorer.model.zero_grad()
    values = [None] * len(trajectories)
    for batch in scorer.split(trajectories, np.ones(len(trajectories)), budget, CPU):
        scores = scorer(batch, 0.8, **asked)
        (scores.logprobs * batch.advantages).sum().backward()
        for row, line in zip(batch.rows.tolist(), scores.logprobs.detach(), strict=True):
            values[row] = line[: len(trajectories[row])]
    return torch.cat(values), torch.cat([p.grad.flatten() for p in scorer.model.parameters() if p.grad is not None])


@pytest.mark.parametrize("vocabulary", [0, 10**6], ids=["head in chunks", "all logits"])
@pytest.mark.parametrize("budget", [60, 10_000])
@pytest.mark.parametrize("case", EXACT)
def test_log_probs_and_gradients_are_those_of_padded_rows(case, budget, vocabulary, alike):
    model = make(*EXACT[case]).eval()  # some drop units by default
    assert why_not_shared(model, model) == ""
    plain = TokenLogprobs(model, small_vocabulary=vocabulary, packing=False)
    want, want_gradient = scored(plain, alike)
    got, gradient = scored(TokenLogprobs(model, small_vocabulary=vocabulary, share_prompts=True), alike, budget)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(gradient, want_gradient, rtol=1e-4, atol=2e-5 * float(want_gradient.abs().max()))


@pytest.mark.parametrize("seed", range(30))
def test_any_batch_is_scored_like_padded_rows(seed, random_batch):
    """Like prompts together or like lengths, large budgets and small, rows that share and rows that do not."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 40, int(rng.integers(1, 9))) for _ in range(int(rng.integers(1, 4)))]
    rows = [with_prompt(row, prompts[int(rng.integers(len(prompts)))]) for row in random_batch(8, seed=seed)]
    rows += random_batch(2, seed=seed + 100)
    budget = max(map(len, rows)) + int(rng.integers(0, 300))
    scorer = TokenLogprobs(LLAMA, share_prompts=True, pass_cost=int(rng.integers(0, 80)))
    want, want_gradient = scored(TokenLogprobs(LLAMA), rows)
    got, gradient = scored(scorer, rows, budget)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(gradient, want_gradient, rtol=1e-4, atol=2e-5 * float(want_gradient.abs().max()))


def test_every_prompt_is_run_once(alike):
    model = make(*EXACT["Llama"])
    scorer = TokenLogprobs(model, share_prompts=True)
    seen = []
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    (batch,) = scorer.split(alike, np.ones(6), 10_000, CPU)
    scorer(batch, 1.0)
    hook.remove()
    firsts = [int(np.argmax(t.response_mask)) - 1 for t in alike]
    last = [len(t) - 1 - int(np.argmax(t.response_mask[::-1])) for t in alike]
    assert seen == [(3, 8), (6, max(end - first for end, first in zip(last, firsts, strict=True)))]


def test_rows_that_begin_like_nobody_else_are_padded(random_batch):
    rows = random_batch(5, seed=3)
    scorer = TokenLogprobs(make(*EXACT["Llama"]), share_prompts=True, pass_cost=10**6)
    (batch,) = scorer.split(rows, np.ones(5), 10_000, CPU)
    assert not batch.prompts.shared
    assert scorer._inputs(batch).input_ids.shape == batch.tokens.shape


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
NEO = cases.SHORT | {"num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]}
SPECIAL = {
    "GPT-Neo: a window that no cache layer shows": ("GPTNeo", NEO),
    "positions that depend on the longest row": ("Llama", cases.SIZES | {"rope_parameters": DYNAMIC}),
    "OPT that leaves out layers": ("OPT", cases.OPT | {"layerdrop": 0.5}),
}


@pytest.mark.parametrize("case", REFUSED | SPECIAL)
def test_a_model_that_cannot_is_refused_by_name(case):
    model = make(*(REFUSED | SPECIAL)[case])
    with pytest.raises(ConfigError, match=f"share_prompts: {type(model).__name__} cannot share prompts: it"):
        TokenLogprobs(model, share_prompts=True)


class Leaky(transformers.LlamaForCausalLM):
    """Ignores the mask it is given: what stands beside a short prompt is seen."""

    def forward(self, input_ids, position_ids=None, attention_mask=None, cache=None, **kwargs):
        return super().forward(input_ids, position_ids=position_ids, cache=cache, **kwargs)


class Forgetful(transformers.LlamaForCausalLM):
    """Has no use for the cache it is given."""

    def forward(self, input_ids, position_ids=None, attention_mask=None, cache=None, **kwargs):
        return super().forward(input_ids, position_ids=position_ids, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.3, 0.02])
@pytest.mark.parametrize("kind", [Leaky, Forgetful])
def test_a_model_that_no_rule_knows_is_found_out_by_trial(kind, scale, dtype):
    torch.manual_seed(0)
    model = kind(transformers.LlamaConfig(**cases.SIZES | {"initializer_range": scale})).to(dtype)
    assert "when it is run that way" in why_not_shared(model, model)


EXPERTS = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "head_dim": 8,
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe", "Olmoe"])
def test_experts_that_compute_in_other_portions_beside_other_tokens_are_no_fault(kind, seed):
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**cases.SIZES | EXPERTS | {"sliding_window": None})
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    assert why_not_shared(model, model) == ""


@pytest.mark.parametrize("case", EXACT)
def test_half_precision_is_judged_by_what_a_blind_row_would_say(case):
    model = make(*EXACT[case]).to(torch.bfloat16)
    assert why_not_shared(model, model) == ""


def test_what_stands_in_the_way_is_named(alike):
    model = make(*EXACT["Llama"])
    model.activation_checkpointing_enable()
    with pytest.raises(ConfigError, match="gradient checkpointing computes"):
        TokenLogprobs(model, share_prompts=True)
    model = make(*EXACT["Llama"]).train()
    scorer = TokenLogprobs(model, share_prompts=True)
    model.activation_checkpointing_enable()
    (batch,) = scorer.split(alike, np.ones(6), 10_000, CPU)
    with pytest.raises(ConfigError, match=r"0 of 8 prompt tokens: .* checkpointing has been switched on"):
        scorer(batch, 1.0)
    with mock.patch.object(torch, "compile"), pytest.raises(ConfigError, match="it is compiled"):
        TokenLogprobs(make(*EXACT["Llama"]), share_prompts=True, compiled=True)
    with pytest.raises(ConfigError, match="it reads pictures"):
        TokenLogprobs(make(*EXACT["Llama"]), share_prompts=True, pictures=dict)


def test_an_update_is_the_same_one(alike):
    """All of the objective: a reference, an entropy bonus, whole trajectories; and what a critic would read."""
    updates, learners = [], []
    for share in (False, True):
        learner = Learner(
            make(*EXACT["Qwen2"]),
            objective=Objective(kl=0.1, entropy_bonus=0.01, aggregation="sequence"),
            learning_rate=1e-2,
            total_updates=9,
            token_budget=90,
            share_prompts=share,
        )
        learners.append(learner)
        updates.append([learner.update(alike, np.linspace(0.1, 1, 6)) for _ in range(3)])
    for plain, shared in zip(*updates, strict=True):
        np.testing.assert_allclose(shared.log_ratios, plain.log_ratios, atol=1e-4)
        for name in ("loss", "grad_norm", "entropy"):
            assert shared.metrics[name] == pytest.approx(plain.metrics[name], rel=1e-3, abs=1e-5), name
    for one, other in zip(*(learner.score(alike) for learner in learners), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-3)
    scorer = learners[1].token_logprobs
    for batch in scorer.split(alike, np.ones(6), 10_000, CPU):
        assert batch.prompts.shared
        plain = TokenLogprobs(learners[1].model)
        torch.testing.assert_close(scorer.states(batch), plain.states(batch), rtol=1e-4, atol=1e-5)


def test_the_reference_is_given_no_larger_passes_than_the_policy(alike):
    model = make(*EXACT["Llama"])
    learner = Learner(
        model,
        objective=Objective(kl=0.1),
        learning_rate=1e-3,
        total_updates=1,
        token_budget=max(map(len, alike)) + 30,
        share_prompts=True,
    )
    seen = []
    real = transformers.LlamaForCausalLM.forward

    @functools.wraps(real)
    def forward(self, *args, **kwargs):
        seen.append(kwargs["input_ids"].numel())
        return real(self, *args, **kwargs)

    with mock.patch.object(transformers.LlamaForCausalLM, "forward", forward):
        learner.update(alike)
    assert len(seen) > 4
    assert max(seen) <= learner.token_budget


@pytest.mark.parametrize("seed", range(20))
def test_the_split_is_the_cheapest_of_both_orders(seed, random_batch):
    """Against all splits of the two orders; none exceeds the budget, no row is lost."""
    rng = np.random.default_rng(seed)
    rows = random_batch(6, seed=seed, longest=2)
    prompts = [rng.integers(0, 40, int(rng.integers(1, 9))) for _ in range(3)]
    rows = [with_prompt(row, prompts[int(rng.integers(0, 3))]) for row in rows]
    budget = max(map(len, rows)) + int(rng.integers(0, 60))
    cost = int(rng.integers(0, 40))
    batches = list(micro_batches(rows, np.ones(6), budget, CPU, pass_cost=cost, shared=True))
    assert sorted(row for batch in batches for row in batch.rows.tolist()) == list(range(6))
    assert all(tokens_of([rows[row] for row in batch.rows]) <= budget for batch in batches)
    found = sum(tokens_of([rows[row] for row in batch.rows]) + cost for batch in batches)
    first = [int(np.argmax(row.response_mask)) - 1 for row in rows]
    rest = [len(row) - 1 - int(np.argmax(row.response_mask[::-1])) - f for row, f in zip(rows, first, strict=True)]
    begins = [row.tokens[:f].tobytes() or n for n, (row, f) in enumerate(zip(rows, first, strict=True))]
    longest = {b: max(r for r, other in zip(rest, begins, strict=True) if other == b) for b in begins}
    number = {b: k for k, b in enumerate(dict.fromkeys(begins))}
    orders = [
        sorted(range(6), key=lambda i: -rest[i]),
        sorted(range(6), key=lambda i: (-longest[begins[i]], number[begins[i]], -rest[i])),
    ]
    best = min(
        sum(tokens_of([rows[i] for i in order[a:b]]) + cost for a, b in itertools.pairwise((0, *cuts, 6)))
        for order in orders
        for size in range(6)
        for cuts in itertools.combinations(range(1, 6), size)
        if all(tokens_of([rows[i] for i in order[a:b]]) <= budget for a, b in itertools.pairwise((0, *cuts, 6)))
    )
    assert found == best


def with_prompt(trajectory, prompt):
    """The same replies after another first observation of at least one token."""
    first = trajectory.turns[0].reply_start
    mask = np.concatenate([np.zeros(len(prompt), bool), trajectory.response_mask[first:]])
    zeros = np.zeros(len(prompt), np.float32)
    turns = [Turn(t.start, t.reply_start, t.end, t.reward) for t in trajectory.turns]
    shift = len(prompt) - first
    turns = [Turn(max(t.start + shift, 0), t.reply_start + shift, t.end + shift, t.reward) for t in turns]
    turns[0] = replace(turns[0], start=0)
    return replace(
        trajectory,
        tokens=np.concatenate([prompt, trajectory.tokens[first:]]).astype(np.int32),
        response_mask=mask,
        behavior_logprobs=np.concatenate([zeros, trajectory.behavior_logprobs[first:]]),
        advantages=np.concatenate([zeros, trajectory.advantages[first:]]),
        turns=tuple(turns),
    )


def tokens_of(rows):
    """Tokens of one pass over these trajectories, padding included."""
    first = [int(np.argmax(row.response_mask)) - 1 for row in rows]
    last = [len(row) - 1 - int(np.argmax(row.response_mask[::-1])) for row in rows]
    begins = {row.tokens[:f].tobytes() or number for number, (row, f) in enumerate(zip(rows, first, strict=True))}
    if len(begins) == len(rows):
        return len(rows) * max(map(len, rows))
    return len(begins) * max(first) + len(rows) * max(end - f for end, f in zip(last, first, strict=True))


def test_the_trial_leaves_no_trace():
    model = make(*EXACT["Llama"])
    model.train()
    before = [parameter.clone() for parameter in model.parameters()]
    assert room.why_not_shared(model, model) == ""
    assert model.training
    assert all(map(torch.equal, model.parameters(), before))
    assert all(parameter.grad is None for parameter in model.parameters())
