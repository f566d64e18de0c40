"""Checkpoints under torture: killed, cut off from power, starved of disk, with bits flipped, and made by strangers."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import pickle
import random
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from crashes import STRACE, Disk, calls
from saving import Saver, begun, check_next_start, number_in, save_for_ever

from diglot import checkpoint
from diglot.checkpoint import MANIFEST, WEIGHTS, StoredModel
from diglot.config import ModelSpec, load_recipe
from diglot.errors import CheckpointError
from diglot.loader import MicroBatch, Place, Update
from diglot.model import Transformer
from diglot.parallel import World
from diglot.progress import Reporter
from diglot.run import Job, TrainingState, save
from diglot.schedule import make_optimizer
from diglot.subwords import Subwords
from diglot.training import choose_precision, gradients, in_training, train
from diglot.translator import choose_device
from training_runs import small_recipe, words_of, write_pairs

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
PROGRAM = (sys.executable, str(HERE / "saving.py"))
FAST = "--seccomp-bpf"  # stops at the traced calls alone; with it strace can send no signal
DIGLOT = str(Path(sys.executable).with_name("diglot"))


@pytest.fixture
def one_thread() -> Generator[None]:
    """For networks so small that threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ------------------------------------------------------------------- killed


@pytest.mark.usefixtures("one_thread")
def test_a_kill_at_any_moment_of_saving_loses_nothing_that_was_saved(tmp_path: Path, torture):
    run, rng = tmp_path / "run", random.Random(1)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["diglot.training"])
    kills, reports, num_inside, num_saves = torture.times(200), [], 0, 0
    for _ in range(kills):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=save_for_ever, args=(run, theirs))
        process.start()
        theirs.close()
        assert ours.recv().startswith("begun")
        time.sleep(rng.uniform(0, 0.5))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        with contextlib.suppress(EOFError):
            while True:
                reports.append(ours.recv())
        assert process.exitcode == -signal.SIGKILL
        num_inside += any(path.name.startswith(checkpoint.TEMPORARY) for path in run.iterdir())
        check_next_start(run, reports)
    num_saves = sum(report.startswith("saved") for report in reports)
    assert num_inside > 0, "no kill fell into a write"
    torture.report(
        "SIGKILL from outside at a random moment of a loop that saves",
        f"{kills} of {kills} lose nothing that was reported as saved; no orphans after the next start",
        f"{kills} of {kills}, {num_inside} of the kills inside a write; {num_saves:,} saves",
    )


# ------------------------------------------------------------------- cut off from power


@pytest.fixture
def strace() -> tuple[str, ...]:
    if not shutil.which("strace"):
        pytest.skip("strace is not installed")
    if subprocess.run([*STRACE, "-o", os.devnull, "true"], capture_output=True, check=False).returncode:
        pytest.skip("strace may not trace here")
    return STRACE


def trace(strace: tuple[str, ...], run: Path, num_saves: int, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*strace, *words, *PROGRAM, str(run), str(num_saves)], capture_output=True, text=True, check=False, timeout=300
    )


