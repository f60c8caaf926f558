"""A retriever over HTTP, as search agents commonly speak to one: POST {queries, topk, return_scores} -> {result}."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import SplitResult, urlsplit

from freshper.envs.search.retrieval import Passage
from freshper.errors import ConfigError, EnvError, MissingExtraError

MAX_RESPONSE_BYTES = 16 << 20
BACKOFF_SECONDS = 0.25  # before the first retry, doubled before every further one
_BUSY = 429  # "too many requests": worth another try, as all 5xx are
_SHOWN = 200  # characters of a response in an error


class HttpRetriever:
    """Asks a retriever at a URL. Several threads may ask at once; the objects of a process share one.

    Args:
        url: where it is; without a path, ``/retrieve`` is meant.
        timeout: seconds that one attempt may take, and that a query may wait for its turn.
        retries: further attempts after a lost connection, a timeout, a 429 or a 5xx. Any other answer is final.
        max_in_flight: queries under way at once; others wait.

    :attr:`url` is what errors name: without the name and the password that may stand in it.
    Raises :class:`ConfigError` for arguments that are none, :class:`MissingExtraError` without httpx.
    """

    def __init__(self, url: str, *, timeout: float = 10.0, retries: int = 3, max_in_flight: int = 16) -> None:
        self._httpx = _httpx()
        parts = _read_url(url, self._httpx)
        if not 0 < timeout < math.inf:
            raise ConfigError(f"timeout {timeout} must be above 0 and finite: a server that hangs would stop the run")
        if retries < 0 or max_in_flight < 1:
            raise ConfigError(f"retries {retries} must be at least 0 and max_in_flight {max_in_flight} at least 1")
        whole = parts if parts.path.strip("/") else parts._replace(path="/retrieve")
        self._url = whole.geturl()
        self.url = whole._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        self._timeout = timeout
        self._retries = retries
        self._max_in_flight = max_in_flight
        self._slots = threading.BoundedSemaphore(max_in_flight)
        self._client = self._httpx.Client(
            timeout=timeout,
            limits=self._httpx.Limits(max_keepalive_connections=0),  # none is left open, or is found dead later
            trust_env=parts.hostname not in ("localhost", "127.0.0.1", "::1"),  # no proxy leads to this machine
        )

    def retrieve(self, query: str, topk: int) -> list[Passage]:
        """At most ``topk`` passages, in the server's order. Raises :class:`EnvError` that names the URL."""
        # Half a surrogate pair, which a policy can babble, has no place in JSON.
        asked = query.encode("utf-8", "replace").decode()
        body = json.dumps({"queries": [asked], "topk": topk, "return_scores": True}).encode()
        if not self._slots.acquire(timeout=self._timeout):
            raise EnvError(
                f"{self.url}: {self._max_in_flight} queries were under way for {self._timeout:g} s, and this one found "
                "no place; raise max_in_flight, or give the retriever more to run on"
            )
        try:
            content = self._ask(body)
        finally:
            self._slots.release()
        return self._read(content)[:topk]

    def _ask(self, body: bytes) -> bytes:
        """The content of the answer, after as many attempts as it takes and as there are."""
        for attempt in range(self._retries + 1):
            if attempt:
                time.sleep(BACKOFF_SECONDS * 2 ** (attempt - 1))
            try:
                status, content = self._attempt(body)
            except (self._httpx.RequestError, UnicodeError) as error:  # no connection, a timeout, no such host, ...
                failure = f"{type(error).__name__} ({str(error) or 'without a reason'})"
                continue
            if status == 200:
                return content
            failure = f"status {status}: {_shown(content)}"
            if status != _BUSY and status < 500:
                raise EnvError(f"{self.url} refused the query with {failure}")
        raise EnvError(f"{self.url} gave no answer in {self._retries + 1} attempts; the last ended with {failure}")

    def _attempt(self, body: bytes) -> tuple[int, bytes]:
        end = time.monotonic() + self._timeout
        headers = {"Content-Type": "application/json"}
        content = bytearray()
        with self._client.stream("POST", self._url, content=body, headers=headers) as response:
            for part in response.iter_bytes():
                content += part
                if time.monotonic() > end:  # the library's own limit is on each piece: a trickle has no end
                    raise self._httpx.ReadTimeout(f"the answer took more than {self._timeout:g} s")
                if len(content) > MAX_RESPONSE_BYTES:
                    raise EnvError(f"{self.url} answered with more than {MAX_RESPONSE_BYTES >> 20} MiB")
        return response.status_code, bytes(content)

    def _read(self, content: bytes) -> list[Passage]:
        try:
            found = json.loads(content)["result"][0]
            if not isinstance(found, list):
                raise TypeError("result[0] is no list")
            return [_passage(one) for one in found]
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise EnvError(
                f"{self.url} did not answer as a retriever does, {{result: [[{{document: {{contents}}, score}}]]}} "
                f"({type(error).__name__}: {error}): {_shown(content)}"
            ) from error


def _read_url(url: str, httpx: Any) -> SplitResult:
    """The parts of a URL. Raises :class:`ConfigError` for what is none, and shows nothing that stands before an @."""
    try:
        httpx.URL(url)
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port  # a port that cannot be one is told apart here
        host.encode("idna")
        usable = parts.scheme in ("http", "https") and host and "@" not in parts.path + parts.query + parts.fragment
    except (ValueError, httpx.InvalidURL):
        usable = False
    if not usable:
        raise ConfigError(
            f"retriever {url.rpartition('@')[2]!r} must be a URL like http://127.0.0.1:8000/retrieve (in a name and a "
            "password before the host, signs such as @ and / are quoted: %40, %2F)"
        )
    return parts


def _passage(found: Any) -> Passage:
    """With a score, or the document alone, as some servers answer. Raises ValueError, TypeError or LookupError."""
    scored = isinstance(found, Mapping) and "document" in found
    document = found["document"] if scored else found
    text = document["contents"] if "contents" in document else document["text"]
    if not isinstance(text, str):
        raise TypeError(f"contents {text!r} is no text")
    text.encode()  # half a surrogate pair is a ValueError
    score = float(found["score"]) if scored and "score" in found else 0.0
    if not math.isfinite(score):
        raise ValueError(f"score {score} is no number that passages can be ranked by")
    return Passage(text, score)


def _shown(content: bytes) -> str:
    text = " ".join(content[: 4 * _SHOWN].decode("utf-8", "replace").split())
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")


def _httpx() -> Any:
    try:
        import httpx
    except ImportError as error:
        raise MissingExtraError("httpx", "search") from error
    return httpx
