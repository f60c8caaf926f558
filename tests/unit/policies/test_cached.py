"""Batched conversations with a kept cache: every row is what it would be alone, and nothing is encoded twice."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from freshper.errors import PolicyError
from freshper.policies.cached import CachedConversations
from freshper.policies.core import reply_all
from freshper.trajectory import SamplingParams

NEVER = -1  # an end token that no model samples


def open_conversations(tiny, count, sampling=None, *, end=NEVER, seed=0, room=128):
    tiny.model.eval()
    return CachedConversations(tiny.model, (end,), count, sampling or SamplingParams(), seed=seed, max_positions=room)


def prompts_of(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(4, 90, length).tolist() for length in lengths]


# Rows that speak, the lengths of their prompts, and the limits of their replies, turn by turn: prompts of different
# lengths, replies of different lengths, rows that leave at the front, in the middle and at the end.
PLAN = [
    ([0, 1, 2, 3, 4], [1, 7, 3, 2, 9], [6, 6, 1, 4, 6]),
    ([0, 1, 2, 3, 4], [4, 1, 1, 8, 2], [2, 6, 5, 1, 3]),
    ([1, 2, 4], [2, 2, 2], [4, 6, 6]),
    ([1, 2], [11, 1], [3, 1]),
    ([2], [1], [5]),
]


@dataclass
class Line:
    """What one row has read and said."""

    tokens: list = field(default_factory=list)
    places: list = field(default_factory=list)  # of the sampled tokens
    logprobs: list = field(default_factory=list)
    lengths: list = field(default_factory=list)  # of the replies


def play(conversations, plan=PLAN):
    lines = {row: Line() for row in plan[0][0]}
    closed = set()
    for turn, (rows, lengths, limits) in enumerate(plan):
        for row in sorted(lines.keys() - {*rows} - closed):
            conversations.close_row(row)
            closed.add(row)
        prompts = prompts_of(lengths, seed=turn)
        replies = reply_all(conversations, rows, prompts, limits)
        for row, prompt, reply, limit in zip(rows, prompts, replies, limits, strict=True):
            assert 1 <= len(reply.tokens) == len(reply.logprobs) <= limit
            line = lines[row]
            line.tokens += prompt
            line.places += range(len(line.tokens), len(line.tokens) + len(reply.tokens))
            line.tokens += reply.tokens
            line.logprobs += reply.logprobs
            line.lengths.append(len(reply.tokens))
    return lines


def alone(tiny, line, temperature=1.0):
    """Log-probs of a row's sampled tokens from one full forward pass of that row alone."""
    with torch.inference_mode():
        logits = tiny.model(input_ids=torch.tensor([line.tokens]), use_cache=False).logits[0].double()
    logprobs = torch.log_softmax(logits / temperature, -1)
    return [float(logprobs[place - 1, line.tokens[place]]) for place in line.places]


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
@pytest.mark.parametrize("seed", range(3))
def test_a_ragged_batch_scores_like_every_row_alone(tiny, seed, temperature):
    conversations = open_conversations(tiny, 5, SamplingParams(temperature=temperature), seed=seed)
    for line in play(conversations).values():
        np.testing.assert_allclose(line.logprobs, alone(tiny, line, temperature), atol=1e-5)


def test_replies_that_end_early_score_like_every_row_alone(tiny):
    """The end token is one that was sampled in the middle of a reply, so that some end early and some are cut."""
    without = play(open_conversations(tiny, 5))
    end = without[1].tokens[without[1].places[2]]
    lines = play(open_conversations(tiny, 5, end=end))
    early = [line for line in lines.values() if line.lengths[: len(PLAN)] != without[1].lengths]
    assert lines[1].lengths[0] == 3 < without[1].lengths[0]
    assert len(early) > 1
    for line in lines.values():
        np.testing.assert_allclose(line.logprobs, alone(tiny, line), atol=1e-5)
        starts = np.cumsum([0, *line.lengths[:-1]])
        for start, length in zip(starts, line.lengths, strict=True):
            assert end not in [line.tokens[place] for place in line.places[start : start + length - 1]]


