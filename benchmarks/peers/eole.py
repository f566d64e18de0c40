"""Eole, the heir of OpenNMT-py."""

from __future__ import annotations

import json
import math
import re

from benchmarks.peers import OUTPUT, Job, Step
from benchmarks.task import BETAS, DROPOUT, SMOOTHING, SRC, TGT

SETTINGS = {
    "bf16 autocast": {"compute_dtype": "bf16", "use_amp": "yes"},
    "fp32": {"compute_dtype": "fp32", "use_amp": ""},
}
LOG = OUTPUT
NEEDS = "eole"
NOTE = "pre-norm alone"
LINE = re.compile(r"Step +(\d+)/ *\d+; .*bsz: +\d+/ *(\d+)/")
VALID = re.compile(r"[Vv]alidation perplexity: ([\d.]+)")


def prepare(job: Job) -> None:
    """Its vocabulary: the pieces; it adds its special words."""
    words = (job.corpus.folder / "vocabulary.txt").read_text(encoding="utf-8").split("\n")[:-1]
    own = [word for word in words if word not in ("<unk>", "<pad>", "<s>", "</s>")]
    (job.corpus.folder / "eole.txt").write_text("".join(f"{word}\n" for word in own), encoding="utf-8")


def command(job: Job) -> list[str]:
    """The command that trains."""
    return [str(job.python.with_name("eole")), "train", "-config", write_config(job, "train", {})]


def score(job: Job) -> list[str]:
    """The command that gives the loss on the validation text, which is smoothed in training: one more update, at a
    learning rate of 0, without smoothing."""
    more = {"train_from": str(job.folder / "model"), "reset_optim": "all", "label_smoothing": 0.0, "learning_rate": 0.0,
            "decay_method": "none", "train_steps": 1, "valid_steps": 1, "save_checkpoint_steps": 1,
            "model_path": str(job.folder / "scored")}  # fmt: skip
    return [str(job.python.with_name("eole")), "train", "-config", write_config(job, "score", more)]


def write_config(job: Job, name: str, more: dict[str, object]) -> str:
    """Its configuration, JSON being YAML; the path is returned."""
    net, folder = job.network, job.corpus.folder
    text = {part: {"path_src": str(folder / f"{part}.pieces.{SRC}"), "path_tgt": str(folder / f"{part}.pieces.{TGT}")}
            for part in ("train", "valid")}  # fmt: skip
    config = {
        "data": {
            "corpus": text["train"] | {"transforms": [], "weight": 1},
            "valid": text["valid"] | {"transforms": []},
        },
        "src_vocab": str(folder / "eole.txt"),
        "tgt_vocab": str(folder / "eole.txt"),
        "share_vocab": True,
        "save_data": str(job.folder / "data"),
        "overwrite": True,
        "seed": 1,
        "report_every": 1,
        "n_sample": 0,
        "training": {
            "model_path": str(job.folder / "model"),
            "world_size": 0,
            "num_workers": 1,
            "compute_dtype": job.setting["compute_dtype"],
            "use_amp": bool(job.setting["use_amp"]),
            "batch_type": "tokens",
            "batch_size": 4560,  # sentences * the longer side: about 4,096 target pieces
            "batch_size_multiple": 1,
            "normalization": "tokens",
            "valid_batch_size": 64,
            "train_steps": job.updates,
            "valid_steps": job.updates,
            "save_checkpoint_steps": job.updates,
            "dropout": [DROPOUT],
            "attention_dropout": [0.0],
            "label_smoothing": SMOOTHING,
            "max_grad_norm": 0,
            "optim": "adam",
            "adam_beta1": BETAS[0],
            "adam_beta2": BETAS[1],
            "learning_rate": net.scale,
            "decay_method": "noam",
            "warmup_steps": net.warmup_steps,
            "param_init_method": "xavier_uniform",
            "log_attention_entropy": False,
            **more,
        },
        "model": {
            "architecture": "transformer",
            "hidden_size": net.d_model,
            "layers": net.layers,
            "heads": net.heads,
            "transformer_ff": net.d_ff,
            "share_embeddings": True,
            "share_decoder_embeddings": True,
            "add_ffnbias": True,
            "embeddings": {"position_encoding_type": "SinusoidalInterleaved", "word_vec_size": net.d_model},
        },
    }
    path = job.folder / f"{name}.yaml"
    path.write_text(json.dumps(config), encoding="utf-8")
    return str(path)


def read(line: str) -> Step | float | None:
    """`bsz: 3403/4012/250`: source pieces, target pieces and sentences of an update."""
    if found := LINE.search(line):
        return Step(int(found[1]), float(found[2]))
    found = VALID.search(line)
    return math.log(float(found[1])) if found else None
