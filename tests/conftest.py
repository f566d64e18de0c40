"""What several tests share: a small corpus made by rule, subwords learnt from it, files, and real text."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from diglot.demo import draw_corpus
from diglot.subwords import Subwords, learn

settings.register_profile("diglot", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("diglot")


@pytest.fixture(scope="session")
def phrases() -> list[tuple[str, str]]:
    """Four hundred pairs, English and German."""
    return draw_corpus(400, seed=7)


@pytest.fixture(scope="session")
def subwords(phrases: list[tuple[str, str]]) -> Subwords:
    """One small vocabulary for both sides of the phrases."""
    return learn((text for pair in phrases for text in pair), size=420)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str | bytes], Path]:
    """Write a file below tmp_path; text is written as UTF-8 and as it is, line ends too."""

    def write_file(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write_file


@pytest.fixture(scope="session")
def data() -> Path:
    """The directory of real corpora; a test that needs it is skipped where it is not."""
    path = Path(os.environ.get("DIGLOT_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not path.is_dir():
        pytest.skip(f"there is no real text in {path}; set DIGLOT_DATA to where it is")
    return path
