"""What the READMEs, the docstrings and the documentation show is run, and what they name is there."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import html
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch

import diglot
from diglot.config import load_recipe
from diglot.demo import demo_recipe
from diglot.info import count_parameters
from diglot.model import Transformer
from training_runs import NETWORK, write_pairs

ROOT = Path(__file__).parents[1]
README, CHINESE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh.md"))
SOURCES = sorted((ROOT / "src" / "diglot").glob("*.py"))
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *(ROOT / "recipes").glob("*/README.md")])
PAPER, TUTORIAL = (
    (ROOT / "docs" / "guide" / name).read_text(encoding="utf-8") for name in ("paper.md", "first-model.md")
)
EXPLAINED = [path.stem for path in SOURCES if ">>>" in path.read_text(encoding="utf-8")]


def blocks(text: str, language: str) -> list[str]:
    """The code that is shown in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", EXPLAINED)
def test_the_examples_of_a_module_hold(name: str):
    result = doctest.testmod(importlib.import_module("diglot" if name == "__init__" else f"diglot.{name}"))
    assert not result.failed


def test_the_readmes_name_every_module():
    for text in (README, CHINESE):
        assert {path.name for path in SOURCES if not path.stem.startswith("__")} <= set(re.findall(r"\w+\.py", text))


def test_both_readmes_have_the_same_parts():
    for pattern in (r"^#+ ", r"^- ", r"^\|.*\|$", r"^```\w+$"):
        one, two = (re.findall(pattern, text, re.MULTILINE) for text in (README, CHINESE))
        assert len(one) == len(two), pattern
    figures = [sorted(re.findall(r"\d[\d.,]*\d|\d", text)) for text in (README, CHINESE)]
    assert figures[0] == figures[1]


@pytest.mark.slow
@pytest.mark.parametrize(("readme", "languages"), [(README, ("de", "en")), (CHINESE, ("zh", "en"))])
def test_the_first_own_model_is_made_as_the_readme_says(readme: str, languages: tuple[str, str], tmp_path: Path):
    for name, seed in (("train", 1), ("test", 2)):
        write_pairs(tmp_path, name, 200, seed)
        for made, language in zip(("de", "en"), languages, strict=True):
            (tmp_path / f"{name}.{made}").rename(tmp_path / f"{name}.{language}")
    shell = next(block for block in blocks(readme, "sh") if "diglot train" in block)
    python, parts = blocks(readme, "python")
    words = " ".join(f"'{word}'" for word in NETWORK if not word.startswith("languages"))
    paths = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    for line in shell.splitlines():
        if line.startswith("pip"):
            continue
        command = f"{line} {words}" if line.startswith("diglot train") else line
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command], cwd=tmp_path, env=os.environ | {"PATH": paths}, check=True,
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.stdout or line.startswith("diglot train")
    for code in (python, parts):
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


# ------------------------------------------------------------------- the documentation


def names_in(path: Path) -> set[str]:
    """What a Python file defines, with a dot before what a class does."""

    def names(node: ast.AST, prefix: str) -> set[str]:
        found: set[str] = set()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                found |= {prefix + child.name} | names(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.Assign | ast.AnnAssign):
                found.add(prefix + ast.unparse(child.targets[0] if isinstance(child, ast.Assign) else child.target))
        return found

    return names(ast.parse(path.read_text(encoding="utf-8")), "")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_to_names_in_them(page: Path):
    for path, name in re.findall(r"\]\((?!\w+:|#)([^)\s#]+)(?:#([^)\s]+))?\)", page.read_text(encoding="utf-8")):
        target = page.parent / path
        assert target.exists(), path
        if name and target.suffix == ".py":
            assert name in names_in(target), f"{path}#{name}"


def test_every_statement_on_the_paper_has_code_and_a_test():
    for line in PAPER.splitlines():
        if line.startswith("- Code: "):
            assert re.search(r"\.\./\.\./src/diglot/[\w/]+\.py#\w+", line), line
        if line.startswith("- Test: "):
            assert re.search(r"\.\./\.\./tests/test_\w+\.py#test_\w+", line), line
    assert PAPER.count("- Code: ") == PAPER.count("- Test: ") > 30


def test_code_that_the_page_on_the_paper_shows_is_in_the_source():
    source = "\n".join(line.strip() for path in SOURCES for line in path.read_text(encoding="utf-8").splitlines())
    for block in blocks(PAPER, "python"):
        assert "\n".join(line.strip() for line in block.splitlines()) in source, block


