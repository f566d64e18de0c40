"""What several tests share: a small corpus made by rule, subwords learnt from it, files, and real text."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import settings

from diglot.demo import draw_corpus
from diglot.subwords import Subwords, learn

settings.register_profile("diglot", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("diglot")


TABLE = Path(__file__).parents[1] / "docs" / "torture.md"
HEAD = "what is done", "wanted", "seen"
SHORT = 20  # of so many repetitions one, where the torture is not asked for in full


def pytest_addoption(parser: pytest.Parser):
    parser.addoption("--full", action="store_true", help="all repetitions of the torture, and its table into the docs")


@dataclass
class Torture:
    """How often each cruelty is done, and what came of it."""

    is_full: bool
    rows: list[tuple[str, str, str]] = field(default_factory=list)

    def times(self, full: int) -> int:
        """So many repetitions, or in the short form a fraction of them."""
        return full if self.is_full else max(2, full // SHORT)

    def report(self, what: str, wanted: str, seen: str) -> None:
        """A row of the table at the end."""
        self.rows.append((what, wanted, seen))


def pytest_configure(config: pytest.Config):
    config.stash[TORTURE] = Torture(config.getoption("--full"))


TORTURE = pytest.StashKey[Torture]()


@pytest.fixture(scope="session")
def torture(request: pytest.FixtureRequest) -> Torture:
    """Repetitions and the table of results; `make torture` does it all."""
    return request.config.stash[TORTURE]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config):
    """The table of what was done; in full it goes into the docs, where a row replaces the one of an earlier time."""
    torture = config.stash[TORTURE]
    if not torture.rows:
        return
    terminalreporter.write("\n" + "".join(map(as_line, torture.rows)))
    if torture.is_full:
        intro, head, table = TABLE.read_text().partition(as_line(HEAD))
        rows = dict.fromkeys(line + "\n" for line in table.split("\n") if line and not line.startswith("| ---"))
        seen = {line.split(" | ")[0]: line for line in [*rows, *map(as_line, torture.rows)]}
        TABLE.write_text(intro + head + as_line(("---",) * len(HEAD)) + "".join(seen.values()))


def as_line(row: tuple[str, ...]) -> str:
    """A row as Markdown has it."""
    return f"| {' | '.join(row)} |\n"


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is made once of a text is not left in the home of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DIGLOT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


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
