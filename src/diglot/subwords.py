"""Text to pieces and back, with SentencePiece. Special ids live here alone.

A vocabulary that is learnt here begins with padding, end, unknown and 64 ids kept for tags and placeholders, so that
a model can later take on languages without a new vocabulary. Byte fallback spells what it has never seen: there is
no unknown piece. Text is never changed but for NFC, control characters and runs of spaces.
"""

from __future__ import annotations

import io
import math
import random
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path

import sentencepiece

from diglot.errors import TextError

NUM_RESERVED = 64
LEARNING_LINES = 2_000_000  # of a larger corpus a part is learnt from
LEARNING_BYTES = 4192  # SentencePiece passes over longer lines
WITHOUT_SPACES = {"zh", "ja", "th", "lo", "km", "my", "yue", "bo"}
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
WORD = re.compile("\u2581*[^\u2581]+|\u2581+")  # with the mark of the space before it: no piece goes beyond
UNSEEN = -30.0  # the score of a character that is no piece
SPELLS_CONTROL = re.compile(r"<0x(?:[01][0-9A-F]|7F)>")  # a line feed among them: it would break a line in two


def clean(text: str) -> str:
    """What the network sees of a text: NFC, control characters as spaces."""
    return unicodedata.normalize("NFC", text if text.isprintable() else CONTROL.sub(" ", text))


class Subwords:
    """A vocabulary of pieces.

    >>> subwords = learn(["the cat sat", "the hat"] * 50, size=400)
    >>> subwords.decode(subwords.encode("the cat sat"))
    'the cat sat'
    >>> subwords.decode(subwords.encode("好 ☃"))  # never seen, spelt in bytes
    '好 ☃'
    """

    def __init__(self, proto: bytes):
        self.proto = proto
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=proto)
        self.num_pieces: int = self._processor.vocab_size()
        self.eos_id: int = self._processor.eos_id()
        if self.eos_id < 0:
            raise TextError("this SentencePiece model has no end piece; train it with --eos_id=1 (and --pad_id=0).")
        self.unk_id: int = self._processor.unk_id()
        # padding is masked everywhere, so any id serves where a model has none of its own
        self.pad_id: int = self._processor.pad_id() if self._processor.pad_id() >= 0 else self.eos_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Subwords) and self.proto == other.proto

    def __hash__(self) -> int:
        return hash(self.proto)

    def encode(self, text: str) -> list[int]:
        """The pieces of a text, without an end piece."""
        pieces: list[int] = self._processor.encode(clean(text))
        return self._look_up(text) if self.unk_id in pieces else pieces

    def _look_up(self, text: str) -> list[int]:
        """Pieces by their letters: of an imported model, what one language does not know the other one may."""
        sp, text = self._processor, clean(text)
        found: list[int] = []
        letters: list[str] = sp.encode(text, out_type=str)
        for piece, number in zip(sp.encode(text), map(self.number, letters), strict=True):
            found.append(number if piece == self.unk_id and sp.is_unused(number) else piece)
        return found

    def encode_sampled(self, text: str, alpha: float, seed: int) -> list[int]:
        """One of the many splits of a text, drawn by the seed: Kudo 2018 for unigram, Provilkov et al. 2020 for BPE.

        It is drawn here because SentencePiece, whatever its seed, draws otherwise in every process.
        """
        rng, text = random.Random(seed), self._processor.normalize(clean(text))
        draw = draw_merges if self._is_bpe else partial(draw_split, longest=self._longest)
        pieces = [piece for word in WORD.findall(text) for piece in draw(word, self._scores, alpha, rng)]
        return [i for piece in pieces for i in self._spell(piece)]

    def _spell(self, piece: str) -> list[int]:
        """The id of a piece; of a character that is none, its bytes."""
        of = self._processor.piece_to_id
        found = [of(piece)] if piece in self._scores else [of(f"<0x{byte:02X}>") for byte in piece.encode()]
        return [self.unk_id] if self.unk_id in found else found  # of a vocabulary without bytes

    @cached_property
    def _scores(self) -> dict[str, float]:
        """Of each piece that text may be split into, its log-probability, or for BPE its rank."""
        sp = self._processor
        is_special = sp.is_control, sp.is_unknown, sp.is_byte, sp.is_unused
        return {
            sp.id_to_piece(i): sp.get_score(i)
            for i in range(self.num_pieces)
            if not any(is_one(i) for is_one in is_special)
        }

    @cached_property
    def _longest(self) -> int:
        """Characters of the longest piece."""
        return max(map(len, self._scores))

    @cached_property
    def _is_bpe(self) -> bool:
        """SentencePiece does not tell, but ranks are whole numbers and log-probabilities are not."""
        return all(score == round(score) for score in self._scores.values())

    def tag_id(self, language: str, tags: Sequence[str]) -> int:
        """The piece that asks for a target language: its own, as >>de<<, or the reserved one of its place in `tags`."""
        names = [f">>{language}<<", *([f"<reserved{tags.index(language)}>"] if language in tags else [])]
        for name in names:
            if not self._processor.is_unknown(piece := self._processor.piece_to_id(name)):
                return piece
        raise TextError(
            f"this vocabulary has no piece for the target language '{language}'; it knows: {', '.join(tags)}."
        )

    def number(self, piece: str) -> int:
        """The id of a piece by its letters, that of the unknown one if there is none."""
        return self._processor.piece_to_id(piece)

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """The pieces of each text. Given many at once SentencePiece would start threads: who encodes much has processes
        for that, and where memory is short a thread cannot be had."""
        return [self.encode(text) for text in texts]

    def decode(self, pieces: Sequence[int]) -> str:
        """The text of pieces; special ids say nothing."""
        return self._processor.decode(list(pieces))

    def words(self, pieces: Sequence[int]) -> list[str]:
        """The pieces as written, with SentencePiece's mark before each word."""
        return self._processor.id_to_piece(list(pieces))

    def unwritable(self) -> list[int]:
        """Ids that no translation may contain: special ones but the end, and bytes that spell control characters."""
        sp = self._processor
        return [
            i
            for i in range(self.num_pieces)
            if i != self.eos_id
            and (sp.is_control(i) or sp.is_unknown(i) or SPELLS_CONTROL.fullmatch(sp.id_to_piece(i)))
        ]


