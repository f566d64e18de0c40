"""python -m benchmarks: train the same with every system, one after the other, and compare. See README.md here."""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.flops import flops_per_target_piece
from benchmarks.measure import Seen, run
from benchmarks.peers import OUTPUT, Job
from benchmarks.table import as_table, write_into_docs
from benchmarks.task import NETWORKS, UPDATE_PIECES, Corpus, prepare

HERE = Path(__file__).parent
SYSTEMS = ("diglot", "plain", "plain_fp32", "transformers", "marian", "eole", "joeynmt")
ENDLESS = 1_000_000  # updates of a run that is ended by the clock
LOADER_SECONDS = 10.0


def main() -> None:
    """Set up, prepare, try settings, measure, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--data", type=Path, help="folder of train.en, train.de, valid.en, valid.de; none: made by rule"
    )
    parser.add_argument("--network", choices=NETWORKS, default="tiny")
    parser.add_argument("--pieces", type=int, default=8000, help="of the joint vocabulary")
    parser.add_argument(
        "--only", nargs="+", choices=SYSTEMS, default=SYSTEMS, metavar="SYSTEM", help=", ".join(SYSTEMS)
    )
    parser.add_argument("--rounds", type=int, default=3, help="in each of which every system trains")
    parser.add_argument("--seconds", type=float, default=60, help="measured of a system in a round, after its warm-up")
    parser.add_argument("--tune", type=float, default=20, help="seconds for each setting; 0: the first one is taken")
    parser.add_argument("--epochs", type=float, default=2, help="of the run that shows memory and loss; 0: none")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--work", type=Path, default=HERE / ".work", help="environments, prepared text, results")
    parser.add_argument("--table", type=Path, nargs="+", help="only put these results (JSON) into docs/speed.md")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that what is running is ended too
    if args.table:
        write_into_docs([json.loads(path.read_text(encoding="utf-8")) for path in args.table])
        return
    work: Path = args.work.resolve()
    corpus, network = prepare(args.data, args.pieces, work), NETWORKS[args.network]
    result = describe(args, corpus)
    jobs: dict[str, tuple[ModuleType, Job]] = {}
    for name in args.only:
        peer = importlib.import_module(f"benchmarks.peers.{name}")
        first = next(iter(peer.SETTINGS.values()))
        python = environment(work, peer.NEEDS)
        job = Job(corpus, network, first, python, work / "runs" / name, args.threads, ENDLESS)
        if hasattr(peer, "prepare"):
            peer.prepare(job)
        jobs[name] = peer, job
        versions = (HERE / "peers" / f"{peer.NEEDS}.txt").read_text(encoding="utf-8") if peer.NEEDS else ""
        own = [line.split()[0] for line in versions.split("\n") if "==" in line]
        result["systems"][name] = {"note": peer.NOTE, "versions": own, "speeds": [], "memory": 0, "tried": {}}
    result["peak"] = json.loads(output_of([sys.executable, str(HERE / "flops.py")]))
    print(
        "peak of matrix products:",
        ", ".join(f"{kind} {peak / 1e9:,.0f} GFLOP/s" for kind, peak in result["peak"].items()),
    )

    out = work / f"{args.network}-{corpus.name}.json"
    for name, (peer, job) in jobs.items():
        jobs[name] = peer, choose_setting(peer, job, args.tune, result["systems"][name])
    for number in range(args.rounds):
        for name, (peer, job) in jobs.items():
            seen = train(peer, job, args.seconds)
            note_speed(result["systems"][name], seen)
            print(f"round {number + 1}: {name} {seen.speed:,.0f} pieces/s", flush=True)
            save(out, result)
    if args.epochs:
        for name, (peer, job) in jobs.items():
            result["systems"][name]["long"] = train_long(peer, job, args.epochs)
            save(out, result)
    if "diglot" in jobs:
        command = [sys.executable, "-m", "benchmarks.loader", str(corpus.folder), str(LOADER_SECONDS)]
        result["loader"] = json.loads(output_of(command))
    save(out, result)
    print(f"\n{as_table(result)}\nkept in {out}")


def describe(args: argparse.Namespace, corpus: Corpus) -> dict[str, Any]:
    """Where and of what the figures are."""
    cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    model = next((line.partition(": ")[2] for line in cpu.split("\n") if line.startswith("model name")), "unknown")
    net, (src, tgt) = NETWORKS[args.network], corpus.lengths
    cost = flops_per_target_piece(src, tgt, corpus.num_pieces, net.d_model, net.d_ff, net.layers, net.layers)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=HERE, capture_output=True, text=True).stdout
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit.strip(),
        "machine": f"{args.threads} cores of {model}",
        "load": os.getloadavg()[1],
        "network": args.network,
        "corpus": corpus.name,
        "pieces_of_an_epoch": corpus.tgt_pieces,
        "flops_per_piece": cost,
        "seconds": args.seconds,
        "systems": {},
    }


def environment(work: Path, needs: str) -> Path:
    """The Python of a system's own environment, made if its list of packages has changed."""
    if not needs:
        return Path(sys.executable)
    wanted = (HERE / "peers" / f"{needs}.txt").read_text(encoding="utf-8")
    folder = work / "environments" / needs
    python, installed = folder / "bin" / "python", folder / "installed.txt"
    if not installed.exists() or installed.read_text(encoding="utf-8") != wanted:
        print(f"installing {needs} ...", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        listed = str(HERE / "peers" / f"{needs}.txt")
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "--requirement", listed], check=True)
        installed.write_text(wanted, encoding="utf-8")
    return python


