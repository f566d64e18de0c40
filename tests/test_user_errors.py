"""Every error that a user can cause is caused here, and its text is read; none is left out."""

from __future__ import annotations

import ast
import fcntl
import gzip
import io
import json
import multiprocessing
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import sentencepiece
import torch

import diglot
import diglot.run
from diglot import checkpoint, cli, demo, info, subwords
from diglot.alignment import align_pairs, from_pharaoh
from diglot.config import (
    AlignmentConfig,
    DataConfig,
    ModelConfig,
    ModelSpec,
    Recipe,
    load_recipe,
    to_toml,
    update_section,
)
from diglot.corpus import TextFile, open_pairs, open_stream, read_lines, stream_lines
from diglot.drawing import choose_picture
from diglot.errors import DiglotError
from diglot.evaluate import evaluate
from diglot.index import Reading, index_corpus
from diglot.interop import convert, ctranslate2, marian, marian_hf, probe
from diglot.interop.weights import marian_base
from diglot.model import Transformer
from diglot.training import train
from diglot.translator import Attention
from diglot.validation import Summary
from foreign_models import liven
from training_runs import small_recipe, write_pairs

SOURCE = Path(diglot.__file__).parent
OURS = {"ConversionError", "ConfigError", "TextError", "CheckpointError", "TrainingError", "RankError", "_not_utf8"}
CASES: list[tuple[str, Callable[[SimpleNamespace], object], bool]] = []


def case(text: str, *, alone: bool = False):
    """A way to cause an error, and what the user reads of it; DIR is the test's directory, ... is anything.

    `alone`: in a process of its own, which is not the same after it.
    """

    def remember(cause: Callable[[SimpleNamespace], object]):
        CASES.append((text, cause, alone))
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


def with_streams(name: str, cause: Callable[[], object], stream: object) -> object:
    """What happens where a standard stream is another, or, as Python has it where it was closed, None."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, name, stream)
        return cause()


def trained(at: SimpleNamespace, *words: str) -> object:
    return train(small_recipe(at.dir, "run", "train.max_updates=1", "train.valid_every=1", *words), quiet=True)


def with_limit(limit: int, size: int, cause: Callable[[], object]) -> object:
    """What happens where the system grants this process no more than so much."""
    soft, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (size, hard))
    try:
        return cause()
    finally:
        resource.setrlimit(limit, (soft, hard))


def with_memory(free: int, cause: Callable[[], object]) -> object:
    """What happens with so many bytes of memory beside those in use."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return with_limit(resource.RLIMIT_AS, used + free, cause)


