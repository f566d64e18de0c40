"""The commands that bring models in and out, and that look into them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from diglot.config import Recipe, load_recipe
from diglot.errors import ConfigError, TextError
from diglot.options import BeamSize, Json, SrcLang, TgtLang, Threads, To, given
from diglot.streams import open_output, read_pairs, read_text, show

commands = typer.Typer(rich_markup_mode=None)

Probe = Annotated[Path | None, typer.Option(metavar="FILE", help="Own text to compare both engines on, a line each.")]
Unchecked = Annotated[bool, typer.Option("--unchecked", help="Do not compare with the other engine.")]
Out = Annotated[Path, typer.Option(metavar="DIRECTORY", help="Where to write; nothing is left there if it fails.")]


@commands.command("import")
def import_(
    path: Annotated[Path, typer.Argument(help="A directory with MarianMT or Marian (or its decoder.yml), or a model.")],
    out: Out,
    src_lang: SrcLang = None,
    tgt_lang: TgtLang = None,
    add_pieces: Annotated[Path | None, typer.Option(metavar="FILE", help="New pieces, one a line.")] = None,
    probe: Probe = None,
    unchecked: Unchecked = False,
) -> None:
    """Read a model of another engine. Both then translate the same text, and have to agree piece by piece.

    \b
    diglot import opus-mt-de-en --out models/deen         MarianMT, as transformers keeps it
    diglot import release/decoder.yml --out models/deen   Marian, OPUS-MT, Tatoeba
    diglot import models/deen --add-pieces new.txt --out models/grown   then: diglot train --init models/grown ...
    """
    from diglot.interop.convert import import_model

    new, lines = (read_text(file) if file else [] for file in (add_pieces, probe))
    import_model(path, out, given(src=src_lang, tgt=tgt_lang), new, lines, is_checked=not unchecked)


@commands.command()
def export(
    model: Annotated[Path, typer.Argument(help="A model directory, or a run directory.")],
    to: Annotated[str, typer.Option(metavar="FORMAT", help="transformers, ctranslate2 or marian.")],
    out: Out,
    int8: Annotated[bool, typer.Option("--int8", help="Weights of 8 bits, for ctranslate2.")] = False,
    probe: Probe = None,
    unchecked: Unchecked = False,
) -> None:
    """Write a model for another engine. Both then translate the same text, and have to agree piece by piece.

    \b
    diglot export runs/deen/model --to ctranslate2 --int8 --out deen.ct2
    diglot export runs/deen/model --to transformers --out deen.hf --probe valid.de
    """
    from diglot.interop.convert import export_model

    export_model(model, out, to, read_text(probe) if probe else [], is_int8=int8, is_checked=not unchecked)


@commands.command()
def attend(
    model: Annotated[
        Path | None, typer.Argument(help="A model directory, or a run directory.", show_default=False)
    ] = None,
    text: Annotated[
        str | None, typer.Argument(help="A sentence; without one, what a run has kept while it trained.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Look at this translation of it, not at those that are found.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write here: a page (.html), a picture (.svg), or .json.")
    ] = None,
    part: Annotated[str, typer.Option(help="Of one picture: encoder, decoder or cross.")] = "cross",
    layer: Annotated[
        int, typer.Option(help="Of one picture, counted from 1; 0: the one that aligns words, or the last.", min=0)
    ] = 0,
    head: Annotated[
        list[int] | None, typer.Option(help="Of one picture, counted from 1; may be repeated: their mean.")
    ] = None,
    lines: Annotated[bool, typer.Option("--lines", help="Draw lines between words in the .svg, not a map.")] = False,
    attribution: Annotated[bool, typer.Option(help="Also gradients times inputs, in the page and the .json.")] = True,
    positions: Annotated[bool, typer.Option("--positions", help="Draw the positional encoding (.svg).")] = False,
    masks: Annotated[bool, typer.Option("--masks", help="Draw the masks as the network sees them (.svg).")] = False,
    schedule: Annotated[bool, typer.Option("--schedule", help="Draw the learning rate (.svg).")] = False,
    to: To = None,
    num_best: Annotated[
        int | None, typer.Option(help="Hypotheses [default: all of the beam; 1 in the terminal].")
    ] = None,
    beam_size: BeamSize = None,
    threads: Threads = 0,
    json_: Json = False,
) -> None:
    """Look at attention: every head of every layer, in a page, in a picture, or here in the terminal.

    \b
    diglot attend runs/deen/model "Ein Hund rennt."
    diglot attend runs/deen/model "Ein Hund rennt." -o page.html
    diglot attend runs/deen/model "Ein Hund rennt." --target "A dog runs." -o page.html
    diglot attend runs/deen/model "Ein Hund rennt." --part encoder --layer 2 --head 3 -o figure.svg
    diglot attend runs/deen/model "Ein Hund rennt." --json | jq .hypotheses[0].alignment
    diglot attend runs/deen -o film.html       attention as it formed, of a run with train.watch
    diglot attend --positions -o positions.svg
    """
    form = ".json" if json_ else output.suffix if output else ""
    if form not in ("", ".html", ".svg", ".json"):
        raise ConfigError(f"{output}: write a page (.html), a picture (.svg) or data (.json).")
    if positions or masks or schedule:
        from diglot.drawing import draw_masks, draw_positions, draw_schedule

        draw = draw_positions if positions else draw_masks if masks else draw_schedule
        made = draw(recipe_of(model))
    elif model is None:
        raise typer.BadParameter("name a model, or ask for --positions, --masks or --schedule")
    else:
        options = given(num_best=num_best, beam_size=beam_size)
        which = part, layer, tuple(head or ())
        made = look(model, text, target, form, which, lines=lines, attribution=attribution, to=to, threads=threads,
                    **options)  # fmt: skip
    with open_output(output) as out:
        out.write(made)


def look(
    model: Path, text: str | None, target: str | None, form: str, which: tuple[str, int, tuple[int, ...]], *,
    lines: bool, attribution: bool, to: str | None, threads: int, **options: Any,
) -> str:  # fmt: skip
    """What a model looks at in a text, or what its run has kept, in the form of a file whose name ends so."""
    from diglot.attend import LARGEST, fit_page, read_frames, render
    from diglot.config import AlignmentConfig
    from diglot.drawing import choose_picture
    from diglot.progress import Reporter
    from diglot.translator import load

    if text is None:
        frames = read_frames(model)
        if form == ".html":
            page, num = fit_page(frames, AlignmentConfig())
            if num < len(frames):
                Reporter().say(
                    f"{num} of {len(frames)} pictures, evenly spread, are in the page: more would be too large."
                )
            return page
        found, config = [frames[-1][1]], AlignmentConfig()
    else:
        translator = load(model, threads=threads)
        config = translator.spec.alignment
        if form in ("", ".svg"):
            options = {"num_best": 1, **options}
        found = translator.attend(
            text, target, to=to, attribution=attribution and form in (".html", ".json"), **options
        )
    made = render(found, config, form, choose_picture(found[0], config, *which), lines)
    if form == ".html" and len(made) > LARGEST:
        Reporter().say(f"The page has {len(made) / 1e6:.0f} MB; --num-best 1 makes it smaller.")
    return made


def recipe_of(run: Path | None) -> Recipe:
    """The recipe of a run, or the paper's."""
    if run and ((run / "manifest.json").exists() or not (run / "config.toml").exists()):
        raise ConfigError(f"{run} is no run directory; name one, or none for the paper's base model.")
    return load_recipe(run / "config.toml" if run else None)


