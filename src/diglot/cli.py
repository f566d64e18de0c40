"""The command line: parses, calls, prints.

Exit codes: 0 done, 1 what the user gave is wrong, 2 usage, 128 + n ended by signal n. Text goes to standard output;
progress, remarks and errors go to standard error. PyTorch is imported by the commands that need it, not here.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

import diglot
from diglot.config import PRESETS, Recipe, load_recipe, named_keys, to_toml, words_of_run
from diglot.errors import ConfigError, DiglotError, Interrupted, TextError, on_one_line
from diglot.streams import STANDARD_INPUT, open_input, open_output, read_pairs, read_text, show

if TYPE_CHECKING:
    from diglot.translator import Translation

app = typer.Typer(
    name="diglot",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing on standard error but errors.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda; auto: a GPU where there is one.")]
Precision = Annotated[str, typer.Option(help="fp32 or bf16.")]
Threads = Annotated[int, typer.Option(help="CPU threads; 0: one a core.", min=0)]
Ensemble = Annotated[
    list[Path] | None,
    typer.Option(metavar="MODEL", help="A further model of the same vocabulary, to average with; may be repeated."),
]
To = Annotated[str | None, typer.Option(help="Language to translate into, of a model that knows several.")]
BeamSize = Annotated[int | None, typer.Option(help="Hypotheses that the beam keeps [default: the model's, usually 4].")]
LengthPenalty = Annotated[float | None, typer.Option(help="Alpha [default: the model's, usually 0.6].")]


def version(wanted: bool) -> None:
    """Print the version and end."""
    if wanted:
        print(f"diglot {diglot.__version__}")
        raise typer.Exit


@app.callback()
def common(
    show_version: Annotated[
        bool, typer.Option("--version", callback=version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Two text files in, a translation model out: the Transformer of "Attention Is All You Need".

    \b
    diglot demo                                   see it all work, without a file or a network
    diglot train --src a.de --tgt a.en --src-lang de --tgt-lang en --out runs/deen --preset tiny
    diglot translate runs/deen/model < text.de    translate
    diglot evaluate runs/deen/model test.de test.en
    """


