"""Text in and out of a command: standard streams or files, always UTF-8, a line ended by LF."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from diglot.errors import Interrupted, TextError

STANDARD_INPUT = Path("-")


def open_input(path: Path) -> Iterator[str]:
    """The lines of standard input or of a file, as they arrive; a file that cannot be read is told at once."""
    from diglot.corpus import open_stream, stream_lines

    if path != STANDARD_INPUT:
        return stream_lines(open_stream(path), str(path))
    if sys.stdin is None:
        raise TextError("standard input is closed: there is nothing to read; name a file.")
    # a reader of its own: Python could not end while a thread waits in the one that is sys.stdin's
    return stream_lines(os.fdopen(os.dup(sys.stdin.fileno()), "rb"), "standard input")


def read_pairs(src: Path, tgt: Path | None) -> Iterator[tuple[str, str]]:
    """Lines of two files, or those of one split at its TABs; a file that cannot be read is told at once."""
    sides = [open_input(path) for path in (src, tgt) if path is not None]

    def pairs() -> Iterator[tuple[str, str]]:
        if tgt is None:
            for number, line in enumerate(sides[0], 1):
                one, *others = line.split("\t")  # further columns are passed over, as in training
                if not others:
                    name = "standard input" if src == STANDARD_INPUT else src
                    raise TextError(
                        f"{name}, line {number:,}: no TAB between source and target; if these are the sources alone, "
                        "name the file of the targets too."
                    )
                yield one, others[0]
            return
        for number, one in enumerate(sides[0]):
            two = next(sides[1], None)
            if two is None:
                raise TextError(f"{src} has more lines than {tgt}, which has {number:,}; they must match line by line.")
            yield one, two
        if next(sides[1], None) is not None:
            raise TextError(f"{tgt} has more lines than {src}; they must match line by line.")

    return pairs()


def read_text(path: Path) -> list[str]:
    """All lines of standard input or of a file."""
    from diglot.corpus import read_lines

    return list(open_input(path)) if path == STANDARD_INPUT else read_lines(path)


@contextmanager
def open_output(path: Path | None) -> Generator[TextIO]:
    """Standard output, or a file; UTF-8 and LF whatever the locale says."""
    try:
        if path is None and sys.stdout is None:
            raise TextError("standard output is closed: there is nowhere to write.")
        file: Any = path if path is not None else os.dup(sys.stdout.fileno())
        with open(file, "w", encoding="utf-8", newline="\n") as out:  # noqa: PTH123
            yield out
    except BrokenPipeError:  # as of `| head`: nobody reads on
        raise Interrupted(signal.SIGPIPE, "") from None
    except OSError as error:
        raise TextError(f"cannot write {path or 'to standard output'}: {error.strerror}.") from None


def show(text: str) -> None:
    """Print lines to standard output."""
    with open_output(None) as out:
        out.write(text + "\n")
