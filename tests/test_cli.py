"""The commands, as a user types them: what they print, where, and with which exit code."""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from resource import RLIMIT_AS, setrlimit

import pytest
import sacrebleu

import diglot
from diglot import cli
from diglot.config import load_recipe, to_toml
from diglot.training import train
from training_runs import small_recipe, write_pairs

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that has learnt a little: enough to give different lines different translations."""
    directory = tmp_path_factory.mktemp("cli")
    words = ("train.max_updates=60", "train.valid_every=60", "train.log_every=30", "model.dropout=0.0")
    return train(small_recipe(directory, "run", *words, num=600), quiet=True).model


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Run a command in this process, with standard input; the answer is its exit code, output and errors."""

    def run_command(*words: object, stdin: bytes = b"") -> tuple[int, str, str]:
        (tmp_path / "stdin").write_bytes(stdin)
        with (tmp_path / "stdin").open("r") as file:
            monkeypatch.setattr(sys, "stdin", file)
            monkeypatch.setattr(sys, "argv", ["diglot", *map(str, words)])
            code = 0
            try:
                cli.main()
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1 if end.code else 0
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return run_command


def command(*words: object, **options: object) -> subprocess.Popen[bytes]:
    """A command in a process of its own."""
    code = "from diglot.cli import main; main()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", code, *map(str, words)], **{**pipes, **options})


# ------------------------------------------------------------------- help, usage, version


def test_help_takes_under_three_tenths_of_a_second():
    times: list[float] = []
    for _ in range(5):
        begun = os.times()
        subprocess.run([sys.executable, "-m", "diglot", "--help"], check=True, capture_output=True)
        ended = os.times()  # of the processor: others may use it meanwhile
        times.append(ended.children_user + ended.children_system - begun.children_user - begun.children_system)
    assert min(times) < 0.3


@pytest.mark.parametrize("name", ["train", "translate", "score", "evaluate", "info", "runs", "demo"])
def test_each_command_explains_itself_with_examples(run: Run, name: str):
    code, out, _ = run(name, "--help")
    assert code == 0
    assert f"\n  diglot {name} " in out or f"| diglot {name} " in out


def test_the_version(run: Run):
    assert run("--version")[:2] == (0, f"diglot {diglot.__version__}\n")


@pytest.mark.parametrize(
    "words",
    [
        ["nonsense"],
        ["translate"],
        ["train", "--no-such"],
        ["evaluate", "a"],
        ["score"],
        ["demo", "--threads", "-1"],
        ["evaluate", "a", "b"],
        ["evaluate", "--hyp", "a", "--robustness", "b"],
        ["evaluate", "--hyp", "a", "--hyp", "b", "-o", "c", "d"],
    ],
)
def test_wrong_usage_ends_with_2(run: Run, words: list[str]):
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert "Usage" in err


def test_what_the_user_gave_ends_with_1_and_one_sentence(run: Run, tmp_path: Path):
    code, out, err = run("translate", tmp_path / "none")
    assert (code, out) == (1, "")
    assert err == f"diglot: there is no model directory {tmp_path / 'none'}.\n"


# ------------------------------------------------------------------- translate


def test_translating_gives_a_line_for_a_line(run: Run, model: Path):
    lines = b"one hundred twenty\n\n   \ntwenty past seven\r\n\xe5\xa5\xbd\x00\x0b\x1b[31m\nlast"
    code, out, _ = run("translate", model, stdin=lines)
    assert code == 0
    assert out.count("\n") == 6
    expected = [
        one.text for one in diglot.load(model).translate(["one hundred twenty", "", "   ", "twenty past seven"])
    ]
    assert out.split("\n")[:4] == expected
    assert expected[1:3] == ["", "   "]


