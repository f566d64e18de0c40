"""A SentencePiece model whose pieces stand in another order, or are joined by new ones, and splits text as before.

Other engines number their pieces in a file beside the SentencePiece model. Here the model itself is written anew, in
that order, so that a model directory needs nothing else. SentencePiece's file is a protocol buffer: field 1 is a piece
(text, score, kind), field 2 says among other things what the special pieces are called; the rest is kept as it is.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import sentencepiece

from diglot.errors import ConversionError
from diglot.subwords import Subwords
from diglot.translator import TAG

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # how a field of a protocol buffer is written
PIECE, TRAINER = 1, 2  # fields of the file
SPECIAL_NAMES = {"unk": 45, "eos": 47, "pad": 48}  # fields of the trainer's section: what these pieces are called
NEVER = -1e7  # a score that no merge of BPE and no path of unigram comes down to


@dataclass(frozen=True)
class Piece:
    """One entry of the vocabulary."""

    text: str
    score: float = 0.0
    kind: int = NORMAL


@dataclass(frozen=True)
class Special:
    """The names of the pieces that are no text."""

    unk: str = "<unk>"
    eos: str = "</s>"
    pad: str = "<pad>"


def fields_of(content: bytes) -> Iterator[tuple[int, int, bytes]]:
    """The fields of a protocol buffer: number, how it is written, content; SentencePiece has read it before us."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = content[at]
            value |= (byte & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if byte < 0x80:
                return value

    while at < len(content):
        tag = varint()
        begin = at
        match tag & 7:
            case 0:
                varint()
            case 2:
                length = varint()
                begin, at = at, at + length
            case kind:
                at += {FIXED64: 8, FIXED32: 4}[kind]
        yield tag >> 3, tag & 7, content[begin:at]


def field(number: int, kind: int, content: bytes) -> bytes:
    """One field, written."""
    length = varint_bytes(len(content)) if kind == BYTES else b""
    return varint_bytes(number << 3 | kind) + length + content


def varint_bytes(value: int) -> bytes:
    """A whole number, seven bits a byte."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*found, value))


def read_pieces(proto: bytes) -> list[Piece]:
    """The pieces of a SentencePiece model, in their order."""
    found: list[Piece] = []
    for number, _, content in fields_of(proto):
        if number == PIECE:
            values = {n: value for n, _, value in fields_of(content)}
            score = struct.unpack("<f", values[2])[0] if 2 in values else 0.0
            found.append(Piece(values[1].decode(), score, values[3][0] if 3 in values else NORMAL))
    return found


def read_special(proto: bytes) -> Special:
    """How a SentencePiece model calls its special pieces."""
    said = {
        n: name for number, _, content in fields_of(proto) if number == TRAINER for n, _, name in fields_of(content)
    }
    return Special(**{role: said[n].decode() for role, n in SPECIAL_NAMES.items() if n in said})


def write_pieces(proto: bytes, pieces: Sequence[Piece], special: Special) -> bytes:
    """The same SentencePiece model with other pieces, and what is special among them."""
    new = [
        field(PIECE, BYTES,
              field(1, BYTES, one.text.encode()) + field(2, FIXED32, struct.pack("<f", one.score))
              + field(3, VARINT, varint_bytes(one.kind)))
        for one in pieces
    ]  # fmt: skip
    for number, kind, content in fields_of(proto):
        if number == TRAINER:
            kept = [field(*part) for part in fields_of(content) if part[0] not in SPECIAL_NAMES.values()]
            names = [field(n, BYTES, getattr(special, name).encode()) for name, n in SPECIAL_NAMES.items()]
            new.append(field(number, kind, b"".join((*kept, *names))))
        elif number != PIECE:
            new.append(field(number, kind, content))
    return b"".join(new)


def beyond(proto: bytes, vocabulary: Sequence[str]) -> list[str]:
    """Pieces that text may be split into and that a vocabulary has not: to its engine they are all unknown."""
    known = set(vocabulary)
    text = (NORMAL, USER_DEFINED, BYTE)
    return [piece.text for piece in read_pieces(proto) if piece.kind in text and piece.text not in known]


def arrange(proto: bytes, vocabulary: Sequence[str], special: Special) -> bytes:
    """The SentencePiece model with the pieces of a vocabulary, in its order. Text is split as before: a piece of the
    vocabulary that the model does not know, being of the other language, has a number and is never split into."""
    own = {piece.text: piece for piece in read_pieces(proto) if piece.kind != UNKNOWN}

    def find(text: str) -> Piece:
        if text == special.unk:
            return Piece(text, kind=UNKNOWN)
        if TAG.fullmatch(text) or text in (special.eos, special.pad):
            return Piece(text, kind=CONTROL)
        return own.get(text, Piece(text, NEVER, UNUSED))

    new = [find(text) for text in vocabulary]
    if new == read_pieces(proto) and special == read_special(proto):
        return proto
    return write_pieces(proto, new, special)


def check(proto: bytes, where: str) -> bytes:
    """A SentencePiece model that SentencePiece and we can read; one of no bytes would be read as one of no pieces."""
    try:
        if proto and sentencepiece.SentencePieceProcessor(model_proto=proto).vocab_size() == len(read_pieces(proto)):
            return proto
    except (RuntimeError, KeyError, IndexError, ValueError, struct.error):
        pass
    raise ConversionError(f"{where} is not a SentencePiece model.")


def extend(subwords: Subwords, new: Sequence[str]) -> Subwords:
    """The vocabulary with new pieces behind the others, each of which is kept whole wherever it stands in a text; a tag
    of a language, as >>de<<, is no text."""
    more = [Piece(text, kind=CONTROL if TAG.fullmatch(text) else USER_DEFINED) for text in new]
    pieces = [*read_pieces(subwords.proto), *more]
    return Subwords(write_pieces(subwords.proto, pieces, read_special(subwords.proto)))


def names_of(subwords: Subwords, tags: Sequence[str]) -> list[str]:
    """How other engines call the pieces: a reserved one that asks for a language by its tag, the others as we do."""
    reserved = {f"<reserved{place}>": f">>{language}<<" for place, language in enumerate(tags)}
    return [reserved.get(piece, piece) for piece in subwords.words(range(subwords.num_pieces))]
