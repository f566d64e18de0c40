"""What is on disk, and that it survives.

A directory is written under a temporary name: every file is flushed to the disk, a manifest with the sha256 of each
comes last, then the directory is renamed. So a name that exists is whole, whenever the process was killed. Reading
checks the manifest. There is nothing but safetensors, TOML, JSON and SentencePiece's own format: no pickle.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass
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

FORMAT = 1
MANIFEST = "manifest.json"
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
    new = path.with_name(TEMPORARY + path.name)
    try:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        listed: dict[str, Any] = {}
        for name, content in files.items():
            write_file(new / name, content)
            listed[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        manifest = {"format": FORMAT, "diglot": diglot.__version__, "files": listed}
        write_file(new / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
        sync_directory(new)
        old = replaced(path)
        if path.exists():  # a directory cannot be renamed over another
            shutil.rmtree(old, ignore_errors=True)
            path.rename(old)
        new.rename(path)
        shutil.rmtree(old, ignore_errors=True)
        sync_directory(path.parent)
    except OSError as error:
        shutil.rmtree(new, ignore_errors=True)
        put_back(path)
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
        write_file(new, content)
        new.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise CheckpointError(f"cannot write {path}: {error.strerror}.") from None


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
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def check_directory(path: Path) -> dict[str, Any]:
    """Compare every file with the manifest, and return the manifest."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        files = cast("dict[str, dict[str, Any]]", manifest["files"])
        number = int(manifest["format"])
        expected = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in files.items()}
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
            with (path / name).open("rb") as file:
                info = os.lstat(path / name)
                whole = stat.S_ISREG(info.st_mode) and info.st_size == size
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
        "config.toml": to_toml(spec).encode(),
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
    """Read and check a model directory."""
    path = find_model(path)
    check_directory(path)
    spec = from_dict(ModelSpec, read_toml(path / "config.toml"), str(path / "config.toml"))
    if (path / "subwords.model").exists():
        src_subwords = tgt_subwords = load_subwords(path / "subwords.model")
    else:
        src_subwords = load_subwords(path / "subwords.src.model")
        tgt_subwords = load_subwords(path / "subwords.tgt.model")
    if spec.model.tie == "all" and src_subwords != tgt_subwords:
        raise CheckpointError(
            f"{path / 'config.toml'} shares one matrix between the languages (tie = 'all'), "
            "but there are two vocabularies."
        )
    with torch.device("meta"):  # no time for weights that are replaced at once
        shell = Transformer(spec.model, src_subwords.num_pieces, tgt_subwords.num_pieces)
    expected = {name: tuple(parameter.shape) for name, parameter in shell.named_parameters()}
    weights = read_tensors(path / WEIGHTS)
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise CheckpointError(
                f"{path / WEIGHTS} does not fit {path / 'config.toml'}: {name} should have the shape "
                f"{expected.get(name)} and has {found.get(name)}."
            )
    model = Transformer(spec.model, src_subwords.num_pieces, tgt_subwords.num_pieces)
    put_weights(model, weights)
    return StoredModel(path, spec, model, src_subwords, tgt_subwords)


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
    """Let `best` name a checkpoint."""
    new = run / (TEMPORARY + "best")
    new.unlink(missing_ok=True)
    new.symlink_to(step.name)
    new.replace(run / "best")


def prune(run: Path, keep: set[str], newest: int) -> None:
    """Remove all checkpoints but those named and the newest."""
    for path in list_steps(run)[:-newest]:
        if path.name not in keep:
            doomed = path.with_name(TEMPORARY + path.name)
            path.rename(doomed)  # so that no half-removed directory bears its name
            shutil.rmtree(doomed, ignore_errors=True)