def test_a_file_a_compressed_file_and_standard_input_are_the_same(run: Run, model: Path, tmp_path: Path):
    text = "one hundred twenty\nhalf past six\n"
    (tmp_path / "text.en").write_text(text)
    with gzip.open(tmp_path / "text.en.gz", "wt") as file:
        file.write(text)
    first = run("translate", model, stdin=text.encode())[1]
    assert first
    assert run("translate", model, tmp_path / "text.en")[1] == first
    assert run("translate", model, tmp_path / "text.en.gz")[1] == first
    assert run("translate", model, "-", stdin=b"\xef\xbb\xbf" + text.encode())[1] == first
    assert run("translate", model, tmp_path / "text.en", "-o", tmp_path / "out")[:2] == (0, "")
    assert (tmp_path / "out").read_text() == first


def test_json_lines_hold_what_python_gives(run: Run, model: Path):
    code, out, _ = run("translate", model, "--json", "--num-best", "2", stdin=b"one hundred twenty\n")
    (found,) = diglot.load(model).translate(["one hundred twenty"], num_best=2)
    line = json.loads(out)
    assert code == 0
    assert (line["text"], line["score"], line["num_pieces"]) == (found.text, found.score, found.num_pieces)
    assert [one["text"] for one in line["others"]] == [found.others[0].text]


def test_n_best_lines_are_numbered_and_best_first(run: Run, model: Path):
    out = run("translate", model, "--num-best", "3", stdin=b"one\ntwo\n")[1]
    rows = [line.split("\t") for line in out.splitlines()]
    assert [row[0] for row in rows] == ["1", "1", "1", "2", "2", "2"]
    assert [float(row[1]) for row in rows[:3]] == sorted((float(row[1]) for row in rows[:3]), reverse=True)


def test_each_search_option_reaches_the_search(run: Run, model: Path):
    text = b"one hundred twenty thousand four\n" * 4
    beam = run("translate", model, stdin=text)[1]
    greedy = run("translate", model, "--method", "greedy", stdin=text)[1]
    assert greedy == run("translate", model, "--beam-size", "1", stdin=text)[1]
    sample = run("translate", model, "--method", "sample", "--seed", "3", stdin=text)[1]
    assert sample == run("translate", model, "--method", "sample", "--seed", "3", stdin=text)[1]
    assert len(set(sample.splitlines())) > 1
    assert run("translate", model, "--method", "sample", "--top-k", "1", stdin=text)[1] == greedy
    assert run("translate", model, "--method", "sample", "--top-p", "0.000001", stdin=text)[1] == greedy
    assert run("translate", model, "--method", "sample", "--temperature", "0.001", stdin=text)[1] == greedy
    assert all(
        line.startswith("der") for line in run("translate", model, "--prefix", "der", stdin=text)[1].splitlines()
    )
    code, out, err = run("translate", model, "--max-extra", "0", "--max-segment", "2", stdin=b"one two three four\n")
    assert (code, out.count("\n")) == (0, 1)
    assert "1 long lines were split" in err
    scores = [
        json.loads(run("translate", model, "--length-penalty", alpha, "--json", stdin=b"one\n")[1]) for alpha in "01"
    ]
    assert scores[0]["score"] == scores[0]["log_prob"] != scores[1]["score"]
    assert run("translate", model, "--ensemble", model, stdin=text)[1] == beam
    assert run("translate", model, "--precision", "bf16", stdin=text)[0] == 0


def test_bad_utf8_is_named_and_what_came_before_is_translated(run: Run, model: Path):
    code, out, err = run("translate", model, stdin=b"one\nf\xfcnf\n")
    assert code == 1
    assert out.count("\n") <= 1
    assert "standard input, line 2, byte 2: 0xFC is not UTF-8" in err


def test_a_line_is_translated_as_soon_as_it_arrives(model: Path):
    with command("translate", model, "--quiet") as process:
        assert process.stdin
        assert process.stdout
        for line in (b"one\n", b"two\n", b"three\n"):
            process.stdin.write(line)
            process.stdin.flush()
            assert process.stdout.readline().endswith(b"\n")  # before the next line is written
        process.stdin.close()
        assert process.wait(20) == 0


