"""Text files, and the sentence pairs in them.

The text stays in its files, memory-mapped; a pair is a row of numbers in an index (made by `index.py`), which is mapped
too. What was read of either is let go at once, so memory does not grow with the corpus. A line is what LF ends and
nothing else.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import gzip
import hashlib
import itertools
import json
import mmap
import os
import shutil
import time
import uuid
import zlib
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

import numpy as np
from numpy.typing import NDArray

from diglot.batching import shuffled, stretches
from diglot.config import DataConfig
from diglot.errors import TextError
from diglot.subwords import LEARNING_BYTES, LEARNING_LINES

BLOCK, SMALL_BLOCK = 1 << 22, 1 << 16
MAX_BYTES_OF_A_PIECE = 64  # 16 characters of 4 bytes: a line of more bytes a piece is too long unread
ROWS_AT_ONCE = 256  # read in any order, before their pages are let go: each brings in up to sixteen neighbours
MAKING = ".diglot-making-"  # begins the name of what is not yet whole in the cache
SECONDS_TO_MAKE = 24 * 3600  # without a change after which its maker, of whatever machine, is dead
SECONDS_TO_SETTLE = 2  # in which a file may change without its time telling
PLACES, LENGTHS, HASHES, FACTS = "places", "lengths", "hashes", "facts.json"  # the files of an index
UNPACKING = (gzip.BadGzipFile, EOFError, zlib.error)
BOM = b"\xef\xbb\xbf"

# The columns of an index, a file for what is read together; a row for each pair.
PLACE = np.dtype([
    ("file", "u4"), ("line", "i8"),  # from 0
    ("src_start", "i8"), ("src_end", "i8"), ("tgt_start", "i8"), ("tgt_end", "i8"),  # bytes
])  # fmt: skip
LENGTH = np.dtype([("src", "i4"), ("tgt", "i4")])  # pieces, with the end piece and the source's tag
HASH = np.dtype([("src", "u8"), ("tgt", "u8")])  # of the text as the network sees it


class TextFile:
    """The bytes of a text file; to count its lines checks that it is UTF-8 as a whole."""

    def __init__(self, path: Path, scratch: Path | None = None):
        self.path, self.scratch = path, scratch
        self.plain = _unpack(path, scratch) if path.suffix == ".gz" and scratch else path
        self.data = open_bytes(self.plain)
        self.start = len(BOM) if self.data[: len(BOM)] == BOM else 0

    @cached_property
    def num_lines(self) -> int:
        """The number of lines, all of them UTF-8."""
        refuse_utf16(self.data[:2], str(self.path))
        decoder, lines = codecs.getincrementaldecoder("utf-8")(), 0
        for start in range(0, len(self.data), BLOCK):
            block = self.data[start : start + BLOCK]
            lines += block.count(b"\n")
            pending = len(decoder.getstate()[0])
            try:
                decoder.decode(block, final=start + BLOCK >= len(self.data))
            except UnicodeDecodeError as error:
                raise self._not_utf8(start - pending + error.start) from None
            self.release()
        return lines + (len(self.data) > self.start and self.data[-1:] != b"\n")

    def _not_utf8(self, at: int) -> TextError:
        before = self.data[:at]
        line, column = before.count(b"\n") + 1, at - before.rfind(b"\n")
        return TextError(
            f"{self.path}, line {line}, byte {column}: 0x{self.data[at]:02X} is not UTF-8; "
            f"convert the file, as with: iconv -f LATIN1 -t UTF-8 {self.path} > new"
        )

    @cached_property
    def digest(self) -> str:
        """A hash of the content."""
        return _digest(self.plain, self.scratch)

    def starts(self, every: int) -> list[int]:
        """Where the first line starts, and from it on each so many-th."""
        found, num = [self.start], 0
        for start in range(0, len(self.data), SMALL_BLOCK):
            block = np.frombuffer(self.data[start : start + SMALL_BLOCK], np.uint8)
            ends = np.flatnonzero(block == ord("\n"))
            found += (start + 1 + ends[(every - 1 - num) % every :: every]).tolist()
            num += len(ends)
            self.release()
        return [start for start in found if start < len(self.data)]

    def release(self) -> None:
        """Have the pages of the file that were read no longer count as memory of this process."""
        _release(self.data)

    def spans(self, start: int | None = None, stop: int | None = None) -> Iterator[tuple[int, int]]:
        """Where each line starts and ends, of all or of those in a stretch; a CR before the LF is no part of it."""
        start, stop, released = start or self.start, len(self.data) if stop is None else stop, 0
        while start < stop:
            end = self.data.find(b"\n", start)
            end = len(self.data) if end < 0 else end
            yield start, end - (end > start and self.data[end - 1 : end] == b"\r")
            start = end + 1
            if start - released > BLOCK:
                self.release()
                released = start

    def lines(self) -> Iterator[str]:
        """The lines as text."""
        for start, end in self.spans():
            yield self.data[start:end].decode()


def cache_directory() -> Path:
    """Where what is made once of a text is kept: indexes, subwords, what was unpacked."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(os.environ.get("DIGLOT_CACHE") or Path(root) / "diglot")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TextError(
            f"cannot make the cache {path}: {error.strerror}; let DIGLOT_CACHE name another directory."
        ) from None
    return path


