"""The cache that is kept across turns, with pictures: as one pass over the whole conversation would have it."""

import io
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from PIL import Image

from freshper.errors import PolicyError
from freshper.policies.tiny_vision import PICTURE, TinyVisionPolicy, build_processor, build_seeing_model
from freshper.policies.tiny_vision import build_seeing_tokenizer as build_tokenizer
from freshper.trajectory import SamplingParams

torch.set_num_threads(1)


def picture(seed, width=32, height=32):
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


PICTURES = [picture(0), picture(1, 64, 16), picture(2, 16, 48), picture(3, 64, 64)]


def new_policy():
    tokenizer = build_tokenizer(["look at this", "<answer> Left </answer>"])
    model = build_seeing_model(tokenizer, hidden_size=32, layers=2, heads=2, context=512, seed=0)
    return TinyVisionPolicy(model, tokenizer, build_processor())


@pytest.fixture(scope="module")
def policy():
    return new_policy()


@dataclass
class Row:
    """What was said in a conversation; log-probs are None on prompts."""

    tokens: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    images: list = field(default_factory=list)


def talk(policy, plan, *, seed=0, count=4):
    """Play ``plan``: for every turn, which rows speak and with which pictures. Rows that fall silent are closed."""
    conversations = policy.begin(count, SamplingParams(), seed)
    rows = [Row() for _ in range(count)]
    for number, turn in enumerate(plan):
        for row, images in turn.items():
            prompt = policy.encode_turn("look at this " * (row + 1), None, images=images)
            conversations.submit(row, prompt, 2 + row, images)
            rows[row].tokens += prompt
            rows[row].logprobs += [None] * len(prompt)
            rows[row].images += images
        answered = set()
        while answered < turn.keys():
            for row, reply in conversations.finished():
                rows[row].tokens += reply.tokens
                rows[row].logprobs += reply.logprobs
                answered.add(row)
        for row in turn:
            if not any(row in later for later in plan[number + 1 :]):
                conversations.close_row(row)
    return rows


@torch.inference_mode()
def gap(policy, rows):
    """The largest difference between recorded log-probs and those of one right-padded pass over everything."""
    rows = [row for row in rows if row.tokens]
    width = max(len(row.tokens) for row in rows)
    tokens = torch.tensor([[*row.tokens, *[0] * (width - len(row.tokens))] for row in rows])
    mask = torch.tensor([[1] * len(row.tokens) + [0] * (width - len(row.tokens)) for row in rows])
    inputs = {"input_ids": tokens, **policy.picture_inputs(tokens, [row.images for row in rows])}
    logprobs = policy.model(attention_mask=mask, use_cache=False, **inputs).logits.log_softmax(-1)
    return max(
        abs(float(logprobs[index, place - 1, row.tokens[place]]) - value)
        for index, row in enumerate(rows)
        for place, value in enumerate(row.logprobs)
        if value is not None
    )


A, B, C, D = ([image] for image in PICTURES)
PLANS = {
    "one picture a turn": [{0: A, 1: B}, {0: C, 1: D}, {0: D, 1: A}],
    "some turns without": [{0: A, 1: []}, {0: [], 1: B}, {0: [], 1: []}, {0: C, 1: D}],
    "several in a turn": [{0: [*A, *B, *C], 1: D}, {0: [], 1: [*B, *B]}],
    "none at all": [{0: [], 1: []}, {0: [], 1: []}],
    "rows come and go": [{0: A, 1: B}, {1: C, 2: D}, {2: A, 3: B}, {3: [], 1: A}],
    "a row waits": [{0: A, 1: B, 2: C}, {1: D}, {0: B, 1: [], 2: A}],
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("seed", range(3))
def test_recorded_log_probs_are_those_of_one_pass(policy, plan, seed):
    rows = talk(policy, PLANS[plan], seed=seed)
    assert sum(len(row.tokens) for row in rows) > 20
    assert gap(policy, rows) < 1e-5


def test_a_picture_of_the_first_turn_is_still_seen_in_the_third():
    policy = new_policy()
    first, other = (talk(policy, [{0: [image]}, {0: []}, {0: []}], seed=1) for image in (PICTURES[0], picture(9)))
    assert first[0].logprobs != other[0].logprobs


@pytest.mark.parametrize("plan", ["one picture a turn", "several in a turn", "none at all"])
def test_a_placeholder_that_was_sampled_is_no_picture(plan):
    """A model that says little else: the pictures of later turns stay where they are, and the log-probs are right."""
    policy = new_policy()
    placeholder = policy.tokenizer.token_to_id(PICTURE)

    def loud(module, arguments, logits):
        logits = logits.clone()
        logits[..., placeholder] += 8
        return logits

    hook = policy.model.lm_head.register_forward_hook(loud)
    try:
        rows = talk(policy, PLANS[plan], seed=1)
        said = [t for row in rows for t, v in zip(row.tokens, row.logprobs, strict=True) if v is not None]
        assert said.count(placeholder) > len(said) / 2
        assert gap(policy, rows) < 1e-5
    finally:
        hook.remove()


@pytest.mark.parametrize(
    ("shown", "given", "match"),
    [
        ([0], [], None),  # the placeholders are read as text
        ([], [0], "no place for picture 0 of 1"),
        ([0], [1], None),  # 4 tokens each: no size tells them apart
        ([0], [2], "no place for picture 0 of 1"),
        ([0, 1], [0, 1, 1], "no place for picture 2 of 3"),
        ([2, 0], [0, 2], "no place for picture 1 of 2"),
    ],
)
def test_pictures_that_are_not_those_of_the_prompt_change_nothing(policy, shown, given, match):
    conversations = policy.begin(1, SamplingParams(), 0)
    prompt = policy.encode_turn("look", None, images=[PICTURES[number] for number in shown])
    images = [PICTURES[number] for number in given]
    if match:
        with pytest.raises(PolicyError, match=match):
            conversations.submit(0, prompt, 2, images)
        assert conversations.finished() == []
    conversations.submit(0, prompt if not match else policy.encode_turn("look", None), 2, () if match else images)
    [(row, reply)] = conversations.finished()
    assert (row, len(reply.tokens) <= 2) == (0, True)


def test_a_refused_prompt_leaves_the_pictures_of_the_waiting_one(policy):
    conversations = policy.begin(1, SamplingParams(), 0)
    first = policy.encode_turn("look", None, images=[PICTURES[3]])
    conversations.submit(0, first, 2, [PICTURES[3]])
    with pytest.raises(PolicyError, match="still waits"):
        conversations.submit(0, policy.encode_turn("look", None, images=[PICTURES[2]]), 2, [PICTURES[2]])
    [(_, reply)] = conversations.finished()
    assert gap(policy, [Row([*first, *reply.tokens], [None] * len(first) + list(reply.logprobs), [PICTURES[3]])]) < 1e-5


def test_a_conversation_cannot_outgrow_the_model(policy):
    images = [PICTURES[3]] * 27
    prompt = policy.encode_turn("look", None, images=images)
    with pytest.raises(PolicyError, match=r"would reach \d+ tokens, the model's limit is 512"):
        policy.begin(1, SamplingParams(), 0).submit(0, [*prompt, *[8] * 30], 8, images)