def test_a_reader_that_goes_away_ends_it_quietly(model: Path, tmp_path: Path):
    (tmp_path / "many").write_text("one\n" * 9_000)
    with command("translate", model, tmp_path / "many", "--quiet", stdin=subprocess.DEVNULL) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(30) == 128 + signal.SIGPIPE


def test_a_full_disk_is_one_sentence(model: Path):
    with Path("/dev/full").open("w") as full, command("translate", model, stdout=full) as process:
        _, err = process.communicate(b"one\n" * 5, timeout=30)
    assert process.returncode == 1
    assert err == b"diglot: cannot write to standard output: No space left on device.\n"


def test_ctrl_c_ends_it_quietly_while_it_waits_for_a_line(model: Path):
    with command("translate", model, "--quiet") as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write(b"one\n")
        process.stdin.flush()
        assert process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 128 + signal.SIGINT
        assert process.stderr
        assert process.stderr.read() == b""


def test_a_wrong_line_ends_it_while_the_next_is_awaited(model: Path):
    with command("translate", model, "--prefix", "der", "--max-extra", "0") as process:
        assert process.stdin
        assert process.stderr
        process.stdin.write(b"one\n\xff\n")
        process.stdin.flush()
        assert process.wait(20) == 1
        assert process.stderr.read().count(b"\n") <= 2


def test_memory_that_runs_out_is_one_sentence(tmp_path: Path):
    recipe = to_toml(small_recipe(tmp_path, "run", "model.d_model=1024", f"model.d_ff={1 << 20}"))
    (tmp_path / "r.toml").write_text(recipe)
    limit = (4 << 30, 4 << 30)  # of which one matrix alone would take all
    process = command("train", tmp_path / "r.toml", "-q", preexec_fn=lambda: setrlimit(RLIMIT_AS, limit))
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err.count(b"\n")) == (1, b"", 1)
    assert err.startswith(b"diglot: memory ran out")


# ------------------------------------------------------------------- score, evaluate, info


def test_the_score_reported_is_the_score_of_scoring(run: Run, model: Path, tmp_path: Path):
    text = b"one hundred twenty\ntwenty past seven\nthree thousand\n"
    found = [json.loads(line) for line in run("translate", model, "--json", stdin=text)[1].splitlines()]
    (tmp_path / "src").write_bytes(text)
    (tmp_path / "tgt").write_text("".join(one["text"] + "\n" for one in found))
    scored = [
        json.loads(line) for line in run("score", model, tmp_path / "src", tmp_path / "tgt", "--json")[1].splitlines()
    ]
    translator = diglot.load(model)
    compared = 0
    for one, two in zip(found, scored, strict=True):
        # a text has many spellings in pieces; the score is of the usual one, which the search may not have taken
        if len(translator.tgt_subwords.encode(one["text"])) + 1 == one["num_pieces"]:
            assert two["score"] == pytest.approx(one["score"], abs=1e-4)
            compared += 1
    assert compared
    pairs = b"".join(a + b"\t" + b["text"].encode() + b"\n" for a, b in zip(text.splitlines(), found, strict=True))
    plain = run("score", model, stdin=pairs.replace(b"\n", b"\ta third column\n"))[1]
    assert [float(line) for line in plain.splitlines()] == pytest.approx([two["score"] for two in scored], abs=1e-4)


