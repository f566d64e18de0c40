"""Marian, and what is released with it by OPUS-MT and Tatoeba.

decoder.yml     which files these are, and how it searches
*.npz           the weights by the names below, as rows that are multiplied from the left, and the configuration
*.spm           vocabularies that are SentencePiece models; or
*.vocab.yml     numbers of pieces, with source.spm and target.spm beside them, into which text is split before

Marian begins with the zero vector as we do, and LayerNorm's epsilon is ours; its sinusoids have periods from 2 pi to
20,000 pi, so `model.position_base` is another. It is strict YAML that Marian writes, so little of YAML is read here.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diglot.checkpoint import StoredModel
from diglot.config import ModelConfig, ModelSpec, from_dict
from diglot.errors import ConversionError
from diglot.interop import files, pieces, probe, weights
from diglot.interop.pieces import Special
from diglot.subwords import Subwords
from diglot.translator import TAG

DECODER, MODEL, CONFIG = "decoder.yml", "model.npz", "special:model.yml"
SOURCE, TARGET = "source.spm", "target.spm"  # beside vocabularies that are no SentencePiece models
Yaml = dict[str, str | list[str]]

# ours: theirs, after encoder_lN_ and decoder_lN_
ENCODER_LAYER = {
    **{f"self_attention.w_{x}.weight": f"self_W{x}" for x in "qkvo"},
    **{f"self_attention.w_{x}.bias": f"self_b{x}" for x in "qkvo"},
    "residual_1.norm.weight": "self_Wo_ln_scale",
    "residual_1.norm.bias": "self_Wo_ln_bias",
    "feed_forward.w_1.weight": "ffn_W1",
    "feed_forward.w_1.bias": "ffn_b1",
    "feed_forward.w_2.weight": "ffn_W2",
    "feed_forward.w_2.bias": "ffn_b2",
    "residual_2.norm.weight": "ffn_ffn_ln_scale",
    "residual_2.norm.bias": "ffn_ffn_ln_bias",
}
DECODER_LAYER = ENCODER_LAYER | {
    **{f"cross_attention.w_{x}.weight": f"context_W{x}" for x in "qkvo"},
    **{f"cross_attention.w_{x}.bias": f"context_b{x}" for x in "qkvo"},
    "residual_2.norm.weight": "context_Wo_ln_scale",
    "residual_2.norm.bias": "context_Wo_ln_bias",
    "residual_3.norm.weight": "ffn_ffn_ln_scale",
    "residual_3.norm.bias": "ffn_ffn_ln_bias",
}
MATRICES = {
    "src_embedding.weight": "encoder_Wemb", "tgt_embedding.weight": "decoder_Wemb",
    "output.weight": "decoder_ff_logit_out_Wt", "output.bias": "decoder_ff_logit_out_b",
}  # fmt: skip
SHARED, OLD_OUTPUT = "Wemb", "decoder_ff_logit_out_W"  # the old one is not transposed

# the configuration of the network: what may have this value alone, ...
FIXED = {
    "type": "transformer", "transformer-decoder-autoreg": "self-attention", "transformer-no-projection": "false",
    "transformer-no-bias": "false", "transformer-no-affine": "false", "transformer-ffn-depth": "2",
    "transformer-decoder-ffn-depth": "0", "transformer-decoder-dim-ffn": "0", "transformer-pool": "false",
    "transformer-rnn-projection": "false", "transformer-train-position-embeddings": "false",
    "transformer-disable-position-embeddings": "false", "transformer-attention-mask": "default",
    "transformer-alibi-shift": "false", "transformer-alibi-trainable": "false", "right-left": "false", "ulr": "false",
    "factors-dim-emb": "0", "lemma-dim-emb": "0", "lemma-dependency": "", "skip": "false",
}  # fmt: skip
EMPTY: dict[str, list[str]] = {"input-types": [], "transformer-tied-layers": []}
# ... what is read, with Marian's defaults, ...
READ: Yaml = {
    "enc-depth": "6", "dec-depth": "6", "dim-emb": "512", "dim-vocabs": [], "transformer-heads": "8",
    "transformer-dim-ffn": "2048", "transformer-ffn-activation": "swish", "transformer-preprocess": "",
    "transformer-postprocess": "dan", "transformer-postprocess-top": "", "transformer-postprocess-emb": "d",
    "tied-embeddings": "false", "tied-embeddings-all": "false", "tied-embeddings-src": "false",
    "output-omit-bias": "false",
}  # fmt: skip
# ... and what is of other networks, or of training
INERT = frozenset(
    """bert-train-type-embeddings bert-type-vocab-size char-conv-filters-num char-conv-filters-widths char-highway
    char-stride dec-cell dec-cell-base-depth dec-cell-high-depth dim-rnn enc-cell enc-cell-depth enc-type
    factors-combine layer-normalization separator-symbol transformer-aan-activation transformer-aan-depth
    transformer-aan-nogate transformer-depth-scaling transformer-dim-aan transformer-guided-alignment-layer ulr-dim-emb
    ulr-trainable-transformation version""".split()
)
# the same of decoder.yml
SEARCH_FIXED = {"word-penalty": "0", "n-best": "false", "allow-special": "false"}
SEARCH_READ: Yaml = {"relative-paths": "false", "models": [], "vocabs": [], "beam-size": "12", "normalize": "0"}
SEARCH_INERT = frozenset(
    """alignment allow-unk cpu-threads devices log log-level max-length max-length-crop max-length-factor maxi-batch
    maxi-batch-sort mini-batch mini-batch-words no-spm-decode no-spm-encode quiet quiet-translation seed weights
    workspace""".split()
)
NUMBERS = {
    "d_model": "dim-emb", "d_ff": "transformer-dim-ffn", "num_heads": "transformer-heads",
    "num_encoder_layers": "enc-depth", "num_decoder_layers": "dec-depth",
}  # fmt: skip
NORMS = ", an, , "  # before a sub-layer, after it, at the top, on embeddings; each is a string of letters
ENTRY = re.compile(r"""(?:\? )?("(?:[^"\\]|\\.)*"|'(?:[^']|'')*'|.*?): *(\d{1,9})\s*""")  # of a vocabulary
ESCAPES = {c: c for c in '"\\/ '} | {
    "0": "\0", "a": "\a", "b": "\b", "t": "\t", "n": "\n", "v": "\v", "f": "\f", "r": "\r", "e": "\x1b",
    "N": "\x85", "_": "\xa0", "L": "\u2028", "P": "\u2029",
}  # fmt: skip
SPACE = "\u2581"  # as SentencePiece writes it
NEVER_WRITTEN = -1e9  # the bias of pieces that Marian does not know to be special

