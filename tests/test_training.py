"""Training: what an update computes, what a run leaves behind, and that a stopped run goes on as if it had not been."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import math
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import diglot
from diglot import checkpoint, training
from diglot.config import Recipe, load_recipe
from diglot.corpus import read_lines
from diglot.errors import ConfigError, Interrupted, TextError, TrainingError
from diglot.evaluate import bleu
from diglot.training import train
from training_runs import small_recipe, write_pairs


def log_of(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def changed(recipe: Recipe, **values: object) -> Recipe:
    return dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, **values))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six updates, with dropout, that nothing interrupted."""
    directory = tmp_path_factory.mktemp("finished")
    train(small_recipe(directory, "run"), quiet=True)
    return directory / "run"


def test_a_run_leaves_its_recipe_its_log_its_checkpoints_and_a_model(finished: Path):
    names = {path.name for path in finished.iterdir()}
    assert names == {
        ".lock", "config.toml", "dropped.tsv", "log.jsonl", "step-000003", "step-000006", "best", "model",
    }  # fmt: skip
    updates = [line["update"] for line in log_of(finished) if "loss" in line]
    assert updates == [1, 2, 3, 4, 5, 6]
    validations = [line for line in log_of(finished) if "valid_bleu" in line]
    assert [line["update"] for line in validations] == [3, 6]
    assert all(len(line["valid_samples"]) == 3 and "tok:13a" in line["valid_signature"] for line in validations)
    for path in (finished / "step-000003", finished / "step-000006", finished / "best", finished / "model"):
        checkpoint.check_directory(path)
    card = (finished / "model" / "README.md").read_text()
    assert "en to de" in card
    assert "train.en, train.de" in card
    assert "tok:13a" in card
    assert "licence" in card


def test_the_final_model_is_the_mean_of_the_last_checkpoints(finished: Path):
    mean = checkpoint.average_weights([finished / "step-000003", finished / "step-000006"])
    final = load_file(finished / "model" / checkpoint.WEIGHTS)
    assert all(torch.equal(final[name], mean[name]) for name in mean)


def test_a_model_directory_says_nothing_of_where_it_was_made(finished: Path):
    for path in (finished / "model").iterdir():
        assert str(finished.parent).encode() not in path.read_bytes()


def test_the_best_checkpoint_is_the_likelier_one_where_bleu_is_equal(finished: Path):
    validations = [line for line in log_of(finished) if "valid_bleu" in line]
    best = max(validations, key=lambda line: (line["valid_bleu"], -line["valid_nll"]))
    assert len({line["valid_bleu"] for line in validations}) == 1  # 0: so little is learnt in six updates
    assert (finished / "best").resolve().name == f"step-{best['update']:06d}"
    assert best["update"] == 6


def test_the_loss_falls(finished: Path):
    losses = [line["loss"] for line in log_of(finished) if "loss" in line]
    assert losses[-1] < losses[0]


def test_validation_scores_what_translate_gives(finished: Path):
    translator = diglot.load(finished / "step-000006")
    src, ref = read_lines(finished.parent / "valid.en"), read_lines(finished.parent / "valid.de")
    found = [one.text for one in translator.translate(src, method="greedy")]
    logged = next(line for line in log_of(finished) if line["update"] == 6 and "valid_bleu" in line)
    assert logged["valid_bleu"] == bleu(found, ref, "de").value
    assert [sample["out"] for sample in logged["valid_samples"]] == found[:3]


def same_files(one: Path, two: Path, *names: str) -> bool:
    return all((one / name).read_bytes() == (two / name).read_bytes() for name in names)


def test_a_run_can_be_repeated_bit_for_bit(finished: Path, tmp_path: Path):
    train(small_recipe(tmp_path, "run"), quiet=True)
    assert same_files(
        finished / "step-000006", tmp_path / "run" / "step-000006", checkpoint.WEIGHTS, "training.safetensors"
    )