@app.command()
def train(
    recipe: Annotated[
        str | None, typer.Argument(help="A recipe (TOML), or a run directory to go on with.", show_default=False)
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SECTION.KEY=VALUE]...", help="Other values; --print-recipe shows them all.", show_default=False
        ),
    ] = None,
    src: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="Source text; may be repeated. .gz is unpacked.")
    ] = None,
    tgt: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="Its translation, line by line; may be repeated.")
    ] = None,
    tsv: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="Lines 'source TAB target'; may be repeated.")
    ] = None,
    valid_src: Annotated[list[str] | None, typer.Option(metavar="FILE", help="Source text to validate on.")] = None,
    valid_tgt: Annotated[list[str] | None, typer.Option(metavar="FILE", help="Its translation.")] = None,
    src_lang: Annotated[str | None, typer.Option(metavar="CODE", help="Code of the source language, as de.")] = None,
    tgt_lang: Annotated[str | None, typer.Option(metavar="CODE", help="Code of the target language, as en.")] = None,
    out: Annotated[str | None, typer.Option(metavar="DIRECTORY", help="The run directory to write.")] = None,
    preset: Annotated[
        str, typer.Option(metavar="NAME", help=f"Where values come from: {', '.join(PRESETS)} [default: base].")
    ] = "",
    init: Annotated[
        str | None, typer.Option(metavar="MODEL", help="A model directory to start from (fine-tuning).")
    ] = None,
    print_recipe: Annotated[
        bool, typer.Option("--print-recipe", help="Print the recipe, explained; no training.")
    ] = False,
    verify_resume: Annotated[
        bool,
        typer.Option("--verify-resume", help="Prove in a minute that this recipe resumes bit for bit; no training."),
    ] = False,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a model on two text files, or go on with a run.

    \b
    diglot train --src train.de --tgt train.en --valid-src v.de --valid-tgt v.en \\
        --src-lang de --tgt-lang en --out runs/deen --preset tiny
    diglot train recipe.toml train.seed=2 train.out=runs/second
    diglot train runs/deen                          go on after a stop
    diglot train runs/deen train.max_updates=40000  ... and further than planned
    diglot train --preset small --print-recipe > recipe.toml
    diglot train recipe.toml --verify-resume        kill and resume a short trial of it, and compare bit for bit
    diglot train --init runs/deen/model --src own.de --tgt own.en --out runs/own   fine-tune
    """
    words = list(overrides or [])
    if recipe is not None and "=" in recipe and not Path(recipe).exists():
        words.insert(0, recipe)
        recipe = None
    options = {
        "data.src": src, "data.tgt": tgt, "data.tsv": tsv, "data.valid_src": valid_src, "data.valid_tgt": valid_tgt,
        "languages.src": src_lang, "languages.tgt": tgt_lang, "train.out": out, "train.init": init,
    }  # fmt: skip
    words += [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in options.items() if value]
    path = Path(recipe) if recipe else None
    named, changed = named_keys(words), frozenset[str]()
    if path and path.is_dir():
        words += words_of_run(path, preset, named)
        path, changed = path / "config.toml", named
    resolved = load_recipe(path, preset, tuple(words))
    if print_recipe:
        show(to_toml(resolved, comments=True).removesuffix("\n"))
        return
    if verify_resume:
        raise typer.Exit(prove_resume(resolved, quiet, json_))
    from diglot.parallel import is_first_rank
    from diglot.training import train as run_training

    summary = run_training(resolved, changed=changed, quiet=quiet)
    if json_ and is_first_rank():
        show(json.dumps({**asdict(summary), "model": str(summary.model)}, ensure_ascii=False))


def prove_resume(recipe: Recipe, quiet: bool, as_json: bool) -> int:
    """Print whether a run of a recipe resumes exactly; the answer is the exit code."""
    from diglot.verify import verify_resume

    if not (verdict := verify_resume(recipe, quiet)):  # of a rank that does not print
        return 0
    show(json.dumps(asdict(verdict)) if as_json else verdict.said)
    return 0 if verdict.is_exact else 1


@app.command()
def translate(
    model: Annotated[Path, typer.Argument(help="A model directory, or a run directory.")],
    file: Annotated[
        Path, typer.Argument(help="Text, a line a segment; .gz is unpacked.", show_default=False)
    ] = STANDARD_INPUT,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write here, not to standard output.")] = None,
    to: To = None,
    ensemble: Ensemble = None,
    method: Annotated[str | None, typer.Option(help="beam, greedy or sample.")] = None,
    beam_size: BeamSize = None,
    length_penalty: LengthPenalty = None,
    num_best: Annotated[
        int | None, typer.Option(help="Translations of each line: number, score, text by TABs.")
    ] = None,
    max_extra: Annotated[
        int | None, typer.Option(help="Pieces that a translation may have beyond its source's.")
    ] = None,
    max_segment: Annotated[
        int | None, typer.Option(help="Pieces beyond which a line is split at sentence ends.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Of sampling.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample among so many pieces.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample among the pieces that hold this probability.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of sampling.")] = None,
    prefix: Annotated[str, typer.Option(help="What every translation has to begin with.")] = "",
    device: Device = "auto",
    precision: Precision = "fp32",
    threads: Threads = 0,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Translate standard input or a file, line by line as it comes.

    \b
    echo "Ein Hund rennt." | diglot translate runs/deen/model
    diglot translate runs/deen/model text.de -o text.en
    diglot translate runs/deen/model text.de --num-best 3 --json
    diglot translate runs/deen/model text.de --method sample --top-p 0.9 --seed 7
    diglot translate runs/multi/model text.en --to de
    tail -f log.de | diglot translate runs/deen/model
    """
    options = given(
        method=method, beam_size=beam_size, length_penalty=length_penalty, num_best=num_best, max_extra=max_extra,
        max_segment=max_segment, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed,
    )  # fmt: skip
    from diglot.progress import Reporter
    from diglot.translator import load

    if output is not None and output.exists() and file.exists() and output.samefile(file):
        raise TextError(f"{output} is the text itself: writing there would destroy it; choose another --output.")
    lines = open_input(file)
    translator = load(model, *(ensemble or []), device=device, precision=precision, threads=threads)
    translator.search_config(options)  # a wrong option is told before any text is read
    num_split = num_bound = 0
    with open_output(output) as out:
        reporter = Reporter(quiet or out.isatty())
        with reporter.bar("translating", None) as advance:
            for number, found in enumerate(translator.translate_lines(lines, to=to, prefix=prefix, **options), 1):
                num_split += found.num_segments > 1
                num_bound += found.hit_bound
                out.write(format_translation(found, number, json_))
                out.flush()  # who reads a pipe waits for this line
                advance(1, f"{number:,} lines")
    if num_split:
        reporter.say(f"{num_split:,} long lines were split at sentence ends and translated in parts.")
    if num_bound:
        reporter.say(f"{num_bound:,} translations were ended by the bound on their length (--max-extra).")


