"""Corpora of any size: the memory and the start of a run do not depend on the number of pairs; nothing is left."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from conftest import Torture
from diglot.corpus import MAKING
from diglot.demo import draw_corpus
from diglot.subwords import learn
from training_runs import words_of

pytestmark = pytest.mark.slow


def lines_of(directory: Path | None, num: int) -> Iterator[tuple[str, str]]:
    """So many different pairs: of real text, where there is some, each with a number in front."""
    if directory:
        files = [(directory / f"train.{language}").open(encoding="utf-8") for language in ("en", "de")]
        pairs = [(src.rstrip("\n"), tgt.rstrip("\n")) for src, tgt in zip(*files, strict=True)]
        for file in files:
            file.close()
    else:
        pairs = draw_corpus(2000, seed=1)
    for number, (src, tgt) in enumerate(itertools.islice(itertools.cycle(pairs), num)):
        yield f"{number} {src}", f"{number} {tgt}"


def write_corpus(directory: Path, name: str, pairs: Iterator[tuple[str, str]]) -> None:
    with (directory / f"{name}.en").open("w") as src, (directory / f"{name}.de").open("w") as tgt:
        for one, two in pairs:
            src.write(one + "\n")
            tgt.write(two + "\n")


def start_training(directory: Path, name: str, out: str, *words: str) -> subprocess.Popen[bytes]:
    files = {
        "data.src": f"{name}.en", "data.tgt": f"{name}.de", "data.valid_src": "valid.en", "data.valid_tgt": "valid.de",
        "subwords.model": "subwords.model", "train.out": out,
    }  # fmt: skip
    named = [f"{key}={json.dumps(str(directory / value))}" for key, value in files.items()]
    command = [sys.executable, "-m", "diglot", "train", "--preset", "tiny", *named, *words_of(*words), "--quiet"]
    env = {**os.environ, "DIGLOT_CACHE": str(directory / "cache")}
    return subprocess.Popen(command, env=env, start_new_session=True)


def family_of(pid: int) -> list[int]:
    """A process and all that it has started."""
    try:
        children = (Path(f"/proc/{pid}/task/{pid}/children")).read_text().split()
    except OSError:
        return []
    return [pid, *(each for child in children for each in family_of(int(child)))]


def memory_of(pids: Sequence[int]) -> int:
    """Bytes that processes hold together: their proportional set sizes, in which a page that n of them map counts as
    an n-th in each, so that the sum is what the machine holds for them."""
    held = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:  # it has ended
            continue
        held += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return held


def watch(process: subprocess.Popen[bytes], log: Path) -> tuple[float, float]:
    """The most megabytes that a run and its workers held, and the seconds to the end of its first update."""
    begun, seconds, most = time.monotonic(), 0.0, 0
    while process.poll() is None:
        most = max(most, memory_of(family_of(process.pid)))
        if not seconds and log.exists() and log.stat().st_size:
            seconds = time.monotonic() - begun
        time.sleep(0.1)
    assert process.returncode == 0
    return most / 1e6, seconds


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """With subwords and text to validate on."""
    pairs = draw_corpus(2000, seed=1)
    (tmp_path / "subwords.model").write_bytes(learn((text for pair in pairs for text in pair), 1000).proto)
    write_corpus(tmp_path, "valid", iter(pairs[:20]))
    (tmp_path / "cache").mkdir()
    return tmp_path


def test_memory_and_start_do_not_depend_on_the_number_of_pairs(
    directory: Path, torture: Torture, request: pytest.FixtureRequest
):
    real = request.getfixturevalue("data") / "europarl_en_de" if torture.is_full else None
    sizes = (300_000, 3_000_000) if torture.is_full else (30_000, 300_000)
    words = ("train.threads=2", "train.max_updates=20", "train.valid_every=20", "train.update_pieces=1000",
             "data.micro_batch=4000", "data.drop_duplicates=true")  # fmt: skip
    made: list[float] = []
    trained: list[float] = []
    starts: list[float] = []
    indexing: list[float] = []
    for size in sizes:
        name = f"train{size}"
        write_corpus(directory, name, lines_of(real, size))
        time.sleep(3)  # a file that has just changed may change again unseen, so its digest is not kept
        for results, times, out in ((made, indexing, "first"), (trained, starts, "again")):
            process = start_training(directory, name, f"{out}{size}", *words)
            most, seconds = watch(process, directory / f"{out}{size}" / "log.jsonl")
            results.append(most)
            times.append(seconds)
    assert trained[1] < trained[0] * 1.1
    assert made[1] < made[0] * 1.1
    assert starts[1] < 5 or not torture.is_full  # of a machine that does nothing else
    one, two = (f"{size:,}" for size in sizes)
    torture.report(
        "training on ten times as many pairs: peak of the memory of all processes (sum of PSS)",
        "within 10 %",
        f"on {one} and on {two} pairs {trained[0]:.0f} and {trained[1]:.0f} MB; "
        f"with making the index {made[0]:.0f} and {made[1]:.0f} MB",
    )
    torture.report(
        "from the command to the end of the first update, on ten times as many pairs",
        "under 5 s once there is an index",
        f"on {one} and on {two} pairs {starts[0]:.1f} and {starts[1]:.1f} s; "
        f"without an index {indexing[0]:.0f} and {indexing[1]:.0f} s",
    )


def wait_for(what: Callable[..., object], *about: object, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not what(*about):
        assert time.monotonic() < end
        time.sleep(0.02)


def are_gone(pids: Sequence[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_indexing_that_is_stopped_leaves_no_process(directory: Path, torture: Torture, number: signal.Signals):
    write_corpus(directory, "train", lines_of(None, 300_000))
    times = torture.times(20)
    for i in range(times):
        process = start_training(directory, "train", f"run{i}", "train.threads=3")
        wait_for(lambda pid: len(family_of(pid)) == 4, process.pid)
        time.sleep(i / times)
        family = family_of(process.pid)
        assert len(family) == 4
        os.kill(process.pid, number)
        assert process.wait() in (-number, 128 + number)
        wait_for(are_gone, family)
        if number == signal.SIGINT:
            assert not [path for path in (directory / "cache").iterdir() if path.name.startswith((MAKING, "index"))]
    torture.report(
        f"{number.name} while the index is made by three processes", "no process left", f"{times} of {times}"
    )


def test_a_run_that_is_killed_leaves_no_worker(directory: Path, torture: Torture):
    write_corpus(directory, "train", lines_of(None, 3000))
    times = torture.times(20)
    for i in range(times):
        log = directory / f"run{i}" / "log.jsonl"
        words = ("train.max_updates=100000", "train.valid_every=100000", "train.update_pieces=20000")
        process = start_training(directory, "train", f"run{i}", *words)  # much is read ahead, more than a pipe holds
        wait_for(lambda path: path.exists() and path.stat().st_size, log)
        family = family_of(process.pid)
        assert len(family) == 2
        process.kill()
        process.wait()
        wait_for(are_gone, family)
    torture.report("SIGKILL of a run whose worker waits to send", "no process left", f"{times} of {times}")
