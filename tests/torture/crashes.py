"""What a file system may hold after the power failed: from a trace of system calls, any state that POSIX allows.

`strace` tells what a program did. Until a file is fsynced its data may be missing, cut off or zeros. Until a directory
is fsynced any of the changes of its names may be missing, whatever came before or after them. What is kept of real file
systems: a rename is done or not done, a symbolic link is made with what it says, and a directory has one name.
"""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

CALLS = (
    "openat,open,creat,close,dup,dup2,dup3,write,pwrite64,writev,pwritev,pwritev2,sendfile,copy_file_range,ftruncate,"
    "truncate,fallocate,fsync,fdatasync,sync,syncfs,sync_file_range,mkdir,mkdirat,rmdir,unlink,unlinkat,rename,renameat,"
    "renameat2,link,linkat,symlink,symlinkat"
)
STRACE = ("strace", "-f", "-qq", "-xx", "-s", "10000000", "-e", f"trace={CALLS}")
CALL = re.compile(r"\d+ +(\w+)\((.*)\) += (-?\d+|\?).*")
ARGUMENT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"|([^",\s][^",]*)')
SECTOR = 512


@dataclass(eq=False)
class File:
    """A file: what is surely on the disk, and what the program wrote."""

    synced: bytes = b""
    data: bytes = b""

    def sync(self) -> None:
        self.synced = self.data


@dataclass(eq=False)
class Link:
    """A symbolic link."""

    target: str


@dataclass(eq=False)
class Directory:
    """A directory: the names that are surely on the disk, and the changes since; a change is done as a whole."""

    synced: dict[str, Node] = field(default_factory=dict)
    changes: list[dict[str, Node | None]] = field(default_factory=list)
    names: dict[str, Node] = field(default_factory=dict)

    def change(self, change: dict[str, Node | None]) -> None:
        self.changes.append(change)
        apply(self.names, change)

    def sync(self) -> None:
        self.synced, self.changes = dict(self.names), []


Node = File | Link | Directory


def apply(names: dict[str, Node], change: dict[str, Node | None]) -> None:
    """Do one change of names; a directory that takes a name loses the one that it had."""
    for name, node in change.items():
        names.pop(name, None)
        if isinstance(node, Directory):
            for other in [other for other, one in names.items() if one is node]:
                del names[other]
        if node is not None:
            names[name] = node


class Disk:
    """The file system below a directory, as the calls of a trace make it; what lies outside is passed over."""

    def __init__(self, root: Path):
        self.root, self.top, self.num_changes = root, Directory(), 0
        self.open: dict[str, tuple[Path, File | Directory]] = {}  # by file descriptor

    def find(self, path: Path) -> Node | None:
        node: Node | None = self.top
        for part in path.relative_to(self.root).parts:
            assert isinstance(node, Directory), path
            node = node.names.get(part)
        return node

    def change(self, path: Path, change: dict[str, Node | None]) -> None:
        """A change of names in the directory of a path, if it is one of ours."""
        if path != self.root and path.is_relative_to(self.root):
            directory = self.find(path.parent)
            assert isinstance(directory, Directory), path
            directory.change(change)
            self.num_changes += 1

    def at(self, fd: str, name: str) -> Path:
        """The path that a name means beside an open directory; an absolute one means itself."""
        return self.open[fd][0] / name if fd in self.open else Path(name)

    def do(self, line: str) -> str | None:
        """Do a line of a trace; what the program printed is returned."""
        if not (found := CALL.fullmatch(line)) or found[3] in ("-1", "?"):
            return None
        words = [text_of(string) if string else word for string, word in ARGUMENT.findall(found[2])]
        match [found[1], *words]:
            case ["write", "1", text, *_]:
                return text
            case ["write", fd, text, *_] if fd in self.open:
                file = self.open[fd][1]
                assert isinstance(file, File)
                file.data += text.encode("latin-1")[: int(found[3])]
                self.num_changes += 1
            case ["fsync", fd] if fd in self.open:
                self.open[fd][1].sync()
                self.num_changes += 1
            case ["close", fd]:
                self.open.pop(fd, None)
            case ["openat", fd, name, flags, *_]:
                self.do_open(self.at(fd, name), flags, found[3])
            case ["mkdir", name, _]:
                self.change(Path(name), {Path(name).name: Directory()})
            case ["unlink" | "rmdir", name]:
                self.change(Path(name), {Path(name).name: None})
            case ["unlinkat", fd, name, _]:
                self.change(self.at(fd, name), {name: None})
            case ["symlink", target, name]:
                self.change(Path(name), {Path(name).name: Link(target)})
            case ["rename", old, new] if Path(old).is_relative_to(self.root):
                assert Path(old).parent == Path(new).parent, line
                self.change(Path(old), {Path(old).name: None, Path(new).name: self.find(Path(old))})
            case [_, *touched]:  # a call that is not known here may not touch what is ours
                assert not any(word in self.open or word.startswith(str(self.root)) for word in touched), line[:300]
        return None

    def do_open(self, path: Path, flags: str, fd: str) -> None:
        self.open.pop(fd, None)
        if not path.is_relative_to(self.root):
            return
        node = self.find(path)
        if node is None:
            node = File()
            self.change(path, {path.name: node})
        if isinstance(node, File) and "O_TRUNC" in flags:
            node.data = b""
        if not isinstance(node, Link):
            self.open[fd] = path, node

    def end_process(self) -> None:
        """A process that ends, or is killed, closes its files; what it wrote is still in memory."""
        self.open.clear()

    # ---------------------------------------------------------------- what is left

    def write_crashed(self, path: Path, rng: random.Random) -> None:
        """Write one of the states that may be found after a crash at this moment."""
        shutil.rmtree(path, ignore_errors=True)
        kind = rng.choice(("nothing", "all", "in order", "any", "any", "mixed", "mixed"))

        def write(directory: Directory, path: Path) -> None:
            path.mkdir()
            for name, node in crashed_names(directory, kind, rng).items():
                if isinstance(node, Directory):
                    write(node, path / name)
                elif isinstance(node, Link):
                    (path / name).symlink_to(node.target)
                else:
                    (path / name).write_bytes(crashed_data(node, rng))

        write(self.top, path)

    def listing(self) -> dict[str, bytes | str]:
        """Every file and link below the root, as the program sees them."""

        def walk(directory: Directory, prefix: str) -> Iterator[tuple[str, bytes | str]]:
            for name, node in directory.names.items():
                if isinstance(node, Directory):
                    yield from walk(node, f"{prefix}{name}/")
                else:
                    yield prefix + name, node.data if isinstance(node, File) else node.target

        return dict(walk(self.top, ""))


def calls(trace: str) -> Iterator[str]:
    """The lines of a trace; a call in which another thread's came between is put together, where it ended."""
    begun: dict[str, str] = {}
    for line in trace.splitlines():
        thread = line.partition(" ")[0]
        if line.endswith(" <unfinished ...>"):
            begun[thread] = line.removesuffix(" <unfinished ...>")
        elif " resumed>" in line:
            yield begun.pop(thread) + line.partition(" resumed>")[2]
        else:
            yield line


def text_of(string: str) -> str:
    """What strace writes as \\x61\\x62, a character a byte."""
    return bytes.fromhex(string.replace("\\x", "")).decode("latin-1")


def crashed_names(directory: Directory, kind: str, rng: random.Random) -> dict[str, Node]:
    """The names that a directory may have after a crash."""
    if kind == "mixed":  # each directory fares in its own way
        kind = rng.choice(("nothing", "all", "in order", "any"))
    num = {"nothing": 0, "in order": rng.randint(0, len(directory.changes))}.get(kind, len(directory.changes))
    share = rng.random()
    names = dict(directory.synced)
    for change in directory.changes[:num]:
        if kind != "any" or rng.random() < share:
            apply(names, change)
    return names


def crashed_data(file: File, rng: random.Random) -> bytes:
    """What a file may hold after a crash: of what was not synced any sector, and zeros for the others."""
    if file.synced == file.data:
        return file.data
    end = rng.randint(0, len(file.data))
    kept = bytearray(file.synced.ljust(end, b"\0")[:end] if rng.random() < 0.5 else bytes(end))
    for start in range(0, end, SECTOR):
        if rng.random() < 0.5:
            kept[start : start + SECTOR] = file.data[start : min(start + SECTOR, end)]
    return rng.choice((file.synced, file.data, file.data[:end], bytes(kept), bytes(len(file.data)), b""))
