"""The runs below a directory, and where each stands.

Looks at the end of a log and at small files alone, and imports nothing that knows tensors: it is as fast with a hundred
runs, and beside one that trains. Whatever cannot be read is a row that says so.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from diglot.config import read_toml
from diglot.errors import ConfigError

MARKS = {".lock", "log.jsonl"}  # of a run directory
DEPTH = 3  # directories within directories that are looked into
TAIL = 1 << 16  # bytes of a log that are read
HEADER = ("RUN", "STATE", "UPDATE", "EPOCH", "BEST_BLEU", "FINAL_BLEU", "LAST_ACTIVITY", "")


@dataclass(frozen=True)
class RunStatus:
    """Where a run stands; what is not known is None."""

    run: str
    state: str  # running, stopped, finished, failed-or-killed, empty; unreadable, no-run
    update: int | None = None
    goal: int | None = None
    epoch: int | None = None
    best_bleu: float | None = None
    best_update: int | None = None
    final_bleu: float | None = None
    active: str | None = None
    remark: str = ""

    def row(self) -> tuple[str, ...]:
        """As cells of a table, none of them empty and none with a blank in it but the remark."""
        best = None if self.best_bleu is None else f"{self.best_bleu:.2f}@{self.best_update}"
        cells = (
            self.run if self.run.isprintable() else repr(self.run),
            self.state,
            None if self.update is None else f"{self.update}/{self.goal or '?'}",
            self.epoch,
            best,
            None if self.final_bleu is None else f"{self.final_bleu:.2f}",
            self.active,
        )
        return (*("-" if cell is None else str(cell) for cell in cells), self.remark)


def list_runs(root: Path) -> list[RunStatus]:
    """The runs in a directory and in the directories below it, or the one that it is."""
    if not root.is_dir():
        raise ConfigError(f"there is no directory {root}; name the one that holds the runs: diglot runs DIR")
    return look_below(root, 0)


def look_below(path: Path, depth: int) -> list[RunStatus]:
    """The runs here; a directory that holds none and is no model is a row of its own."""
    try:
        entries = sorted(os.scandir(path), key=lambda entry: entry.name)
        if {entry.name for entry in entries} & MARKS:
            return [look_at(path)]
        if any(entry.name == "manifest.json" for entry in entries):
            return []
        below = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False) and entry.name[0] != "."]
    except OSError as error:
        return [RunStatus(str(path), "unreadable", remark=f"{error.strerror}.")]
    found = [status for name in below for status in look_below(path / name, depth + 1)] if depth < DEPTH else []
    if depth and all(status.state == "no-run" for status in found):
        return [RunStatus(str(path), "no-run", remark="holds no run.")]
    return found


def look_at(run: Path) -> RunStatus:
    """One run directory."""
    try:
        config, log = run / "config.toml", run / "log.jsonl"
        goal = read_toml(config)["train"]["max_updates"] if config.exists() else None
        lines = read_tail(log) if log.exists() else []
        saved = read_newest_state(run)
        last = lines[-1] if lines else {}
        final = [line["final_bleu"] for line in lines if "final" in line]
        epochs = [line["epoch"] for line in lines if "epoch" in line] or ([saved["epoch"] + 1] if saved else [])
        newest = log if log.exists() else run / ".lock"
        return RunStatus(
            run=str(run),
            state=state_of(run, last, log.exists() or bool(saved)),
            update=max(int(last.get("update", 0)), int(saved.get("update", 0))),
            goal=goal,
            epoch=epochs[-1] if epochs else None,
            best_bleu=saved["best_bleu"] if saved.get("best_update") else None,
            best_update=saved["best_update"] if saved.get("best_update") else None,
            final_bleu=final[-1] if final else None,
            active=datetime.fromtimestamp(newest.stat().st_mtime).isoformat(timespec="seconds"),
        )
    except ConfigError as error:
        return RunStatus(str(run), "unreadable", remark=str(error))
    except OSError as error:
        return RunStatus(str(run), "unreadable", remark=f"cannot read {error.filename}: {error.strerror}.")
    except (ValueError, KeyError, TypeError, AttributeError):
        return RunStatus(str(run), "unreadable", remark="its files are not those that diglot writes.")


def state_of(run: Path, last: dict[str, Any], has_begun: bool) -> str:
    """In one word; the last line of the log tells how a run ended that nobody holds the lock of."""
    if is_held(run / ".lock"):
        return "running"
    if not has_begun:
        return "empty"
    return "finished" if "final" in last else "stopped" if "stopped" in last else "failed-or-killed"


def is_held(lock: Path) -> bool:
    """Whether a process holds a lock; the file of one that is gone stays, and means nothing."""
    if not lock.exists():
        return False
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def read_tail(log: Path) -> list[dict[str, Any]]:
    """The last lines of a log; half a line, which a killed process leaves, is passed over."""
    with log.open("rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - TAIL)
        file.seek(start)
        texts = file.read().split(b"\n")[1 if start else 0 :]
    lines: list[dict[str, Any]] = []
    for text in texts:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        lines += [cast("dict[str, Any]", line)] if isinstance(line, dict) else []
    if any(texts) and not lines:
        raise ValueError(log)
    return lines


def read_newest_state(run: Path) -> dict[str, Any]:
    """The counters of the newest checkpoint whose counters can be read; empty without one."""
    steps = [path for path in run.glob("step-*") if path.name[5:].isdigit()]
    for step in sorted(steps, key=lambda path: int(path.name[5:]), reverse=True):
        try:
            return json.loads((step / "state.json").read_bytes())
        except (OSError, ValueError):
            continue  # training falls back to the one before, too
    if steps:
        raise ValueError(run)
    return {}


def in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table as lines of text, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return [line.rstrip() for line in lines]