def beside_another_rank(at: SimpleNamespace, *words: str, own: tuple[str, ...] = ()) -> Summary:
    """Train as the first of two ranks; the other one is a process of its own, in another directory, whose recipe has
    other `words` than our `own`."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = str(found.getsockname()[1])
    ranks = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    (at.dir / "other").mkdir(exist_ok=True)
    recipe = file(at, "other.toml", to_toml(small_recipe(at.dir, "run", *words)).encode())
    command = [sys.executable, "-m", "diglot", "train", str(recipe)]
    with (
        subprocess.Popen(
            command, env=os.environ | ranks | {"RANK": "1"}, stderr=subprocess.DEVNULL, cwd=at.dir / "other"
        ) as other,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in (ranks | {"RANK": "0"}).items():
            patch.setenv(name, value)
        try:
            patch.chdir(at.dir)
            return train(small_recipe(at.dir, "run", *own), quiet=True)
        finally:
            other.kill()


def both_ways(at: SimpleNamespace) -> list[str]:
    """The words of a recipe that learns both languages from each other."""
    small_recipe(at.dir, "run")
    files = [json.dumps([str(at.dir / f"train.{one}") for one in sides]) for sides in (("en", "de"), ("de", "en"))]
    return [f"data.src={files[0]}", f"data.tgt={files[1]}", 'data.tgt_langs=["de", "en"]']


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
case("search.temperature = inf must be at most 1000.")(lambda at: recipe("search.temperature=inf"))
case("train.seed = 9223372036854775808 must be a number of at most 63 bits.")(
    lambda at: recipe(f"train.seed={1 << 63}")
)
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
case("data.weights has 1 entries for 2 files: give one for each pair of files, then one for each TSV file.")(
    lambda at: recipe("data.src=a", "data.tgt=b", "data.tsv=c", "data.weights=2")
)
case("data.weights = [0.0] must be above 0 and at most 1000.")(lambda at: recipe("data.tsv=a", "data.weights=0"))
case("data.weights = 'much' must be a list of numbers.")(lambda at: recipe("data.weights=much"))
case("data.micro_batch = 1.5 must be a whole number or 'auto'.")(lambda at: recipe("data.micro_batch=1.5"))
case("data.micro_batch = 'auto' cannot be tried with train.strategy = 'fsdp'; give a number.")(
    lambda at: recipe("data.micro_batch=auto", "train.strategy=fsdp")
)
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
case("DIR/a is UTF-16; convert it, as with: iconv -f UTF-16 -t UTF-8 OLD > NEW")(
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


@case("of 30 processes to read pairs the system allows ...: Too many open files. Ask for fewer (train.threads), or ...")
def _(at: SimpleNamespace) -> None:
    pairs = open_pairs([], [], [str(file(at, "a.tsv", b"one\teins\n" * 130_000))])
    pieces = subwords.load_subwords(at.model / "subwords.model")
    cause = partial(index_corpus, pairs, Reading(pieces, pieces, DataConfig()), io.StringIO(), num_processes=30)
    used = {int(path.name) for path in Path("/proc/self/fd").iterdir()}
    with_limit(resource.RLIMIT_NOFILE, [number for number in range(999) if number not in used][20], cause)


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
case("SentencePiece cannot learn subwords from this text: is there any? (...)")(
    lambda at: subwords.learn(["", " "], 400)
)
case("400 subwords are too few: the characters of this text need ... alone; raise subwords.size.")(
    lambda at: subwords.learn([chr(0x4E00 + i) * 9 for i in range(300)], 400)
)
case("cannot read the subwords DIR/no: No such file or directory.")(lambda at: subwords.load_subwords(at.dir / "no"))
case("DIR/a is not a SentencePiece model.")(lambda at: subwords.load_subwords(file(at, "a", b"no")))
case("the translation has 1 lines and the reference has 2; they must match line by line.")(
    lambda at: evaluate(["a"], ["a", "b"])
)
case("the reference is empty: there is no line to evaluate.")(lambda at: evaluate([], []))
case("DIR/hyp has 1 lines and the reference has 2; they must match line by line.")(
    lambda at: run_cli("evaluate", "--hyp", str(file(at, "hyp", b"a\n")), str(file(at, "ref", b"a\nb\n")))
)
case("DIR/src has 1 lines and DIR/ref has 2; they must match line by line.")(
    lambda at: run_cli("evaluate", str(at.model), str(file(at, "src", b"a\n")), str(file(at, "ref", b"a\nb\n")))
)
case("DIR/no has 1 lines and DIR/ref has 2; they must match line by line.")(
    lambda at: run_cli(
        "evaluate", "--hyp", str(file(at, "ref", b"a\nb\n")), "--origins", str(file(at, "no", b"a\n")), f"{at.dir}/ref"
    )
)
case("cannot read DIR/no: No such file or directory.")(
    lambda at: run_cli(
        "evaluate", "--hyp", str(file(at, "a", b"a\n")), str(at.dir / "a"), "--train", f"{at.dir}/no", f"{at.dir}/no"
    )
)


@case("SACREBLEU_SEED = 'x' must be a whole number, or none; or leave it unset.")
def _(at: SimpleNamespace) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SACREBLEU_SEED", "x")
        run_cli("evaluate", "--hyp", str(file(at, "a", b"a\n")), str(at.dir / "a"))


case("this vocabulary has no piece for the target language 'de'; it knows: de, fr.")(
    lambda at: subwords.Subwords(at.without_tags).tag_id("de", ["de", "fr"])
)


@case("cannot make the cache DIR/a/cache: Not a directory; let DIGLOT_CACHE name another directory.")
def _(at: SimpleNamespace) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DIGLOT_CACHE", str(file(at, "a") / "cache"))
        trained(at)


@case("cannot write the index of the corpus to DIR: File too large. Make room there, or let DIGLOT_CACHE name ...")
def _(at: SimpleNamespace) -> None:
    pieces = subwords.load_subwords(at.model / "subwords.model")
    pairs = open_pairs([], [], [str(file(at, "a", b"one\ttwo\n" * 999))])
    cause = partial(index_corpus, pairs, Reading(pieces, pieces, DataConfig()), io.StringIO(), cache=at.dir)
    with_limit(resource.RLIMIT_FSIZE, 9999, cause)


# ------------------------------------------------------------------- models

case("there is no model directory DIR/no.")(lambda at: diglot.load(at.dir / "no"))
case("DIR is not a model directory: it has no manifest.json.")(lambda at: diglot.load(at.dir))
case("DIR/m/manifest.json is broken: it is a link, a directory or a device in place of a file.")(
    lambda at: [(at.dir / "m" / "manifest.json").mkdir(parents=True), diglot.load(at.dir / "m")]
)
case("cannot read DIR/a/manifest.json: Not a directory.")(lambda at: checkpoint.check_directory(file(at, "a")))
case("DIR/other/manifest.json is broken: it is not the list of files that diglot writes.")(
    lambda at: with_manifest(at, b"{}")
)
case("DIR/other has format 9, written by diglot 7.0; diglot 0.1.0 reads up to format 2: install a newer one.")(
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
case("DIR/broken/config.toml shares one matrix between the languages (tie = 'all'), but the vocabularies have ...")(
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
case("DIR/broken is no whole model: its manifest.json lists no model.safetensors.")(
    lambda at: broken_model(at, lambda f: f.pop("model.safetensors"))
)
case("cannot read DIR/no.safetensors: No such file or directory.")(
    lambda at: checkpoint.read_tensors(at.dir / "no.safetensors")
)
case("DIR/broken/model.safetensors does not fit DIR/broken/config.toml: it has 0 tensors for 2 layers.")(
    lambda at: broken_model(at, lambda f: f.update({"model.safetensors": safetensors.torch.save({})}))
)
case("DIR/broken/model.safetensors is broken: ...")(
    lambda at: broken_model(at, lambda f: f.update({"model.safetensors": b"no"}))
)
case("cannot write DIR/a/b: Not a directory. What was saved before is intact; make room or choose another place.")(
    lambda at: [file(at, "a"), checkpoint.write_directory(at.dir / "a" / "b", {})]
)
case("cannot write DIR/no/a: No such file or directory. What was saved before is intact; make room or choose ...")(
    lambda at: checkpoint.replace_file(at.dir / "no" / "a", b"")
)
case("'nonsense' is neither a directory nor a preset (tiny, small, base, big).")(lambda at: info.describe("nonsense"))

# ------------------------------------------------------------------- translating and scoring


def one_attention() -> Attention:
    flat = np.full((1, 1, 2, 2), 0.5)
    return Attention(("a", "</s>"), ("b", "</s>"), ((0, 1),), ((0, 1),), flat, flat, flat)


case("an ensemble has no attention of its own; look at one of its models alone.")(
    lambda at: diglot.load(at.model, at.model).attend("a")
)
case("alignment.layer = 9 and alignment.heads = [1] name no heads of this network; leave both out.")(
    lambda at: ModelSpec(alignment=AlignmentConfig(9, (1,)))
)
case("'middle' is no part of the network; choose from: encoder, decoder, cross.")(
    lambda at: choose_picture(one_attention(), AlignmentConfig(), "middle")
)
case("there is no layer 1 with head 7: the cross has 1 layers of 1 heads, counted from 1.")(
    lambda at: choose_picture(one_attention(), AlignmentConfig(), "cross", 1, (7,))
)
case("there is too little text to choose by which heads align: give at least two pairs of lines.")(
    lambda at: list(align_pairs(diglot.load(at.model), [("a", "b")], choose=True))
)
case(
    "DIR... does not say which of its heads align words; choose them by a text, ...: --choose (in Python: choose=True)."
)(lambda at: align_pairs(diglot.load(at.model), [("a", "b")]))
case("true.pharaoh, line 2: '1_2' is not in Pharaoh format, as 0-0 1-2.")(
    lambda at: from_pharaoh("1_2", "true.pharaoh, line 2")
)
case("DIR... has 1 lines for 2 pairs; they must match line by line.")(
    lambda at: run_cli("align", str(at.model), str(file(at, "a", b"a\nb\n")), str(file(at, "b", b"a\nb\n")), "--choose",
                       "--gold", str(file(at, "c", b"0-0\n")))
)  # fmt: skip
case("DIR/a.txt: write a page (.html), a picture (.svg) or data (.json).")(
    lambda at: run_cli("attend", str(at.model), "a", "-o", str(at.dir / "a.txt"))
)
case("DIR... is no run directory; name one, or none for the paper's base model.")(
    lambda at: run_cli("attend", str(at.model), "--positions")
)
case("DIR... holds no pictures; they are kept where train.watch names a line of the validation text. To ...")(
    lambda at: run_cli("attend", str(at.model))
)


@case("DIR/attention/000001.safetensors is no picture of this run; delete it.")
def _(at: SimpleNamespace) -> object:
    (at.dir / "attention").mkdir()
    safetensors.torch.save_file(
        {"words": torch.zeros(1, dtype=torch.uint8)}, at.dir / "attention" / "000001.safetensors"
    )
    return run_cli("attend", str(at.dir))


case("train.watch = 9 is beyond the 8 lines of the validation text.")(lambda at: trained(at, "train.watch=9"))
case("precision 'fp8' is none of: fp32, bf16.")(lambda at: diglot.load(at.model, precision="fp8"))
case("device 'tpu' is none of: auto, cpu, cuda.")(lambda at: diglot.load(at.model, device="tpu"))
if not torch.cuda.is_available():
    case("device 'cuda': PyTorch finds no GPU here; use cpu, or install PyTorch for your GPU.")(
        lambda at: diglot.load(at.model, device="cuda")
    )
case("DIR/... and DIR/... have different vocabularies; an ensemble needs the same subwords.")(
    lambda at: diglot.load(at.model, at.other_model)
)
case("threads = -1 must be at least 0, which is one a core.")(lambda at: diglot.load(at.model, threads=-1))
case("there are 1 texts and 2 prefixes; each text needs one.")(
    lambda at: diglot.load(at.model).translate(["a"], prefixes=["a", "b"])
)
case("there are 1 sources and 2 targets; each source needs one.")(
    lambda at: diglot.load(at.model).score(["a"], ["a", "b"])
)
case("pair 2 has ... pieces on a side; at most 2,047 can be taken at once: split it.")(
    lambda at: diglot.load(at.model).score(["a", "b"], ["a", "好" * 2000])
)

case("there are 1 texts and 2 target languages; each text needs one.")(
    lambda at: diglot.load(at.model).translate(["a"], to=["de", "de"])
)
case("this model does not translate into 'fr'; it knows: de.")(
    lambda at: diglot.load(at.model).translate(["a"], to="fr")
)
case("line 2 does not say into which language: choose one for all lines with --to (in Python: to=...), or begin ...")(
    lambda at: diglot.load(at.multilingual).translate([">>de<< a", "a"])
)
case("line 1 asks for the language 'fr'; this model knows: de, en.")(
    lambda at: diglot.load(at.multilingual).translate([">>fr<< a"])
)

# ------------------------------------------------------------------- commands

case("DIR is not a run directory: it has no config.toml.")(lambda at: run_cli("train", str(at.dir)))
case("DIR/one/model is a model, not a run directory; to start from it, name another --out and --init DIR/one/model.")(
    lambda at: run_cli("train", str(at.model))
)
case("DIR/one goes on with its own recipe, in its own place: leave --preset out.")(
    lambda at: run_cli("train", str(at.model.parent), "--preset", "tiny")
)
case("DIR/one goes on with its own recipe, in its own place: leave --out (train.out) out.")(
    lambda at: run_cli("train", str(at.model.parent), "--out", str(at.dir))
)
case("train.out is given twice, as 'a' and as 'b'; leave one out.")(
    lambda at: run_cli("train", "train.out=a", "--out", "b")
)
case("there is no directory DIR/no; name the one that holds the runs: diglot runs DIR")(
    lambda at: run_cli("runs", str(at.dir / "no"))
)
case("nothing to train on: give --src and --tgt files, or --tsv (data.src, data.tgt, data.tsv).")(
    lambda at: run_cli("train", "--verify-resume", "--quiet")
)
case("cannot write DIR/no/out: No such file or directory.")(
    lambda at: run_cli("translate", str(at.model), str(file(at, "a")), "-o", str(at.dir / "no" / "out"))
)
case("standard output is closed: there is nowhere to write.")(
    lambda at: with_streams("stdout", lambda: run_cli("info", "tiny"), None)
)
case("standard input is closed: there is nothing to read; name a file.")(
    lambda at: with_streams("stdin", lambda: run_cli("translate", str(at.model)), None)
)
case("DIR/a is the text itself: writing there would destroy it; choose another --output.")(
    lambda at: run_cli("translate", str(at.model), str(file(at, "a")), "-o", str(at.dir / "a"))
)
case(
    "DIR/a, line 1: no TAB between source and target; if these are the sources alone, name the file of the targets ..."
)(lambda at: run_cli("score", str(at.model), str(file(at, "a", b"one\n"))))
case("DIR/a has more lines than DIR/b, which has 1; they must match line by line.")(
    lambda at: run_cli("score", str(at.model), str(file(at, "a", b"a\nb\n")), str(file(at, "b", b"a\n")))
)
case("DIR/b has more lines than DIR/a; they must match line by line.")(
    lambda at: run_cli("score", str(at.model), str(file(at, "a", b"a\n")), str(file(at, "b", b"a\nb\n")))
)


@case("cannot write to standard output: No space left on device.")
def _(at: SimpleNamespace) -> None:
    with Path("/dev/full").open("w") as full:
        with_streams("stdout", lambda: run_cli("info", "tiny"), full)


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
case("cannot write to DIR/run: Not a directory.")(lambda at: [file(at, "run"), trained(at)])
case("DIR/train.en is empty: there is nothing to train on.")(
    lambda at: [write_pairs(at.dir, "train", 0, 1), write_pairs(at.dir, "valid", 3, 1), trained(at)]
)
case("DIR/valid.en is empty: there is nothing to validate on.")(
    lambda at: [write_pairs(at.dir, "train", 99, 1), write_pairs(at.dir, "valid", 0, 1), trained(at)]
)
case(
    "of 200 pairs 0 are left to train on and 8 to validate on: too few; DIR/run/dropped.tsv lists the others with ..."
)(lambda at: trained(at, "data.max_pieces=1"))
case("10 updates in a row, up to ..., had no finite gradient: training has diverged. Lower train.learning_...")(
    lambda at: trained(at, "train.learning_rate_scale=1e30", "train.max_updates=40", "train.valid_every=40")
)
case("DIR/run was begun with another recipe: train.seed was 1 and is 2. Choose another --out, or go on with ...")(
    lambda at: [trained(at), trained(at, "train.seed=2")]
)
case("the pairs are not those that DIR/run was begun with; give back the old text and the old filters, or begin ...")(
    lambda at: [trained(at), write_pairs(at.dir, "train", 99, 7), trained(at)]
)


case("data.tgt_langs needs data.valid_tgt_langs: into which language to validate each file.")(
    lambda at: trained(at, *both_ways(at))
)
case("data.weights leave no pair in an epoch: raise them; 1 is every pair once.")(
    lambda at: trained(at, "data.weights=[0.001]")
)
case("data.valid_tgt_langs names 'fr', into which nothing is trained.")(
    lambda at: trained(at, *both_ways(at), "data.valid_tgt_langs=fr")
)
case("DIR/run cannot go on as another model: model.d_ff was 64 and is 32. Choose another --out.")(
    lambda at: [trained(at), trained(at, "model.d_ff=32")]
)


@case("memory is too small for one pair of data.max_pieces = 9999 pieces a side: lower that, or ...", alone=True)
def find_no_memory(at: SimpleNamespace) -> None:
    with_memory(300 << 20, lambda: trained(at, "data.micro_batch=auto", "data.max_pieces=9999"))


@case("memory ran out in update 1 on rank 0, with ... padded pieces at once. That is a single pair: ...", alone=True)
def run_out_of_memory(at: SimpleNamespace) -> None:
    small_recipe(at.dir, "run")
    for name in ("train.en", "train.de"):
        text = (at.dir / name).read_bytes()
        file(at, name, text.replace(b"\n", b" ") * 4 + b"\n" + text)
    words = "data.micro_batch=1", "data.max_pieces=9999", "train.update_pieces=9999"
    with_memory(200 << 20, lambda: trained(at, *words))


@case("a process that reads text ahead was killed from outside, for want of memory perhaps. Start the ...", alone=True)
def kill_a_worker(at: SimpleNamespace) -> None:
    def kill() -> None:
        while not (workers := multiprocessing.active_children()):
            time.sleep(0.01)
        time.sleep(0.3)  # in the middle of an update
        os.kill(workers[0].pid or 0, signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    trained(at, "train.max_updates=9999", "train.valid_every=9999")


@case("--verify-resume kills ranks on one machine alone: start torchrun with --nnodes 1.")
def _(at: SimpleNamespace) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
            patch.setenv(name, value)
        run_cli("train", "--verify-resume")


@case("DIR/run/step-000001 is no checkpoint to go on from: its training state is missing or broken.")
def _(at: SimpleNamespace) -> None:
    trained(at)
    step = at.dir / "run" / "step-000001"
    checkpoint.write_directory(step, {p.name: p.read_bytes() for p in at.model.iterdir() if p.name != "manifest.json"})
    trained(at)


@case("cannot write the subwords to DIR/cache: File too large. Make room there, or let DIGLOT_CACHE name another ...")
def _(at: SimpleNamespace) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DIGLOT_CACHE", str(at.dir / "cache"))
        recipe = small_recipe(at.dir, "run")
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        try:
            train(recipe, quiet=True)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@case(
    "no checkpoint of DIR/run is whole: DIR/run/step-000001/manifest.json is broken: it is not the list of files that "
    "diglot writes. Nothing was begun anew over them: give back a copy, or begin a new run with another --out."
)
def _(at: SimpleNamespace) -> None:
    trained(at)
    (at.dir / "run" / "step-000001" / "manifest.json").write_bytes(b"")
    trained(at)


case("memory ran out (...). What was saved is intact; give it more memory, and go on: diglot train DIR/run")(
    lambda at: with_patch(torch.optim.Adam, "step", out_of_memory, lambda: trained(at))
)


def with_patch(where: object, name: str, value: object, cause: Callable[[], object]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, name, value)
        cause()


def out_of_memory(*of: object, **options: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


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


# ------------------------------------------------------------------- ranks


case("rank 1 has another recipe than rank 0: train.seed is 2 and not 1. Give all ranks the same recipe, and say ...")(
    lambda at: beside_another_rank(at, "train.seed=2")
)


@case("rank 1 does not see what rank 0 writes to shared: let train.out be a directory that all machines share.")
def _(at: SimpleNamespace) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diglot.run, "SECONDS_TO_SEE", 0)
        beside_another_rank(at, "train.out=shared", own=("train.out=shared",))


@pytest.mark.slow
def test_what_a_rank_sees_late_is_no_error(tmp_path: Path):
    def show_late() -> None:
        while not (tmp_path / "shared" / "config.toml").exists():
            time.sleep(0.01)
        time.sleep(1.5)
        (tmp_path / "other" / "shared").symlink_to(tmp_path / "shared")

    threading.Thread(target=show_late, daemon=True).start()
    words = "train.out=shared", "train.max_updates=1", "train.valid_every=1"
    beside_another_rank(SimpleNamespace(dir=tmp_path), *words, own=words)
    assert (tmp_path / "shared" / "model").exists()


@pytest.mark.slow
def test_a_checkpoint_that_one_rank_does_not_see_is_left_out_by_all(tmp_path: Path):
    words = "train.out=shared", "train.max_updates=4", "train.valid_every=2"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        assert "average of the last 2" in train(small_recipe(tmp_path, "run", *words), quiet=True).scores
    (tmp_path / "other" / "shared").mkdir(parents=True)
    for name in ("config.toml", "step-000004"):
        (tmp_path / "other" / "shared" / name).symlink_to(tmp_path / "shared" / name)
    summary = beside_another_rank(SimpleNamespace(dir=tmp_path), *words, own=words)
    assert "average of the last 1" in summary.scores


@case("rank 1 has other text to train on than rank 0: give all machines the same files, and subwords that were ...")
def _(at: SimpleNamespace) -> None:
    write_pairs(at.dir / "other", "train", 200, seed=7)
    same = ("data.src=train.en", "data.tgt=train.de", f"subwords.model={at.model}/subwords.model")
    beside_another_rank(at, *same, own=same)


@case("rank 1 did not come within 1 s (train.rank_timeout): was it started, and does every machine ...")
def _(at: SimpleNamespace) -> None:
    with pytest.MonkeyPatch.context() as patch, socket.create_server(("127.0.0.1", 0)) as found:
        port = str(found.getsockname()[1])
        found.close()
        names = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in names.items():
            patch.setenv(name, value)
        trained(at, "train.rank_timeout=1")


# ------------------------------------------------------------------- models of other engines


def small_model(at: SimpleNamespace, **options: Any) -> checkpoint.StoredModel:
    """A model with random weights that other engines can have."""
    pieces = subwords.load_subwords(at.model / "subwords.model")
    sizes = {"d_model": 8, "d_ff": 8, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 1}
    config = ModelConfig(**{**sizes, "position_base": marian_base(8), **options})
    return checkpoint.StoredModel(
        at.dir, ModelSpec(config), Transformer(config, pieces.num_pieces, pieces.num_pieces), pieces, pieces
    )


def marian_mt(at: SimpleNamespace, change: Callable[[Path], object], **options: Any) -> object:
    """Read a MarianMT of which `change` has altered the directory."""
    (at.dir / "hf").mkdir()
    marian_hf.write(small_model(at, **options), at.dir / "hf")
    change(at.dir / "hf")
    return marian_hf.read(at.dir / "hf")


def release(at: SimpleNamespace, change: Callable[[Path], object]) -> object:
    """Read a model of Marian of which `change` has altered the directory."""
    (at.dir / "marian").mkdir()
    marian.write(small_model(at), at.dir / "marian")
    change(at.dir / "marian")
    return marian.read(at.dir / "marian" / "decoder.yml")


def with_json(name: str, **values: Any) -> Callable[[Path], object]:
    """Other values in a JSON file."""
    return lambda root: (root / name).write_text(json.dumps(json.loads((root / name).read_text()) | values))


def with_tensors(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Other tensors in a safetensors file."""

    def apply(root: Path) -> None:
        tensors = safetensors.torch.load_file(root / "model.safetensors")
        change(tensors)
        safetensors.torch.save_file(tensors, root / "model.safetensors")

    return apply