def test_a_run_stopped_by_a_signal_goes_on_as_if_it_had_not_been(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    recipe = small_recipe(tmp_path, "run")
    gradients, calls = training.gradients, 0

    def gradients_and_signal(*args: object):
        nonlocal calls
        calls += 1
        if calls == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return gradients(*args)

    monkeypatch.setattr(training, "gradients", gradients_and_signal)
    with pytest.raises(Interrupted, match=r"stopped after update \d; all is saved. To go on: diglot train") as caught:
        train(recipe, quiet=True)
    assert caught.value.signal_number == signal.SIGTERM
    stopped_at = checkpoint.list_steps(tmp_path / "run")[-1].name
    assert stopped_at not in ("step-000003", "step-000006")  # or nothing is tested
    monkeypatch.undo()
    train(recipe, quiet=True)
    for step in ("step-000006", "model"):
        assert same_files(finished / step, tmp_path / "run" / step, checkpoint.WEIGHTS)
    assert same_files(finished / "step-000006", tmp_path / "run" / "step-000006", "training.safetensors")
    losses = [[line["loss"] for line in log_of(run) if "loss" in line] for run in (finished, tmp_path / "run")]
    assert losses[0] == losses[1]


def test_a_run_may_go_on_further_than_planned(finished: Path, tmp_path: Path):
    recipe = small_recipe(tmp_path, "run")
    train(changed(recipe, max_updates=3), quiet=True)
    train(recipe, quiet=True)
    assert same_files(finished / "model", tmp_path / "run" / "model", checkpoint.WEIGHTS)


def test_a_broken_newest_checkpoint_falls_back_to_the_one_before(
    finished: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    recipe = small_recipe(tmp_path, "run")
    train(recipe, quiet=True)
    weights = tmp_path / "run" / "step-000006" / checkpoint.WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-1])
    train(recipe)
    assert "model.safetensors is broken" in (said := capfd.readouterr().err)
    assert "Falling back to" in said
    assert same_files(finished / "step-000006", tmp_path / "run" / "step-000006", checkpoint.WEIGHTS)


def test_the_size_of_micro_batches_changes_nothing_but_rounding(tmp_path: Path):
    words = ("model.dropout=0.0", "train.precision=fp32")
    train(small_recipe(tmp_path, "whole", *words, "data.micro_batch=100000"), quiet=True)
    train(small_recipe(tmp_path, "parts", *words, "data.micro_batch=60"), quiet=True)
    whole, parts = (load_file(tmp_path / run / "step-000006" / checkpoint.WEIGHTS) for run in ("whole", "parts"))
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, rtol=1e-3, atol=1e-4)
    losses = [[line["loss"] for line in log_of(tmp_path / run) if "loss" in line] for run in ("whole", "parts")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "auto"])
def test_each_precision_trains(tmp_path: Path, precision: str):
    summary = train(small_recipe(tmp_path, "run", f"train.precision={precision}"), quiet=True)
    assert summary.updates == 6
    assert summary.skipped == 0


def test_clipping_bounds_the_step(tmp_path: Path):
    words = ("model.dropout=0.0", "train.max_updates=1", "train.valid_every=1")
    train(small_recipe(tmp_path, "clipped", *words, "train.clip_norm=0.001"), quiet=True)
    moments = load_file(tmp_path / "clipped" / "step-000001" / "training.safetensors")
    norm = sum(float(t.pow(2).sum()) for name, t in moments.items() if name.startswith("exp_avg.")) ** 0.5
    assert norm == pytest.approx(
        0.001 * (1 - 0.9), rel=1e-2
    )  # after one step exp_avg is (1 - beta_1) times the gradient


def test_updates_without_a_finite_gradient_are_skipped_and_ten_in_a_row_end_the_run(tmp_path: Path):
    recipe = small_recipe(
        tmp_path, "run", "train.learning_rate_scale=1e30", "train.max_updates=50", "train.valid_every=50"
    )
    with pytest.raises(TrainingError, match=r"10 updates in a row, up to 1[12], had no finite gradient"):
        train(recipe, quiet=True)


def test_one_skipped_update_is_counted_and_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    loss, calls = training.smoothed_loss, 0

    def poisoned(*args: object):
        nonlocal calls
        calls += 1
        value, nll = loss(*args)
        return (value * float("nan") if calls == 2 else value), nll

    monkeypatch.setattr(training, "smoothed_loss", poisoned)
    summary = train(small_recipe(tmp_path, "run"), quiet=True)
    assert (summary.updates, summary.skipped) == (6, 1)
    weights = load_file(tmp_path / "run" / "model" / checkpoint.WEIGHTS)
    assert all(tensor.isfinite().all() for tensor in weights.values())
    named = (listed := tmp_path / "run" / "skipped.tsv").read_text()
    assert {line.partition("\t")[0] for line in named.splitlines()} in ({"1"}, {"2"})
    listed.write_text(f"{named}4\ttrain.en:7\n5\ttrain.en:8\n6")  # of updates after the checkpoint, and cut off
    shutil.rmtree(tmp_path / "run" / "step-000006")
    assert train(small_recipe(tmp_path, "run"), quiet=True).skipped == 1
    assert listed.read_text() == named


def test_patience_ends_a_run_that_gets_no_better(tmp_path: Path):
    words = ("train.max_updates=50", "train.valid_every=1", "train.patience=2", "train.learning_rate_scale=0")
    summary = train(small_recipe(tmp_path, "run", *words), quiet=True)
    assert summary.updates == 3  # the first is the best, two more are no better


