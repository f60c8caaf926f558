"""``freshper serve-retriever``, as a process: it builds, serves, and stops when it is told to."""

import json
import re
import signal
import subprocess
import sys

import pytest

from freshper import cli
from freshper.cli.exit_codes import INTERRUPTED, WRONG_INPUT
from freshper.envs.search.client import HttpRetriever


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setenv("FRESHPER_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"contents": text}) + "\n" for text in ("a red fox", "a grey cat")))
    return path


def test_serves_until_interrupted(corpus):
    command = [sys.executable, "-m", "freshper", "serve-retriever", str(corpus), "--port", "0"]
    serving = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = serving.stdout.readline()
        url = re.fullmatch(rf"serving 2 passages of {corpus} at (http://127\.0\.0\.1:\d+/retrieve)\n", line)[1]
        assert [passage.text for passage in HttpRetriever(url, retries=0).retrieve("fox", 3)] == ["a red fox"]
        serving.send_signal(signal.SIGINT)
        rest, errors = serving.communicate(timeout=30)
    finally:
        serving.kill()
    assert (serving.returncode, rest, errors) == (INTERRUPTED, "", "freshper: interrupted\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.jsonl"], "none.jsonl cannot be read: No such file or directory"),
        (["{corpus}", "--port", "99999"], "port 99999 must be in [0, 65535]"),
        (["{corpus}", "--host", ""], "host '' would let in every machine"),
        (["{corpus}", "--host", "192.0.2.1"], "192.0.2.1 port 8000 cannot be served at"),
        ([], "Missing from freshper serve-retriever"),
        (["{corpus}", "--prot", "1"], "--prot"),
    ],
)
def test_wrong_input_is_one_line(corpus, capsys, words, message):
    assert cli.main(["serve-retriever", *(word.format(corpus=corpus) for word in words)]) == WRONG_INPUT
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("freshper: ")
    assert err.count("\n") == 1
    assert message in err