def with_settings(old: str, new: str) -> Callable[[Path], object]:
    """Another configuration inside Marian's weights."""

    def apply(root: Path) -> None:
        arrays = marian.read_npz(root, "model.npz")
        text = arrays[marian.CONFIG].tobytes().replace(old.encode(), new.encode())
        arrays[marian.CONFIG] = np.frombuffer(text, np.int8)
        (root / "model.npz").write_bytes(marian.write_npz(arrays))

    return apply


def with_numbers(text: str) -> Callable[[Path], object]:
    """A vocabulary beside SentencePiece models."""

    def apply(root: Path) -> None:
        for side in ("source", "target"):
            shutil.copy(root / "vocab.spm", root / f"{side}.spm")
        (root / "v.yml").write_text(text)
        (root / "decoder.yml").write_text((root / "decoder.yml").read_text().replace("vocab.spm", "v.yml"))

    return apply


def compared(at: SimpleNamespace, text: str, **options: Any) -> object:
    """Compare with transformers on a text, or on any."""
    (at.dir / "hf").mkdir()
    torch.manual_seed(1)
    stored = small_model(at, **options)
    liven(stored.model)
    marian_hf.write(stored, at.dir / "hf")
    return probe.Comparison(stored, marian_hf.Peer(at.dir / "hf", stored)).run(
        [text] if text else probe.draw_texts(stored.src_subwords)
    )


