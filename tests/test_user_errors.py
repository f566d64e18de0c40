"""Every error that a user can cause is caused here, and its text is read; none is left out."""

from __future__ import annotations

import ast
import fcntl
import gzip
import io
import multiprocessing
import resource
import shutil
import sys
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sentencepiece
import torch

import diglot
from diglot import checkpoint, cli, demo, info, memory, subwords
from diglot.config import Recipe, load_recipe, update_section
from diglot.corpus import TextFile, open_pairs, open_stream, read_lines, stream_lines
from diglot.errors import DiglotError
from diglot.evaluate import evaluate
from diglot.index import Reading, index_corpus
from diglot.training import train
from training_runs import small_recipe, write_pairs

SOURCE = Path(diglot.__file__).parent
OURS = {"ConfigError", "TextError", "CheckpointError", "TrainingError", "_not_utf8"}
CASES: list[tuple[str, Callable[[SimpleNamespace], object]]] = []


def case(text: str):
    """A way to cause an error, and what the user reads of it; DIR is the test's directory, ... is anything."""

    def remember(cause: Callable[[SimpleNamespace], object]):
        CASES.append((text, cause))
        return cause

    return remember


def recipe(*words: str) -> Recipe:
    return load_recipe(None, "tiny", words)


def file(at: SimpleNamespace, name: str, content: bytes = b"") -> Path:
    (at.dir / name).write_bytes(content)
    return at.dir / name


def broken_model(at: SimpleNamespace, change: Callable[[dict], object]) -> object:
    """Load a model directory of which `change` has altered the files."""
    files = {p.name: p.read_bytes() for p in at.model.iterdir() if p.name != checkpoint.MANIFEST}
    change(files)
    checkpoint.write_directory(at.dir / "broken", files)
    return checkpoint.load_model(at.dir / "broken")


def with_manifest(at: SimpleNamespace, content: bytes) -> object:
    shutil.copytree(at.model, at.dir / "other")
    (at.dir / "other" / checkpoint.MANIFEST).write_bytes(content)
    return checkpoint.load_model(at.dir / "other")


def run_cli(*words: str) -> None:
    old, sys.argv = sys.argv, ["diglot", *words]
    try:
        cli.app(standalone_mode=False)
    finally:
        sys.argv = old


def trained(at: SimpleNamespace, *words: str) -> object:
    return train(small_recipe(at.dir, "run", "train.max_updates=1", "train.valid_every=1", *words), quiet=True)


# ------------------------------------------------------------------- recipes and options

case("unknown preset 'tinny'; did you mean 'tiny'?")(lambda at: load_recipe(None, "tinny"))
case("'train.seed' is no option: write section.key=value, as train.warmup_steps=8000.")(lambda at: recipe("train.seed"))
case("'train.sed=1': unknown key 'train.sed'; did you mean 'seed'?")(lambda at: recipe("train.sed=1"))
case("'trian.seed=1': unknown section 'trian'; did you mean 'train'?")(lambda at: recipe("trian.seed=1"))
case("DIR/r.toml: 'train' is a section: write [train] and its keys below it.")(
    lambda at: load_recipe(file(at, "r.toml", b"train = 3"))
)
case("cannot read DIR/no.toml: No such file or directory.")(lambda at: load_recipe(at.dir / "no.toml"))
case("DIR/r.toml is not TOML: ...")(lambda at: load_recipe(file(at, "r.toml", b"[train")))
case("data.src = 3 must be a list of strings.")(lambda at: recipe("data.src=3"))
case("train.seed = 'x' must be a whole number.")(lambda at: recipe("train.seed=x"))
case("train.warmup_steps = 0 must be at least 1.")(lambda at: recipe("train.warmup_steps=0"))
case("model.norm = 'between' is none of: post, pre.")(lambda at: recipe("model.norm=between"))
case("model.d_model = 130 must be even and divisible by model.num_heads = 4; change one of them.")(
    lambda at: recipe("model.d_model=130")
)
case("subwords: give either subwords.model, for both sides, or subwords.src_model and subwords.tgt_model together.")(
    lambda at: recipe("subwords.src_model=a")
)
case("subwords.src_model and subwords.tgt_model need subwords.joint = false.")(
    lambda at: recipe("subwords.src_model=a", "subwords.tgt_model=b")
)
case("subwords.model serves both sides, which needs subwords.joint = true; for two vocabularies give ...")(
    lambda at: recipe("subwords.model=a", "subwords.joint=false", "model.tie=output")
)
case("data.src names 1 files and data.tgt 0: each source file needs its translation.")(lambda at: recipe("data.src=a"))
case("search.num_best = 5 asks for more than search.beam_size = 4 hypotheses; raise the beam size.")(
    lambda at: recipe("search.num_best=5")
)
case("search.num_best: greedy search finds one translation; use beam or sample for more.")(
    lambda at: update_section(recipe().search, {"method": "greedy", "num_best": 2})
)
case("model.tie = 'all' shares one matrix between the languages, which needs subwords.joint = true; ...")(
    lambda at: recipe("subwords.joint=false")
)
case("data.max_pieces = 256 is more than model.max_positions = 100, which is all that learned positions can ...")(
    lambda at: recipe("model.positions=learned", "model.max_positions=100")
)