@commands.command()
def align(
    model: Annotated[Path, typer.Argument(help="A model directory, or a run directory.")],
    src: Annotated[Path, typer.Argument(help="Source text ('-': standard input).")],
    tgt: Annotated[Path, typer.Argument(help="Its translation, line by line.")],
    gold: Annotated[
        Path | None, typer.Option(help="True alignments: print the error (AER) against them instead.")
    ] = None,
    choose: Annotated[
        bool, typer.Option("--choose", help="Choose layer and heads by this text, not as the model says.")
    ] = False,
    to: To = None,
    threads: Threads = 0,
) -> None:
    """Print which words stand for each other. A line a pair, as 0-0 1-2: source and target, counted from 0 (Pharaoh).

    \b
    diglot align runs/deen/model text.de text.en > text.pharaoh
    diglot align runs/deen/model test.de test.en --gold test.pharaoh
    """
    pairs = read_pairs(src, tgt)
    from diglot.alignment import align_pairs, alignment_error, from_pharaoh, to_pharaoh
    from diglot.translator import load

    true = [from_pharaoh(line, f"{gold}, line {i:,}") for i, line in enumerate(read_text(gold), 1)] if gold else []
    found = align_pairs(load(model, threads=threads), pairs, to=to, choose=choose)
    if not gold:
        with open_output(None) as out:
            out.writelines(to_pharaoh(links) + "\n" for links in found)
        return
    links = list(found)
    if len(links) != len(true):
        raise TextError(f"{gold} has {len(true):,} lines for {len(links):,} pairs; they must match line by line.")
    show(f"AER {alignment_error(links, true):.4f} ({len(links):,} pairs, {sum(map(len, true)):,} sure links)")
