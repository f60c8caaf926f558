"""What a reply of the search agent asks for: a search, or to answer."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

MAX_CALL_CHARACTERS = 1_000
"""A longer query or answer is babble and cannot be read."""

_TAG = re.compile(r"<(/?)(search|answer|information)>")


@dataclass(frozen=True, slots=True)
class Call:
    """``text`` is the query of a search or the answer, white space around it taken off."""

    kind: Literal["search", "answer"]
    text: str


def read_call(reply: str) -> Call | None:
    """The one call that a reply makes, None where it makes none or more than one.

    Around ``<search>query</search>`` or ``<answer>text</answer>`` there may stand anything but further tags. The
    same call repeated word by word counts once. None for: both kinds, calls that differ, nested tags, a tag that
    is not closed or not opened, an ``<information>`` that the reply invents, an empty text and one of more than
    ``MAX_CALL_CHARACTERS``. So a reply never searches and answers in one breath, and nothing that a policy wrote
    is passed over in silence.
    """
    tags = list(_TAG.finditer(reply))
    calls = set()
    for opening, closing in zip(tags[::2], tags[1::2], strict=False):
        if opening[1] or not closing[1] or opening[2] != closing[2]:
            return None
        calls.add((opening[2], reply[opening.end() : closing.start()].strip()))
    if len(tags) % 2 or len(calls) != 1:
        return None
    kind, text = calls.pop()
    if kind == "information" or not 0 < len(text) <= MAX_CALL_CHARACTERS:
        return None
    return Call("search" if kind == "search" else "answer", text)


def write_search(query: str) -> str:
    """The reply that :func:`read_call` reads as a search for ``query``."""
    return f"<search> {query} </search>"


def write_information(passages: list[str], words: int) -> str:
    """Passages as the policy is shown them, numbered, each cut to ``words`` words.

    Tags in a passage are taken out: a document must not be able to close the block, or to look like a call.
    """
    lines = []
    for number, passage in enumerate(passages, start=1):
        plain = _TAG.sub(" ", passage).split()
        cut = " ..." if len(plain) > words else ""
        lines.append(f"{number}. {' '.join(plain[:words])}{cut}")
    return "\n".join(["<information>", *lines, "</information>"])
