"""What is on disk, and that it survives.

A directory is written under a temporary name: every file is flushed to the disk, a manifest with the sha256 of each
and of itself comes last, then the directory is renamed. What it replaces is removed when the new name is on the disk.
So a name that exists is whole, whenever the process was killed or the power failed. Reading checks the manifest, and
reads what it lists alone. There is nothing but safetensors, TOML, JSON and SentencePiece's own format: no pickle.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

import diglot
from diglot.config import ModelSpec, from_dict, read_toml, to_toml
from diglot.errors import CheckpointError
from diglot.model import Transformer
from diglot.subwords import Subwords, load_subwords

FORMAT = 2  # 1 had a manifest without a seal
MANIFEST = "manifest.json"
LONGEST_MANIFEST = 1 << 20
SEAL = b',\n "sha256": '
CONFIG = "config.toml"
WEIGHTS = "model.safetensors"
TEMPORARY = ".writing-"
PLAIN_NAME = re.compile(r"[\w-][\w.-]*", re.ASCII)


@dataclass
class StoredModel:
    """What a model directory holds."""

    path: Path
    spec: ModelSpec
    model: Transformer
    src_subwords: Subwords
    tgt_subwords: Subwords  # the same object as src_subwords, if joint


# ------------------------------------------------------------------- directories


def write_directory(path: Path, files: Mapping[str, bytes]) -> None:
    """Write all files as the directory `path`, or nothing; what stood there is replaced at the end."""
    new, old = path.with_name(TEMPORARY + path.name), replaced(path)
    try:
        with writing(path):
            make_directory(path.parent)
            discard(new)
            new.mkdir()
            listed: dict[str, Any] = {}
            for name, content in files.items():
                write_file(new / name, content)
                listed[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            write_file(new / MANIFEST, manifest_of(listed))
            sync_directory(new)
            if path.exists():  # a directory cannot be renamed over another
                discard(old)
                path.rename(old)
            new.rename(path)
            sync_directory(path.parent)
            shutil.rmtree(old, ignore_errors=True)
    except CheckpointError:
        shutil.rmtree(new, ignore_errors=True)
        with contextlib.suppress(OSError):  # on a disk that fails; then the next start puts it back
            put_back(path)
        raise


@contextmanager
def writing(path: Path) -> Generator[None]:
    """Tell a full or failing disk in one sentence."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path}: {error.strerror}. What was saved before is intact; "
            "make room or choose another place."
        ) from None


def replaced(path: Path) -> Path:
    """Where a directory waits while another takes its name."""
    return path.with_name(TEMPORARY + path.name + "-old")


def put_back(path: Path) -> None:
    """Undo a replacement that was cut off between its two renames."""
    old = replaced(path)
    if old.exists() and not path.exists():
        old.rename(path)


def discard(path: Path) -> None:
    """Remove what bears a temporary name, once it is on the disk that nothing else bears it: else the power may fail
    when files of a directory are gone and its old name is not."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        sync_directory(path.parent)
        shutil.rmtree(path, ignore_errors=True)


def make_directory(path: Path) -> None:
    """Make a directory and those above it, and have their names on the disk."""
    if not path.exists():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


def write_file(path: Path, content: bytes) -> None:
    """Write a file and have it on the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that its name holds either what it held or all of the new."""
    new = path.with_name(TEMPORARY + path.name)
    try:
        with writing(path):
            write_file(new, content)
            new.replace(path)
            sync_directory(path.parent)
    except CheckpointError:
        with contextlib.suppress(OSError):
            new.unlink()
        raise


def sync_directory(path: Path) -> None:
    """Have a directory's names on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sweep(directory: Path) -> None:
    """Remove what a killed process left half-written, and put back what it had not yet replaced."""
    for old in directory.glob(TEMPORARY + "*-old"):
        put_back(directory / old.name.removeprefix(TEMPORARY).removesuffix("-old"))
    for path in directory.glob(TEMPORARY + "*"):
        discard(path)


def manifest_of(files: Mapping[str, Any]) -> bytes:
    """The list of files, sealed."""
    listed = {"format": FORMAT, "diglot": diglot.__version__, "files": files}
    return seal(json.dumps(listed, indent=1).encode().removesuffix(b"\n}"))


