"""What a person sees on the terminal (standard error) while something long runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

SECONDS_BETWEEN_LINES = 30  # where there is no terminal to draw a bar on

Advance = Callable[[int, str], None]


class Reporter:
    """Says things, draws bars and tables; `quiet` says nothing."""

    def __init__(self, quiet: bool = False):
        self.console = Console(file=sys.stderr, quiet=quiet, highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """Print a line above whatever bar is drawn."""
        self.console.print(text, markup=False)

    @contextmanager
    def bar(self, what: str, total: int | None, done: int = 0) -> Generator[Advance]:
        """A progress bar; the block calls advance(steps, note). Without a terminal a line now and then."""
        if not self.console.is_terminal:
            yield self._lines(what, total, done)
            return
        columns = (
            [
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.completed:,}/{task.total:,}"),
            ]
            if total
            else [SpinnerColumn(), TextColumn("{task.description}")]
        )
        columns += [TextColumn("{task.fields[note]}"), TimeElapsedColumn()]
        columns += [TextColumn("left"), TimeRemainingColumn()] if total else []
        with Progress(*columns, console=self.console, transient=True, speed_estimate_period=120) as progress:
            task = progress.add_task(what, total=total, completed=done, note="")

            def advance(steps: int, note: str = "") -> None:
                progress.update(task, advance=steps)
                if note:
                    progress.update(task, note=note)

            yield advance

    def _lines(self, what: str, total: int | None, done: int) -> Advance:
        last = time.monotonic()

        def advance(steps: int, note: str = "") -> None:
            nonlocal done, last
            done += steps
            if time.monotonic() - last > SECONDS_BETWEEN_LINES:
                last = time.monotonic()
                self.say(f"{what} {done:,}" + (f"/{total:,}" if total else "") + (f"  {note}" if note else ""))

        return advance

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table."""
        table = Table(title=title, title_justify="left")
        for i, name in enumerate(header):
            table.add_column(name, justify="left" if i == 0 else "right")
        for row in rows:
            table.add_row(*row)
        self.console.print(table)
