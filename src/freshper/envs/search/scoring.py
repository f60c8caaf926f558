"""How an answer is compared with the accepted ones: exact match, F1, and the substring measure beside them."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def normalize(text: str) -> str:
    """SQuAD's normal form (Rajpurkar et al. 2016): lower case, no ASCII punctuation, no articles, single spaces.

    A text of which nothing is left, as the blood type "A", stays itself in lower case: else all such were equal.
    """
    lower = text.lower()
    bare = _ARTICLES.sub(" ", lower.translate(_PUNCTUATION))
    return " ".join(bare.split()) or " ".join(lower.split())


def exact_match(answer: str, accepted: Sequence[str]) -> bool:
    """Whether the answer equals one of the accepted ones, in normal form. Nothing else is an exact match."""
    given = normalize(answer)
    return given != "" and any(given == normalize(reference) for reference in accepted)


def f1(answer: str, accepted: Sequence[str]) -> float:
    """Harmonic mean of the precision and the recall of the answer's words: the best over the accepted ones."""
    return max((_f1(normalize(answer).split(), normalize(reference).split()) for reference in accepted), default=0.0)


def substring_match(answer: str, accepted: Sequence[str]) -> bool:
    """Whether the answer holds an accepted one, or an accepted one the answer, in normal form.

    Far more lenient than an exact match: a list of guesses holds the right one, and "e" is in most answers. Here to
    be compared with figures that were published under another name.
    """
    given = normalize(answer)
    references = [normalize(reference) for reference in accepted]
    return given != "" and any(r != "" and (r in given or given in r) for r in references)


def measures(answer: str, accepted: Sequence[str]) -> dict[str, float]:
    """All three by their names; an episode that ended without an answer has the answer ""."""
    return {
        "exact_match": float(exact_match(answer, accepted)),
        "f1": f1(answer, accepted),
        "substring": float(substring_match(answer, accepted)),
    }


def _f1(given: list[str], reference: list[str]) -> float:
    shared = sum((Counter(given) & Counter(reference)).values())
    return 2 * shared / (len(given) + len(reference)) if shared else 0.0
