"""OpenEnv servers as environments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from freshper.envs.adapters.base import AdaptedEnv, Played, SplitBy
from freshper.envs.adapters.openenv_wire import (
    HttpSession,
    RefusedError,
    Session,
    WebSocketSession,
    http_client,
    request,
)
from freshper.envs.adapters.spaces import read_answer, read_json, write_space
from freshper.envs.core import INVALID_REWARD, Split, write_action
from freshper.errors import ConfigError, EnvError, UnknownNameError

Transport = Literal["websocket", "http"]
MAX_TURNS = 20


class OpenEnvEnv(AdaptedEnv):
    """An environment behind an OpenEnv server.

    Observation: the fields of the server's, ``name: value``, one alone without its name.

    Actions: in ``<answer>…</answer>``: the value of the action's only field (of its only required one), otherwise a
    JSON object with its fields, which the instructions show from the server's ``/schema``.

    Rewards and end: the server's, and ``max_turns``; a reply that cannot be read, or that the server does not take,
    costs 0.15 and a turn. Success: a return of ``success_return``; without one, an end with a return above 0.

    Parameters: ``max_turns`` (20); ``success_return``; ``split_by``; ``action_field``, the field that a reply fills;
    ``observation_field``, the one that is shown; ``whole_reply`` (false), the whole reply is the action, without
    ``<answer>``; ``reset``, a table of more arguments of the server's reset; ``timeout`` (30), seconds for an answer;
    ``transport``: "websocket", a session of its own at ``/ws``, or "http", ``POST /reset`` and ``/step``, for a server
    that keeps its one episode between requests. OpenEnv's own server makes a new environment for each HTTP request,
    and lets in as many sessions as its ``max_concurrent_envs`` says: at least ``rollout.episodes`` are needed.

    Source: OpenEnv (https://github.com/meta-pytorch/OpenEnv), its protocol as of 0.10.
    """

    def __init__(
        self,
        task: str,
        split: Split,
        *,
        max_turns: int = MAX_TURNS,
        success_return: float | None = None,
        split_by: SplitBy = "observation",
        action_field: str | None = None,
        observation_field: str | None = None,
        whole_reply: bool = False,
        reset: Mapping[str, Any] | None = None,
        timeout: float = 30.0,
        transport: Transport = "websocket",
    ) -> None:
        base = _base(task)
        if transport not in get_args(Transport):
            raise UnknownNameError("transport", str(transport), get_args(Transport))
        if not timeout > 0:
            raise ConfigError(f"{task}: timeout {timeout} must be above 0 seconds: no answer could come in time")
        if split_by == "env":
            raise ConfigError(f"{task}: split_by 'env': OpenEnv's servers know no splits, use 'seed'")
        self._form = _ActionForm(_schema(base, timeout), action_field, whole_reply, task)
        super().__init__(
            task,
            split,
            instructions=f"You act in {_about(base, timeout)}\nYou have {max_turns} turns. {self._form.help}",
            max_turns=max_turns,
            success_return=success_return,
            split_by=split_by,
        )
        self.free_form = whole_reply
        self._field = observation_field
        self._more = dict(reset or {})
        self._last = ""
        self._session: Session = (WebSocketSession if transport == "websocket" else HttpSession)(base, timeout)

    def state(self) -> dict[str, Any]:
        """What the server says about the running episode."""
        return self._session.ask("state", {})

    def close(self) -> None:
        """End the session; the next reset opens another."""
        self._session.close()

    def _begin(self, seed: int) -> str:
        answer = self._session.ask("reset", {**self._more, "seed": seed})
        if answer.get("done"):
            raise EnvError(f"{self.task}: the episode of seed {seed} is over before it begins")
        return self._show(answer)

    def _play(self, reply: str) -> Played:
        action = self._form.read(reply)
        if action is None:
            return Played(self._last, INVALID_REWARD, ended=False, valid=False)
        try:
            answer = self._session.ask("step", action)
        except RefusedError as error:
            return Played(f"error: {error}", INVALID_REWARD, ended=False, valid=False)
        reward, done = answer.get("reward"), answer.get("done", False)
        if not isinstance(reward, int | float | None) or not isinstance(done, bool):
            raise EnvError(f"{self.task}: the server answered reward {reward!r:.100} and done {done!r:.100}")
        return Played(self._show(answer), float(reward or 0), done)

    def _show(self, answer: Mapping[str, Any]) -> str:
        observation = answer.get("observation")
        if not isinstance(observation, dict):
            raise EnvError(f"{self.task}: the server's observation {observation!r:.200} is no JSON object")
        fields = {name: value for name, value in observation.items() if name != "metadata"}
        if self._field is not None:
            if self._field not in fields:
                raise UnknownNameError("observation_field", self._field, fields)
            fields = {self._field: fields[self._field]}
        shown: Any = next(iter(fields.values())) if len(fields) == 1 else fields
        self._last = write_space(shown, digits=6) or "(nothing)"
        return self._last


class _ActionForm:
    """How a reply becomes an action, from the server's schema of actions."""

    def __init__(self, schema: Mapping[str, Any], field: str | None, whole_reply: bool, task: str) -> None:
        fields = {name: kind for name, kind in schema.get("properties", {}).items() if name != "metadata"}
        if field is not None and field not in fields:
            raise UnknownNameError("action_field", field, fields)
        required = [name for name in schema.get("required", ()) if name in fields]
        alone = next((names[0] for names in (required, list(fields)) if len(names) == 1), None)
        self._field = field or alone
        self._text = self._field is not None and _is_text(fields[self._field])
        self._whole = whole_reply
        if whole_reply and not self._text:
            raise ConfigError(f"{task}: whole_reply needs an action with one field of text; it has {sorted(fields)}")
        self.help = self._help(fields)

    def read(self, reply: str) -> dict[str, Any] | None:
        """The action, None where the reply has none."""
        answer = reply if self._whole else read_answer(reply)
        if answer is None:
            return None
        value = answer if self._text else read_json(answer)
        if self._field is None:
            return value if isinstance(value, dict) else None
        return None if value is None else {self._field: value}

    def _help(self, fields: Mapping[str, Any]) -> str:
        about = {name: _kind(schema) for name, schema in fields.items()}
        if self._whole:
            return f"Your whole reply is taken as the action: {about[self._field or '']}."
        if self._field is not None:
            return f"Reply like this: {write_action('...')}, with {self._field}: {about[self._field]}."
        listed = ", ".join(f'"{name}": {kind}' for name, kind in about.items())
        return f"Reply like this: {write_action('{...}')}, with a JSON object of the fields {listed}."


def make_openenv(task: str, split: Split, **options: Any) -> OpenEnvEnv:
    """The environment behind the server of ``openenv:URL``; see :class:`OpenEnvEnv` for the options."""
    known = set(OpenEnvEnv.__init__.__kwdefaults__ or ())
    for name in options:
        if name not in known:
            raise UnknownNameError(f"option of {task}", name, known)
    return OpenEnvEnv(task, split, **options)


def _base(task: str) -> str:
    url = task.partition(":")[2].rstrip("/")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{task!r} must be openenv:http://HOST:PORT, or https")
    return url


def _schema(base: str, timeout: float) -> dict[str, Any]:
    """JSON schema of the server's actions. Raises :class:`ConfigError` where no server is found."""
    with http_client(base, timeout) as client:
        try:
            schema = request(client, "GET", f"{base}/schema").get("action")
        except EnvError as error:
            raise ConfigError(f"no OpenEnv server answers: {error}") from error
    if not isinstance(schema, dict):
        raise ConfigError(f"{base}/schema tells nothing of actions: is it an OpenEnv server?")
    return schema


def _about(base: str, timeout: float) -> str:
    """Name and description, as far as the server tells them."""
    with http_client(base, timeout) as client:
        try:
            told = request(client, "GET", f"{base}/metadata")
        except EnvError:  # older servers have none
            return "an environment."
    return f"{told.get('name') or 'an environment'}: {told.get('description') or ''}".rstrip(": ") + "."


def _is_text(schema: Mapping[str, Any]) -> bool:
    kinds = [schema, *schema.get("anyOf", ())]
    return any(kind.get("type") == "string" or "$ref" in kind or "allOf" in kind for kind in kinds)


def _kind(schema: Mapping[str, Any]) -> str:
    """A field in words: its type, its choices, its description."""
    named = schema.get("type") or "/".join(str(kind.get("type", "choice")) for kind in schema.get("anyOf", ()))
    parts = [named or "choice", f"one of {schema['enum']}" if "enum" in schema else "", schema.get("description", "")]
    return ", ".join(part for part in parts if part)
