"""Right, wrong, or undecided in time: what an answer can do to a check."""

import importlib.util
import multiprocessing
import sys
import threading
import time

import pytest

from freshper.envs.maths import check
from freshper.envs.maths.check import Verdict, check_answer
from freshper.errors import EnvError, MissingExtraError

RIGHT, WRONG, UNDECIDED = Verdict.RIGHT, Verdict.WRONG, Verdict.UNDECIDED
TOWER = "9^{9^{9^{9}}}"  # math-verify computes until it is killed
QUICK = {
    "a tower in Python": "9**9**9**9",
    "an integral": "\\int e^{x^x} dx",
    "a nest of roots": "\\sqrt{" * 60 + "2" + "}" * 60,
    "no text": "\ud800\x00",
    "emoji and escapes": "\x1b[31m\U0001f45f" * 50,
    "a line end": "18\nx",
}
ENDLESS = {
    "a hundred thousand braces": "{" * 100_000 + "}" * 100_000,
    "a hundred thousand open parentheses": "(" * 100_000,
    "a power to expand": "(1+x)^{99999}",
}


@pytest.fixture
def no_worker(monkeypatch):
    """Whoever asks math-verify fails the test."""
    monkeypatch.setattr(check._Workers, "check", lambda *_: pytest.fail("math-verify was asked"))
    check_answer.cache_clear()


@pytest.mark.usefixtures("no_worker")
@pytest.mark.parametrize(
    ("reference", "answer", "verdict"),
    [
        ("204", "204", RIGHT),
        ("204", "0204.0", RIGHT),
        ("204", "+204.", RIGHT),
        ("204", "205", WRONG),
        ("-3", "3", WRONG),
        ("18", "\\$18", RIGHT),
        ("18", " $18.00$ ", RIGHT),
        ("1,234", "1234", RIGHT),
        ("1234", "1{,}234", RIGHT),
        ("1234567", "1,234,567", RIGHT),
        ("1234", "12,34", WRONG),
        ("0.5", "1/2", RIGHT),
        ("0.5", "\\frac{1}{2}", RIGHT),
        ("0.5", "-\\frac{1}{2}", UNDECIDED),
        ("$\\frac{42}{419}$", "42/419", RIGHT),
        ("$\\frac{42}{419}$", "84/838", WRONG),
        ("2", "4/2", WRONG),
        ("1/2", "1/0", WRONG),
        ("231", "566 - 335", WRONG),
        ("18", "3*6", WRONG),
        ("18", "18, 19", WRONG),
        ("18", "18 or 19", WRONG),
        ("18", "18=18", WRONG),
        ("18", "", WRONG),
        ("18", "$ $", WRONG),
        ("5", "five", WRONG),
        ("Yes", "Yes", RIGHT),
        ("(1,2)", "(1,2)", RIGHT),
        ("9" * 50, "9" * 50 + ".0", RIGHT),
    ],
)
def test_what_needs_no_help(reference, answer, verdict, monkeypatch):
    if verdict is UNDECIDED:  # two numbers, one no whole one: rounding is left to math-verify
        monkeypatch.setattr(check._Workers, "check", lambda *_: UNDECIDED)
    assert check_answer(reference, answer) is verdict


@pytest.mark.parametrize(
    ("reference", "answer", "verdict"),
    [
        ("18", "x = 18", RIGHT),
        ("18", "18^\\circ", RIGHT),
        ("18", "18\\text{ apples}", RIGHT),
        ("18", "\\text{18}", RIGHT),
        ("18", "19^\\circ", WRONG),
        *(("120", sum, WRONG) for sum in ("5!", "\\sqrt{14400}", "|-120|", "--120", "\\max(120)", "abs(-120)")),
        ("120", "the max is 120 m", WRONG),  # a word that computes: the price of refusing calculations
        ("(1,234)", "1234", WRONG),
        ("(1,234)", "(1, 234)", RIGHT),
        ("0.5", "50%", RIGHT),
        ("1/3", "0.3333333", RIGHT),
        ("1/3", "0.334", WRONG),
        ("2\\sqrt{2}", "\\sqrt{8}", RIGHT),
        ("2\\sqrt{2}", "\\sqrt{7}", WRONG),
        ("x^2+2x+1", "(x+1)^2", RIGHT),
        ("x^2+2x+1", "(x+2)^2", WRONG),
        ("(1, 2)", "(1,2)", RIGHT),
        ("(1, 2)", "(2,1)", WRONG),
        ("\\{1, 2\\}", "\\{2, 1\\}", RIGHT),
        ("\\{1, 2\\}", "1, 2, 3", WRONG),
    ],
)
def test_what_math_verify_decides(reference, answer, verdict):
    assert check_answer(reference, answer, 20.0) is verdict


