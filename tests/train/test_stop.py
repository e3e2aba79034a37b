"""Signals ask for a stop; only a second Ctrl-C insists."""

import signal

import pytest

from penstock.train import stop as stop_module
from penstock.train.stop import StopRequest


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_asks_and_does_not_interrupt(number: signal.Signals, code: int) -> None:
    with StopRequest() as stop:
        assert (stop.signal, stop.exit_code) == (None, 0)
        signal.raise_signal(number)
        assert (stop.signal, stop.exit_code) == (number, code)


def test_whoever_shows_the_run_is_told_once() -> None:
    told: list[int] = []
    with StopRequest(lambda: told.append(1)):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    assert told == [1]


def test_a_second_ctrl_c_stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_module, "SAME_PRESS_SECONDS", -1.0)
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.signal == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_launcher_that_passes_ctrl_c_on_is_not_a_second_press() -> None:
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert stop.signal == signal.SIGINT


def test_repeated_termination_never_insists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_module, "SAME_PRESS_SECONDS", -1.0)
    with StopRequest() as stop:
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
    assert stop.exit_code == 143


def test_ctrl_c_insists_after_a_termination(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_module, "SAME_PRESS_SECONDS", -1.0)
    with StopRequest():
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopRequest():
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
