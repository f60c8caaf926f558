"""The embedded policy that sees: its turns, its folder, and what transformers makes of it."""

import io
import json

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from freshper.errors import EnvError, SnapshotError
from freshper.policies.core import SeeingPolicy, check_policy, reply_all
from freshper.policies.tiny import ASSISTANT, END, SPECIAL, TinyPolicy, build_model
from freshper.policies.tiny import build_tokenizer as build_blind_tokenizer
from freshper.policies.tiny_vision import (
    BEGIN,
    CLOSE,
    PICTURE,
    PICTURE_TOKENS,
    TinyVisionPolicy,
    build_processor,
    build_seeing_model,
    build_seeing_tokenizer,
    load_tiny,
)
from freshper.trajectory import SamplingParams

torch.set_num_threads(1)

TEXTS = ["The picture shows the lake.", "<answer> Left </answer>", "<answer> Up </answer>"]
SHAPE = {"hidden_size": 32, "layers": 2, "heads": 2, "context": 128}


def picture(seed, width=32, height=32):
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


SQUARE, WIDE = picture(0), picture(1, 48, 16)


@pytest.fixture(scope="module")
def seer():
    tokenizer = build_seeing_tokenizer(TEXTS)
    return TinyVisionPolicy(build_seeing_model(tokenizer, **SHAPE, seed=0), tokenizer, build_processor(), version=7)


def marks(policy, *tokens):
    return [policy.tokenizer.token_to_id(token) for token in tokens]


def test_pictures_stand_before_the_words_of_their_turn(seer):
    begin, place, close, ask = marks(seer, BEGIN, PICTURE, CLOSE, ASSISTANT)
    words = seer.encode_turn(TEXTS[0], "instructions")
    assert words[-1] == ask
    assert len(words) == 6
    assert seer.encode_turn(TEXTS[0], None, images=[SQUARE, WIDE]) == [
        *(begin, *[place] * 4, close),
        *(begin, *[place] * 3, close),
        *words,
    ]
    assert seer.decode(seer.encode_turn(TEXTS[0], None, images=[SQUARE])) == TEXTS[0]


@pytest.mark.parametrize("images", [[], [SQUARE], [WIDE, SQUARE]])
def test_the_contract(seer, images):
    """A prompt is submitted without pictures there, as it would be by a caller that does not know of any."""
    check_policy(seer, seer.encode_turn(TEXTS[0], None, images=images), 6)
    assert isinstance(seer, SeeingPolicy)
    assert seer.version == 7


def test_what_is_no_picture_is_the_environments_error(seer):
    with pytest.raises(EnvError, match="no picture"):
        seer.encode_turn("look", None, images=[SQUARE, b"GIF89a"])


@pytest.mark.parametrize("text", [PICTURE, f"{BEGIN}{PICTURE}{CLOSE}", f"x{PICTURE}y {END}", f"{PICTURE}{PICTURE}"])
def test_no_text_can_forge_a_picture(seer, tmp_path, text):
    seer.save(tmp_path)
    hostile = TinyVisionPolicy(seer.model, build_seeing_tokenizer([text] * 50), build_processor())
    for policy in (seer, load_tiny(tmp_path), hostile):
        words = policy.encode_turn(text, None)[:-1]
        assert not set(marks(policy, *SPECIAL, *PICTURE_TOKENS)) & set(words)
        assert policy.decode(words) == " ".join(text.split())


def test_the_vocabulary_is_bounded_pictures_included():
    assert build_seeing_tokenizer(TEXTS, vocab_size=120).get_vocab_size() == 120


def test_the_words_are_those_of_the_policy_that_reads():
    blind = build_blind_tokenizer(TEXTS, vocab_size=4093)
    for text in TEXTS:
        assert build_seeing_tokenizer(TEXTS).encode(text).ids == blind.encode(text).ids


def test_the_seed_alone_decides_the_weights():
    tokenizer = build_seeing_tokenizer(TEXTS)

    def weights(seed):
        return build_seeing_model(tokenizer, **SHAPE, seed=seed).state_dict()

    state = torch.random.get_rng_state()
    first, again, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
    assert torch.equal(state, torch.random.get_rng_state())


def test_weights_keep_the_size_of_what_goes_through_them():
    """A standard deviation of 0.7 / sqrt(inputs), in the vision tower too: with 0.02 nothing is learned."""
    model = build_seeing_model(build_seeing_tokenizer(TEXTS), **SHAPE, seed=0)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            assert float(weight.detach().std()) * (weight.numel() / len(weight)) ** 0.5 == pytest.approx(
                0.7, rel=0.1
            ), name
    assert model.lm_head.weight is model.model.language_model.embed_tokens.weight


def test_the_default_size_is_a_quarter_of_a_million_parameters():
    shape = {"hidden_size": 64, "layers": 3, "heads": 4, "context": 512}
    model = build_seeing_model(build_seeing_tokenizer(TEXTS), **shape, seed=0)
    assert 220_000 < sum(weight.numel() for weight in model.parameters()) < 280_000