CARD = """# A diglot model for Marian

```sh
marian-decoder -c decoder.yml < TEXT      # or pymarian
```

Greedy translations were compared piece by piece when this was written. What differs:

- Marian divides the log-probability of a hypothesis by its length to the power of `normalize`; diglot, as Wu et al.
  (2016), by ((5 + length) / 6) to that power. So beam search may prefer another length.
- Pieces that must not be written have a bias of -1e9 here, so their share of the probability falls to the others.
- Marian computes attention and sinusoids in single precision with its own approximations.
- It translates at most `max-length-factor` times the pieces of the source; diglot as many and 50 more.
- diglot brings text into NFC and splits long lines at sentence ends first.
"""


# ------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Release:
    """The files of a model."""

    root: Path
    model: str
    vocabularies: list[str]
    search: Yaml


def find(path: Path) -> Path | None:
    """The decoder.yml of a model, given that itself or its directory."""
    if path.is_file():
        return path if path.name.endswith(DECODER) else None
    found = sorted(path.glob(f"*{DECODER}"))
    named = [one for one in found if one.name == DECODER] or found
    if len(named) > 1:
        raise ConversionError(
            f"{path} holds several models; name the {DECODER} of one: {', '.join(p.name for p in named)}."
        )
    return named[0] if named else None


def read(path: Path) -> StoredModel:
    """A Marian model, by its decoder.yml, as ours."""
    release = read_release(path)
    where = release.root / release.model
    arrays = read_npz(release.root, release.model)
    text = arrays.pop(CONFIG).tobytes().rstrip(b"\0").decode("utf-8", "replace")
    table = check_settings(read_yaml(text, f"{where}, {CONFIG}"), f"{where}, {CONFIG}", FIXED, READ, INERT)
    spec = to_spec(where, table, release.search)
    sides = [read_side(release, side) for side in (0, 1)]
    spec, found = to_ours(where, spec, table, arrays, [len(names) for _, names in sides])
    return weights.number_pieces(path, spec, found, sides, Special())


