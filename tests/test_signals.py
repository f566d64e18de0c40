"""Ctrl-C and SIGTERM: when they are obeyed, and that they are obeyed once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from threading import Timer

import pytest

from diglot.errors import Interrupted
from diglot.signals import SIGNALS, Signals, interruptible, interrupts_waiting


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", SIGNALS)
def test_where_nothing_would_be_lost_a_signal_is_obeyed_at_once(number: int):
    before = [signal.getsignal(each) for each in SIGNALS]
    with pytest.raises(Interrupted, match="bye") as caught, Signals("bye"):
        send(number)
    assert caught.value.signal_number == number
    assert [signal.getsignal(each) for each in SIGNALS] == before


def test_it_is_put_off_where_something_has_to_be_saved_but_for_parts_of_it():
    reached: list[str] = []
    with Signals("bye") as signals, signals.put_off():
        with signals.at_once():
            reached.append("in time")
        send(signal.SIGTERM)
        assert signals.caught == signal.SIGTERM
        with pytest.raises(Interrupted, match="bye"), signals.at_once():
            reached.append("too late")
    assert reached == ["in time"]
    with Signals("bye") as signals, signals.put_off():
        with pytest.raises(Interrupted), signals.at_once():
            send(signal.SIGINT)
        assert signals.caught == signal.SIGINT
    assert reached == ["in time"]


def test_what_computes_outside_python_is_left_for_a_signal():
    assert interruptible(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        interruptible(lambda: 1 // 0)
    begun = time.monotonic()
    timer = Timer(0.1, lambda: send(signal.SIGINT))
    timer.start()
    with pytest.raises(Interrupted), Signals("bye"):
        interruptible(lambda: time.sleep(60))
    assert time.monotonic() - begun < 10


def second_signal(**environment: str) -> int:
    """The exit code of a process that saves while two signals come."""
    code = (
        "import os, signal, time\n"
        "from diglot.signals import Signals\n"
        "with Signals('bye') as signals, signals.put_off():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(0.1)\n"
    )
    return subprocess.run([sys.executable, "-c", code], env={**os.environ, **environment}, check=False).returncode


def test_a_second_signal_ends_the_process_but_not_the_same_one_by_way_of_torchrun():
    assert second_signal() == -signal.SIGINT
    assert second_signal(TORCHELASTIC_RUN_ID="1") == 0


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_in_the_midst_of_a_fork_is_obeyed_after_it(number: int):
    done: list[str] = []

    def fork() -> None:
        with Signals("bye"), interrupts_waiting():
            send(number)
            done.append("all")

    with pytest.raises(Interrupted, match="bye"):
        fork()
    assert done
