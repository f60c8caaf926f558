"""Columns as names (ready for JSON) and plain arrays, for files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshper.errors import SnapshotError
from freshper.replay.store.columns import OPTIONAL, Columns
from freshper.trajectory import SamplingParams

_NAMES = ("tasks", "groups", "sampling")
_ARRAYS = tuple(field.name for field in fields(Columns) if field.name not in (*_NAMES, "images"))


def describe_columns(columns: Columns) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Names and arrays of ``columns``. What repeats is written once: sampling settings, and images by content."""
    settings = list(dict.fromkeys(columns.sampling))
    numbers = {setting: number for number, setting in enumerate(settings)}
    images = list(dict.fromkeys(image for images in columns.images for image in images))
    places = {image: place for place, image in enumerate(images)}
    arrays = {name: getattr(columns, name) for name in _ARRAYS if getattr(columns, name) is not None}
    arrays |= {
        "sampling": np.array([numbers[setting] for setting in columns.sampling], dtype=np.int64),
        "images": np.array([places[image] for images in columns.images for image in images], dtype=np.int64),
        "image_counts": np.array([len(images) for images in columns.images], dtype=np.int64),
        "image_sizes": np.array([len(image) for image in images], dtype=np.int64),
        "image_bytes": np.frombuffer(b"".join(images), dtype=np.uint8),
    }
    names = {
        "tasks": columns.tasks,
        "groups": columns.groups,
        "sampling": [asdict(setting) for setting in settings],
    }
    return names, arrays


def columns_from(names: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Columns:
    """What :func:`describe_columns` described. Raises :class:`SnapshotError` when the parts do not fit together."""
    settings = [SamplingParams(**setting) for setting in names["sampling"]]
    bounds = np.cumsum([0, *arrays["image_sizes"].tolist()])
    pixels = arrays["image_bytes"].tobytes()
    images = [pixels[start:end] for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)]
    shown = iter(arrays["images"].tolist())
    columns = Columns(
        **{name: arrays.get(name) if name in OPTIONAL else arrays[name] for name in _ARRAYS},  # type: ignore[arg-type]
        tasks=tuple(names["tasks"]),
        groups=tuple(names["groups"]),
        sampling=tuple(settings[number] for number in arrays["sampling"].tolist()),
        images=tuple(tuple(images[next(shown)] for _ in range(count)) for count in arrays["image_counts"].tolist()),
    )
    _check(columns)
    return columns


def _check(columns: Columns) -> None:
    n, tokens, turns = len(columns), len(columns.tokens), len(columns.turns)
    for name in ("seeds", "stop_reasons", "successes", "logprobs_known", "tasks", "groups", "sampling", "images"):
        _expect(name, len(getattr(columns, name)), n)
    for name in ("has_advantages", "has_td_errors"):
        _expect(name, len(getattr(columns, name)), n)
    for name in ("response_mask", "behavior_logprobs", *OPTIONAL):
        column = getattr(columns, name)
        if column is not None:
            _expect(name, len(column), tokens)
    _expect("turn_rewards", len(columns.turn_rewards), turns)
    for name, whole in (("offsets", tokens), ("turn_offsets", turns)):
        offsets = getattr(columns, name)
        _expect(name, len(offsets), n + 1)
        if offsets[0] != 0 or offsets[-1] != whole or (np.diff(offsets) < 0).any():
            raise SnapshotError(f"{name} do not divide the {whole} rows that there are")


def _expect(name: str, found: int, expected: int) -> None:
    if found != expected:
        raise SnapshotError(f"the file holds {found} values of {name} for {expected} rows: they do not belong together")
