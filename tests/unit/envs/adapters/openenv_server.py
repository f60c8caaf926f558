"""A guessing game behind a real server that speaks OpenEnv's protocol: HTTP with one episode, or WebSocket sessions."""

import http
import json
import random
import threading
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

NUMBER = {"number": {"type": "integer", "description": "Your guess"}}
METADATA = {"metadata": {"type": "object"}}


class Game:
    """What OpenEnv's server would hold: reset and step on dictionaries."""

    def __init__(self):
        self.secret = None

    def reset(self, seed=0, hint="", **_):
        rng = random.Random(seed)
        self.secret, self.steps = rng.randint(1, 9), 0
        shown = {"text": f"from 1 to {self.secret + rng.randint(0, 500)}{hint}", "metadata": {}}
        return {"observation": shown, "reward": None, "done": hint == "over"}

    def step(self, action):
        number = action["number"]
        if number == 13:
            raise RuntimeError("thirteen")
        self.steps += 1
        right = number == self.secret
        shown = "right" if right else "higher" if number < self.secret else "lower"
        return {"observation": {"text": shown, "tries": self.steps}, "reward": float(right) or None, "done": right}

    def state(self):
        return {"episode_id": None, "step_count": self.steps}


def faults(action):
    """What a validator says about an action, in pydantic's form."""
    if isinstance(action, dict) and isinstance(action.get("number"), int):
        return []
    return [{"type": "int_type", "loc": ["number"], "msg": "Input should be a valid integer"}]


def schema(fields=None, required=("number",)):
    return {"properties": {**METADATA, **(fields or NUMBER)}, "required": list(required), "type": "object"}


def pages(action_schema, named=True):
    """What the server answers to GET: path -> (status, content)."""
    told = {"/schema": (200, {"action": action_schema, "observation": {}, "state": {}})}
    if named:
        told["/metadata"] = (200, {"name": "Game", "description": "Guess a number"})
    return told


@contextmanager
def http_server(game, told, raw=None):
    """A server that keeps one episode between its requests; ``raw`` answers everything but GETs instead."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            status, content = (200, game.state()) if self.path == "/state" else told.get(self.path, (404, {}))
            self.answer(status, content)

        def do_POST(self):
            content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if raw is not None:
                self.answer(*raw)
            elif self.path == "/reset":
                self.answer(200, game.reset(**content))
            elif wrong := faults(content["action"]):
                self.answer(422, {"detail": wrong})
            else:
                self.answer(200, game.step(content["action"]))

        def answer(self, status, content):
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    with _running(server, partial(server.serve_forever, 0.01)):
        yield f"openenv:http://127.0.0.1:{server.server_address[1]}"
    server.server_close()


@contextmanager
def websocket_server(make_game, told, sessions=100, raw=None):
    """A server with an episode for each session; with more than ``sessions`` it refuses."""
    from websockets.exceptions import ConnectionClosed
    from websockets.sync.server import serve

    open_sessions = []

    def page(connection, request):
        if request.path == "/ws":
            return None
        status, content = told.get(request.path, (404, {}))
        return connection.respond(http.HTTPStatus(status), json.dumps(content))

    def session(connection):
        if len(open_sessions) >= sessions:
            connection.send(_error("the server is full", "CAPACITY_REACHED"))
            return
        open_sessions.append(connection)
        game = make_game()
        try:
            for message in connection:
                connection.send(raw if raw is not None else _answer(game, json.loads(message)))
        except ConnectionClosed:
            pass
        finally:
            open_sessions.remove(connection)

    with serve(session, "127.0.0.1", 0, process_request=page) as server, _running(server, server.serve_forever):
        yield f"openenv:http://127.0.0.1:{server.socket.getsockname()[1]}"


def _answer(game, message):
    kind, data = message["type"], message.get("data", {})
    if kind == "state":
        return json.dumps({"type": "state", "data": game.state()})
    if kind == "step" and (wrong := faults(data)):
        return _error("Invalid message", "VALIDATION_ERROR", errors=wrong)
    try:
        answer = game.reset(**data) if kind == "reset" else game.step(data)
    except RuntimeError as error:
        return _error(str(error), "EXECUTION_ERROR")
    return json.dumps({"type": "observation", "data": answer})


def _error(message, code, **more):
    return json.dumps({"type": "error", "data": {"message": message, "code": code, **more}})


@contextmanager
def _running(server, serve_forever):
    thread = threading.Thread(target=serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
