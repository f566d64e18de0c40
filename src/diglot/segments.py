"""A text into segments that are short enough to translate, and the white space between them, losing nothing."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass

# where a text may be cut, best first: after a sentence, a clause, a word
# (a match begins where a row of marks does: without that, a long row takes time by its square)
SENTENCE = re.compile(r"(?<![.!?…؟۔।])([.!?…؟۔।]++)[\"'”’»)\]]*+\s+|[。！？]++[」』”’）]*+\s*+")
CLAUSE = re.compile(r"[,;:–—]\s+|[，；：、]\s*")
WORD = re.compile(r"\s+")
ABBREVIATION = re.compile(r"(?<!\w)(?:\w|[A-Z]\w{1,2})$")  # one letter, or a short capitalized word: Dr., St.


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
    segments: list[Segment] = []
    for part in parts(body, count, limit, (SENTENCE, CLAUSE, WORD)) if body else ():
        core = part.rstrip()
        space = part[len(core) :]
        if core:
            segments.append(Segment(core, space))
        else:  # nothing but white space, cut from the part before
            segments[-1] = Segment(segments[-1].text, segments[-1].space + space)
    return lead, segments


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
        if pattern is SENTENCE and goes_on(text, match):
            continue
        pieces.append(text[start:end])
        start = end
    if start < len(text):
        pieces.append(text[start:])
    return pieces


def goes_on(text: str, match: re.Match[str]) -> bool:
    """Whether a sentence goes on after what looks like its end: before a small letter, or after an abbreviation."""
    before = text[max(0, match.start() - 8) : match.start()]
    return text[match.end() : match.end() + 1].islower() or (match[1] == "." and bool(ABBREVIATION.search(before)))


def cut_characters(text: str, size: int) -> list[str]:
    """Cut every `size` characters, but not before a combining mark."""
    pieces: list[str] = []
    start = 0
    while start < len(text):
        end = start + size
        while end < len(text) and unicodedata.category(text[end]).startswith("M"):
            end += 1
        pieces.append(text[start:end])
        start = end
    return pieces
