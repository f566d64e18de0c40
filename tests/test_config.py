"""Recipes: where the value of an option comes from, what is refused and in which words, TOML out and in again."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diglot.config import (
    PRESETS,
    DataConfig,
    LanguagesConfig,
    ModelConfig,
    ModelSpec,
    Recipe,
    SearchConfig,
    SubwordsConfig,
    TrainConfig,
    differences,
    from_dict,
    load_recipe,
    to_toml,
    update_section,
)
from diglot.errors import ConfigError

Write = Callable[[str, str | bytes], Path]

SECTIONS = {
    "model": ModelConfig,
    "languages": LanguagesConfig,
    "subwords": SubwordsConfig,
    "data": DataConfig,
    "train": TrainConfig,
    "search": SearchConfig,
}
OPTIONS = [(name, field) for name, section in SECTIONS.items() for field in dataclasses.fields(section)]


def with_meta(key: str) -> list[object]:
    """The options whose field says something of `key`, each as a parameter with its name."""
    return [
        pytest.param(section, field, id=f"{section}.{field.name}")
        for section, field in OPTIONS
        if field.metadata[key] not in (None, ())
    ]


def again(config: Recipe | ModelSpec, *, comments: bool = False) -> Recipe | ModelSpec:
    """A config after a journey through TOML."""
    return from_dict(type(config), tomllib.loads(to_toml(config, comments=comments)), "here")


# ------------------------------------------------------------------- the defaults and the presets


def test_the_default_is_the_papers_base_model() -> None:
    recipe = load_recipe(None)
    model, train, search = recipe.model, recipe.train, recipe.search
    assert recipe == Recipe() == load_recipe(None, "base")
    assert (model.d_model, model.d_ff, model.num_heads) == (512, 2048, 8)
    assert (model.num_encoder_layers, model.num_decoder_layers, model.dropout) == (6, 6, 0.1)
    assert (model.norm, model.positions, model.tie, model.activation) == ("post", "sinusoidal", "all", "relu")
    assert (model.attention_dropout, model.ffn_dropout) == (0, 0)
    assert (model.attention_bias, model.output_bias) == (False, False)
    assert (train.warmup_steps, train.label_smoothing, train.update_pieces) == (4000, 0.1, 25_000)
    assert (train.max_updates, train.average) == (100_000, 5)
    assert (train.learning_rate_scale, train.clip_norm) == (1, 0)
    assert (search.method, search.beam_size, search.length_penalty, search.max_extra) == ("beam", 4, 0.6, 50)
    assert (recipe.subwords.size, recipe.subwords.joint) == (37_000, True)


def test_big_is_the_papers_big_model() -> None:
    big, base = load_recipe(None, "big"), Recipe()
    assert {key: value for key, (_, value) in differences(base, big).items()} == {
        "model.d_model": 1024,
        "model.d_ff": 4096,
        "model.num_heads": 16,
        "model.dropout": 0.3,
        "train.max_updates": 300_000,
        "train.average": 20,
    }


def test_the_presets_grow_from_tiny_to_big() -> None:
    shapes = [load_recipe(None, name).model for name in ("tiny", "small", "base", "big")]
    assert [m.d_model for m in shapes] == [128, 256, 512, 1024]
    assert [m.d_ff for m in shapes] == [256, 1024, 2048, 4096]
    assert [m.num_heads for m in shapes] == [4, 4, 8, 16]
    assert [(m.num_encoder_layers, m.num_decoder_layers) for m in shapes] == [(4, 4), (6, 6), (6, 6), (6, 6)]
    assert set(PRESETS) == {"tiny", "small", "base", "big"}


# ------------------------------------------------------------------- where a value comes from


def test_a_file_goes_over_its_preset_and_an_override_over_the_file(write: Write) -> None:
    path = write("r.toml", 'preset = "tiny"\n[model]\nd_ff = 300\n[train]\nseed = 5\nwarmup_steps = 7\n')
    recipe = load_recipe(path, overrides=("train.seed=6", "train.patience=1", "train.seed=8"))
    assert recipe.model.d_model == 128  # the preset's
    assert (recipe.model.d_ff, recipe.train.warmup_steps) == (300, 7)  # the file's, over the preset's
    assert (recipe.train.seed, recipe.train.patience) == (8, 1)  # the last override's
    assert recipe.train.label_smoothing == 0.1  # the default


def test_a_preset_that_is_asked_for_goes_over_the_one_that_the_file_names(write: Write) -> None:
    path = write("r.toml", 'preset = "tiny"\n[train]\nseed = 5\n')
    recipe = load_recipe(path, "small")
    assert (recipe.model.d_model, recipe.train.seed) == (256, 5)


def test_loading_leaves_the_presets_as_they_are() -> None:
    load_recipe(None, "tiny", ("model.d_model=64", "search.beam_size=2"))
    assert load_recipe(None, "tiny").model.d_model == 128
    assert "search" not in PRESETS["tiny"]


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("train.seed=2", 2),
        (" train.seed = 2 ", 2),
        ("train.learning_rate_scale=2", 2.0),
        ("train.clip_norm=1e-3", 0.001),
        ("train.tensorboard=true", True),
        ("train.out=runs/de-en", "runs/de-en"),
        ('train.out="runs/de en"', "runs/de en"),
        ("train.out=a=b.c", "a=b.c"),
        ("train.out=C:\\new", "C:\\new"),
        ("train.out=", ""),
        ("languages.src=no", "no"),
        ("data.tsv=a.tsv", ("a.tsv",)),
        ('data.tsv=["a.tsv", "b.tsv"]', ("a.tsv", "b.tsv")),
    ],
)
def test_an_override_is_a_toml_value_or_else_a_string(word: str, value: object) -> None:
    section, key = word.partition("=")[0].strip().split(".")
    assert getattr(getattr(load_recipe(None, overrides=(word,)), section), key) == value


@pytest.mark.parametrize("word", ["", "=", "seed=3", "train.=3", ".seed=3", "train.seed", "train seed 3"])
def test_an_override_of_another_form_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match=r"is no option: write section\.key=value"):
        load_recipe(None, overrides=(word,))


# ------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[modle]\n", "unknown section 'modle'; did you mean 'model'?"),
        ("[zzz]\n", "unknown section 'zzz'; known are: model, languages, subwords, data, train, search."),
        ("[model]\nd_mode = 3\n", "unknown key 'model.d_mode'; did you mean 'd_model'?"),
        ("[search]\nbeam = 3\n", "unknown key 'search.beam'; did you mean 'beam_size'?"),
        ("[languages]\nzzzzz = 3\n", "unknown key 'languages.zzzzz'; known are: src, tgt, tags."),
        ("train = 3\n", "'train' is a section: write [train] and its keys below it."),
    ],
)
def test_an_unknown_name_is_refused_with_the_file_and_the_nearest_known(write: Write, text: str, words: str) -> None:
    path = write("r.toml", text)
    with pytest.raises(ConfigError) as caught:
        load_recipe(path)
    assert str(caught.value) == f"{path}: {words}"


def test_an_unknown_name_in_an_override_is_refused_with_the_override() -> None:
    with pytest.raises(ConfigError, match=r"^'train\.sed=3': unknown key 'train\.sed'; did you mean 'seed'\?$"):
        load_recipe(None, overrides=("train.sed=3",))


def test_an_unknown_preset_is_refused_with_the_nearest(write: Write) -> None:
    with pytest.raises(ConfigError, match=r"unknown preset 'bse'; did you mean 'base'\?"):
        load_recipe(None, "bse")
    with pytest.raises(ConfigError, match=r"unknown preset 'tinny'; did you mean 'tiny'\?"):
        load_recipe(write("r.toml", 'preset = "tinny"\n'))


@pytest.mark.parametrize("value", ["5", "true", '["tiny"]', "{ name = 'tiny' }"])
def test_a_preset_that_is_no_string_is_refused(write: Write, value: str) -> None:
    path = write("r.toml", f"preset = {value}\n")
    with pytest.raises(ConfigError, match="preset"):
        load_recipe(path)


@pytest.mark.parametrize(
    ("section", "key", "value", "words"),
    [
        ("train", "seed", True, "train.seed = True must be a whole number."),
        ("train", "seed", 1.0, "train.seed = 1.0 must be a whole number."),
        ("train", "seed", "1", "train.seed = '1' must be a whole number."),
        ("train", "clip_norm", "1", "train.clip_norm = '1' must be a number."),
        ("train", "clip_norm", True, "train.clip_norm = True must be a number."),
        ("train", "tensorboard", 1, "train.tensorboard = 1 must be true or false."),
        ("train", "out", 2024, "train.out = 2024 must be a string."),
        ("data", "src", 3, "data.src = 3 must be a list of strings."),
        ("data", "src", ["a", 3], "data.src = ['a', 3] must be a list of strings."),
    ],
)
def test_a_value_of_another_type_is_refused(section: str, key: str, value: object, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_dict(Recipe, {section: {key: value}}, "here")
    assert str(caught.value) == words


@pytest.mark.parametrize(("section", "field"), with_meta("low"))
def test_a_value_below_its_least_is_refused(section: str, field: dataclasses.Field[object]) -> None:
    low = field.metadata["low"]
    for value in (low - 1, -math.inf, math.nan):
        with pytest.raises(ConfigError, match=rf"^{section}\.{field.name} = {value!r} must be at least {low}\.$"):
            SECTIONS[section](**{field.name: value})


@pytest.mark.parametrize(("section", "field"), with_meta("high"))
def test_a_value_above_its_most_is_refused(section: str, field: dataclasses.Field[object]) -> None:
    high = field.metadata["high"]
    for value in (high + 1, math.inf):
        with pytest.raises(ConfigError, match=rf"^{section}\.{field.name} = {value!r} must be at most {high}\.$"):
            SECTIONS[section](**{field.name: value})


@pytest.mark.parametrize(("section", "field"), with_meta("low"))
def test_every_number_has_a_bound_that_its_default_keeps(section: str, field: dataclasses.Field[object]) -> None:
    low, high = field.metadata["low"], field.metadata["high"]
    assert low <= field.default <= (math.inf if high is None else high), section


def test_every_number_has_a_least_value() -> None:
    numbers = {f"{section}.{f.name}" for section, f in OPTIONS if isinstance(f.default, int | float)}
    unbounded = {f"{section}.{f.name}" for section, f in OPTIONS if f.metadata["low"] is None}
    booleans = {f"{section}.{f.name}" for section, f in OPTIONS if isinstance(f.default, bool)}
    assert numbers & unbounded == booleans


@pytest.mark.parametrize(("section", "field"), with_meta("choices"))
def test_a_choice_takes_its_words_and_no_others(section: str, field: dataclasses.Field[object]) -> None:
    choices = field.metadata["choices"]
    for word in choices:
        assert getattr(SECTIONS[section](**{field.name: word}), field.name) == word
    with pytest.raises(ConfigError) as caught:
        SECTIONS[section](**{field.name: "other"})
    assert str(caught.value) == f"{section}.{field.name} = 'other' is none of: {', '.join(choices)}."


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("model.d_model=513",), "model.d_model = 513 must be even and divisible by model.num_heads = 8"),
        (("model.d_model=9", "model.num_heads=3"), "must be even"),
        (("model.num_heads=7",), "divisible by model.num_heads = 7"),
        (("subwords.joint=false",), "model.tie = 'all' shares one matrix"),
        (("subwords.src_model=a", "subwords.joint=false", "model.tie=none"), "together"),
        (("subwords.tgt_model=a", "subwords.joint=false", "model.tie=none"), "together"),
        (("subwords.model=a", "subwords.src_model=b", "subwords.tgt_model=c"), "give either subwords.model"),
        (("subwords.src_model=b", "subwords.tgt_model=c"), "need subwords.joint = false"),
        (("subwords.model=a", "subwords.joint=false", "model.tie=none"), "needs subwords.joint = true"),
        (("data.src=a",), "data.src names 1 files and data.tgt 0"),
        (("data.tgt=a",), "data.src names 0 files and data.tgt 1"),
        (("data.valid_src=['a', 'b']", "data.valid_tgt=c"), "data.valid_src names 2 files and data.valid_tgt 1"),
        (
            ("model.positions=learned", "data.max_pieces=2000"),
            "data.max_pieces = 2000 is more than model.max_positions",
        ),
        (("search.num_best=5",), "search.num_best = 5 asks for more than search.beam_size = 4"),
        (("search.method=greedy", "search.num_best=2"), "greedy search finds one translation"),
    ],
)
def test_a_combination_that_cannot_be_is_refused(overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(None, overrides=overrides)
    assert words in str(caught.value)
    assert str(caught.value).endswith(".")


@pytest.mark.parametrize(
    "overrides",
    [
        ("model.tie=output", "subwords.joint=false"),
        ("model.tie=none", "subwords.joint=false", "subwords.src_model=a", "subwords.tgt_model=b"),
        ("model.tie=none",),
        ("subwords.model=a",),
        ("search.method=sample", "search.num_best=9"),
        ("search.num_best=4",),
        ("model.d_k=7",),
        ("model.positions=learned", "data.max_pieces=1024"),
        ("data.src=['a', 'b']", "data.tgt=['c', 'd']"),
    ],
)
def test_a_combination_that_can_be_is_taken(overrides: tuple[str, ...]) -> None:
    assert again(load_recipe(None, overrides=overrides)) == load_recipe(None, overrides=overrides)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, write: Write) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*missing\.toml: No such file or directory\."):
        load_recipe(tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_recipe(tmp_path)
    for name, content in (("broken.toml", b"[model\n"), ("latin.toml", b'[train]\nout = "\xfc"\n')):
        with pytest.raises(ConfigError, match=rf"{name} is not TOML"):
            load_recipe(write(name, content))


# ------------------------------------------------------------------- out and in again


@given(st.text(max_size=20), st.lists(st.text(max_size=9), max_size=3), st.floats(0, 1e300), st.integers(0, 2**63 - 1))
def test_what_toml_says_is_read_back_as_it_was(text: str, names: list[str], number: float, seed: int) -> None:
    recipe = Recipe(
        languages=LanguagesConfig(src=text),
        data=DataConfig(src=tuple(names), tgt=tuple(names), valid_tsv=(text,)),
        train=TrainConfig(out=text, learning_rate_scale=number, seed=seed),
    )
    assert again(recipe) == again(recipe, comments=True) == recipe


@pytest.mark.parametrize("text", ['"', "\\", '\\"', "\n", "\r\n", "\t", "\0", "\x7f", "\x85", "\u2028", "ü", "𝄞", "#"])
def test_every_odd_character_survives_toml(text: str) -> None:
    assert again(Recipe(train=TrainConfig(out=text))).train.out == text


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_read_back_as_it_was(preset: str, write: Write) -> None:
    recipe = load_recipe(None, preset)
    assert load_recipe(write("config.toml", to_toml(recipe))) == recipe
    spec = ModelSpec(recipe.model, recipe.languages, recipe.search)
    assert again(spec) == spec


def test_comments_explain_every_key_and_change_no_value() -> None:
    text = to_toml(Recipe(), comments=True)
    assert tomllib.loads(text) == tomllib.loads(to_toml(Recipe()))
    keys = [line for line in text.split("\n") if " = " in line.partition("#")[0]]
    assert len(keys) == len(OPTIONS)
    for line, (_, field) in zip(keys, OPTIONS, strict=True):
        name, value, comment = line.split()[0], *line.split(" # ", 1)
        assert name == field.name, value
        assert len(comment.split()) >= 2
        assert all(word in comment for word in field.metadata["choices"])


# ------------------------------------------------------------------- comparing and changing


def test_differences_name_each_key_that_differs_with_both_values() -> None:
    old = Recipe()
    new = load_recipe(None, overrides=("train.seed=2", "search.beam_size=5", "data.tsv=a"))
    assert differences(old, new) == {
        "data.tsv": ((), ("a",)),
        "train.seed": (1, 2),
        "search.beam_size": (4, 5),
    }
    assert differences(new, new) == {}


def test_a_section_is_changed_under_the_same_rules_as_a_file() -> None:
    search = update_section(SearchConfig(), {"beam_size": 8, "length_penalty": 1})
    assert search == SearchConfig(beam_size=8, length_penalty=1.0)
    for options, words in (
        ({"beam": 8}, "unknown key 'search.beam'; did you mean 'beam_size'?"),
        ({"beam_size": 0}, "search.beam_size = 0 must be at least 1."),
        ({"beam_size": "8"}, "search.beam_size = '8' must be a whole number."),
        ({"num_best": 5}, "raise the beam size"),
    ):
        with pytest.raises(ConfigError) as caught:
            update_section(SearchConfig(), options)
        assert words in str(caught.value)