def seal(listed: bytes) -> bytes:
    """With a last line that holds the hash of all before it: no bit of a manifest can change unseen either."""
    return listed + SEAL + f'"{hashlib.sha256(listed).hexdigest()}"\n}}\n'.encode()


def open_file(path: Path) -> BufferedReader:
    """Open what is a file itself: a link may lead anywhere, and a pipe may never answer."""
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise CheckpointError(f"{path} is broken: it is a link, a directory or a device in place of a file.")
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")


def check_directory(path: Path) -> dict[str, Any]:
    """Compare every file with the manifest, and return the manifest."""
    try:
        with open_file(path / MANIFEST) as file:
            content = file.read(LONGEST_MANIFEST)
        manifest = json.loads(content)
        files = cast("dict[str, dict[str, Any]]", manifest["files"])
        number = int(manifest["format"])
        expected = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in files.items()}
        if number < 1 or (1 < number <= FORMAT and content != seal(content.rpartition(SEAL)[0])):
            raise ValueError
    except FileNotFoundError:
        raise CheckpointError(f"{path} is not a model directory: it has no {MANIFEST}.") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path / MANIFEST}: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise CheckpointError(f"{path / MANIFEST} is broken: it is not the list of files that diglot writes.") from None
    if number > FORMAT:
        raise CheckpointError(
            f"{path} has format {number}, written by diglot {manifest.get('diglot')}; diglot {diglot.__version__} "
            f"reads up to format {FORMAT}: install a newer one."
        )
    for name, (size, digest) in expected.items():
        if not PLAIN_NAME.fullmatch(name):
            raise CheckpointError(f"{path / MANIFEST} is broken: '{name}' is not the plain name of a file.")
        try:
            with open_file(path / name) as file:
                whole = os.fstat(file.fileno()).st_size == size
                whole = whole and hashlib.file_digest(file, "sha256").hexdigest() == digest
        except OSError as error:
            raise CheckpointError(f"cannot read {path / name}: {error.strerror}.") from None
        if not whole:
            raise CheckpointError(f"{path / name} is broken: it is not the file that was written.")
    return manifest


# ------------------------------------------------------------------- models


def model_files(
    spec: ModelSpec, weights: Mapping[str, Tensor], src_subwords: Subwords, tgt_subwords: Subwords, card: str
) -> dict[str, bytes]:
    """The files of a model directory."""
    files = {
        CONFIG: to_toml(spec).encode(),
        WEIGHTS: safetensors.torch.save({name: t.detach().contiguous().cpu() for name, t in weights.items()}),
        "README.md": card.encode(),
    }
    if src_subwords == tgt_subwords:
        return {**files, "subwords.model": src_subwords.proto}
    return {**files, "subwords.src.model": src_subwords.proto, "subwords.tgt.model": tgt_subwords.proto}


