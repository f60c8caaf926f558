"""The task ``nq-search``: the search agent on real questions, over a corpus or a retriever of one's own."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from freshper.envs.core import Split, with_options
from freshper.envs.data_settings import check_data, sources_of
from freshper.envs.datasets import split_rows, text, texts
from freshper.envs.search.client import HttpRetriever
from freshper.envs.search.env import Asked, SearchEnv, SearchRules
from freshper.envs.search.index import open_index
from freshper.envs.search.retrieval import Retriever
from freshper.errors import ConfigError


@dataclass(frozen=True, slots=True)
class NqSearchSpec:
    """Settings of a search task made of a data set.

    Args:
        corpus: JSONL file of passages that is searched with BM25. Either this or ``retriever``.
        retriever: URL of a retriever that is asked over HTTP.
        timeout: seconds that one attempt to ask it may take; a failed one is repeated ``retries`` times.
        retries: further attempts, see :class:`HttpRetriever`.
        max_in_flight: queries under way at once in a process.
        data: a local file, a folder, or the name of a hub data set; see :class:`~freshper.envs.datasets.DataSource`.
        subset: the hub's configuration, or a folder in ``data``.
        train_split: split of ``data`` that is trained on. A single file has none.
        eval_split: split that evaluates; empty divides the training questions by a hash of each.
        eval_data: another source for evaluation; empty takes ``data``. A question that stands in both is refused.
        question, answer: names of the columns; an answer is a text or a list of accepted ones.
        limit: the first so many usable rows of each source; 0 is all.
        shuffle_seed: order of the rows before the limit; -1 leaves it.
        max_searches, topk, passage_words: see :class:`~freshper.envs.search.env.SearchRules`.
    """

    corpus: str = ""
    retriever: str = ""
    timeout: float = 10.0
    retries: int = 3
    max_in_flight: int = 16
    data: str = "google-research-datasets/nq_open"
    subset: str = ""
    train_split: str = "train"
    eval_split: str = ""
    eval_data: str = ""
    question: str = "question"
    answer: str = "answer"
    limit: int = 0
    shuffle_seed: int = -1
    max_searches: int = 5
    topk: int = 3
    passage_words: int = 120

    def __post_init__(self) -> None:
        self.rules()
        check_data(self)

    def rules(self) -> SearchRules:
        """The rules of an episode."""
        return SearchRules(self.max_searches, self.topk, self.passage_words)

    def find_retriever(self) -> Retriever:
        """The retriever that is named. Raises :class:`ConfigError` unless exactly one is."""
        if bool(self.corpus) == bool(self.retriever):
            raise ConfigError(
                f"{'both' if self.corpus else 'neither'} of corpus and retriever: name a JSONL file of passages "
                "(env.options.corpus), or the URL of a retriever (env.options.retriever)"
            )
        if self.corpus:
            return open_index(self.corpus)
        return _shared_retriever(self.retriever, self.timeout, self.retries, self.max_in_flight)

    def questions(self, split: Split) -> tuple[Asked, ...]:
        """The questions of a split. Raises as :func:`~freshper.envs.datasets.split_rows` does."""
        columns = {"question": self.question, "answer": self.answer}
        rows = split_rows(split, *sources_of(self, columns), {"question": text, "answer": texts}).rows
        return tuple(Asked(row["question"], row["answer"]) for row in rows)


PRESETS: dict[str, tuple[NqSearchSpec, str]] = {
    "nq-search": (
        NqSearchSpec(),
        "Search agent on NQ-open questions, or others (option data), 5 searches; needs option corpus or retriever.",
    ),
}


class NqSearchEnv(SearchEnv):
    """Answer a real question with the help of a search tool.

    Observation, actions, rewards, end and measures: as :class:`SearchEnv`.

    Parameters: :class:`NqSearchSpec`. Source: Natural Questions (Kwiatkowski et al. 2019), the open-domain questions
    of Lee et al. 2019, from the hub or a file; passages from a corpus or a retriever of one's own. Published results
    searched Wikipedia of 2018 with a dense retriever.
    """


def make_nq_search(spec: NqSearchSpec, task: str, split: Split, **options: Any) -> NqSearchEnv:
    """A preset with some settings changed; ``options`` are fields of :class:`NqSearchSpec`.

    Reads the data and the corpus: raises as :meth:`NqSearchSpec.questions` and :func:`open_index` do.
    """
    spec = with_options(spec, options)
    retriever = spec.find_retriever()  # first: it says what is missing before a data set is downloaded
    return NqSearchEnv(task, split, [spec.questions(split)], retriever, spec.rules())


@functools.lru_cache(maxsize=8)
def _shared_retriever(url: str, timeout: float, retries: int, max_in_flight: int) -> HttpRetriever:
    """One for all environments of the process: the bound on queries under way is on all of them together."""
    return HttpRetriever(url, timeout=timeout, retries=retries, max_in_flight=max_in_flight)
