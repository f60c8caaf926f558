"""What image-text models are given to see, against transformers' own processors and models."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoImageProcessor

from freshper.errors import ConfigError, EnvError, PolicyError
from freshper.policies.chat import ChatEncoder
from freshper.policies.vision_readers import TileReader, auto_class, find_reader, processor_template, reads_pictures

_spec = importlib.util.spec_from_file_location("vision_zoo", Path(__file__).with_name("vision_zoo.py"))
zoo = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(zoo)

PICTURES = [zoo.picture(1), zoo.picture(2, 96, 32), zoo.picture(3, 40, 72), zoo.picture(4, 16, 16)]


@pytest.fixture(scope="module", params=zoo.FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def model(family):
    return zoo.make_model(family)


@pytest.fixture(scope="module")
def tokenizer(family):
    return zoo.make_tokenizer(family)


@pytest.fixture
def reader(family, tokenizer, tmp_path):
    zoo.make_processor(family).save_pretrained(tmp_path)
    return find_reader(tmp_path, "model", zoo.config_of(family, tokenizer), tokenizer)


def rows_of(reader, shown):
    """Conversations of text, each picture between two words, as token lists."""
    return [[9, *(t for image in images for t in [*reader.tokens(image), 40, 41]), 42] for images in shown]


def padded(rows):
    width = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    return tokens, (torch.arange(width)[None] < torch.tensor([[len(row)] for row in rows])).long()


def forward(model, tokens, mask, given):
    with torch.inference_mode():
        return model(**({"input_ids": tokens, "attention_mask": mask} | given)).logits


def test_a_turn_becomes_the_tokens_of_the_processor_and_of_its_whole_conversation(
    family, tokenizer, reader, monkeypatch
):
    """One turn and several, with no, one, two and three pictures, system message included."""
    processor = zoo.make_full_processor(family, tokenizer, monkeypatch)
    chat = ChatEncoder(tokenizer, picture=reader.picture)
    space = " " if family in zoo.TILES else ""  # these templates put one before replies: it belongs to the reply
    counts, left = [1, 0, 2, 3], iter(PICTURES * 2)
    texts, ours, images = [], [], []
    for turn, count in enumerate(counts):
        shown = [next(left) for _ in range(count)]
        texts.append(f"The picture shows turn {turn}.")
        tokens = (
            chat.first(texts[-1], "Cross the lake.", pictures=count)
            if turn == 0
            else chat.following(texts[-1], cut=False, pictures=count)
        )
        parts = iter(shown)
        ours += [one for t in tokens for one in (reader.expansion(next(parts)) if t == reader.placeholder else [t])]
        images += shown
        messages = chat.messages(texts, "Cross the lake.", pictures=counts[: turn + 1])
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        whole = processor(text=[text], images=[[zoo.opened(image) for image in images]], return_tensors="pt")
        assert ours == whole["input_ids"][0].tolist()
        texts.append("<answer> Up </answer>")
        ours += [*tokenizer.encode(space + texts[-1]), chat.end_tokens[0]]
    assert chat.differences == ()


def test_what_the_model_is_given_is_what_the_processor_gives(family, model, tokenizer, reader, monkeypatch):
    """Two rows of unequal length with unequal numbers of pictures: the same logits, bit for bit."""
    processor = zoo.make_full_processor(family, tokenizer, monkeypatch)
    shown = [[PICTURES[0], PICTURES[1]], [PICTURES[2]]]
    around = reader.picture if family in zoo.TILES else f"<|vision_start|>{reader.picture}<|vision_end|>"
    texts = [f"Left {around} Up {around} lake.", f"Left {around} Up"]
    given = processor(
        text=texts,
        images=[[zoo.opened(image) for image in images] for images in shown],
        return_tensors="pt",
        padding=True,
        padding_side="right",
    )
    tokens, mask = given["input_ids"], given["attention_mask"]
    with torch.inference_mode():
        theirs = model(**given).logits
    ours = forward(model, tokens, mask, reader.inputs(tokens, shown))
    assert torch.equal(ours[mask.bool()], theirs[mask.bool()])


def test_positions_are_those_of_the_model(family, model, reader):
    shown = [[PICTURES[0], PICTURES[1]], [], [PICTURES[2]]]
    tokens, mask = padded(rows_of(reader, shown))
    given = reader.inputs(tokens, shown)
    if family in zoo.TILES:
        assert "position_ids" not in given
        assert reader.positions(5, (), ()) is None
        return
    theirs, _ = model.model.get_rope_index(
        tokens, given["mm_token_type_ids"], image_grid_thw=given["image_grid_thw"], attention_mask=mask
    )
    assert torch.equal(given["position_ids"][:, mask.bool()], theirs[:, mask.bool()])


def test_every_picture_matters_and_none_reaches_another_row(model, reader):
    shown = [[PICTURES[0], PICTURES[1]], [PICTURES[2]]]
    tokens, mask = padded(rows_of(reader, shown))
    logits = forward(model, tokens, mask, reader.inputs(tokens, shown))
    other = zoo.picture(9, 96, 32)
    changed = forward(model, tokens, mask, reader.inputs(tokens, [[PICTURES[0], other], [PICTURES[2]]]))
    assert (changed[0, -1] - logits[0, -1]).abs().max() > 1e-2
    assert torch.equal(changed[1], logits[1])


def test_text_alone_is_read_as_the_model_reads_it(model, reader):
    tokens = torch.tensor([[9, 40, 41, 42], [9, 8, 0, 0]])
    assert reader.inputs(tokens, [[], []]) == {}
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    assert forward(model, tokens, mask, {}).shape == (2, 4, zoo.VOCABULARY)


def test_a_placeholder_that_was_sampled_is_read_as_another_token(model, reader):
    """It must not take a picture's place, and the model must not fail over it, before and behind a picture."""
    images = [[PICTURES[0]]]
    [row] = rows_of(reader, images)
    row = [9, reader.placeholder, *row, reader.placeholder, reader.placeholder, 40]
    tokens, mask = padded([row])
    given = reader.inputs(tokens, images)
    replaced = given["input_ids"][0] != tokens[0]
    assert replaced.nonzero()[:, 0].tolist() == [1, len(row) - 3, len(row) - 2]
    assert forward(model, tokens, mask, given).isfinite().all()
    assert "input_ids" not in reader.inputs(*[padded(rows_of(reader, images))[0], images])


