"""The corpus made by rule: what it says is right in both languages, and testing holds nothing of training."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest

from diglot import demo
from diglot.alignment import to_pharaoh
from diglot.corpus import read_lines
from diglot.demo import (
    DAYS_OF_MONTH,
    DE_MONTHS,
    EN_MONTHS,
    KINDS,
    Phrase,
    Value,
    draw_corpus,
    draw_phrases,
    draw_value,
    english_date,
    english_number,
    english_ordinal,
    english_price,
    english_time,
    english_year,
    german_date,
    german_number,
    german_ordinal,
    german_price,
    german_time,
    german_year,
    write_corpus,
)

TIMES = [(hour, minute) for hour in range(12) for minute in range(60)]
ENGLISH = dict(zip(
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety".split(),
    (*range(1, 20), *range(20, 100, 10)), strict=True,
))  # fmt: skip
GERMAN = dict(zip(
    "ein zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn siebzehn "
    "achtzehn neunzehn zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig eins".split(),
    (*range(1, 20), *range(20, 100, 10), 1), strict=True,
))  # fmt: skip


def value_of_english(text: str) -> int:
    """A number in English words, read from left to right."""
    total = part = 0
    for word in re.split("[ -]", text):
        if word == "thousand":
            total, part = 1000 * part, 0
        elif word == "hundred":
            part *= 100
        else:
            part += ENGLISH[word]
    return total + part


def value_of_german(word: str) -> int:
    """A number in one German word, taken apart at its largest unit."""
    for unit, size in (("tausend", 1000), ("hundert", 100)):
        head, found, rest = word.partition(unit)
        if found:
            return value_of_german(head) * size + (value_of_german(rest) if rest else 0)
    ones, found, tens = word.partition("und")
    return GERMAN[ones] + GERMAN[tens] if found else GERMAN[word]


# ------------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    ("number", "english", "german"),
    [
        (0, "zero", "null"),
        (1, "one", "eins"),
        (16, "sixteen", "sechzehn"),
        (17, "seventeen", "siebzehn"),
        (21, "twenty-one", "einundzwanzig"),
        (30, "thirty", "dreißig"),
        (66, "sixty-six", "sechsundsechzig"),
        (77, "seventy-seven", "siebenundsiebzig"),
        (100, "one hundred", "einhundert"),
        (101, "one hundred one", "einhunderteins"),
        (342, "three hundred forty-two", "dreihundertzweiundvierzig"),
        (1000, "one thousand", "eintausend"),
        (1001, "one thousand one", "eintausendeins"),
        (17_017, "seventeen thousand seventeen", "siebzehntausendsiebzehn"),
        (21_000, "twenty-one thousand", "einundzwanzigtausend"),
        (101_000, "one hundred one thousand", "einhunderteintausend"),
        (
            342_716,
            "three hundred forty-two thousand seven hundred sixteen",
            "dreihundertzweiundvierzigtausendsiebenhundertsechzehn",
        ),
        (
            999_999,
            "nine hundred ninety-nine thousand nine hundred ninety-nine",
            "neunhundertneunundneunzigtausendneunhundertneunundneunzig",
        ),
    ],
)
def test_numbers_in_both_languages(number: int, english: str, german: str) -> None:
    assert (english_number(number), german_number(number)) == (english, german)


def test_numbers_are_read_back_as_they_were() -> None:
    numbers = {*range(1, 2000), *random.Random(1).sample(range(2000, 1_000_000), 6000), *range(999_000, 1_000_000)}
    for number in numbers:
        assert value_of_english(english_number(number)) == number
        assert value_of_german(german_number(number)) == number


# ------------------------------------------------------------------- times, days, years, prices


@pytest.mark.parametrize(
    ("hour", "minute", "english", "german"),
    [
        (7, 20, "twenty past seven", "zwanzig nach sieben"),
        (7, 40, "twenty to eight", "zwanzig vor acht"),
        (7, 30, "half past seven", "halb acht"),
        (12, 45, "quarter to one", "Viertel vor eins"),
        (0, 0, "twelve o'clock", "zwölf Uhr"),
        (1, 0, "one o'clock", "ein Uhr"),
        (1, 15, "quarter past one", "Viertel nach eins"),
        (0, 30, "half past twelve", "halb eins"),
        (11, 31, "twenty-nine to twelve", "neunundzwanzig vor zwölf"),
        (11, 59, "one to twelve", "eins vor zwölf"),
        (0, 1, "one past twelve", "eins nach zwölf"),
    ],
)
def test_times_in_both_languages(hour: int, minute: int, english: str, german: str) -> None:
    assert (" ".join(english_time(hour, minute)), " ".join(german_time(hour, minute))) == (english, german)


def test_the_720_times_are_720_in_both_languages_and_come_again_after_noon() -> None:
    for say in (english_time, german_time):
        assert len({tuple(say(*time)) for time in TIMES}) == 720
        assert all(say(hour, minute) == say(hour + 12, minute) for hour, minute in TIMES)


@pytest.mark.parametrize(
    ("day", "english", "german"),
    [
        (1, "first", "erste"),
        (2, "second", "zweite"),
        (3, "third", "dritte"),
        (4, "fourth", "vierte"),
        (5, "fifth", "fünfte"),
        (7, "seventh", "siebte"),
        (8, "eighth", "achte"),
        (9, "ninth", "neunte"),
        (12, "twelfth", "zwölfte"),
        (13, "thirteenth", "dreizehnte"),
        (19, "nineteenth", "neunzehnte"),
        (20, "twentieth", "zwanzigste"),
        (21, "twenty-first", "einundzwanzigste"),
        (22, "twenty-second", "zweiundzwanzigste"),
        (23, "twenty-third", "dreiundzwanzigste"),
        (28, "twenty-eighth", "achtundzwanzigste"),
        (30, "thirtieth", "dreißigste"),
        (31, "thirty-first", "einunddreißigste"),
    ],
)
def test_days_in_both_languages(day: int, english: str, german: str) -> None:
    assert (english_ordinal(day), german_ordinal(day)) == (english, german)


@pytest.mark.parametrize(
    ("year", "english", "german"),
    [
        (1066, "ten sixty-six", "eintausendsechsundsechzig"),
        (1100, "eleven hundred", "elfhundert"),
        (1492, "fourteen ninety-two", "vierzehnhundertzweiundneunzig"),
        (1900, "nineteen hundred", "neunzehnhundert"),
        (1901, "nineteen oh one", "neunzehnhunderteins"),
        (1905, "nineteen oh five", "neunzehnhundertfünf"),
        (1984, "nineteen eighty-four", "neunzehnhundertvierundachtzig"),
        (2010, "twenty ten", "zweitausendzehn"),
        (2024, "twenty twenty-four", "zweitausendvierundzwanzig"),
    ],
)
def test_years_in_both_languages(year: int, english: str, german: str) -> None:
    assert (english_year(year), german_year(year)) == (english, german)


@pytest.mark.parametrize(
    ("euros", "cents", "english", "german"),
    [
        (1, 0, "one euro", "ein Euro"),
        (1, 1, "one euro one", "ein Euro eins"),
        (2, 0, "two euros", "zwei Euro"),
        (12, 50, "twelve euros fifty", "zwölf Euro fünfzig"),
        (101, 0, "one hundred one euros", "einhundertein Euro"),
        (9999, 99, "nine thousand nine hundred ninety-nine euros ninety-nine",
         "neuntausendneunhundertneunundneunzig Euro neunundneunzig"),
    ],
)  # fmt: skip
def test_prices_in_both_languages(euros: int, cents: int, english: str, german: str) -> None:
    assert (" ".join(english_price(euros, cents)), " ".join(german_price(euros, cents))) == (english, german)


# ------------------------------------------------------------------- as a whole


@pytest.mark.parametrize(
    ("english", "german", "values"),
    [
        (english_number, german_number, [(n,) for n in range(3000)]),
        (english_time, german_time, TIMES),
        (english_ordinal, german_ordinal, [(day,) for day in range(1, 32)]),
        (english_year, german_year, [(year,) for year in range(1000, 2100)]),
        (english_price, german_price, [(e, c) for e in (*range(1, 130), 1000, 9999) for c in range(100)]),
    ],
    ids=["numbers", "times", "days", "years", "prices"],
)
def test_other_values_are_other_words_in_both_languages(
    english: Callable[..., str], german: Callable[..., str], values: list[tuple[int, ...]]
) -> None:
    for say in (english, german):
        assert len({str(say(*value)) for value in values}) == len(values)


def test_an_english_phrase_has_one_german(drawn: dict[str, list[tuple[str, str]]]) -> None:
    pairs = {pair for part in drawn.values() for pair in part}
    assert len({src for src, _ in pairs}) == len({tgt for _, tgt in pairs}) == len(pairs)


def test_there_are_at_least_ten_million_phrases() -> None:
    years = len({english_year(year) for year in range(1100, 2100) if not 2000 <= year < 2010})
    dates = sum(DAYS_OF_MONTH) * years
    single = 10**6 + dates + len(TIMES) + 9999 * 100
    assert len(EN_MONTHS) == len(DE_MONTHS) == len(DAYS_OF_MONTH) == 12
    assert single + single**2 > 10_000_000  # a phrase holds one value or two


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[str, str]]]:
    """The demo's three corpora, as they lie on disk."""
    directory = tmp_path_factory.mktemp("demo") / "text"
    write_corpus(directory)
    names = {f"{part}.{language}" for part in ("train", "valid", "test") for language in ("en", "de")}
    assert {path.name for path in directory.iterdir()} == names | {"test.pharaoh"}
    return {
        part: list(zip(*(read_lines(directory / f"{part}.{language}") for language in ("en", "de")), strict=True))
        for part in ("train", "valid", "test")
    }


