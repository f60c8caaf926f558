"""Reading conversations again, and the choice between that and a kept cache."""

import importlib.util
import logging
import re
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from freshper.errors import ConfigError, PolicyError
from freshper.policies.core import reply_all
from freshper.policies.engines import conversations_for, engine_of, trial
from freshper.policies.reencode import ReencodingConversations
from freshper.policies.slots import SlotConversations
from freshper.trajectory import SamplingParams

SPEC = importlib.util.spec_from_file_location("engine_play", Path(__file__).with_name("engine_play.py"))
engine_play = importlib.util.module_from_spec(SPEC)
sys.modules["engine_play"] = engine_play
SPEC.loader.exec_module(engine_play)
Plan, alone, make_model, open_engine, play, said = (
    getattr(engine_play, name) for name in ("Plan", "alone", "make_model", "open_engine", "play", "said")
)
PADDED = ["llama", "gpt2", "mistral with windows", "gemma2", "bloom", "mamba2"]
SPECIAL = ["mistral with windows", "gemma2", "bloom", "mamba2", "mamba"]
BY_LENGTH = partial(ReencodingConversations, padded=False)


@pytest.mark.parametrize(
    ("kind", "engine"),
    [(kind, ReencodingConversations) for kind in PADDED] + [("mamba", BY_LENGTH), ("llama", BY_LENGTH)],
)
def test_every_row_scores_as_it_does_alone_whatever_the_slots(kind, engine):
    model, plan = make_model(kind), Plan(rows=4, turns=2)
    first = None
    for slots in (1, 3):
        lines, _ = play(open_engine(engine, model, plan, slots=slots), plan)
        for line in lines.values():
            np.testing.assert_allclose(line.logprobs, alone(model, line), atol=1e-5)
        first = first or said(lines)
        assert said(lines) == first


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_both_engines_say_the_same(kind):
    model, plan = make_model(kind), Plan()
    replies = [
        said(play(open_engine(engine, model, plan, ends=(4, 9)), plan)[0])
        for engine in (SlotConversations, ReencodingConversations, BY_LENGTH)
    ]
    assert replies[0] == replies[1] == replies[2]


def test_a_batch_is_as_large_as_the_slots_and_by_length_where_it_must():
    model = make_model("llama")
    rows = []
    hook = model.register_forward_pre_hook(
        lambda m, a, kwargs: rows.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    prompts = [[3] * length for length in (4, 2, 4, 2, 4)]
    for engine in (ReencodingConversations, BY_LENGTH):
        conversations = open_engine(engine, model, Plan(rows=5), slots=2)
        reply_all(conversations, range(5), prompts, [1] * 5)
    hook.remove()
    assert rows == [(2, 4), (2, 4), (1, 4), (2, 4), (2, 2), (1, 4)]


def test_a_model_without_any_cache_reads_everything_for_every_token():
    class NoCache(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = make_model("llama")
            self.config = self.inner.config

        def forward(self, input_ids, attention_mask=None, position_ids=None, use_cache=None):
            return self.inner(input_ids, attention_mask, position_ids, use_cache=False)

    plan, model = Plan(rows=3, turns=2), NoCache()
    want = said(play(open_engine(ReencodingConversations, model.inner, plan), plan)[0])
    assert said(play(open_engine(ReencodingConversations, model, plan), plan)[0]) == want


def test_wrong_calls_are_refused():
    model = make_model("llama")
    with pytest.raises(ConfigError, match="slots 0"):
        open_engine(ReencodingConversations, model, Plan(), slots=0)
    conversations = open_engine(ReencodingConversations, model, Plan(rows=2), room=9)
    assert conversations.finished() == []
    with pytest.raises(PolicyError, match="reach 10"):
        conversations.submit(0, [3] * 8, 2)
    conversations.close_row(0)
    with pytest.raises(PolicyError, match="closed"):
        conversations.submit(0, [3], 2)
    with torch.no_grad():
        model.lm_head.weight[5] = torch.nan
    conversations.submit(1, [3], 2)
    with pytest.raises(PolicyError, match="not finite"):
        conversations.finished()


CHOICES = {
    "llama": "kept across turns",
    "gpt2": "kept across turns",
    "mistral with windows": "rows together: layers of .*DynamicSlidingWindowLayer",
    "gemma2": "rows together: layers of .*DynamicSlidingWindowLayer",
    "bloom": "rows together: it takes no position ids",
    "mamba2": "rows together: layers of .*LinearAttentionLayer",
    "mamba": "rows by equal length: .*rows together give log-probs that are off by",
}


@pytest.mark.parametrize("kind", CHOICES)
def test_the_engine_fits_the_model_and_says_why(kind, caplog):
    model, plan = make_model(kind).train(), Plan(rows=3, turns=2)
    with caplog.at_level(logging.INFO, "freshper.policies"):
        engine = engine_of(model)
        assert engine_of(model) is engine
    assert len(caplog.records) == 1
    assert type(model).__name__ in caplog.text
    assert re.search(CHOICES[kind], engine.reason)
    assert model.training
    conversations = open_engine(conversations_for, model, plan)
    assert not model.training
    assert isinstance(conversations, SlotConversations) == ("kept" in CHOICES[kind])
    for line in play(conversations, plan)[0].values():
        np.testing.assert_allclose(line.logprobs, alone(model, line), atol=1e-5)


def test_an_engine_with_wrong_positions_is_found_out():
    """A kept cache whose positions start anew in every turn: plausible replies, wrong log-probs."""

    class Forgetful(SlotConversations):
        def _run(self, ids, positions, width):
            return super()._run(ids, (positions - 4).clamp(min=0), width)

    for kind in ("llama", "gpt2"):
        model = make_model(kind)
        assert trial(model, SlotConversations) == ""
        assert "off by" in trial(model, Forgetful)


def test_an_engine_that_a_model_refuses_is_passed_over():
    class Strict(torch.nn.Module):
        """Takes padded rows by a mask, and no other mask."""

        def __init__(self):
            super().__init__()
            self.inner = make_model("llama")
            self.config, self.dtype = self.inner.config, torch.float32

        def get_input_embeddings(self):
            return self.inner.get_input_embeddings()

        def forward(self, input_ids, attention_mask=None, position_ids=None, use_cache=None, cache=None):
            if attention_mask is not None and attention_mask.ndim == 4:
                raise ValueError("two dimensions, please")
            return self.inner(input_ids, attention_mask, position_ids, use_cache=use_cache, cache=cache)

    assert "a kept cache gives ValueError (two dimensions, please)" in engine_of(Strict()).reason


def test_when_no_engine_is_right_that_is_said():
    model = make_model("llama")
    with torch.no_grad():
        model.lm_head.weight[5] = torch.nan
    with pytest.raises(PolicyError, match=r"no engine samples from LlamaForCausalLM.*not finite"):
        engine_of(model)
    with torch.no_grad():
        model.lm_head.weight[5] = 0.0
    assert "kept" in engine_of(model).reason


def test_half_precision_is_allowed_its_rounding():
    model = make_model("llama").to(torch.bfloat16)
    assert "kept" in engine_of(model).reason
    sampling = SamplingParams(top_p=0.9)
    conversations = conversations_for(model, (), 2, sampling, seed=0, max_positions=None, slots=2)
    replies = reply_all(conversations, [0, 1], [[3], [4, 5]], [9, 9])
    assert [len(reply.tokens) for reply in replies] == [9, 9]
