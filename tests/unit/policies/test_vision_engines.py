"""Conversations with pictures, whichever engine plays them, against one forward pass over the finished conversation."""

import importlib.util
import io
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import ImageOps

from freshper.errors import PolicyError
from freshper.policies import vision_engines
from freshper.policies.core import reply_all
from freshper.policies.vision_engines import SeeingReencoding, SeeingSlots, seeing_engine_of, seeing_trial
from freshper.policies.vision_readers import find_reader
from freshper.trajectory import SamplingParams

_spec = importlib.util.spec_from_file_location("vision_zoo", Path(__file__).with_name("vision_zoo.py"))
zoo = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(zoo)

ENGINES = {
    "slots": SeeingSlots,
    "together": SeeingReencoding,
    "equal lengths": partial(SeeingReencoding, padded=False),
}
SIZES = [(64, 64), (96, 32), (40, 72), (16, 16)]
SHOWN = [[1, 0, 2], [0, 1, 1], [2, 1, 0], [0, 0, 0], [1, 1, 1]]  # pictures by row and turn


@pytest.fixture(scope="module", params=zoo.FAMILIES)
def seer(request, tmp_path_factory):
    """A model with its reader."""
    folder = tmp_path_factory.mktemp(request.param)
    model = zoo.write_model(folder, request.param)
    return model, find_reader(folder, "model", model.config, zoo.make_tokenizer(request.param))


def script(reader, seed=0):
    """Prompts and pictures by row and turn."""
    rng = np.random.default_rng(seed)
    plan = []
    for row, counts in enumerate(SHOWN):
        turns = []
        for turn, count in enumerate(counts):
            images = [zoo.picture(100 * row + 10 * turn + k, *SIZES[rng.integers(4)]) for k in range(count)]
            text = rng.integers(30, 290, rng.integers(1, 9)).tolist()
            prompt = [9, *(t for image in images for t in [*reader.tokens(image), 40]), *text]
            turns.append((prompt, images))
        plan.append(turns)
    return plan


def play(engine, model, reader, *, slots=3, sampling=None, seed=5, limit=4, rows=None):
    """Every row goes on as soon as it has its reply; returns (tokens, log-probs by place, pictures) by row."""
    plan = script(reader)
    rows = range(len(plan)) if rows is None else rows
    conversations = engine(
        model, (-1,), len(plan), sampling or SamplingParams(), seed=seed, max_positions=None, slots=slots, reader=reader
    )
    lines = {row: ([], {}, []) for row in rows}
    turns = dict.fromkeys(rows, 0)

    def ask(row):
        prompt, images = plan[row][turns[row]]
        conversations.submit(row, prompt, limit, images)
        lines[row][0].extend(prompt)
        lines[row][2].extend(images)

    for row in rows:
        ask(row)
    running = set(rows)
    while running:
        for row, reply in conversations.finished():
            tokens, said, _ = lines[row]
            said |= {len(tokens) + k: value for k, value in enumerate(reply.logprobs)}
            tokens.extend(reply.tokens)
            turns[row] += 1
            if turns[row] < len(plan[row]):
                ask(row)
            else:
                conversations.close_row(row)
                running.remove(row)
    return lines


def whole(model, reader, tokens, images):
    """Log-probs (T - 1, V) of one forward pass over a conversation."""
    ids = torch.tensor([tokens])
    with torch.inference_mode():
        logits = model(**({"input_ids": ids} | reader.inputs(ids, [images]))).logits[0].double()
    return torch.log_softmax(logits, -1)


@pytest.mark.parametrize("engine", ENGINES)
def test_log_probs_are_those_of_one_forward_pass(seer, engine):
    model, reader = seer
    lines = play(ENGINES[engine], model, reader)
    for tokens, said, images in lines.values():
        logprobs = whole(model, reader, tokens, images)
        assert len(said) == 12
        for place, value in said.items():
            assert value == pytest.approx(float(logprobs[place - 1, tokens[place]]), abs=1e-4)


