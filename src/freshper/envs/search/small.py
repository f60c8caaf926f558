"""The task ``search``: the search agent in an invented world, small enough for the embedded policy."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from freshper.envs.core import Outcome, Split, level_split, with_options, write_action
from freshper.envs.search.calls import read_call, write_search
from freshper.envs.search.env import Asked, SearchEnv, SearchRules
from freshper.envs.search.index import Bm25Index
from freshper.envs.search.world import RELATIONS, Question, World, check_size, make_world
from freshper.errors import ConfigError, EnvError, UnknownNameError

Hops = Literal["one", "two", "both"]

# What the demonstrator does, as shares of the cases in which it could.
SEARCHES_FIRST = 0.48  # else it answers with the name in the question
ASKS_RIGHT = 0.9  # else it asks for a relation by chance
READS_RIGHT = 0.75  # where a passage is about what it searched for; else it reads any other
SEARCHES_ON = 0.45  # where a second hop is needed; else it answers with what it has read


@dataclass(frozen=True, slots=True)
class SmallSearchSpec:
    """Settings of an invented world: its size and seed, ``hops`` of the questions, and the rules of an episode.

    Of ``hops`` "both" half of the questions have one. Raises :class:`ConfigError` for a world that has no names.
    """

    people: int = 300
    towns: int = 60
    world_seed: int = 0
    hops: Hops = "both"
    max_searches: int = 3
    topk: int = 2
    passage_words: int = 20

    def __post_init__(self) -> None:
        if self.hops not in get_args(Hops):
            raise UnknownNameError("hops", str(self.hops), get_args(Hops))
        self.rules()
        check_size(self.people, self.towns, self.world_seed)

    def rules(self) -> SearchRules:
        """The rules of an episode."""
        return SearchRules(self.max_searches, self.topk, self.passage_words)


PRESETS: dict[str, tuple[SmallSearchSpec, str]] = {
    "search": (
        SmallSearchSpec(),
        "Search agent in an invented world: questions of one and two hops, BM25 over 1,000 facts, 3 searches.",
    ),
}


class SmallSearchEnv(SearchEnv):
    """Answer a question about an invented world with the help of a search tool.

    Observation: "who is the mayor of the home of Dotor ?"; after a search the passages that it found, best first,
    each one sentence as "the home of Dotor is Mawick". Actions, rewards, end and measures: as :class:`SearchEnv`.

    Parameters: :class:`SmallSearchSpec`. Source: invented; ``world_seed`` decides people, towns and facts.
    """

    def __init__(self, spec: SmallSearchSpec, task: str, split: Split) -> None:
        super().__init__(task, split, _kinds(spec, split), _index(spec), spec.rules())
        self.spec = spec
        self._plans = _plans(spec)
        self._query = ""  # of the last search
        self._shown: list[str] = []  # the passages that it found

    def start(self, asked: Asked) -> str:
        """Ask a question of this world. Raises :class:`EnvError` for any other."""
        if asked.question not in self._plans:
            raise EnvError(f"{self.task}: {asked.question!r} is no question about this world")
        self._query, self._shown = "", []
        return super().start(asked)

    def step(self, reply: str) -> Outcome:
        """Play one reply. Raises :class:`EnvError` when no episode is running."""
        outcome = super().step(reply)
        if outcome.valid and not outcome.done:
            call = read_call(reply)
            self._query = call.text if call else ""
            self._shown = outcome.observation.split("\n")[1:-1]
        return outcome

    def demonstrate(self, rng: np.random.Generator) -> str:
        """The reply of a demonstrator that often forgets to search, reads carelessly, and shuns a second hop."""
        self._require_running("demonstrate")
        plan = self._plans[self.asked.question]
        if not self._shown:
            if self._searches or rng.random() < SEARCHES_FIRST:
                return write_search(f"{_relation(plan.relations[0], rng)} {plan.entity}")
            return write_action(plan.entity)
        value = self._look(rng)
        if len(plan.relations) > 1 and self._searches == 1 and self._turns_left > 1 and rng.random() < SEARCHES_ON:
            return write_search(f"{_relation(plan.relations[-1], rng)} {value}")
        return write_action(value)

    def _look(self, rng: np.random.Generator) -> str:
        """The last word of a passage."""
        about = " of ".join(self._query.split())
        right = [passage for passage in self._shown if f" {about} is " in passage]
        others = [passage for passage in self._shown if passage not in right] or right
        passages = right if right and rng.random() < READS_RIGHT else others
        return passages[int(rng.integers(len(passages)))].split()[-1]


def make_small_search(spec: SmallSearchSpec, task: str, split: Split, **options: Any) -> SmallSearchEnv:
    """A preset with some settings changed; ``options`` are fields of :class:`SmallSearchSpec`."""
    return SmallSearchEnv(with_options(spec, options), task, split)


def _relation(right: str, rng: np.random.Generator) -> str:
    return right if rng.random() < ASKS_RIGHT else RELATIONS[int(rng.integers(len(RELATIONS)))]


def _world(spec: SmallSearchSpec) -> World:
    return make_world(spec.people, spec.towns, spec.world_seed)


@functools.lru_cache(maxsize=8)
def _plans(spec: SmallSearchSpec) -> dict[str, Question]:
    """How each question of the wanted hops is answered."""
    world = _world(spec)
    questions = (*(world.one_hop if spec.hops != "two" else ()), *(world.two_hops if spec.hops != "one" else ()))
    return {question.text: question for question in questions}


@functools.lru_cache(maxsize=8)
def _kinds(spec: SmallSearchSpec, split: Split) -> tuple[tuple[Asked, ...], ...]:
    """The questions of a split by their hops: each kind is as likely as the other, though there are fewer of one."""
    kinds: dict[int, list[Asked]] = {}
    for text, question in _plans(spec).items():
        if level_split(text) == split:
            kinds.setdefault(len(question.relations), []).append(Asked(text, (question.answer,)))
    if not kinds:
        raise ConfigError(
            f"a world of {spec.people} people has no question in the {split} split: it needs more of them"
        )
    return tuple(map(tuple, kinds.values()))


@functools.lru_cache(maxsize=8)
def _index(spec: SmallSearchSpec) -> Bm25Index:
    """In memory: built in less time than a file takes to be checked."""
    return Bm25Index.build(_world(spec).corpus)
