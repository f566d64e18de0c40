"""What a model directory, a run directory or a preset is."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from diglot.checkpoint import find_model, list_steps, load_model
from diglot.config import PRESETS, Recipe, from_dict, load_recipe, read_toml
from diglot.errors import ConfigError
from diglot.model import Transformer
from diglot.run import STATE

PAPER_PIECES = 37_000  # 5.1: "a shared source-target vocabulary of about 37000 tokens"


def describe(what: str) -> dict[str, Any]:
    """Facts by section, of whatever `what` names."""
    path = Path(what)
    if what in PRESETS and not path.exists():
        return describe_preset(what)
    if not path.exists():
        raise ConfigError(f"'{what}' is neither a directory nor a preset ({', '.join(PRESETS)}).")
    if (path / "config.toml").exists() and not (path / "manifest.json").exists():
        return describe_run(path)
    return describe_model(path)


def describe_preset(name: str) -> dict[str, Any]:
    """A preset with the paper's vocabulary."""
    recipe = load_recipe(None, name)
    with torch.device("meta"):  # shapes without memory
        model = Transformer(recipe.model, PAPER_PIECES, PAPER_PIECES)
    counts = count_parameters(model)
    return {
        "preset": name,
        f"parameters at {PAPER_PIECES:,} pieces": counts,
        "model": asdict(recipe.model),
        "train": asdict(recipe.train),
        "search": asdict(recipe.search),
    }


def describe_model(path: Path) -> dict[str, Any]:
    """A model directory, checked as for translating."""
    stored = load_model(path)
    return {
        "model directory": str(stored.path),
        "languages": asdict(stored.spec.languages),
        "subwords": {"source": stored.src_subwords.num_pieces, "target": stored.tgt_subwords.num_pieces,
                     "joint": stored.src_subwords == stored.tgt_subwords},
        "parameters": count_parameters(stored.model),
        "model": asdict(stored.spec.model),
        "search": asdict(stored.spec.search),
        "alignment": asdict(stored.spec.alignment),
    }  # fmt: skip


def describe_run(path: Path) -> dict[str, Any]:
    """A run directory: where it stands, and its model."""
    recipe = from_dict(Recipe, read_toml(path / "config.toml"), str(path / "config.toml"))
    steps = list_steps(path)
    facts: dict[str, Any] = {
        "run directory": str(path),
        "checkpoints": ", ".join(step.name for step in steps) or "none",
    }
    if steps:
        state = json.loads((steps[-1] / STATE).read_bytes())
        names = ("update", "epoch", "pieces", "seconds", "skipped", "best_bleu", "best_update")
        facts["state"] = {name: state[name] for name in names}
    facts["data"] = {key: value for key, value in asdict(recipe.data).items() if value}
    facts["train"] = asdict(recipe.train)
    if find_model(path) != path:
        facts |= describe_model(path)
    return facts


def count_parameters(model: Transformer) -> dict[str, int]:
    """Parameters by part; a matrix that is shared counts where it comes first."""
    counts = {"embeddings and output": 0, "encoder": 0, "decoder": 0}
    for name, parameter in model.named_parameters():
        part = name.split(".")[0]
        counts[part if part in counts else "embeddings and output"] += parameter.numel()
    return {**counts, "all": sum(counts.values())}
