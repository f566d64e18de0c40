"""The same text through two engines, compared piece by piece: every conversion ends with it.

Text is drawn from the vocabulary, so that it fits every language, and nothing else is needed. Both engines search
greedily, without a penalty of length, since that is where all agree on what is right. Sums in another order differ in
their last bits, so where two pieces are as probable to 1e-4 either may come: that is a tie, counted, not a difference.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch

from diglot.checkpoint import StoredModel
from diglot.config import SearchConfig
from diglot.engines.torch import TorchEngine
from diglot.errors import ConversionError
from diglot.interop import pieces
from diglot.subwords import Subwords, clean

NUM_LINES = 100
LONGEST = 30  # pieces of a line
LONGEST_SOURCE = 100  # of a line that is given
AT_ONCE = 100  # lines
MAX_EXTRA = 20  # pieces of a translation beyond its source's
TIE = 1e-4  # difference of two log-probabilities


class Peer(Protocol):
    """Another engine, with a model of its own format."""

    name: str

    def split(self, text: str) -> list[str] | None:
        """A source text as pieces, if the engine does that."""
        ...

    def greedy(self, sources: Sequence[Sequence[str]], max_extra: int) -> list[list[str]]:
        """Translations without their end, which may have so many pieces more than their sources."""
        ...


@dataclass
class Agreement:
    """What came of a comparison."""

    num_lines: int = 0
    num_pieces: int = 0
    ties: list[str] = field(default_factory=list[str])


def need(package: str) -> Any:
    """Another engine's package."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ConversionError(
            f"the comparison needs {package}: pip install {package}, or leave the comparison out with --unchecked."
        ) from None


def draw_texts(subwords: Subwords, num: int = NUM_LINES, longest: int = LONGEST, seed: int = 1) -> list[str]:
    """Text made of a vocabulary's own pieces, and of what it has never seen."""
    rng = random.Random(seed)
    words = [subwords.decode([i]) for i in range(subwords.num_pieces)]
    known = [word for word in words if word.strip() and "\ufffd" not in word and word.isprintable()]
    strange = ["☃", "ﬁ", "Ｗ", "a\u0301", "…", "0", "."]
    return [
        "".join(rng.choice((word, " " + word)) for word in rng.choices(known or strange, k=rng.randint(1, longest)))
        + rng.choice(["", *strange])
        for _ in range(num)
    ]


class Comparison:
    """One of our models beside another engine with the same."""

    def __init__(self, stored: StoredModel, peer: Peer):
        self.stored, self.peer = stored, peer
        tags = stored.spec.languages.tags
        self.src_names, self.tgt_names = (
            pieces.names_of(side, tags) for side in (stored.src_subwords, stored.tgt_subwords)
        )
        self.src_ids, self.tgt_ids = (
            {name: i for i, name in enumerate(names)} for names in (self.src_names, self.tgt_names)
        )
        self.tag_ids = [stored.src_subwords.tag_id(tag, tags) for tag in tags]
        self.engine = TorchEngine(
            [stored.model], pad_id=stored.tgt_subwords.pad_id, eos_id=stored.tgt_subwords.eos_id,
            unwritable=stored.tgt_subwords.unwritable(),
        )  # fmt: skip

    def run(self, texts: Sequence[str]) -> Agreement:
        """Translate texts with both; the first real difference is an error."""
        found = Agreement()
        for number, source, ours, theirs in self.translate(texts):
            found.num_lines, found.num_pieces = found.num_lines + 1, found.num_pieces + len(ours)
            if ours != theirs:
                found.ties.append(self.explain(number, source, ours, theirs))
        return found

    def share_of_equal(self, texts: Sequence[str]) -> float:
        """How many translations are the same."""
        same = [ours == theirs for _, _, ours, theirs in self.translate(texts)]
        return sum(same) / len(same)

    def translate(self, texts: Sequence[str]) -> Iterator[tuple[int, list[int], list[str], list[str]]]:
        """Each text's number, its source pieces, and what both engines make of it."""
        search = SearchConfig(method="greedy", max_extra=MAX_EXTRA)
        for start in range(0, len(texts), AT_ONCE):
            sources = [self.split(i, text) for i, text in enumerate(texts[start : start + AT_ONCE], start + 1)]
            ours = [hypotheses[0] for hypotheses in self.engine.search(sources, search)]
            theirs = self.peer.greedy([[self.src_names[i] for i in source] for source in sources], MAX_EXTRA)
            for i, (source, own, other) in enumerate(zip(sources, ours, theirs, strict=True), start + 1):
                names = [self.tgt_names[piece] for piece in own.pieces]
                yield i, source, names, other[: len(names)] if own.hit_bound else other

    def split(self, number: int, text: str) -> list[int]:
        """A text as our pieces, which have to be theirs; unknown ones are alike, whatever their letters."""
        subwords, text = self.stored.src_subwords, clean(text)
        ours, theirs = subwords.encode(text), self.peer.split(text)
        known = [self.src_ids.get(piece, subwords.unk_id) for piece in theirs] if theirs is not None else ours
        if ours != known:
            one, two = ([self.src_names[i] for i in side] for side in (ours, known))
            place = first_difference(one, two)
            raise ConversionError(
                f"diglot and {self.peer.name} split line {number} of the comparison in different ways: piece "
                f"{place + 1} is {quote(one, place)} here and {quote(two, place)} there, of {text!r}. Nothing was "
                "written."
            )
        tag = self.tag_ids[number % len(self.tag_ids) :][:1] if self.tag_ids else []
        return tag + ours[:LONGEST_SOURCE]

    def explain(self, number: int, source: list[int], ours: list[str], theirs: list[str]) -> str:
        """A tie in words; what is more than a tie is an error."""
        eos_id, place = self.stored.tgt_subwords.eos_id, first_difference(ours, theirs)
        before = [self.tgt_ids[piece] for piece in ours[:place]]
        log_probs: list[float] = []
        for side in (ours, theirs):
            piece = self.tgt_ids.get(side[place], eos_id) if place < len(side) else eos_id
            src, src_mask = self.engine.padded([source])
            tgt = self.engine.padded([[*before, piece]])[0]
            with torch.inference_mode():
                every = self.engine.target_log_probs(self.engine.models[0], src, src_mask, tgt)
            log_probs.append(cast("float", every[0, place].item()))
        said = (
            f"line {number} of the comparison in different ways: piece {place + 1} is {quote(ours, place)} "
            f"({log_probs[0]:.6f}) here and {quote(theirs, place)} ({log_probs[1]:.6f}) there"
        )
        if not abs(log_probs[0] - log_probs[1]) <= TIE:
            raise ConversionError(
                f"diglot and {self.peer.name} translate {said}, by our log-probabilities. Nothing was written."
            )
        return said


def first_difference(one: Sequence[str], two: Sequence[str]) -> int:
    """The first place where two sequences differ."""
    pairs = zip(one, two, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(two)))


def quote(written: Sequence[str], place: int) -> str:
    """A piece as it is told."""
    return f"'{written[place]}'" if place < len(written) else "the end"
