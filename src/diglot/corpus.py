"""Text files to an index of sentence pairs: read, check, filter, count.

The text stays in its files, memory-mapped; a pair is a row of numbers in an index, which is a file too, made once for a
text, its subwords and its filters, and shared by runs and ranks. So memory does not grow with the corpus. A line is
what LF ends and nothing else. Nothing is dropped in silence: every dropped pair is counted, and named by file and line.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import gzip
import hashlib
import itertools
import mmap
import os
import shutil
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

import numpy as np
from numpy.typing import NDArray

from diglot.config import DataConfig
from diglot.errors import TextError
from diglot.subwords import LEARNING_BYTES, Subwords, clean

BLOCK = 1 << 24
MAX_BYTES_OF_A_PIECE = 64  # 16 characters of 4 bytes: a line of more bytes a piece is too long unread
PAIRS_AT_ONCE = 20_000
INDEX_FORMAT = 1  # to be raised when rows or filters come to mean something else
PAIRS, DROPPED = "pairs", "dropped.tsv"  # the files of an index
UNPACKING = (gzip.BadGzipFile, EOFError, zlib.error)
BOM = b"\xef\xbb\xbf"

PAIR = np.dtype([
    ("file", "u4"), ("line", "i8"),  # where it stands, from 0
    ("src_start", "i8"), ("src_end", "i8"), ("tgt_start", "i8"), ("tgt_end", "i8"),  # bytes
    ("src_pieces", "i4"), ("tgt_pieces", "i4"),  # with the end piece
    ("src_hash", "u8"), ("tgt_hash", "u8"),
])  # fmt: skip


Progress = Callable[[str, int], AbstractContextManager[Callable[[int, str], None]]]


@contextmanager
def no_progress(what: str, total: int) -> Generator[Callable[[int, str], None]]:
    """A progress bar that nobody sees."""
    yield lambda steps, note: None


class TextFile:
    """The bytes of a text file; to count its lines checks that it is UTF-8 as a whole."""

    def __init__(self, path: Path, scratch: Path | None = None):
        self.path = path
        self.data = _open_bytes(path, scratch)
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
        digest = hashlib.sha256()
        for start in range(0, len(self.data), BLOCK):
            digest.update(memoryview(self.data)[start : start + BLOCK])
            self.release()
        return digest.hexdigest()

    def release(self) -> None:
        """Have the pages of the file that were read no longer count as memory of this process."""
        _release(self.data)

    def spans(self) -> Iterator[tuple[int, int]]:
        """Where each line starts and ends; a CR before the LF is no part of it."""
        start, size, released = self.start, len(self.data), 0
        while start < size:
            end = self.data.find(b"\n", start)
            end = size if end < 0 else end
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


def _release(data: object) -> None:
    if isinstance(data, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):  # not everywhere
        data.madvise(mmap.MADV_DONTNEED)


def _open_bytes(path: Path, scratch: Path | None) -> bytes | mmap.mmap:
    """The file's bytes, mapped; what ends in .gz is unpacked into `scratch`, or into memory without one."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as packed:
                if scratch is None:
                    return packed.read()
                scratch.mkdir(parents=True, exist_ok=True)
                with path.open("rb") as file:
                    unpacked = scratch / f"text-{hashlib.file_digest(file, 'sha256').hexdigest()[:32]}"
                if not unpacked.exists():
                    with tempfile.NamedTemporaryFile(dir=scratch, prefix=".text-") as out:
                        shutil.copyfileobj(packed, out, BLOCK)
                        out.flush()
                        with contextlib.suppress(FileExistsError):  # another process was faster
                            os.link(out.name, unpacked)
            path = unpacked
        with path.open("rb") as file:
            if file.seek(0, 2) == 0:
                return b""
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except UNPACKING as error:
        raise TextError(f"cannot unpack {path}: {error}.") from None
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

    def spans(self) -> Iterator[tuple[int, int, int, int]]:
        """Start and end of source and target of each line."""
        if not self.is_tsv:
            for (a, b), (c, d) in zip(self.src.spans(), self.tgt.spans(), strict=True):
                yield a, b, c, d
            return
        for line, (start, end) in enumerate(self.src.spans(), 1):
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
    """The lines of one side or both that subwords are learnt from."""
    for file in files:
        file.check()
        for a, b, c, d in file.spans():
            if src and b - a <= LEARNING_BYTES:
                yield file.src.data[a:b].decode()
            if tgt and d - c <= LEARNING_BYTES:
                yield file.tgt.data[c:d].decode()