def test_evaluating_gives_sacrebleus_scores(run: Run, model: Path, tmp_path: Path):
    write_pairs(tmp_path, "test", 20, seed=3)
    src, ref, hyp = (tmp_path / name for name in ("test.en", "test.de", "hyp"))

    def scores(*words: object, stdin: bytes = b"") -> dict[str, dict[str, float | str]]:
        code, out, _ = run("evaluate", *words, "--json", stdin=stdin)
        assert code == 0
        return json.loads(out)["systems"][0]["scores"]

    first = scores(model, src, ref, "-o", hyp)
    lines = [path.read_text().splitlines() for path in (hyp, ref)]
    assert first["BLEU"]["value"] == pytest.approx(sacrebleu.corpus_bleu(lines[0], [lines[1]]).score)
    assert set(first) == {"BLEU", "chrF2", "TER"}
    assert all("bs:1000|seed:12345" in one["signature"] and "interval" in one for one in first.values())
    for again in (
        scores("--hyp", hyp, ref),
        scores("--hyp", hyp, "-", stdin=ref.read_bytes()),
        scores(model, "-", ref, stdin=src.read_bytes()),
        scores("--hyp", "-", ref, stdin=hyp.read_bytes()),
    ):
        assert again == first
    plain = run("evaluate", "--hyp", hyp, ref)[1].splitlines()
    assert [line.split()[0] for line in plain[:3]] == ["BLEU", "chrF2", "TER"]
    assert "tok:none" in scores("--hyp", hyp, ref, "--tokenized")["BLEU"]["signature"]


def test_evaluating_compares_systems_by_part_and_line(run: Run, model: Path, tmp_path: Path):
    write_pairs(tmp_path, "test", 30, seed=3)
    src, ref, bad, origins = (tmp_path / name for name in ("test.en", "test.de", "bad", "origins"))
    bad.write_text("falsch\n" * 29 + "\n")
    origins.write_text("old\nnew\n" * 15)
    code, out, _ = run("evaluate", model, src, ref, "--hyp", bad, "--origins", origins, "--json")
    assert code == 0
    one, two = json.loads(out)["systems"]
    assert [each["name"] for each in (one, two)] == [str(model), str(bad)]
    assert one["model"]["parameters"] == diglot.load(model).num_parameters
    assert one["model"]["training"]["update"] == 60
    assert two["model"] is None
    assert "p_bootstrap" not in one["scores"]["BLEU"]
    assert all(0 < two["scores"]["chrF2"][name] <= 1 for name in ("p_bootstrap", "p_randomization"))
    assert two["flaws"] == {"empty": 1, "loops": 0, "too_long": 0}
    assert [(part["name"], part["lines"]) for part in two["by_origin"]] == [("old", 15), ("new", 15)]
    assert sum(part["lines"] for part in two["by_length"]) == 30
    assert {worst["line"] for worst in two["worst"]} <= set(range(1, 31))
    shown = run("evaluate", "--hyp", ref, "--hyp", bad, src, ref, "--origins", origins)[1]
    assert re.search(rf"^{re.escape(str(bad))} +chrF2 +-\d+\.\d\d +p = 0.0010 +p = 0.0001$", shown, re.MULTILINE)
    assert "No translations: 1 empty, 0 loops, 0 over-long." in shown
    assert "    translation  falsch\n" in shown
    assert f"    source       {src.read_text().splitlines()[0]}\n" in shown


def test_test_lines_that_were_trained_on_are_told(run: Run, model: Path, tmp_path: Path):
    trained = (model.parents[1] / "train.en").read_text().splitlines()
    own = [(model.parents[1] / f"train.{language}").read_text().splitlines()[:3] for language in ("en", "de")]
    for language, lines in zip(("en", "de"), own, strict=True):
        (tmp_path / f"test.{language}").write_text("".join(line + "\n" for line in (*lines, "neither here nor there")))
    files = (tmp_path / "test.en", tmp_path / "test.de")
    code, out, err = run("evaluate", model, *files, "--json")
    assert code == 0
    leaks = json.loads(out)["leaks"]
    assert leaks == {"src": {"exact": [1, 2, 3], "near": []}, "ref": {"exact": [1, 2, 3], "near": []}}
    told = "of 4 test lines there stand in the training text 3 sources word for word and 0 nearly; 3 references"
    assert told in err
    (tmp_path / "other.en").write_text(f"{trained[0]} !\n")
    (tmp_path / "other.de").write_text("etwas\n")
    others = "--train", tmp_path / "other.en", tmp_path / "other.de"
    shown = run("evaluate", "--hyp", files[1], *files, *others)[1]
    assert "stand in the training text 0 sources word for word and 1 nearly; 0 references word for word and" in shown
    assert "No test line stands" in run("evaluate", "--hyp", files[1], files[1], *others)[1]
    assert json.loads(run("evaluate", "--hyp", files[1], files[1], "--json")[1])["leaks"] is None


