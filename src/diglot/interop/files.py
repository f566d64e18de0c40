"""Directories of other engines: read what a stranger wrote, and write so that a failure leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from diglot import checkpoint
from diglot.errors import ConversionError

LONGEST_TEXT = 1 << 26  # bytes of a configuration or a vocabulary


def find_file(root: Path, name: str) -> Path:
    """A file of a directory by its plain name. A link may lead to another file of it, or to where a hub's cache keeps
    the files of its snapshots, but nowhere else."""
    path, inside = root / name, root.resolve()
    try:
        found = path.resolve(strict=True)
        is_file = stat.S_ISREG(found.stat().st_mode)
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle, characters that no name has
        raise ConversionError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}.") from None
    if Path(name).name != name or found.parent not in (inside, inside.parent.parent / "blobs") or not is_file:
        raise ConversionError(f"{path} is no file in its directory; if it is a link, copy there what it names.")
    return found


def read_bytes(root: Path, name: str) -> bytes:
    """A small file of a directory."""
    with find_file(root, name).open("rb") as file:
        content = file.read(LONGEST_TEXT + 1)
    if len(content) > LONGEST_TEXT:
        raise ConversionError(f"{root / name} is longer than any file of its kind.")
    return content


def read_text(root: Path, name: str) -> str:
    """The same, of text."""
    try:
        return read_bytes(root, name).decode()
    except UnicodeDecodeError as error:
        raise ConversionError(f"{root / name}, byte {error.start + 1:,}: this is not UTF-8.") from None


def read_json(root: Path, name: str) -> dict[str, Any]:
    """The same, of a JSON object."""
    try:
        found = json.loads(read_text(root, name))
        if not isinstance(found, dict):
            raise ValueError("it is no object")
    except (ValueError, RecursionError) as error:
        raise ConversionError(f"{root / name} is not what JSON of its kind is: {error}.") from None
    return cast("dict[str, Any]", found)


def write_json(value: object) -> bytes:
    """A JSON file that people read too."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def check_free(path: Path) -> None:
    """Refuse to write over anything."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConversionError(f"{path} exists; name a new or empty directory with --out.")


@contextmanager
def appearing(path: Path) -> Generator[Path]:
    """A directory to write into that bears its name when all is done, and is gone if anything fails."""
    check_free(path)
    new = path.with_name(checkpoint.TEMPORARY + path.name)
    try:
        with checkpoint.writing(path):
            checkpoint.make_directory(path.parent)
            checkpoint.discard(new)
            new.mkdir()
        yield new
        with checkpoint.writing(path):
            for file in new.iterdir():
                with file.open("rb") as written:
                    os.fsync(written.fileno())
            checkpoint.sync_directory(new)
            with suppress(FileNotFoundError):
                path.rmdir()
            new.rename(path)
            checkpoint.sync_directory(path.parent)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def write_files(root: Path, files: Mapping[str, bytes]) -> None:
    """Write the files of a directory that appears later."""
    with checkpoint.writing(root):
        for name, content in files.items():
            (root / name).write_bytes(content)
