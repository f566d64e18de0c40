"""JoeyNMT."""

from __future__ import annotations

import json
import math
import re

from benchmarks.peers import OUTPUT, Job, Step
from benchmarks.task import BETAS, DROPOUT, LONGEST, SMOOTHING, SRC, TGT

# Sentences of a batch are not of like length, and it is closed when sentences * longest reaches batch_size: with more
# than 4,096 there an update has about 4,096 pieces beside the padding.
SETTINGS = {
    "1 batch an update": {"batch_size": "9600", "accumulate": "1"},
    "2 batches an update": {"batch_size": "4500", "accumulate": "2"},
    "4 batches an update": {"batch_size": "2100", "accumulate": "4"},
}
LOG = OUTPUT
NEEDS = "joeynmt"
NOTE = "fp32: on a CPU it turns fp16 off and has no bf16"
LINE = re.compile(r" Step: +(\d+), .*Tokens per Sec: +(\d+)")
VALID = re.compile(r"Evaluation result.* ppl: +([\d.]+)")


def prepare(job: Job) -> None:
    """Its vocabulary: its special words, then the pieces."""
    words = (job.corpus.folder / "vocabulary.txt").read_text(encoding="utf-8").split("\n")[:-1]
    special = ["<unk>", "<pad>", "<s>", "</s>"]
    own = [*special, *(word for word in words if word not in special)]
    (job.corpus.folder / "joeynmt.txt").write_text("".join(f"{word}\n" for word in own), encoding="utf-8")


def command(job: Job) -> list[str]:
    """The command that trains."""
    return [str(job.python), "-m", "joeynmt", "train", write_config(job, "train", SMOOTHING), "--skip-test"]


def score(job: Job) -> list[str]:
    """The command that gives the loss on the validation text: in training it is smoothed."""
    return [str(job.python), "-m", "joeynmt", "test", write_config(job, "score", 0.0)]


def write_config(job: Job, name: str, smoothing: float) -> str:
    """Its configuration, JSON being YAML; the path is returned."""
    net, folder = job.network, job.corpus.folder
    side = {"level": "word", "voc_file": str(folder / "joeynmt.txt"), "max_length": LONGEST}
    stack = {
        "type": "transformer",
        "num_layers": net.layers,
        "num_heads": net.heads,
        "embeddings": {"embedding_dim": net.d_model, "scale": True, "dropout": DROPOUT},
        "hidden_size": net.d_model,
        "ff_size": net.d_ff,
        "dropout": DROPOUT,
        "layer_norm": net.norm,
    }
    config = {
        "name": "benchmark",
        "model_dir": str(job.folder / "model"),
        "use_cuda": False,
        "random_seed": 1,
        "data": {
            "train": str(folder / "train.pieces"),
            "dev": str(folder / "valid.pieces"),
            "dataset_type": "plain",
            "src": side | {"lang": SRC},
            "trg": side | {"lang": TGT},
        },
        "testing": {
            "batch_size": 64,
            "return_prob": "ref",
            "return_attention": True,
            "beam_size": 1,
            "max_output_length": 1,
        },
        "training": {
            "optimizer": "adamw",
            "adam_betas": BETAS,
            "learning_rate": net.peak_rate,
            "learning_rate_min": 0.0,
            "learning_rate_factor": net.scale,
            "learning_rate_warmup": net.warmup_steps,
            "scheduling": "noam",
            "label_smoothing": smoothing,
            "normalization": "tokens",
            "batch_size": int(job.setting["batch_size"]),
            "batch_multiplier": int(job.setting["accumulate"]),
            "batch_type": "token",
            "epochs": 10_000,
            "updates": job.updates,
            "logging_freq": 1,
            "validation_freq": 1_000_000,
        },
        "model": {
            "initializer": "xavier_uniform",
            "embed_initializer": "normal",
            "embed_init_weight": net.d_model**-0.5,
            "tied_embeddings": True,
            "tied_softmax": True,
            "encoder": stack,
            "decoder": stack,
        },
    }
    path = job.folder / f"{name}.yaml"
    path.write_text(json.dumps(config), encoding="utf-8")
    return str(path)


def read(line: str) -> Step | float | None:
    """Its counts, padding left out, are told as a speed."""
    if found := LINE.search(line):
        return Step(int(found[1]), speed=float(found[2]))
    found = VALID.search(line)
    return math.log(float(found[1])) if found else None
