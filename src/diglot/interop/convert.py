"""Models come and go. What is imported or exported is compared with the other engine before anything bears its name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from diglot import checkpoint
from diglot.checkpoint import StoredModel
from diglot.config import update_section
from diglot.errors import ConversionError
from diglot.interop import ctranslate2, files, marian, marian_hf, pieces, weights
from diglot.interop.probe import Agreement, Comparison, Peer, draw_texts
from diglot.model import Transformer
from diglot.progress import Reporter
from diglot.subwords import clean
from diglot.translator import TAG

CARD = """# {src} to {tgt}

Imported by diglot from {where}. Its data, its scores and its licence are those of the model that it was made from.
"""


def import_model(
    path: Path, out: Path, languages: dict[str, str], new_pieces: Sequence[str] = (), texts: Sequence[str] = (), *,
    is_checked: bool = True,
) -> Agreement | None:  # fmt: skip
    """A model of another engine, or one of ours, as a model directory; `new_pieces` join its vocabulary."""
    files.check_free(out)
    stored, where, make_peer = read_any(path)
    found = compare(stored, make_peer, texts, Reporter()) if is_checked and make_peer else None
    stored.spec = dataclasses.replace(stored.spec, languages=update_section(stored.spec.languages, languages))
    if new_pieces:
        stored = with_new_pieces(stored, new_pieces)
    sides = stored.src_subwords, stored.tgt_subwords
    src, tgt = (getattr(stored.spec.languages, side) or "?" for side in ("src", "tgt"))
    card = CARD.format(src=src, tgt=tgt, where=where)
    written = checkpoint.model_files(stored.spec, checkpoint.weights_of(stored.model), *sides, card)
    checkpoint.write_directory(out, written)
    return found


def read_any(path: Path) -> tuple[StoredModel, str, Callable[[], Peer] | None]:
    """A model of whatever format, told apart by what is there; what it is, and the engine that it is of."""
    if (checkpoint.find_model(path) / checkpoint.MANIFEST).exists():
        return checkpoint.load_model(path), "another of its models", None
    if marian_hf.is_one(path):
        stored = marian_hf.read(path)
        return stored, "a MarianMT model of transformers", partial(marian_hf.Peer, path, stored)
    if release := marian.find(path):
        return marian.read(release), "a model of Marian", partial(marian.Peer, release)
    raise ConversionError(
        f"{path} is no model that diglot reads: neither MarianMT (config.json, source.spm), nor Marian (decoder.yml), "
        "nor a model directory. One of CTranslate2 is made to translate alone: import what it was made from."
    )


def export_model(
    model: Path, out: Path, to: str, texts: Sequence[str] = (), *, is_int8: bool = False, is_checked: bool = True
) -> Agreement | None:  # fmt: skip
    """One of our models for another engine."""
    if to not in ("transformers", "ctranslate2", "marian") or (is_int8 and to != "ctranslate2"):
        raise ConversionError(
            f"diglot writes for transformers, ctranslate2 (there with --int8, too) and marian, not for '{to}'"
            + (" with --int8." if is_int8 else ".")
        )
    files.check_free(out)
    stored = checkpoint.load_model(model)
    with files.appearing(out) as new:
        if to == "transformers":
            marian_hf.write(stored, new)
            make_peer = partial(marian_hf.Peer, new, stored)
        elif to == "marian":
            marian.write(stored, new)
            make_peer = partial(marian.Peer, new / marian.DECODER)
        else:
            ctranslate2.write(stored, new)
            make_peer = partial(ctranslate2.Peer, new)
        found = compare(stored, make_peer, texts, Reporter()) if is_checked else None
        if is_int8:
            ctranslate2.write(stored, new, "int8")
            if is_checked:
                share = Comparison(stored, ctranslate2.Peer(new, "int8")).share_of_equal(with_drawn(stored, texts))
                Reporter().say(f"With 8 bits {100 * share:.1f} % of the lines are translated the same.")
    return found


def compare(stored: StoredModel, make_peer: Callable[[], Peer], texts: Sequence[str], reporter: Reporter) -> Agreement:
    """Compare our engine with another one, and tell what came of it."""
    found = Comparison(stored, make_peer()).run(with_drawn(stored, texts))
    for tie in found.ties:
        reporter.say(f"A tie: diglot and the other engine translate {tie}.")
    reporter.say(
        f"Both engines translate {found.num_lines:,} lines into the same {found.num_pieces:,} pieces"
        + (f", but for {len(found.ties)} ties." if found.ties else ".")
    )
    return found


def with_drawn(stored: StoredModel, texts: Sequence[str]) -> list[str]:
    """What is compared: given text, and text drawn from the vocabulary."""
    return [*(text for text in texts if text.strip()), *draw_texts(stored.src_subwords)]


def with_new_pieces(stored: StoredModel, new: Sequence[str]) -> StoredModel:
    """The model with pieces that it had not, each like the pieces that it was split into. What has none of them is
    translated as before."""
    sides = stored.src_subwords, stored.tgt_subwords
    known = {name for side in sides for name in pieces.names_of(side, stored.spec.languages.tags)}
    for number, piece in enumerate(new, 1):
        is_text = piece == clean(piece) and piece.strip() and " " not in piece and "\u2581" not in piece
        if not is_text or piece in known or piece in new[: number - 1]:
            raise ConversionError(f"new piece {number:,}, {piece!r}: it has a space, or the vocabulary has it already.")
    like = [[side.encode(piece) or [side.unk_id] for piece in new] for side in sides]
    config, grown = weights.grow(stored.spec.model, checkpoint.weights_of(stored.model), *like)
    src_subwords = pieces.extend(sides[0], new)
    tgt_subwords = src_subwords if sides[0] == sides[1] else pieces.extend(sides[1], new)
    languages = stored.spec.languages
    if languages.tags:
        tags = (*languages.tags, *(tag[1] for piece in new if (tag := TAG.fullmatch(piece))))
        languages = dataclasses.replace(languages, tags=tags)
    spec = dataclasses.replace(stored.spec, model=config, languages=languages)
    model = Transformer(config, src_subwords.num_pieces, tgt_subwords.num_pieces)
    checkpoint.put_weights(model, grown)
    return StoredModel(stored.path, spec, model, src_subwords, tgt_subwords)