def test_without_validation_text_some_pairs_are_held_out_and_that_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    recipe = small_recipe(tmp_path, "run", "data.valid_src=[]", "data.valid_tgt=[]", "train.max_updates=1")
    train(recipe)
    said = capfd.readouterr().err
    assert "No validation text is given: 20 pairs are held out of training." in said
    listed = (tmp_path / "run" / "dropped.tsv").read_text().splitlines()
    assert sum(line.startswith("held out\t") for line in listed) >= 20


def test_fine_tuning_starts_from_the_weights_and_keeps_network_and_subwords(finished: Path, tmp_path: Path):
    write_pairs(tmp_path, "train", 60, seed=9)
    write_pairs(tmp_path, "valid", 8, seed=8)
    still = ("train.learning_rate_scale=0", "train.max_updates=1", "train.valid_every=1", "model.d_model=64")
    recipe = small_recipe(tmp_path, "tuned", f"train.init={json.dumps(str(finished / 'model'))}", *still)
    train(recipe, quiet=True)
    old, new = finished / "model", tmp_path / "tuned" / "model"
    assert same_files(old, new, checkpoint.WEIGHTS, "subwords.model")
    assert "d_model = 32" in (new / "config.toml").read_text()


def test_a_vocabulary_for_each_side(tmp_path: Path):
    train(small_recipe(tmp_path, "run", "subwords.joint=false", "model.tie=output", "train.max_updates=1"), quiet=True)
    model = tmp_path / "run" / "model"
    assert (model / "subwords.src.model").exists()
    assert (model / "subwords.tgt.model").exists()
    assert diglot.load(model).translate(["one"])[0].num_segments == 1


def test_given_subwords_are_used(finished: Path, tmp_path: Path):
    given = json.dumps(str(finished / "model" / "subwords.model"))
    train(small_recipe(tmp_path, "joint", f"subwords.model={given}", "train.max_updates=1"), quiet=True)
    assert same_files(finished / "model", tmp_path / "joint" / "model", "subwords.model")
    words = ("subwords.joint=false", "model.tie=none", f"subwords.src_model={given}", f"subwords.tgt_model={given}")
    train(small_recipe(tmp_path, "two", *words, "train.max_updates=1"), quiet=True)
    assert (
        diglot.load(tmp_path / "two" / "model").src_subwords.proto
        == (finished / "model" / "subwords.model").read_bytes()
    )


def test_one_model_learns_several_target_languages_and_a_tag_chooses(tmp_path: Path):
    small_recipe(tmp_path, "run")  # writes the files
    files = {name: str(tmp_path / name) for name in ("train.en", "train.de", "valid.en", "valid.de")}
    words = [
        f"data.{key}={json.dumps([files[name] for name in names])}"
        for key, names in {
            "src": ("train.en", "train.de", "train.en"), "tgt": ("train.de", "train.en", "train.en"),
            "valid_src": ("valid.en", "valid.de", "valid.en"), "valid_tgt": ("valid.de", "valid.en", "valid.en"),
        }.items()
    ]  # fmt: skip
    langs = ["de", "en", "copy"]
    words += [f"data.tgt_langs={json.dumps(langs)}", f"data.valid_tgt_langs={json.dumps(langs)}"]
    # as many positions as pieces: the tag has to fit too
    words += ["data.weights=[1, 1, 0.5]", "data.temperature=2", "subwords.sampling=0.2", "model.positions=learned",
              "model.max_positions=24", "data.max_pieces=24", "languages.tgt="]  # fmt: skip
    model = diglot.load(train(small_recipe(tmp_path, "run", *words), quiet=True).model)
    assert model.spec.languages.tags == ("de", "en", "copy")
    scores = [model.score(["one"], ["eins"], to=to)[0].log_prob for to in langs]
    assert len(set(scores)) == 3  # the network sees which one is asked for
    assert model.score([">>en<< one"], ["eins"])[0].log_prob == scores[1]


def test_learned_positions_need_not_reach_beyond_the_longest_pair(tmp_path: Path):
    words = ("model.positions=learned", "model.max_positions=37", "data.max_pieces=37", "subwords.sampling=0.1")
    assert train(small_recipe(tmp_path, "run", *words, "train.max_updates=2"), quiet=True).updates == 2


def test_a_replacement_that_was_cut_off_is_put_back_before_anybody_looks(tmp_path: Path):
    recipe = small_recipe(tmp_path, "run", "train.max_updates=3")
    train(recipe, quiet=True)
    (step,) = checkpoint.list_steps(tmp_path / "run")
    step.rename(checkpoint.replaced(step))  # as between the two renames
    summary = train(changed(recipe, max_updates=6), quiet=True)
    assert summary.updates == 6
    first = next(line for line in log_of(tmp_path / "run") if "loss" in line)
    assert first["update"] == 1
    assert not list((tmp_path / "run").glob("broken-*"))