class TestTimeLimit:
    @pytest.mark.parametrize("name", QUICK)
    def test_odd_answers_are_wrong(self, name):
        assert check_answer("x+1", QUICK[name], 20.0) is WRONG
        assert check_answer("204", QUICK[name], 20.0) is WRONG

    @pytest.mark.parametrize("name", ENDLESS)
    def test_nothing_hangs(self, name):
        check_answer.cache_clear()
        start = time.monotonic()
        assert check_answer("x+1", ENDLESS[name], 0.3) is UNDECIDED
        assert check_answer("204", ENDLESS[name], 0.3) is WRONG
        assert time.monotonic() - start < 10  # a check of at most 0.3 s of computing or 1.2 s, and perhaps a start

    def test_an_endless_check_is_undecided_and_asked_once(self, monkeypatch):
        check_answer.cache_clear()
        assert check_answer("x+1", TOWER, 0.3) is UNDECIDED
        monkeypatch.setattr(check._Workers, "check", lambda *_: pytest.fail("asked again"))
        assert check_answer("x+1", TOWER, 0.3) is UNDECIDED

    def test_the_clock_ends_a_check_that_does_not_compute(self, tmp_path, monkeypatch):
        """Where the limit on computing time does not bite, as on a system without it."""
        sleeper = tmp_path / "worker.py"
        sleeper.write_text("import time\nprint('true', flush=True)\ninput()\ntime.sleep(60)\n")
        monkeypatch.setattr(check, "_SCRIPT", sleeper)
        workers = check._Workers()
        start = time.monotonic()
        assert workers.check("x", "y", 0.1) is UNDECIDED
        assert time.monotonic() - start < 5

    def test_from_threads(self, monkeypatch):
        """More of them than processes; the slow one does not take the quick ones with it."""
        check_answer.cache_clear()
        monkeypatch.setattr(check._WORKERS, "_room", threading.Semaphore(2))
        asked = [("x+1", f"{n} + x", 20.0) for n in range(1, 6)]
        asked += [("x+1", f"9^{{9^{{9^{{{n}}}}}}}", 0.3) for n in (9,)]
        verdicts = {}
        threads = [
            threading.Thread(target=lambda arguments=arguments: verdicts.update({arguments: check_answer(*arguments)}))
            for arguments in asked
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert [verdicts[arguments] for arguments in asked] == [RIGHT] + [WRONG] * (len(asked) - 2) + [UNDECIDED]
        assert len(check._WORKERS._idle) <= 2


class TestProcesses:
    def test_one_process_answers_again_and_again(self):
        check_answer("x+1", "x+4", 20.0)
        before = [worker._process.pid for worker in check._WORKERS._idle]
        for n in range(5, 10):
            assert check_answer("x+1", f"x+{n}", 20.0) is WRONG
        assert [worker._process.pid for worker in check._WORKERS._idle] == before

    def test_a_process_that_died_meanwhile_is_replaced(self):
        workers = check._Workers()
        assert workers.check("x+1", "1+x", 20.0) is RIGHT
        (worker,) = workers._idle
        worker._process.kill()
        worker._process.wait()
        assert workers.check("x+1", "1+x", 20.0) is RIGHT
        assert workers._idle != [worker]
        workers.close()
        assert worker._process.returncode is not None
        assert not workers._idle

    @pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="this system does not fork")
    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
    def test_a_fork_starts_its_own(self):
        assert check_answer("x+1", "1 + x", 20.0) is RIGHT
        before = [worker._process.pid for worker in check._WORKERS._idle]
        context = multiprocessing.get_context("fork")
        verdicts = context.Queue()
        child = context.Process(target=_check_in_fork, args=(before, verdicts))
        child.start()
        assert verdicts.get(timeout=60) == (True, "right")
        child.join(60)
        assert check_answer("x+1", "x + 1.0", 20.0) is RIGHT
        assert [worker._process.pid for worker in check._WORKERS._idle] == before

    def test_a_process_that_does_not_start_says_why(self, tmp_path, monkeypatch):
        broken = tmp_path / "worker.py"
        broken.write_text("raise SystemExit('sympy is too old')")
        monkeypatch.setattr(check, "_SCRIPT", broken)
        with pytest.raises(
            EnvError, match="math-verify does not work here, so no answer can be checked: sympy is too old"
        ):
            check._Workers().check("x", "y", 1.0)

    def test_a_math_verify_that_is_wrong_is_refused(self, tmp_path, monkeypatch):
        wrong = tmp_path / "worker.py"
        wrong.write_text("print('false')")
        monkeypatch.setattr(check, "_SCRIPT", wrong)
        with pytest.raises(EnvError, match="it gives no reason"):
            check._Workers().check("x", "y", 1.0)

    def test_without_math_verify_the_extra_is_named(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "math_verify", None)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(MissingExtraError, match=r"math-verify is needed here: pip install 'freshper\[maths\]'"):
            check._Workers().check("x", "y", 1.0)


def _check_in_fork(parents, verdicts):
    verdict = check_answer("x+1", "x + 1", 20.0)
    own = {worker._process.pid for worker in check._WORKERS._idle}
    verdicts.put((not own & set(parents), verdict.value))
    check._WORKERS.close()
