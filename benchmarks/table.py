"""Results as a table, for the terminal and for docs/speed.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs" / "speed.md"
HEAD = (
    "system", "setting", "pieces/s", "least, most", "to JoeyNMT", "to Marian", "of bf16 peak", "memory", "epoch 1",
    "later", "pieces/update", "loss",
)  # fmt: skip


def as_table(result: dict[str, Any]) -> str:
    """The results of one network as Markdown, the fastest first, with what they are of."""
    systems: dict[str, Any] = result["systems"]
    peak = result["peak"]
    lines = [
        f"`{result['network']}` on {result['corpus']}, {result['machine']}, {result['date']}, "
        f"commit {result['commit']}, load {result['load']:.1f} before.",
        f"Peak of matrix products: bf16 {peak['bfloat16'] / 1e9:,.0f}, fp32 {peak['float32'] / 1e9:,.0f} GFLOP/s; "
        f"{result['flops_per_piece'] / 1e6:.1f} MFLOP a target piece.",
        "",
        row(HEAD),
        row(["---"] * len(HEAD)),
    ]
    for name, seen in sorted(systems.items(), key=lambda item: -item[1].get("median", 0)):
        if "median" not in seen:
            continue
        speed, long, setting = seen["median"], seen.get("long", {}), f"{seen['setting']}; {seen['note']}"
        extremes = f"{min(seen['speeds']):,.0f}, {max(seen['speeds']):,.0f}"
        share = result["flops_per_piece"] / peak["bfloat16"]
        others = [ratio(speed, systems.get(other, {}).get("median")) for other in ("joeynmt", "marian")]
        sizes = seen["memory"], long.get("first_epoch_memory"), long.get("later_memory")
        loss = f"{long['nll']:.3f} ({long['updates']:,} updates)" if long else ""
        cells = [name, setting, f"{speed:,.0f}", extremes, *others, f"{speed * share:.1%}", *map(megabytes, sizes)]
        lines.append(row([*cells, f"{seen['pieces_per_update']:,.0f}", loss]))
    versions = sorted({version for seen in systems.values() for version in seen["versions"]})
    lines += ["", f"With {', '.join(versions)}."] if versions else []
    if "loader" in result and "median" in systems["diglot"]:
        step = systems["diglot"]["median"]
        said = (f"{speed:,.0f} with {n} ({speed / step:.0f} times the step)" for n, speed in result["loader"].items())
        lines += ["", f"The loader alone, target pieces a second by worker processes: {', '.join(said)}."]
    return "\n".join(lines) + "\n"


def row(cells: Any) -> str:
    """A row of the table."""
    return f"| {' | '.join(cells)} |"


def ratio(speed: float, other: float | None) -> str:
    """How many times as fast."""
    return f"{speed / other:.2f}" if other else ""


def megabytes(size: int | None) -> str:
    """In MB."""
    return f"{size / 1e6:,.0f} MB" if size else ""


def write_into_docs(results: list[dict[str, Any]]) -> None:
    """Each table between the marks of its network in docs/speed.md."""
    text = DOCS.read_text(encoding="utf-8")
    for result in results:
        begin, end = (f"<!-- {edge} of {result['network']} -->" for edge in ("begin", "end"))
        between = re.compile(f"{begin}.*?{end}", re.DOTALL)
        table = f"{begin}\n{as_table(result)}{end}"
        text = between.sub(lambda _, table=table: table, text)
    DOCS.write_text(text, encoding="utf-8")
