"""Attention to look at: one page that needs nothing but a browser, JSON, and a plain view for the terminal.

Layers and heads are counted from 1 where a person reads them, from 0 in arrays.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from rich.cells import cell_len

from diglot import checkpoint
from diglot.alignment import align, to_pharaoh
from diglot.config import AlignmentConfig
from diglot.drawing import PARTS, START, Picture, draw_lines, draw_map, names_of
from diglot.errors import CheckpointError, ConfigError
from diglot.translator import Attention, Weights

UNIT = (1 << 24) - 1  # a weight is kept as so many parts of one: exact to 3e-8
LARGEST = 20_000_000  # bytes of a page, beyond which what it can leave out is left out
FRAMES = "attention"  # of a run directory
SPANS = "src_words", "tgt_words"
SHADES = " ░▒▓█"


def render(
    attentions: Sequence[Attention], config: AlignmentConfig, form: str, picture: Picture, lines: bool = False
) -> str:
    """As a file whose name ends so, or as text for the terminal; a picture is of the best hypothesis."""
    match form:
        case ".html":
            return to_page(attentions, config)
        case ".json":
            return to_json(attentions, config) + "\n"
        case ".svg":
            return (draw_lines if lines else draw_map)(attentions[0], picture)
        case _:
            return "\n".join(to_text(one, picture, config) + "\n" for one in attentions)


# ------------------------------------------------------------------- JSON


def to_json(attentions: Sequence[Attention], config: AlignmentConfig) -> str:
    """All numbers, to nine decimals; docs/attention.md says what each is."""
    return json.dumps({"hypotheses": [as_dict(one, config) for one in attentions]}, ensure_ascii=False)


def as_dict(attention: Attention, config: AlignmentConfig) -> dict[str, Any]:
    """One translation in JSON's own types."""
    arrays = (*PARTS, "src_attribution", "tgt_attribution")
    found = {name: getattr(attention, name) for name in arrays}
    return {
        "source": attention.source,
        "text": attention.text,
        "score": attention.score,
        "src": attention.src,
        "tgt": attention.tgt,
        "src_words": attention.src_words,
        "tgt_words": attention.tgt_words,
        "alignment": to_pharaoh(align(attention, config)) if config.layer else None,
        **{name: None if one is None else np.round(one, 9).tolist() for name, one in found.items()},
    }


# ------------------------------------------------------------------- the page


def to_page(attentions: Sequence[Attention], config: AlignmentConfig, updates: Sequence[int] = ()) -> str:
    """A page that shows every head of every layer. With `updates`, the attentions are those of one pair at these
    updates of a training run, and the page plays them."""
    blocks: dict[str, int] = {}

    def block(weights: Weights | None, is_signed: bool = False) -> int | None:
        if weights is None:
            return None
        packed = pack_signed(weights) if is_signed else pack(weights)
        return blocks.setdefault(packed, len(blocks))  # the encoder's are the same for each hypothesis

    items = [
        {
            "source": one.source,
            "text": one.text,
            "score": one.score,
            "update": updates[i] if updates else None,
            "src": one.src,
            "tgt": one.tgt,
            "words": {"src": one.src_words, "tgt": one.tgt_words},
            "encoder": block(one.encoder),
            "decoder": block(one.decoder),
            "cross": block(one.cross),
            "attribution": {"cross": block(one.src_attribution, True), "decoder": block(one.tgt_attribution, True)},
            "alignment": sorted(align(one, config)) if config.layer else None,
        }
        for i, one in enumerate(attentions)
    ]
    shapes = {part: getattr(attentions[0], part).shape[:2] for part in PARTS}
    aligning = {"layer": config.layer, "heads": config.heads} if config.layer else None
    data = {"start": START, "shapes": shapes, "aligning": aligning, "items": items, "blocks": list(blocks)}
    style, script, page = (read_source(f"attend.{kind}") for kind in ("css", "js", "html"))
    # JSON within HTML: with no "<" in it nothing can end the element that holds it
    filled = {
        "STYLE": style, "SCRIPT": script, "STYLE_HASH": hash_of(style), "SCRIPT_HASH": hash_of(script),
        "DATA": json.dumps(data, ensure_ascii=False).replace("<", "\\u003c"),
    }  # fmt: skip
    first, *rest = page.split("{{")
    return first + "".join(filled[name] + text for name, _, text in (part.partition("}}") for part in rest))


