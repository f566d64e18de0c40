"""Text in, text out: the facade over a model directory."""

from __future__ import annotations

import dataclasses
import queue
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from diglot.checkpoint import StoredModel, load_model
from diglot.config import SearchConfig, update_section
from diglot.engines.torch import TorchEngine
from diglot.errors import ConfigError, TextError
from diglot.search import Hypothesis, length_penalty
from diglot.segments import Segment, split
from diglot.subwords import word_spans, writes_spaces

T = TypeVar("T")
Weights = NDArray[np.float64]

WINDOW = 2048  # lines that are sorted into batches together
LONGEST_SCORED = 2048  # pieces of a side
LONGEST_PICTURED = 512  # the weights of base at this length take 300 MB
LONGEST_UNRECORDED = 200  # source pieces at once, of a model that does not say what it was trained on
TAG = re.compile(r">>([\w-]+)<< ?")  # at the start of a text: the language to translate it into


@dataclass(frozen=True)
class Translation:
    """What became of one text."""

    text: str
    score: float  # log_prob / length_penalty(num_pieces): what the search maximizes
    log_prob: float  # natural logarithm of the probability of the pieces, with each segment's end
    num_pieces: int  # with each segment's end
    num_segments: int = 1  # into which a long text was split
    hit_bound: bool = False  # a segment was ended by the bound on its length
    others: tuple[Translation, ...] = ()  # the next best ones, with num_best above 1


@dataclass(frozen=True)
class Attention:
    """What looks at what while the network computes a translation: softmax(Q K^T / sqrt(d_k)), every row of which sums
    to one. A position of the decoder writes tgt[t] and has read the start and tgt[:t], so column 0 of `decoder` is the
    start, and column j is tgt[j - 1]."""

    src: tuple[str, ...]  # S pieces as written, with the end; a tag comes first
    tgt: tuple[str, ...]  # T pieces with the end
    src_words: tuple[tuple[int, int], ...]  # the first piece of each word, and the one after its last
    tgt_words: tuple[tuple[int, int], ...]
    encoder: Weights  # (layers, heads, S, S): row looks at column
    decoder: Weights  # (layers, heads, T, T)
    cross: Weights  # (layers, heads, T, S)
    source: str = ""
    text: str = ""  # its translation, or the target that was given
    score: float = 0.0
    src_attribution: Weights | None = None  # (T, S): gradient of log P(piece) times input
    tgt_attribution: Weights | None = None  # (T, T), its columns as those of `decoder`


def load(
    path: str | Path, *others: str | Path, device: str = "auto", precision: str = "fp32", threads: int = 0
) -> Translator:
    """Load a model directory (or a run's); with several, their ensemble.

    >>> import diglot
    >>> model = diglot.load("runs/deen/model")  # doctest: +SKIP
    >>> model.translate(["Ein Hund rennt."])[0].text  # doctest: +SKIP
    'A dog is running.'
    """
    if threads < 0:
        raise ConfigError(f"threads = {threads} must be at least 0, which is one a core.")
    if threads:
        torch.set_num_threads(threads)
    return Translator([load_model(Path(name)) for name in (path, *others)], device=device, precision=precision)


