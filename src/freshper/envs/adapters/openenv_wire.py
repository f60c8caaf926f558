"""How an OpenEnv server is spoken to: a session over a WebSocket, or plain HTTP requests."""

from __future__ import annotations

import contextlib
import functools
import json
import weakref
from collections.abc import Mapping
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from freshper.errors import EnvError, MissingExtraError

Kind = Literal["reset", "step", "state"]
LARGEST_MESSAGE = 64 * 2**20  # bytes
EXTRA = "openenv"

_LOCAL = ("localhost", "127.0.0.1", "::1")  # never through a proxy


class RefusedError(EnvError):
    """The server does not take this action."""


class Session(Protocol):
    """One episode after another on a server."""

    def ask(self, kind: Kind, data: Mapping[str, Any]) -> dict[str, Any]:
        """The server's answer. Raises :class:`RefusedError` for an action that does not fit, else :class:`EnvError`."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class WebSocketSession:
    """A session of its own on the server, at ``/ws``. It is opened by the first call, and again after it broke."""

    def __init__(self, base: str, timeout: float) -> None:
        self._url = base.replace("http", "ws", 1) + "/ws"
        self._timeout = timeout
        self._connection: Any = None
        self._ending: Any = None

    def ask(self, kind: Kind, data: Mapping[str, Any]) -> dict[str, Any]:
        """See :class:`Session`."""
        if self._connection is None:
            if kind != "reset":
                raise EnvError(f"{self._url}: the session is gone, and the episode with it")
            self._open()
        message = {"type": kind} if kind == "state" else {"type": kind, "data": dict(data)}
        answer = self._exchange(json.dumps(message), kind)
        if answer.get("type") != "error":
            content = answer.get("data")
            if isinstance(content, dict):
                return content
            raise EnvError(f"{self._url} answered {answer!r:.200} to {kind}: it speaks another protocol")
        error = answer.get("data") or {}
        if error.get("code") == "VALIDATION_ERROR":
            raise RefusedError(_reasons(error.get("errors")) or str(error.get("message")))
        if error.get("code") in ("CAPACITY_REACHED", "FACTORY_ERROR", "SESSION_ERROR"):
            self.close()  # the server has closed it, too
        raise EnvError(f"{self._url}, {kind}: {error.get('message')!s:.500} ({error.get('code')})")

    def close(self) -> None:
        """See :class:`Session`."""
        if self._connection is not None:
            self._connection = None
            self._ending()

    def _open(self) -> None:
        connect, broken = _websockets()
        proxy = None if urlsplit(self._url).hostname in _LOCAL else True
        stack = contextlib.ExitStack()
        try:
            self._connection = stack.enter_context(
                connect(
                    self._url,
                    open_timeout=self._timeout,
                    close_timeout=1,
                    ping_interval=None,  # the server's pings are answered; ours would draw from the global generator
                    max_size=LARGEST_MESSAGE,
                    proxy=proxy,
                )
            )
        except (OSError, broken) as error:
            raise EnvError(f"{self._url} cannot be reached: {error}") from error
        self._ending = weakref.finalize(self, stack.close)

    def _exchange(self, message: str, kind: Kind) -> dict[str, Any]:
        _, broken = _websockets()
        with contextlib.suppress(broken):  # a server that refuses a session says why before it closes: read that
            self._connection.send(message)
        try:
            answer = json.loads(self._connection.recv(timeout=self._timeout))
        except TimeoutError as error:
            self.close()  # an answer that came later would be taken for that to the next message
            raise EnvError(f"{self._url}: no answer to {kind} within {self._timeout:g} s") from error
        except (OSError, ValueError, broken) as error:
            self.close()
            raise EnvError(f"{self._url}: the session broke at {kind}: {error}") from error
        if not isinstance(answer, dict):
            raise EnvError(f"{self._url} answered {answer!r:.200} to {kind}: it speaks another protocol")
        return answer


class HttpSession:
    """Plain requests. Only for servers that keep their episode from one request to the next, one client at a time."""

    def __init__(self, base: str, timeout: float) -> None:
        self._base = base
        self._client = http_client(base, timeout)
        weakref.finalize(self, self._client.close)

    def ask(self, kind: Kind, data: Mapping[str, Any]) -> dict[str, Any]:
        """See :class:`Session`."""
        if kind == "state":
            return request(self._client, "GET", f"{self._base}/state")
        return request(self._client, "POST", f"{self._base}/{kind}", {"action": dict(data)} if kind == "step" else data)

    def close(self) -> None:
        """See :class:`Session`."""


def http_client(base: str, timeout: float) -> Any:
    """A client for requests to the server. Raises :class:`MissingExtraError`."""
    try:
        import httpx
    except ImportError as error:
        raise MissingExtraError("httpx", EXTRA) from error
    trust_env = urlsplit(base).hostname not in _LOCAL
    return httpx.Client(timeout=timeout, trust_env=trust_env, verify=_certificates())


@functools.cache
def _certificates() -> Any:
    """The authorities that are trusted; reading them takes longer than a request."""
    import httpx

    return httpx.create_ssl_context()


def request(client: Any, method: str, url: str, content: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The JSON object that the server answers. Raises :class:`RefusedError` for status 422, else :class:`EnvError`."""
    import httpx

    try:
        answer = client.request(method, url, json=None if content is None else dict(content))
        values = answer.json()
    except httpx.HTTPError as error:
        raise EnvError(f"{url} cannot be reached: {error!r}") from error
    except ValueError as error:
        raise EnvError(f"{url} answered {answer.text!r:.200} ({answer.status_code}), which is no JSON") from error
    if answer.status_code == 422:
        raise RefusedError(_reasons(values.get("detail")) or "it does not fit")
    if answer.status_code != 200 or not isinstance(values, dict):
        raise EnvError(f"{url} answered {values!r:.200} ({answer.status_code})")
    return values


def _reasons(errors: object) -> str:
    """What a validator complains about, in one line."""
    if not isinstance(errors, list):
        return ""
    named = [error for error in errors if isinstance(error, dict)]
    return "; ".join(f"{'.'.join(map(str, e.get('loc', ())))}: {e.get('msg')}" for e in named)[:500]


def _websockets() -> tuple[Any, type[Exception]]:
    """What opens a connection, and what one may raise beside an OSError."""
    try:
        from websockets.exceptions import WebSocketException
        from websockets.sync.client import connect
    except ImportError as error:
        raise MissingExtraError("websockets", EXTRA) from error
    return connect, WebSocketException