def sweep_cache(cache: Path) -> None:
    """Remove what killed processes have left half made. Nobody knows of those of other machines whether they live, but
    who lives has written something lately."""
    for left in cache.glob(MAKING + "*"):
        with contextlib.suppress(OSError):  # another process was faster
            changed = max(path.stat().st_mtime for path in (left, *left.iterdir()))
            if time.time() - changed > SECONDS_TO_MAKE:
                shutil.rmtree(left, ignore_errors=True)


@contextmanager
def making(path: Path) -> Generator[Path]:
    """A directory of its own in which to make what shall bear a name in the cache; what is left in it is removed. Its
    mode is as the umask says, and so are those in it: mkdtemp and mkstemp would let nobody else read them."""
    new = path.with_name(f"{MAKING}{path.name}-{uuid.uuid4().hex}")
    new.mkdir()
    try:
        yield new
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _release(data: object) -> None:
    if isinstance(data, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):  # not everywhere
        data.madvise(mmap.MADV_DONTNEED)


def open_bytes(path: Path) -> bytes | mmap.mmap:
    """A file's bytes, mapped; what is packed is unpacked into memory."""
    try:
        with path.open("rb") as file:
            if path.suffix == ".gz":
                with gzip.open(file) as packed:
                    return packed.read()
            if file.seek(0, 2) == 0:
                return b""
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except UNPACKING as error:
        raise TextError(f"cannot unpack {path}: {error}.") from None
    except OSError as error:
        raise TextError(f"cannot read {path}: {error.strerror}.") from None


def _unpack(path: Path, scratch: Path) -> Path:
    """Where a packed file lies unpacked, by its content."""
    unpacked = scratch / f"text-{_digest(path, scratch)[:32]}"
    try:
        if not unpacked.exists():
            with gzip.open(path) as packed, making(unpacked) as new, (new / unpacked.name).open("wb") as out:
                shutil.copyfileobj(packed, out, BLOCK)
                out.flush()
                os.fsync(out.fileno())
                with contextlib.suppress(FileExistsError):  # another process was faster
                    os.link(out.name, unpacked)
    except UNPACKING as error:
        raise TextError(f"cannot unpack {path}: {error}.") from None
    except OSError as error:
        raise TextError(f"cannot unpack {path} into {scratch}: {error.strerror}.") from None
    return unpacked


def _digest(path: Path, scratch: Path | None) -> str:
    """A hash of a file's content; of a file that has not changed since, the one that `scratch` remembers."""
    try:
        with path.open("rb") as file:
            stat = os.fstat(file.fileno())
            name = path.resolve(), stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
            if scratch is None:
                return hashlib.file_digest(file, "sha256").hexdigest()
            scratch.mkdir(parents=True, exist_ok=True)
            known = scratch / f"digest-{hashlib.sha256(repr(name).encode()).hexdigest()[:32]}"
            if known.exists() and len(digest := known.read_text()) == 64:
                return digest
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            if time.time() - max(stat.st_mtime, stat.st_ctime) > SECONDS_TO_SETTLE:
                known.write_text(digest)
            return digest
    except OSError as error:
        raise TextError(f"cannot read {path}: {error.strerror}.") from None