def test_truncated_sampling_reports_the_truncated_distribution(tiny):
    lines = play(open_conversations(tiny, 5, SamplingParams(top_k=2)))
    for line in lines.values():
        with torch.inference_mode():
            logits = tiny.model(input_ids=torch.tensor([line.tokens]), use_cache=False).logits[0].double()
        for place, logprob in zip(line.places, line.logprobs, strict=True):
            best = logits[place - 1].topk(2)
            assert line.tokens[place] in best.indices
            chosen = best.values[best.indices == line.tokens[place]]
            assert logprob == pytest.approx(float(chosen - best.values.logsumexp(0)), abs=1e-5)


def test_greedy_rows_say_the_same_alone_and_together(tiny):
    greedy = SamplingParams(temperature=0.0)
    together = play(open_conversations(tiny, 5, greedy))
    for row, line in together.items():
        conversations = open_conversations(tiny, 1, greedy)
        said = []
        for turn, (rows, lengths, limits) in enumerate(PLAN):
            if row in rows:
                at = rows.index(row)
                said += reply_all(conversations, [0], [prompts_of(lengths, turn)[at]], [limits[at]])[0].tokens
        assert said == [line.tokens[place] for place in line.places]


def test_a_neighbors_text_never_changes_a_reply(tiny):
    prompts, others = prompts_of([5, 5, 5]), prompts_of([5, 2, 9], seed=9)
    replies = []
    for neighbors in (prompts, others):
        conversations = open_conversations(tiny, 3)
        replies.append(
            [reply_all(conversations, [0, 1, 2], [prompts[0], *neighbors[1:]], [6] * 3)[0] for _ in range(2)]
        )
    for one, two in zip(*replies, strict=True):
        assert one.tokens == two.tokens
        np.testing.assert_allclose(one.logprobs, two.logprobs, atol=1e-5)


def test_the_seed_decides_the_replies(tiny):
    one, again, other = (play(open_conversations(tiny, 5, seed=seed)) for seed in (4, 4, 5))
    assert one == again
    assert one != other


def test_only_new_tokens_are_encoded(tiny):
    """Columns and real tokens that reach the model: the new ones, padded to the longest row, and no others."""
    columns, real = [], []

    def count(module, args, kwargs):
        width = kwargs["input_ids"].shape[1]
        columns.append(width)
        real.append(int(kwargs["attention_mask"][:, -width:].sum()))

    hook = tiny.model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        lines = play(open_conversations(tiny, 5))
    finally:
        hook.remove()
    expected = []
    for turn, (_, lengths, limits) in enumerate(PLAN):
        waiting = 1 if turn else 0  # the last token of the reply before
        expected += [max(lengths) + waiting] + [1] * (max(limits) - 1)
    assert columns == expected
    unread = len(lines)  # the last token of every row is never needed
    assert sum(real) == sum(len(line.tokens) for line in lines.values()) - unread


def test_rows_may_come_late_and_pause(tiny):
    """Row 3 comes in the second turn, row 1 in the third; row 0 says nothing in the second."""
    plan = [([0, 2], [7, 2], [3, 6]), ([2, 3], [2, 9], [5, 4]), ([0, 1, 2, 3], [1, 5, 2, 2], [4, 6, 1, 3])]
    conversations = open_conversations(tiny, 4)
    lines = {row: Line() for row in range(4)}
    for turn, (rows, lengths, limits) in enumerate(plan):
        prompts = prompts_of(lengths, seed=turn)
        for row, prompt, reply in zip(rows, prompts, reply_all(conversations, rows, prompts, limits), strict=True):
            line = lines[row]
            line.tokens += prompt
            line.places += range(len(line.tokens), len(line.tokens) + len(reply.tokens))
            line.tokens += reply.tokens
            line.logprobs += reply.logprobs
    for line in lines.values():
        np.testing.assert_allclose(line.logprobs, alone(tiny, line), atol=1e-5)


def test_all_rows_may_leave_before_others_come(tiny):
    conversations = open_conversations(tiny, 4)
    reply_all(conversations, [0, 1], prompts_of([3, 5]), [4, 2])
    for row in (0, 1):
        conversations.close_row(row)
    [prompt] = prompts_of([6], seed=1)
    reply = reply_all(conversations, [2, 3], [prompt, [7]], [5, 1])[0]
    line = Line([*prompt, *reply.tokens], range(6, 11))
    np.testing.assert_allclose(reply.logprobs, alone(tiny, line), atol=1e-5)


