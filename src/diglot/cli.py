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
from diglot import cli_models
from diglot.config import PRESETS, Recipe, load_recipe, named_keys, to_toml, words_of_run
from diglot.errors import DiglotError, Interrupted, TextError, on_one_line
from diglot.options import (
    BeamSize,
    Device,
    Ensemble,
    Json,
    LengthPenalty,
    Precision,
    Quiet,
    SrcLang,
    TgtLang,
    Threads,
    To,
    given,
)
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
    src_lang: SrcLang = None,
    tgt_lang: TgtLang = None,
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
    from diglot.parallel import world_asked_for
    from diglot.training import train as run_training

    summary = run_training(resolved, changed=changed, quiet=quiet)
    if json_ and world_asked_for().is_first:
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
    files: Annotated[
        list[str], typer.Argument(metavar="[[MODEL...] SRC] REF", help="SRC may be left out with --hyp alone.")
    ],
    hyp: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Translations to evaluate; may be repeated.")
    ] = None,
    train: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="SRC TGT", help="Training text to look for test lines in [default: the run's]."),
    ] = None,
    origins: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where each test line is from, a name a line: scores by it.")
    ] = None,
    robustness: Annotated[
        bool, typer.Option("--robustness", help="Score also what is made of capitals, typing errors and the like.")
    ] = False,
    tokenized: Annotated[
        bool, typer.Option("--tokenized", help="The text is tokenised: BLEU's words are what spaces part.")
    ] = False,
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
    """Translate a test set and score it by BLEU, chrF and TER, each with sacreBLEU's signature and its 95 % interval.

    Several systems, models or files, are compared with the first. Of the training text, that of the model's run or
    that of --train, the test lines are counted that stand in it.

    \b
    diglot evaluate runs/deen/model test.de test.en
    diglot evaluate runs/deen/model runs/other/model test.de test.en --robustness
    diglot evaluate --hyp out.en --hyp other.en test.en
    diglot translate runs/deen/model test.de | diglot evaluate --hyp - test.en --json
    """
    *models, src, ref = files if len(files) > 1 else ("", *files)
    named = [str(path) for path in hyp or ()]
    if not models + named or (models and not src):
        raise typer.BadParameter("give MODEL SRC REF, or --hyp FILE REF")
    if robustness and not models:
        raise typer.BadParameter("--robustness translates the source again: give MODEL SRC REF")
    if output and len(models + named) > 1:
        raise typer.BadParameter("--output is for the translations of one system; leave it out, or the others")
    from diglot.progress import Reporter
    from diglot.report import TestText, evaluate_systems

    sources, labels = (read_text(Path(name)) if name else None for name in (src, origins))
    test = TestText(sources, read_text(Path(ref)), labels, lang, tokenized)
    test.check((src, ref, str(origins)))
    outputs = [(name, read_text(Path(name))) for name in named]
    report = evaluate_systems(
        test, models, outputs, robustness=robustness, train=train, reporter=Reporter(quiet),
        options=given(to=to, beam_size=beam_size, length_penalty=length_penalty),
        how={"device": device, "precision": precision, "threads": threads},
    )  # fmt: skip
    if json_ and (leaks := report.warning()):
        Reporter(quiet).say(leaks)
    if output:
        with open_output(output) as out:
            out.writelines(text + "\n" for text in report.judgements[0].system.hypotheses)
    show(report.as_json() if json_ else report.as_text())


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
    from diglot.runs import HEADER, in_columns, list_runs

    found = list_runs(directory)
    if json_:
        show(json.dumps([asdict(one) for one in found]))
        return
    show("\n".join(in_columns([HEADER, *(one.row() for one in found)])))


app.add_typer(cli_models.commands)  # without a name: they stand beside the others


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