def test_where_the_training_text_has_gone_that_is_said(run: Run, model: Path, tmp_path: Path):
    moved = tmp_path / "run"
    shutil.copytree(model.parent, moved, symlinks=True)
    recipe = (moved / "config.toml").read_text()
    (moved / "config.toml").write_text(recipe.replace("train.en", "gone.en"))
    write_pairs(tmp_path, "test", 4, seed=3)
    code, out, err = run("evaluate", moved, tmp_path / "test.en", tmp_path / "test.de", "--json")
    assert (code, json.loads(out)["leaks"]) == (0, None)
    assert "gone.en): no test lines are looked for in it; name it with --train." in err


def test_robustness_scores_what_is_made_of_altered_sources(run: Run, model: Path, tmp_path: Path):
    write_pairs(tmp_path, "test", 12, seed=3)
    words = ("evaluate", model, tmp_path / "test.en", tmp_path / "test.de", "--robustness")
    code, out, _ = run(*words, "--json")
    assert code == 0
    system = json.loads(out)["systems"][0]
    rows = {row["name"]: row for row in system["robustness"]}
    assert list(rows) == [
        "capitals", "small letters", "no final stop", "typing errors", "doubled spaces", "a sentence more",
    ]  # fmt: skip
    # small letters without a stop are what the text has: nothing changes
    for name in ("small letters", "no final stop"):
        assert rows[name]["scores"]["BLEU"]["value"] == system["scores"]["BLEU"]["value"]
        assert rows[name]["flaws"] == system["flaws"]
    assert rows["capitals"]["scores"]["chrF2"]["value"] < system["scores"]["chrF2"]["value"]
    assert json.loads(run(*words, "--json")[1])["systems"][0]["robustness"] == system["robustness"]
    shown = run(*words)[1]
    assert all(f"\n{name}  " in shown for name in ("as it is", *rows))


def test_info_of_a_preset_a_model_and_a_run(run: Run, model: Path):
    base = json.loads(run("info", "base", "--json")[1])
    assert base["parameters at 37,000 pieces"]["all"] == 63_045_632
    assert json.loads(run("info", "big", "--json")[1])["parameters at 37,000 pieces"]["all"] == 214_171_648
    one = json.loads(run("info", model, "--json")[1])
    assert one["languages"] == {"src": "en", "tgt": "de", "tags": []}
    assert json.loads(run("info", model.parent, "--json")[1])["state"]["update"] == 60
    assert "63,045,632" in run("info", "base")[1]
    assert f"  src                    {model.parents[1] / 'train.en'}\n" in run("info", model.parent)[1]


# ------------------------------------------------------------------- train


def test_a_recipe_is_printed_explained_and_read_again(run: Run, tmp_path: Path):
    code, out, _ = run(
        "train", "--preset", "tiny", "--print-recipe", "--src", "a b.de", "--tgt", "c.en", "train.seed=7"
    )
    assert code == 0
    assert "# every random choice follows from it" in out
    (tmp_path / "r.toml").write_text(out)
    recipe = load_recipe(tmp_path / "r.toml")
    assert recipe.data.src == ("a b.de",)
    assert recipe.train.seed == 7
    assert recipe.model == load_recipe(None, "tiny").model
    assert tomllib.loads(to_toml(recipe)) == tomllib.loads(out)