def read_release(path: Path) -> Release:
    """What decoder.yml names; all of it has to be in its directory."""
    root, text = path.parent, files.read_text(path.parent, path.name)
    search = check_settings(read_yaml(text, str(path)), str(path), SEARCH_FIXED, SEARCH_READ, SEARCH_INERT)
    models, vocabularies = cast("list[str]", search["models"]), cast("list[str]", search["vocabs"])
    base = root if search["relative-paths"] == "true" else Path()
    outside = [
        name for name in (*models, *vocabularies) if "\0" in name or (base / name).resolve().parent != root.resolve()
    ]
    if (len(models), len(vocabularies)) != (1, 2) or outside:
        raise ConversionError(
            f"{path} has to name one model and two vocabularies, all of them in {root}; it names {models} and "
            f"{vocabularies}. Copy there what is elsewhere, and name it with relative-paths: true."
        )
    return Release(root, Path(models[0]).name, [Path(name).name for name in vocabularies], search)


def check_settings(given: Yaml, where: str, fixed: Mapping[str, str], read: Yaml, inert: frozenset[str]) -> Yaml:
    """All settings with their defaults; unknown keys, and values that mean another computation, are refused."""
    wrong = [f"{key} is unknown" for key in sorted(given.keys() - fixed.keys() - read.keys() - inert - EMPTY.keys())]
    only: Yaml = {**fixed, **EMPTY}
    wrong += [
        f"{key} = {given[key]!r} is not {value!r}" for key, value in only.items() if given.get(key, value) != value
    ]
    wrong += [
        f"{key} = {given[key]!r} is no {type(value).__name__}"
        for key, value in read.items()
        if not isinstance(given.get(key, value), type(value))
    ]
    if wrong:
        raise ConversionError(f"{where} tells of another network or search than diglot's: {'; '.join(wrong)}.")
    return read | given


def to_spec(where: Path, table: Yaml, search: Yaml) -> ModelSpec:
    """The configuration as ours."""
    places = ("preprocess", "postprocess", "postprocess-top", "postprocess-emb")
    norms = ", ".join(cast("str", table[f"transformer-{place}"]).replace("d", "") for place in places)  # d is dropout
    activation = table["transformer-ffn-activation"]
    if norms != NORMS or activation not in ("relu", "swish"):
        raise ConversionError(f"{where} tells of another network than diglot's: norms at '{norms}' with {activation}.")
    is_all, is_out, is_src = (table[f"tied-embeddings{end}"] == "true" for end in ("-all", "", "-src"))
    numbers = {ours: to_number(where, theirs, table[theirs]) for ours, theirs in NUMBERS.items()}
    beam, alpha = (to_number(where, key, search[key]) for key in ("beam-size", "normalize"))
    model = numbers | {
        "tie": "all" if is_all or (is_out and is_src) else "output" if is_out else "none",
        "activation": activation,
        "attention_bias": True,
        "output_bias": True,
    }
    how = {"method": "greedy"} if beam == 1 else {"beam_size": beam, "length_penalty": alpha}
    spec = from_dict(ModelSpec, {"model": model, "search": how}, str(where))
    base = weights.marian_base(spec.model.d_model)
    return dataclasses.replace(spec, model=dataclasses.replace(spec.model, position_base=base))


def to_number(where: Path, key: str, value: str | list[str]) -> int | float:
    """A number of a configuration."""
    try:
        found = json.loads(cast("str", value))
    except (TypeError, ValueError, RecursionError):
        found = None
    if isinstance(found, int | float) and not isinstance(found, bool):
        return found
    raise ConversionError(f"{where}: {key} = {value!r} is no number.")


def read_side(release: Release, side: int) -> tuple[bytes, list[str]]:
    """The SentencePiece model of a side, and its pieces in the order of their numbers."""
    root, name = release.root, release.vocabularies[side]
    if name.endswith(".spm"):
        proto = pieces.check(files.read_bytes(root, name), str(root / name))
        return proto, [piece.text.removeprefix(SPACE) if is_tag(piece.text) else piece.text
                       for piece in pieces.read_pieces(proto)]  # fmt: skip
    proto = pieces.check(files.read_bytes(root, (SOURCE, TARGET)[side]), str(root / (SOURCE, TARGET)[side]))
    numbers: dict[str, int] = {}
    for place, line in enumerate(files.read_text(root, name).replace("\n: ", ": ").split("\n"), 1):
        if not line.strip():
            continue
        entry = ENTRY.fullmatch(line)
        piece = unquote(entry[1]) if entry else None
        if entry is None or not piece or piece in numbers:
            raise ConversionError(
                f"{root / name}, entry {place:,}: this is no piece and its number, or it comes twice."
            )
        numbers[piece] = int(entry[2])
    if sorted(numbers.values()) != list(range(len(numbers))) or not {Special().unk, Special().eos} <= numbers.keys():
        raise ConversionError(
            f"{root / name} does not number {len(numbers):,} pieces from 0 without a gap, <unk> and </s> among them."
        )
    return proto, sorted(numbers, key=lambda piece: numbers[piece])


