"""Web servers on a loopback port."""

import contextlib
import re
import socket
import threading

import pytest
import uvicorn


@contextlib.contextmanager
def _served(app):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


def _request(connection):
    """All that the client has to say."""
    said = b""
    while part := connection.recv(65_536):
        said += part
        head, _, body = said.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        if length and len(body) >= int(length[1]):
            break
    return said


@pytest.fixture(scope="session")
def served():
    """Serves an application while a `with` block runs; gives its URL."""
    return _served


@pytest.fixture
def raw_server():
    """Starts a server that does to every connection what a function does; gives the URL and the list of requests."""
    with contextlib.ExitStack() as stack:

        def start(answer):
            listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            requests = []

            def run():
                while True:
                    try:
                        connection, _ = listening.accept()
                    except OSError:  # closed: the test is over
                        return
                    with connection, contextlib.suppress(OSError):
                        requests.append(_request(connection))
                        answer(connection, len(requests))

            thread = threading.Thread(target=run)
            thread.start()

            def stop():
                with contextlib.suppress(OSError):
                    listening.shutdown(socket.SHUT_RDWR)
                thread.join(20)
                assert not thread.is_alive()

            stack.callback(stop)
            return f"http://127.0.0.1:{listening.getsockname()[1]}/retrieve", requests

        yield start
