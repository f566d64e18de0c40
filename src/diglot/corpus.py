"""Text files to an index of sentence pairs: read, check, filter, count.

The text stays in its files, memory-mapped (what is compressed is first unpacked beside the run); a pair is a row of
numbers in an array. A line is what LF ends and nothing else. Nothing is dropped in silence: every dropped pair is
counted, and named by file and line in a list.
"""

from __future__ import annotations

import codecs
import errno
import gzip
import hashlib
import itertools
import mmap
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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
UNPACKING = (gzip.BadGzipFile, EOFError, zlib.error)
BOM = b"\xef\xbb\xbf"

PAIR = np.dtype([
    ("file", "u4"), ("line", "i8"),  # where it stands, from 0
    ("src_start", "i8"), ("src_end", "i8"), ("tgt_start", "i8"), ("tgt_end", "i8"),  # bytes
    ("src_pieces", "i4"), ("tgt_pieces", "i4"),  # with the end piece
    ("src_hash", "u8"), ("tgt_hash", "u8"),
])  # fmt: skip


class TextFile:
    """The bytes of a text file, checked to be UTF-8 as a whole."""

    def __init__(self, path: Path, scratch: Path | None = None):
        self.path = path
        self.data = _open_bytes(path, scratch)
        self.start = len(BOM) if self.data[: len(BOM)] == BOM else 0
        self.num_lines = self._check()

    def _check(self) -> int:
        if self.data[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise TextError(f"{self.path} is UTF-16; convert it: iconv -f UTF-16 -t UTF-8 {self.path} > new")
        decoder, lines = codecs.getincrementaldecoder("utf-8")(), 0
        for start in range(0, len(self.data), BLOCK):
            block = self.data[start : start + BLOCK]
            lines += block.count(b"\n")
            pending = len(decoder.getstate()[0])
            try:
                decoder.decode(block, final=start + BLOCK >= len(self.data))
            except UnicodeDecodeError as error:
                raise self._not_utf8(start - pending + error.start) from None
        return lines + (len(self.data) > self.start and self.data[-1:] != b"\n")

    def _not_utf8(self, at: int) -> TextError:
        before = self.data[:at]
        line, column = before.count(b"\n") + 1, at - before.rfind(b"\n")
        return TextError(
            f"{self.path}, line {line}, byte {column}: 0x{self.data[at]:02X} is not UTF-8; "
            f"convert the file, as with: iconv -f LATIN1 -t UTF-8 {self.path} > new"
        )

    def spans(self) -> Iterator[tuple[int, int]]:
        """Where each line starts and ends; a CR before the LF is no part of it."""
        start, size = self.start, len(self.data)
        while start < size:
            end = self.data.find(b"\n", start)
            end = size if end < 0 else end
            yield start, end - (end > start and self.data[end - 1 : end] == b"\r")
            start = end + 1

    def lines(self) -> Iterator[str]:
        """The lines as text."""
        for start, end in self.spans():
            yield self.data[start:end].decode()


def _open_bytes(path: Path, scratch: Path | None) -> bytes | mmap.mmap:
    """The file's bytes, mapped; what ends in .gz is unpacked into `scratch`, or into memory without one."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as packed:
                if scratch is None:
                    return packed.read()
                scratch.mkdir(parents=True, exist_ok=True)
                unpacked = scratch / f"{hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:8]}-{path.stem}"
                with unpacked.open("wb") as out:
                    shutil.copyfileobj(packed, out, BLOCK)
            path = unpacked
        with path.open("rb") as file:
            if file.seek(0, 2) == 0:
                return b""
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except UNPACKING as error:
        raise TextError(f"cannot unpack {path}: {error}.") from None
    except OSError as error:
        raise TextError(f"cannot read {path}: {error.strerror}.") from None


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
            line = line.removeprefix(BOM) if number == 1 else line
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
    return list(TextFile(path).lines())


@dataclass
class PairFile:
    """A text and its translation, line by line: two files, or one with TABs."""

    src: TextFile
    tgt: TextFile

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
    """Open and check a corpus of one or more files."""
    pairs: list[PairFile] = []
    for one, two in zip(src, tgt, strict=True):
        pairs.append(PairFile(TextFile(Path(one), scratch), TextFile(Path(two), scratch)))
        check_line_counts(pairs[-1])
    for name in tsv:
        both = TextFile(Path(name), scratch)
        pairs.append(PairFile(both, both))
    return pairs


def check_line_counts(pair: PairFile) -> None:
    """Refuse two files of unequal length, and say where they seem to run apart."""
    src, tgt = pair.src, pair.tgt
    if src.num_lines == tgt.num_lines:
        return
    message = (
        f"{src.path} has {src.num_lines:,} lines and {tgt.path} has {tgt.num_lines:,}; they must match line by line."
    )
    if src.num_lines and tgt.num_lines:
        lengths = [np.array([end - start for start, end in side.spans()], dtype=np.int64) for side in (src, tgt)]
        message += (
            f" Their lengths run apart at line {runs_apart(*lengths) + 1:,}: look there for a missing or extra line."
        )
    raise TextError(message)


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
        for a, b, c, d in file.spans():
            if src and b - a <= LEARNING_BYTES:
                yield file.src.data[a:b].decode()
            if tgt and d - c <= LEARNING_BYTES:
                yield file.tgt.data[c:d].decode()


@dataclass
class Corpus:
    """The pairs that passed the filters, as rows of numbers over mapped text."""

    files: list[PairFile]
    pairs: NDArray[Any]  # of PAIR
    dropped: Counter[str] = field(default_factory=Counter[str])

    def __len__(self) -> int:
        return len(self.pairs)

    def texts(self, rows: Sequence[int] | NDArray[np.int64]) -> tuple[list[str], list[str]]:
        """Source and target text of some pairs."""
        src: list[str] = []
        tgt: list[str] = []
        chosen = self.pairs[rows]

        def column(name: str) -> list[int]:
            return chosen[name].tolist()

        spans = column("src_start"), column("src_end"), column("tgt_start"), column("tgt_end")
        for number, a, b, c, d in zip(column("file"), *spans, strict=True):
            file = self.files[number]
            src.append(file.src.data[a:b].decode())
            tgt.append(file.tgt.data[c:d].decode())
        return src, tgt

    def fingerprint(self) -> str:
        """A hash of the text of all pairs and of their order."""
        digest = hashlib.sha256()
        for name in ("src_hash", "tgt_hash", "src_pieces", "tgt_pieces"):
            digest.update(np.ascontiguousarray(self.pairs[name]).tobytes())
        return digest.hexdigest()

    def hold_out(self, num: int, seed: int, drops: TextIO) -> tuple[list[str], list[str]]:
        """Take random pairs out, with every other pair of the same source text, and return their texts."""
        order = np.random.default_rng([seed, len(self)]).permutation(len(self))
        _, first = np.unique(self.pairs["src_hash"][order], return_index=True)
        chosen = np.sort(order[np.sort(first)[:num]])
        texts = self.texts(chosen)
        taken = np.isin(self.pairs["src_hash"], self.pairs["src_hash"][chosen])
        self.drop(taken, "held out", drops)
        return texts

    def drop(self, which: NDArray[np.bool_], reason: str, drops: TextIO) -> None:
        """Leave pairs out, counted and listed."""
        if not which.any():
            return
        for row in self.pairs[which]:
            drops.write(f"{reason}\t{self.files[row['file']].where(int(row['line']))}\n")
        self.dropped[reason] += int(which.sum())
        self.pairs = self.pairs[~which]


def index_corpus(
    files: list[PairFile],
    src_subwords: Subwords,
    tgt_subwords: Subwords,
    config: DataConfig,
    drops: TextIO,
    advance: Callable[[int], None] = lambda num_lines: None,
) -> Corpus:
    """Index the pairs that pass the filters; name the others, with the reason, in `drops`."""
    corpus = Corpus(files, np.empty(0, PAIR))
    blocks: list[NDArray[Any]] = []
    limit = config.max_pieces * MAX_BYTES_OF_A_PIECE
    for number, file in enumerate(files):
        rows: list[tuple[int, ...]] = []
        texts: tuple[list[str], list[str]] = ([], [])

        def drop(line: int, reason: str, file: PairFile = file) -> None:
            corpus.dropped[reason] += 1
            drops.write(f"{reason}\t{file.where(line)}\n")

        def encode(rows: list[tuple[int, ...]] = rows, texts: tuple[list[str], list[str]] = texts) -> None:
            lengths = zip(src_subwords.encode_all(texts[0]), tgt_subwords.encode_all(texts[1]), strict=True)
            kept: list[tuple[int, ...]] = []
            for row, (src, tgt), one, two in zip(rows, lengths, *texts, strict=True):
                num_src, num_tgt = len(src) + 1, len(tgt) + 1
                if num_src > config.max_pieces or num_tgt > config.max_pieces:
                    drop(row[1], "too long")
                elif max(num_src, num_tgt) > config.max_ratio * min(num_src, num_tgt):
                    drop(row[1], "length ratio")
                else:
                    kept.append((*row, num_src, num_tgt, _hash(one), _hash(two)))
            if kept:
                blocks.append(np.array(kept, PAIR))
            rows.clear()
            texts[0].clear()
            texts[1].clear()

        line = -1
        for line, (a, b, c, d) in enumerate(file.spans()):
            if line % PAIRS_AT_ONCE == PAIRS_AT_ONCE - 1:
                advance(PAIRS_AT_ONCE)
            if max(b - a, d - c) > limit:
                drop(line, "too long")
                continue
            one, two = clean(file.src.data[a:b].decode()).strip(), clean(file.tgt.data[c:d].decode()).strip()
            if not one or not two:
                drop(line, "empty")
                continue
            rows.append((number, line, a, b, c, d))
            texts[0].append(one)
            texts[1].append(two)
            if len(rows) == PAIRS_AT_ONCE:
                encode()
        encode()
        advance((line + 1) % PAIRS_AT_ONCE)
    if blocks:
        corpus.pairs = np.concatenate(blocks)
    blocks.clear()
    if config.drop_same:
        corpus.drop(corpus.pairs["src_hash"] == corpus.pairs["tgt_hash"], "same text", drops)
    if config.drop_duplicates:
        keys = np.stack((corpus.pairs["src_hash"], corpus.pairs["tgt_hash"]), axis=1)
        _, first = np.unique(keys, axis=0, return_index=True)
        again = np.ones(len(corpus), dtype=np.bool_)
        again[first] = False
        corpus.drop(again, "duplicate", drops)
    return corpus


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
