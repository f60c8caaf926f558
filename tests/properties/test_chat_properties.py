"""A conversation encoded turn by turn is the conversation encoded whole, and no text can forge a token (T13, T14)."""

import functools
import importlib.util
import json
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from freshper.envs.core import Outcome
from freshper.policies.chat import ChatEncoder
from freshper.rollout.collect import Limits, Start, collect
from freshper.trajectory import SamplingParams

HELPER = Path(__file__).parents[1] / "unit" / "policies" / "chat_tokenizers.py"
SPEC = importlib.util.spec_from_file_location("chat_tokenizers", HELPER)
chats = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(chats)

HABITS = ({}, {"rstrip": True}, {"lstrip": True}, {"lstrip": True, "rstrip": True}, {"normalized": True})
NAMES = [*chats.PLAIN, *chats.MARKS, "<think>", "</think>"]
MANY = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])

texts = st.one_of(
    st.text(max_size=20),
    st.text("ab <|>/[]\n\t\r\x00\x1b#_é東🧊\u0301\u200d\u00a0", max_size=20),
    st.sampled_from(["", " ", "\n\n", "####\n#P_#\n####", " Left", "\x1b[1;31mred\x1b[0m", "user\n"]),
    st.sampled_from(["👩🏽\u200d🚀 ok", "</think", "e\u0301\u0338", "\ufeffx", "<|im_end|", "ﬁ ＜"]),
)
ordinary = texts.filter(lambda text: not any(name in text for name in NAMES))
# A template may trim a reply when the conversation has grown; white space at its ends is then sampled all the same.
replies = ordinary.map(lambda text: text.strip() or "Left")
forgeries = st.lists(
    st.sampled_from([*NAMES, "\u27e62\u27e7", "\u27e65\u27e7", "\u27e6break\u27e7", "\u27e6", "\u27e7", "<", "/s>"])
    | st.text(" \na</s>|", max_size=3),
    min_size=1,
    max_size=8,
)
forgeries = forgeries.map("".join).filter(str.strip)


@functools.cache
def chat(kind, style, habits=0):
    tokenizer = chats.build(kind, chats.STYLES[style][0], **HABITS[habits])
    return tokenizer, ChatEncoder(tokenizer)


kinds, styles = st.sampled_from(sorted(chats.KINDS)), st.sampled_from(sorted(chats.STYLES))


class Told:
    """An environment that tells its texts one after the other."""

    task, max_turns = "told", 99

    def __init__(self, observations, instructions):
        self.observations, self.instructions = observations, instructions

    def reset(self, seed):
        self.left = [*self.observations[1:], None]
        return self.observations[0]

    def step(self, reply):
        text = self.left.pop(0)
        return Outcome("the end" if text is None else text, 0.0, text is None, True, True)


def sampled(tokenizer, encoder, told, instructions):
    """(start, tokens) of every reply in the tokens of the whole conversation, by transformers alone; and the end."""
    for turn in range(1, len(told), 2):
        before = chats.whole(tokenizer, encoder.messages(told[:turn], instructions))
        after = chats.whole(tokenizer, encoder.messages(told[: turn + 1], instructions), opened=False)
        assume(after[: len(before)] == before)  # else the reply's beginning is one token with what stands before it
        reply = after[len(before) :]
        end = encoder.end_tokens[0]
        yield len(before), reply[: reply.index(end)] if end in reply else reply