def values_of(phrases: list[tuple[str, str]]) -> set[tuple[str, str]]:
    """The values in English phrases, each with its kind, as its words tell it."""
    marks = {"date": "^the ", "time": r" (past|to) |o'clock$", "price": r"\beuros?\b"}
    return {
        (next((kind for kind, mark in marks.items() if re.search(mark, value)), "number"), value)
        for src, _ in phrases
        for value in src.split(", ")
    }


def test_no_value_of_a_test_phrase_is_in_training_or_validation(drawn: dict[str, list[tuple[str, str]]]) -> None:
    tested, seen = values_of(drawn["test"]), values_of(drawn["train"] + drawn["valid"])
    assert not tested & seen
    for values in (tested, seen):
        assert {kind for kind, _ in values} == set(KINDS)


def test_the_corpora_are_as_large_as_they_say_and_hold_nothing_twice(drawn: dict[str, list[tuple[str, str]]]) -> None:
    sizes = {"train": demo.NUM_TRAIN, "valid": demo.NUM_VALID, "test": demo.NUM_TEST}
    assert {part: len(set(pairs)) for part, pairs in drawn.items()} == sizes
    assert not set(drawn["train"]) & set(drawn["valid"])


def test_a_phrase_has_as_many_values_in_german_as_in_english(drawn: dict[str, list[tuple[str, str]]]) -> None:
    for src, tgt in drawn["train"]:
        assert src.count(", ") == tgt.count(", ") <= 1
        assert src == src.strip()
        assert src.isascii()


