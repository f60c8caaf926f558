"""The protocol of retrieval: a query in, passages out, best first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Passage:
    """A document that was found, and how well it fits; scores of different retrievers cannot be compared."""

    text: str
    score: float


class Retriever(Protocol):
    """Finds passages. Several threads may ask at once."""

    def retrieve(self, query: str, topk: int) -> list[Passage]:
        """At most ``topk`` passages that have to do with the query, best first; none where nothing does.

        Raises :class:`EnvError` where it cannot be asked.
        """
        ...
