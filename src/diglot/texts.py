"""What a run reads before it trains: subwords, the indexed corpus, the text to validate on."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from diglot.batching import rows_of_epoch
from diglot.checkpoint import StoredModel, write_file, writing
from diglot.config import Recipe
from diglot.corpus import (
    MAX_BYTES_OF_A_PIECE,
    Corpus,
    PairFile,
    cache_directory,
    lines_to_learn_from,
    making,
    open_pairs,
    sweep_cache,
)  # fmt: skip
from diglot.errors import TextError, TrainingError
from diglot.index import Reading, index_corpus
from diglot.parallel import World, num_cores
from diglot.progress import Reporter
from diglot.run import Job
from diglot.signals import interruptible
from diglot.subwords import LEARNING_LINES, Subwords, learn, load_subwords
from diglot.translator import LONGEST_SCORED
from diglot.validation import ValidationText


@dataclass
class Texts:
    """All text of a run, and how it becomes pieces."""

    src_subwords: Subwords
    tgt_subwords: Subwords
    corpus: Corpus
    valid: ValidationText


def read_texts(job: Job, start: StoredModel | None) -> Texts:
    """Open, check, index; what is dropped is counted, and listed in dropped.tsv."""
    recipe, run, reporter = job.recipe, job.run, job.reporter
    data, cache = recipe.data, cache_directory()
    sweep_cache(cache)
    files = open_pairs(data.src, data.tgt, data.tsv, cache)
    src_subwords, tgt_subwords = get_subwords(recipe, start, files, cache, reporter)
    path = run / "dropped.tsv" if job.world.is_first else Path(os.devnull)
    with writing(path), path.open("w", encoding="utf-8") as drops:
        reading = Reading(src_subwords, tgt_subwords, data, bool(recipe.languages.tags))
        num_processes = recipe.train.threads or num_cores()
        corpus = index_corpus(files, reading, drops, reporter.bar, cache, num_processes)
        num_lines = len(corpus) + sum(corpus.dropped.values())
        if data.valid_src or data.valid_tsv:
            valid = read_validation(recipe, src_subwords, tgt_subwords, drops, reporter)
        else:
            src, tgt, files_of = corpus.hold_out(min(data.held_out, len(corpus) // 10), recipe.train.seed, drops)
            valid = ValidationText(
                src, tgt, [data.tgt_langs[file] for file in files_of] if recipe.languages.tags else []
            )
            reporter.say(f"No validation text is given: {len(src):,} pairs are held out of training.")
    if corpus.dropped:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in corpus.dropped.most_common())
        reporter.say(f"Of {num_lines:,} pairs {reasons}; see {run / 'dropped.tsv'}.")
    if not len(corpus) or not valid.src:
        why = f"{run / 'dropped.tsv'} lists the others with the reason" if corpus.dropped else "give more text"
        raise TextError(
            f"of {num_lines:,} pairs {len(corpus):,} are left to train on and {len(valid.src):,} to validate on: "
            f"too few; {why}."
        )
    if not rows_of_epoch(corpus.groups(data)):
        raise TextError("data.weights leave no pair in an epoch: raise them; 1 is every pair once.")
    return Texts(src_subwords, tgt_subwords, corpus, valid)


def check_alike(texts: Texts, world: World) -> None:
    """Refuse to go on where the ranks have not read the same text, or not learnt the same pieces."""
    own = {
        name: hashlib.sha256(content).hexdigest()
        for name, content in (
            ("subwords", texts.src_subwords.proto + texts.tgt_subwords.proto),
            ("text to train on", texts.corpus.fingerprint().encode()),
            ("text to validate on", repr(texts.valid).encode()),
        )
    }
    first, *others = world.gather(own)
    for rank, other in enumerate(others, 1):
        if differ := " and ".join(name for name in first if other[name] != first[name]):
            raise TrainingError(
                f"rank {rank} has other {differ} than rank 0: give all machines the same files, and subwords that were "
                "learnt before (subwords.model)."
            )


def read_validation(
    recipe: Recipe, src_subwords: Subwords, tgt_subwords: Subwords, drops: TextIO, reporter: Reporter
) -> ValidationText:
    """The given text; a line that is too long to be scored at once is left out, counted and listed."""
    data = recipe.data
    valid, limit, num_long = ValidationText([], [], []), LONGEST_SCORED - 1, 0
    if recipe.model.positions == "learned":
        limit = min(limit, recipe.model.max_positions - 1)
    for number, file in enumerate(open_pairs(data.valid_src, data.valid_tgt, data.valid_tsv)):
        file.check()
        for line, (a, b, c, d) in enumerate(file.spans()):
            is_long = max(b - a, d - c) > limit * MAX_BYTES_OF_A_PIECE  # such a line is not even read
            src, tgt = ("", "") if is_long else (file.src.data[a:b].decode(), file.tgt.data[c:d].decode())
            if is_long or max(len(src_subwords.encode(src)), len(tgt_subwords.encode(tgt))) >= limit:
                drops.write(f"too long to validate on\t{file.where(line)}\n")
                num_long += 1
                continue
            valid.src.append(src)
            valid.tgt.append(tgt)
            if recipe.languages.tags:
                valid.to.append(data.valid_tgt_langs[number])
    if num_long:
        reporter.say(f"{num_long:,} lines are too long to validate on (over {limit:,} pieces); see {drops.name}.")
    if not valid.src:
        first = (*data.valid_src, *data.valid_tsv)[0]
        why = f"has lines of over {limit:,} pieces alone" if num_long else "is empty"
        raise TextError(f"{first} {why}: there is nothing to validate on.")
    return valid


def get_subwords(
    recipe: Recipe, start: StoredModel | None, files: list[PairFile], cache: Path, reporter: Reporter
) -> tuple[Subwords, Subwords]:
    """The subwords of the model that is gone on from, or given, or learnt from the corpora."""
    config = recipe.subwords
    if start:
        return start.src_subwords, start.tgt_subwords
    if config.model:
        return (subwords := load_subwords(Path(config.model))), subwords
    if config.src_model:
        return load_subwords(Path(config.src_model)), load_subwords(Path(config.tgt_model))
    if config.joint:
        joint = learn_once(recipe, files, (True, True), cache, reporter)
        return joint, joint
    return (
        learn_once(recipe, files, (True, False), cache, reporter),
        learn_once(recipe, files, (False, True), cache, reporter),
    )


def learn_once(
    recipe: Recipe, files: list[PairFile], sides: tuple[bool, bool], cache: Path, reporter: Reporter
) -> Subwords:
    """Subwords learnt from one side of a text or both; those of the same text, size and kind are in the cache."""
    config = recipe.subwords
    texts = [(file.src.digest, file.tgt.digest, file.is_tsv) for file in files]
    key = hashlib.sha256(repr((texts, sides, config.size, config.type, LEARNING_LINES)).encode()).hexdigest()[:32]
    path = cache / f"subwords-{key}.model"
    if path.exists():
        return load_subwords(path)
    for file in files:
        file.check()
    if not any(file.src.num_lines for file in files):
        raise TextError(f"{files[0].src.path} is empty: there is nothing to train on.")
    with reporter.bar("learning subwords", None):
        subwords = interruptible(lambda: learn(lines_to_learn_from(files, *sides), config.size, config.type))
    if subwords.num_pieces < config.size:
        reporter.say(f"The text holds {subwords.num_pieces:,} subwords, fewer than the {config.size:,} asked for.")
    try:
        with making(path) as new:
            write_file(new / path.name, subwords.proto)
            (new / path.name).replace(path)
    except OSError as error:
        raise TextError(
            f"cannot write the subwords to {cache}: {error.strerror}. Make room there, or let DIGLOT_CACHE name "
            "another directory."
        ) from None
    return subwords