@app.command()
def score(
    model: Annotated[Path, typer.Argument(help="A model directory, or a run directory.")],
    src: Annotated[
        Path, typer.Argument(help="Source text, or lines 'source TAB target'.", show_default=False)
    ] = STANDARD_INPUT,
    tgt: Annotated[Path | None, typer.Argument(help="Target text.", show_default=False)] = None,
    to: To = None,
    ensemble: Ensemble = None,
    length_penalty: LengthPenalty = None,
    device: Device = "auto",
    precision: Precision = "fp32",
    threads: Threads = 0,
    json_: Json = False,
) -> None:
    """Print how probable a model finds given translations. Each score is what its search would give.

    \b
    diglot score runs/deen/model text.de text.en
    paste text.de text.en | diglot score runs/deen/model
    diglot score runs/deen/model text.de text.en --json | jq .log_prob
    """
    options = given(length_penalty=length_penalty)
    from diglot.translator import load

    pairs = read_pairs(src, tgt)
    translator = load(model, *(ensemble or []), device=device, precision=precision, threads=threads)
    with open_output(None) as out:
        for found in translator.score_pairs(pairs, to=to, **options):
            values = {"score": found.score, "log_prob": found.log_prob, "num_pieces": found.num_pieces}
            out.write(json.dumps(values) + "\n" if json_ else f"{found.score:.4f}\n")
            out.flush()