def test_training_by_options_and_going_on_by_the_run_directory(run: Run, tmp_path: Path):
    recipe = small_recipe(tmp_path, "unused", "data.src=[]", "data.tgt=[]", "data.valid_src=[]", "data.valid_tgt=[]")
    (tmp_path / "r.toml").write_text(to_toml(recipe))
    files = ("--src", tmp_path / "train.en", "--tgt", tmp_path / "train.de", "--valid-src", tmp_path / "valid.en",
             "--valid-tgt", tmp_path / "valid.de", "--out", tmp_path / "out")  # fmt: skip
    code, out, err = run("train", tmp_path / "r.toml", *files, "train.max_updates=3", "--json")
    assert code == 0
    assert json.loads(out)["updates"] == 3
    assert f"diglot translate {tmp_path / 'out' / 'model'} FILE" in err
    code, out, err = run("train", tmp_path / "out", "train.max_updates=6", "--json", "--quiet")
    assert (code, err) == (0, "")
    assert json.loads(out)["updates"] == 6


def test_a_changed_recipe_goes_on_as_the_refusal_says(run: Run, tmp_path: Path):
    recipe = small_recipe(tmp_path, "out", "train.max_updates=3")
    (tmp_path / "r.toml").write_text(to_toml(recipe))
    assert run("train", tmp_path / "r.toml", "--quiet")[0] == 0
    edited = to_toml(recipe).replace("seed = 1\nmax_updates = 3", "seed = 2\nmax_updates = 4")
    (tmp_path / "r.toml").write_text(edited.replace("weights = []", "weights = [2.0]"))
    code, _, err = run("train", tmp_path / "r.toml")
    assert code == 1
    assert "data.weights was () and is (2.0,), train.seed was 1 and is 2" in err
    again = shlex.split(err.partition("go on with the change: diglot ")[2])
    code, out, err = run(*again, "--quiet", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["updates"] == 4
    assert run("train", tmp_path / "r.toml", "--quiet")[0] == 0  # the run now has the recipe of the file
    code, _, err = run("train", tmp_path / "out", "model.d_ff=32", "train.seed=2")
    assert (code, "cannot go on as another model: model.d_ff was 64 and is 32." in err) == (1, True)


@pytest.mark.slow
def test_a_run_in_use_is_refused_until_its_process_is_killed(tmp_path: Path):
    recipe = small_recipe(tmp_path, "run", "train.max_updates=100000", "train.valid_every=2", "train.patience=0")
    (tmp_path / "r.toml").write_text(to_toml(recipe))
    with command("train", tmp_path / "r.toml") as first:
        while first.poll() is None and not (tmp_path / "run" / "step-000002").exists():
            time.sleep(0.01)
        with command("train", tmp_path / "run") as second:
            assert f"{tmp_path / 'run'} is in use by another process" in second.communicate(timeout=60)[1].decode()
        assert (first.poll(), second.returncode) == (None, 1)
        first.kill()
    with command("train", tmp_path / "run", "train.max_updates=3", "--json") as third:
        out, err = third.communicate(timeout=60)
    assert (third.returncode, b"Going on after update" in err) == (0, True), err
    assert json.loads(out)["updates"] >= 3


def test_an_interrupted_run_says_how_to_go_on(tmp_path: Path):
    recipe = small_recipe(tmp_path, "run", "train.max_updates=100000", "train.valid_every=100000")
    (tmp_path / "r.toml").write_text(to_toml(recipe))
    with command("train", tmp_path / "r.toml") as process:
        log = tmp_path / "run" / "log.jsonl"
        while process.poll() is None and not (log.exists() and log.stat().st_size):
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert f"all is saved. To go on: diglot train {tmp_path / 'run'}\n" in err.decode()
    assert b"Traceback" not in err


def test_a_demo_that_cannot_write_says_so(run: Run, tmp_path: Path):
    (tmp_path / "file").touch()
    assert run("demo", "--out", tmp_path / "file" / "demo")[0] == 1