class Translator:
    """Translates and scores with a model, or with an ensemble of models of the same vocabularies."""

    def __init__(self, stored: Sequence[StoredModel], *, device: str = "auto", precision: str = "fp32"):
        first = stored[0]
        for other in stored[1:]:
            if (other.src_subwords, other.tgt_subwords) != (first.src_subwords, first.tgt_subwords):
                raise ConfigError(
                    f"{first.path} and {other.path} have different vocabularies; an ensemble needs the same subwords."
                )
        if precision not in ("fp32", "bf16"):
            raise ConfigError(f"precision '{precision}' is none of: fp32, bf16.")
        self.path, self.spec = first.path, first.spec
        self.src_subwords, self.tgt_subwords = first.src_subwords, first.tgt_subwords
        self.num_parameters = sum(p.numel() for one in stored for p in one.model.parameters())
        self.engine = TorchEngine(
            [one.model for one in stored],
            pad_id=self.tgt_subwords.pad_id,
            eos_id=self.tgt_subwords.eos_id,
            unwritable=self.tgt_subwords.unwritable(),
            device=choose_device(device),
            bf16=precision == "bf16",
        )

    def translate(
        self,
        texts: Sequence[str],
        *,
        to: str | Sequence[str] | None = None,
        prefixes: Sequence[str] | None = None,
        **options: Any,
    ) -> list[Translation]:
        """Translate each text. Options are those of the recipe's [search]: beam_size, num_best, method, ...

        to: the language, or that of each text, for a model that knows several; a text may name its own: ">>de<< Hello".
        prefixes: what each translation has to begin with.
        """
        if isinstance(texts, str):
            raise TypeError("translate takes a list of texts: write translate([text]).")
        if prefixes is not None and len(prefixes) != len(texts):
            raise ConfigError(f"there are {len(texts)} texts and {len(prefixes)} prefixes; each text needs one.")
        return self._translate(self._tagged(texts, to), self.search_config(options), prefixes, first_line=0)

    def translate_lines(
        self, lines: Iterable[str], *, to: str | None = None, prefix: str = "", **options: Any
    ) -> Iterator[Translation]:
        """Translate lines as they arrive, in order and in bounded memory; each begins with `prefix`.

        Whatever has arrived when a batch is done makes up the next one, up to a window of lines.
        """
        config = self.search_config(options)
        done = 0
        for window in arriving(lines, WINDOW):
            yield from self._translate(self._tagged(window, to), config, [prefix] * len(window), first_line=done)
            done += len(window)

    def score(
        self, sources: Sequence[str], targets: Sequence[str], *, to: str | Sequence[str] | None = None, **options: Any
    ) -> list[Translation]:
        """The given targets as translations of the sources, with the scores that the search would give them."""
        if len(sources) != len(targets):
            raise ConfigError(f"there are {len(sources)} sources and {len(targets)} targets; each source needs one.")
        return list(self.score_pairs(list(zip(self._tagged(sources, to), targets, strict=True)), **options))

    def score_pairs(
        self, pairs: Iterable[tuple[str, str]], *, to: str | None = None, **options: Any
    ) -> Iterator[Translation]:
        """The same for pairs as they arrive, in bounded memory."""
        alpha = self.search_config(options).length_penalty
        done = 0
        for window in arriving(pairs, WINDOW):
            sides = self._encode_pairs(window, to, done, LONGEST_SCORED)
            log_probs = self.engine.score(*sides)
            for (_, text), pieces, log_prob in zip(window, sides[1], log_probs, strict=True):
                score = log_prob / length_penalty(len(pieces) + 1, alpha)
                yield Translation(text, score, log_prob, len(pieces) + 1)
            done += len(window)

    def attend(
        self,
        text: str,
        target: str | None = None,
        *,
        to: str | None = None,
        attribution: bool = True,
        **options: Any,
    ) -> list[Attention]:
        """What looks at what in the translation of a text: for each hypothesis of the beam, the best first (or
        `num_best` of them), or for the given target.

        `attribution`: also gradients times inputs, for comparison, which takes longer.
        """
        sources, targets = self._encode_pairs([(text, target or "")], to, 0, LONGEST_PICTURED)
        if target is None:
            config = self.search_config(options)
            if config.method == "beam" and "num_best" not in options:
                config = dataclasses.replace(config, num_best=config.beam_size)
            (hypotheses,) = self.engine.search(sources, config)
            targets, scores = [list(one.pieces) for one in hypotheses], [one.score for one in hypotheses]
        else:
            scores = [one.score for one in self.score([text], [target], to=to, **options)]
        results: list[Attention] = []
        for attention, pieces, score in zip(
            self._attend(sources * len(targets), targets, exact=True), targets, scores, strict=True
        ):
            written = self.tgt_subwords.decode(pieces)
            attention = dataclasses.replace(attention, source=text, text=written, score=score)
            if attribution:
                of_src, of_tgt = (side.cpu().numpy() for side in self.engine.attribute(sources[0], pieces))
                attention = dataclasses.replace(attention, src_attribution=of_src, tgt_attribution=of_tgt)
            results.append(attention)
        return results

    def attend_pairs(
        self, pairs: Iterable[tuple[str, str]], *, to: str | Sequence[str] | None = None
    ) -> Iterator[Attention]:
        """The same for pairs as they arrive, in bounded memory, in the network's own precision."""
        done = 0
        for window in arriving(pairs, WINDOW // 16):
            languages = to if to is None or isinstance(to, str) else to[done : done + len(window)]
            yield from self._attend(*self._encode_pairs(window, languages, done, LONGEST_PICTURED), exact=False)
            done += len(window)

    def search_config(self, options: dict[str, Any]) -> SearchConfig:
        """The model's own search with other options."""
        return update_section(self.spec.search, options)

    def _attend(self, sources: list[list[int]], targets: list[list[int]], *, exact: bool) -> list[Attention]:
        if len(self.engine.models) > 1:
            raise ConfigError("an ensemble has no attention of its own; look at one of its models alone.")
        found: list[Attention] = []
        for src, tgt, weights in zip(sources, targets, self.engine.attend(sources, targets, exact=exact), strict=True):
            src_pieces = self.src_subwords.words([*src, self.src_subwords.eos_id])
            tgt_pieces = self.tgt_subwords.words([*tgt, self.tgt_subwords.eos_id])
            num_tags, language = 0, self.spec.languages.tgt
            for tag in self.spec.languages.tags:
                if src[:1] == self._tag_ids(tag):
                    num_tags, language, src_pieces[0] = 1, tag, f">>{tag}<<"
            src_words = word_spans(src_pieces[num_tags:-1], self.spec.languages.src)
            encoder, decoder, cross = (one.double().cpu().numpy() for one in weights)
            found.append(
                Attention(
                    tuple(src_pieces),
                    tuple(tgt_pieces),
                    tuple((first + num_tags, end + num_tags) for first, end in src_words),
                    tuple(word_spans(tgt_pieces[:-1], language)),
                    encoder,
                    decoder,
                    cross,
                )
            )
        return found

    def _encode_pairs(
        self, pairs: Sequence[tuple[str, str]], to: str | Sequence[str] | None, done: int, longest: int
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Both sides in pieces, with their tags; a pair that is too long to be taken whole is refused."""
        texts, tags = self._read_tags(self._tagged([src for src, _ in pairs], to), done)
        encoded = self.src_subwords.encode_all(texts)
        sides = (
            [[*self._tag_ids(tag), *pieces] for tag, pieces in zip(tags, encoded, strict=True)],
            self.tgt_subwords.encode_all([tgt for _, tgt in pairs]),
        )
        limit = min(longest, self.engine.max_length())
        for number, (src, tgt) in enumerate(zip(*sides, strict=True), done + 1):
            if max(len(src), len(tgt)) >= limit:
                raise TextError(
                    f"pair {number:,} has {max(len(src), len(tgt)):,} pieces on a side; at most {limit - 1:,} can be "
                    "taken at once: split it."
                )
        return sides

    def _translate(
        self, texts: Sequence[str], config: SearchConfig, prefixes: Sequence[str] | None, first_line: int
    ) -> list[Translation]:
        texts, tags = self._read_tags(texts, first_line)
        special = 2 if self.spec.languages.tags else 1  # the end, and a tag
        limit = min(config.max_segment or LONGEST_UNRECORDED, self.engine.max_length())
        leads: list[str] = []
        segments: list[list[Segment]] = []
        for text in texts:
            lead, parts = split(text, lambda part: len(self.src_subwords.encode(part)) + special, limit)
            leads.append(lead)
            segments.append(parts)
        sources = self.src_subwords.encode_all([segment.text for parts in segments for segment in parts])
        tag_of = [tag for tag, parts in zip(tags, segments, strict=True) for _ in parts]
        sources = [[*self._tag_ids(tag), *pieces] for tag, pieces in zip(tag_of, sources, strict=True)]
        starts: list[list[int]] = self.tgt_subwords.encode_all(prefixes) if prefixes else [[]] * len(texts)
        forced: list[list[int]] = []
        seeds: list[int] = []
        for line, parts in enumerate(segments):
            for number in range(len(parts)):
                forced.append(starts[line] if number == 0 else [])
                seeds.append(((config.seed << 40) + ((first_line + line) << 16) + number) % 2**63)
        found = iter(self.engine.search(sources, config, forced, seeds))
        return [
            self._join(lead, parts, [next(found) for _ in parts], config, tag or self.spec.languages.tgt)
            for lead, parts, tag in zip(leads, segments, tags, strict=True)
        ]

    def _join(
        self, lead: str, segments: list[Segment], found: list[list[Hypothesis]], config: SearchConfig, language: str
    ) -> Translation:
        """Put the segments' translations together; the n-th best text is made of the n-th best of each."""
        if not segments:
            return Translation(lead, 0.0, 0.0, 0, 0)
        results: list[Translation] = []
        for n in range(max(len(hypotheses) for hypotheses in found)):
            chosen = [hypotheses[min(n, len(hypotheses) - 1)] for hypotheses in found]
            text = lead
            for i, (segment, hypothesis) in enumerate(zip(segments, chosen, strict=True)):
                text += self.tgt_subwords.decode(hypothesis.pieces)
                text += segment.space if i == len(segments) - 1 else space_between(segment.space, language)
            log_prob = sum(hypothesis.log_prob for hypothesis in chosen)
            num_pieces = sum(len(hypothesis.pieces) + 1 for hypothesis in chosen)
            score = log_prob / length_penalty(num_pieces, config.length_penalty)
            hit_bound = any(hypothesis.hit_bound for hypothesis in chosen)
            results.append(Translation(text, score, log_prob, num_pieces, len(segments), hit_bound))
        return dataclasses.replace(results[0], others=tuple(results[1:]))

    def _tagged(self, texts: Sequence[str], to: str | Sequence[str] | None) -> Sequence[str]:
        """Texts that name their target language, where `to` does."""
        if to is None:
            return texts
        wanted = [to] * len(texts) if isinstance(to, str) else to
        if len(wanted) != len(texts):
            raise ConfigError(f"there are {len(texts)} texts and {len(wanted)} target languages; each text needs one.")
        known = self.spec.languages.tags or (self.spec.languages.tgt,)
        for language in wanted:
            if language not in known:
                knows = (
                    f"it knows: {', '.join(known)}" if any(known) else "it was not told the code of its one language"
                )
                raise ConfigError(f"this model does not translate into '{language}'; {knows}.")
        if not self.spec.languages.tags:
            return texts
        return [
            text if TAG.match(text) else f">>{language}<< {text}" for text, language in zip(texts, wanted, strict=True)
        ]

    def _read_tags(self, texts: Sequence[str], first_line: int) -> tuple[list[str], list[str]]:
        """Texts without their tags, and the tags; a model of one language has none."""
        if not (known := self.spec.languages.tags):
            return list(texts), [""] * len(texts)
        bare: list[str] = []
        tags: list[str] = []
        for number, text in enumerate(texts, first_line + 1):
            tag = TAG.match(text)
            if tag is None and text.strip():
                raise TextError(
                    f"line {number:,} does not say into which language: choose one for all lines with --to (in Python: "
                    f"to=...), or begin the line with >>{known[0]}<<. This model knows: {', '.join(known)}."
                )
            if tag and tag[1] not in known:
                raise TextError(
                    f"line {number:,} asks for the language '{tag[1]}'; this model knows: {', '.join(known)}."
                )
            bare.append(text[tag.end() :] if tag else text)
            tags.append(tag[1] if tag else "")
        return bare, tags

    def _tag_ids(self, tag: str) -> list[int]:
        """The piece that asks for a language, if one is asked for."""
        return [self.src_subwords.tag_id(tag, self.spec.languages.tags)] if tag else []


def space_between(space: str, language: str) -> str:
    """White space between segments as the target language writes it: Chinese has none where English has one."""
    if not writes_spaces(language):
        return "" if space == " " else space
    return space or " "


def choose_device(device: str) -> str:
    """A GPU where there is one, if the choice is left to us."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda': PyTorch finds no GPU here; use cpu, or install PyTorch for your GPU.")
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"device '{device}' is none of: auto, cpu, cuda.")
    return device


def arriving(items: Iterable[T], window: int) -> Iterator[list[T]]:
    """Lists of the items that have arrived, at most `window` each; a thread reads at most that much ahead."""
    if isinstance(items, Sequence):  # all are there
        yield from (list(items[start : start + window]) for start in range(0, len(items), window))
        return
    waiting: queue.Queue[tuple[T] | BaseException | None] = queue.Queue(window)
    is_wanted = True

    def read() -> None:
        try:
            for item in items:
                waiting.put((item,))
                if not is_wanted:
                    return
            waiting.put(None)
        except BaseException as error:
            waiting.put(error)

    threading.Thread(target=read, daemon=True).start()
    try:
        while True:
            found: list[T] = []
            item = waiting.get()
            while isinstance(item, tuple):
                found.append(item[0])
                if len(found) == window:
                    break
                try:
                    item = waiting.get_nowait()
                except queue.Empty:
                    break
            if found:
                yield found
            if isinstance(item, BaseException):
                raise item
            if item is None:
                return
    finally:  # whoever asked may have gone away: let the thread end
        is_wanted = False
        while not waiting.empty():
            waiting.get()
