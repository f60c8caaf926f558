"""The search agent's episode: a question, searches, an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from freshper.envs.core import INVALID_REWARD, Outcome, Split, write_action
from freshper.envs.search.calls import read_call, write_information, write_search
from freshper.envs.search.retrieval import Retriever
from freshper.envs.search.scoring import exact_match, measures
from freshper.errors import ConfigError, EnvError


@dataclass(frozen=True, slots=True)
class SearchRules:
    """What an episode may do: ``max_searches`` and one reply more; ``topk`` passages of ``passage_words`` each."""

    max_searches: int = 5
    topk: int = 3
    passage_words: int = 120

    def __post_init__(self) -> None:
        for name in ("max_searches", "topk", "passage_words"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} {getattr(self, name)} must be at least 1: nothing could be found")


@dataclass(frozen=True, slots=True)
class Asked:
    """A question and the answers that are accepted."""

    question: str
    accepted: tuple[str, ...]


class SearchEnv:
    """Answer a question with the help of a search tool.

    Observation: the question; after a search an ``<information>`` block of numbered passages, empty where nothing
    was found; after a reply that cannot be read, the question again.

    Actions: ``<search>query</search>`` or ``<answer>text</answer>``, one call a reply, with any text around it
    (:func:`read_call`). At most ``max_searches`` searches.

    Rewards: 1 for an answer that matches an accepted one exactly in SQuAD's normal form, 0 for any other and for
    a search; a reply that cannot be read costs 0.15 and a turn.

    End: with the answer, or after ``max_searches`` + 1 replies. A search with the last of them is not run: nobody
    would read what it finds. Measures: exact_match, f1, substring (:mod:`freshper.envs.search.scoring`), searches.
    """

    asked: Asked  # the question that is played

    def __init__(
        self, task: str, split: Split, kinds: Sequence[Sequence[Asked]], retriever: Retriever, rules: SearchRules
    ) -> None:
        """``kinds`` holds the questions of the split: a kind is drawn first, then one of its questions."""
        self.task = task
        self.split = split
        self.rules = rules
        self.max_turns = rules.max_searches + 1
        self.instructions = _instructions(rules)
        self._kinds = kinds
        self._retriever = retriever
        self._turns_left = 0
        self._searches = 0

    def reset(self, seed: int) -> str:
        """Ask the question that ``seed`` decides."""
        if seed < 0:
            raise ConfigError(f"seed {seed} must be >= 0: it seeds the generator that draws the question")
        rng = np.random.default_rng(seed)
        kind = self._kinds[int(rng.integers(len(self._kinds)))]
        return self.start(kind[int(rng.integers(len(kind)))])

    def start(self, asked: Asked) -> str:
        """Ask a question of one's own."""
        self.asked = asked
        self._turns_left, self._searches = self.max_turns, 0
        return asked.question

    def step(self, reply: str) -> Outcome:
        """Play one reply. Raises :class:`EnvError` when no episode is running, or when the retriever fails."""
        self._require_running("step")
        self._turns_left -= 1
        call = read_call(reply)
        if call is not None and call.kind == "answer":
            return self._end(call.text)
        if self._turns_left == 0:
            return self._end("", valid=call is not None)
        if call is None:
            return Outcome(self.asked.question, INVALID_REWARD, False, False, False, self._measured(""))
        self._searches += 1
        found = self._retriever.retrieve(call.text, self.rules.topk)
        block = write_information([passage.text for passage in found], self.rules.passage_words)
        return Outcome(block, 0.0, False, False, True, self._measured(""))

    def solution(self) -> list[str]:
        """An accepted answer: who knows one need not search. Raises :class:`EnvError` when no episode is running."""
        self._require_running("solution")
        return [self.asked.accepted[0]]

    def _end(self, answer: str, *, valid: bool = True) -> Outcome:
        self._turns_left = 0
        accepted = self.asked.accepted
        right = exact_match(answer, accepted)
        said = f"{'Right' if right else 'Wrong'}: {answer}" if answer else "Not answered"
        return Outcome(
            f"{said}. Accepted: {'; '.join(accepted)}",
            float(right) if valid else INVALID_REWARD,
            True,
            right,
            valid,
            self._measured(answer),
        )

    def _measured(self, answer: str) -> dict[str, float]:
        """In every outcome: an episode that a limit ends has not been answered."""
        return measures(answer, self.asked.accepted) | {"searches": float(self._searches)}

    def _require_running(self, call: str) -> None:
        if self._turns_left == 0:
            raise EnvError(f"{self.task}: {call}() while no episode is running; call reset(seed) first")


def _instructions(rules: SearchRules) -> str:
    return (
        "Answer the question. You may think first, then make one call a reply.\n"
        f"{write_search('query')} looks the query up: you are shown up to {rules.topk} passages between <information> "
        f"and </information>. You can search {rules.max_searches} times at most.\n"
        f"{write_action('text')} answers with a few words, without an explanation, and ends the episode.\n"
        f"Rewards: +1 for the right answer, 0 for a wrong one and for a search, {INVALID_REWARD:+g} for a reply with "
        "no call, with more than one, or with a tag left open."
    )