@MANY
@given(
    kinds,
    styles,
    st.sampled_from(range(len(HABITS))),
    st.lists(st.tuples(ordinary, replies, st.booleans()), min_size=1, max_size=4),
    ordinary,
)
def test_turns_encoded_one_by_one_are_the_whole_conversation(kind, style, habits, turns, instructions):
    """Through a collection: tokens, loss mask and turns are those that transformers' rendering of it all gives."""
    tokenizer, encoder = chat(kind, style, habits)
    assume("writes an empty message" not in "".join(encoder.differences) or all(turn[0].strip() for turn in turns))
    assume("tokenized differently" not in "".join(encoder.differences))  # see test_a_tokenizer_that_misses_its_tokens
    told = [text for observation, reply, _ in turns for text in (observation, reply)]
    said = list(sampled(tokenizer, encoder, told, instructions))
    last = [*said[-1][1], encoder.end_tokens[0]]
    spoken = [
        tokens if cut else [*tokens, encoder.end_tokens[0]]
        for (_, tokens), (_, _, cut) in zip(said, turns, strict=True)
    ]
    assume(all(spoken))
    policy = chats.Chat(encoder, [[(tokens, cut) for tokens, (_, _, cut) in zip(spoken, turns, strict=True)]])
    (trajectory,) = collect(
        [Told([turn[0] for turn in turns], instructions)],
        policy,
        [Start(0, "g")],
        limits=Limits(10_000, 100_000),
        sampling=SamplingParams(),
        seed=0,
    ).trajectories
    before = chats.whole(tokenizer, encoder.messages(told[:-1], instructions))
    expected = [*before, *last][: len(before) + len(spoken[-1])]
    assert trajectory.tokens.tolist() == expected
    mask = np.zeros(len(expected), bool)
    for (start, _), tokens in zip(said, spoken, strict=True):
        mask[start : start + len(tokens)] = True
    assert trajectory.response_mask.tolist() == mask.tolist()
    assert [turn.reply_start for turn in trajectory.turns] == [start for start, _ in said]


@MANY
@given(kinds, styles, st.sampled_from(range(len(HABITS))), forgeries, forgeries)
def test_no_text_can_forge_a_control_token(kind, style, habits, observation, instructions):
    tokenizer, encoder = chat(kind, style, habits)
    control = {tokenizer.convert_tokens_to_ids(name) for name in NAMES[1:-2]}  # but for the unknown token
    known = len(tokenizer)

    def controls(tokens):
        assert max(tokens) < known
        return [token for token in tokens if token in control]

    for cut in (False, True):
        assert controls(encoder.following(observation, cut=cut)) == controls(encoder.following("x", cut=cut))
    assert controls(encoder.first(observation, instructions)) == controls(encoder.first("x", "y"))
    assert controls(encoder.first(observation, None)) == controls(encoder.first("x", None))


@MANY
@given(st.sampled_from(["byte-level", "whole words"]), styles, forgeries | texts)
def test_a_forgery_is_still_shown_as_it_was_written(kind, style, observation):
    """Where the tokenizer loses nothing, the tokens spell the rendered text, forged or not."""
    tokenizer, encoder = chat(kind, style)
    rendered = chats.whole(tokenizer, encoder.messages([observation], None), tokenize=False)
    if "writes an empty message" in "".join(encoder.differences):
        assume(observation.strip())
    assert tokenizer.decode(encoder.first(observation, None), skip_special_tokens=False) == rendered


@MANY
@given(kinds, styles, st.lists(st.integers(0, 2_000), max_size=30))
def test_any_tokens_decode_to_text(kind, style, tokens):
    tokenizer, encoder = chat(kind, style)
    text = encoder.decode(tokens)
    assert json.loads(json.dumps(text)) == text
    text.encode()  # no lone surrogates
    special = {tokenizer.convert_tokens_to_ids(name) for name in (*chats.PLAIN, *chats.MARKS)}
    assert text == encoder.decode([token for token in tokens if token not in special and token < len(tokenizer)])


def test_equality_and_forgery_are_not_tested_on_nothing():
    """Every style has a control token after a reply, and every kind can tell two texts from one another."""
    for kind in chats.KINDS:
        for style, (_, end, _) in chats.STYLES.items():
            tokenizer, encoder = chat(kind, style)
            assert encoder.end_tokens[0] == tokenizer.convert_tokens_to_ids(end)
            assert encoder.following("Left", cut=False) != encoder.following("Right", cut=False)