def fit_page(frames: Sequence[tuple[int, Attention]], config: AlignmentConfig) -> tuple[str, int]:
    """The page of a training run with as many of its frames, evenly spread, as a page may hold; and how many."""
    num = len(frames)
    while True:
        kept = [frames[round(i * (len(frames) - 1) / max(1, num - 1))] for i in range(num)]
        page = to_page([one for _, one in kept], config, [update for update, _ in kept])
        if len(page.encode()) <= LARGEST or num <= 2:
            return page, num
        num = max(2, int(num * min(0.9, LARGEST / len(page.encode()))))


def pack(weights: Weights) -> str:
    """Weights as 24-bit numbers: first all their high bytes, then the middle ones, then the low ones, deflated."""
    numbers = np.round(weights * UNIT).astype(np.uint32).ravel()
    planes = np.stack([numbers >> 16, numbers >> 8 & 255, numbers & 255]).astype(np.uint8)
    return base64.b64encode(zlib.compress(planes.tobytes(), 6)).decode()


def pack_signed(values: Weights) -> str:
    """Numbers of any sign and size as 32-bit floats, deflated."""
    return base64.b64encode(zlib.compress(values.astype("<f4").tobytes(), 6)).decode()


def read_source(name: str) -> str:
    """A file of the page."""
    return (files("diglot") / "page" / name).read_text(encoding="utf-8")


def hash_of(text: str) -> str:
    """As a content security policy names what it allows."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


# ------------------------------------------------------------------- the terminal


def to_text(attention: Attention, picture: Picture, config: AlignmentConfig) -> str:
    """One picture in shades, a row a piece; beside each row what it looks at most, and how much."""
    weights = picture.weights(attention)
    rows, columns = (list(map(visible, names)) for names in names_of(attention, picture.part))
    width = max(map(cell_len, rows))
    lines = [f"{attention.text}    (score {attention.score:.4f}; {picture})", ""]
    height = max(map(len, columns))
    for depth in range(height):  # the names of the columns, from top to bottom
        lines.append(" " * (width + 1) + "".join(one_cell(name.rjust(height)[depth]) for name in columns))
    for name, row in zip(rows, weights, strict=True):
        shades = "".join(SHADES[min(len(SHADES) - 1, int(weight * len(SHADES)))] * 2 for weight in row)
        most = int(row.argmax())
        lines.append(f"{' ' * (width - cell_len(name))}{name} {shades} {columns[most]} {row[most]:.2f}")
    if config.layer:
        lines += ["", f"alignment {to_pharaoh(align(attention, config))}"]
    return "\n".join(line.rstrip() for line in lines)


def visible(piece: str) -> str:
    """A piece that moves no cursor."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in piece)


def one_cell(character: str) -> str:
    """A character as wide as the cell below it."""
    return character + " " * (2 - cell_len(character))


# ------------------------------------------------------------------- as it forms, in training


def write_frame(run: Path, update: int, attention: Attention) -> None:
    """Keep what the network looked at after an update."""
    tensors = {part: torch.from_numpy(getattr(attention, part)).float() for part in PARTS}
    words = {name: getattr(attention, name) for name in ("source", "text", "score", "src", "tgt", *SPANS)}
    tensors["words"] = torch.tensor(list(json.dumps(words).encode()), dtype=torch.uint8)
    checkpoint.make_directory(run / FRAMES)
    checkpoint.replace_file(run / FRAMES / f"{update:06}.safetensors", safetensors.torch.save(tensors))


def read_frames(run: Path) -> list[tuple[int, Attention]]:
    """What was kept, in order."""
    found: list[tuple[int, Attention]] = []
    for path in sorted((run / FRAMES).glob("*.safetensors"), key=lambda path: (len(path.stem), path.stem)):
        tensors = checkpoint.read_tensors(path)
        try:
            words: dict[str, Any] = json.loads(tensors.pop("words").numpy().tobytes())
            arrays = {part: tensors[part].double().numpy() for part in PARTS}
            spans: dict[str, Any] = {name: tuple((a, b) for a, b in words.pop(name)) for name in SPANS}
            src, tgt = tuple(words.pop("src")), tuple(words.pop("tgt"))
            kept: dict[str, Any] = {**spans, **words, **arrays}
            found.append((int(path.stem), Attention(src, tgt, **kept)))
        except (ValueError, KeyError, TypeError):
            raise CheckpointError(f"{path} is no picture of this run; delete it.") from None
    if not found:
        raise ConfigError(
            f"{run} holds no pictures; they are kept where train.watch names a line of the validation text. To look at "
            "its model, give a sentence."
        )
    return found
