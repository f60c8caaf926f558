"""The served retriever: real requests to a real server, good and bad."""

import sys

import httpx
import pytest

from freshper.envs.search import server
from freshper.envs.search.client import HttpRetriever
from freshper.envs.search.index import Bm25Index
from freshper.errors import ConfigError, MissingExtraError

INDEX = Bm25Index.build(["the cat sat", "a dog and a cat", "a dog barks", "caf\u00e9"])


@pytest.fixture(scope="module")
def url(served):
    with served(server.make_app(INDEX)) as url:
        yield url


@pytest.fixture(scope="module")
def web():
    with httpx.Client(trust_env=False) as client:
        yield client


def test_the_client_finds_what_the_index_finds(url):
    retriever = HttpRetriever(url)
    for query in ("cat", "dog barks", "caf\u00e9", "zebra", "", "\x00"):
        assert retriever.retrieve(query, 2) == INDEX.retrieve(query, 2)


def test_the_common_protocol(url, web):
    asked = {"queries": ["barks", "zebra"], "topk": 1, "return_scores": True}
    score = INDEX.retrieve("barks", 1)[0].score
    answer = web.post(f"{url}/retrieve", json=asked)
    assert answer.json() == {"result": [[{"document": {"contents": "a dog barks"}, "score": score}], []]}
    plain = web.post(f"{url}/retrieve", json={"queries": ["barks"]})
    assert plain.json() == {"result": [[{"contents": "a dog barks"}, {"contents": "a dog and a cat"}][:1]]}
    nothing = web.post(f"{url}/retrieve", json={"queries": [], "topk": None})
    assert nothing.json() == {"result": []}


def test_health(url, web):
    assert web.get(f"{url}/health").json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"", "the request is no JSON"),
        (b"\xff", "the request is no JSON"),
        (b"[" * 100_000, "the request is no JSON"),
        (b"[]", "queries must be a list of texts"),
        (b"{}", "queries must be a list of texts"),
        (b'{"queries": "cat"}', "queries must be a list of texts"),
        (b'{"queries": [1]}', "queries must be a list of texts"),
        (b'{"queries": ["x"], "topk": 0}', "topk 0 must be an integer in [1, 1000]"),
        (b'{"queries": ["x"], "topk": true}', "topk True must be"),
        (b'{"queries": ["x"], "topk": 1e9}', "topk 1000000000.0 must be"),
        (b'{"queries": ["x"], "return_scores": "yes"}', "return_scores 'yes' must be true or false"),
        (b'{"queries": [%s"x"]}' % (b'"x",' * 1024), "1025 queries in one request: at most 1024"),
    ],
)
def test_a_request_that_is_none_gets_400_and_the_reason(url, web, body, error):
    answer = web.post(f"{url}/retrieve", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"].startswith(error)


def test_a_request_that_is_too_long_gets_413(url, web, monkeypatch):
    monkeypatch.setattr(server, "MAX_BODY_BYTES", 100)
    answer = web.post(f"{url}/retrieve", json={"queries": ["x" * 200]})
    assert (answer.status_code, answer.json()) == (413, {"error": "the request has more than 100 bytes"})


def test_other_paths_and_methods(url, web):
    assert web.get(f"{url}/retrieve").status_code == 405
    assert web.post(f"{url}/").status_code == 404


def test_half_a_surrogate_pair_finds_nothing(url, web):
    answer = web.post(f"{url}/retrieve", content=b'{"queries": ["\\ud800"]}')
    assert answer.json() == {"result": [[]]}


@pytest.mark.parametrize("port", [-1, 65_536])
def test_a_port_that_is_none(port):
    with pytest.raises(ConfigError, match=rf"port {port} must be in \[0, 65535\]"):
        server.serve(INDEX, "127.0.0.1", port, print)


def test_an_address_of_another_machine():
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1 port 0 cannot be served at"):
        server.serve(INDEX, "192.0.2.1", 0, print)


def test_a_port_that_is_taken(url):
    port = int(url.rpartition(":")[2])
    with pytest.raises(ConfigError, match=rf"port {port} cannot be served at: .*; choose another --port"):
        server.serve(INDEX, "127.0.0.1", port, print)


@pytest.mark.parametrize("library", ["starlette.applications", "uvicorn"])
def test_without_its_libraries_the_extra_is_named(monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    name = library.partition(".")[0]
    with pytest.raises(MissingExtraError, match=rf"{name} is needed here: pip install 'freshper\[search\]'"):
        server.serve(INDEX, "127.0.0.1", 0, print)
