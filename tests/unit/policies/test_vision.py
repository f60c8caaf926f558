"""Pictures of a grid: how many tokens, which pixels, which positions; and what is no picture."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from freshper.errors import EnvError, PolicyError
from freshper.policies.tiny_vision import MERGE, PATCH, build_processor, build_seeing_model, build_seeing_tokenizer
from freshper.policies.vision import GridReader, open_picture

BEGIN, PLACE, END = 5, 6, 7
CELL = PATCH * MERGE  # pixels of one token, each way


def encoded(pixels, kind="PNG", mode=None, **how):
    file = io.BytesIO()
    picture = Image.fromarray(pixels)
    (picture.convert(mode) if mode else picture).save(file, kind, **how)
    return file.getvalue()


def noise(seed, width=64, height=64):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.fixture
def reader():
    return GridReader(build_processor(), begin=BEGIN, placeholder=PLACE, end=END)


@pytest.mark.parametrize(
    ("width", "height", "count"),
    [
        *((16, 16, 1), (64, 64, 16), (48, 16, 3), (16, 96, 6), (448, 448, 784)),
        (1, 1, 1),  # made larger: a picture has a token at least
        (20, 41, 3),  # 16 x 48 after rounding to whole tokens
        (900, 900, 784),  # made smaller
    ],
)
def test_sixteen_pixels_each_way_are_one_token(reader, width, height, count):
    assert reader.tokens(encoded(noise(0, width, height))) == [BEGIN, *[PLACE] * count, END]


@pytest.mark.parametrize(("width", "height"), [(64, 64), (32, 64), (48, 16)])
def test_patches_stand_in_the_order_of_the_tokens_that_they_become(reader, width, height):
    """Token by token, row by row; within a token patch by patch, row by row; within a patch color, line, column."""
    pixels = noise(1, width, height)
    given = reader.inputs(torch.tensor([reader.tokens(encoded(pixels))]), [[encoded(pixels)]])
    by_hand = []
    for top in range(0, height, CELL):
        for left in range(0, width, CELL):
            for line in range(top, top + CELL, PATCH):
                for column in range(left, left + CELL, PATCH):
                    patch = pixels[line : line + PATCH, column : column + PATCH].astype(np.float32) / 255
                    by_hand.append((patch.transpose(2, 0, 1).reshape(-1) - 0.5) / 0.5)
    np.testing.assert_allclose(given["pixel_values"].numpy(), np.stack(by_hand), atol=1e-6)
    assert given["image_grid_thw"].tolist() == [[1, height // PATCH, width // PATCH]]


@pytest.mark.parametrize("seed", range(5))
def test_positions_are_those_of_the_model(seed):
    """Conversations of random texts and pictures, padded on the right, against the model's own rule."""
    tokenizer = build_seeing_tokenizer(["a b c"])
    model = build_seeing_model(tokenizer, hidden_size=16, layers=1, heads=1, context=512, seed=0)
    marks = [tokenizer.token_to_id(name) for name in ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")]
    reader = GridReader(build_processor(), begin=marks[0], placeholder=marks[1], end=marks[2])
    rng = np.random.default_rng(seed)
    rows, shown = [], []
    for _ in range(3):
        row, images = [], []
        for _ in range(int(rng.integers(1, 6))):
            if rng.random() < 0.7:
                width, height = CELL * rng.integers(1, 6, 2)
                images.append(encoded(noise(rng.integers(100), width, height)))
                row += reader.tokens(images[-1])
            row += rng.integers(4, 40, rng.integers(1, 8)).tolist()
        rows.append(row)
        shown.append(images)
    width = max(map(len, rows))
    tokens = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    given = reader.inputs(tokens, shown)
    theirs, _ = model.model.get_rope_index(tokens, given["mm_token_type_ids"], given["image_grid_thw"])
    assert torch.equal(given["position_ids"], theirs)


def test_a_conversation_is_searched_for_its_pictures_in_order(reader):
    """A mark of a begin that was sampled, or a picture of another size, is no place for a picture."""
    small, large = encoded(noise(0, 16, 16)), encoded(noise(1, 32, 16))
    row = [BEGIN, 9, *reader.tokens(large), BEGIN, *reader.tokens(small), 9]
    assert reader.spans(row, [large, small]) == [(3, 5), (8, 9)]
    assert reader.spans(row, [small]) == [(8, 9)]
    assert reader.spans(row, []) == []
    with pytest.raises(PolicyError, match="no place for picture 1 of 2"):
        reader.spans(row, [small, large])


def test_a_picture_is_read_once(reader, monkeypatch):
    image = encoded(noise(0))
    reader.tokens(image)
    monkeypatch.setattr(reader, "processor", None)  # would fail, were it asked again
    given = reader.inputs(torch.tensor([reader.tokens(image)]), [[bytes(bytearray(image))]])
    assert given["pixel_values"].shape == (64, 3 * PATCH * PATCH)


def test_what_was_read_while_sampling_can_be_learned_from(reader):
    """Tensors made without gradients in mind must not be what a later backward pass meets."""
    image = encoded(noise(0))
    with torch.inference_mode():
        tokens = torch.tensor([reader.tokens(image)])
        reader.inputs(tokens, [[image]])
    weight = torch.ones(3 * PATCH * PATCH, requires_grad=True)
    given = reader.inputs(torch.tensor([reader.tokens(image)]), [[image]])
    (given["pixel_values"] @ weight).sum().backward()
    assert torch.allclose(weight.grad, given["pixel_values"].sum(0))


@pytest.mark.parametrize(
    ("kind", "mode", "how"),
    [
        *(("PNG", None, {}), ("PNG", "L", {}), ("PNG", "RGBA", {}), ("PNG", "1", {}), ("PNG", "LA", {})),
        *(("PNG", "P", {}), ("PNG", "P", {"transparency": bytes(range(256))}), ("PNG", "P", {"transparency": 3})),
        *(("PNG", "I;16", {}), ("JPEG", None, {}), ("JPEG", "CMYK", {}), ("WEBP", None, {}), ("GIF", "P", {})),
        *(("BMP", None, {}), ("TIFF", None, {})),
    ],
)
def test_every_usual_format_becomes_three_colors(kind, mode, how):
    pixels = noise(2)
    if mode == "I;16":
        pixels, mode = pixels[:, :, 0].astype(np.uint16) * 100, None
    picture = open_picture(encoded(pixels, kind, mode, **how))
    assert (picture.mode, picture.size) == ("RGB", (64, 64))
    if kind in ("BMP", "TIFF") or (kind == "PNG" and mode in (None, "RGBA") and pixels.ndim == 3):
        assert np.array_equal(np.asarray(picture), pixels)


WHOLE = encoded(noise(3))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP"])
def test_a_cut_picture_is_refused_wherever_it_is_cut(kind):
    image = encoded(noise(3), kind)
    for part in (1, 8, 30, 100, len(image) // 2):
        with pytest.raises(EnvError, match=f"{part} bytes .* are no picture"):
            open_picture(image[:part])


def mode_or_refusal(content):
    try:
        return open_picture(content).mode
    except EnvError as refused:
        return str(refused)


@pytest.mark.parametrize("seed", range(30))
def test_flipped_bits_give_a_picture_or_a_clear_refusal(seed):
    rng = np.random.default_rng(seed)
    content = bytearray(WHOLE)
    for place in rng.integers(0, len(content), 5):
        content[place] ^= 1 << int(rng.integers(8))
    outcome = mode_or_refusal(bytes(content))
    assert outcome == "RGB" or "no picture" in outcome


def test_a_bomb_is_refused():
    """A few hundred bytes that would unpack to gigabytes."""
    header = bytearray(encoded(np.zeros((8, 8, 3), dtype=np.uint8)))
    header[16:24] = (40_000).to_bytes(4, "big") * 2
    with pytest.raises(EnvError, match="no picture"):
        open_picture(bytes(header))


def test_a_ribbon_is_refused(reader):
    with pytest.raises(EnvError, match="1 x 300 pixels cannot be read"):
        reader.tokens(encoded(noise(0, 1, 300)))
