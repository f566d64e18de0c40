"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing on standard error but errors.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda; auto: a GPU where there is one.")]
Precision = Annotated[str, typer.Option(help="fp32 or bf16.")]
Threads = Annotated[int, typer.Option(help="CPU threads; 0: one a core.", min=0)]
Ensemble = Annotated[
    list[Path] | None,
    typer.Option(metavar="MODEL", help="A further model of the same vocabulary, to average with; may be repeated."),
]
SrcLang = Annotated[str | None, typer.Option(metavar="CODE", help="Code of the source language, as de.")]
TgtLang = Annotated[str | None, typer.Option(metavar="CODE", help="Code of the target language, as en.")]
To = Annotated[str | None, typer.Option(help="Language to translate into, of a model that knows several.")]
BeamSize = Annotated[int | None, typer.Option(help="Hypotheses that the beam keeps [default: the model's, usually 4].")]
LengthPenalty = Annotated[float | None, typer.Option(help="Alpha [default: the model's, usually 0.6].")]


def given(**options: Any) -> dict[str, Any]:
    """The options that were given; the others are the model's own."""
    return {name: value for name, value in options.items() if value is not None}
