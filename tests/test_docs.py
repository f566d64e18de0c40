"""What the READMEs and the docstrings show is run, and both READMEs say the same."""

from __future__ import annotations

import doctest
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from training_runs import NETWORK, write_pairs

ROOT = Path(__file__).parents[1]
README, CHINESE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh.md"))
SOURCES = sorted((ROOT / "src" / "diglot").glob("*.py"))
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
