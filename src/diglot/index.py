"""The index of a corpus: filter and count pairs, and note where they stand.

An index is made once for a text, its subwords and its filters, by as many processes as there are cores, and shared by
runs and ranks. Stretches of lines are read apart and put together in their order, so the index does not depend on the
number of processes; nor does the memory that it takes depend on the number of lines. Nothing is dropped in silence:
every dropped pair is counted, and named by file and line.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from diglot.config import DataConfig
from diglot.corpus import (
    FACTS,
    HASH,
    HASHES,
    LENGTH,
    LENGTHS,
    MAX_BYTES_OF_A_PIECE,
    PLACE,
    PLACES,
    Corpus,
    PairFile,
    Stretch,
    making,
)  # fmt: skip
from diglot.errors import TextError
from diglot.signals import follow_main, interrupts_waiting
from diglot.subwords import Subwords, clean

T = TypeVar("T")
R = TypeVar("R")

FORMAT = 2  # to be raised when rows or filters come to mean something else
LINES_AT_ONCE = 4096
ROWS_AT_ONCE = 1 << 18  # of the index, among which duplicates are looked for
DROPPED = "dropped.tsv"

Progress = Callable[[str, int], AbstractContextManager[Callable[[int, str], None]]]


@contextmanager
def no_progress(what: str, total: int) -> Generator[Callable[[int, str], None]]:
    """A progress bar that nobody sees."""
    yield lambda steps, note: None


@dataclass(frozen=True)
class Reading:
    """How pairs are read: into which pieces, and through which filters."""

    src_subwords: Subwords
    tgt_subwords: Subwords
    config: DataConfig
    has_tags: bool = False  # a piece in front of each source names the target language

    def key(self, files: Sequence[PairFile]) -> str:
        """A name for all that an index of these files depends on."""
        texts = [(file.src.digest, file.tgt.digest, file.is_tsv) for file in files]
        vocabularies = [hashlib.sha256(side.proto).hexdigest() for side in (self.src_subwords, self.tgt_subwords)]
        config = self.config
        filters = config.max_pieces, config.max_ratio, config.drop_duplicates, config.drop_same, self.has_tags
        return hashlib.sha256(repr((FORMAT, texts, vocabularies, filters)).encode()).hexdigest()[:32]


def index_corpus(
    files: Sequence[PairFile],
    reading: Reading,
    drops: TextIO,
    progress: Progress = no_progress,
    cache: Path | None = None,
    num_processes: int = 1,
) -> Corpus:
    """Index the pairs that pass the filters; name the others, with the reason, in `drops`.

    An index of the same text, subwords and filters is taken from `cache`, or left there.
    """
    with tempfile.TemporaryDirectory() as scratch:
        path = (cache or Path(scratch)) / f"index-{reading.key(files)}"
        if not path.exists():
            for file in files:
                file.check()
            num_lines = sum(file.src.num_lines for file in files)
            try:
                with making(path) as new:
                    with progress("reading pairs", num_lines) as advance:
                        write_index(new, files, reading, num_processes, advance)
                    if not path.exists():  # or another process was faster
                        new.rename(path)
            except OSError as error:
                if not path.exists():
                    raise TextError(
                        f"cannot write the index of the corpus to {path.parent}: {error.strerror}. Make room there, or "
                        "let DIGLOT_CACHE name another directory."
                    ) from None
        dropped: Counter[str] = Counter()
        with (path / DROPPED).open(encoding="utf-8") as lines:
            for line in lines:
                reason, number, place = line.split("\t")
                dropped[reason] += 1
                drops.write(f"{reason}\t{files[int(number)].where(int(place))}\n")
        return Corpus(files, path, dropped)


# ------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Rows:
    """What a stretch of lines came to."""

    tables: tuple[bytes, bytes, bytes]  # places, lengths and hashes of the pairs that passed
    dropped: list[tuple[str, int]]  # reason and line of the others


def read_stretch(number: int, file: PairFile, stretch: Stretch, reading: Reading) -> Rows:
    """Filter and count some pairs of a file, the so manyth."""
    dropped: list[tuple[str, int]] = []
    kept: list[tuple[int, int, int, int, int, int]] = []
    texts: tuple[list[str], list[str]] = ([], [])
    config = reading.config
    for line, (a, b, c, d) in enumerate(file.spans(stretch), stretch.line):
        if max(b - a, d - c) > config.max_pieces * MAX_BYTES_OF_A_PIECE:
            dropped.append(("too long", line))
            continue
        src, tgt = clean(file.src.data[a:b].decode()), clean(file.tgt.data[c:d].decode())
        if not src.strip() or not tgt.strip():
            dropped.append(("empty", line))
        elif config.drop_same and src.strip() == tgt.strip():
            dropped.append(("same text", line))
        else:
            kept.append((number, line, a, b, c, d))
            texts[0].append(src)
            texts[1].append(tgt)
    lengths = np.empty(len(kept), LENGTH)
    lengths["src"] = [len(pieces) + 1 + reading.has_tags for pieces in reading.src_subwords.encode_all(texts[0])]
    lengths["tgt"] = [len(pieces) + 1 for pieces in reading.tgt_subwords.encode_all(texts[1])]
    longest, shortest = np.maximum(lengths["src"], lengths["tgt"]), np.minimum(lengths["src"], lengths["tgt"])
    is_long = longest > config.max_pieces
    is_odd = ~is_long & (longest > config.max_ratio * shortest)
    dropped += [("too long", kept[i][1]) for i in np.flatnonzero(is_long).tolist()]
    dropped += [("length ratio", kept[i][1]) for i in np.flatnonzero(is_odd).tolist()]
    passes = ~is_long & ~is_odd
    hashes = np.array([*map(hash_pair, *texts)], HASH)
    tables = np.array(kept, PLACE)[passes].tobytes(), lengths[passes].tobytes(), hashes[passes].tobytes()
    file.src.release()
    file.tgt.release()
    return Rows(tables, sorted(dropped, key=lambda drop: drop[1]))


def hash_pair(src: str, tgt: str) -> tuple[int, int]:
    """64 bits for each side, whatever space is around it."""
    one, two = (hashlib.blake2b(text.strip().encode(), digest_size=8).digest() for text in (src, tgt))
    return int.from_bytes(one, "little"), int.from_bytes(two, "little")


def in_processes(work: Callable[[T], R], items: Sequence[T], num: int) -> Generator[R]:
    """What becomes of each item, in their order; with several processes each has every so manyth item."""
    num = min(num, len(items))
    if num < 2 or not sys.platform.startswith("linux"):  # elsewhere a fork is not safe, and a map of a file not sent
        yield from map(work, items)
        return
    context = multiprocessing.get_context("fork")

    def send_all(own: Sequence[T], sender: Any) -> None:
        follow_main()
        try:
            for item in own:
                sender.send(work(item))
        except TextError as error:
            sender.send(error)
        except MemoryError:
            pass  # the end without an answer says it

    receivers: list[Any] = []
    processes: list[Any] = []
    try:
        try:
            with interrupts_waiting(), warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads: it runs none of them
                for i in range(num):
                    receiver, sender = context.Pipe(duplex=False)
                    process = context.Process(target=send_all, args=(items[i::num], sender), daemon=True)
                    process.start()
                    sender.close()  # or its end would not be seen
                    receivers.append(receiver)
                    processes.append(process)
        except OSError as error:
            raise TextError(
                f"of {num} processes to read pairs the system allows {len(processes)}: {error.strerror}. Ask for fewer "
                "(train.threads), or raise its limits (ulimit -n, ulimit -u)."
            ) from None
        for i in range(len(items)):
            try:
                found = receivers[i % num].recv()
            except (EOFError, OSError):  # at the end of an answer, or within it
                raise TextError(
                    "a process that reads pairs was killed from outside, for want of memory perhaps. Start again, with "
                    "fewer of them (train.threads) if that was why."
                ) from None
            if isinstance(found, TextError):
                raise found
            yield found
    finally:
        for process, receiver in zip(processes, receivers, strict=True):
            process.kill()
            process.join()
            receiver.close()


# ------------------------------------------------------------------- writing


def write_index(
    path: Path,
    files: Sequence[PairFile],
    reading: Reading,
    num_processes: int,
    advance: Callable[[int, str], None],
) -> None:
    """Write the rows of the pairs that pass, the places of the others with the reason, and what is known of all."""
    items = [(number, stretch) for number, file in enumerate(files) for stretch in file.stretches(LINES_AT_ONCE)]

    def read(item: tuple[int, Stretch]) -> Rows:
        number, stretch = item
        return read_stretch(number, files[number], stretch, reading)

    with contextlib.ExitStack() as stack:
        tables = [stack.enter_context((path / name).open("w+b")) for name in (PLACES, LENGTHS, HASHES)]
        drops = stack.enter_context((path / DROPPED).open("w", encoding="utf-8"))
        found = stack.enter_context(closing(in_processes(read, items, num_processes)))
        for (number, _), rows in zip(items, found, strict=True):
            for table, data in zip(tables, rows.tables, strict=True):
                table.write(data)
            drops.writelines(f"{reason}\t{number}\t{line}\n" for reason, line in rows.dropped)
            advance(len(rows.dropped) + len(rows.tables[1]) // LENGTH.itemsize, "")
        if reading.config.drop_duplicates:
            drop_duplicates(path, tables, drops)
        facts = {"ends": ends_of_files(tables[0], len(files)), "fingerprint": fingerprint(tables[1:])}
        known = stack.enter_context((path / FACTS).open("w", encoding="utf-8"))
        known.write(json.dumps(facts) + "\n")
        for file in (*tables, drops, known):
            file.flush()
            os.fsync(file.fileno())


def blocks(table: BinaryIO, dtype: np.dtype[Any]) -> Iterator[NDArray[Any]]:
    """A table from its beginning, so many rows at a time."""
    num = table.seek(0, 2) // dtype.itemsize
    for first in range(0, num, ROWS_AT_ONCE):
        table.seek(first * dtype.itemsize)
        yield np.frombuffer(table.read(min(ROWS_AT_ONCE, num - first) * dtype.itemsize), dtype)


def ends_of_files(places: BinaryIO, num: int) -> list[int]:
    """The row after the last of each file."""
    counts = np.zeros(num, np.int64)
    for block in blocks(places, PLACE):
        counts += np.bincount(block["file"], minlength=num)
    return counts.cumsum().tolist()


def fingerprint(tables: Sequence[BinaryIO]) -> str:
    """A hash of the text of all pairs and of their order."""
    digest = hashlib.sha256()
    for table, dtype in zip(tables, (LENGTH, HASH), strict=True):
        for block in blocks(table, dtype):
            digest.update(block.tobytes())
    return digest.hexdigest()


def drop_duplicates(path: Path, tables: Sequence[BinaryIO], drops: TextIO) -> None:
    """Keep the first of the pairs that have the same text, and name the others.

    Equal pairs fall into the same part of many, so only the pairs of a part are ever compared at once.
    """
    places, lengths, hashes = tables
    num = sum(len(block) for block in blocks(hashes, HASH))
    num_parts = -(-num // ROWS_AT_ONCE)
    entry = np.dtype([("src", "u8"), ("tgt", "u8"), ("row", "i8")])
    is_first = np.memmap(path / "first", np.bool_, "w+", shape=max(1, num))
    first = 0
    for block in blocks(hashes, HASH):
        entries = np.empty(len(block), entry)
        entries["src"], entries["tgt"] = block["src"], block["tgt"]
        entries["row"] = np.arange(first, first + len(block))
        which = (block["src"] ^ block["tgt"]) % np.uint64(num_parts)
        ends = np.bincount(which.astype(np.int64), minlength=num_parts).cumsum()
        for part, own in enumerate(np.split(entries[np.argsort(which, kind="stable")], ends[:-1])):
            with (path / f"part-{part}").open("ab") as file:
                file.write(own.tobytes())
        first += len(block)
    for part in range(num_parts):
        entries = np.fromfile(path / f"part-{part}", entry)
        entries = entries[np.lexsort((entries["row"], entries["tgt"], entries["src"]))]
        is_new = (entries["src"][1:] != entries["src"][:-1]) | (entries["tgt"][1:] != entries["tgt"][:-1])
        is_first[entries["row"]] = np.concatenate(([True], is_new))[: len(entries)]
        (path / f"part-{part}").unlink()
    for table, dtype in ((places, PLACE), (lengths, LENGTH), (hashes, HASH)):
        compact(table, dtype, is_first, drops if table is places else None)
    del is_first
    (path / "first").unlink()


def compact(table: BinaryIO, dtype: np.dtype[Any], is_kept: NDArray[np.bool_], drops: TextIO | None) -> None:
    """Leave the rows that are kept, and name those that are not."""
    first = end = 0
    for block in blocks(table, dtype):
        keeps = is_kept[first : first + len(block)]
        if drops:
            drops.writelines(f"duplicate\t{row['file']}\t{row['line']}\n" for row in block[~keeps])
        table.seek(end)
        table.write(block[keeps].tobytes())
        first, end = first + len(block), table.tell()
    table.truncate(end)
