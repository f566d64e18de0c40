"""Updates, read and encoded ahead of the step by worker processes.

What an update holds, and every random choice in it, is a function of (corpus, seed, epoch, update): not of the workers,
nor of the ranks, of which each takes its share of the pairs.
"""

from __future__ import annotations

import ctypes
import dataclasses
import sys
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from diglot.batching import LENGTHS, ROWS, micro_batches, mix, pad, round_up, updates
from diglot.config import Recipe
from diglot.corpus import Corpus
from diglot.errors import TrainingError
from diglot.model import padding_mask
from diglot.packed import PackedTransformer, pack
from diglot.parallel import World
from diglot.run import TrainingState
from diglot.signals import follow_main
from diglot.texts import Texts


@dataclass(frozen=True)
class MicroBatch:
    """What goes through the network at once, on one rank."""

    src: NDArray[np.int64]  # (B, S)
    src_lengths: NDArray[np.int64]
    tgt: NDArray[np.int64]  # (B, T)
    tgt_lengths: NDArray[np.int64]
    keys: NDArray[np.int64]  # (B,) of each sample's dropout
    weight: float = 1.0  # of its loss; 0 for one that only keeps ranks in step

    def fill_up(self, bound: int) -> MicroBatch:
        """With rows that say nothing, up to a multiple, where the bound allows it."""
        num = round_up(len(self.src), ROWS) - len(self.src)
        if (len(self.src) + num) * (self.src.shape[1] + self.tgt.shape[1]) > bound:
            return self
        src, tgt, keys = (np.pad(array, [(0, num), (0, 0)][: array.ndim]) for array in (self.src, self.tgt, self.keys))
        lengths = np.pad(self.src_lengths, (0, num), constant_values=1), np.pad(self.tgt_lengths, (0, num))
        return dataclasses.replace(self, src=src, src_lengths=lengths[0], tgt=tgt, tgt_lengths=lengths[1], keys=keys)

    def through(self, network: nn.Module, device: str, bf16: bool) -> tuple[Tensor, Tensor]:
        """The network's hidden states, row by row, and the piece that each has to predict."""
        if isinstance(getattr(network, "module", network), PackedTransformer):
            batch = pack(self.src, self.src_lengths, self.tgt, self.tgt_lengths, self.keys)
            return network(batch), batch.tgt
        src, src_mask, tgt, tgt_mask, keys = self.tensors(device)
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            hidden = network(src, src_mask, tgt, keys)
        return hidden[tgt_mask], tgt[tgt_mask]

    def tensors(self, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """src, src_mask, tgt, tgt_mask and keys on the device."""
        src, tgt, keys = (torch.from_numpy(array) for array in (self.src, self.tgt, self.keys))
        src_mask = padding_mask(torch.from_numpy(self.src_lengths), src.size(1))
        tgt_mask = padding_mask(torch.from_numpy(self.tgt_lengths), tgt.size(1))
        every = (src, src_mask, tgt, tgt_mask, keys)
        if device == "cuda":
            every = tuple(tensor.pin_memory() for tensor in every)
        src, src_mask, tgt, tgt_mask, keys = (tensor.to(device, non_blocking=True) for tensor in every)
        return src, src_mask, tgt, tgt_mask, keys


IDLE = MicroBatch(
    np.ones((1, 1), np.int64), np.ones(1, np.int64), np.ones((1, 1), np.int64), np.ones(1, np.int64),
    np.zeros(1, np.int64), weight=0.0,
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Which update: its number in the run, its epoch, its number there, and its rows."""

    update: int
    epoch: int
    update_of_epoch: int
    rows: NDArray[np.int64]


@dataclass(frozen=True)
class Update:
    """A rank's share of an update."""

    place: Place
    micro_batches: list[MicroBatch]
    num_pieces: int  # on the target side of this share


class UpdateReader(Dataset[Update]):
    """Text of the rows of an update to micro-batches."""

    def __init__(self, texts: Texts, recipe: Recipe, world: World, micro_batch: int = 1):
        self.corpus, self.src_subwords, self.tgt_subwords = texts.corpus, texts.src_subwords, texts.tgt_subwords
        self.recipe, self.world, self.micro_batch = recipe, world, micro_batch
        tags = recipe.languages.tags
        self.tag_ids = [self.src_subwords.tag_id(name, tags) for name in recipe.data.tgt_langs] if tags else []

    def __getitem__(self, place: Place) -> Update:
        return self.read_share(place, self.micro_batch)

    def read_share(self, place: Place, bound: int) -> Update:
        """This rank's share of an update, in micro-batches of at most so many padded pieces."""
        rows, corpus = place.rows, self.corpus
        order = np.lexsort((rows, *corpus.lengths(rows)))[::-1]
        return self.cut(place, rows[order][self.world.rank :: self.world.size], bound)  # short and long ones for each

    def cut(self, place: Place, rows: NDArray[np.int64], bound: int) -> Update:
        """Encode rows and cut them into micro-batches by the lengths that they have come to."""
        if not len(rows):
            return Update(place, [], 0)
        ids = self.corpus.ids(rows).astype(np.uint64)
        src, tgt = self.encode(rows, mix(self.recipe.train.seed, place.epoch, ids))
        keys = mix(self.recipe.train.seed, ~place.update, ids).view(np.int64)
        num_src, num_tgt = (np.array([len(sequence) for sequence in side], np.int32) for side in (src, tgt))
        micros: list[MicroBatch] = []
        for chosen in micro_batches(np.arange(len(rows)), num_src, num_tgt, bound):
            own: list[int] = chosen.tolist()
            src_ids, src_lengths = pad([src[i] for i in own], self.src_subwords.pad_id, LENGTHS)
            tgt_ids, tgt_lengths = pad([tgt[i] for i in own], self.tgt_subwords.pad_id, LENGTHS)
            if self.recipe.model.positions == "learned":  # of which there may be none for all of the padding
                src_ids, tgt_ids = (ids[:, : self.recipe.model.max_positions] for ids in (src_ids, tgt_ids))
            micro = MicroBatch(src_ids, src_lengths, tgt_ids, tgt_lengths, keys[chosen])
            micros.append(micro.fill_up(bound))
        return Update(place, micros, int(num_tgt.sum()))

    def encode(self, rows: NDArray[np.int64], seeds: NDArray[np.uint64]) -> tuple[list[list[int]], list[list[int]]]:
        """The pieces of both sides with their ends, and the source's tag; split anew at every epoch, if so asked."""
        alpha, longest = self.recipe.subwords.sampling, self.recipe.data.max_pieces
        sides: list[list[list[int]]] = []
        for side, (texts, subwords) in enumerate(
            zip(self.corpus.texts(rows), (self.src_subwords, self.tgt_subwords), strict=True)
        ):
            pieces = subwords.encode_all(texts)
            if alpha:
                for i, (text, seed) in enumerate(zip(texts, seeds, strict=True)):
                    sampled = subwords.encode_sampled(text, alpha, int(seed) + side & 0x7FFFFFFF)
                    room = longest - 1 - (bool(self.tag_ids) and side == 0)  # beside the end and the tag
                    pieces[i] = sampled if len(sampled) <= room else pieces[i]
            sides.append([[*sequence, subwords.eos_id] for sequence in pieces])
        if self.tag_ids:
            files = self.corpus.files_of(rows)
            sides[0] = [[self.tag_ids[file], *sequence] for file, sequence in zip(files, sides[0], strict=True)]
        return sides[0], sides[1]


def read_updates(reader: UpdateReader, state: TrainingState, num_workers: int) -> Iterator[Update]:
    """The updates from where a run stands, epoch after epoch."""
    if not sys.platform.startswith("linux"):  # elsewhere a fork is not safe, and what maps files cannot be sent
        num_workers = 0
    give_back_freed_memory()  # or a worker would hold on to its copy of it
    loader = DataLoader(
        reader,
        batch_size=None,
        sampler=places(reader.corpus, reader.recipe, state.update, state.epoch, state.update_of_epoch),
        num_workers=num_workers,
        collate_fn=as_it_is,  # pyright: ignore[reportArgumentType]
        worker_init_fn=lambda worker: follow_main(),
        multiprocessing_context="fork" if num_workers else None,
    )
    with warnings.catch_warnings():  # of a fork in a process with threads: a worker runs nothing of theirs
        warnings.simplefilter("ignore", DeprecationWarning)
        running = iter(loader)
    yield from running


@contextmanager
def naming_a_killed_worker() -> Generator[None]:
    """Around all that happens while workers read ahead: of one that is killed PyTorch tells wherever we then are."""
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise TrainingError(
            "a process that reads text ahead was killed from outside, for want of memory perhaps. Start the run again: "
            "it goes on from its newest checkpoint."
        ) from None


def places(corpus: Corpus, recipe: Recipe, update: int, epoch: int, skip: int) -> Iterator[Place]:
    """Every update of every epoch, from a place on."""
    groups = corpus.groups(recipe.data)
    while True:
        order = updates(corpus.lengths, groups, recipe.train.update_pieces, recipe.train.seed, epoch)
        for number, rows in enumerate(order):
            if number >= skip:
                yield Place(update, epoch, number, rows)
                update += 1
        epoch, skip = epoch + 1, 0


def give_back_freed_memory() -> None:
    """To the system, what glibc has kept of it for the next step."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def as_it_is(update: Update) -> Update:
    """Arrays stay arrays: tensors would go through shared memory, of which a container has little."""
    return update