def test_all_are_answered_at_once_and_none_twice(tiny):
    conversations = open_conversations(tiny, 3)
    assert conversations.finished() == []
    for row, limit in ((2, 1), (0, 6)):
        conversations.submit(row, [5, 6], limit)
    assert [(row, len(reply.tokens)) for row, reply in conversations.finished()] == [(0, 6), (2, 1)]
    assert conversations.finished() == []


def test_several_tokens_may_end_a_reply_and_only_a_limit_cuts_it(tiny):
    without = play(open_conversations(tiny, 5))[2]
    ends = tuple(without.tokens[place] for place in without.places[1:3])
    conversations = CachedConversations(tiny.model, ends, 40, SamplingParams(), seed=0, max_positions=128)
    replies = reply_all(conversations, range(40), [[5, 3]] * 40, [40] * 40)
    assert {reply.tokens[-1] for reply in replies} >= {*ends}
    for reply in replies:
        assert not {*ends} & {*reply.tokens[:-1]}
        assert reply.cut == (reply.tokens[-1] not in ends)
        assert not reply.cut or len(reply.tokens) == 40


def test_layers_that_know_no_padding_columns_are_refused():
    from transformers import MistralConfig, MistralForCausalLM

    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}
    model = MistralForCausalLM(MistralConfig(**size, num_key_value_heads=1, sliding_window=4))
    with pytest.raises(PolicyError, match="DynamicSlidingWindowLayer"):
        CachedConversations(model, (0,), 1, SamplingParams(), seed=0, max_positions=9)


REFUSED = {
    "a row that left": (1, [5], 2, "row 1 is closed"),
    "a row that never was": (7, [5], 2, "row 7 never was: there are 4"),
    "a negative row": (-1, [5], 2, "row -1 never was"),
    "a row that waits": (3, [5], 2, "row 3 still waits"),
    "an empty prompt": (2, [], 2, "row 2: .*prompt token"),
    "no room for a reply": (2, [5], 0, "row 2: .*room"),
    "beyond the model": (2, [5] * 30, 89, r"row 2: .*reach 129 tokens.* 128"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_call_is_refused_and_changes_nothing(tiny, case):
    row, prompt, limit, message = REFUSED[case]
    replies = []
    for wrong in (False, True):
        conversations = open_conversations(tiny, 4)
        reply_all(conversations, [0, 1, 2], prompts_of([2, 5, 4]), [5, 3, 4])
        conversations.close_row(1)
        reply_all(conversations, [0, 2], prompts_of([1, 1]), [1, 1])
        conversations.submit(3, [5], 2)
        if wrong:
            with pytest.raises(PolicyError, match=message):
                conversations.submit(row, prompt, limit)
            if not prompt or limit != 2:  # about the prompt, not about the row
                message = None
            with pytest.raises(PolicyError):
                conversations.close_row(row if message else 3)
        conversations.submit(0, [7], 3)
        replies.append(conversations.finished())
    assert replies[0] == replies[1]


def test_the_last_position_of_the_model_can_be_used(tiny):
    conversations = open_conversations(tiny, 1, room=20)
    [reply] = reply_all(conversations, [0], prompts_of([12]), [8])
    assert len(reply.tokens) == 8
    with pytest.raises(PolicyError, match="reach 22"):
        conversations.submit(0, [5], 1)


def test_the_policys_own_end_token_ends_a_reply(tiny):
    """The embedded policy tells its conversations which token that is."""
    policy_end = tiny.encode_reply("")[-1]
    replies = reply_all(tiny.begin(64, SamplingParams(), 0), range(64), [[5, 3]] * 64, [40] * 64)
    ended = [reply for reply in replies if reply.tokens[-1] == policy_end]
    assert ended
    assert all(policy_end not in reply.tokens[:-1] for reply in replies)
    assert all(len(reply.tokens) == 40 or reply in ended for reply in replies)
