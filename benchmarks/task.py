"""What every system trains: the same network, on the same text in the same pieces.

The text is cut into pieces once and kept. Who can read pieces is given them (`train.pieces.en`); who cuts the text
itself is given the same SentencePiece model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from diglot.corpus import read_lines
from diglot.demo import write_corpus
from diglot.subwords import Subwords, learn

SRC, TGT = "en", "de"
LONGEST = 100  # pieces; no system drops a pair of such lengths by itself
UPDATE_PIECES = 4096
DROPOUT, SMOOTHING, BETAS, EPSILON = 0.1, 0.1, (0.9, 0.98), 1e-9


@dataclass(frozen=True)
class Network:
    """Sizes, and the learning rate: scale * d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5)."""

    layers: int
    d_model: int
    d_ff: int
    heads: int
    norm: str
    warmup_steps: int
    scale: float

    @property
    def peak_rate(self) -> float:
        """The learning rate at the end of the warm-up."""
        return self.scale * (self.d_model * self.warmup_steps) ** -0.5


NETWORKS = {
    "tiny": Network(4, 128, 256, 4, "pre", 1000, 1.5),
    "base": Network(6, 512, 2048, 8, "post", 4000, 1.0),
    "smoke": Network(1, 32, 64, 4, "pre", 100, 1.0),  # for a test of the harness, not for figures
}


@dataclass(frozen=True)
class Corpus:
    """A folder with the text, its pieces and their ids, and what is counted of them; the end of a sentence is one."""

    folder: Path
    name: str
    num_pieces: int  # of the vocabulary
    num_pairs: int
    src_pieces: int  # of an epoch
    tgt_pieces: int

    @property
    def lengths(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Pieces of source and target of each pair."""
        with np.load(self.folder / "train.npz") as ids:
            return np.diff(ids["src_ends"], prepend=0), np.diff(ids["tgt_ends"], prepend=0)


def prepare(data: Path | None, pieces: int, work: Path) -> Corpus:
    """The corpus in `data` (train.en, train.de, valid.en, valid.de), or one that is made by rule."""
    name = f"{data.resolve().name if data else 'by-rule'}-{pieces}"
    folder = work / "corpora" / name
    about = folder / "corpus.json"
    if not about.exists():
        folder.mkdir(parents=True, exist_ok=True)
        if data is None:
            write_corpus(data := folder / "text")
        texts = {part: [read_lines(data / f"{part}.{side}") for side in (SRC, TGT)] for part in ("train", "valid")}
        subwords = learn((line for side in texts["train"] for line in side), pieces)
        (folder / "subwords.model").write_bytes(subwords.proto)
        words = subwords.words(range(subwords.num_pieces))
        (folder / "vocabulary.txt").write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
        for part, (src, tgt) in texts.items():
            counts = write_part(folder, part, src, tgt, subwords)
            if part == "train":
                corpus = Corpus(folder, name, subwords.num_pieces, *counts)
        about.write_text(json.dumps({**asdict(corpus), "folder": ""}))
    return Corpus(**{**json.loads(about.read_text()), "folder": folder})


def write_part(
    folder: Path, part: str, src: Sequence[str], tgt: Sequence[str], subwords: Subwords
) -> tuple[int, int, int]:
    """Text, pieces and ids of both sides without what is empty or long; pairs, and pieces with ends, are counted."""
    encoded = [(a, b, subwords.encode(a), subwords.encode(b)) for a, b in zip(src, tgt, strict=True)]
    kept = [row for row in encoded if 0 < len(row[2]) < LONGEST and 0 < len(row[3]) < LONGEST]
    arrays: dict[str, NDArray[np.int64]] = {}
    for side, language, name in ((0, SRC, "src"), (1, TGT, "tgt")):
        (folder / f"{part}.{language}").write_text("".join(f"{row[side]}\n" for row in kept), encoding="utf-8")
        spelt = (" ".join(subwords.words(row[2 + side])) for row in kept)
        (folder / f"{part}.pieces.{language}").write_text("".join(f"{line}\n" for line in spelt), encoding="utf-8")
        ids = [[*row[2 + side], subwords.eos_id] for row in kept]
        arrays[name] = np.concatenate([np.array(sequence, np.int64) for sequence in ids])
        arrays[f"{name}_ends"] = np.cumsum([len(sequence) for sequence in ids])
    np.savez(folder / f"{part}.npz", **arrays)
    return len(kept), len(arrays["src"]), len(arrays["tgt"])
