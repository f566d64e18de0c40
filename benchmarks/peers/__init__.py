"""One file a system: how it is prepared, started and read, and nothing else.

Each has:
    SETTINGS        what its speed may depend on, by name; all are tried, and the fastest is measured
    LOG             the file of its folder that is read while it trains; OUTPUT is what it prints
    NEEDS           the list of packages, NEEDS.txt here, of its environment; "" is the one that runs this
    NOTE            where it differs from the task, and why that could not be helped
    prepare(job)    what it reads, made once and kept (none needed: left out)
    command(job)    the command that trains
    score(job)      a command that prints the loss on the validation text afterwards; left out where training does
    read(line)      what a line of the log says: a Step, the loss on the validation text as a float, or None
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.task import Corpus, Network

OUTPUT = "output.log"


@dataclass(frozen=True)
class Job:
    """What one process is to train."""

    corpus: Corpus
    network: Network
    setting: dict[str, str]
    python: Path  # of the system's own environment
    folder: Path  # of this run, empty
    threads: int
    updates: int  # after which it validates and ends


@dataclass(frozen=True)
class Step:
    """An update is done: how many are, and the target pieces (without padding, ends counted) as the system tells them:
    those since the last line, those of the whole run, or how many a second since the last line."""

    update: int
    pieces: float = 0.0
    total: float = 0.0
    speed: float = 0.0