def writes_spaces(language: str) -> bool:
    """Whether a language has spaces between its words."""
    return language.split("-")[0].split("_")[0] not in WITHOUT_SPACES


def word_spans(pieces: Sequence[str], language: str = "") -> list[tuple[int, int]]:
    """The first piece of each word and the one after its last, as spaces separate words; where a language has none, a
    piece counts as a word.

    >>> word_spans(["▁zwei", "und", "▁drei"])
    [(0, 2), (2, 3)]
    """
    is_first = [i == 0 or piece.startswith("\u2581") or not writes_spaces(language) for i, piece in enumerate(pieces)]
    starts = [i for i, first in enumerate(is_first) if first]
    return list(zip(starts, [*starts[1:], len(pieces)], strict=True)) if starts else []


def draw_split(word: str, scores: Mapping[str, float], alpha: float, rng: random.Random, longest: int) -> list[str]:
    """A split in proportion to its probability to the power of alpha: sums over all splits up to each place, then
    pieces drawn from the end."""
    sums: list[float] = [0.0]
    into: list[tuple[list[int], list[float]]] = []  # where the last piece up to each place may begin, and its share
    for end in range(1, len(word) + 1):
        starts = [i for i in range(max(0, end - longest), end) if word[i:end] in scores or i == end - 1]
        logs = [sums[i] + alpha * scores.get(word[i:end], UNSEEN) for i in starts]
        shares = [math.exp(log - max(logs)) for log in logs]
        sums.append(max(logs) + math.log(sum(shares)))
        into.append((starts, shares))
    pieces: list[str] = []
    end = len(word)
    while end:
        start = rng.choices(*into[end - 1])[0]
        pieces.append(word[start:end])
        end = start
    return pieces[::-1]


def draw_merges(word: str, scores: Mapping[str, float], dropout: float, rng: random.Random) -> list[str]:
    """Merges from the characters up, the first in rank first, each left out with a probability each time."""
    pieces = list(word)
    while True:
        merges = [
            (scores[one + two], -i)
            for i, (one, two) in enumerate(pairwise(pieces))
            if one + two in scores and rng.random() >= dropout
        ]
        if not merges:
            return pieces
        i = -max(merges)[1]
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]


def learn(lines: Iterable[str], size: int, kind: str = "unigram") -> Subwords:
    """Learn at most `size` pieces (fewer where the text does not hold so many) by `kind`, "unigram" or "bpe"."""
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(clean(line) for line in lines),
            model_writer=model,
            model_type=kind,
            vocab_size=size,
            hard_vocab_limit=False,
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
            control_symbols=[f"<reserved{i}>" for i in range(NUM_RESERVED)],
            byte_fallback=True,
            normalization_rule_name="identity",
            max_sentence_length=LEARNING_BYTES,
            num_threads=8,  # fixed: sums over threads, and so the pieces, depend on their number
            minloglevel=2,
        )
    except RuntimeError as error:
        if needed := re.search(r"required_chars\. \d+ vs (\d+)", str(error)):
            raise TextError(
                f"{size:,} subwords are too few: the characters of this text need {int(needed[1]):,} alone; raise "
                "subwords.size."
            ) from None
        raise TextError(f"SentencePiece cannot learn subwords from this text: is there any? ({error})") from None
    return Subwords(model.getvalue())


def load_subwords(path: Path) -> Subwords:
    """Read a SentencePiece model."""
    try:
        if proto := path.read_bytes():
            return Subwords(proto)
    except OSError as error:
        raise TextError(f"cannot read the subwords {path}: {error.strerror}.") from None
    except RuntimeError:
        pass
    raise TextError(f"{path} is not a SentencePiece model.")
