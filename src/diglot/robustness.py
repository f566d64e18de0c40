"""A test text as people really type it: what a score is worth if it is altered a little, always alike."""

from __future__ import annotations

import random
from collections.abc import Sequence

from diglot.translator import space_between

LETTERS_A_SLIP = 25  # a typing error in each so many letters, and one at least in a line that has two
STOPS = ".。।۔"


def variants(src: Sequence[str], ref: Sequence[str], language: str = "") -> dict[str, tuple[list[str], list[str]]]:
    """Sources that are altered, and the references to score their translations by: those of the sources as they were.
    Only a line to which another one is appended has both their references; `language`, of the references, says what
    stands between them.

    >>> for name, (lines, _) in variants(["A dog runs."], ["Ein Hund rennt."]).items():
    ...     print(f"{name}: {lines[0]}")
    capitals: A DOG RUNS.
    small letters: a dog runs.
    no final stop: A dog runs
    typing errors: A dog ruuns.
    doubled spaces: A  dog  runs.
    a sentence more: A dog runs. A dog runs.
    """
    altered = {
        "capitals": [line.upper() for line in src],
        "small letters": [line.lower() for line in src],
        "no final stop": [line.rstrip().rstrip(STOPS).rstrip() for line in src],
        "typing errors": [mistype(line, number) for number, line in enumerate(src)],
        "doubled spaces": [line.replace(" ", "  ") for line in src],
    }
    longer = append_next(src, " "), append_next(ref, space_between(" ", language))
    return {**{name: (lines, list(ref)) for name, lines in altered.items()}, "a sentence more": longer}


def mistype(line: str, seed: int) -> str:
    """Letters left out, doubled or exchanged with the next one, as fingers do; which ones follows from the seed."""
    rng, letters = random.Random(seed), list(line)
    places = [i for i in range(len(line) - 1) if line[i].isalpha() and line[i + 1].isalpha()]
    num = min(len(places), max(1, sum(map(str.isalpha, line)) // LETTERS_A_SLIP))
    for i in sorted(rng.sample(places, num), reverse=True):  # from the end: what is before stays in its place
        match rng.randrange(3):
            case 0:
                del letters[i]
            case 1:
                letters.insert(i, letters[i])
            case _:
                letters[i : i + 2] = letters[i + 1], letters[i]
    return "".join(letters)


def append_next(lines: Sequence[str], space: str) -> list[str]:
    """Each line with the one that follows it; the last one with the first."""
    return [one + space + two for one, two in zip(lines, [*lines[1:], *lines[:1]], strict=True)]