# ------------------------------------------------------------------- text

case("cannot read DIR/no: No such file or directory.")(lambda at: TextFile(at.dir / "no"))
case("cannot read DIR/no: No such file or directory.")(lambda at: open_stream(at.dir / "no"))
case("cannot read DIR: Is a directory.")(lambda at: open_stream(at.dir))
case("cannot unpack DIR/a.gz: ...")(lambda at: read_lines(file(at, "a.gz", b"no gzip")))
case("cannot unpack a.gz: ...")(
    lambda at: list(stream_lines(open_stream(file(at, "a.gz", gzip.compress(b"x" * 9)[:-9])), "a.gz"))
)
case("DIR/a, line 2, byte 3: 0xFC is not UTF-8; convert the file, as with: iconv -f LATIN1 -t UTF-8 DIR/a > new")(
    lambda at: read_lines(file(at, "a", b"one\nf\xc3\xbc\xfcr\n".replace(b"\xc3\xbc", b"u")))
)
case("standard input, line 2, byte 2: 0xFC is not UTF-8; convert the text, as with: iconv -f LATIN1 -t UTF-8")(
    lambda at: list(stream_lines(io.BytesIO(b"one\nf\xfcr\n"), "standard input"))
)
case("DIR/a is UTF-16; convert it: iconv -f UTF-16 -t UTF-8 DIR/a > new")(
    lambda at: read_lines(file(at, "a", "text".encode("utf-16")))
)
case("DIR/a has 3 lines and DIR/b has 2; they must match line by line. Their lengths run apart at line ...")(
    lambda at: open_pairs([str(file(at, "a", b"a\nbb bb bb\nc\n"))], [str(file(at, "b", b"a\nc\n"))])[0].check()
)
case("DIR/a, line 1: no TAB between source and target.")(
    lambda at: list(open_pairs([], [], [str(file(at, "a", b"one two\n"))])[0].spans())
)


@case("a process that reads pairs was killed from outside, for want of memory perhaps. Start again, with fewer of ...")
def _(at: SimpleNamespace) -> None:
    def kill() -> Any:
        for process in multiprocessing.active_children():
            process.kill()

    path = file(at, "a.tsv", b"one\teins\n" * 99_999)
    subword_model = subwords.load_subwords(at.model / "subwords.model")
    reading = Reading(subword_model, subword_model, recipe().data)

    @contextmanager
    def progress(what: str, total: int):
        yield lambda steps, note: kill()

    index_corpus(open_pairs([], [], [str(path)]), reading, io.StringIO(), progress, num_processes=2)


case("cannot read DIR/no.gz: No such file or directory.")(lambda at: TextFile(at.dir / "no.gz", at.dir))
case("cannot unpack DIR/a.gz: ...")(lambda at: TextFile(file(at, "a.gz", b"no gzip"), at.dir))


@case("cannot unpack DIR/a.gz into DIR: File too large.")
def _(at: SimpleNamespace) -> None:
    path, limits = file(at, "a.gz", gzip.compress(b"x" * 99)), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9, limits[1]))
    try:
        TextFile(path, at.dir)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


