"""What is on disk: all or nothing, whatever fails; what is broken is refused by name; in and out bit for bit."""

from __future__ import annotations

import errno
import functools
import hashlib
import itertools
import json
import os
import random
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from diglot.checkpoint import (
    FORMAT,
    MANIFEST,
    WEIGHTS,
    average_weights,
    check_directory,
    find_model,
    link_best,
    list_steps,
    load_model,
    model_files,
    newest_step,
    prune,
    put_weights,
    replace_file,
    step_path,
    sweep,
    weights_of,
    write_directory,
)
from diglot.config import LanguagesConfig, ModelConfig, ModelSpec, SearchConfig
from diglot.errors import CheckpointError, DiglotError
from diglot.model import Transformer, padding_mask
from diglot.subwords import Subwords, learn

OLD = {"one": b"old", "two": b"old " * 999}
NEW = {"one": b"new", "three": b"", "four": b"new " * 999}
TINY = ModelConfig(d_model=8, d_ff=8, num_heads=2, num_encoder_layers=1, num_decoder_layers=1)


class Killed(BaseException):
    """What a process that is killed does not live to see: nothing catches it."""


def content_of(path: Path) -> dict[str, bytes] | None:
    """The files of a whole directory but its manifest; None where there is no directory."""
    if not path.exists():
        return None
    check_directory(path)
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != MANIFEST}


def fail_at(patch: pytest.MonkeyPatch, step: int, error: BaseException) -> None:
    """Let the step-th of all calls that change the disk fail."""
    calls = itertools.count()

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not kwargs.get("ignore_errors") and next(calls) == step:
                raise error
            return real(*args, **kwargs)

        return call

    for where, name in (
        (os, "fsync"), (Path, "open"), (Path, "mkdir"), (Path, "rename"), (Path, "replace"), (shutil, "rmtree"),
    ):  # fmt: skip
        patch.setattr(where, name, failing(getattr(where, name)))


@pytest.fixture(params=["full", "killed"])
def error(request: pytest.FixtureRequest) -> BaseException:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if request.param == "full" else Killed()


# ------------------------------------------------------------------- all or nothing


def test_a_directory_holds_what_was_written_and_a_list_of_it(tmp_path: Path) -> None:
    path = tmp_path / "run" / "model"
    write_directory(path, NEW)
    manifest = check_directory(path)
    assert content_of(path) == NEW
    assert manifest["format"] == FORMAT
    assert {name: entry["sha256"] for name, entry in manifest["files"].items()} == {
        name: hashlib.sha256(content).hexdigest() for name, content in NEW.items()
    }
    write_directory(path, OLD)
    assert content_of(path) == OLD
    assert [file.name for file in path.parent.iterdir()] == ["model"]


def is_stopped(path: Path, step: int, error: BaseException, write: Callable[[], None]) -> bool:
    """Whether `write` is stopped by a failure at a step; what a user reads of it is checked, leftovers are swept."""
    stop: BaseException | None = None
    with pytest.MonkeyPatch.context() as patch:
        fail_at(patch, step, error)
        try:
            write()
        except (Killed, CheckpointError) as caught:
            stop = caught
    sweep(path.parent)
    if isinstance(stop, CheckpointError):
        assert str(stop).startswith(f"cannot write {path}: No space left on device.")
        assert "\n" not in str(stop)
    return stop is not None


