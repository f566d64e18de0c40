"""Start a system, look at its log and its memory, end it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers import OUTPUT, Step

LOOK_EVERY = 0.1  # seconds between looks at the log: a line is late by no more
WEIGH_EVERY = 1.0  # between looks at the memory, which the kernel takes milliseconds to add up
WARM_UPDATES, WARM_SECONDS = (
    3,
    15.0,
)  # what comes before is start-up, compiling, filling caches: of nobody it is counted


@dataclass
class Seen:
    """What was seen of one run, in seconds since its start."""

    updates: list[tuple[float, int, float]] = field(default_factory=list)  # when, how many, target pieces till then
    memory: list[tuple[float, int]] = field(default_factory=list)  # when, bytes
    nll: float | None = None  # of the validation text

    def add(self, now: float, step: Step) -> None:
        """A line of the log was seen."""
        before, _, pieces = self.updates[-1] if self.updates else (now, 0, 0.0)
        pieces = step.total or pieces + (step.pieces or step.speed * (now - before))
        self.updates.append((now, step.update, pieces))

    @property
    def warm(self) -> list[tuple[float, int, float]]:
        """The updates after the warm-up, and the last one in it, from which is counted."""
        if len(self.updates) <= WARM_UPDATES:
            return []
        begin = max(self.updates[WARM_UPDATES - 1][0], self.updates[0][0] + WARM_SECONDS)
        return [update for update in self.updates if update[0] >= begin]

    @property
    def seconds(self) -> float:
        """That are measured."""
        return self.warm[-1][0] - self.warm[0][0] if self.warm else 0.0

    @property
    def speed(self) -> float:
        """Target pieces a second."""
        return (self.warm[-1][2] - self.warm[0][2]) / self.seconds if self.seconds else 0.0

    @property
    def pieces_per_update(self) -> float:
        """Target pieces of an update, on average."""
        (_, first, begin), (_, last, end) = self.warm[0], self.warm[-1]
        return (end - begin) / max(1, last - first)


def run(
    command: list[str],
    folder: Path,
    log: str,
    read: Callable[[str], Step | float | None],
    is_over: Callable[[Seen], bool],
) -> Seen:
    """Start a command in a folder and watch until it ends or is over; then end it and all that it started."""
    seen, output = Seen(), folder / OUTPUT
    with output.open("ab") as file:
        begun = time.monotonic()
        process = subprocess.Popen(
            command, cwd=folder, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            position, weighed, is_running = 0, 0.0, True
            while is_running and not is_over(seen):
                time.sleep(LOOK_EVERY)
                is_running = process.poll() is None
                now = time.monotonic() - begun
                position = look(folder / log, position, now, seen, read)
                if now - weighed > WEIGH_EVERY and is_running:
                    seen.memory.append((now, memory_of(process.pid)))
                    weighed = now
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode > 0:
        tail = "\n".join(output.read_text(encoding="utf-8", errors="replace").split("\n")[-15:])
        raise SystemExit(f"{' '.join(command)}\nended with {process.returncode}; the end of {output}:\n{tail}")
    return seen


def look(log: Path, position: int, now: float, seen: Seen, read: Callable[[str], Step | float | None]) -> int:
    """Read the whole lines of a log from a position on; the next position is returned."""
    if not log.exists():
        return position
    with log.open("rb") as file:
        file.seek(position)
        new = file.read()
    whole = new[: new.rfind(b"\n") + 1]
    for line in whole.decode("utf-8", "replace").split("\n")[:-1]:
        said = read(line)
        if isinstance(said, Step):
            seen.add(now, said)
        elif said is not None:
            seen.nll = said
    return position + len(whole)


def memory_of(session: int) -> int:
    """Bytes of all processes of a session; what several share is shared out among them (PSS)."""
    total = 0
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if int((path / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                lines = (path / "smaps_rollup").read_text().split("\n")
                total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
        except (OSError, ValueError, IndexError):  # it has ended meanwhile
            continue
    return total
