"""What memory is left, and what is done where it runs out."""

from __future__ import annotations

from pathlib import Path

import pytest

from diglot import memory, validation
from diglot.training import train
from training_runs import small_recipe

MEGABYTE = 1 << 20


def write_group(directory: Path, limit: int | str, use: int, given_back: int, version: int) -> None:
    """A control group, in megabytes."""
    names = memory.VERSION_2 if version == 2 else memory.VERSION_1
    directory.mkdir(parents=True, exist_ok=True)
    (directory / names[0]).write_text(f"{limit if isinstance(limit, str) else limit * MEGABYTE}\n")
    (directory / names[1]).write_text(f"{use * MEGABYTE}\n")
    (directory / "memory.stat").write_text(f"anon 5\n{names[2][0]} {given_back * MEGABYTE}\n{names[2][1]} 0\n")


@pytest.mark.parametrize("version", [1, 2])
def test_every_control_group_around_a_process_limits_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    root = tmp_path / "memory" if version == 1 else tmp_path
    write_group(root, "max" if version == 2 else 1 << 40, 900, 0, version)
    write_group(root / "outer", 100, 60, 20, version)  # 60 left: pages of files are given back
    write_group(root / "outer" / "inner", 90, 10, 0, version)
    line = "4:cpu,memory:/outer/inner" if version == 1 else "0::/outer/inner"
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "cgroup").write_text(f"9:pids:/elsewhere\n{line}\n")
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(memory, "PROC", tmp_path / "proc")
    assert min(memory.left_in_groups()) == 60 * MEGABYTE
    (tmp_path / "proc" / "cgroup").write_text(line.replace("/outer/inner", "/seen/from/outside/the/container"))
    write_group(root, 50, 10, 5, version)
    assert list(memory.left_in_groups()) == [45 * MEGABYTE]


def test_where_memory_runs_out_in_validation_fewer_lines_go_at_once_and_nothing_else_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("train.max_updates=2", "train.valid_every=2")
    whole = train(small_recipe(tmp_path, "whole", *words), quiet=True)
    real = validation.Translator.translate
    tried: list[int] = []

    def translate(translator: validation.Translator, texts: list[str], **options: object) -> object:
        tried.append(len(texts))
        if len(texts) > 3:
            raise MemoryError
        return real(translator, texts, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(validation.Translator, "translate", translate)
    parts = train(small_recipe(tmp_path, "parts", *words), quiet=True)
    assert max(tried) == 8
    assert min(tried) == 2
    assert parts.scores == whole.scores