def refuse_utf16(start: bytes, name: str) -> None:
    """Tell UTF-16 by its mark, for it is what some editors save."""
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise TextError(f"{name} is UTF-16; convert it, as with: iconv -f UTF-16 -t UTF-8 OLD > NEW")


def stream_lines(file: BinaryIO, name: str) -> Iterator[str]:
    """The lines of a stream as they arrive, checked one by one; the stream is closed at the end."""
    lines = _stream_lines(file, name)
    next(lines)  # begun, it closes the stream even if nobody asks for a line
    return lines


def _stream_lines(file: BinaryIO, name: str) -> Iterator[str]:
    with file:
        yield ""
        for number in itertools.count(1):
            try:
                line = file.readline()
            except UNPACKING as error:
                raise TextError(f"cannot unpack {name}: {error}.") from None
            if not line:
                return
            if number == 1:
                refuse_utf16(line, name)
                line = line.removeprefix(BOM)
            try:
                yield line.removesuffix(b"\n").removesuffix(b"\r").decode()
            except UnicodeDecodeError as error:
                raise TextError(
                    f"{name}, line {number}, byte {error.start + 1}: 0x{line[error.start]:02X} is not UTF-8; convert "
                    "the text, as with: iconv -f LATIN1 -t UTF-8"
                ) from None