case("cannot write the index of the corpus to DIR/no: No such file or directory. Make room there, or let DIGLOT_...")(
    lambda at: index_corpus(
        [],
        Reading(*[subwords.load_subwords(at.model / "subwords.model")] * 2, recipe().data),
        io.StringIO(),
        cache=at.dir / "no",
    )
)
case("this SentencePiece model has no end piece; train it with --eos_id=1 (and --pad_id=0).")(
    lambda at: subwords.Subwords(at.without_end)
)
case("SentencePiece cannot learn subwords from this text (...); is there enough of it?")(
    lambda at: subwords.learn([], 400)
)
case("cannot read the subwords DIR/no: No such file or directory.")(lambda at: subwords.load_subwords(at.dir / "no"))
case("DIR/a is not a SentencePiece model.")(lambda at: subwords.load_subwords(file(at, "a", b"no")))
case("there are 1 translations and 2 references; they must match line by line.")(lambda at: evaluate(["a"], ["a", "b"]))
case("there is no line to evaluate.")(lambda at: evaluate([], []))

# ------------------------------------------------------------------- models

case("there is no model directory DIR/no.")(lambda at: diglot.load(at.dir / "no"))
case("DIR is not a model directory: it has no manifest.json.")(lambda at: diglot.load(at.dir))
case("cannot read DIR/m/manifest.json: Is a directory.")(
    lambda at: [(at.dir / "m" / "manifest.json").mkdir(parents=True), diglot.load(at.dir / "m")]
)
case("DIR/other/manifest.json is broken: it is not the list of files that diglot writes.")(
    lambda at: with_manifest(at, b"{}")
)
case("DIR/other has format 9, written by diglot 7.0; diglot 0.1.0 reads up to format 1: install a newer one.")(
    lambda at: with_manifest(at, b'{"format": 9, "diglot": "7.0", "files": {}}')
)
case("DIR/other/manifest.json is broken: '../x' is not the plain name of a file.")(
    lambda at: with_manifest(at, b'{"format": 1, "files": {"../x": {"bytes": 1, "sha256": ""}}}')
)
case("cannot read DIR/other/x: No such file or directory.")(
    lambda at: with_manifest(at, b'{"format": 1, "files": {"x": {"bytes": 1, "sha256": ""}}}')
)
case("DIR/other/config.toml is broken: it is not the file that was written.")(
    lambda at: with_manifest(at, b'{"format": 1, "files": {"config.toml": {"bytes": 1, "sha256": ""}}}')
)
case("DIR/broken/config.toml shares one matrix between the languages (tie = 'all'), but there are two vocabularies.")(
    lambda at: broken_model(
        at, lambda f: f.update({"subwords.src.model": f.pop("subwords.model"), "subwords.tgt.model": at.other_proto})
    )
)
case("DIR/broken/model.safetensors does not fit DIR/broken/config.toml: decoder... should have the shape ...")(
    lambda at: broken_model(
        at,
        lambda f: f.update(
            {"config.toml": f["config.toml"].replace(b"num_decoder_layers = 1", b"num_decoder_layers = 2")}
        ),
    )
)
case("cannot read DIR/broken/model.safetensors: No such file or directory.")(
    lambda at: broken_model(at, lambda f: f.pop("model.safetensors"))
)
case("DIR/broken/model.safetensors is broken: ...")(
    lambda at: broken_model(at, lambda f: f.update({"model.safetensors": b"no"}))
)
case("cannot write DIR/a/b: Not a directory. What was saved before is intact; make room or choose another place.")(
    lambda at: [file(at, "a"), checkpoint.write_directory(at.dir / "a" / "b", {})]
)
case("cannot write DIR/no/a: No such file or directory.")(lambda at: checkpoint.replace_file(at.dir / "no" / "a", b""))
case("'nonsense' is neither a directory nor a preset (tiny, small, base, big).")(lambda at: info.describe("nonsense"))

# ------------------------------------------------------------------- translating and scoring

case("precision 'fp8' is none of: fp32, bf16.")(lambda at: diglot.load(at.model, precision="fp8"))
case("device 'tpu' is none of: auto, cpu, cuda.")(lambda at: diglot.load(at.model, device="tpu"))
if not torch.cuda.is_available():
    case("device 'cuda': PyTorch finds no GPU here; use cpu, or install PyTorch for your GPU.")(
        lambda at: diglot.load(at.model, device="cuda")
    )