def count_at(num_pieces: int, preset: str, words: str) -> int:
    config = load_recipe(None, preset, tuple(words.split())).model
    with torch.device("meta"):
        return count_parameters(Transformer(config, num_pieces, num_pieces))["all"]


def test_the_sizes_of_table_3_are_counted():
    table = re.findall(r"^\| (base|B|C|big) \| `?(.*?)`? \| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", PAPER, re.MULTILINE)
    assert len(table) == 11
    fits: set[int] = set()
    for row, words, paper, at_37000, at_41100 in table:
        preset = "big" if row == "big" else "base"
        assert f"{count_at(37000, preset, words) / 1e6:.2f}" == at_37000
        assert f"{count_at(41100, preset, words) / 1e6:.2f}" == at_41100
        assert round(count_at(37000, preset, words) / 1e6) != int(paper)
        if row == "big":
            assert round(count_at(36000, preset, words) / 1e6) == int(paper)
            continue
        width = load_recipe(None, preset, tuple(words.split())).model.d_model
        rest = count_at(37000, preset, words) - 37000 * width
        sizes = {n for n in range(35_000, 45_000) if round((rest + n * width) / 1e6) == int(paper)}
        fits = fits & sizes if fits else sizes
    assert (min(fits), max(fits)) == (41_004, 41_208)


def test_the_python_reference_describes_every_public_name():
    page = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    for name in set(diglot.__all__) - {"__version__"}:
        assert f":: diglot.{name}\n" in page or f"`{name}`" in page, name


def test_the_first_recipe_of_the_tutorial_is_the_demos(tmp_path: Path):
    shown = re.search(r"<<'END'\n(.*?)^END$", TUTORIAL, re.MULTILINE | re.DOTALL)
    assert shown
    path = tmp_path / "first.toml"
    path.write_text(shown[1], encoding="utf-8")
    shown_recipe, demo = load_recipe(path), demo_recipe(Path())
    assert shown_recipe.model == demo.model
    assert shown_recipe.subwords == demo.subwords
    assert shown_recipe.languages == demo.languages
    assert shown_recipe.train == dataclasses.replace(
        demo.train, out=shown_recipe.train.out, watch=0
    )  # which draws, and trains the same


@pytest.mark.slow
def test_what_the_tutorial_types_works(tmp_path: Path):
    # fewer updates than a good model needs, and fewer lines to translate; everything else as it stands there
    text = re.sub(r"(max_updates ?= ?)\d+", r"\g<1>8", TUTORIAL)
    text = re.sub(r"(valid_every ?= ?)\d+", r"\g<1>4", text)
    paths = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    steps = re.findall(r"^```(sh|python)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert {language for language, _ in steps} == {"sh", "python"}
    for language, code in steps:
        command = ["bash", "-eu", "-c", code] if language == "sh" else [sys.executable, "-c", code]
        subprocess.run(command, cwd=tmp_path, env=os.environ | {"PATH": paths}, check=True, stdout=subprocess.DEVNULL)
        for path in (tmp_path / "text").glob("test.*"):
            path.write_text("\n".join(path.read_text(encoding="utf-8").split("\n")[:50]) + "\n", encoding="utf-8")
    made = (tmp_path / "test.out.de").read_text(encoding="utf-8"), (tmp_path / "own.out.de").read_text(encoding="utf-8")
    assert [text.count("\n") for text in made] == [50, 100]


@pytest.mark.slow
def test_the_documentation_builds_without_a_warning_and_its_links_resolve(tmp_path: Path):
    command = [sys.executable, "-m", "sphinx", "-E", "-q", "-W", "-c", "docs", ".", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True)
    pages = {path: path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.html")}
    ids = {path: set(re.findall(r' id="([^"]+)"', text)) for path, text in pages.items()}
    for page, text in pages.items():
        for link in re.findall(r'(?:href|src)="([^"]+)"', text):
            if re.match(r"https?:|mailto:|data:", link):
                continue
            path, _, anchor = html.unescape(link).partition("#")
            target = (page.parent / unquote(path.partition("?")[0])).resolve() if path else page
            assert target.exists(), (page.name, link)
            assert not anchor or target.suffix != ".html" or anchor in ids[target], (page.name, link)
    assert {"diglot-train", "diglot-evaluate"} <= ids[tmp_path / "docs" / "reference" / "commands.html"]
    assert {"model", "train", "search"} <= ids[tmp_path / "docs" / "reference" / "options.html"]
    assert not [
        page.name for page, text in pages.items() if re.search(r'(?:src|href)="(https?:)?//[^"]+\.(js|css)', text)
    ]