def new_pieces(at: SimpleNamespace, piece: str) -> object:
    return convert.import_model(at.model, at.dir / "out", {}, [piece])


case(
    "DIR is no model that diglot reads: neither MarianMT (config.json, source.spm), nor Marian (decoder.yml), nor a ..."
)(lambda at: convert.import_model(at.dir, at.dir / "out", {}))
case("diglot writes for transformers, ctranslate2 (there with --int8, too) and marian, not for 'onnx'.")(
    lambda at: run_cli("export", str(at.model), "--to", "onnx", "--out", str(at.dir / "out"))
)
case("new piece 1, 'a b': it has a space, or the vocabulary has it already.")(lambda at: new_pieces(at, "a b"))
case("DIR exists; name a new or empty directory with --out.")(
    lambda at: [file(at, "x"), convert.import_model(at.model, at.dir, {})]
)
case("CTranslate2 has no heads with model.d_k = 3.")(lambda at: ctranslate2.write(small_model(at, d_k=3), at.dir))
case("transformers' MarianMT has no model.norm = 'pre' (--to ctranslate2 has it) and no model.d_k = 3.")(
    lambda at: marian_hf.write(small_model(at, norm="pre", d_k=3), at.dir)
)
case(
    "Marian has no model.position_base = 10000.0; train with 215443.4690031882... and no model.activation = 'gelu' ..."
)(lambda at: marian.write(small_model(at, position_base=10_000.0, activation="gelu"), at.dir))
case("the comparison needs no_such_engine: pip install no_such_engine, or leave the comparison out with --unchecked.")(
    lambda at: probe.need("no_such_engine")
)
case(
    "diglot and transformers split line 1 of the comparison in different ways: piece ... is ... here and ... there, ..."
)(lambda at: compared(at, "a </s> b"))
case("diglot and transformers translate line ... of the comparison in different ways: piece ... by our log-...")(
    lambda at: compared(at, "", norm_epsilon=1e-2, d_model=32, d_ff=64)
)

