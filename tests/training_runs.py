"""Small training runs that several tests look at: a corpus made by rule and a network that learns it in seconds."""

from __future__ import annotations

import json
import random
from pathlib import Path

from diglot.config import Recipe, load_recipe
from diglot.demo import draw_value

NETWORK = (
    "model.d_model=32", "model.d_ff=64", "model.num_heads=4", "model.num_encoder_layers=1",
    "model.num_decoder_layers=1", "subwords.size=400", "train.update_pieces=300", "data.micro_batch=400",
    "train.warmup_steps=20", "train.log_every=1", "train.max_updates=6", "train.valid_every=3", "train.average=2",
    "languages.src=en", "languages.tgt=de", "search.max_extra=5", "train.threads=1",
)  # fmt: skip


def words_of(*words: str) -> list[str]:
    """NETWORK with other values, each key once."""
    return list({word.partition("=")[0]: word for word in (*NETWORK, *words)}.values())


def write_pairs(directory: Path, name: str, num: int, seed: int) -> None:
    """Numbers and times, a pair a line."""
    rng = random.Random(seed)
    values = [draw_value(rng, rng.choice(("number", "time")), is_for_testing=False) for _ in range(num)]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{name}.en").write_text("".join(f"{value.english}\n" for value in values), encoding="utf-8")
    (directory / f"{name}.de").write_text("".join(f"{value.german}\n" for value in values), encoding="utf-8")


def small_recipe(directory: Path, out: str, *words: str, num: int = 200) -> Recipe:
    """A recipe over pairs in `directory`, written if they are not there."""
    if not (directory / "train.en").exists():
        write_pairs(directory, "train", num, seed=1)
        write_pairs(directory, "valid", 8, seed=2)
    files = {"src": "train.en", "tgt": "train.de", "valid_src": "valid.en", "valid_tgt": "valid.de"}
    named = [f"data.{key}={json.dumps(str(directory / name))}" for key, name in files.items()]
    return load_recipe(None, "tiny", (*NETWORK, *named, f"train.out={json.dumps(str(directory / out))}", *words))