def is_tag(piece: str) -> bool:
    """Whether a piece asks for a language at the beginning of a text, where SentencePiece puts a space."""
    return TAG.fullmatch(piece.removeprefix(SPACE)) is not None


def to_ours(
    where: Path, spec: ModelSpec, table: Yaml, arrays: Mapping[str, NDArray[Any]], lengths: Sequence[int]
) -> tuple[ModelSpec, dict[str, Tensor]]:
    """Their weights by our names, turned, and in our order; biases that are all zero are none."""
    config = spec.model
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items() if array.dtype.kind == "f"}
    weights.check_depth(where, config, tensors)
    if OLD_OUTPUT in tensors:
        tensors[MATRICES["output.weight"]] = tensors.pop(OLD_OUTPUT).T
    names = name_all(config, is_shared=config.tie == "none" and table["tied-embeddings-src"] == "true")
    if table["output-omit-bias"] == "true":
        del names["output.bias"]
    shapes = weights.shapes_of(dataclasses.replace(config, tie="none"), *lengths)
    weights.check_tensors(where, tensors, {theirs: turned_shape(ours, shapes[ours]) for ours, theirs in names.items()})
    found = weights.from_halves({ours: turn(ours, tensors[theirs].float()) for ours, theirs in names.items()})
    config = weights.without_zero_biases(config, found)
    return dataclasses.replace(spec, model=config), {name: found[name] for name in weights.shapes_of(config, *lengths)}


def name_all(config: ModelConfig, *, is_shared: bool = False) -> dict[str, str]:
    """Their names of all weights, by ours; `is_shared`: of the embeddings alone."""
    layers = weights.name_layers(config, ENCODER_LAYER, DECODER_LAYER, "{stack}_l{layer}_", first=1)
    names = layers | MATRICES
    if is_shared or config.tie == "all":
        names |= dict.fromkeys(("src_embedding.weight", "tgt_embedding.weight"), SHARED)
    if config.tie != "none":
        names["output.weight"] = names["tgt_embedding.weight"]
    return names


def is_turned(ours: str) -> bool:
    """Whether a matrix of theirs is multiplied from the left, and ours from the right."""
    return re.search(r"\.w_.\.weight$", ours) is not None