@pytest.mark.usefixtures("one_thread")
def test_every_state_that_a_crash_may_leave_loads(tmp_path: Path, strace: tuple[str, ...], torture):
    states, rng = torture.times(1000), random.Random(1)
    kills = [  # a first process is killed before such a call: between two renames, before the fsync after them, ...
        ("rename", 15), ("fsync", 61), ("unlinkat", 17), ("unlinkat", 10), ("rename", 5),
    ][: 5 if torture.is_full else 1]  # fmt: skip
    shares = [states // len(kills) + (i < states % len(kills)) for i in range(len(kills))]
    num_calls = num_other = 0
    for number, ((call, when), share) in enumerate(zip(kills, shares, strict=True)):
        root = tmp_path / str(number)
        root.mkdir()
        traces = [root.with_suffix(f".{i}") for i in (1, 2)]
        killed = trace(strace, root / "run", 9, "-e", f"inject={call}:signal=KILL:when={when}", "-o", str(traces[0]))
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert trace(strace, root / "run", 5, FAST, "-o", str(traces[1])).returncode == 0
        lines = [line for path in traces for line in [*calls(path.read_text()), ""]]
        disk, reports, found = Disk(root), [], tmp_path / "found"
        places = places_of_changes(root, lines)
        num_calls += len(places)
        crashes = sorted(rng.choices(places, k=share))
        for place, line in enumerate(lines):
            if not line:
                disk.end_process()
            elif said := disk.do(line):
                reports.append(said.strip())
            while crashes and crashes[0] == place:
                crashes.pop(0)
                disk.write_crashed(found, rng)
                num_other += contents(found) != disk.listing()
                check_next_start(found / "run", reports)
        assert disk.listing() == contents(root)  # the trace was understood
    torture.report(
        "power fails at a random moment of saving, pruning and replacing: any unsynced write or change of name may be "
        "missing",
        f"{states:,} of {states:,} go on from what was reported as saved",
        f"{states:,} of {states:,}, among {num_calls:,} system calls; {num_other:,} states differ from what the "
        "program saw",
    )


def places_of_changes(root: Path, lines: list[str]) -> list[int]:
    """The calls after which the disk may hold something else than before."""
    disk, places, before = Disk(root), [], 0
    for place, line in enumerate(lines):
        disk.do(line) if line else disk.end_process()
        if disk.num_changes > before:
            places.append(place)
        before = disk.num_changes
    return places


def contents(root: Path) -> dict[str, bytes | str]:
    """Every file and link below a directory."""
    return {
        str(path.relative_to(root)): str(path.readlink()) if path.is_symlink() else path.read_bytes()
        for path in root.rglob("*")
        if path.is_symlink() or path.is_file()
    }


# ------------------------------------------------------------------- no room


@contextlib.contextmanager
def file_size_limit(limit: int) -> Generator[None]:
    """No file may grow beyond so many bytes; Python has the signal ignored, so that the write fails."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextlib.contextmanager
def small_disk(path: Path, size: int) -> Generator[Path]:
    """A file system of so many bytes."""
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no file system may be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


@contextlib.contextmanager
def room_left(disk: Path, size: int) -> Generator[None]:
    """Fill a small disk until so many bytes are left."""
    filler = disk / "filler"
    free = os.statvfs(disk)
    filler.write_bytes(bytes(max(0, free.f_bavail * free.f_bsize - size)))
    try:
        yield
    finally:
        filler.unlink()


def starve_a_save(run: Path, starved: contextlib.AbstractContextManager[None], subwords: Subwords) -> None:
    """A save that finds no room says so in a sentence; all that was saved is there, and the next save works."""
    with begun(run):
        saver = Saver(run, subwords)
        saver.save()
        before, saved, best = contents(run), saver.state.update, saver.state.best_update
        with starved, pytest.raises(CheckpointError) as caught:
            saver.save()
        step = checkpoint.step_path(run, saved + 10)
        assert str(caught.value).startswith(f"cannot write {step}: ")
        assert "\n" not in str(caught.value)
        assert contents(run) == before
        assert number_in(checkpoint.find_model(run)) == best
        Saver(run).save()
    check_next_start(run, [f"saved {saved + 10} {best}"])


def diglot_train(
    directory: Path, out: Path, *words: str, limit: int | None = None, quiet: bool = True
) -> subprocess.CompletedProcess[str]:
    """The real command, on a small corpus, with its cache beside the corpus."""
    if not (directory / "train.en").exists():
        write_pairs(directory, "train", 200, seed=1)
        write_pairs(directory, "valid", 8, seed=2)
    options = [f"--src={directory}/train.en", f"--tgt={directory}/train.de", f"--out={out}", "--preset=tiny"]
    options += [f"--valid-src={directory}/valid.en", f"--valid-tgt={directory}/valid.de"]
    options += ["--quiet"] if quiet else []
    return subprocess.run(
        [DIGLOT, "train", *options, *words_of(*words)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "DIGLOT_CACHE": str(directory / "cache")},
        preexec_fn=None if limit is None else lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )


def starve_a_training(directory: Path, run: Path, room: Callable[[], contextlib.AbstractContextManager[None]] | int):
    """The command that finds no room for its second checkpoint ends with a sentence, and goes on when there is room."""
    started = directory / "started"
    if not started.exists():
        assert diglot_train(directory, started, "train.max_updates=3").returncode == 0
    shutil.copytree(started, run, symlinks=True)
    before = {name: content for name, content in contents(run).items() if name.startswith(("step-", "best", "model/"))}
    with contextlib.nullcontext() if isinstance(room, int) else room():
        starved = diglot_train(directory, run, limit=room if isinstance(room, int) else None)
    assert starved.returncode == 1
    assert starved.stderr.startswith(f"diglot: cannot write {run / 'step-000006'}: "), starved.stderr
    assert starved.stderr.count("\n") == 1
    after = contents(run)
    assert all(after[name] == content for name, content in before.items())
    checkpoint.load_model(run)
    assert diglot_train(directory, run).returncode == 0
    checkpoint.load_model(checkpoint.step_path(run, 6))


def test_a_full_disk_ends_in_a_sentence_and_takes_nothing_with_it(tmp_path: Path, torture, subwords: Subwords):
    def limited_save(limit: int) -> None:
        starve_a_save(tmp_path / f"limited-{limit}", file_size_limit(limit), subwords)

    def starved_save(pages: int) -> None:
        with small_disk(tmp_path / f"disk-{pages}", 1 << 20) as disk:
            starve_a_save(disk / "run", room_left(disk, pages * resource.getpagesize()), subwords)

    def limited_training(limit: int) -> None:
        starve_a_training(tmp_path, tmp_path / f"run-{limit}", limit)

    def starved_training(room: int) -> None:
        with small_disk(tmp_path / f"disk-{room}", 4 << 20) as disk:
            starve_a_training(tmp_path, disk / "run", lambda: room_left(disk, room))

    cases = [
        *((limited_training, limit) for limit in (40_000, 150_000)),
        *((starved_training, room) for room in (50_000, 300_000)),
        *((limited_save, limit) for limit in (0, 1, 300, 600, 7_500, 15_000, 20_000, 30_000)),
        *((starved_save, pages) for pages in (0, 1, 4, 6, 7, 10, 15, 19)),
    ]
    chosen = cases[:: len(cases) // torture.times(len(cases))]
    for starve, room in chosen:
        starve(room)
    torture.report(
        "the disk is full (a small one), or no file may grow (RLIMIT_FSIZE), at a write of a save or of `diglot train`",
        f"{len(chosen)} of {len(chosen)} end in one sentence, keep every byte of what was saved, and go on later",
        f"{len(chosen)} of {len(chosen)}",
    )


def test_what_is_written_beside_checkpoints_ends_in_a_sentence_too(tmp_path: Path, torture):
    """Each is met by letting what comes before it be there already: the subwords, the index, the list of dropped pairs,
    the log."""
    dropping, run = "data.max_ratio=1.05", tmp_path / "run"

    def say(out: str, limit: int, *words: str) -> str:
        ended = diglot_train(tmp_path, tmp_path / out, dropping, *words, limit=limit)
        assert ended.returncode == 1
        assert ended.stderr.count("\n") == 1, ended.stderr
        return ended.stderr

    cache, said = tmp_path / "cache", [say("run", 1000)]
    assert said[0].startswith(f"diglot: cannot write the subwords to {cache}: File too large. Make room")
    given = tmp_path / "given.model"
    assert diglot_train(tmp_path, tmp_path / "whole", dropping, "train.max_updates=1").returncode == 0
    shutil.copy(tmp_path / "whole" / "model" / "subwords.model", given)
    (index,) = cache.glob("index-*")
    index.rename(tmp_path / "index")
    said.append(say("run", 1000, f"subwords.model={given}"))
    assert said[1].startswith(f"diglot: cannot write the index of the corpus to {cache}: File too large. Make room")
    (tmp_path / "index").rename(index)
    said.append(say("run", 10))
    assert said[2].startswith(f"diglot: cannot write {run / 'dropped.tsv'}: File too large. ")
    enough = max((tmp_path / "whole" / name).stat().st_size for name in ("dropped.tsv", "config.toml")) + 100
    said.append(say("run", enough, "train.max_updates=1000", "train.valid_every=1000"))
    assert said[3].startswith(f"diglot: cannot write {run / 'log.jsonl'}: File too large. ")
    torture.report(
        "no file may grow: the subwords and the index in the cache, dropped.tsv, log.jsonl",
        "4 of 4 end in one sentence",
        f"{len(said)} of 4",
    )


@pytest.mark.usefixtures("one_thread")
def test_an_error_at_any_call_that_writes_ends_in_a_sentence(tmp_path: Path, strace: tuple[str, ...], torture):
    run, calls = tmp_path / "run", 0
    reports = trace(strace, run, 3, FAST, "-o", os.devnull).stdout.splitlines()
    cases = [
        *(("fsync", when) for when in range(1, 18)), *(("rename", when) for when in range(1, 6)), ("symlink", 1),
    ]  # fmt: skip
    chosen = random.Random(1).sample(cases, torture.times(len(cases)))
    for call, when in chosen:
        ended = trace(strace, run, 1, FAST, "-e", f"inject={call}:error=EIO:when={when}", "-o", os.devnull)
        reports += ended.stdout.splitlines()
        if ended.returncode:
            calls += 1
            assert ended.stderr.startswith(f"diglot: cannot write {run}"), ended.stderr
            assert ": Input/output error. What was saved before is intact; " in ended.stderr
            assert ended.stderr.count("\n") == 1
        check_next_start(run, reports)
    assert calls > 0
    torture.report(
        "one fsync, rename or symlink of a save fails with an I/O error, put into the kernel's answer",
        f"{calls} of {calls} end in one sentence and lose nothing that was reported as saved",
        f"{calls} of {calls}",
    )


# ------------------------------------------------------------------- bits and lengths


@pytest.fixture
def step(tmp_path: Path, subwords: Subwords) -> Path:
    """A checkpoint with all that a run needs to go on."""
    saver = Saver(tmp_path / "run", subwords)
    saver.save()
    return checkpoint.step_path(tmp_path / "run", 10)


def assert_broken(step: Path, path: Path, broken: bytes) -> None:
    """A checkpoint of which a file is replaced is refused, by the name of the file, and taken for none."""
    whole = path.read_bytes()
    path.write_bytes(broken)
    with pytest.raises(CheckpointError, match=path.name if path.name != MANIFEST else None):
        checkpoint.check_directory(step)
    assert checkpoint.newest_step(step.parent)[0] is None
    path.write_bytes(whole)


def test_every_flipped_bit_is_found(step: Path, torture):
    rng, files, times = random.Random(1), sorted(step.iterdir()), torture.times(1000)
    assert {"manifest.json", "state.json", "training.safetensors", WEIGHTS} < {path.name for path in files}

    def flip(path: Path, bit: int) -> None:
        content = bytearray(path.read_bytes())
        content[bit // 8] ^= 1 << bit % 8
        assert_broken(step, path, bytes(content))

    for number in range(times):
        path = files[number % len(files)]
        flip(path, rng.randrange(path.stat().st_size * 8))
    bits = range(0, (step / MANIFEST).stat().st_size * 8, 1 if torture.is_full else 37)
    for bit in bits:
        flip(step / MANIFEST, bit)
    checkpoint.check_directory(step)
    torture.report(
        "one bit of a checkpoint is flipped, in any of its files",
        f"{times:,} of {times:,} found",
        f"{times:,} of {times:,}",
    )
    torture.report(
        "each bit of the manifest itself is flipped", f"{len(bits):,} of {len(bits):,} found",
        f"{len(bits):,} of {len(bits):,}",
    )  # fmt: skip


def test_every_truncation_is_found(step: Path, torture):
    rng, files, times = random.Random(1), sorted(step.iterdir()), torture.times(200)
    for number in range(times):
        path = files[number % len(files)]
        content = path.read_bytes()
        assert_broken(step, path, content[: 0 if number < len(files) else rng.randrange(len(content))])
    checkpoint.check_directory(step)
    torture.report(
        "a file of a checkpoint is cut off at any length", f"{times:,} of {times:,} found", f"{times:,} of {times:,}"
    )


def test_a_broken_newest_gives_way_and_over_broken_ones_alone_nothing_is_begun(
    tmp_path: Path, torture, capfd: pytest.CaptureFixture[str]
):
    recipe, run = small_recipe(tmp_path, "run"), tmp_path / "run"
    older, newer = run / "step-000003", run / "step-000006"
    train(recipe, quiet=True)
    (newer / WEIGHTS).write_bytes(b"")
    train(recipe)
    said = f"warning: {newer / WEIGHTS} is broken: it is not the file that was written. Falling back to {older}."
    assert said in capfd.readouterr().err
    checkpoint.check_directory(newer)  # it was trained again
    for step in (older, newer):
        (step / WEIGHTS).write_bytes(b"")
    before = contents(run)
    with pytest.raises(CheckpointError, match=f"no checkpoint of {run} is whole: {newer / WEIGHTS} is broken"):
        train(recipe)
    assert contents(run) == before
    torture.report(
        "the newest checkpoint is broken; then all are",
        "training goes on from the one before, and says so; then it refuses to begin anew, and changes nothing",
        "as wanted",
    )


# ------------------------------------------------------------------- what it costs


@pytest.mark.parametrize("preset", ["tiny", "base"])
def test_saving_and_checking_take_a_small_part_of_the_time(tmp_path: Path, preset: str, subwords: Subwords, torture):
    """The time to save and check, over that of the updates between two checkpoints of the preset."""
    if preset == "base" and not torture.is_full:
        pytest.skip("an update of base takes half a minute on a CPU: `make torture` measures it")
    device = choose_device("auto")
    recipe = load_recipe(None, preset, (f"train.out={json.dumps(str(tmp_path / 'run'))}",))
    job = Job(recipe, tmp_path / "run", World(), device, False, Reporter(quiet=True))
    job = dataclasses.replace(job, bf16=choose_precision(job, None))
    model = Transformer(recipe.model, recipe.subwords.size, recipe.subwords.size).to(device)
    network, optimizer, update = (
        in_training(model, job),
        make_optimizer(model),
        random_update(recipe.train.update_pieces, recipe.subwords.size),
    )

    def train_one() -> None:
        gradients(job, network, model, update)
        optimizer.step()
        optimizer.zero_grad()

    def save_and_check(number: int) -> None:
        state = TrainingState(update=number, validated=[number], best_update=number)
        save(job, StoredModel(job.run, ModelSpec(recipe.model), model, subwords, subwords), optimizer, state)
        checkpoint.check_directory(checkpoint.step_path(job.run, number))

    train_one()  # memory is asked for, and the moments exist
    update_seconds = min(seconds(train_one) for _ in range(5 if preset == "tiny" else 2))
    save_seconds = max(seconds(lambda number=number: save_and_check(number)) for number in (1, 2, 3))
    share = save_seconds / (recipe.train.valid_every * update_seconds)
    assert share <= 0.02
    torture.report(
        f"time to save and check a checkpoint of `{preset}`, of the time of the updates between two",
        "at most 2 %",
        f"{share:.3%}: {save_seconds:.2f} s of {recipe.train.valid_every:,} updates of {update_seconds:.2f} s each, on "
        f"{device}",
    )


def seconds(work: Callable[[], None]) -> float:
    begun_at = time.monotonic()
    work()
    return time.monotonic() - begun_at


def random_update(num_pieces: int, size: int, length: int = 32, rows: int = 128) -> Update:
    """An update of about so many target pieces, in micro-batches of the default size."""
    rng = np.random.default_rng(1)
    micros = []
    for _ in range(round(num_pieces / length / rows)):
        src, tgt = rng.integers(3, size, (2, rows, length))
        lengths = np.full(rows, length)
        micros.append(MicroBatch(src, lengths, tgt, lengths, rng.integers(1 << 62, size=rows)))
    return Update(Place(0, 0, 0, np.arange(1)), micros, len(micros) * rows * length)


# ------------------------------------------------------------------- others' files


def test_files_are_readable_as_the_umask_says(tmp_path: Path, subwords: Subwords, torture):
    for mask in (0o022, 0o027):
        before, run = os.umask(mask), tmp_path / f"run-{mask:o}"
        try:
            with begun(run) as (saver, log):
                log.write(1, loss=1.0)
                saver.save()
                saver.finish()
        finally:
            os.umask(before)
        for path in [run, *run.rglob("*")]:
            wanted = 0o777 if path.is_dir() else 0o666
            assert stat.S_IMODE(path.stat().st_mode) == wanted & ~mask, path
    torture.report("files of a run are made under umask 022 and 027", "modes 0644 and 0640", "modes 0644 and 0640")


class Runs:
    """Unpickled, it would leave a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def strange_models(tmp_path: Path, model: Path) -> dict[str, tuple[Path, str]]:
    """Model directories that somebody may hand around, each with what has to be said of it."""
    whole = {path.name: path.read_bytes() for path in model.iterdir() if path.name != MANIFEST}
    made: dict[str, tuple[Path, str]] = {}

    def make(name: str, said: str, put: dict[str, bytes] | None = None, less: str = "") -> Path:
        path = tmp_path / "strange" / name.replace(" ", "-")
        files = {**whole, **(put or {})}
        files.pop(less, None)
        checkpoint.write_directory(path, files)
        made[name] = path, said
        return path

    def config(**values: object) -> dict[str, bytes]:
        lines = whole["config.toml"].decode().splitlines()
        for key, value in values.items():
            lines = [f"{key} = {value}" if line.startswith(f"{key} =") else line for line in lines]
        return {"config.toml": "\n".join(lines).encode()}

    def header(text: bytes, length: int | None = None) -> dict[str, bytes]:
        return {WEIGHTS: (len(text) if length is None else length).to_bytes(8, "little") + text}

    pickled = pickle.dumps(Runs(tmp_path / "pwned"))
    make("pickle as weights", "is broken", {WEIGHTS: pickled})
    make("pickle as subwords", "is not a SentencePiece model", {"subwords.model": pickled})
    make("pickle as config", "is not TOML", {"config.toml": pickled})
    make("extra pickle", "", {"pytorch_model.bin": pickled, "sitecustomize.py": b"raise SystemExit('it runs')"})
    for name in (WEIGHTS, "config.toml", MANIFEST):
        path = make(f"link to {name}", "is broken: it is a link, a directory or a device in place of a file")
        (path / name).rename(tmp_path / f"kept-{name}")
        (path / name).symlink_to(tmp_path / f"kept-{name}")
        path = make(f"pipe for {name}", "is broken: it is a link, a directory or a device in place of a file")
        (path / name).unlink()
        os.mkfifo(path / name)
        path = make(f"directory for {name}", "is broken: it is a link, a directory or a device in place of a file")
        (path / name).unlink()
        (path / name).mkdir()
    path = make("endless manifest", "is broken")
    (path / MANIFEST).unlink()
    (path / MANIFEST).symlink_to("/dev/zero")
    with contextlib.suppress(OSError):  # where making a device is permitted
        path = make("device for weights", "is broken: it is a link, a directory or a device")
        (path / WEIGHTS).unlink()
        os.mknod(path / WEIGHTS, stat.S_IFCHR | 0o666, os.makedev(1, 5))
    for number, name in enumerate(("../model/config.toml", "/etc/passwd", "a/../../b", "..", "\x1b[2Jx", "a\nb")):
        path = make(f"manifest with path {number}", "is not the plain name of a file")
        (path / MANIFEST).write_bytes(checkpoint.manifest_of({name: {"bytes": 1, "sha256": ""}}))
    for name, listed in (("deep", b"[" * 500_000), ("long", b" " * (8 << 20))):
        path = make(f"{name} manifest", "is broken: it is not the list of files")
        (path / MANIFEST).write_bytes(checkpoint.seal(b'{"format": 2, "files": ' + listed))
    make("not listed", "lists no model.safetensors", less=WEIGHTS)
    shutil.copy(model / WEIGHTS, made["not listed"][0])
    make("header beyond the file", "is broken", header(b"{}", 1 << 62))
    make("header beyond all numbers", "is broken", header(b"{}", (1 << 64) - 1))
    make("deep header", "is broken", header(b'{"a":' * 100_000))
    huge = b'{"w":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,16]}}'
    make("huge shape", "is broken", header(huge))
    make("offsets outside", "is broken", header(huge.replace(b"[0,16]", b"[900,999]")))
    make("empty weights", "it has 0 tensors for 2 layers", {WEIGHTS: safetensors.torch.save({})})
    make("d_model of 10**9", "model.d_model = 1000000000 must be at most", config(d_model=10**9))
    make("d_model of 65536", "should have the shape", config(d_model=1 << 16, d_ff=1 << 20))
    make("10**9 layers", "must be at most", config(num_encoder_layers=10**9))
    make("1000 layers", "tensors for 1,001 layers", config(num_encoder_layers=1000))
    make("10**9 positions", "must be at most", config(max_positions=10**9))
    make("long number", "is not TOML", config(d_model="9" * 5000))
    make("deep config", "is not TOML", {"config.toml": b"a = " + b"[" * 100_000})
    make("unknown key", "unknown key 'model.code'", {"config.toml": b"[model]\ncode = 'import os'\n"})
    make("unknown section", "unknown section 'hook'", {"config.toml": b"[hook]\nrun = 'rm -rf /'\n"})
    return made


def test_a_strangers_model_executes_nothing_and_writes_nowhere(tmp_path: Path, subwords: Subwords, torture):
    saver = Saver(tmp_path / "run", subwords)
    torch.manual_seed(1)
    saver.finish()
    strange = strange_models(tmp_path, tmp_path / "run" / "model")
    before = contents(tmp_path / "run")
    paths = [str(path) for path, _ in strange.values()]
    loaded = subprocess.run(
        [sys.executable, str(HERE / "loading.py"), str(tmp_path / "run" / "model"), *paths],
        capture_output=True, text=True, check=False, timeout=300, stdin=subprocess.DEVNULL,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30)),
    )  # fmt: skip
    assert loaded.returncode == 0, loaded.stderr[-2000:]
    told = [json.loads(line) for line in loaded.stdout.splitlines()]
    assert len(told) == 1 + len(strange)
    assert (told[0]["said"], told[0]["done"]) == ("", [])
    for (name, (path, wanted)), one in zip(strange.items(), told[1:], strict=True):
        assert one["path"] == str(path)
        assert wanted in one["said"], (name, one["said"][:300])
        assert wanted or not one["said"], name
        assert one["done"] == [], name
        assert one["seconds"] < 10, name
    assert not (tmp_path / "pwned").exists()
    assert contents(tmp_path / "run") == before
    torture.report(
        "a stranger's model: pickles, links, pipes, devices, paths with `..`, absurd headers and sizes, deep nesting",
        f"{len(strange)} of {len(strange)} run nothing, write nothing, and what is wrong with them is told",
        f"{len(strange)} of {len(strange)}",
    )
