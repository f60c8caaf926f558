"""Signals as requests."""

import signal
import threading

import pytest

from freshper.training.interrupt import StopRequest, termination_interrupts


@pytest.fixture(autouse=True)
def signals():
    """Both signals at their defaults, whatever the tests were started by; and given back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def _handlers():
    return signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_acts(number):
    with termination_interrupts(), StopRequest() as stop:
        assert not stop.asked
        signal.raise_signal(number)
        assert stop.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)


def test_the_second_signal_may_be_the_other_one():
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_handlers_are_given_back():
    before = _handlers()
    with StopRequest():
        assert _handlers() != before
    assert _handlers() == before
    with pytest.raises(ValueError, match="inside"), termination_interrupts(), StopRequest():
        raise ValueError("inside")
    assert _handlers() == before


def test_a_signal_that_is_ignored_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with termination_interrupts(), StopRequest() as stop:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert not stop.asked
    assert _handlers() == (signal.SIG_IGN, signal.SIG_IGN)


def test_termination_is_an_interrupt_while_entered():
    with termination_interrupts(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_somebody_elses_handler_of_termination_stays():
    heard = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    with termination_interrupts():
        signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM]


def test_outside_the_main_thread_nothing_is_touched():
    before, seen = _handlers(), []

    def work():
        with termination_interrupts(), StopRequest() as stop:
            seen.append((_handlers(), stop.asked))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(before, False)]