def choose_setting(peer: ModuleType, job: Job, seconds: float, row: dict[str, Any]) -> Job:
    """The fastest of the settings, each tried for some seconds."""
    names = list(peer.SETTINGS)
    if seconds:
        for name in names:
            row["tried"][name] = train(peer, replace(job, setting=peer.SETTINGS[name]), seconds).speed
            print(f"tried: {job.folder.name}, {name}: {row['tried'][name]:,.0f} pieces/s", flush=True)
    row["setting"] = max(names, key=lambda name: row["tried"].get(name, 0.0))
    return replace(job, setting=peer.SETTINGS[row["setting"]])


def train(peer: ModuleType, job: Job, seconds: float) -> Seen:
    """Until so many seconds after the warm-up have been seen."""
    empty(job.folder)
    seen = run(peer.command(job), job.folder, peer.LOG, peer.read, lambda seen: seen.seconds > seconds)
    if not seen.seconds:
        raise SystemExit(f"it ended before its speed was seen: {job.folder / OUTPUT}")
    return seen


def train_long(peer: ModuleType, job: Job, epochs: float) -> dict[str, Any]:
    """For some epochs: memory in the first and after it, and the loss on the validation text in the end."""
    updates = round(epochs * job.corpus.tgt_pieces / UPDATE_PIECES)
    job = replace(job, updates=updates)
    empty(job.folder)
    has_score = hasattr(peer, "score")
    seen = run(peer.command(job), job.folder, peer.LOG, peer.read, lambda seen: not has_score and seen.nll is not None)
    nll = seen.nll
    if has_score:
        nll = run(peer.score(job), job.folder, peer.LOG, peer.read, lambda _: False).nll
    trained, ended = seen.updates[-1], job.corpus.tgt_pieces
    print(f"{trained[1]} updates: {job.folder.name} {nll:.4f} nats a piece on the validation text", flush=True)
    within = [(when, size) for when, size in seen.memory if when <= trained[0]]  # validation is another matter
    first = next((when for when, _, pieces in seen.updates if pieces >= ended), trained[0])
    return {
        "updates": trained[1],
        "pieces": trained[2],
        "nll": nll,
        "first_epoch_memory": max((size for when, size in within if when <= first), default=0),
        "later_memory": max((size for when, size in within if when > first), default=0),
    }


def note_speed(row: dict[str, Any], seen: Seen) -> None:
    """What a round has shown."""
    row["speeds"].append(seen.speed)
    row["pieces_per_update"] = seen.pieces_per_update
    row["memory"] = max([row["memory"], *(size for _, size in seen.memory)])
    row["median"] = statistics.median(row["speeds"])


def replace(job: Job, **values: Any) -> Job:
    """A job with other values."""
    return Job(**{**vars(job), **values})


def empty(folder: Path) -> None:
    """A new folder for a run."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def output_of(command: list[str]) -> str:
    """What a command prints."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def save(path: Path, result: dict[str, Any]) -> None:
    """As JSON."""
    path.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
