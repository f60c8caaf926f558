"""The policy that answers from a function."""

import torch

from freshper.policies.core import Reply, reply_all
from freshper.policies.scripted import ScriptedPolicy
from freshper.trajectory import SamplingParams


def ask(policy, observation, limit=100):
    [reply] = reply_all(policy.begin(1, SamplingParams(), 0), [0], [policy.encode_turn(observation, None)], [limit])
    return reply


def test_it_answers_what_the_function_says():
    policy = ScriptedPolicy(lambda observation: f"you said {observation} \u2190")
    reply = ask(policy, "h\u00e9llo \U0001f45f")
    assert policy.decode(reply.tokens) == "you said h\u00e9llo \U0001f45f \u2190"
    assert reply.logprobs == (0.0,) * len(reply.tokens)


def test_a_long_answer_is_cut():
    policy = ScriptedPolicy(lambda observation: "\u20ac" * 10)
    reply = ask(policy, "x", limit=4)
    assert len(reply.tokens) == len(reply.logprobs) == 4
    assert policy.decode(reply.tokens) == "\u20ac\ufffd"
    assert reply.cut
    assert not ask(policy, "x", limit=31).cut  # 30 bytes and the end
    assert ask(policy, "x", limit=30).cut


def test_an_empty_answer_is_one_token():
    policy = ScriptedPolicy(lambda observation: "")
    assert ask(policy, "x") == Reply((256,), (0.0,))
    assert policy.decode(ask(policy, "x").tokens) == ""


def test_every_row_gets_its_own_answer():
    policy = ScriptedPolicy(str.upper)
    prompts = [policy.encode_turn(text, "ignored") for text in ("a", "bc")]
    replies = reply_all(policy.begin(3, SamplingParams(), 0), [0, 2], prompts, [9, 9])
    assert [policy.decode(reply.tokens) for reply in replies] == ["A", "BC"]


def test_publish_changes_the_version():
    policy = ScriptedPolicy(str.upper, version=3)
    assert policy.version == 3
    policy.publish(torch.nn.Identity(), 4)
    assert policy.version == 4