case("DIR/... and DIR/... have different vocabularies; an ensemble needs the same subwords.")(
    lambda at: diglot.load(at.model, at.other_model)
)
case("there are 1 texts and 2 prefixes; each text needs one.")(
    lambda at: diglot.load(at.model).translate(["a"], prefixes=["a", "b"])
)
case("there are 1 sources and 2 targets; each source needs one.")(
    lambda at: diglot.load(at.model).score(["a"], ["a", "b"])
)
case("pair 2 has ... pieces on a side; at most 2,047 can be scored at once: split it.")(
    lambda at: diglot.load(at.model).score(["a", "b"], ["a", "好" * 2000])
)

# ------------------------------------------------------------------- commands

case("DIR is not a run directory: it has no config.toml.")(lambda at: run_cli("train", str(at.dir)))
case("cannot write DIR/no/out: No such file or directory.")(
    lambda at: run_cli("translate", str(at.model), str(file(at, "a")), "-o", str(at.dir / "no" / "out"))
)
case("DIR/a is the text itself: writing there would destroy it; choose another --output.")(
    lambda at: run_cli("translate", str(at.model), str(file(at, "a")), "-o", str(at.dir / "a"))
)
case("line 1: no TAB between source and target.")(
    lambda at: run_cli("score", str(at.model), str(file(at, "a", b"one\n")))
)
case("DIR/a has more lines than DIR/b, which has 1; they must match line by line.")(
    lambda at: run_cli("score", str(at.model), str(file(at, "a", b"a\nb\n")), str(file(at, "b", b"a\n")))
)
case("DIR/b has more lines than DIR/a; they must match line by line.")(
    lambda at: run_cli("score", str(at.model), str(file(at, "a", b"a\n")), str(file(at, "b", b"a\nb\n")))
)
case("cannot write to DIR/a/b: Not a directory; choose another place with --out.")(
    lambda at: [file(at, "a"), demo.run_demo(at.dir / "a" / "b")]
)

# ------------------------------------------------------------------- training

case("where to? Name the run directory: --out runs/NAME, or train.out in the recipe.")(
    lambda at: trained(at, "train.out=")
)
case("nothing to train on: give --src and --tgt files, or --tsv (data.src, data.tgt, data.tsv).")(
    lambda at: trained(at, "data.src=[]", "data.tgt=[]")
)
case("DIR/run holds other files (x); name a new or empty directory with --out.")(
    lambda at: [(at.dir / "run").mkdir(), file(at, "run/x"), trained(at)]
)
case("cannot write to DIR/run: File exists.")(lambda at: [file(at, "run"), trained(at)])
case("DIR/train.en is empty: there is nothing to train on.")(
    lambda at: [write_pairs(at.dir, "train", 0, 1), write_pairs(at.dir, "valid", 3, 1), trained(at)]
)
case("DIR/valid.en is empty: there is nothing to validate on.")(
    lambda at: [write_pairs(at.dir, "train", 99, 1), write_pairs(at.dir, "valid", 0, 1), trained(at)]
)
case("of 200 pairs 0 are left to train on and 8 to validate on: too few. DIR/run/dropped.tsv lists the others ...")(
    lambda at: trained(at, "data.max_pieces=1")
)
case("10 updates in a row, up to ..., had no finite gradient: training has diverged. Lower train.learning_...")(
    lambda at: trained(at, "train.learning_rate_scale=1e30", "train.max_updates=40", "train.valid_every=40")
)
case("DIR/run was begun with another recipe: train.seed was 1 and is 2. Choose another --out, or go on with ...")(
    lambda at: [trained(at), trained(at, "train.seed=2")]
)
case("the pairs are not those that DIR/run was begun with; give back the old text and the old filters, or begin ...")(
    lambda at: [trained(at), write_pairs(at.dir, "train", 99, 7), trained(at)]
)


@case("DIR/run/step-000001 is no checkpoint to go on from: its training state is missing or broken.")
def _(at: SimpleNamespace) -> None:
    trained(at)
    step = at.dir / "run" / "step-000001"
    checkpoint.write_directory(step, {p.name: p.read_bytes() for p in at.model.iterdir() if p.name != "manifest.json"})
    trained(at)