case("cannot read DIR/hf/vocab.json: No such file or directory.")(
    lambda at: marian_mt(at, lambda root: (root / "vocab.json").unlink())
)
case("DIR/hf/vocab.json is no file in its directory; if it is a link, copy there what it names.")(
    lambda at: marian_mt(
        at, lambda root: [(root / "vocab.json").unlink(), (root / "vocab.json").symlink_to("/etc/passwd")]
    )
)
case("DIR/hf/vocab.json is longer than any file of its kind.")(
    lambda at: marian_mt(at, lambda root: os.truncate(root / "vocab.json", 1 << 27))
)
case("DIR/hf/vocab.json, byte 2: this is not UTF-8.")(
    lambda at: marian_mt(at, lambda root: (root / "vocab.json").write_bytes(b"{\xff"))
)
case("DIR/hf/vocab.json is not what JSON of its kind is: it is no object.")(
    lambda at: marian_mt(at, lambda root: (root / "vocab.json").write_bytes(b"[]"))
)
case("DIR/hf/config.json tells of another network or search than diglot's: auto_map is unknown; normalize_before ...")(
    lambda at: marian_mt(at, with_json("config.json", auto_map={}, normalize_before=True))
)
case("DIR/hf/tokenizer_config.json splits text otherwise than diglot can: sp_model_kwargs = {'nbest_size': 3}, ...")(
    lambda at: marian_mt(at, with_json("tokenizer_config.json", sp_model_kwargs={"nbest_size": 3}))
)
case("DIR/hf/vocab.json does not number ... pieces from 0 without a gap, <unk> and </s> among them.")(
    lambda at: marian_mt(at, with_json("vocab.json", more=9999))
)
case(
    "DIR/hf/config.json does not fit its vocabularies, which have ... pieces and </s> at 1 and 1: vocab_size = 7, ..."
)(lambda at: marian_mt(at, with_json("config.json", vocab_size=7)))
case("DIR/hf/generation_config.json: diglot cannot keep the ban of the pieces [200].")(
    lambda at: marian_mt(at, with_json("generation_config.json", bad_words_ids=[[0], [200]]))
)
case("DIR/hf/model.safetensors is broken: ...")(
    lambda at: marian_mt(at, lambda root: (root / "model.safetensors").write_bytes(b"no"))
)
case("DIR/hf/pytorch_model.bin is no file of weights: it holds other things than tensors by name.")(
    lambda at: marian_mt(
        at, lambda root: [(root / "model.safetensors").unlink(), torch.save({"x": 1}, root / "pytorch_model.bin")]
    )
)
case("DIR/hf/config.json: the row of decoder_start_token_id = 5 is not zero, and diglot's decoder begins with the ...")(
    lambda at: marian_mt(at, with_json("generation_config.json", decoder_start_token_id=5))
)
case("DIR/hf/model.safetensors: lm_head.weight is not model.shared.weight, although the configuration makes them one.")(
    lambda at: marian_mt(at, with_tensors(lambda t: t.update({"lm_head.weight": t["model.shared.weight"] + 1})))
)
case(
    "DIR/hf/model.safetensors does not fit its configuration: x is unknown; final_logits_bias has the shape (1, 2) ..."
)(lambda at: marian_mt(at, with_tensors(lambda t: t.update(x=torch.ones(1), final_logits_bias=torch.ones(1, 2)))))
case("DIR/hf/model.safetensors does not fit its configuration: ... tensors for 901 layers.")(
    lambda at: marian_mt(at, with_json("config.json", encoder_layers=900))
)
case("DIR/hf/source.spm is not a SentencePiece model.")(
    lambda at: marian_mt(at, lambda root: (root / "source.spm").write_bytes(b"no"))
)