def weights_of(model: Transformer) -> dict[str, Tensor]:
    """The parameters by name; what is shared comes once."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def find_model(path: Path) -> Path:
    """A model directory is itself; a run directory stands for its final model, or for its best until there is one."""
    if not path.exists():
        raise CheckpointError(f"there is no model directory {path}.")
    if not (path / MANIFEST).exists():
        for inner in (path / "model", path / "best"):
            if (inner / MANIFEST).exists():
                return inner
    return path


def load_model(path: Path) -> StoredModel:
    """Read and check a model directory; what its manifest does not list is not read."""
    path = find_model(path)
    files = check_directory(path)["files"]
    sides = ["subwords.model"] if "subwords.model" in files else ["subwords.src.model", "subwords.tgt.model"]
    for name in (CONFIG, WEIGHTS, *sides):
        if name not in files:
            raise CheckpointError(f"{path} is no whole model: its {MANIFEST} lists no {name}.")
    spec = from_dict(ModelSpec, read_toml(path / CONFIG), str(path / CONFIG))
    src_subwords = load_subwords(path / sides[0])
    tgt_subwords = load_subwords(path / sides[1]) if len(sides) > 1 else src_subwords
    if spec.model.tie == "all" and src_subwords.num_pieces != tgt_subwords.num_pieces:
        raise CheckpointError(
            f"{path / CONFIG} shares one matrix between the languages (tie = 'all'), but the vocabularies have "
            f"{src_subwords.num_pieces:,} and {tgt_subwords.num_pieces:,} pieces."
        )
    weights = read_tensors(path / WEIGHTS)
    check_shapes(path, spec, weights, src_subwords.num_pieces, tgt_subwords.num_pieces)
    model = Transformer(spec.model, src_subwords.num_pieces, tgt_subwords.num_pieces)
    put_weights(model, weights)
    return StoredModel(path, spec, model, src_subwords, tgt_subwords)


def check_shapes(
    path: Path, spec: ModelSpec, weights: Mapping[str, Tensor], num_src_pieces: int, num_tgt_pieces: int
) -> None:
    """Compare weights with the network of a configuration, before any memory is asked for on its word."""
    num_layers = spec.model.num_encoder_layers + spec.model.num_decoder_layers
    if num_layers > len(weights):
        raise CheckpointError(
            f"{path / WEIGHTS} does not fit {path / CONFIG}: it has {len(weights):,} tensors for {num_layers:,} layers."
        )
    with torch.device("meta"):
        shell = Transformer(spec.model, num_src_pieces, num_tgt_pieces)
    expected = {name: tuple(parameter.shape) for name, parameter in shell.named_parameters()}
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise CheckpointError(
                f"{path / WEIGHTS} does not fit {path / CONFIG}: {name} should have the shape "
                f"{expected.get(name)} and has {found.get(name)}."
            )


def put_weights(model: Transformer, weights: Mapping[str, Tensor]) -> None:
    """Copy weights into a model of the same shape."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file."""
    try:
        return safetensors.torch.load_file(path)
    except FileNotFoundError:
        raise CheckpointError(f"cannot read {path}: No such file or directory.") from None
    except SafetensorError as error:
        raise CheckpointError(f"{path} is broken: {error}.") from None


def average_weights(paths: list[Path]) -> dict[str, Tensor]:
    """6.1: the mean of the weights of several checkpoints."""
    mean: dict[str, Tensor] = {}
    for path in paths:
        for name, tensor in read_tensors(path / WEIGHTS).items():
            mean[name] = mean[name] + tensor.double() / len(paths) if name in mean else tensor.double() / len(paths)
    return {name: tensor.float() for name, tensor in mean.items()}


# ------------------------------------------------------------------- checkpoints of a run


def step_path(run: Path, update: int) -> Path:
    """Where the checkpoint of an update stands."""
    return run / f"step-{update:06d}"


def list_steps(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted(
        (path for path in run.glob("step-*") if path.is_dir() and path.name[5:].isdigit()),
        key=lambda p: int(p.name[5:]),
    )


def newest_step(run: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is whole, and what was wrong with newer ones."""
    complaints: list[str] = []
    for path in reversed(list_steps(run)):
        try:
            check_directory(path)
        except CheckpointError as error:
            complaints.append(str(error))
        else:
            return path, complaints
    return None, complaints


def set_aside(run: Path, newest: Path | None) -> None:
    """Take the checkpoints above the newest whole one out of the way, so that they neither count nor stand for it."""
    for path in reversed(list_steps(run)):
        if path == newest:
            return
        shutil.rmtree(run / f"broken-{path.name}", ignore_errors=True)
        path.rename(run / f"broken-{path.name}")


def link_best(run: Path, step: Path) -> None:
    """Let `best` name a checkpoint; that it does is on the disk before what it named may go."""
    new = run / (TEMPORARY + "best")
    with writing(run / "best"):
        new.unlink(missing_ok=True)
        new.symlink_to(step.name)
        new.replace(run / "best")
        sync_directory(run)


def prune(run: Path, keep: set[str], newest: int) -> None:
    """Remove all checkpoints but those named and the newest."""
    for path in list_steps(run)[:-newest]:
        if path.name not in keep:
            doomed = path.with_name(TEMPORARY + path.name)
            with writing(run):
                path.rename(doomed)  # so that no half-removed directory bears its name
                discard(doomed)
