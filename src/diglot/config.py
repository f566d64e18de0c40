"""Every option of diglot, its default, its bounds and its meaning, in one place. TOML in and out.

The defaults are the paper's base model and its training ("Attention Is All You Need", sections 5 and 6.1,
Table 3). A recipe is a TOML file with these sections; a model directory keeps the part that translating needs.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast, get_type_hints

from diglot.errors import ConfigError

T = TypeVar("T")


def option(
    default: Any,
    meaning: str,
    *,
    choices: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
) -> Any:
    """A field with its meaning and its bounds."""
    return field(default=default, metadata={"help": meaning, "choices": choices, "low": low, "high": high})


@dataclass(frozen=True)
class ModelConfig:
    """The network, section 3 and Table 3 of the paper."""

    d_model: int = option(512, "width of the network", low=2, high=1 << 16)
    d_ff: int = option(2048, "inner width of the feed-forward layers", low=1, high=1 << 20)
    num_heads: int = option(8, "attention heads", low=1, high=1 << 16)
    d_k: int = option(0, "width of a query and key in one head; 0: d_model / num_heads", low=0, high=1 << 16)
    num_encoder_layers: int = option(6, "layers of the encoder", low=1, high=1000)
    num_decoder_layers: int = option(6, "layers of the decoder", low=1, high=1000)
    dropout: float = option(0.1, "dropout of each sub-layer's output and of the embeddings", low=0, high=0.95)
    attention_dropout: float = option(0.0, "dropout of the attention weights", low=0, high=0.95)
    ffn_dropout: float = option(0.0, "dropout inside the feed-forward layers", low=0, high=0.95)
    norm: str = option("post", "layer norm after each residual sum, or before each sub-layer", choices=("post", "pre"))
    positions: str = option("sinusoidal", "how positions are told", choices=("sinusoidal", "learned"))
    max_positions: int = option(1024, "positions that learned positions can tell apart", low=1, high=1 << 16)
    position_base: float = option(10_000.0, "of the sinusoids' periods; Marian's is 10000 ** (d_model / (d_model - 2))",
                                  low=1, high=1e9)  # fmt: skip
    tie: str = option(
        "all", "one matrix for both embeddings and the output, for target and output, or none shared",
        choices=("all", "output", "none"),
    )  # fmt: skip
    activation: str = option("relu", "between the two feed-forward matrices", choices=("relu", "swish", "gelu"))
    attention_bias: bool = option(False, "a bias in the four attention projections")
    output_bias: bool = option(False, "a bias on the output pieces")
    norm_epsilon: float = option(1e-6, "added to the variance in layer norm; MarianMT has 1e-5", low=1e-12, high=1e-2)

    def __post_init__(self) -> None:
        _check(self)
        if self.d_model % self.num_heads or self.d_model % 2:
            raise ConfigError(
                f"model.d_model = {self.d_model} must be even and divisible by model.num_heads = {self.num_heads}; "
                "change one of them."
            )


@dataclass(frozen=True)
class LanguagesConfig:
    """What the model translates."""

    src: str = option("", "code of the source language, as de")
    tgt: str = option("", "code of the target language, as en: it chooses how scores split words")
    tags: tuple[str, ...] = option((), "several target languages, each chosen by a tag; follows from data.tgt_langs")

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True)
class SubwordsConfig:
    """How text becomes pieces."""

    type: str = option("unigram", "how SentencePiece learns the pieces", choices=("unigram", "bpe"))
    size: int = option(37000, "number of pieces, of each side where joint is false", low=330, high=1_000_000)
    joint: bool = option(True, "one vocabulary for both sides")
    model: str = option("", "a SentencePiece model to use instead of learning one")
    src_model: str = option("", "the same for the source side alone, where joint is false")
    tgt_model: str = option("", "the same for the target side alone, where joint is false")
    sampling: float = option(
        0.0, "another split of each sentence in each epoch: unigram's alpha or BPE's dropout; 0: always the best",
        low=0, high=1,
    )  # fmt: skip

    def __post_init__(self) -> None:
        _check(self)
        if bool(self.src_model) != bool(self.tgt_model) or (self.model and self.src_model):
            raise ConfigError(
                "subwords: give either subwords.model, for both sides, or subwords.src_model and "
                "subwords.tgt_model together."
            )
        if self.src_model and self.joint:
            raise ConfigError("subwords.src_model and subwords.tgt_model need subwords.joint = false.")
        if self.model and not self.joint:
            raise ConfigError(
                "subwords.model serves both sides, which needs subwords.joint = true; for two vocabularies give "
                "subwords.src_model and subwords.tgt_model."
            )


@dataclass(frozen=True)
class DataConfig:
    """The corpora. A name that ends in .gz is decompressed on the way in."""

    src: tuple[str, ...] = option((), "source text files, a sentence a line")
    tgt: tuple[str, ...] = option((), "target text files, in the order of the source files")
    tsv: tuple[str, ...] = option((), "files of lines 'source TAB target'")
    valid_src: tuple[str, ...] = option((), "source text to validate on")
    valid_tgt: tuple[str, ...] = option((), "its translation")
    valid_tsv: tuple[str, ...] = option((), "or both in one file")
    weights: tuple[float, ...] = option(
        (), "how often the pairs of each of these files come in an epoch, as 2 or 0.5; () is once"
    )
    temperature: float = option(
        1.0, "above 1 small files come more often: the share of a file is as its size ** (1 / temperature)", low=1
    )
    tgt_langs: tuple[str, ...] = option((), "target language of each of these files: one model for several languages")
    valid_tgt_langs: tuple[str, ...] = option((), "the same of the files to validate on")
    held_out: int = option(1000, "pairs held out to validate on where no validation text is given", low=1)
    max_pieces: int = option(256, "a pair with more pieces on a side is dropped, and counted", low=1)
    max_ratio: float = option(9.0, "so is a pair with more pieces on one side than this times the other", low=1)
    drop_duplicates: bool = option(False, "drop a pair that stood in the corpus before")
    drop_same: bool = option(False, "drop a pair whose sides are the same text")
    micro_batch: int | str = option(
        8192,
        "padded pieces of both sides that go through the network at once: memory, not learning; 'auto': as many as fit",
        low=1,
    )

    def __post_init__(self) -> None:
        _check(self)
        for one, two in (("src", "tgt"), ("valid_src", "valid_tgt")):
            num_one, num_two = len(getattr(self, one)), len(getattr(self, two))
            if num_one != num_two:
                raise ConfigError(
                    f"data.{one} names {num_one} files and data.{two} {num_two}: "
                    "each source file needs its translation."
                )
        num_files, num_valid = len(self.src) + len(self.tsv), len(self.valid_src) + len(self.valid_tsv)
        for name, num in (("weights", num_files), ("tgt_langs", num_files), ("valid_tgt_langs", num_valid)):
            if (given := len(getattr(self, name))) not in (0, num):
                raise ConfigError(
                    f"data.{name} has {given} entries for {num} files: give one for each pair of files, then one for "
                    "each TSV file."
                )
        if any(not 0 < weight <= 1000 for weight in self.weights):
            raise ConfigError(f"data.weights = {list(self.weights)!r} must be above 0 and at most 1000.")


@dataclass(frozen=True)
class TrainConfig:
    """The training, section 5 of the paper."""

    out: str = option("", "the run directory to write")
    init: str = option("", "a model directory to start from (fine-tuning): its network and subwords are kept")
    seed: int = option(1, "every random choice follows from it", low=0)
    max_updates: int = option(100_000, "updates at most", low=1)
    update_pieces: int = option(25_000, "target pieces of an update", low=1)
    warmup_steps: int = option(4000, "updates until the learning rate peaks", low=1)
    learning_rate_scale: float = option(1.0, "times the paper's learning rate", low=0)
    label_smoothing: float = option(0.1, "probability given to all pieces alike", low=0, high=0.9)
    clip_norm: float = option(0.0, "largest norm of the gradient; 0: no clipping, as the paper", low=0)
    valid_every: int = option(1000, "updates between checkpoints; each is validated", low=1)
    patience: int = option(10, "stop after so many validations without a better BLEU; 0: never", low=0)
    average: int = option(5, "checkpoints, the last ones, whose mean becomes the final model", low=1)
    log_every: int = option(50, "updates between lines of log.jsonl", low=1)
    tensorboard: bool = option(False, "curves for TensorBoard too (pip install 'diglot[track]')")
    watch: int = option(0, "a line of the validation text whose attention is kept at each validation; 0: none", low=0)
    precision: str = option(
        "auto",
        "of the matrix products; auto: bf16 where that is faster, as measured at the start",
        choices=("auto", "fp32", "bf16"),
    )
    strategy: str = option(
        "ddp", "with several ranks: each holds the whole network, or a share of it", choices=("ddp", "fsdp")
    )
    rank_timeout: float = option(600.0, "seconds after which a rank that does not answer ends the run", low=1, high=1e6)
    device: str = option("auto", "auto: a GPU where there is one", choices=("auto", "cpu", "cuda"))
    threads: int = option(0, "CPU threads; 0: one a core", low=0)

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True)
class SearchConfig:
    """The decoding, section 6.1 of the paper."""

    method: str = option("beam", "how a translation is looked for", choices=("beam", "greedy", "sample"))
    beam_size: int = option(4, "hypotheses that the beam keeps", low=1, high=1000)
    length_penalty: float = option(0.6, "alpha: a score is log P / ((5 + pieces) / 6) ** alpha", low=0, high=10)
    max_extra: int = option(50, "a translation has at most the pieces of its source and so many more", low=0)
    num_best: int = option(1, "translations of each segment", low=1, high=1000)
    temperature: float = option(1.0, "of sampling: below 1 nearer to greedy", low=1e-3, high=1000)
    top_k: int = option(0, "sample among the k most probable pieces; 0: among all", low=0)
    top_p: float = option(1.0, "sample among the most probable pieces that hold this probability", low=1e-6, high=1)
    seed: int = option(1, "of sampling", low=0)
    max_segment: int = option(
        0, "source pieces translated at once; longer lines are split at sentence ends; 0: as long as seen in training",
        low=0,
    )  # fmt: skip

    def __post_init__(self) -> None:
        _check(self)
        if self.method == "beam" and self.num_best > self.beam_size:
            raise ConfigError(
                f"search.num_best = {self.num_best} asks for more than search.beam_size = {self.beam_size} hypotheses; "
                "raise the beam size."
            )
        if self.method == "greedy" and self.num_best > 1:
            raise ConfigError("search.num_best: greedy search finds one translation; use beam or sample for more.")


@dataclass(frozen=True)
class Recipe:
    """All that a training run is made from."""

    model: ModelConfig = field(default_factory=ModelConfig)
    languages: LanguagesConfig = field(default_factory=LanguagesConfig)
    subwords: SubwordsConfig = field(default_factory=SubwordsConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    search: SearchConfig = field(default_factory=SearchConfig)

    def __post_init__(self) -> None:
        if self.model.tie == "all" and not self.subwords.joint:
            raise ConfigError(
                "model.tie = 'all' shares one matrix between the languages, which needs subwords.joint = true; "
                "with a vocabulary for each side use model.tie = 'output'."
            )
        if self.model.positions == "learned" and self.data.max_pieces > self.model.max_positions:
            raise ConfigError(
                f"data.max_pieces = {self.data.max_pieces} is more than model.max_positions = "
                f"{self.model.max_positions}, which is all that learned positions can tell apart; "
                "lower the one or raise the other."
            )
        if self.data.micro_batch == "auto" and self.train.strategy == "fsdp":
            raise ConfigError("data.micro_batch = 'auto' cannot be tried with train.strategy = 'fsdp'; give a number.")


@dataclass(frozen=True)
class AlignmentConfig:
    """Which heads of the cross attention tell what stands for what; chosen at the end of training."""

    layer: int = option(0, "layer of the decoder, counted from 1; 0: not chosen", low=0)
    heads: tuple[int, ...] = option((), "its heads, counted from 1, whose mean is read")

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True)
class ModelSpec:
    """What a model directory says of itself: enough to translate, and nothing of where it was made."""

    model: ModelConfig = field(default_factory=ModelConfig)
    languages: LanguagesConfig = field(default_factory=LanguagesConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    alignment: AlignmentConfig = field(default_factory=AlignmentConfig)

    def __post_init__(self) -> None:
        layer, heads = self.alignment.layer, self.alignment.heads
        is_there = layer <= self.model.num_decoder_layers and all(0 < head <= self.model.num_heads for head in heads)
        if not is_there or bool(layer) != bool(heads):
            raise ConfigError(
                f"alignment.layer = {layer} and alignment.heads = {list(heads)!r} name no heads of this network; "
                "leave both out."
            )


# The presets: base and big are the paper's (Table 3); tiny and small suit a laptop and small corpora, and are pre-norm,
# because post-norm at their learning rates was seen to learn the target language long before it looked at the source.
PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "tiny": {
        "model": {"d_model": 128, "d_ff": 256, "num_heads": 4, "num_encoder_layers": 4, "num_decoder_layers": 4,
                  "norm": "pre", "dropout": 0.2},
        "data": {"micro_batch": 16384},
        "subwords": {"size": 8000},
        "train": {"update_pieces": 4096, "warmup_steps": 1000, "learning_rate_scale": 1.5, "max_updates": 20_000,
                  "valid_every": 500},
    },
    "small": {
        "model": {"d_model": 256, "d_ff": 1024, "num_heads": 4, "norm": "pre"},
        "subwords": {"size": 16000},
        "train": {"update_pieces": 8192, "max_updates": 50_000},
    },
    "base": {},
    "big": {
        "model": {"d_model": 1024, "d_ff": 4096, "num_heads": 16, "dropout": 0.3},
        "train": {"max_updates": 300_000, "average": 20},
    },
}  # fmt: skip


def _check(section: Any) -> None:
    """Refuse a value out of its bounds, by name."""
    name = type(section).__name__.removesuffix("Config").lower()
    for f in dataclasses.fields(section):
        value, meta = getattr(section, f.name), f.metadata
        if meta["choices"] and value not in meta["choices"]:
            raise ConfigError(f"{name}.{f.name} = {value!r} is none of: {', '.join(meta['choices'])}.")
        if value == "auto":  # in place of a number
            continue
        for bound, word, wrong in (
            (meta["low"], "least", meta["low"] is not None and not value >= meta["low"]),
            (meta["high"], "most", meta["high"] is not None and not value <= meta["high"]),
        ):
            if wrong:
                raise ConfigError(f"{name}.{f.name} = {value!r} must be at {word} {bound}.")


@cache
def _types(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _nearest(key: str, keys: list[str]) -> str:
    near = difflib.get_close_matches(key, keys, n=1, cutoff=0.5)
    return f"did you mean '{near[0]}'?" if near else f"known are: {', '.join(keys)}."


def _convert(name: str, value: Any, kind: Any) -> Any:
    """A TOML value as the type of its field; whole numbers stand for floats, one string for a list of one."""
    if kind == tuple[str, ...]:
        items: Any = [value] if isinstance(value, str) else value
        if isinstance(items, list | tuple) and all(isinstance(item, str) for item in cast("list[Any]", items)):
            return tuple(cast("list[str]", items))
        raise ConfigError(f"{name} = {value!r} must be a list of strings.")
    if kind in (tuple[float, ...], tuple[int, ...]):
        is_whole = kind == tuple[int, ...]
        numbers = cast("list[Any]", value if isinstance(value, list | tuple) else [value])
        if all(type(number) is int or (type(number) is float and not is_whole) for number in numbers):
            return tuple(numbers) if is_whole else tuple(float(number) for number in numbers)
        raise ConfigError(f"{name} = {value!r} must be a list of {'whole ' if is_whole else ''}numbers.")
    if kind == int | str:
        if value == "auto" or type(value) is int:
            return value
        raise ConfigError(f"{name} = {value!r} must be a whole number or 'auto'.")
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        words = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
        raise ConfigError(f"{name} = {value!r} must be {words[kind]}.")
    if kind is int and abs(value) >> 63:
        raise ConfigError(f"{name} = {value!r} must be a number of at most 63 bits.")
    return value


def check_keys(cls: type, table: dict[str, Any], where: str) -> None:
    """Refuse a section or key that does not exist, and name the nearest that does."""
    sections = _types(cls)
    for section, values in table.items():
        if section not in sections:
            raise ConfigError(f"{where}: unknown section '{section}'; {_nearest(section, list(sections))}")
        if not isinstance(values, dict):
            raise ConfigError(f"{where}: '{section}' is a section: write [{section}] and its keys below it.")
        kinds = _types(sections[section])
        for key in cast("dict[str, Any]", values):
            if key not in kinds:
                raise ConfigError(f"{where}: unknown key '{section}.{key}'; {_nearest(key, list(kinds))}")


def from_dict(cls: type[T], table: dict[str, Any], where: str) -> T:
    """A Recipe or ModelSpec from nested tables."""
    check_keys(cls, table, where)
    parts: dict[str, Any] = {}
    for section, values in table.items():
        kinds = _types(_types(cls)[section])
        converted = {key: _convert(f"{section}.{key}", value, kinds[key]) for key, value in values.items()}
        parts[section] = _types(cls)[section](**converted)
    return cls(**parts)


def update_section(section: T, options: dict[str, Any]) -> T:
    """One section with other values, checked as those of a file are."""
    name = type(section).__name__.removesuffix("Config").lower()
    check_keys(Recipe, {name: options}, "options")
    kinds = _types(type(section))
    converted = {key: _convert(f"{name}.{key}", value, kinds[key]) for key, value in options.items()}
    return dataclasses.replace(cast("Any", section), **converted)


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not TOML, numbers too long, tables too deep
        raise ConfigError(f"{path} is not TOML: {error}.") from None


def load_recipe(path: Path | None, preset: str = "", overrides: tuple[str, ...] = ()) -> Recipe:
    """A recipe from a preset, a TOML file over it (which may name its `preset` itself), and `section.key=value`."""
    table = read_toml(path) if path else {}
    where = str(path) if path else "recipe"
    named = _convert("preset", table.pop("preset", ""), str)
    preset = preset or named or "base"
    if preset not in PRESETS:
        raise ConfigError(f"unknown preset '{preset}'; {_nearest(preset, list(PRESETS))}")
    merged: dict[str, Any] = {section: dict(values) for section, values in PRESETS[preset].items()}
    given = [(where, table), *((f"'{word}'", parse_override(word)) for word in overrides)]
    for source, tables in given:
        check_keys(Recipe, tables, source)
        for section, values in tables.items():
            merged.setdefault(section, {}).update(values)
    return from_dict(Recipe, merged, where)


def parse_override(word: str) -> dict[str, dict[str, Any]]:
    """`train.seed=2` as {"train": {"seed": 2}}; what is no TOML value is taken as a string."""
    name, equals, text = word.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and section and key):
        raise ConfigError(f"'{word}' is no option: write section.key=value, as train.warmup_steps=8000.")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    return {section: {key: value}}


def named_keys(words: list[str]) -> frozenset[str]:
    """The keys that options and SECTION.KEY=VALUE name; one that is named twice has to have one value."""
    values: dict[str, Any] = {}
    for word in words:
        for section, keys in parse_override(word).items():
            for key, value in keys.items():
                if values.setdefault(f"{section}.{key}", value) != value:
                    raise ConfigError(
                        f"{section}.{key} is given twice, as {values[f'{section}.{key}']!r} and as {value!r}; "
                        "leave one out."
                    )
    return frozenset(values)


def words_of_run(run: Path, preset: str, changed: frozenset[str]) -> list[str]:
    """What to say beside the recipe of a run, to go on with it where it is."""
    if (run / "manifest.json").exists():
        raise ConfigError(
            f"{run} is a model, not a run directory; to start from it, name another --out and --init {run}."
        )
    if not (run / "config.toml").exists():
        raise ConfigError(f"{run} is not a run directory: it has no config.toml.")
    if preset or "train.out" in changed:
        what = "--preset" if preset else "--out (train.out)"
        raise ConfigError(f"{run} goes on with its own recipe, in its own place: leave {what} out.")
    return [f"train.out={json.dumps(str(run), ensure_ascii=False)}"]


def to_toml(config: Recipe | ModelSpec, *, comments: bool = False) -> str:
    """The config as TOML; with `comments`, the meaning of every key beside it."""
    lines: list[str] = []
    for section in dataclasses.fields(config):
        lines += ["", f"[{section.name}]"]
        values = getattr(config, section.name)
        for f in dataclasses.fields(values):
            line = f"{f.name} = {_toml_value(getattr(values, f.name))}"
            choices = f" ({', '.join(f.metadata['choices'])})" if f.metadata["choices"] else ""
            lines.append(f"{line:<32} # {f.metadata['help']}{choices}" if comments else line)
    return "\n".join(lines[1:]) + "\n"


def _toml_value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            escaped = "".join(f"\\u{ord(c):04x}" if c < " " or c in '"\\\x7f' else c for c in value)
            return f'"{escaped}"'
        case tuple():
            return f"[{', '.join(_toml_value(item) for item in cast('tuple[Any, ...]', value))}]"
        case _:
            return repr(value)


def differences(old: Recipe, new: Recipe) -> dict[str, tuple[Any, Any]]:
    """The keys in which two recipes differ, with both values."""
    return {
        f"{section.name}.{f.name}": (getattr(a, f.name), getattr(b, f.name))
        for section in dataclasses.fields(old)
        for a, b in [(getattr(old, section.name), getattr(new, section.name))]
        for f in dataclasses.fields(a)
        if getattr(a, f.name) != getattr(b, f.name)
    }
