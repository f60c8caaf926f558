"""BM25 over a local corpus: built once, kept in the cache, memory-mapped by every process."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from freshper.cache_folder import cache_folder, keep
from freshper.envs.search.corpus import read_corpus
from freshper.envs.search.retrieval import Passage
from freshper.errors import ConfigError, MissingExtraError, SnapshotError

_FORMAT = 1  # of the folder; another one is another key, so old folders are left alone
_TEXTS, _ENDS, _MANIFEST = "texts.utf8", "ends.npy", "manifest.json"
_SETTINGS = {"k1": 1.5, "b": 0.75, "method": "lucene"}  # of BM25; the usual ones
_BLOCK = 1 << 20


class Bm25Index:
    """Passages by BM25: lower-case words of two or more signs, without English stop words, not stemmed.

    The same query always gets the same passages in the same order: those of equal score come as in the corpus.
    """

    def __init__(self, bm25: Any, texts: Sequence[str]) -> None:
        self._bm25 = bm25
        self._texts = texts

    @classmethod
    def build(cls, texts: Sequence[str]) -> Bm25Index:
        """An index in memory. Raises :class:`ConfigError` for texts without a single word."""
        library = _bm25s()
        words = _tokenize(library, texts)
        if not any(words):
            raise ConfigError(f"none of the {len(texts)} passages of the corpus has a word: nothing could be found")
        bm25 = library.BM25(**_SETTINGS, backend="numpy")
        bm25.index(words, show_progress=False)
        return cls(bm25, texts)

    def __len__(self) -> int:
        return len(self._texts)

    def retrieve(self, query: str, topk: int) -> list[Passage]:
        """At most ``topk`` passages that share a word with the query, best first."""
        known = self._bm25.get_tokens_ids(_tokenize(_bm25s(), [query])[0])
        if not known or topk < 1:
            return []
        scores = self._bm25.get_scores_from_ids(known)
        count = min(topk, len(scores))
        bar = np.partition(scores, len(scores) - count)[len(scores) - count]
        found = np.flatnonzero((scores >= bar) & (scores > 0))
        best = found[np.argsort(-scores[found], kind="stable")][:count]
        return [Passage(self._texts[index], float(scores[index])) for index in best]

    def save(self, folder: Path) -> None:
        """Write the index into an empty folder, with a checksum of every file."""
        self._bm25.save(folder, show_progress=False)
        ends = np.empty(len(self._texts), dtype=np.int64)
        with (folder / _TEXTS).open("wb") as file:
            for index, text in enumerate(self._texts):
                file.write(text.encode())
                ends[index] = file.tell()
        np.save(folder / _ENDS, ends)
        checksums = {path.name: _sha256(path) for path in sorted(folder.iterdir())}
        (folder / _MANIFEST).write_text(json.dumps(checksums, indent=2))

    @classmethod
    def load(cls, folder: Path) -> Bm25Index:
        """The index that :meth:`save` wrote, memory-mapped. Raises :class:`SnapshotError` where it is not whole."""
        try:
            checksums = dict(json.loads((folder / _MANIFEST).read_text()))
            damaged = [name for name, checksum in checksums.items() if _sha256(folder / name) != checksum]
        except (OSError, ValueError, TypeError) as error:
            raise SnapshotError(f"{folder} holds no whole index ({error!r})") from error
        if damaged:
            raise SnapshotError(f"{folder} is damaged: {', '.join(damaged)} changed since the index was built")
        bm25 = _bm25s().BM25.load(folder, mmap=True, show_progress=False)
        return cls(bm25, _MappedTexts(folder))


class _MappedTexts(Sequence[str]):
    """The passages, read from the disk as they are asked for."""

    def __init__(self, folder: Path) -> None:
        self._bytes = np.memmap(folder / _TEXTS, dtype=np.uint8, mode="r")
        self._ends = np.load(folder / _ENDS, mmap_mode="r")

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: Any) -> Any:
        start = int(self._ends[index - 1]) if index else 0
        return self._bytes[start : int(self._ends[index])].tobytes().decode()


def open_index(corpus: Path | str) -> Bm25Index:
    """The index of a corpus file, from the cache, or built and put there; shared within the process.

    The cache's key is the content of the corpus and everything that the result depends on, so a changed corpus gets
    an index of its own. Several processes may build at once; a damaged index is built again. Raises
    :class:`ConfigError` for a corpus that cannot be read and a cache that cannot be written.
    """
    _bm25s()  # its absence is told before a large file is read
    path = Path(corpus).expanduser().absolute()
    try:
        facts = path.stat()
    except OSError as error:
        raise ConfigError(f"the corpus {path} cannot be read: {error.strerror or error}") from None
    return _open(path, facts.st_size, facts.st_mtime_ns)


@functools.lru_cache(maxsize=8)
def _open(path: Path, size: int, modified: int) -> Bm25Index:  # noqa: ARG001 - both tell one content from another
    try:
        content = _sha256(path)
    except OSError as error:
        raise ConfigError(f"the corpus {path} cannot be read: {error.strerror or error}") from None
    everything = {
        "format": _FORMAT,
        "corpus": content,
        "suffix": path.suffix,
        "settings": _SETTINGS,
        "libraries": {name: version(name) for name in ("bm25s", "numpy")},
    }
    key = hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()[:16]
    folder = cache_folder() / f"bm25-{path.stem[:40]}-{key}"
    keep(folder, lambda empty: Bm25Index.build(read_corpus(path)).save(empty), _is_whole)
    return Bm25Index.load(folder)


def _is_whole(folder: Path) -> bool:
    try:
        Bm25Index.load(folder)
    except SnapshotError:
        return False
    return True


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    for block in _blocks(path):
        digest.update(block)
    return digest.hexdigest()


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            yield block


def _tokenize(library: Any, texts: Sequence[str]) -> list[list[str]]:
    words: list[list[str]] = library.tokenize(list(texts), stopwords="en", return_ids=False, show_progress=False)
    return words


@functools.cache
def _bm25s() -> Any:
    try:
        import bm25s
    except ImportError as error:
        raise MissingExtraError("bm25s", "search") from error
    return bm25s