class Corpus:
    """The pairs that passed the filters: rows of an index, over text that stays in its files."""

    def __init__(self, files: Sequence[PairFile], index: NDArray[Any], dropped: Counter[str]):
        self.files, self.index, self.dropped = files, index, dropped
        self.rows: NDArray[np.int32] = np.arange(len(index), dtype=np.int32)  # of the index, but for held out pairs
        self.src_pieces, self.tgt_pieces = self.column("src_pieces"), self.column("tgt_pieces")

    def __len__(self) -> int:
        return len(self.rows)

    def column(self, name: str) -> NDArray[Any]:
        """One number of every pair."""
        column = np.ascontiguousarray(self.index[name])[self.rows]
        self.release()
        return column

    def release(self) -> None:
        """Let what was read of files no longer count as memory of this process."""
        _release(getattr(self.index, "_mmap", None))
        for file in self.files:
            file.src.release()
            file.tgt.release()

    def texts(self, rows: Sequence[int] | NDArray[np.int64]) -> tuple[list[str], list[str]]:
        """Source and target text of some pairs."""
        src: list[str] = []
        tgt: list[str] = []
        chosen = self.index[self.rows[rows]]

        def column(name: str) -> list[int]:
            return chosen[name].tolist()

        spans = column("src_start"), column("src_end"), column("tgt_start"), column("tgt_end")
        for number, a, b, c, d in zip(column("file"), *spans, strict=True):
            file = self.files[number]
            src.append(file.src.data[a:b].decode())
            tgt.append(file.tgt.data[c:d].decode())
        self.release()
        return src, tgt

    def groups(self, config: DataConfig) -> list[tuple[int, int, float]]:
        """The rows of each file, from and to, and how often they come in an epoch."""
        ends: NDArray[np.int64] = np.searchsorted(self.column("file"), np.arange(len(self.files)), side="right")
        sizes: NDArray[np.int64] = np.diff(ends, prepend=0)
        wanted = sizes * np.array(config.weights or [1.0] * len(sizes))
        shares = wanted ** (1 / config.temperature)
        wanted = shares * (wanted.sum() / shares.sum())
        return [
            (int(end - size), int(end), float(want / size))
            for end, size, want in zip(ends, sizes, wanted, strict=True)
            if size
        ]

    def files_of(self, rows: Sequence[int] | NDArray[np.int64]) -> list[int]:
        """The number of the file that each pair stands in."""
        return self.index[self.rows[rows]]["file"].tolist()

    def where(self, row: int) -> str:
        """The place of a pair, in words."""
        pair = self.index[self.rows[row]]
        return self.files[int(pair["file"])].where(int(pair["line"]))

    def fingerprint(self) -> str:
        """A hash of the text of all pairs and of their order."""
        digest = hashlib.sha256()
        for name in ("src_hash", "tgt_hash", "src_pieces", "tgt_pieces"):
            digest.update(self.column(name).tobytes())
        return digest.hexdigest()

    def hold_out(self, num: int, seed: int, drops: TextIO) -> tuple[list[str], list[str], list[int]]:
        """Take random pairs out, with every other pair of the same source text; their texts, and their files."""
        hashes = self.column("src_hash")
        order = np.random.default_rng([seed, len(self)]).permutation(len(self))
        _, first = np.unique(hashes[order], return_index=True)
        chosen = np.sort(order[np.sort(first)[:num]])
        texts = (*self.texts(chosen), self.files_of(chosen))
        taken = np.isin(hashes, hashes[chosen])
        for row in np.flatnonzero(taken).tolist():
            drops.write(f"held out\t{self.where(row)}\n")
            self.dropped["held out"] += 1
        self.rows, self.src_pieces, self.tgt_pieces = (
            column[~taken] for column in (self.rows, self.src_pieces, self.tgt_pieces)
        )
        return texts


def index_corpus(
    files: Sequence[PairFile],
    src_subwords: Subwords,
    tgt_subwords: Subwords,
    config: DataConfig,
    drops: TextIO,
    progress: Progress = no_progress,
    cache: Path | None = None,
) -> Corpus:
    """Index the pairs that pass the filters; name the others, with the reason, in `drops`.

    An index of the same text, subwords and filters is taken from `cache`, or left there.
    """
    key = index_key(files, src_subwords, tgt_subwords, config)
    with tempfile.TemporaryDirectory() as scratch:
        path = (cache or Path(scratch)) / f"index-{key}"
        if not path.exists():
            for file in files:
                file.check()
            num_lines = sum(file.src.num_lines for file in files)
            new = Path(tempfile.mkdtemp(prefix=".index-", dir=path.parent))
            try:
                with progress("reading pairs", num_lines) as advance:
                    write_index(new, files, src_subwords, tgt_subwords, config, advance)
                with contextlib.suppress(FileExistsError):  # another process was faster
                    new.rename(path)
            except OSError as error:
                raise TextError(
                    f"cannot write the index of the corpus to {path.parent}: {error.strerror}. Make room there, or "
                    "let DIGLOT_CACHE name another directory."
                ) from None
            finally:
                shutil.rmtree(new, ignore_errors=True)
        index = np.empty(0, PAIR)
        if (path / PAIRS).stat().st_size:
            index = np.memmap(path / PAIRS, PAIR, "r")
        dropped: Counter[str] = Counter()
        with (path / DROPPED).open(encoding="utf-8") as lines:
            for line in lines:
                reason, number, place = line.split("\t")
                dropped[reason] += 1
                drops.write(f"{reason}\t{files[int(number)].where(int(place))}\n")
    return Corpus(files, index, dropped)


