"""A bilingual corpus made by rule, to see the whole of diglot work without a file or a network.

English and German phrases of numbers, dates, clock times and prices in words. German writes a number as one word
with its units before its tens ("dreihundertzweiundvierzig"), so there is real reordering, and an exact answer to check.
A phrase holds values (a number, a day, ...); a value is either for training or for testing, by its hash, so no value of
a test phrase was ever seen in training. Both languages are made of the same parts, so it is also known exactly which
word stands for which.
"""

from __future__ import annotations

import json
import random
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

from diglot.alignment import Links, align_pairs, alignment_error, from_pharaoh, to_pharaoh
from diglot.config import Recipe, load_recipe
from diglot.corpus import read_lines
from diglot.errors import ConfigError
from diglot.progress import Reporter
from diglot.training import train
from diglot.translator import load

TEST_SHARE = 5  # a fifth of all values are for testing
KINDS = ("number", "date", "time", "price")

EN_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
).split()
EN_TENS = "_ _ twenty thirty forty fifty sixty seventy eighty ninety".split()
EN_MONTHS = "January February March April May June July August September October November December".split()
EN_ORDINALS = {
    "one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth", "nine": "ninth",
    "twelve": "twelfth", "twenty": "twentieth", "thirty": "thirtieth",
}  # fmt: skip
DE_ONES = (
    "null eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn "
    "siebzehn achtzehn neunzehn"
).split()
DE_TENS = "_ _ zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig".split()
DE_MONTHS = "Januar Februar März April Mai Juni Juli August September Oktober November Dezember".split()
DAYS_OF_MONTH = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


# ------------------------------------------------------------------- English