@pytest.mark.parametrize(("hidden_size", "heads"), [(16, 1), (16, 2), (24, 3), (64, 4), (128, 8)])
def test_any_shape_that_the_reading_policy_takes(hidden_size, heads):
    tokenizer = build_seeing_tokenizer(TEXTS)
    model = build_seeing_model(tokenizer, hidden_size=hidden_size, heads=heads, layers=1, context=64, seed=0)
    policy = TinyVisionPolicy(model, tokenizer, build_processor())
    tokens = torch.tensor([policy.encode_turn("look", None, images=[WIDE])])
    with torch.inference_mode():
        first = policy.model(input_ids=tokens, **policy.picture_inputs(tokens, [[WIDE]])).logits
        other = policy.model(input_ids=tokens, **policy.picture_inputs(tokens, [[picture(5, 48, 16)]])).logits
    assert first.isfinite().all()
    assert not torch.equal(first[0, -1], other[0, -1])


def test_a_saved_policy_comes_back_the_same(seer, tmp_path):
    seer.save(tmp_path)
    loaded = load_tiny(tmp_path)
    assert isinstance(loaded, TinyVisionPolicy)
    assert loaded.version == seer.version
    turn = seer.encode_turn("look Zebra", None, images=[WIDE])
    assert loaded.encode_turn("look Zebra", None, images=[WIDE]) == turn
    tokens = torch.tensor([turn])
    with torch.inference_mode():
        assert torch.equal(
            *(p.model(input_ids=tokens, **p.picture_inputs(tokens, [[WIDE]])).logits for p in (seer, loaded))
        )


def test_the_folder_says_what_kind_it_holds(seer, tmp_path):
    words = build_blind_tokenizer(TEXTS)
    blind = TinyPolicy(build_model(words.get_vocab_size(), **SHAPE, seed=0), words)
    blind.save(tmp_path)
    assert type(load_tiny(tmp_path)) is TinyPolicy
    with pytest.raises(SnapshotError, match="holds no policy that sees"):
        TinyVisionPolicy.load(tmp_path)
    seer.save(tmp_path)
    assert type(load_tiny(tmp_path)) is TinyVisionPolicy


FILES = ("config.json", "model.safetensors", "tokenizer.json", "preprocessor_config.json", "tokenizer_config.json")


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_refused(seer, tmp_path, name):
    seer.save(tmp_path)
    content = bytearray((tmp_path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SnapshotError, match=f"{name} changed"):
        load_tiny(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(SnapshotError, match=r"no whole policy .*No such file"):
        load_tiny(tmp_path)


@pytest.mark.parametrize(
    "facts", ["", "[]", "7", "{", '{"sees_pictures": true}', '{"sees_pictures": true, "sha256": {}}']
)
def test_damaged_facts_are_refused(seer, tmp_path, facts):
    seer.save(tmp_path)
    (tmp_path / "freshper.json").write_text(facts)
    with pytest.raises(SnapshotError, match="holds no"):
        load_tiny(tmp_path)


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(SnapshotError, match="nowhere"):
        load_tiny(tmp_path / "nowhere")


def test_transformers_loads_the_folder_and_its_parts_give_our_tokens(seer, tmp_path):
    seer.save(tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32)
    cut = AutoImageProcessor.from_pretrained(tmp_path)(images=[Image.open(io.BytesIO(WIDE))], return_tensors="pt")
    tokens = torch.tensor([seer.encode_turn(TEXTS[0], None, images=[WIDE])])
    kinds = (tokens == model.config.image_token_id).int()
    with torch.inference_mode():
        theirs = model(input_ids=tokens, mm_token_type_ids=kinds, **cut).logits
        ours = seer.model(input_ids=tokens, **seer.picture_inputs(tokens, [[WIDE]])).logits
    assert torch.equal(theirs, ours)
    assert model.config.text_config.eos_token_id == seer.tokenizer.token_to_id(END)


def test_the_saved_template_writes_our_conversations(seer, tmp_path):
    """One placeholder a picture, as transformers' processors expect it: they put in as many as the picture needs."""
    seer.save(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    parts = [{"type": "image"}, {"type": "text", "text": TEXTS[0]}]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "<answer> Up </answer>"},
        {"role": "user", "content": "look"},
    ]
    ours = [*seer.encode_turn(TEXTS[0], None, images=[picture(0, 16, 16)]), *seer.encode_reply("<answer> Up </answer>")]
    assert tokenizer.apply_chat_template(messages, return_dict=False) == [*ours, *seer.encode_turn("look", None)]


def test_publish_changes_weights_and_version(seer):
    policy = TinyVisionPolicy(seer.model, seer.tokenizer, seer.processor)
    policy.publish(build_seeing_model(seer.tokenizer, **SHAPE, seed=3), 5)
    assert policy.version == 5
    prompt = policy.encode_turn("look", None)
    replies = [reply_all(p.begin(1, SamplingParams(temperature=0.0), 0), [0], [prompt], [8])[0] for p in (seer, policy)]
    assert replies[0].tokens != replies[1].tokens


def test_facts_are_plain_and_whole(seer, tmp_path):
    seer.save(tmp_path)
    facts = json.loads((tmp_path / "freshper.json").read_text())
    assert facts["policy_version"] == 7
    assert set(FILES) <= facts["sha256"].keys()