def test_pictures_that_have_no_place_are_refused(reader):
    tokens, _ = padded(rows_of(reader, [[PICTURES[0]]]))
    with pytest.raises(PolicyError, match="no place for picture 0 of 1"):
        reader.inputs(tokens, [[PICTURES[1]]])
    with pytest.raises(PolicyError, match="no place for picture 1 of 2"):
        reader.inputs(tokens, [[PICTURES[0], PICTURES[0]]])


@pytest.mark.parametrize("content", [b"", b"no picture", PICTURES[0][:60], b"\x89PNG\r\n\x1a\n" + b"\0" * 50])
def test_what_is_no_picture_is_the_environment_s_error(reader, content):
    with pytest.raises(EnvError, match="picture"):
        reader.tokens(content)


def test_pixels_are_forgotten_when_there_are_too_many_and_made_again(reader, monkeypatch):
    for module in ("vision._PIXEL_BYTES", "vision_readers._KEPT_BYTES"):
        monkeypatch.setattr(f"freshper.policies.{module}", 1)
    first = reader.tokens(PICTURES[0])
    for image in PICTURES:
        reader.tokens(image)
        assert list(reader._kept) == [image]
    assert reader.tokens(PICTURES[0]) == first


HUB = {  # settings in the forms that the hub's folders have
    "qwen2_5_vl": {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "min_pixels": 1024,
        "max_pixels": 4096,
        "patch_size": 8,
        "merge_size": 2,
        "temporal_patch_size": 2,
    },
    "qwen3_vl": {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "size": {"shortest_edge": 1024, "longest_edge": 4096},
        "patch_size": 8,
        "merge_size": 2,
        "temporal_patch_size": 2,
    },
    "smolvlm": {
        "image_processor_type": "SmolVLMImageProcessor",
        "processor_class": "SmolVLMProcessor",
        "max_image_size": {"longest_edge": 32},
        "size": {"longest_edge": 32},
        "video_sampling": {"fps": 1, "max_frames": 64},
    },
    "idefics3": {
        "image_processor_type": "Idefics3ImageProcessor",
        "processor_class": "Idefics3Processor",
        "max_image_size": {"longest_edge": 32},
        "size": {"longest_edge": 32},
    },
}


