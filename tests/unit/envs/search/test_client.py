"""The HTTP retriever against real servers: sound ones, and those that hang, babble, break and come back."""

import json
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from freshper.envs.search import client
from freshper.envs.search.calls import write_search
from freshper.envs.search.client import HttpRetriever
from freshper.envs.search.env import Asked, SearchEnv, SearchRules
from freshper.envs.search.retrieval import Passage
from freshper.errors import ConfigError, EnvError, MissingExtraError

GOOD = {"result": [[{"document": {"id": "7", "contents": "Paris\nA city."}, "score": 1.5}]]}


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch):
    monkeypatch.setattr(client, "BACKOFF_SECONDS", 0.01)


def reply(content, status="200 OK"):
    content = content if isinstance(content, bytes) else json.dumps(content).encode()
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (
        status.encode(),
        len(content),
        content,
    )


def always(content, status="200 OK"):
    return lambda connection, number: connection.sendall(reply(content, status))


def test_what_is_asked_and_what_is_read(raw_server):
    url, requests = raw_server(always(GOOD))
    assert HttpRetriever(url).retrieve("where is Paris \ud800", 3) == [Passage("Paris\nA city.", 1.5)]
    head, _, body = requests[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /retrieve HTTP/1.1\r\n")
    assert b"content-type: application/json" in head.lower()
    assert json.loads(body) == {"queries": ["where is Paris ?"], "topk": 3, "return_scores": True}


@pytest.mark.parametrize(
    ("result", "passages"),
    [
        ([[]], []),
        ([[{"document": {"text": "x"}, "score": 2}]], [Passage("x", 2.0)]),
        ([[{"contents": "x"}, {"text": "y"}]], [Passage("x", 0.0), Passage("y", 0.0)]),
        ([[{"document": {"contents": str(n)}, "score": -n} for n in range(9)]], [Passage("0", 0), Passage("1", -1)]),
    ],
)
def test_other_forms_of_a_result(raw_server, result, passages):
    url, _ = raw_server(always({"result": result}))
    assert HttpRetriever(url).retrieve("x", 2) == passages


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"<html>It works!</html>",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"result": [[{"document": {"contents": "cut',
        {"error": "no"},
        {"result": []},
        {"result": "x"},
        {"result": [{"contents": "x"}]},
        {"result": [["x"]]},
        {"result": [[{"document": {"contents": 7}, "score": 1}]]},
        {"result": [[{"document": {"contents": "x"}, "score": "high"}]]},
        {"result": [[{"document": {"contents": "x"}, "score": None}]]},
        {"result": [[{"document": {"contents": "x"}, "score": float("nan")}]]},
        b'{"result": [[{"contents": "half \\ud800"}]]}',
    ],
)
def test_garbage_is_an_error_that_names_the_url_and_is_not_asked_for_again(raw_server, content):
    url, requests = raw_server(always(content))
    with pytest.raises(EnvError, match=rf"^{url} did not answer as a retriever does"):
        HttpRetriever(url).retrieve("x", 2)
    assert len(requests) == 1


def test_a_password_in_the_url_is_sent_and_never_shown(raw_server):
    url, requests = raw_server(always(b"garbage"))
    with pytest.raises(EnvError) as caught:
        HttpRetriever(url.replace("http://", "http://me:secret@")).retrieve("x", 2)
    assert str(caught.value).startswith(f"{url} did not answer")
    assert "secret" not in str(caught.value)
    assert b"authorization: basic" in requests[0].lower()


def test_a_long_answer_is_shown_in_part(raw_server):
    url, _ = raw_server(always(b"babble " * 10_000))
    with pytest.raises(EnvError) as caught:
        HttpRetriever(url).retrieve("x", 2)
    assert "babble babble" in str(caught.value)
    assert len(str(caught.value)) < 600


def test_an_endless_answer_is_cut_off(raw_server, monkeypatch):
    monkeypatch.setattr(client, "MAX_RESPONSE_BYTES", 1 << 20)
    url, _ = raw_server(always(b"x" * (3 << 20)))
    with pytest.raises(EnvError, match="answered with more than 1 MiB"):
        HttpRetriever(url).retrieve("x", 2)


@pytest.mark.parametrize("status", ["500 Internal Server Error", "503 Service Unavailable", "429 Too Many Requests"])
def test_a_server_that_comes_back_is_asked_again(raw_server, status):
    url, requests = raw_server(lambda c, number: c.sendall(reply(GOOD) if number == 3 else reply(b"busy", status)))
    assert HttpRetriever(url, retries=2).retrieve("x", 2)[0].score == 1.5
    assert len(requests) == 3


def test_a_server_that_does_not_come_back(raw_server):
    url, requests = raw_server(always(b"out of \x1b[31mmemory", "500 Internal Server Error"))
    with pytest.raises(EnvError, match=rf"^{url} gave no answer in 3 attempts; the last ended with status 500: 'out"):
        HttpRetriever(url, retries=2).retrieve("x", 2)
    assert len(requests) == 3


@pytest.mark.parametrize("status", ["400 Bad Request", "404 Not Found", "301 Moved Permanently"])
def test_a_refusal_is_final(raw_server, status):
    url, requests = raw_server(always({"error": "topk"}, status))
    with pytest.raises(EnvError, match=rf"refused the query with status {status[:3]}: '{{\"error\": \"topk\"}}'"):
        HttpRetriever(url).retrieve("x", 2)
    assert len(requests) == 1


def test_a_connection_that_breaks_off(raw_server):
    url, requests = raw_server(lambda connection, number: number == 2 and connection.sendall(reply(GOOD)))
    assert len(HttpRetriever(url, retries=1).retrieve("x", 2)) == 1
    assert len(requests) == 2


def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}/retrieve"
    with pytest.raises(EnvError, match=rf"^{url} gave no answer in 2 attempts; the last ended with ConnectError"):
        HttpRetriever(url, retries=1).retrieve("x", 2)


def test_t20_a_server_that_hangs(raw_server):
    over = threading.Event()
    url, _ = raw_server(lambda connection, number: over.wait(20))
    start = time.monotonic()
    try:
        with pytest.raises(EnvError, match="gave no answer in 2 attempts; the last ended with ReadTimeout"):
            HttpRetriever(url, timeout=0.3, retries=1).retrieve("x", 2)
    finally:
        over.set()
    assert 0.5 < time.monotonic() - start < 5


def test_t20_a_server_that_trickles(raw_server):
    """Every piece comes in time, the whole never."""
    over = threading.Event()

    def trickle(connection, number):
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        while not over.wait(0.05):
            connection.sendall(b"x")

    url, _ = raw_server(trickle)
    start = time.monotonic()
    try:
        with pytest.raises(EnvError, match=r"ReadTimeout \(the answer took more than 0.4 s\)"):
            HttpRetriever(url, timeout=0.4, retries=0).retrieve("x", 2)
    finally:
        over.set()
    assert time.monotonic() - start < 5


def test_only_so_many_queries_are_under_way(served):
    """Eight threads ask a server that counts; the others wait for their turn and all are answered."""
    lock, together, most = threading.Lock(), [], []

    class Counting:
        def retrieve(self, query, topk):
            with lock:
                together.append(query)
                most.append(len(together))
            threading.Event().wait(0.05)
            with lock:
                together.remove(query)
            return [Passage(query, 1.0)]

    from freshper.envs.search.server import make_app

    with served(make_app(Counting())) as url, ThreadPoolExecutor(8) as pool:
        retriever = HttpRetriever(url, max_in_flight=3, retries=0)
        found = list(pool.map(lambda n: retriever.retrieve(f"q{n}", 1)[0].text, range(24)))
    assert found == [f"q{n}" for n in range(24)]
    assert max(most) == 3


def test_a_query_that_finds_no_place_in_time_is_an_error(raw_server):
    over, there = threading.Event(), threading.Event()

    def hang(connection, number):
        there.set()
        over.wait(20)
        connection.sendall(reply(GOOD))

    url, _ = raw_server(hang)
    retriever = HttpRetriever(url, timeout=0.5, retries=9, max_in_flight=1)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(retriever.retrieve, "first", 1)
        assert there.wait(20)
        with pytest.raises(EnvError, match=rf"^{url}: 1 queries were under way for 0.5 s, and this one found no place"):
            retriever.retrieve("second", 1)
        over.set()
        assert len(first.result(20)) == 1


def test_an_episode_with_a_broken_retriever_ends_in_an_env_error(raw_server):
    url, _ = raw_server(always(b"oops"))
    env = SearchEnv("test", "train", [[Asked("who ?", ("he",))]], HttpRetriever(url), SearchRules())
    env.reset(0)
    with pytest.raises(EnvError, match="did not answer as a retriever does"):
        env.step(write_search("x"))


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("", {}, "retriever '' must be a URL"),
        ("127.0.0.1:8000", {}, "must be a URL"),
        ("ftp://x/retrieve", {}, "must be a URL"),
        ("http:///retrieve", {}, "must be a URL"),
        ("http://a..b/", {}, "must be a URL"),
        (f"http://{'a' * 70}/", {}, "must be a URL"),
        ("http://x:99999/", {}, "must be a URL"),
        ("http://x:-1/", {}, "must be a URL"),
        ("http://[::1", {}, "must be a URL"),
        ("http://x", {"timeout": 0}, "timeout 0 must be above 0"),
        ("http://x", {"timeout": float("inf")}, "timeout inf must be above 0 and finite"),
        ("http://x", {"timeout": float("nan")}, "timeout nan must be"),
        ("http://x", {"retries": -1}, "retries -1 must be at least 0"),
        ("http://x", {"max_in_flight": 0}, "max_in_flight 0 at least 1"),
    ],
)
def test_arguments_that_are_none(url, options, message):
    with pytest.raises(ConfigError, match=message):
        HttpRetriever(url, **options)


@pytest.mark.parametrize(
    "url",
    [
        "http://user:s3cr#et@127.0.0.1/",
        "http://user:s3cret@127.0.0.1:notaport",
        "ftp://user:s3cret@x/",
        "http://user:s3cret@[::1",
        "http://us/er:s3cret@x/",
    ],
)
def test_a_password_is_not_shown_where_the_url_is_none(url):
    with pytest.raises(ConfigError, match="must be a URL") as caught:
        HttpRetriever(url)
    assert "s3cr" not in str(caught.value)


def test_a_host_that_cannot_be_looked_up_is_an_error_of_the_episode():
    with pytest.raises(EnvError, match=r"^http://xn--/retrieve gave no answer in 1 attempts"):
        HttpRetriever("http://xn--/", retries=0).retrieve("x", 2)


def test_without_a_path_retrieve_is_meant():
    assert HttpRetriever("http://x:8000").url == HttpRetriever("http://x:8000/").url == "http://x:8000/retrieve"
    assert HttpRetriever("https://x/search/v1").url == "https://x/search/v1"


def test_without_httpx_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(MissingExtraError, match=r"httpx is needed here: pip install 'freshper\[search\]'"):
        HttpRetriever("http://x")