@app.command()
def evaluate(
    files: Annotated[list[str], typer.Argument(metavar="MODEL SRC REF | REF", help="With --hyp the reference alone.")],
    hyp: Annotated[Path | None, typer.Option(help="Translations to evaluate ('-': standard input); no model.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the translations here.")] = None,
    lang: Annotated[str | None, typer.Option(help="Code of the target language: how BLEU splits words.")] = None,
    to: To = None,
    beam_size: BeamSize = None,
    length_penalty: LengthPenalty = None,
    device: Device = "auto",
    precision: Precision = "fp32",
    threads: Threads = 0,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Translate a test set and score it by BLEU, chrF and TER. Each score has sacreBLEU's signature.

    \b
    diglot evaluate runs/deen/model test.de test.en
    diglot evaluate --hyp out.en test.en
    diglot translate runs/deen/model test.de | diglot evaluate --hyp - test.en --json
    """
    num_wanted = 1 if hyp else 3
    if len(files) != num_wanted:
        raise typer.BadParameter("give MODEL SRC REF, or --hyp FILE REF")
    from diglot.evaluate import check_lengths
    from diglot.evaluate import evaluate as score_text

    references = read_text(Path(files[-1]))
    if hyp:
        hypotheses = read_text(hyp)
        check_lengths(hypotheses, references, (str(hyp), files[-1]))
    else:
        from diglot.progress import Reporter
        from diglot.translator import load

        sources = read_text(Path(files[1]))
        check_lengths(sources, references, (files[1], files[2]))
        translator = load(files[0], device=device, precision=precision, threads=threads)
        lang = lang if lang is not None else to or translator.spec.languages.tgt
        options = given(beam_size=beam_size, length_penalty=length_penalty)
        hypotheses: list[str] = []
        with Reporter(quiet).bar("translating", len(sources)) as advance:
            for found in translator.translate_lines(sources, to=to, **options):
                hypotheses.append(found.text)
                advance(1, "")
    if output:
        with open_output(output) as out:
            out.writelines(text + "\n" for text in hypotheses)
    scores = score_text(hypotheses, references, lang or "")
    if json_:
        show(json.dumps({one.name: {"score": one.value, "signature": one.signature} for one in scores}))
    else:
        show("\n".join(map(str, scores)))


@app.command()
def info(
    what: Annotated[str, typer.Argument(help="A model directory, a run directory, or the name of a preset.")],
    json_: Json = False,
) -> None:
    """Show what a model, a run or a preset is. That is its languages, its size, its options.

    \b
    diglot info runs/deen/model
    diglot info base            the paper's base model: 63.05 M parameters at 37,000 pieces
    diglot info big --json
    """
    from diglot.info import describe

    facts = describe(what)
    if json_:
        show(json.dumps(facts, ensure_ascii=False))
        return
    lines: list[str] = []
    for section, values in facts.items():
        if not isinstance(values, dict):
            lines.append(f"{section:<24} {values}")
            continue
        lines += ["", section]
        for key, value in cast("dict[str, Any]", values).items():
            words = f"{value:,}" if type(value) is int else str(value)
            if isinstance(value, tuple):
                words = ", ".join(map(str, cast("tuple[Any, ...]", value)))
            lines.append(f"  {key:<22} {words}".rstrip())
    show("\n".join(lines))


@app.command()
def runs(
    directory: Annotated[Path, typer.Argument(help="A directory with runs in it, or in directories below it.")] = Path(
        "runs"
    ),
    json_: Json = False,
) -> None:
    """List training runs: whether each is running, stopped, finished or broken off, how far it is, what it scores.

    \b
    diglot runs
    diglot runs experiments --json | jq '.[] | select(.state == "running") | .run'
    """
    from diglot.runs import HEADER, list_runs

    found = list_runs(directory)
    if json_:
        show(json.dumps([asdict(one) for one in found]))
        return
    rows = [HEADER, *(one.row() for one in found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    show("\n".join(line.rstrip() for line in lines))


@app.command()
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
        options, which = given(num_best=num_best, beam_size=beam_size), (part, layer, tuple(head or ()))
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


@app.command()
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


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where to write the corpus and the run.")] = Path("runs/demo"),
    threads: Threads = 0,
    ask: Annotated[bool, typer.Option(help="Translate what is typed afterwards, at a terminal.")] = True,
) -> None:
    """See it all work in about three minutes. It makes a corpus, trains a model on it, tests it, translates.

    \b
    diglot demo
    diglot demo --out /tmp/demo --no-ask
    """
    from diglot.demo import run_demo

    run_demo(out, threads=threads, ask=ask and sys.stdin is not None and sys.stdin.isatty())


# ------------------------------------------------------------------- what the commands share


def given(**options: Any) -> dict[str, Any]:
    """The options that were given; the others are the model's own."""
    return {name: value for name, value in options.items() if value is not None}


def format_translation(found: Translation, number: int, as_json: bool) -> str:
    """What is printed of a line: its translation, or all that is asked for."""
    if as_json:
        return json.dumps(asdict(found), ensure_ascii=False) + "\n"
    if not found.others:
        return found.text + "\n"
    return "".join(f"{number}\t{one.score:.4f}\t{one.text}\n" for one in (found, *found.others))


def say(error: Exception) -> None:
    """Print an error; under torchrun so that it is read once."""
    if "WORLD_SIZE" not in os.environ:
        print(f"diglot: {on_one_line(str(error))}", file=sys.stderr)
        return
    from diglot.pulse import complain

    complain(error)


def main() -> None:
    """The command `diglot`."""
    # where another program takes a core, threads that spin for long while they wait take the rest: it was seen to be
    # ten times slower; not to spin at all costs a tenth where nothing else runs
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    number = 0
    try:
        app()
    except DiglotError as error:
        say(error)
        sys.exit(1)
    except Interrupted as end:
        number = end.signal_number
        if str(end):
            say(end)
    except OSError as error:  # a full disk, most often
        say(DiglotError(f"cannot read or write {error.filename or 'a file'}: {error.strerror}."))
        sys.exit(1)
    except (RuntimeError, MemoryError) as error:
        from diglot.parallel import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        why = str(error).partition("\n")[0]
        say(DiglotError(f"memory ran out; choose a smaller network or shorter texts ({why})."))
        sys.exit(1)
    if number:
        end_at_once(128 + number)


def end_at_once(code: int) -> None:
    """End, though a thread may still compute outside Python: a tidy end would wait for it, or abort."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or never open
            stream.flush()
    os._exit(code)
