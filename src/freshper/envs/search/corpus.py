"""A corpus on disk: one passage a row."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freshper.envs.data_files import Damaged, read_local
from freshper.errors import ConfigError

_log = logging.getLogger("freshper.envs")


def read_corpus(path: Path) -> list[str]:
    """The passages of a JSONL file, one object a line: ``contents``, or ``text`` with or without ``title``.

    JSON, CSV and Parquet files with these columns are read as well. A title stands in a line of its own above its
    text, as it does in a ``contents``. Rows that hold no passage are counted and shown. Raises :class:`ConfigError`
    where none does, and where the file cannot be read.
    """
    passages: list[str] = []
    unusable: list[str] = []
    for place, values in read_local(path, "", "", {"contents", "text", "title"}):
        try:
            passages.append(_passage(values))
        except ValueError as error:
            unusable.append(f"{place}: {error}")
    if not passages:
        reason = f"none of its {len(unusable)} rows does; {unusable[0]}" if unusable else "it is empty"
        raise ConfigError(f"the corpus {path} holds no passage: {reason}")
    if unusable:
        _log.warning("%s: %d rows hold no passage and are left out; %s", path, len(unusable), unusable[0])
    return passages


def _passage(values: Mapping[str, Any] | Damaged) -> str:
    if isinstance(values, Damaged):
        raise ValueError(values.reason)
    text = values.get("contents") or values.get("text")
    title = None if values.get("contents") else values.get("title")
    if not (isinstance(text, str) and text.strip()):
        raise ValueError("it has neither contents nor text")
    passage = f"{title}\n{text}" if isinstance(title, str) and title.strip() else text
    passage.encode()  # damaged bytes and halves of surrogate pairs are a ValueError
    return passage