@pytest.mark.parametrize("kind", HUB)
def test_settings_as_they_stand_on_the_hub_are_followed(tmp_path, kind):
    """The largest size bounds the tokens of a picture that is larger: 4096 pixels are 16 tokens, one tile has 4."""
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(HUB[kind]))
    tokenizer = zoo.make_tokenizer(kind)
    reader = find_reader(tmp_path, "mine", zoo.config_of(kind, tokenizer), tokenizer)
    count = reader.tokens(zoo.picture(0, 160, 160)).count(reader.placeholder)
    assert count == (16 if kind in zoo.GRIDS else 4)


def test_a_folder_without_an_image_processor_is_refused(family, tokenizer, tmp_path):
    with pytest.raises(ConfigError, match="image processor of model 'mine' cannot be read"):
        find_reader(tmp_path, "mine", zoo.config_of(family, tokenizer), tokenizer)


def test_a_tokenizer_without_the_picture_s_token_is_refused(family, tokenizer, tmp_path):
    zoo.make_processor(family).save_pretrained(tmp_path)
    config = zoo.config_of(family, tokenizer)
    for wrong in (0, 399):
        config.image_token_id = wrong
        with pytest.raises(ConfigError, match=f"token {wrong}, which its tokenizer cannot write"):
            find_reader(tmp_path, "mine", config, tokenizer)


def test_tiles_of_another_size_than_the_model_s_are_refused():
    tokenizer = zoo.make_tokenizer("smolvlm")
    processor = zoo.make_processor("smolvlm", max_image_size={"longest_edge": 64})
    with pytest.raises(ConfigError, match="tiles of 64 pixels, the model takes 32"):
        TileReader(processor, tokenizer, zoo.config_of("smolvlm", tokenizer))


def test_pictures_may_be_left_whole(tmp_path):
    """Without tiles a picture of any size is 4 tokens here: what preprocessor_config.json says is followed."""
    tokenizer = zoo.make_tokenizer("smolvlm")
    zoo.make_processor("smolvlm", do_image_splitting=False).save_pretrained(tmp_path)
    reader = find_reader(tmp_path, "mine", zoo.config_of("smolvlm", tokenizer), tokenizer)
    assert [reader.tokens(image).count(reader.placeholder) for image in PICTURES] == [4, 4, 4, 4]


def test_the_processor_needs_no_torchvision(family, tmp_path):
    zoo.make_processor(family).save_pretrained(tmp_path)
    assert type(AutoImageProcessor.from_pretrained(tmp_path, backend="pil")).__name__.endswith("Pil")


def test_families(tokenizer, family):
    config = zoo.config_of(family, tokenizer)
    assert reads_pictures(config)
    assert auto_class(config).__name__ == "AutoModelForImageTextToText"
    assert not reads_pictures(config.get_text_config())
    assert auto_class(config.get_text_config()).__name__ == "AutoModelForCausalLM"


def test_where_a_chat_template_is_looked_for(tmp_path):
    assert processor_template(tmp_path) is None
    (tmp_path / "processor_config.json").write_text(json.dumps({"chat_template": "b", "image_seq_len": 4}))
    assert processor_template(tmp_path) == "b"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "a"}))
    assert processor_template(tmp_path) == "a"
    (tmp_path / "chat_template.jinja").write_text("the tokenizer's own")
    assert processor_template(tmp_path) is None