case("DIR/marian holds several models; name the decoder.yml of one: a.decoder.yml, b.decoder.yml.")(
    lambda at: release(
        at,
        lambda root: (
            [shutil.copy(root / "decoder.yml", root / f"{x}.decoder.yml") for x in "ab"]
            and [(root / "decoder.yml").unlink(), marian.find(root)]
        ),
    )
)
case(
    "DIR/marian/decoder.yml has to name one model and two vocabularies, all of them in DIR/marian; it names ['/x'] ..."
)(
    lambda at: release(
        at, lambda root: (root / "decoder.yml").write_text("models: [/x]\nvocabs:\n  - vocab.spm\n  - ../vocab.spm\n")
    )
)
case("DIR/marian/decoder.yml, line 1: diglot does not understand this: '? {}'.")(
    lambda at: release(at, lambda root: (root / "decoder.yml").write_text("? {}\n"))
)
case(
    "DIR/marian/decoder.yml tells of another network or search than diglot's: what is unknown; word-penalty = '1' ..."
)(lambda at: release(at, lambda root: (root / "decoder.yml").write_text("what: 1\nword-penalty: 1\n")))
case("DIR/marian/model.npz tells of another network than diglot's: norms at 'n, an, , ' with relu.")(
    lambda at: release(at, with_settings('preprocess: ""', "preprocess: n"))
)
case("DIR/marian/model.npz: dim-emb = 'x' is no number.")(
    lambda at: release(at, with_settings("dim-emb: 8", "dim-emb: x"))
)
case("DIR/marian/model.npz is no file of Marian's weights: File is not a zip file.")(
    lambda at: release(at, lambda root: (root / "model.npz").write_bytes(b"no"))
)
case("DIR/marian/v.yml, entry 2: this is no piece and its number, or it comes twice.")(
    lambda at: release(at, with_numbers("</s>: 0\n</s>: 1\n"))
)
case("DIR/marian/v.yml does not number 2 pieces from 0 without a gap, <unk> and </s> among them.")(
    lambda at: release(at, with_numbers("</s>: 0\na: 1\n"))
)


