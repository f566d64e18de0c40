"""A text into segments that are short enough to translate, and the white space between them, losing nothing."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass

# where a text may be cut, best first: after a sentence, a clause, a word
SENTENCE = re.compile(r"[.!?…؟۔।]+[\"'”’»)\]]*\s+|[。！？]+[」』”’）]*\s*")
CLAUSE = re.compile(r"[,;:–—]\s+|[，；：、]\s*")
WORD = re.compile(r"\s+")
ABBREVIATION = re.compile(r"(?:^|\W)(?:\w|[A-Z]\w{0,2})\.\s+$")  # one letter, or a short capitalized word: Dr., St.


@dataclass(frozen=True)
class Segment:
    """What is translated at once, and the white space that stood after it."""

    text: str
    space: str = ""


def split(text: str, count: Callable[[str], int], limit: int) -> tuple[str, list[Segment]]:
    """White space in front, and segments that `count` at most `limit` each; put together again they are the text.

    >>> split(" One two. Three  four. ", lambda text: len(text.split()), 2)
    (' ', [Segment(text='One two.', space=' '), Segment(text='Three  four.', space=' ')])
    """
    body = text.lstrip()
    lead = text[: len(text) - len(body)]
    return lead, [segment_of(part) for part in parts(body, count, limit, (SENTENCE, CLAUSE, WORD))] if body else []


def segment_of(part: str) -> Segment:
    """Tell a part's text from the white space at its end."""
    core = part.rstrip()
    return Segment(core, part[len(core) :])


def parts(text: str, count: Callable[[str], int], limit: int, levels: tuple[re.Pattern[str], ...]) -> Iterator[str]:
    """Cut where a level's pattern ends, then put neighbours together again as long as they fit."""
    total = count(text)
    if total <= limit:
        yield text
        return
    if levels:
        pieces = cut(text, levels[0])
    else:  # no white space for a long stretch: cut between characters
        size = max(1, len(text) * limit // (total + limit))
        pieces = cut_characters(text, size)
    if len(pieces) == 1:
        if levels:
            yield from parts(text, count, limit, levels[1:])
        else:
            yield text  # one character of more pieces than the limit
        return
    held, num_held = "", 0
    for piece in pieces:
        num = count(piece)
        if held and num_held + num > limit:
            yield held
            held, num_held = "", 0
        if num > limit:
            yield from parts(piece, count, limit, levels[1:])
        else:
            held, num_held = held + piece, num_held + num
    if held:
        yield held


def cut(text: str, pattern: re.Pattern[str]) -> list[str]:
    """Cut after each match, but not after an abbreviation or before a small letter that goes on with a sentence."""
    pieces: list[str] = []
    start = 0
    for match in pattern.finditer(text):
        end = match.end()
        if pattern is SENTENCE and (
            text[end : end + 1].islower() or ABBREVIATION.search(text[max(start, end - 9) : end])
        ):
            continue
        pieces.append(text[start:end])
        start = end
    if start < len(text):
        pieces.append(text[start:])
    return pieces


def cut_characters(text: str, size: int) -> list[str]:
    """Cut every `size` characters, but not before a combining mark."""
    pieces: list[str] = []
    start = 0
    while start < len(text):
        end = start + size
        while end < len(text) and unicodedata.combining(text[end]):
            end += 1
        pieces.append(text[start:end])
        start = end
    return pieces
