"""Puts what stands in the recipes' result files into the tables of the READMEs, between their markers."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

RECIPES = Path(__file__).parent
HEADERS = {
    "en": ("recipe", "BLEU", "chrF2", "TER", "parameters", "training", "BLEU's signature", "not run"),
    "zh": ("配方", "BLEU", "chrF2", "TER", "参数", "训练", "BLEU 的签名", "未运行"),
}
WORDS = {"en": ("{} to {}, {} runs", "{:.1f} hours"), "zh": ("{} 至 {}，{} 次", "{:.1f} 小时")}
TABLE = re.compile(r"(<!-- results -->\n).*?(<!-- end of results -->)", re.DOTALL)


def rows(folder: Path, language: str) -> list[tuple[str, ...]]:
    """A row for each recipe of a folder, and each way in which it is scored."""
    found: list[tuple[str, ...]] = []
    for recipe in sorted(folder.glob("*.toml")):
        name = f"{folder.name}/{recipe.stem}"
        for way in ("", ".tokenised") if folder.name.startswith("wmt14") else ("",):
            files = sorted(folder.glob(f"{recipe.stem}.seed-*{way}.json"))
            files = [file for file in files if re.fullmatch(rf"seed-\d+{way}", file.stem.split(".", 1)[1])]
            row = row_of(files, language) if files else (HEADERS[language][-1], *[""] * 5)
            found.append((name + way.replace(".", ", "), *row))
    return found


def row_of(files: list[Path], language: str) -> tuple[str, ...]:
    """The cells of some runs of a recipe: scores, size, time, signature."""
    systems = [json.loads(file.read_bytes())["systems"][0] for file in files]
    words, hours = WORDS[language]
    cells: list[str] = []
    for metric in ("BLEU", "chrF2", "TER"):
        scores = [system["scores"][metric] for system in systems]
        values = [score["value"] for score in scores]
        if len(values) > 1:
            spread = words.format(f"{min(values):.2f}", f"{max(values):.2f}", len(values))
            cells.append(f"{statistics.mean(values):.2f} ({spread})")
        else:
            cells.append(f"{values[0]:.2f} ± {scores[0]['interval']:.2f}")
    models = [system["model"] or {} for system in systems]
    sizes = {f"{model['parameters']:,}" for model in models if model}
    times = [model["training"]["seconds"] / 3600 for model in models if "training" in model]
    signatures = {system["scores"]["BLEU"]["signature"] for system in systems}
    if len(signatures) > 1 or len(sizes) > 1:
        raise SystemExit(f"{files[0]} and others of its recipe are not comparable: {signatures} {sizes}")
    return (
        *cells,
        *(sizes or {""}),
        hours.format(statistics.mean(times)) if times else "",
        signatures.pop().replace("|", ", "),
    )


def table(folders: list[Path], language: str = "en") -> str:
    """The rows of some folders as Markdown has them."""
    header = HEADERS[language][:-1]
    lines = [header, ["---"] * len(header), *(row for folder in folders for row in rows(folder, language))]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def pages(root: Path = RECIPES) -> dict[Path, str]:
    """Every README with a table, and how it has to read."""
    folders = sorted({path.parent for path in root.glob("*/*.toml")})
    tables = {root.parent / "README.md": table(folders), root.parent / "README.zh.md": table(folders, "zh")}
    tables |= {root / "README.md": table(folders)} | {folder / "README.md": table([folder]) for folder in folders}
    return {
        path: TABLE.sub(lambda match, new=new: match[1] + new + match[2], path.read_text(encoding="utf-8"))
        for path, new in tables.items()
    }


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