def turned_shape(ours: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of their weight: a vector is a row."""
    return shape[::-1] if is_turned(ours) else shape if len(shape) == 2 else (1, *shape)


def turn(ours: str, weight: Tensor) -> Tensor:
    """Their weight as ours, or ours as theirs."""
    if is_turned(ours):
        return weight.T
    return weight if "embedding" in ours or ours == "output.weight" else weight[None] if weight.ndim == 1 else weight[0]


# ------------------------------------------------------------------- YAML and .npz, as far as Marian writes them


def read_yaml(text: str, where: str) -> Yaml:
    """Keys with a value or a list of values."""
    found: Yaml = {}
    key = ""
    for number, line in enumerate(text.split("\n"), 1):
        line = line.rstrip()
        kept = found.get(key)
        if not line or line.startswith("#") or line == "---":
            continue
        if item := re.fullmatch(r"\s*- (.*)", line):
            value = unquote(item[1])
            if isinstance(kept, list) and value is not None:
                kept.append(value)
                continue
        elif (entry := re.fullmatch(r"([\w-]+):(?:\s+(.*))?", line)) and entry[1] not in found:
            key, value = entry[1], read_value(entry[2] or "[]")
            if value is not None:
                found[key] = value
                continue
        elif line.strip() == "[]" and kept == []:
            continue
        raise ConversionError(f"{where}, line {number}: diglot does not understand this: {line!r}.")
    return found


def read_value(text: str) -> str | list[str] | None:
    """A scalar, or a list of them in brackets; nothing, if it is none."""
    if not (text.startswith("[") and text.endswith("]")):
        return unquote(text)
    items = [unquote(item.strip()) for item in text[1:-1].split(",") if item.strip()]
    return None if None in items else cast("list[str]", items)


def unquote(text: str) -> str | None:
    """The value of a scalar, or nothing, if it is none."""
    if text.startswith('"'):
        if not re.fullmatch(r'"(?:[^"\\]|\\.)*"', text):
            return None
        try:
            return re.sub(r"\\(x..|u.{4}|U.{8}|.)", lambda found: unescape(found[1]), text[1:-1])
        except (ValueError, KeyError, OverflowError):
            return None
    if text.startswith("'"):
        return text[1:-1].replace("''", "'") if re.fullmatch(r"'(?:[^']|'')*'", text) else None
    return None if text[:1] in "[{&*!|>%@`" and text != "" else text.partition(" #")[0].rstrip()


def unescape(code: str) -> str:
    """What stands after a backslash between double quotes."""
    return chr(int(code[1:], 16)) if code[0] in "xuU" and len(code) > 1 else ESCAPES[code]


def read_npz(root: Path, name: str) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz; nothing is unpickled, and nothing is made on the word of a header."""
    path = files.find_file(root, name)
    found: dict[str, NDArray[Any]] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > path.stat().st_size:
                    raise ValueError("it is compressed, which Marian's are not")
                content = io.BytesIO(archive.read(entry))
                if np.lib.format.read_magic(content) != (1, 0):
                    raise ValueError(f"{entry.filename} is of another version of NumPy's format")
                shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(content)
                if is_fortran or dtype.hasobject or dtype.kind not in "fiu":
                    raise ValueError(f"{entry.filename} holds {dtype}")
                array = np.frombuffer(content.getbuffer()[content.tell() :], dtype.newbyteorder("="))
                found[entry.filename.removesuffix(".npy")] = array.reshape(shape).copy()
        if CONFIG not in found:
            raise ValueError(f"it has no {CONFIG}")
    except Exception as error:  # whatever a stranger's file makes of the readers: it is not what it should be
        raise ConversionError(f"{path} is no file of Marian's weights: {error}.") from None
    return found


def write_npz(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Arrays as Marian keeps them."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            entry = io.BytesIO()
            np.lib.format.write_array(entry, np.ascontiguousarray(array), version=(1, 0), allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), entry.getvalue())
    return content.getvalue()


def write_yaml(table: Yaml) -> str:
    """The same, written."""
    lines = [
        f"{key}: {json.dumps(value)}" if isinstance(value, list) or not value else f"{key}: {value}"
        for key, value in table.items()
    ]
    return "".join(line + "\n" for line in lines)


# ------------------------------------------------------------------- writing


def write(stored: StoredModel, root: Path) -> None:
    """Write one of our models for Marian."""
    config, search = stored.spec.model, stored.spec.search
    check_expressible(config)
    found = weights.complete(stored)
    found["output.bias"] = found["output.bias"].clone()
    found["output.bias"][stored.tgt_subwords.unwritable()] = NEVER_WRITTEN
    found = {name: turn(name, weight) for name, weight in weights.to_halves(found).items()}
    arrays = {
        theirs: found[ours].numpy() for ours, theirs in sorted(name_all(config).items(), key=lambda item: item[1])
    }
    sides = [with_tags(side, stored.spec.languages.tags) for side in (stored.src_subwords, stored.tgt_subwords)]
    names = ["vocab.spm"] * 2 if sides[0] == sides[1] else [SOURCE, TARGET]
    numbers = {theirs: str(getattr(config, ours)) for ours, theirs in NUMBERS.items()}
    settings: Yaml = {
        **READ, **FIXED, **EMPTY, **numbers,
        "dim-vocabs": [str(stored.src_subwords.num_pieces), str(stored.tgt_subwords.num_pieces)],
        "transformer-ffn-activation": config.activation,
        "tied-embeddings-all": json.dumps(config.tie == "all"), "tied-embeddings": json.dumps(config.tie == "output"),
        "version": "diglot",
    }  # fmt: skip
    arrays[CONFIG] = np.frombuffer(write_yaml(settings).encode() + b"\0", np.int8)
    decoder: Yaml = {
        "relative-paths": "true", "models": [MODEL], "vocabs": names,
        "beam-size": str(search.beam_size if search.method == "beam" else 1), "normalize": str(search.length_penalty),
        "word-penalty": "0", "mini-batch": "16", "maxi-batch": "100", "maxi-batch-sort": "src",
    }  # fmt: skip
    files.write_files(root, {
        DECODER: write_yaml(decoder).encode(), MODEL: write_npz(arrays),
        **dict(zip(names, sides, strict=True)), "README.md": CARD.encode(),
    })  # fmt: skip


def with_tags(subwords: Subwords, tags: Sequence[str]) -> bytes:
    """The SentencePiece model where a tag is found in a text, since Marian is not told it beside the text."""
    names = pieces.names_of(subwords, tags)
    new = [
        dataclasses.replace(piece, text=SPACE + name, kind=pieces.USER_DEFINED) if is_tag(name) else piece
        for piece, name in zip(pieces.read_pieces(subwords.proto), names, strict=True)
    ]
    return pieces.write_pieces(subwords.proto, new, pieces.read_special(subwords.proto)) if tags else subwords.proto


def check_expressible(config: ModelConfig) -> None:
    """Refuse what Marian cannot compute."""
    base = weights.marian_base(config.d_model)
    refused = {
        "model.norm = 'pre' that it decodes as it was trained": config.norm == "pre",
        f"model.positions = '{config.positions}'": config.positions != "sinusoidal",
        f"model.position_base = {config.position_base!r}; train with {base!r}": not math.isclose(
            config.position_base, base
        ),
        "model.activation = 'gelu' (its own is an approximation)": config.activation == "gelu",
        f"model.d_k = {config.d_k}": config.d_k not in (0, config.d_model // config.num_heads),
    }
    if what := [name for name, is_so in refused.items() if is_so]:
        raise ConversionError(f"Marian has no {' and no '.join(what)}.")


# ------------------------------------------------------------------- comparing

WORKER = """
import json, sys, pymarian
print("\\n" + json.dumps([pymarian.Translator(**options).translate(lines) for options, lines in json.load(sys.stdin)]))
"""
SHORT, LONG = 4, 16  # pieces: bounds of the groups in which sources go, because Marian's bound is a factor


class Peer:
    """Marian with such a model, in a process of its own: where it meets what it does not expect, it aborts."""

    name = "Marian"

    def __init__(self, path: Path):
        if find_spec("pymarian") is None:
            probe.need("pymarian")
        self.release = read_release(path)

    def split(self, text: str) -> None:
        """It is given pieces: how its own SentencePiece splits a text is not to be seen from outside."""

    def greedy(self, sources: Sequence[Sequence[str]], max_extra: int) -> list[list[str]]:
        """The translations of pieces, as pieces."""
        root, release = self.release.root, self.release
        is_spm = release.vocabularies[0].endswith(".spm")  # where a tag has a space before it
        sources = [[SPACE + piece if is_spm and is_tag(piece) else piece for piece in one] for one in sources]
        files_of = {"models": str(root / release.model), "vocabs": [str(root / name) for name in release.vocabularies]}
        options = {
            "beam_size": 1, "normalize": 0, "no_spm_encode": "true", "no_spm_decode": "true", "cpu_threads": 1,
            "mini_batch": 32, "maxi_batch": 10, "workspace": 500, "log_level": "off",
        }  # fmt: skip
        groups = [[i for i, one in enumerate(sources) if low <= len(one) < high]
                  for low, high in ((1, SHORT), (SHORT, LONG), (LONG, 1 << 30))]  # fmt: skip
        asked = [
            ({**files_of, **options, "max_length_factor": 2 + max_extra // low}, [" ".join(sources[i]) for i in group])
            for low, group in zip((1, SHORT, LONG), groups, strict=True)
            if group
        ]
        done = subprocess.run(
            [sys.executable, "-c", WORKER], input=json.dumps(asked), capture_output=True, text=True, check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        if done.returncode:
            said = [line for line in done.stderr.split("\n") if line.strip()]
            raise ConversionError(f"Marian cannot translate with {root}: {said[-1] if said else done.returncode}.")
        answers = cast("list[list[str]]", json.loads(done.stdout.rstrip("\n").rpartition("\n")[2]))
        lines = [line for answer in answers for line in answer]
        places = [i for group in groups for i in group]
        return [line.split(" ") if line else [] for _, line in sorted(zip(places, lines, strict=True))]