case("memory ran out (...). What was saved is intact; give it more memory, and go on: diglot train DIR/run")(
    lambda at: with_patch(torch.optim.Adam, "step", out_of_memory, lambda: trained(at))
)
case("memory is too small for one pair of data.max_pieces = 256 pieces a side: lower that, or choose a smaller ...")(
    lambda at: with_patch(memory, "CGROUPS", full_group(at), lambda: trained(at, "data.micro_batch=auto"))
)


def with_patch(where: object, name: str, value: object, cause: Callable[[], object]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, name, value)
        cause()


def out_of_memory(*of: object, **options: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def full_group(at: SimpleNamespace) -> Path:
    """Control groups, of both versions, that have a megabyte left."""
    for directory, (limit, use, _) in ((at.dir, memory.VERSION_2), (at.dir / "memory", memory.VERSION_1)):
        directory.mkdir(exist_ok=True)
        for name, content in ((limit, 9 << 20), (use, 8 << 20), ("memory.stat", "cache 0")):
            (directory / name).write_text(f"{content}\n")
    return at.dir


@case("DIR/run is in use by another process; wait for it, or choose another --out.")
def _(at: SimpleNamespace) -> None:
    (at.dir / "run").mkdir()
    with (at.dir / "run" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        trained(at)


@case("train.tensorboard needs TensorBoard: pip install 'diglot[track]'")
def _(at: SimpleNamespace) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch.utils.tensorboard", None)
        trained(at, "train.tensorboard=true")


# ------------------------------------------------------------------- the test


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Two small models of different vocabularies, and a SentencePiece model without an end piece."""
    directory = tmp_path_factory.mktemp("prepared")
    words = ("train.max_updates=1", "train.valid_every=1")
    model = train(small_recipe(directory, "one", *words), quiet=True).model
    other = train(small_recipe(directory, "two", *words, "subwords.size=380"), quiet=True).model
    proto = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a b c d e"] * 9), model_writer=proto, vocab_size=9, eos_id=-1, minloglevel=2
    )
    other_proto = (other / "subwords.model").read_bytes()
    return SimpleNamespace(model=model, other_model=other, other_proto=other_proto, without_end=proto.getvalue())


def raised_at(error: BaseException) -> tuple[str, int]:
    """The module and the line that raised an error."""
    frame = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(str(SOURCE))][-1]
    return str(Path(frame.filename).relative_to(SOURCE)), frame.lineno or 0


SEEN: set[tuple[str, int]] = set()


@pytest.mark.parametrize(("text", "cause"), CASES, ids=[text[:60] for text, _ in CASES])
def test_the_user_reads(
    text: str, cause: Callable[[SimpleNamespace], object], prepared: SimpleNamespace, tmp_path: Path
):
    at = SimpleNamespace(dir=tmp_path, **vars(prepared))
    with pytest.raises(DiglotError) as caught:
        cause(at)
    SEEN.add(raised_at(caught.value))
    said = str(caught.value).replace(str(tmp_path), "DIR").replace(str(prepared.model.parents[1]), "DIR")
    said = said.replace(str(prepared.other_model.parents[1]), "DIR")
    assert "\n" not in said
    parts = [part for part in text.split("...") if part]
    position = 0
    for part in parts:
        assert part in said[position:], (said, text)
        position = said.index(part, position) + len(part)
    assert said.startswith(parts[0])
    assert text.endswith("...") or said.endswith(parts[-1])


def test_no_error_is_left_out(request: pytest.FixtureRequest):
    chosen = [item for item in request.session.items if item.name.startswith("test_the_user_reads")]
    if len(chosen) < len(CASES):
        pytest.skip("only some of the cases were chosen to run")
    missing: list[str] = []
    for path in sorted(SOURCE.rglob("*.py")):
        name = str(path.relative_to(SOURCE))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                called = ast.unparse(node.exc.func).split(".")[-1]
                lines = range(node.lineno, (node.end_lineno or 0) + 1)
                if called in OURS and not any((name, line) in SEEN for line in lines):
                    missing.append(f"{name}:{node.lineno}")
    assert not missing, " ".join(missing)