@case("Marian cannot translate with DIR/marian: ...")
def _(at: SimpleNamespace) -> None:
    release(at, lambda root: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(marian, "find_spec", lambda name: True)  # it may be missing: then it fails, too
        peer = marian.Peer(at.dir / "marian" / "decoder.yml")
    (at.dir / "marian" / "model.npz").write_bytes(b"no")
    peer.greedy([["a"]], 3)


# ------------------------------------------------------------------- the test


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Small models: two of different vocabularies, one of two languages; and SentencePiece models of others."""
    directory = tmp_path_factory.mktemp("prepared")
    words = ("train.max_updates=1", "train.valid_every=1")
    model = train(small_recipe(directory, "one", *words), quiet=True).model
    other = train(small_recipe(directory, "two", *words, "subwords.size=380"), quiet=True).model
    at = SimpleNamespace(dir=directory)
    multilingual = train(
        small_recipe(directory, "three", *words, *both_ways(at), "data.valid_tgt_langs=de"), quiet=True
    ).model
    foreign: list[bytes] = []
    for eos_id in (-1, 2):
        proto = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["a b c d e"] * 9), model_writer=proto, vocab_size=9, eos_id=eos_id, minloglevel=2
        )
        foreign.append(proto.getvalue())
    return SimpleNamespace(
        model=model, other_model=other, multilingual=multilingual, without_end=foreign[0], without_tags=foreign[1],
        other_proto=(other / "subwords.model").read_bytes(),
    )  # fmt: skip


def raised_at(error: BaseException) -> tuple[str, int]:
    """The module and the line that raised an error."""
    frame = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(str(SOURCE))][-1]
    return str(Path(frame.filename).relative_to(SOURCE)), frame.lineno or 0


def caught(cause: Callable[[SimpleNamespace], object], at: SimpleNamespace) -> tuple[str, tuple[str, int]]:
    """What an error says, and where it was raised."""
    with pytest.raises(DiglotError) as error:
        cause(at)
    return str(error.value), raised_at(error.value)


SEEN: set[tuple[str, int]] = set()


@pytest.mark.parametrize(("text", "cause", "alone"), CASES, ids=[text[:60] for text, _, _ in CASES])
def test_the_user_reads(
    text: str, cause: Callable[[SimpleNamespace], object], alone: bool, prepared: SimpleNamespace, tmp_path: Path
):
    at = SimpleNamespace(dir=tmp_path, **vars(prepared))
    if alone:
        for left in (4, 3, 2, 1, 0):  # a library may abort where memory runs out at an unlucky place
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                try:
                    said, place = process.submit(caught, cause, at).result()
                    break
                except BrokenProcessPool:
                    if not left:
                        raise
    else:
        said, place = caught(cause, at)
    SEEN.add(place)
    said = said.replace(str(tmp_path), "DIR").replace(str(prepared.model.parents[1]), "DIR")
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
