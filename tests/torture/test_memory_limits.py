"""Memory that is never exceeded: what fits is found, what does not is split, and a long line costs a count."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conftest import Torture
from diglot import checkpoint
from training_runs import words_of, write_pairs

pytestmark = pytest.mark.slow

# diglot, in a process that may take so many megabytes of address space beyond those of its libraries (0: as it likes)
LIMITED = """
import resource, sys
from pathlib import Path
import diglot.cli, diglot.training
if extra := int(sys.argv.pop(1)):
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (extra << 20),) * 2)
try:
    diglot.cli.main()
finally:
    lines = Path("/proc/self/status").read_text().splitlines()  # getrusage would tell of whoever started us, too
    print("peak", *(line.split()[1] for line in lines if line.startswith("VmHWM:")), file=sys.stderr)
"""
WIDE = (
    "model.d_model=128", "model.d_ff=512", "train.update_pieces=6000", "train.max_updates=3",
    "data.max_pieces=64", "model.dropout=0.0", "train.precision=fp32",
)  # fmt: skip
EXTRA = (140, 200, 300, 450, 700)  # megabytes
CHOSEN = re.compile(r"([\d,]+) padded pieces go through the network at once \(data\.micro_batch\)")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_pairs(tmp_path, "train", 3000, seed=1)
    write_pairs(tmp_path, "valid", 8, seed=2)
    return tmp_path


def diglot_train(directory: Path, out: str, *words: str, extra: int = 0, group: Path | None = None):
    """Train in a process of its own, in a control group or with so much address space to take."""
    files = {"src": "train.en", "tgt": "train.de", "valid_src": "valid.en", "valid_tgt": "valid.de"}
    named = [f"data.{key}={json.dumps(str(directory / name))}" for key, name in files.items()]
    command = [sys.executable, "-c", LIMITED, str(extra), "train", "--preset", "tiny", *named,
               f"train.out={json.dumps(str(directory / out))}", *words_of(*WIDE, *words)]  # fmt: skip
    if group:
        command = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *command]
    env = {**os.environ, "DIGLOT_CACHE": str(directory / "cache")}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, check=False)


def chosen_by(done: subprocess.CompletedProcess[str]) -> int:
    """The micro-batch that a run has chosen and trained with to its end."""
    assert done.returncode == 0, done.stderr
    found = CHOSEN.search(done.stderr)
    assert found, done.stderr
    return int(found[1].replace(",", ""))


def peak_of(done: subprocess.CompletedProcess[str]) -> int:
    """Megabytes that a run has held at most."""
    return int(done.stderr.rsplit("peak", 1)[1]) >> 10


def splits_of(run: Path) -> int:
    return max(json.loads(line).get("memory_splits", 0) for line in (run / "log.jsonl").read_text().splitlines())


def test_what_fits_is_found_under_a_limit_of_the_shell(directory: Path, torture: Torture):
    most = chosen_by(diglot_train(directory, "free", "data.micro_batch=auto"))
    chosen: list[int] = []
    for extra in EXTRA:
        chosen.append(chosen_by(diglot_train(directory, f"run{extra}", "data.micro_batch=auto", extra=extra)))
        assert splits_of(directory / f"run{extra}") == 0
    assert chosen == sorted(chosen)
    assert chosen[0] < most / 2
    torture.report(
        "`data.micro_batch = \"auto\"` under RLIMIT_AS, a small network",
        "less memory, fewer pieces at once; all runs end well",
        f"{', '.join(f'{one:,}' for one in chosen)} and, without a limit, {most:,} pieces at once with "
        f"{', '.join(map(str, EXTRA))} MB beyond the libraries; {len(EXTRA)} of {len(EXTRA)} runs ended well, "
        "none had to split",
    )  # fmt: skip


@contextmanager
def control_group(name: str) -> Generator[Path]:
    """A control group of our own, of version 1 or 2; skipped where none can be made."""
    for root in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")):
        group = root / f"diglot-{os.getpid()}-{name}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if any((group / limit).exists() for limit in ("memory.limit_in_bytes", "memory.max")):
                yield group
                return
        finally:
            while (group / "cgroup.procs").read_text():  # they have ended, and are being buried
                time.sleep(0.1)
            group.rmdir()
    pytest.skip("no control group can be made here")


def limit_group(group: Path, megabytes: int) -> None:
    name = "memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes"
    (group / name).write_text(str(megabytes << 20))


def killed_in(group: Path) -> int:
    """Processes that were killed for want of memory in a group."""
    name = "memory.events" if (group / "memory.events").exists() else "memory.oom_control"
    return int(dict(line.split() for line in (group / name).read_text().splitlines()).get("oom_kill", 0))


def highest_use(group: Path) -> int:
    """Megabytes that a group has held at most, with what the system keeps of files for it."""
    name = "memory.peak" if (group / "memory.peak").exists() else "memory.max_usage_in_bytes"
    return int((group / name).read_text()) >> 20


def test_what_fits_is_found_in_a_control_group_and_nothing_is_killed(directory: Path, torture: Torture):
    def run(micro_batch: str, limit: int = 0) -> tuple[int, int]:
        with control_group(str(limit)) as group:
            if limit:
                limit_group(group, limit)
            done = diglot_train(directory, f"run{micro_batch}{limit}", f"data.micro_batch={micro_batch}", group=group)
            assert killed_in(group) == 0, done.stderr
            assert done.returncode == 0, done.stderr
            return chosen_by(done) if micro_batch == "auto" else int(micro_batch), highest_use(group)

    _, least = run("128")
    most, use = run("auto")
    limits = [least + int(share * (use - least)) for share in (0.7, 1.2, 2.0)]
    chosen, uses = zip(*(run("auto", limit) for limit in limits), strict=True)
    assert list(chosen) == sorted(chosen)
    assert chosen[0] < most
    torture.report(
        "the same in a memory control group",
        "less memory, fewer pieces at once; nothing killed",
        f"{', '.join(f'{one:,}' for one in chosen)} pieces at once in {', '.join(map(str, limits))} MB, of which "
        f"{', '.join(map(str, uses))} were used at most (without a limit {most:,} pieces in {use} MB); 0 killed",
    )


def test_where_memory_runs_out_all_the_same_it_is_split_and_nothing_else_changes(directory: Path, torture: Torture):
    words = "data.micro_batch=100000", "train.update_pieces=12000"
    free = diglot_train(directory, "free", *words)
    assert free.returncode == 0, free.stderr
    limited = diglot_train(directory, "limited", *words, extra=350)
    assert limited.returncode == 0, limited.stderr
    assert "memory ran out; from now on at most" in limited.stderr
    splits = splits_of(directory / "limited")
    assert splits > 0
    assert splits_of(directory / "free") == 0
    one, two = (load_file(directory / run / "model" / checkpoint.WEIGHTS) for run in ("free", "limited"))
    furthest = max(float((two[name] - weight).abs().max()) for name, weight in one.items())
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-3, atol=1e-4)
    torture.report(
        "memory runs out in an update (RLIMIT_AS)",
        "split, counted, and the weights those of a run with memory, to rounding",
        f"{splits} splits; after 3 updates no weight differs by more than {furthest:.0e}",
    )


def test_a_line_of_a_million_characters_costs_a_counted_line_and_no_memory(directory: Path, torture: Torture):
    run = ("data.micro_batch=400", "train.update_pieces=300")
    without = peak_of(diglot_train(directory, "without", *run))
    for name in ("train", "valid"):
        for language in ("en", "de"):
            with (directory / f"{name}.{language}").open("a") as file:
                file.write("no end of it " * 80_000 + "\n")
    done = diglot_train(directory, "with", *run)
    assert done.returncode == 0, done.stderr
    assert "1 lines are too long to validate on" in done.stderr
    listed = (directory / "with" / "dropped.tsv").read_text()
    assert f"too long\t{directory}/train.en:3001\n" in listed
    assert f"too long to validate on\t{directory}/valid.en:9\n" in listed
    assert peak_of(done) < without * 1.05
    torture.report(
        "a line of a million characters in each text",
        "counted and named, no memory",
        f"2 of 2 named; {peak_of(done)} MB at most, {without} MB without them",
    )