def open_stream(path: Path) -> BinaryIO:
    """A text to be read line by line, unpacked if its name ends in .gz."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "Is a directory")
        return cast("BinaryIO", gzip.open(path)) if path.suffix == ".gz" else path.open("rb")
    except OSError as error:
        raise TextError(f"cannot read {path}: {error.strerror}.") from None


def read_lines(path: Path) -> list[str]:
    """All lines of a text that is small enough for memory."""
    text = TextFile(path)
    return list(text.lines()) if text.num_lines else []


@dataclass(frozen=True)
class Stretch:
    """Some lines of a text and of its translation."""

    line: int  # the first, from 0
    src: tuple[int, int]  # bytes
    tgt: tuple[int, int]


@dataclass
class PairFile:
    """A text and its translation, line by line: two files, or one with TABs."""

    src: TextFile
    tgt: TextFile

    def check(self) -> None:
        """Refuse two files of unequal length, and say where they seem to run apart; refuse what is not UTF-8."""
        src, tgt = self.src, self.tgt
        if src.num_lines == tgt.num_lines:
            return
        counts = f"{src.path} has {src.num_lines:,} lines and {tgt.path} has {tgt.num_lines:,}"
        where = ""
        if src.num_lines and tgt.num_lines:
            lengths = [np.array([end - start for start, end in side.spans()], dtype=np.int64) for side in (src, tgt)]
            apart = runs_apart(*lengths) + 1
            where = f" Their lengths run apart at line {apart:,}: look there for a missing or extra line."
        raise TextError(f"{counts}; they must match line by line.{where}")

    @property
    def is_tsv(self) -> bool:
        """Both sides stand in one file."""
        return self.src is self.tgt

    def stretches(self, num_lines: int) -> list[Stretch]:
        """The lines, so many at a time."""
        sides = ([*side.starts(num_lines), len(side.data)] for side in (self.src, self.tgt))
        spans = zip(*map(itertools.pairwise, sides), strict=True)
        return [Stretch(i * num_lines, src, tgt) for i, (src, tgt) in enumerate(spans)]

    def spans(self, stretch: Stretch | None = None) -> Iterator[tuple[int, int, int, int]]:
        """Start and end of source and target of each line, of all or of a stretch."""
        first, src, tgt = (stretch.line, stretch.src, stretch.tgt) if stretch else (0, (), ())
        if not self.is_tsv:
            for (a, b), (c, d) in zip(self.src.spans(*src), self.tgt.spans(*tgt), strict=True):
                yield a, b, c, d
            return
        for line, (start, end) in enumerate(self.src.spans(*src), first + 1):
            tab = self.src.data.find(b"\t", start, end)
            if tab < 0:
                raise TextError(f"{self.src.path}, line {line}: no TAB between source and target.")
            third = self.src.data.find(b"\t", tab + 1, end)  # further columns are passed over
            yield start, tab, tab + 1, end if third < 0 else third

    def where(self, line: int) -> str:
        """The place of a pair, in words; lines from 0."""
        return f"{self.src.path}:{line + 1}"


def open_pairs(
    src: Sequence[str], tgt: Sequence[str], tsv: Sequence[str] = (), scratch: Path | None = None
) -> list[PairFile]:
    """Open a corpus of one or more files."""
    pairs: list[PairFile] = []
    for one, two in zip(src, tgt, strict=True):
        pairs.append(PairFile(TextFile(Path(one), scratch), TextFile(Path(two), scratch)))
    for name in tsv:
        both = TextFile(Path(name), scratch)
        pairs.append(PairFile(both, both))
    return pairs


def runs_apart(src: NDArray[np.int64], tgt: NDArray[np.int64]) -> int:
    """The first line after which the longer side fits better when shifted: where lines are missing, as one gap."""
    long, short = (src, tgt) if len(src) > len(tgt) else (tgt, src)
    gap, n = len(long) - len(short), len(short)
    a, b, shifted = (np.log1p(x.astype(np.float64)) for x in (long[:n], short, long[gap:]))
    usual = np.median(np.concatenate((a - b, shifted - b)))
    straight, moved = np.abs(a - b - usual), np.abs(shifted - b - usual)
    # the cost of a gap before line p: lines below p as they stand, from p on shifted
    cost = np.concatenate(([0.0], np.cumsum(straight))) + np.concatenate((np.cumsum(moved[::-1])[::-1], [0.0]))
    return int(cost.argmin())


def lines_to_learn_from(files: Sequence[PairFile], src: bool, tgt: bool) -> Iterator[str]:
    """The lines of one side or both that subwords are learnt from: of more than LEARNING_LINES so many, evenly spread.
    SentencePiece would draw others in every process."""
    for file in files:
        file.check()
    num = sum(file.src.num_lines for file in files)
    most = min(num, LEARNING_LINES // (src + tgt))
    spans = ((file, *span) for file in files for span in file.spans())
    for i, (file, a, b, c, d) in enumerate(spans):
        if i * most % num >= most:
            continue
        if src and b - a <= LEARNING_BYTES:
            yield file.src.data[a:b].decode()
        if tgt and d - c <= LEARNING_BYTES:
            yield file.tgt.data[c:d].decode()


class Corpus:
    """The pairs that passed the filters: rows of an index, over text that stays in its files."""

    def __init__(self, files: Sequence[PairFile], index: Path, dropped: Counter[str]):
        self.files, self.dropped = files, dropped
        facts = json.loads((index / FACTS).read_bytes())
        self._fingerprint, self._ends = str(facts["fingerprint"]), np.array(facts["ends"], np.int64)
        self._mapped = [open_bytes(index / name) for name in (PLACES, LENGTHS, HASHES)]
        self._places, self._lengths, self._hashes = (
            np.frombuffer(data, dtype) for data, dtype in zip(self._mapped, (PLACE, LENGTH, HASH), strict=True)
        )
        self.held_out = np.empty(0, np.int64)  # rows of the index that are no pairs of this corpus, in order

    def __len__(self) -> int:
        return len(self._places) - len(self.held_out)

    def ids(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows of the index that pairs stand in; what is held out shifts those after it."""
        before = np.searchsorted(self.held_out - np.arange(len(self.held_out)), rows, side="right")
        return rows + before

    def lengths(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The pieces of source and target of some pairs, with the end piece and the source's tag."""
        found = self._read(self._lengths, self.ids(rows))
        return found["src"], found["tgt"]

    def _read(self, table: NDArray[Any], ids: NDArray[np.int64]) -> NDArray[Any]:
        found = np.empty(len(ids), table.dtype)
        for start in range(0, len(ids), ROWS_AT_ONCE):
            found[start : start + ROWS_AT_ONCE] = table[ids[start : start + ROWS_AT_ONCE]]
            self.release()
        return found

    def count_lengths(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """How many pairs have a source, and how many a target, of 0, 1, 2 ... pieces."""
        counts = np.zeros((2, 1), np.int64)
        for rows in stretches(len(self)):
            sides = self.lengths(rows)
            longest = max(counts.shape[1] - 1, *(int(side.max()) for side in sides))
            counts = np.pad(counts, ((0, 0), (0, longest + 1 - counts.shape[1])))
            counts += np.stack([np.bincount(side, minlength=longest + 1) for side in sides])
        return counts[0], counts[1]

    def release(self) -> None:
        """Let what was read of files no longer count as memory of this process."""
        for mapped in self._mapped:
            _release(mapped)
        for file in self.files:
            file.src.release()
            file.tgt.release()

    def texts(self, rows: NDArray[np.int64]) -> tuple[list[str], list[str]]:
        """Source and target text of some pairs."""
        src: list[str] = []
        tgt: list[str] = []
        for start in range(0, len(rows), ROWS_AT_ONCE):
            places: list[tuple[int, ...]] = self._places[self.ids(rows[start : start + ROWS_AT_ONCE])].tolist()
            for number, _, a, b, c, d in places:
                file = self.files[number]
                src.append(file.src.data[a:b].decode())
                tgt.append(file.tgt.data[c:d].decode())
            self.release()
        return src, tgt

    def groups(self, config: DataConfig) -> list[tuple[int, int, float]]:
        """The rows of each file, from and to, and how often they come in an epoch."""
        ends = self._ends - np.searchsorted(self.held_out, self._ends)
        sizes: NDArray[np.int64] = np.diff(ends, prepend=0)
        wanted = sizes * np.array(config.weights or [1.0] * len(sizes))
        shares = wanted ** (1 / config.temperature)
        wanted = shares * (wanted.sum() / shares.sum())
        return [
            (int(end - size), int(end), float(want / size))
            for end, size, want in zip(ends, sizes, wanted, strict=True)
            if size
        ]

    def files_of(self, rows: NDArray[np.int64]) -> list[int]:
        """The number of the file that each pair stands in."""
        return self._places["file"][self.ids(rows)].tolist()

    def where(self, row: int) -> str:
        """The place of a pair, in words."""
        place = self._places[self.ids(np.array([row]))[0]]
        return self.files[int(place["file"])].where(int(place["line"]))

    def fingerprint(self) -> str:
        """A hash of the text of all pairs and of their order."""
        return hashlib.sha256(self._fingerprint.encode() + self.held_out.tobytes()).hexdigest()

    def hold_out(self, num: int, seed: int, drops: TextIO) -> tuple[list[str], list[str], list[int]]:
        """Take random pairs out, with every other pair of the same source text; their texts, and their files."""
        chosen: dict[int, int] = {}  # hash of the source to the first row that has it
        for places in stretches(len(self)):
            if len(chosen) >= num:
                break
            rows = shuffled(places, len(self), seed)
            for row, source in zip(rows.tolist(), self._read(self._hashes, rows)["src"].tolist(), strict=True):
                if len(chosen) < num:
                    chosen.setdefault(source, row)
        rows = np.sort(np.array([*chosen.values()], np.int64))
        texts = (*self.texts(rows), self.files_of(rows))
        sources = np.array([*chosen], np.uint64)
        taken = [rows[np.isin(self._read(self._hashes, rows)["src"], sources)] for rows in stretches(len(self))]
        for row in (held_out := np.concatenate([rows[:0], *taken])).tolist():
            drops.write(f"held out\t{self.where(row)}\n")
            self.dropped["held out"] += 1
        self.held_out = held_out
        return texts
