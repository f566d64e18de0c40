"""Marian, through its Python package, which brings the whole of it (`pymarian` is `marian`)."""

from __future__ import annotations

import re

from benchmarks.peers import OUTPUT, Job, Step
from benchmarks.task import BETAS, DROPOUT, EPSILON, LONGEST, SMOOTHING, SRC, TGT, UPDATE_PIECES

# a worker is a copy of the network on a thread of its own; an update is divided among them
SETTINGS = {
    "2 workers": {"workers": "2"},
    "1 worker": {"workers": "1"},
}
LOG = OUTPUT
NEEDS = "marian"
NOTE = "fp32: its other precisions are for GPUs"
LINE = re.compile(r"Up\. (\d+) .* Cost .* \* ([\d,]+) @ [\d,]+ after ([\d,]+)")
VALID = re.compile(r"\[valid\] .* ce-mean-words : ([\d.]+)")


def prepare(job: Job) -> None:
    """Its vocabulary: the pieces, with its own end and unknown word first."""
    words = (job.corpus.folder / "vocabulary.txt").read_text(encoding="utf-8").split("\n")[:-1]
    own = ["</s>", "<unk>", *(word for word in words if word not in ("</s>", "<unk>"))]
    lines = (f"'{word.replace(chr(39), chr(39) * 2)}': {number}\n" for number, word in enumerate(own))
    (job.corpus.folder / "marian.yml").write_text("".join(lines), encoding="utf-8")


def command(job: Job) -> list[str]:
    """The command that trains."""
    net, folder, workers = job.network, job.corpus.folder, int(job.setting["workers"])
    is_pre = net.norm == "pre"
    options = {
        "type": "transformer",
        "model": job.folder / "model.npz",
        "train-sets": [folder / f"train.pieces.{side}" for side in (SRC, TGT)],
        "valid-sets": [folder / f"valid.pieces.{side}" for side in (SRC, TGT)],
        "vocabs": [folder / "marian.yml"] * 2,
        "dim-vocabs": [0, 0],
        "dim-emb": net.d_model,
        "transformer-dim-ffn": net.d_ff,
        "transformer-heads": net.heads,
        "enc-depth": net.layers,
        "dec-depth": net.layers,
        "transformer-preprocess": "n" if is_pre else "",
        "transformer-postprocess": "da" if is_pre else "dan",
        "transformer-postprocess-top": "n" if is_pre else "",
        "transformer-dropout": DROPOUT,
        "label-smoothing": SMOOTHING,
        "optimizer-params": [*BETAS, EPSILON],
        "learn-rate": net.peak_rate,
        "lr-warmup": net.warmup_steps,
        "lr-decay-inv-sqrt": net.warmup_steps,
        "clip-norm": 0,
        "cost-type": "ce-sum",  # which alone has the labels counted in the log; Adam does not see a factor
        "mini-batch-words": UPDATE_PIECES,
        "mini-batch-round-up": "false",
        "max-length": LONGEST,
        "cpu-threads": workers,
        "workspace": 512,
        "disp-freq": 1,
        "valid-freq": job.updates,
        "save-freq": 1_000_000,
        "valid-metrics": "ce-mean-words",
        "after": f"{job.updates}u",
        "seed": 1,
        "tempdir": job.folder,
    }
    words = [str(job.python.with_name("pymarian")), "--tied-embeddings-all", "--sync-sgd", "--shuffle-in-ram"]
    for name, value in options.items():
        if value != "":
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return words


def read(line: str) -> Step | float | None:
    """`Up. 50 : Sen. 6,400 : Cost 8.9 * 4,012 @ 4,012 after 201,324`: labels since the last line, of a batch, all."""
    if found := LINE.search(line):
        return Step(int(found[1]), float(found[2].replace(",", "")))
    found = VALID.search(line)
    return float(found[1]) if found else None
