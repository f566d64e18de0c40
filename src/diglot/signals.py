"""Ctrl-C and SIGTERM: obeyed at once where nothing would be lost, put off where something has to be saved first.

Python handles a signal between two instructions of its main thread, so what computes for long outside Python goes into
a thread of its own.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

from diglot.errors import Interrupted

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM)
PR_SET_PDEATHSIG = 1  # of Linux: the signal to get when the parent ends
SECONDS_OF_AN_ECHO = 5.0  # in which torchrun passes on what the whole job was sent anyway


class Signals:
    """While this is entered, the first signal raises Interrupted with a message; a second one ends the process."""

    def __init__(self, message: str):
        self.message = message
        self.caught = 0  # the signal that is put off
        self._is_put_off = False
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():  # elsewhere whoever runs us handles signals
            self._old = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: Any) -> None:
        if not self.caught:
            self.caught, self._begun = number, time.monotonic()
            if not self._is_put_off:
                raise Interrupted(number, self.message)
        elif "TORCHELASTIC_RUN_ID" not in os.environ or time.monotonic() - self._begun > SECONDS_OF_AN_ECHO:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    @contextmanager
    def put_off(self) -> Generator[None]:
        """What comes in this block is not interrupted: it looks at `caught` itself."""
        self._is_put_off = True
        yield
        self._is_put_off = False

    @contextmanager
    def at_once(self) -> Generator[None]:
        """Within a block that is not interrupted, a part that may be: whoever enters it has to expect Interrupted."""
        self._is_put_off = False
        try:
            if self.caught:
                raise Interrupted(self.caught, self.message)
            yield
        finally:
            self._is_put_off = True


def interruptible(call: Callable[[], T]) -> T:
    """The result of a call that computes outside Python for long, waited for so that a signal is obeyed meanwhile."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join()
    for error in errors:
        raise error
    return results[0]


@contextmanager
def interrupts_waiting() -> Generator[None]:
    """Obey a signal at the end of the block: in the midst of a fork it would be lost."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[int] = []
    old = {number: signal.signal(number, lambda number, frame: caught.append(number)) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    for number in caught:
        signal.raise_signal(number)


def follow_main() -> None:
    """Have a forked process leave Ctrl-C and SIGTERM to the main one, and end when that does, be it killed.

    Left alone, one that waits to send what nobody will read would hold on to the run's lock for ever.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