def english_number(n: int) -> str:
    """342 as "three hundred forty-two", up to 999,999."""
    if n < 20:
        return EN_ONES[n]
    if n < 100:
        return EN_TENS[n // 10] + (f"-{EN_ONES[n % 10]}" if n % 10 else "")
    base, name = (1000, "thousand") if n >= 1000 else (100, "hundred")
    rest = f" {english_number(n % base)}" if n % base else ""
    return f"{english_number(n // base)} {name}{rest}"


def english_ordinal(n: int) -> str:
    """21 as "twenty-first", up to 31."""
    head, dash, last = english_number(n).rpartition("-")
    return head + dash + EN_ORDINALS.get(last, last + "th")


def english_year(year: int) -> str:
    """1984 as "nineteen eighty-four"; 1905 as "nineteen oh five"."""
    century, rest = divmod(year, 100)
    if rest == 0:
        return f"{english_number(century)} hundred"
    return f"{english_number(century)} {'oh ' if rest < 10 else ''}{english_number(rest)}"


def english_time(hour: int, minute: int) -> list[str]:
    """7:20 as twenty, past, seven; 7:40 as twenty, to, eight."""
    this, following = english_number((hour + 11) % 12 + 1), english_number(hour % 12 + 1)
    match minute:
        case 0:
            return [this, "o'clock"]
        case 15:
            return ["quarter", "past", this]
        case 30:
            return ["half past", this]
        case 45:
            return ["quarter", "to", following]
        case _ if minute < 30:
            return [english_number(minute), "past", this]
        case _:
            return [english_number(60 - minute), "to", following]


def english_date(day: int, month: int, year: int) -> list[str]:
    """The parts of "the twenty-first of March nineteen eighty-four"; the first month is 0."""
    return ["the", english_ordinal(day), "of", EN_MONTHS[month], english_year(year)]


def english_price(euros: int, cents: int) -> list[str]:
    """12.50 as twelve, euros, fifty."""
    return [english_number(euros), "euro" if euros == 1 else "euros", *([english_number(cents)] if cents else [])]


# ------------------------------------------------------------------- German


def german_number(n: int, last: bool = True) -> str:
    """342 as "dreihundertzweiundvierzig", up to 999,999; a final one is "eins", an inner one "ein"."""
    if n == 1:
        return "eins" if last else "ein"
    if n < 20:
        return DE_ONES[n]
    if n < 100:
        return (f"{german_number(n % 10, last=False)}und" if n % 10 else "") + DE_TENS[n // 10]
    base, name = (1000, "tausend") if n >= 1000 else (100, "hundert")
    rest = german_number(n % base, last) if n % base else ""
    return german_number(n // base, last=False) + name + rest


def german_ordinal(n: int) -> str:
    """21 as "einundzwanzigste", up to 31."""
    special = {1: "erste", 3: "dritte", 7: "siebte", 8: "achte"}
    return special.get(n) or german_number(n) + ("te" if n < 20 else "ste")


def german_year(year: int) -> str:
    """1984 as "neunzehnhundertvierundachtzig", 2024 as "zweitausendvierundzwanzig"."""
    century, rest = divmod(year, 100)
    if century < 11 or century >= 20:
        return german_number(year)
    return f"{german_number(century)}hundert{german_number(rest) if rest else ''}"


def german_time(hour: int, minute: int) -> list[str]:
    """7:20 as zwanzig, nach, sieben; 7:30 as halb, acht."""
    this, following = ((h + 11) % 12 + 1 for h in (hour, hour + 1))
    match minute:
        case 0:
            return [german_number(this, last=False), "Uhr"]
        case 15:
            return ["Viertel", "nach", german_number(this)]
        case 30:
            return ["halb", german_number(following)]
        case 45:
            return ["Viertel", "vor", german_number(following)]
        case _ if minute < 30:
            return [german_number(minute), "nach", german_number(this)]
        case _:
            return [german_number(60 - minute), "vor", german_number(following)]


def german_date(day: int, month: int, year: int) -> list[str]:
    """The parts of "der einundzwanzigste März neunzehnhundertvierundachtzig": "of" has no word of its own."""
    return ["der", german_ordinal(day), "", DE_MONTHS[month], german_year(year)]


def german_price(euros: int, cents: int) -> list[str]:
    """12.50 as zwölf, Euro, fünfzig."""
    return [german_number(euros, last=False), "Euro", *([german_number(cents)] if cents else [])]


# ------------------------------------------------------------------- values and phrases


@dataclass(frozen=True)
class Value:
    """Something to say in both languages, as parts: one says in each language what its counterpart says."""

    kind: str
    english_parts: tuple[str, ...]
    german_parts: tuple[str, ...]

    @property
    def english(self) -> str:
        """As it is written."""
        return " ".join(filter(None, self.english_parts))

    @property
    def german(self) -> str:
        """As it is written."""
        return " ".join(filter(None, self.german_parts))

    @property
    def is_for_testing(self) -> bool:
        """By the hash of its English: the same on every machine. The twelve half hours cannot be told from others
        (who never heard that "half past six" is "halb sieben" cannot know it), so all are for training."""
        if self.english.startswith("half past"):
            return False
        return zlib.crc32(f"{self.kind} {self.english}".encode()) % TEST_SHARE == 0


def draw_value(rng: random.Random, kind: str, is_for_testing: bool) -> Value:
    """A random value of a kind, for training or for testing."""
    while True:
        match kind:
            case "number":
                n = rng.randrange(10 ** rng.randint(1, 6))
                both = [english_number(n)], [german_number(n)]
            case "date":
                month = rng.randrange(12)
                day = rng.randint(1, DAYS_OF_MONTH[month])
                year = rng.randint(1100, 2099)
                while 2000 <= year < 2010 or year % 1000 == 0:
                    year = rng.randint(1100, 2099)
                both = english_date(day, month, year), german_date(day, month, year)
            case "time":
                hour, minute = rng.randrange(12), rng.randrange(60)
                both = english_time(hour, minute), german_time(hour, minute)
            case _:
                euros, cents = (
                    rng.randrange(1, 10 ** rng.randint(1, 4)),
                    rng.choice((0, rng.randrange(1, 100))),
                )
                both = english_price(euros, cents), german_price(euros, cents)
        value = Value(kind, *map(tuple, both))
        if value.is_for_testing == is_for_testing:
            return value


@dataclass(frozen=True)
class Phrase:
    """One value, or two in a row."""

    values: tuple[Value, ...]

    @property
    def texts(self) -> tuple[str, str]:
        """English and German."""
        return ", ".join(value.english for value in self.values), ", ".join(value.german for value in self.values)

    @property
    def links(self) -> Links:
        """Which word of the German stands for which of the English, as numbers (English, German) counted from 0."""
        found: set[tuple[int, int]] = set()
        src = tgt = 0
        for value in self.values:
            for english, german in zip(value.english_parts, value.german_parts, strict=True):
                src_end, tgt_end = src + len(english.split()), tgt + len(german.split())
                found |= {(i, j) for i in range(src, src_end) for j in range(tgt, tgt_end)}
                src, tgt = src_end, tgt_end
        return frozenset(found)


def draw_phrases(num: int, seed: int, is_for_testing: bool = False) -> list[Phrase]:
    """So many different phrases."""
    rng = random.Random(seed)
    phrases: dict[tuple[str, str], Phrase] = {}
    while len(phrases) < num:
        values = [draw_value(rng, rng.choice(KINDS), is_for_testing) for _ in range(rng.choice((1, 1, 1, 2)))]
        phrase = Phrase(tuple(values))
        phrases.setdefault(phrase.texts, phrase)
    return list(phrases.values())


def draw_corpus(num: int, seed: int, is_for_testing: bool = False) -> list[tuple[str, str]]:
    """So many different phrases, English and German."""
    return [phrase.texts for phrase in draw_phrases(num, seed, is_for_testing)]


# ------------------------------------------------------------------- the demo


RECIPE = (
    "model.num_encoder_layers=2", "model.num_decoder_layers=2", "model.dropout=0.0", "subwords.size=600",
    "train.update_pieces=1024", "train.warmup_steps=600", "train.learning_rate_scale=1.0", "train.max_updates=2400",
    "train.valid_every=180", "train.watch=12", "train.average=4", "train.patience=0", "train.log_every=20",
    "languages.src=en", "languages.tgt=de",
)  # fmt: skip
NUM_TRAIN, NUM_VALID, NUM_TEST = 30_000, 100, 2_000
NUM_SHOWN = 5


def write_corpus(directory: Path) -> None:
    """The demo's three texts, as any corpus lies on disk, and the true alignment of the one to test on."""
    directory.mkdir(parents=True, exist_ok=True)
    phrases = draw_corpus(NUM_TRAIN + NUM_VALID, seed=1)
    tested = draw_phrases(NUM_TEST, seed=2, is_for_testing=True)
    parts = {
        "train": phrases[:NUM_TRAIN],
        "valid": phrases[NUM_TRAIN:],
        "test": [phrase.texts for phrase in tested],
    }
    for name, pairs in parts.items():
        for side, language in enumerate(("en", "de")):
            text = "".join(pair[side] + "\n" for pair in pairs)
            (directory / f"{name}.{language}").write_text(text, encoding="utf-8", newline="\n")
    links = "".join(to_pharaoh(phrase.links) + "\n" for phrase in tested)
    (directory / "test.pharaoh").write_text(links, encoding="utf-8", newline="\n")


def demo_recipe(directory: Path, threads: int = 0) -> Recipe:
    """What the demo trains: the tiny preset on the corpus in `directory`."""
    text = directory / "text"
    files = {"src": "train.en", "tgt": "train.de", "valid_src": "valid.en", "valid_tgt": "valid.de"}
    words = [f"data.{key}={json.dumps(str(text / name))}" for key, name in files.items()]
    words += [f"train.out={json.dumps(str(directory / 'run'))}", f"train.threads={threads}"]
    return load_recipe(None, "tiny", (*RECIPE, *words))


def run_demo(directory: Path, *, threads: int = 0, ask: bool = True) -> float:
    """Make the corpus, train, test, translate what is typed; the answer is the share of exact translations."""
    begun = time.monotonic()
    text = directory / "text"
    try:
        write_corpus(text)
    except OSError as error:
        raise ConfigError(f"cannot write to {directory}: {error.strerror}; choose another place with --out.") from None
    reporter = Reporter()
    reporter.say(f"Phrases of numbers, dates, times and prices, English and German, made by rule: {text}")
    for src, tgt in draw_corpus(NUM_SHOWN, seed=1):
        reporter.say(f"    {src}\n    {tgt}")
    summary = train(demo_recipe(directory, threads))
    translator = load(summary.model)
    src, ref = (read_lines(text / f"test.{language}") for language in ("en", "de"))
    with reporter.bar("testing", len(src)) as advance:
        found: list[str] = []
        for one in translator.translate_lines(src):
            found.append(one.text)
            advance(1, "")
    wrong = [i for i in range(len(src)) if found[i] != ref[i]]
    exact = 1 - len(wrong) / len(src)
    for i in wrong[:NUM_SHOWN]:
        reporter.say(f"    wrong: {src[i]}\n        is {found[i]}\n    not    {ref[i]}")
    reporter.say(
        f"{exact:.1%} of {len(src):,} phrases are translated exactly; no number, date, time or price in them was seen "
        f"in training. All of it took {time.monotonic() - begun:.0f} seconds."
    )
    true = [from_pharaoh(line) for line in read_lines(text / "test.pharaoh")]
    error = alignment_error(list(align_pairs(translator, zip(src, ref, strict=True))), true)
    reporter.say(
        f"Which word stands for which: alignment error (AER) {error:.3f}, read from cross attention, "
        f"layer {translator.spec.alignment.layer}, heads {', '.join(map(str, translator.spec.alignment.heads))}."
    )
    if ask:
        reporter.say("Type a phrase in English, as: twenty past seven. An empty line ends.")
        for line in iter(lambda: input("> ").strip(), ""):
            print(translator.translate([line])[0].text)
    reporter.say(
        f"Next, your own text:\n"
        f"  diglot train --src train.de --tgt train.en --src-lang de --tgt-lang en --out runs/deen --preset tiny\n"
        f"or look at what was made here:\n"
        f"  echo 'twenty past seven' | diglot translate {summary.model}\n"
        f"  diglot attend {summary.model} 'twenty past seven' -o attention.html\n"
        f"  diglot info {summary.model}"
    )
    return exact
