"""``freshper serve-retriever``: BM25 over a corpus for search agents, over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from freshper.cli.terminal import parse, say

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class ServeRetrieverCommand:
    """Serve BM25 over a corpus to search agents, over HTTP, until interrupted.

    The index is built once and kept in the cache. It speaks the common protocol: POST /retrieve {queries, topk,
    return_scores}. Trainers find it with `--env.options.retriever URL`.
    """

    corpus: tyro.conf.Positional[Path]
    """JSONL file with one passage a line: contents, or text with or without title."""
    port: int = 8000
    """Port to listen at; 0 is any free one, which is printed."""
    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0 lets in every machine that reaches this one, and nobody is asked who he is."""


def run_serve_retriever(words: Sequence[str], console: Console) -> int:
    """Run the command; returns the exit code."""
    arguments = parse(ServeRetrieverCommand, "serve-retriever", words)
    from freshper.envs.search.index import open_index
    from freshper.envs.search.server import serve

    index = open_index(arguments.corpus)

    def ready(url: str) -> None:
        say(console, f"serving {len(index):,} passages of {arguments.corpus} at {url}")

    serve(index, arguments.host, arguments.port, ready)
    return 0
