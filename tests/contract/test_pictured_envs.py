"""What check_env asks of pictures and measures: one broken environment per clause."""

import io
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from freshper.envs import check_env
from freshper.errors import EnvError
from tests.contract.test_envs import REPLIES, Corridor, WithOutcome


class PicturedCorridor(Corridor):
    """The corridor is only seen: a bar of one shade for every length."""

    def show(self):
        return "Look."

    def images(self):
        return (self.png(self.left),)

    def png(self, shade):
        file = io.BytesIO()
        Image.new("L", (4, 2), shade % 256).save(file, "PNG")
        return file.getvalue()


class OnePicture(PicturedCorridor):
    def images(self):
        return (self.png(0),)


class ListOfPictures(PicturedCorridor):
    def images(self):
        return list(super().images())


class PixelsForAPicture(PicturedCorridor):
    def images(self):
        return (np.zeros((4, 2), dtype=np.uint8),)


class EmptyPicture(PicturedCorridor):
    def images(self):
        return (b"",)


class TornPicture(PicturedCorridor):
    def images(self):
        (image,) = super().images()
        return (image[: len(image) // 2],)


class PicturesRunOut(PicturedCorridor):
    """Who asks takes them away."""

    asked = 0

    def images(self):
        self.asked += 1
        return super().images() * (self.asked % 2)


class PicturesOfTheirOwn(PicturedCorridor):
    """Two objects show the same level in different shades."""

    made = 0

    def __init__(self):
        super().__init__()
        PicturesOfTheirOwn.made += 1
        self.shade = PicturesOfTheirOwn.made

    def images(self):
        return (self.png(self.left + 10 * self.shade),)


class MeasureOfText(WithOutcome):
    def alter(self, outcome):
        return replace(outcome, measures={"f1": "high"})


class NanMeasure(WithOutcome):
    def alter(self, outcome):
        return replace(outcome, measures={"f1": float("nan")})


class NamelessMeasure(WithOutcome):
    def alter(self, outcome):
        return replace(outcome, measures={"": 1.0})


class HalfACharacter(Corridor):
    def show(self):
        return "\ud800"


def test_a_sound_pictured_environment_passes():
    check_env(PicturedCorridor, REPLIES)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (OnePicture, r"reset\(\) shows the same level for all seeds 0 to 19"),
        (ListOfPictures, r"images\(\) returned a list after reset\(0\): it must be a tuple"),
        (PixelsForAPicture, r"picture 0 is array[\s\S]*: it must be encoded, as PNG or JPEG"),
        (EmptyPicture, "picture 0 is b''.*: it must be encoded"),
        (TornPicture, r"picture 0 cannot be decoded after reset\(0\)"),
        (PicturesRunOut, r"images\(\) gave other pictures when asked again"),
        (PicturesOfTheirOwn, r"reset\(0\) showed other pictures on one object than on another"),
        (MeasureOfText, "measure f1 is 'high' on an empty reply: it must be a finite float"),
        (NanMeasure, "measure f1 is nan"),
        (NamelessMeasure, "measures has the name ''"),
        (HalfACharacter, r"reset\(0\) gave an observation that no tokenizer takes"),
    ],
)
def test_a_broken_environment_is_caught(broken, message):
    with pytest.raises(EnvError, match=message):
        check_env(broken, REPLIES)