def test_tensorboard_gets_the_curves(tmp_path: Path):
    train(small_recipe(tmp_path, "run", "train.tensorboard=true", "train.max_updates=2"), quiet=True)
    assert list((tmp_path / "run" / "tensorboard").glob("events.*"))


def test_a_run_in_use_is_refused(tmp_path: Path):
    recipe = small_recipe(tmp_path, "run")
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(TrainingError, match="is in use by another process"):
            train(recipe, quiet=True)


def test_another_recipe_is_refused_with_the_difference(finished: Path):
    recipe = load_recipe(finished / "config.toml", "", ("train.seed=2",))
    with pytest.raises(ConfigError, match=r"train.seed was 1 and is 2.*diglot train .*run train.seed=2$"):
        train(recipe, quiet=True)


def test_a_named_change_of_recipe_is_accepted(tmp_path: Path):
    recipe = small_recipe(tmp_path, "run", "train.max_updates=3")
    train(recipe, quiet=True)
    summary = train(changed(recipe, seed=2, max_updates=4), changed=frozenset({"train.seed"}), quiet=True)
    assert summary.updates == 4


def test_another_corpus_is_refused(tmp_path: Path):
    recipe = small_recipe(tmp_path, "run", "train.max_updates=3")
    train(recipe, quiet=True)
    write_pairs(tmp_path, "train", 200, seed=5)
    with pytest.raises(TextError, match=r"the pairs are not those that .* was begun with"):
        train(changed(recipe, max_updates=6), quiet=True)


def test_signals_are_restored(finished: Path):
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_training_outside_the_main_thread_leaves_signals_alone(tmp_path: Path):
    recipe, done = small_recipe(tmp_path, "run", "train.max_updates=1"), []
    thread = threading.Thread(target=lambda: done.append(train(recipe, quiet=True)))
    thread.start()
    thread.join()
    assert done[0].updates == 1


@pytest.mark.slow
def test_an_update_of_the_base_model_runs_on_real_text(tmp_path: Path, data: Path):
    for name, num in (("train", 1500), ("valid", 4)):
        for language in ("en", "de"):
            lines = read_lines(data / "tatoeba_en_de" / f"{name}.{language}")[:num]
            (tmp_path / f"{name}.{language}").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    files = {"src": "train.en", "tgt": "train.de", "valid_src": "valid.en", "valid_tgt": "valid.de"}
    words = [f"data.{key}={json.dumps(str(tmp_path / name))}" for key, name in files.items()]
    words += ["train.max_updates=1", f"train.out={json.dumps(str(tmp_path / 'run'))}", "search.max_extra=0"]
    recipe = load_recipe(None, "base", tuple(words))
    summary = train(recipe, quiet=True)
    (loss,) = [line["loss"] for line in log_of(tmp_path / "run") if "loss" in line]
    translator = diglot.load(summary.model)
    assert summary.parameters == 63_045_632 - 512 * (37_000 - translator.tgt_subwords.num_pieces)
    assert 0 < loss < 2 * math.log(translator.tgt_subwords.num_pieces)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["copy", "reverse"])
def test_copying_and_reversing_are_learnt_in_under_a_minute(tmp_path: Path, task: str):
    import random

    rng = random.Random(1)
    lines = [" ".join(rng.choice("abcdefghij") for _ in range(rng.randint(1, 8))) for _ in range(4000)]
    answers = [line if task == "copy" else line[::-1] for line in lines]
    (tmp_path / "train.en").write_text("\n".join(lines[:-100]) + "\n")
    (tmp_path / "train.de").write_text("\n".join(answers[:-100]) + "\n")
    (tmp_path / "valid.en").write_text("\n".join(lines[-100:]) + "\n")
    (tmp_path / "valid.de").write_text("\n".join(answers[-100:]) + "\n")
    words = (
        "model.d_model=64", "model.d_ff=128", "model.dropout=0.0", "train.update_pieces=1000", "train.warmup_steps=100",
        "data.micro_batch=4000", "train.max_updates=1000", "train.valid_every=500", "train.average=1",
        "train.log_every=100", "train.threads=0",
    )  # fmt: skip
    begun = time.monotonic()
    summary = train(small_recipe(tmp_path, "run", *words), quiet=True)
    seconds = time.monotonic() - begun
    found = diglot.load(summary.model).translate(lines[-100:])
    exact = sum(one.text == answer for one, answer in zip(found, answers[-100:], strict=True))
    assert exact >= 98
    assert seconds < 60