def test_engines_and_numbers_of_slots_give_the_same_replies(seer):
    """One slot: conversations make room for one another, and their pictures are read again when they come back."""
    model, reader = seer
    ways = [("slots", 1), ("slots", 2), ("slots", 5), ("together", 1), ("together", 5), ("equal lengths", 3)]
    plays = [play(ENGINES[engine], model, reader, slots=slots) for engine, slots in ways]
    for lines in plays[1:]:
        assert {row: line[0] for row, line in lines.items()} == {row: line[0] for row, line in plays[0].items()}


def test_a_row_says_the_same_alone(seer):
    model, reader = seer
    together = play(SeeingSlots, model, reader)
    for row in (0, 2):
        assert play(SeeingSlots, model, reader, rows=[row])[row][0] == together[row][0]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_sampled_placeholder_is_no_picture(seer, engine):
    """The model says nothing but placeholders: later turns with real pictures are read right all the same."""
    model, reader = seer
    ids = torch.tensor([reader.placeholder])
    hook = model.lm_head.register_forward_hook(
        lambda *call: call[2].index_add(-1, ids, torch.full((*call[2].shape[:-1], 1), 9.0))
    )
    try:
        lines = play(ENGINES[engine], model, reader)
        strays = 0
        for tokens, said, images in lines.values():
            logprobs = whole(model, reader, tokens, images)
            strays += sum(tokens[place] == reader.placeholder for place in said)
            for place, value in said.items():
                assert value == pytest.approx(float(logprobs[place - 1, tokens[place]]), abs=1e-4)
        assert strays > 20
    finally:
        hook.remove()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_prompt_and_pictures_that_do_not_belong_together_change_nothing(seer, engine):
    model, reader = seer
    conversations = ENGINES[engine](model, (), 1, SamplingParams(), seed=0, max_positions=None, slots=1, reader=reader)
    image = zoo.picture(1)
    with pytest.raises(PolicyError, match="no place for picture 0"):
        conversations.submit(0, [5, 6], 2, [image])
    [reply] = reply_all(conversations, [0], [[5, 6]], [2])
    assert len(reply.tokens) == 2


def test_the_engine_with_a_kept_cache_is_found_and_remembered(seer):
    model, reader = seer
    engine = seeing_engine_of(model, reader)
    assert engine.build is SeeingSlots
    assert seeing_engine_of(model, None) is engine


def test_an_engine_that_takes_one_picture_for_another_fails_its_trial(seer):
    model, reader = seer

    class Mistaken(SeeingSlots):
        def submit(self, row, prompt, max_tokens, images=()):
            """Spans are looked for before; then the pixels of another picture of that size are shown."""
            super().submit(row, prompt, max_tokens, images)
            shown = self._gallery._shown[row]
            shown[:] = [(span, mirrored(image)) for span, image in shown]

    assert "off by" in seeing_trial(model, reader, Mistaken)
    assert seeing_trial(model, reader, SeeingSlots) == ""


def mirrored(image):
    file = io.BytesIO()
    ImageOps.flip(zoo.opened(image)).save(file, "PNG")
    return file.getvalue()


def test_where_no_cache_can_be_kept_conversations_are_read_again(seer, monkeypatch):
    model, reader = seer
    tried = []

    def wrong(model, reader, build):
        tried.append(build)
        return "a mistake" if len(tried) < 3 else ""

    monkeypatch.setattr(vision_engines, "seeing_trial", wrong)
    engine = vision_engines._first_right(model, reader)
    assert engine.reason.startswith("by reading each conversation again in every turn, rows by equal length")
    monkeypatch.setattr(vision_engines, "seeing_trial", lambda *_: "a mistake")
    with pytest.raises(PolicyError, match="no engine samples"):
        vision_engines._first_right(model, reader)


def test_greedy_replies_do_not_depend_on_the_seed(seer):
    model, reader = seer
    greedy = SamplingParams(temperature=0.0)
    one, other = (play(SeeingSlots, model, reader, sampling=greedy, seed=seed) for seed in (1, 2))
    assert one == other
    assert play(SeeingSlots, model, reader, seed=1) != play(SeeingSlots, model, reader, seed=2)