def index_key(files: Sequence[PairFile], src_subwords: Subwords, tgt_subwords: Subwords, config: DataConfig) -> str:
    """A name for all that an index depends on."""
    texts = [(file.src.digest, file.tgt.digest) for file in files]
    vocabularies = [hashlib.sha256(side.proto).hexdigest() for side in (src_subwords, tgt_subwords)]
    filters = config.max_pieces, config.max_ratio, config.drop_duplicates, config.drop_same
    return hashlib.sha256(repr((INDEX_FORMAT, texts, vocabularies, filters)).encode()).hexdigest()[:32]


def write_index(
    path: Path,
    files: Sequence[PairFile],
    src_subwords: Subwords,
    tgt_subwords: Subwords,
    config: DataConfig,
    advance: Callable[[int, str], None],
) -> None:
    """Write the rows of the pairs that pass, and the places of the others with the reason."""
    with (path / PAIRS).open("wb") as pairs, (path / DROPPED).open("w", encoding="utf-8") as drops:
        for number, file in enumerate(files):

            def drop(line: int, reason: str, number: int = number) -> None:
                drops.write(f"{reason}\t{number}\t{line}\n")

            lines = enumerate(file.spans())
            while block := list(itertools.islice(lines, PAIRS_AT_ONCE)):
                rows, *texts = clean_pairs(block, file, config, drop)
                encoded = src_subwords.encode_all(texts[0]), tgt_subwords.encode_all(texts[1])
                kept: list[tuple[int, ...]] = []
                for row, (src, tgt), one, two in zip(rows, zip(*encoded, strict=True), *texts, strict=True):
                    num_src, num_tgt = len(src) + 1, len(tgt) + 1
                    if max(num_src, num_tgt) > config.max_pieces:
                        drop(row[0], "too long")
                    elif max(num_src, num_tgt) > config.max_ratio * min(num_src, num_tgt):
                        drop(row[0], "length ratio")
                    else:
                        kept.append((number, *row, num_src, num_tgt, _hash(one), _hash(two)))
                pairs.write(np.array(kept, PAIR).tobytes())
                advance(len(block), "")
        pairs.flush()
        if config.drop_duplicates and pairs.tell():
            index = np.fromfile(path / PAIRS, PAIR)
            keys = np.stack((index["src_hash"], index["tgt_hash"]), axis=1)
            is_first = np.zeros(len(index), np.bool_)
            is_first[np.unique(keys, axis=0, return_index=True)[1]] = True
            for row in index[~is_first]:
                drops.write(f"duplicate\t{row['file']}\t{row['line']}\n")
            pairs.seek(0)
            pairs.write(index[is_first].tobytes())
            pairs.truncate()
        for file in (pairs, drops):
            file.flush()
            os.fsync(file.fileno())


def clean_pairs(
    block: Sequence[tuple[int, tuple[int, int, int, int]]],
    file: PairFile,
    config: DataConfig,
    drop: Callable[[int, str], None],
) -> tuple[list[tuple[int, int, int, int, int]], list[str], list[str]]:
    """Line and place of the pairs that are worth encoding, and their texts as the network sees them."""
    rows: list[tuple[int, int, int, int, int]] = []
    texts: tuple[list[str], list[str]] = ([], [])
    for line, (a, b, c, d) in block:
        if max(b - a, d - c) > config.max_pieces * MAX_BYTES_OF_A_PIECE:
            drop(line, "too long")
            continue
        one, two = clean(file.src.data[a:b].decode()).strip(), clean(file.tgt.data[c:d].decode()).strip()
        if not one or not two:
            drop(line, "empty")
        elif config.drop_same and one == two:
            drop(line, "same text")
        else:
            rows.append((line, a, b, c, d))
            texts[0].append(one)
            texts[1].append(two)
    return rows, *texts


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
