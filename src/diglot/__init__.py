"""diglot: two text files in, a translation model out.

The Transformer of "Attention Is All You Need" (Vaswani et al., 2017), to train, use and understand.

>>> import diglot
>>> model = diglot.load("runs/deen/model")  # doctest: +SKIP
>>> model.translate(["Ein Hund rennt."])[0].text  # doctest: +SKIP
'A dog is running.'
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diglot.config import ModelConfig, Recipe, SearchConfig, load_recipe
    from diglot.errors import DiglotError
    from diglot.model import (
        DecoderLayer,
        EncoderLayer,
        MultiHeadAttention,
        Transformer,
        attention,
        causal_mask,
        padding_mask,
        positional_encoding,
        read_attention,
    )
    from diglot.schedule import lrate
    from diglot.search import Hypothesis, beam_search, greedy_search, sampling_search
    from diglot.training import train
    from diglot.translator import Translation, Translator, load

__version__ = "0.1.0"

# Where each public name lives. They are imported when first used: torch takes over a second, `diglot --help` none.
_HOMES = {
    "config": ["ModelConfig", "Recipe", "SearchConfig", "load_recipe"],
    "errors": ["DiglotError"],
    "model": [
        "DecoderLayer",
        "EncoderLayer",
        "MultiHeadAttention",
        "Transformer",
        "attention",
        "causal_mask",
        "padding_mask",
        "positional_encoding",
        "read_attention",
    ],
    "schedule": ["lrate"],
    "search": ["Hypothesis", "beam_search", "greedy_search", "sampling_search"],
    "training": ["train"],
    "translator": ["Translation", "Translator", "load"],
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "DecoderLayer",
    "DiglotError",
    "EncoderLayer",
    "Hypothesis",
    "ModelConfig",
    "MultiHeadAttention",
    "Recipe",
    "SearchConfig",
    "Transformer",
    "Translation",
    "Translator",
    "__version__",
    "attention",
    "beam_search",
    "causal_mask",
    "greedy_search",
    "load",
    "load_recipe",
    "lrate",
    "padding_mask",
    "positional_encoding",
    "read_attention",
    "sampling_search",
    "train",
]


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'diglot' has no attribute '{name}'")
    return getattr(import_module(f"diglot.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
