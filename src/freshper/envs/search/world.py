"""An invented world of people and towns: a corpus of short facts, and questions of one and two hops about it."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import numpy as np

from freshper.errors import ConfigError

# Names are put together from these, and none of them is a word that an index leaves out.
_STARTS = "Ba Be Bri Ca Da Do El Fa Fe Gar Ha Il Jo Ka Le Lu Ma Mi Na No Or Pe Ra Ro Sa Si Ta Te Ul Va We Ya"
_PERSON_ENDS = "bo dan dra fin ga ken la lin mar na nor pa ra rik sa ta tor va wen zo"
_TOWN_ENDS = "berg bury dale feld ford gate ham holm mere mouth stead ton wick worth"
_RIVER_ENDS = "ask ebb eln iss orr ulse"
_JOBS = (
    "actor baker banker barber carpenter cook dentist doctor farmer fisher gardener hunter judge lawyer miller miner "
    "nurse painter pilot plumber poet potter sailor singer smith soldier tailor teacher trader weaver"
)

MAX_PEOPLE, MAX_TOWNS = (len(_STARTS.split()) * len(ends.split()) for ends in (_PERSON_ENDS, _TOWN_ENDS))
_OF_PEOPLE = ("home", "job", "friend")
_OF_TOWNS = ("river", "mayor")
RELATIONS = _OF_PEOPLE + _OF_TOWNS


@dataclass(frozen=True, slots=True)
class Question:
    """``text`` and its one answer; the answer is ``relations[-1]`` of ... of ``relations[0]`` of ``entity``."""

    text: str
    answer: str
    entity: str
    relations: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class World:
    """``facts`` maps (relation, entity) to a value; ``corpus`` holds one sentence per fact."""

    facts: dict[tuple[str, str], str]
    corpus: tuple[str, ...]
    one_hop: tuple[Question, ...]
    two_hops: tuple[Question, ...]


def check_size(people: int, towns: int, seed: int) -> None:
    """Raise :class:`ConfigError` for a number of people or towns that there are no names for."""
    for name, count, most in (("people", people, MAX_PEOPLE), ("towns", towns, MAX_TOWNS)):
        if not 2 <= count <= most:
            raise ConfigError(f"{name} {count} must be in [2, {most}]: there are no more names")
    if seed < 0:
        raise ConfigError(f"world_seed {seed} must be >= 0: it seeds the generator that makes the world")


@functools.lru_cache(maxsize=8)
def make_world(people: int, towns: int, seed: int) -> World:
    """The world that ``seed`` decides. Everybody has a home, a job and a friend, every town a river and a mayor.

    Raises :class:`ConfigError` as :func:`check_size`.
    """
    check_size(people, towns, seed)
    rng = np.random.default_rng(seed)
    persons, places = _names(rng, _PERSON_ENDS, people), _names(rng, _TOWN_ENDS, towns)
    rivers = _names(rng, _RIVER_ENDS, max(2, towns // 3))
    values = {"home": places, "job": _JOBS.split(), "river": rivers, "mayor": persons}
    facts: dict[tuple[str, str], str] = {}
    for relation, entity in [*itertools.product(_OF_PEOPLE, persons), *itertools.product(_OF_TOWNS, places)]:
        among = values.get(relation)
        # Friends stand in a circle: everybody is the friend of one person, so a search for a friend finds two facts.
        friend = persons[(persons.index(entity) + 1) % people] if among is None else ""
        facts[relation, entity] = among[int(rng.integers(len(among)))] if among else friend
    corpus = [write_fact(relation, entity, value) for (relation, entity), value in facts.items()]
    order = rng.permutation(len(corpus))
    one_hop = tuple(_ask(facts, entity, relation) for relation, entity in facts)
    two_hops = tuple(
        _ask(facts, entity, relation, further)
        for (relation, entity), value in facts.items()
        for further in RELATIONS
        if (further, value) in facts
    )
    return World(facts, tuple(corpus[index] for index in order), one_hop, two_hops)


def write_fact(relation: str, entity: str, value: str) -> str:
    """One sentence of the corpus."""
    return f"the {relation} of {entity} is {value}"


def _ask(facts: dict[tuple[str, str], str], entity: str, *relations: str) -> Question:
    value, about = entity, entity
    for relation in relations:
        value, about = facts[relation, value], f"the {relation} of {about}"
    asked = "who" if relations[-1] in ("friend", "mayor") else "what"
    return Question(f"{asked} is {about} ?", value, entity, relations)


def _names(rng: np.random.Generator, ends: str, count: int) -> list[str]:
    names = [start + end for start in _STARTS.split() for end in ends.split()]
    return [names[index] for index in rng.permutation(len(names))[:count]]