def test_a_new_directory_is_whole_or_not_there_whatever_step_fails(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "model"
    for step in itertools.count():
        stopped = is_stopped(path, step, error, lambda: write_directory(path, NEW))
        assert content_of(path) in (None, NEW)
        assert [file.name for file in tmp_path.iterdir()] in ([], ["model"])
        if not stopped:
            break
        shutil.rmtree(path, ignore_errors=True)
    assert step > len(NEW)
    assert content_of(path) == NEW


def test_a_directory_that_is_replaced_is_old_or_new_whatever_step_fails(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "model"
    found: list[str] = []
    for step in itertools.count():
        shutil.rmtree(path, ignore_errors=True)
        write_directory(path, OLD)
        stopped = is_stopped(path, step, error, lambda: write_directory(path, NEW))
        content = content_of(path)
        found.append("old" if content == OLD else "new" if content == NEW else "lost")
        assert [file.name for file in tmp_path.iterdir()] in ([], ["model"])
        if not stopped:
            break
    assert step > len(NEW)
    assert "lost" not in found, f"by a failure at step {found.index('lost')} of {step}"
    assert content_of(path) == NEW


def test_a_file_that_is_replaced_is_old_or_new_whatever_step_fails(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "config.toml"
    for step in itertools.count():
        path.write_bytes(b"old")
        stopped = is_stopped(path, step, error, lambda: replace_file(path, b"new"))
        assert path.read_bytes() in (b"old", b"new")
        assert [file.name for file in tmp_path.iterdir()] == ["config.toml"]
        if not stopped:
            break
    assert step >= 3
    assert path.read_bytes() == b"new"


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot write .*file/model: Not a directory"):
        write_directory(tmp_path / "file" / "model", NEW)


def test_sweeping_takes_what_is_half_written_and_nothing_else(tmp_path: Path) -> None:
    write_directory(tmp_path / "step-000001", NEW)
    (tmp_path / ".writing-step-000002").mkdir()
    (tmp_path / ".writing-step-000002" / "half").touch()
    (tmp_path / ".writing-config.toml").touch()
    (tmp_path / ".writing-best").symlink_to("step-000001")
    (tmp_path / "log.jsonl").touch()
    sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.jsonl", "step-000001"]
    assert content_of(tmp_path / "step-000001") == NEW


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_modes_are_as_the_user_has_set_them(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        write_directory(tmp_path / "model", NEW)
        replace_file(tmp_path / "config.toml", b"")
    finally:
        os.umask(before)
    for path in tmp_path.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o777 if path.is_dir() else 0o666) & ~mask


# ------------------------------------------------------------------- what is broken


def small_model(subwords: Subwords, config: ModelConfig = TINY, other: Subwords | None = None) -> Transformer:
    torch.manual_seed(1)
    return Transformer(config, subwords.num_pieces, (other or subwords).num_pieces)


def files_of(subwords: Subwords, config: ModelConfig = TINY, **weights: torch.Tensor) -> dict[str, bytes]:
    """The files of a small model, with some weights put in place of its own."""
    spec = ModelSpec(config, LanguagesConfig("de", "en"), SearchConfig(beam_size=3))
    return model_files(spec, {**weights_of(small_model(subwords)), **weights}, subwords, subwords, "A card.\n")


@pytest.fixture
def model(tmp_path: Path, subwords: Subwords) -> Path:
    path = tmp_path / "model"
    write_directory(path, files_of(subwords))
    return path


def test_every_flipped_bit_is_found(model: Path) -> None:
    files = sorted(model.iterdir())
    places = random.Random(1)
    for number in range(60):
        path = files[number % len(files)]
        content = path.read_bytes()
        broken = bytearray(content)
        broken[places.randrange(len(content))] ^= 1 << places.randrange(8)
        path.write_bytes(broken)
        said = "it is not the list of files" if path.name == MANIFEST else "it is not the file that was written"
        with pytest.raises(CheckpointError, match=f"{path.name} is broken: {said}"):
            load_model(model)
        path.write_bytes(content)
    check_directory(model)


def test_a_file_of_another_length_is_found(model: Path) -> None:
    for path in sorted(model.iterdir()):
        content = path.read_bytes()
        end = len(content) - 2 if path.name == MANIFEST else len(content)
        for broken in (b"", content[: end // 2], content[: end - 1], content + b"x"):
            path.write_bytes(broken)
            with pytest.raises(CheckpointError, match=f"{path.name} is broken"):
                load_model(model)
        path.unlink()
        with pytest.raises(CheckpointError, match=path.name):
            load_model(model)
        path.write_bytes(content)
    load_model(model)


def test_a_link_or_directory_in_place_of_a_file_is_refused(model: Path, tmp_path: Path) -> None:
    path, copy = model / WEIGHTS, tmp_path / "copy"
    path.rename(copy)
    path.symlink_to(copy)
    with pytest.raises(CheckpointError, match=f"{WEIGHTS} is broken: it is a link, a directory or a device"):
        load_model(model)
    path.unlink()
    copy.rename(path)
    card = model / "README.md"
    card.rename(tmp_path / "card1")
    card.symlink_to("../card1")  # as long as what it leads to
    assert card.lstat().st_size == card.stat().st_size
    with pytest.raises(CheckpointError, match=r"README\.md is broken"):
        load_model(model)
    card.unlink()
    (tmp_path / "card1").rename(card)
    load_model(model)
    path.unlink()
    path.mkdir()
    with pytest.raises(CheckpointError, match=f"{WEIGHTS} is broken: it is a link, a directory"):
        load_model(model)


def test_a_manifest_of_the_first_format_had_no_seal_and_is_read(model: Path) -> None:
    manifest = json.loads((model / MANIFEST).read_bytes())
    del manifest["sha256"]
    (model / MANIFEST).write_text(json.dumps({**manifest, "format": 1}, indent=1))
    assert load_model(model).spec.languages.src == "de"
    (model / MANIFEST).write_text(json.dumps(manifest, indent=1))
    with pytest.raises(CheckpointError, match="it is not the list of files"):
        load_model(model)


def test_what_the_manifest_does_not_list_is_not_read(model: Path) -> None:
    weights = (model / WEIGHTS).read_bytes()
    listed = {path.name: path.read_bytes() for path in model.iterdir() if path.name not in (MANIFEST, WEIGHTS)}
    write_directory(model, listed)
    (model / WEIGHTS).write_bytes(weights)
    with pytest.raises(CheckpointError, match=r"is no whole model: its manifest\.json lists no model\.safetensors"):
        load_model(model)


def test_a_newer_format_is_refused_by_number_and_version(model: Path) -> None:
    manifest = json.loads((model / MANIFEST).read_bytes())
    manifest.update(format=FORMAT + 1, diglot="9.8.7")
    (model / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=rf"has format {FORMAT + 1}, written by diglot 9\.8\.7.*install a newer"):
        load_model(model)


ENTRY = {"bytes": 1, "sha256": hashlib.sha256(b"x").hexdigest()}


@pytest.mark.parametrize(
    "manifest",
    [
        b"",
        b"\xff",
        b'{"format": 1',
        b"[]",
        b"{}",
        b"null",
        b"3",
        b'{"format": 1}',
        b'{"files": {}}',
        b'{"format": "x", "files": {}}',
        b'{"format": null, "files": {}}',
        b'{"format": 1, "files": []}',
        b'{"format": 1, "files": {"config.toml": 3}}',
        b'{"format": 1, "files": {"config.toml": {"bytes": 1}}}',
        b'{"format": 1, "files": {"config.toml": {"bytes": "x", "sha256": ""}}}',
        pytest.param(b'{"format": 1e999, "files": {}}', id="infinite"),
        pytest.param(b'{"format": ' + b"9" * 5000 + b', "files": {}}', id="huge"),
        pytest.param(b"[" * 100_000, id="deep"),
        *(
            pytest.param(json.dumps({"format": 1, "files": {name: ENTRY}}).encode(), id=f"name {name[:9]!r}")
            for name in ("../model/x", "..", ".", "", "/etc/passwd", "a/b", "./x", "x/", "a\0b", "\ud800", "a" * 300)
        ),
    ],
)
def test_a_broken_manifest_is_refused(model: Path, manifest: bytes) -> None:
    (model / "x").write_bytes(b"x")
    (model / MANIFEST).write_bytes(manifest)
    with pytest.raises(CheckpointError) as caught:
        load_model(model)
    assert str(model) in str(caught.value)


def test_a_directory_without_a_manifest_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is not a model directory: it has no manifest\.json"):
        load_model(tmp_path)
    with pytest.raises(CheckpointError, match="there is no model directory"):
        load_model(tmp_path / "gone")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("shape", r"config\.toml: decoder\..* should have the shape .* and has .*"),
        ("more", r"tensor_of_nothing should have the shape None and has \(3,\)"),
        ("fewer", r"src_embedding\.weight should have the shape .* and has None"),
        ("no tensors", r"model\.safetensors is broken"),
        ("no config", r"is no whole model: its manifest\.json lists no config\.toml"),
        ("odd config", r"unknown key 'model\.d_modle'"),
        ("no subwords", r"is no whole model: its manifest\.json lists no subwords\.src\.model"),
    ],
)
def test_files_that_do_not_fit_each_other_are_named(
    tmp_path: Path, subwords: Subwords, change: str, words: str
) -> None:
    files = files_of(subwords)
    match change:
        case "shape":
            files["config.toml"] = files["config.toml"].replace(b"d_ff = 8", b"d_ff = 16")
        case "more":
            files = files_of(subwords, tensor_of_nothing=torch.zeros(3))
        case "fewer":
            weights = safetensors.torch.load(files[WEIGHTS])
            del weights["src_embedding.weight"]
            files[WEIGHTS] = safetensors.torch.save(weights)
        case "no tensors":
            files[WEIGHTS] = b"nothing of the kind"
        case "no config":
            del files["config.toml"]
        case "odd config":
            files["config.toml"] = files["config.toml"].replace(b"d_model", b"d_modle")
        case _:
            del files["subwords.model"]
    write_directory(tmp_path / "model", files)
    with pytest.raises(DiglotError, match=words):
        load_model(tmp_path / "model")


def test_one_matrix_for_two_vocabularies_is_refused(tmp_path: Path, subwords: Subwords) -> None:
    files = files_of(subwords)
    files["subwords.src.model"] = files.pop("subwords.model")
    files["subwords.tgt.model"] = learn(["another text"] * 9, 400).proto
    write_directory(tmp_path / "model", files)
    with pytest.raises(DiglotError, match="model"):
        load_model(tmp_path / "model")


# ------------------------------------------------------------------- models, out and in again


@pytest.mark.parametrize(("tie", "is_joint"), [("all", 1), ("output", 1), ("none", 1), ("output", 0), ("none", 0)])
def test_a_model_is_read_back_bit_for_bit(
    tmp_path: Path, subwords: Subwords, phrases: list[tuple[str, str]], tie: str, is_joint: int
) -> None:
    tgt_subwords = subwords if is_joint else learn((tgt for _, tgt in phrases), 380)
    spec = ModelSpec(
        ModelConfig(**{**vars(TINY), "tie": tie, "output_bias": True, "attention_bias": True}),
        LanguagesConfig('"d\\e"', "en\n"),
        SearchConfig(beam_size=7, length_penalty=1 / 3),
    )
    model = small_model(subwords, spec.model, tgt_subwords)
    for parameter in model.parameters():  # biases too, which begin as zeros
        torch.nn.init.normal_(parameter)
    write_directory(tmp_path / "model", model_files(spec, weights_of(model), subwords, tgt_subwords, "Card: ü\n"))
    stored = load_model(tmp_path / "model")
    assert stored.spec == spec
    assert (stored.src_subwords, stored.tgt_subwords) == (subwords, tgt_subwords)
    assert (stored.src_subwords is stored.tgt_subwords) == bool(is_joint)
    assert (tmp_path / "model" / "README.md").read_text(encoding="utf-8") == "Card: ü\n"
    one, two = weights_of(model), weights_of(stored.model)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    src, tgt = torch.tensor([subwords.encode("one two")]), torch.tensor([tgt_subwords.encode("eins zwei")])
    mask = padding_mask(torch.tensor([src.size(1)]))
    with torch.no_grad():
        for part in (model, stored.model):
            part.eval()
        assert torch.equal(model.project(model(src, mask, tgt)), stored.model.project(stored.model(src, mask, tgt)))


def test_weights_that_are_shared_are_written_once(model: Path) -> None:
    names = safetensors.torch.load_file(model / WEIGHTS).keys()
    assert "src_embedding.weight" in names
    assert not {"tgt_embedding.weight", "output.weight"} & names


def test_weights_are_put_into_another_model(subwords: Subwords) -> None:
    one, two = small_model(subwords), small_model(subwords)
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.add_(1)
    put_weights(two, weights_of(one))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert two.output.weight is two.src_embedding.weight


@pytest.mark.parametrize("num", [1, 2, 5])
def test_the_average_is_the_mean_of_the_weights(tmp_path: Path, num: int) -> None:
    torch.manual_seed(1)
    stacks = {"a.weight": torch.randn(num, 7, 5) * 1e3, "b": torch.randn(num, 3) + 1e6, "c": torch.full((num, 2), 0.1)}
    paths = [tmp_path / f"step-{i}" for i in range(num)]
    for i, path in enumerate(paths):
        path.mkdir()
        safetensors.torch.save_file({name: stack[i].clone() for name, stack in stacks.items()}, path / WEIGHTS)
    average = average_weights(paths)
    assert average.keys() == stacks.keys()
    for name, stack in stacks.items():
        assert average[name].dtype == torch.float32
        torch.testing.assert_close(average[name], stack.double().mean(0).float(), rtol=1e-7, atol=0)


# ------------------------------------------------------------------- runs


def make_steps(run: Path, *updates: int) -> list[Path]:
    for update in updates:
        write_directory(step_path(run, update), {"state.json": str(update).encode()})
    return [step_path(run, update) for update in updates]


def test_a_run_stands_for_its_final_model_and_before_that_for_its_best(tmp_path: Path) -> None:
    assert find_model(tmp_path) == tmp_path
    step, _ = make_steps(tmp_path, 1, 2)
    assert find_model(step) == step
    link_best(tmp_path, step)
    assert find_model(tmp_path) == tmp_path / "best"
    assert (tmp_path / "best").resolve() == step.resolve()
    write_directory(tmp_path / "model", NEW)
    assert find_model(tmp_path) == tmp_path / "model"
    assert find_model(tmp_path / "model") == tmp_path / "model"


def test_best_follows_and_may_be_moved_with_its_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    one, two = make_steps(run, 1, 2)
    for step in (one, two, one):
        link_best(run, step)
        assert content_of(run / "best") == content_of(step)
    run.rename(tmp_path / "elsewhere")
    assert content_of(tmp_path / "elsewhere" / "best") == {"state.json": b"1"}
    assert sorted(path.name for path in (tmp_path / "elsewhere").iterdir()) == ["best", "step-000001", "step-000002"]


def test_steps_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    make_steps(tmp_path, 1_000_000, 500, 999_999)
    (tmp_path / "step-x").mkdir()
    (tmp_path / "step-000007").touch()
    assert [path.name for path in list_steps(tmp_path)] == ["step-000500", "step-999999", "step-1000000"]


def test_the_newest_step_that_is_whole_is_taken_and_the_others_are_told(tmp_path: Path) -> None:
    assert newest_step(tmp_path) == (None, [])
    one, two, three = make_steps(tmp_path, 1, 2, 3)
    assert newest_step(tmp_path) == (three, [])
    (three / "state.json").write_bytes(b"4")
    (two / MANIFEST).unlink()
    found, complaints = newest_step(tmp_path)
    assert found == one
    assert [str(three) in complaints[0], str(two) in complaints[1]] == [True, True]
    assert "is broken" in complaints[0]
    (one / "state.json").unlink()
    found, complaints = newest_step(tmp_path)
    assert found is None
    assert len(complaints) == 3


@pytest.mark.parametrize("newest", [1, 2, 9])
def test_pruning_keeps_the_newest_and_what_is_named(tmp_path: Path, newest: int) -> None:
    steps = make_steps(tmp_path, 1, 2, 3, 4, 5)
    (tmp_path / "log.jsonl").touch()
    prune(tmp_path, keep={"step-000002", "step-000099"}, newest=newest)
    kept = [step for step in steps if step.name == "step-000002" or step in steps[-newest:]]
    assert list_steps(tmp_path) == kept
    assert all(content_of(step) for step in kept)
    assert len(list(tmp_path.iterdir())) == len(kept) + 1