@pytest.mark.parametrize(
    ("english", "german", "links"),
    [
        ("three hundred forty-two", "dreihundertzweiundvierzig", "0-0 1-0 2-0"),
        ("half past seven", "halb acht", "0-0 1-0 2-1"),
        ("twenty-two to five", "zweiundzwanzig vor fünf", "0-0 1-1 2-2"),
        ("eight o'clock", "acht Uhr", "0-0 1-1"),
        ("the sixth of May nineteen ten", "der sechste Mai neunzehnhundertzehn", "0-0 1-1 3-2 4-3 5-3"),
        ("one hundred euros six", "einhundert Euro sechs", "0-0 1-0 2-1 3-2"),
        ("ten, one euro", "zehn, ein Euro", "0-0 1-1 2-2"),
    ],
)  # fmt: skip
def test_the_true_alignment_by_hand(english: str, german: str, links: str) -> None:
    values = {
        "number": {((english_number(n),), (german_number(n),)) for n in (342, 10)},
        "time": {(tuple(english_time(*time)), tuple(german_time(*time))) for time in TIMES},
        "date": {(tuple(english_date(6, 4, 1910)), tuple(german_date(6, 4, 1910)))},
        "price": {(tuple(english_price(*p)), tuple(german_price(*p))) for p in ((100, 6), (1, 0))},
    }
    every = {Value(kind, *parts) for kind, found in values.items() for parts in found}
    said = [next(v for v in every if v.english == one and v.german in german) for one in english.split(", ")]
    phrase = Phrase(tuple(said))
    assert phrase.texts == (english, german)
    assert to_pharaoh(phrase.links) == links


def test_every_german_word_of_the_corpus_stands_for_something_and_no_link_is_beyond_the_words() -> None:
    for phrase in draw_phrases(500, seed=5):
        english, german = (text.split() for text in phrase.texts)
        assert {j for _, j in phrase.links} == set(range(len(german)))
        unaligned = {word for i, word in enumerate(english) if i not in {i for i, _ in phrase.links}}
        assert unaligned <= {"of"}
        assert max(i for i, _ in phrase.links) < len(english)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_for_testing", [False, True])
def test_a_value_is_drawn_for_training_or_for_testing(kind: str, is_for_testing: bool) -> None:
    rng = random.Random(1)
    for _ in range(50):
        value = draw_value(rng, kind, is_for_testing)
        assert (value.kind, value.is_for_testing) == (kind, is_for_testing)


def test_a_corpus_follows_from_its_seed() -> None:
    assert draw_corpus(50, seed=3) == draw_corpus(50, seed=3) == draw_corpus(80, seed=3)[:50]
    assert not set(draw_corpus(50, seed=3)) & set(draw_corpus(50, seed=3, is_for_testing=True))
    assert draw_corpus(50, seed=3) != draw_corpus(50, seed=4)
