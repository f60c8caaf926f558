"""Pictures of boards: whole pixels, the same bytes everywhere, symbols that look different."""

import hashlib
import io
import os
import struct
import subprocess
import sys
from itertools import combinations

import numpy as np
import pytest
from PIL import Image

from freshper.envs.pictured import LAKE, ROOM
from freshper.envs.render import Painter, Shape, check_pixels
from freshper.errors import ConfigError, EnvError, MissingExtraError

LAKE_BOARD = "P_OG\nXQ__\nOO__\n___G"
ROOM_BOARD = "PX*O\nS_#_\n#_XO\n#___"
PLAIN = Painter(
    {
        "_": (Shape("rectangle", (0, 0, 16, 16), (255, 255, 255)),),
        "#": (Shape("rectangle", (0, 0, 16, 16), (255, 255, 255)), Shape("rectangle", (0, 0, 8, 16), (0, 0, 0))),
    },
    margin=(9, 9, 9),
)


def decoded(png: bytes) -> np.ndarray:
    picture = Image.open(io.BytesIO(png))
    assert (picture.format, picture.mode) == ("PNG", "RGB")
    return np.asarray(picture)


class TestGeometry:
    def test_pixels_of_a_board_by_hand(self):
        pixels = decoded(PLAIN.paint("#_\n__", 64))
        expected = np.full((64, 64, 3), 255)
        expected[:32, :16] = 0
        assert np.array_equal(pixels, expected)

    def test_what_is_left_over_is_a_margin(self):
        pixels = decoded(PLAIN.paint("___\n___", 65))  # cells of 21: one pixel left to right, 12 and 11 above and below
        assert pixels.shape == (65, 65, 3)
        inside = (pixels == 255).all(axis=2)
        assert inside[11:53, 1:64].all()
        assert inside.sum() == 42 * 63
        assert (pixels[~inside] == 9).all()

    @pytest.mark.parametrize(("painter", "board"), [(LAKE, LAKE_BOARD), (ROOM, ROOM_BOARD)])
    @pytest.mark.parametrize("pixels", [64, 100, 448])
    def test_a_symbol_looks_the_same_in_every_cell(self, painter, board, pixels):
        picture = decoded(painter.paint(board, pixels))
        cell = pixels // 4
        looks: dict[str, np.ndarray] = {}
        for row, symbols in enumerate(board.split("\n")):
            for column, symbol in enumerate(symbols):
                tile = picture[row * cell : (row + 1) * cell, column * cell : (column + 1) * cell]
                assert np.array_equal(looks.setdefault(symbol, tile), tile)
        for one, other in combinations(looks.values(), 2):
            different = np.abs(one.astype(int) - other).max(axis=2) > 60
            assert different.mean() > 0.05  # of the pixels of a cell

    @pytest.mark.parametrize(("painter", "board"), [(LAKE, LAKE_BOARD), (ROOM, ROOM_BOARD)])
    def test_who_is_where_shows_in_the_color_of_a_cell(self, painter, board):
        """Mean colors differ, so that even a model that sees a cell as one patch can tell them apart."""
        picture = decoded(painter.paint(board, 64)).reshape(4, 16, 4, 16, 3).mean(axis=(1, 3))
        means = dict(zip(board.replace("\n", ""), picture.reshape(16, 3), strict=True))
        assert min(np.abs(one - other).max() for one, other in combinations(means.values(), 2)) > 12


class TestDeterminism:
    def test_the_pixels_are_the_known_ones(self):
        """Whatever release of Pillow draws them. A change of a drawing is a change of the task: it must be meant."""
        digests = [
            hashlib.sha256(decoded(painter.paint(board, pixels)).tobytes()).hexdigest()[:16]
            for painter, board in ((LAKE, LAKE_BOARD), (ROOM, ROOM_BOARD))
            for pixels in (64, 448)
        ]
        assert digests == ["3209486f471aeb05", "22f8123e8a276d8c", "e7e495218ffe41cc", "6904ffc79bd63b32"]

    def test_the_bytes_are_the_same_in_another_process(self):
        code = (
            "import hashlib; from freshper.envs.pictured import LAKE, ROOM;"
            f"print(hashlib.sha256(LAKE.paint({LAKE_BOARD!r}, 64) + ROOM.paint({ROOM_BOARD!r}, 100)).hexdigest())"
        )
        own = hashlib.sha256(LAKE.paint(LAKE_BOARD, 64) + ROOM.paint(ROOM_BOARD, 100)).hexdigest()
        for seed in ("1", "2"):
            environment = os.environ | {"PYTHONHASHSEED": seed, "TZ": "Asia/Tokyo"}
            told = subprocess.run(
                [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
            )
            assert told.stdout.strip() == own

    def test_a_file_holds_the_picture_and_no_date(self):
        png, chunks, at = LAKE.paint(LAKE_BOARD, 64), [], 8
        while at < len(png):
            (length,) = struct.unpack_from(">I", png, at)
            chunks.append(png[at + 4 : at + 8])
            at += 12 + length
        assert set(chunks) == {b"IHDR", b"IDAT", b"IEND"}

    @pytest.mark.parametrize(("pixels", "most"), [(64, 2_500), (448, 20_000)])
    def test_files_are_small(self, pixels, most):
        assert max(len(LAKE.paint(LAKE_BOARD, pixels)), len(ROOM.paint(ROOM_BOARD, pixels))) < most


class TestWrongInput:
    @pytest.mark.parametrize(
        ("pixels", "message"),
        [
            (63, r"pixels 63 must be a whole number in \[64, 448\]"),
            (449, "pixels 449 must be"),
            (64.0, r"pixels 64.0 must be a whole number"),
            (True, "pixels True must be"),
            (71, "pixels 71 leave 7 for a cell of 9x5: below 8 .* choose at least 72"),
        ],
    )
    def test_a_size_that_shows_nothing_is_refused(self, pixels, message):
        with pytest.raises(ConfigError, match=message):
            check_pixels(pixels, 9, 5)

    def test_the_smallest_cell_is_fine(self):
        check_pixels(72, 9, 5)
        assert decoded(PLAIN.paint("\n".join(["_" * 5] * 9), 72)).shape == (72, 72, 3)

    def test_a_symbol_without_a_sprite(self):
        with pytest.raises(EnvError, match="no picture of '\\?'; known symbols: _#"):
            PLAIN.paint("_?\n__", 64)

    def test_without_pillow_the_extra_is_named(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "PIL", None)
        with pytest.raises(MissingExtraError, match=r"pillow is needed here: pip install 'freshper\[vision\]'"):
            Painter({}, (0, 0, 0)).paint("__\n__", 64)
