"""Continuous sampling: every row is what it would be alone, whoever runs beside it, and nothing is encoded twice."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freshper.errors import ConfigError, PolicyError
from freshper.policies.core import reply_all
from freshper.policies.slots import SlotConversations, usable_attention
from freshper.trajectory import SamplingParams

SPEC = importlib.util.spec_from_file_location("engine_play", Path(__file__).with_name("engine_play.py"))
engine_play = importlib.util.module_from_spec(SPEC)
sys.modules["engine_play"] = engine_play
SPEC.loader.exec_module(engine_play)
Plan, alone, make_model, open_engine, play, said = (
    getattr(engine_play, name) for name in ("Plan", "alone", "make_model", "open_engine", "play", "said")
)
PLAIN = ["llama", "qwen2", "gpt2", "opt"]


@pytest.fixture(scope="module")
def llama():
    return make_model("llama")


def start(model, plan, *args, **options):
    return open_engine(SlotConversations, model, plan, *args, **options)


@pytest.mark.parametrize("attention_name", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", PLAIN)
def test_every_row_scores_as_it_does_alone_whatever_the_slots(kind, attention_name):
    model, plan = make_model(kind, attention_name), Plan(rows=5, turns=3)
    first = None
    for slots in (2, 5):
        lines, _ = play(start(model, plan, slots=slots), plan)
        for line in lines.values():
            np.testing.assert_allclose(line.logprobs, alone(model, line), atol=1e-5)
        first = first or said(lines)
        assert said(lines) == first
    assert sum(len(line.replies) for line in lines.values()) == sum(plan.lengths)


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**32), rows=st.integers(1, 9), slots=st.integers(1, 9), temperature=st.sampled_from([1, 0.6])
)
def test_any_plan(llama, seed, rows, slots, temperature):
    plan = Plan(rows=rows, turns=3, seed=seed)
    lines, _ = play(start(llama, plan, SamplingParams(temperature), slots=slots, seed=seed), plan)
    for line in lines.values():
        np.testing.assert_allclose(line.logprobs, alone(llama, line, temperature), atol=2e-5)


def test_a_reply_depends_on_seed_and_row_alone(llama):
    plan = Plan()
    together = said(play(start(llama, plan), plan)[0])
    for row in (0, 2, 6):
        assert said(play(start(llama, plan), plan, rows=[row])[0]) == {row: together[row]}
    backwards = said(play(start(llama, plan), plan, rows=range(6, -1, -1))[0])
    assert backwards == together
    other = said(play(start(llama, plan, seed=4), plan)[0])
    assert all(other[row] != together[row] for row in together)


def test_rows_with_the_same_prompt_say_different_things(llama):
    conversations = start(llama, Plan(rows=6))
    replies = reply_all(conversations, range(6), [[5, 3]] * 6, [12] * 6)
    assert len({reply.tokens for reply in replies}) == 6


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("slots", [4, 7])
def test_a_prompt_that_several_rows_begin_with_is_read_once(kind, slots, passes, llama):
    """Rows 0, 2 and 4 begin alike, so do 1 and 5; each goes on with what it has said itself, for three turns."""
    model = llama if kind == "llama" else make_model(kind)
    begin = {0: [5, 3, 8], 1: [7, 7], 2: [5, 3, 8], 3: [5, 3], 4: [5, 3, 8], 5: [7, 7], 6: [5, 3, 9]}
    conversations = start(model, Plan(rows=7), slots=slots)
    lines = {row: engine_play.Line() for row in begin}
    for turn in range(3):
        prompts = (
            list(begin.values()) if turn == 0 else [[9]] * 7
        )  # later turns are alike, but what stands before is not
        for row, reply in enumerate(reply_all(conversations, list(begin), prompts, [4] * 7)):
            line = lines[row]
            line.tokens += prompts[row]
            line.places += range(len(line.tokens), len(line.tokens) + len(reply.tokens))
            line.tokens += reply.tokens
            line.logprobs += reply.logprobs
    for line in lines.values():
        np.testing.assert_allclose(line.logprobs, alone(make_model(kind), line), atol=1e-5)
    if kind == "llama" and slots == 7:
        assert passes[0] == (4, 3, 3 + 2 + 2 + 3)


def test_greedy_and_truncated_sampling(llama):
    plan = Plan()
    greedy = [said(play(start(llama, plan, SamplingParams(0.0), seed=seed), plan)[0]) for seed in (1, 2)]
    assert greedy[0] == greedy[1]
    lines, _ = play(start(llama, plan, SamplingParams(top_k=2)), plan)
    for line in lines.values():
        with torch.inference_mode():
            logits = llama(input_ids=torch.tensor([line.tokens]), use_cache=False).logits[0].double()
        for place, logprob in zip(line.places, line.logprobs, strict=True):
            best = logits[place - 1].topk(2)
            chosen = best.values[best.indices == line.tokens[place]]
            assert logprob == pytest.approx(float(chosen - best.values.logsumexp(0)), abs=1e-5)


def test_several_tokens_may_end_a_reply_and_only_a_limit_cuts_it(llama):
    plan = Plan(rows=12)
    ends = tuple(range(1, 20))
    lines, _ = play(start(llama, plan, ends=ends), plan)
    replies = [reply for line in lines.values() for reply in line.replies]
    assert {reply.cut for reply in replies} == {True, False}
    for reply in replies:
        assert not {*ends} & {*reply.tokens[:-1]}
        assert reply.cut == (reply.tokens[-1] not in ends)
    for line in lines.values():
        np.testing.assert_allclose(line.logprobs, alone(llama, line), atol=1e-5)


@pytest.fixture
def passes(llama):
    """(rows, columns, real tokens that are written) of every forward pass."""
    seen = []

    def note(module, args, kwargs):
        [placement] = kwargs["cache"].layers[0]._placements
        seen.append((*kwargs["input_ids"].shape, len(placement.slots)))

    hook = llama.register_forward_pre_hook(note, with_kwargs=True)
    yield seen
    hook.remove()


@pytest.mark.parametrize("slots", [1, 3, 7])
def test_only_new_tokens_are_encoded(llama, passes, slots):
    plan = Plan()
    lines, calls = play(start(llama, plan, slots=slots), plan)
    assert len(passes) == calls
    unread = len(lines)  # the last token of every row is never needed
    assert sum(written for _, _, written in passes) == sum(len(line.tokens) for line in lines.values()) - unread
    assert max(rows for rows, _, _ in passes) <= slots


def test_as_one_reply_ends_the_others_go_on_and_the_next_row_comes(llama, passes):
    conversations = start(llama, Plan(rows=4), slots=2)
    for row, limit in enumerate((9, 2, 2, 2)):
        conversations.submit(row, [5, 6, 7], limit)
    came = []
    while len(came) < 4:
        for row, _ in conversations.finished():
            came.append(row)
            conversations.close_row(row)
    assert came == [1, 2, 3, 0]
    assert len(passes) == 9 + 2  # the passes of row 0, and two more to read the prompts of rows 2 and 3


def test_when_few_are_left_only_few_are_run(llama, passes):
    conversations = start(llama, Plan(rows=6), slots=6)
    for row in range(6):
        conversations.submit(row, [5, 2 + row], 30 if row == 4 else 2 + row)
    line = [5, 6]
    while len(passes) < 30:
        for row, reply in conversations.finished():
            conversations.close_row(row)
            if row == 4:
                line += reply.tokens
    assert [rows for rows, _, _ in passes[:8]] == [6, 6, 5, 4, 3, 2, 2, 1]
    assert len(line) == 32


def test_silent_conversations_make_room_and_are_read_again(llama):
    """Two slots, three conversations that are all asked before any goes on."""
    conversations = start(llama, Plan(rows=3), slots=2)
    lines = {row: engine_play.Line() for row in range(3)}
    for turn in range(3):
        prompts = [[9 + turn, 5 + row] for row in range(3)]
        for row, reply in enumerate(reply_all(conversations, range(3), prompts, [4] * 3)):
            line = lines[row]
            line.tokens += prompts[row]
            line.places += range(len(line.tokens), len(line.tokens) + len(reply.tokens))
            line.tokens += reply.tokens
            line.logprobs += reply.logprobs
    conversations.close_row(0)
    for line in lines.values():
        np.testing.assert_allclose(line.logprobs, alone(llama, line), atol=1e-5)


def test_prompts_of_very_different_length_are_not_padded_to_the_longest(llama, passes):
    conversations = start(llama, Plan(rows=4), slots=4)
    for row, length in enumerate((100, 5, 60, 7)):
        conversations.submit(row, [3] * length, 1)
    while len(passes) < 3 and not all(row in conversations._book.closed for row in range(4)):
        for row, _ in conversations.finished():
            conversations.close_row(row)
    assert passes == [(2, 100, 160), (2, 7, 12)]


def test_a_pass_over_prompts_is_bounded(llama, passes, monkeypatch):
    monkeypatch.setattr("freshper.policies.slots.PREFILL_TOKENS", 50)
    conversations = start(llama, Plan(rows=5), slots=5)
    reply_all(conversations, range(5), [[3 + row] * 20 for row in range(5)], [1] * 5)
    assert passes == [(2, 20, 40), (2, 20, 40), (1, 20, 20)]


@pytest.mark.parametrize("kind", ["mistral with windows", "mamba"])
def test_other_layers_than_attention_are_refused(kind):
    with pytest.raises(PolicyError, match=r"layers of .*(Sliding|Linear)"):
        start(make_model(kind), Plan())


def test_without_slots_nothing_runs(llama):
    with pytest.raises(ConfigError, match="slots 0"):
        start(llama, Plan(), slots=0)


def test_a_damaged_model_is_named():
    model = make_model("llama")
    with torch.no_grad():
        model.lm_head.weight[5] = torch.nan
    conversations = start(model, Plan())
    conversations.submit(0, [3], 2)
    with pytest.raises(PolicyError, match="not finite"):
        conversations.finished()


def test_the_last_position_can_be_used_and_a_wrong_call_changes_nothing(llama):
    conversations = start(llama, Plan(rows=2), room=20)
    [reply] = reply_all(conversations, [0], [[3] * 12], [8])
    assert len(reply.tokens) == 8
    for row, prompt in ((0, [5]), (1, []), (2, [5])):
        with pytest.raises(PolicyError):
            conversations.submit(row, prompt, 1)
    assert conversations.finished() == []
    conversations.submit(1, [3], 2)
    with pytest.raises(PolicyError, match="still waits"):
        conversations.close_row(1)


def test_another_attention_is_used_while_sampling_alone(llama):
    assert (usable_attention(llama), usable_attention(make_model("gpt2", "eager"))) == ("sdpa", "eager")
    model, plan = make_model("llama"), Plan()
    want = said(play(start(model, plan), plan)[0])
    model.config._attn_implementation_internal = "flash_attention_2"  # the setter would ask for a GPU
    assert usable_attention(model) == "sdpa"
    assert said(play(start(model, plan), plan)[0]) == want
    assert model.config._attn_implementation == "flash_attention_2"
    model.lm_head = None  # the pass fails
    conversations = start(model, plan)
    conversations.submit(0, [3], 1)
    with pytest.raises(TypeError):
        conversations.finished()
    assert model.config._attn_implementation == "flash_attention_2"


def test_a_lone_prompt_waits_only_as_long_as_reading_it_costs(llama, passes):
    """Five rows speak when the sixth comes: it waits for five passes, two that come together for three."""
    for late, waits in ((1, 5), (2, 3)):
        passes.clear()
        conversations = start(llama, Plan(rows=5 + late), slots=7)
        for row in range(5):
            conversations.submit(row, [5, 2 + row], 20)
        conversations.finished()
        for row in range(5, 5 + late):
            conversations.submit(row, [5, 6, 2 + row], 1)
        while not conversations.finished():
            pass
        assert [rows for rows, _, _ in passes] == [5] + [5 + late] * waits + [late]


def test_every_prompt_waits_anew(llama, passes):
    conversations = start(llama, Plan(rows=7), slots=6)
    for row in range(5):
        conversations.submit(row, [5, 2 + row], 20)
    conversations.finished()
    for row in (5, 6):
        conversations.submit(row, [5, 6, 2 + row], 1)
        while not conversations.finished():
            pass
        conversations.close_row(row)
    assert [rows for rows, _, _ in passes] == [5] + ([6] * 5 + [1]) * 2
