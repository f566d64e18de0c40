"""Models of other engines for tests: small, with random weights, made by those engines; and how to spoil one."""

from __future__ import annotations

import io
import json
import pickle
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import sentencepiece
import torch

from diglot.demo import draw_corpus

PHRASES = draw_corpus(1500, seed=3)


def learn_spm(lines: list[str], size: int, kind: str = "unigram") -> bytes:
    """A SentencePiece model as OPUS-MT has one: other normalization than ours, no bytes, no padding."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=size, model_type=kind, hard_vocab_limit=False,
        character_coverage=0.999, minloglevel=2,
    )  # fmt: skip
    return model.getvalue()


def texts_of(proto: bytes) -> list[str]:
    """The pieces that text may become."""
    sp = sentencepiece.SentencePieceProcessor(model_proto=proto)
    return [sp.id_to_piece(i) for i in range(sp.vocab_size()) if not (sp.is_control(i) or sp.is_unknown(i))]


SPREAD = {  # standard deviations, times that of a sum of as many numbers
    r"\.w_[qk]\.weight|[qk]_proj\.weight": 2.0, r"\.w_[vo]\.weight|(v|out)_proj\.weight": 2.0,
    r"\.w_[12]\.weight|fc[12]\.weight": 0.5, r"embed|shared": 2.0, r"output\.weight|lm_head": 1.0,
}  # fmt: skip


def liven(model: torch.nn.Module, most: float = 9.0) -> None:
    """Random weights with which a network looks at its source and does not say the same for ever, as most do. The
    price: such networks magnify their own rounding; with `most` at 1 they do not."""
    for name, parameter in model.named_parameters():
        spread = min(most, next((value for pattern, value in SPREAD.items() if re.search(pattern, name)), 0.0))
        if not parameter.requires_grad:
            continue
        if spread:
            parameter.data.normal_(0, spread * parameter.size(1) ** -0.5)
        elif "norm" in name and name.endswith("weight"):
            parameter.data.normal_(1, 0.2)
        else:
            parameter.data.normal_(0, 0.05)


@dataclass
class Vocabulary:
    """Two SentencePiece models, and the numbers of their pieces; some pieces have none."""

    src: bytes
    tgt: bytes
    names: list[list[str]]

    @classmethod
    def draw(cls, seed: int, *, is_shared: bool = True, tags: tuple[str, ...] = (), lines: tuple[list[str], ...] = ()):
        rng = random.Random(seed)
        sides = lines or ([one for one, _ in PHRASES], [two for _, two in PHRASES])
        kind = "unigram" if seed % 4 else "bpe"
        src, tgt = (learn_spm(list(side), rng.randint(150, 300), kind) for side in sides)
        texts = [texts_of(src), texts_of(tgt)]
        if is_shared:
            texts = [sorted({*texts[0], *texts[1]})] * 2
        names: list[list[str]] = []
        for side in texts[:1] if is_shared else texts:
            kept = rng.sample(side, len(side) - 9)
            names.append(["</s>", "<unk>", *(f">>{tag}<<" for tag in tags), *kept, "<pad>"])
        if not is_shared:  # transformers has one number for padding, which both sides have to have
            length = min(map(len, names))
            names = [[*side[: length - 1], "<pad>"] for side in names]
        return cls(src, tgt, names * 2 if is_shared else names)


def draw_marian_mt(root: Path, seed: int, vocabulary: Vocabulary, most: float = 9.0, **options: Any) -> Any:
    """A MarianMT with random weights, written by transformers; the answer is its model."""
    from transformers import MarianConfig, MarianMTModel

    rng = random.Random(seed)
    num_heads, is_shared = rng.choice([1, 2, 4]), vocabulary.names[0] == vocabulary.names[1]
    sizes = {
        "d_model": num_heads * 2 * rng.randint(2, 12), "encoder_layers": rng.randint(1, 3),
        "decoder_layers": rng.randint(1, 3), "encoder_ffn_dim": (d_ff := rng.choice([16, 40, 64])),
        "decoder_ffn_dim": d_ff, "activation_function": rng.choice(["swish", "relu", "gelu"]),
        "scale_embedding": rng.random() < 0.7,
    }  # fmt: skip
    pad = len(vocabulary.names[0]) - 1
    config = MarianConfig(**{
        "vocab_size": pad + 1, "decoder_vocab_size": pad + 1, "encoder_attention_heads": num_heads,
        "decoder_attention_heads": num_heads, "max_position_embeddings": 256, "pad_token_id": pad,
        "decoder_start_token_id": pad, "eos_token_id": 0, "forced_eos_token_id": 0,
        "share_encoder_decoder_embeddings": is_shared, **sizes, **options,
    })  # fmt: skip
    torch.manual_seed(seed)
    model = MarianMTModel(config).eval()
    liven(model, most)
    for matrix in (model.get_input_embeddings(), model.get_decoder().embed_tokens, model.lm_head):
        matrix.weight.data[pad] = 0
    if rng.random() < 0.7:
        model.final_logits_bias.normal_(0, 0.05)
    root.mkdir(parents=True)
    model.save_pretrained(root)
    write_tokenizer(root, vocabulary)
    return model


def write_tokenizer(root: Path, vocabulary: Vocabulary) -> None:
    """The files of a MarianTokenizer."""
    is_shared = vocabulary.names[0] == vocabulary.names[1]
    for name, side in zip(("vocab.json", "target_vocab.json"), vocabulary.names, strict=True):
        if name == "vocab.json" or not is_shared:
            (root / name).write_text(json.dumps({piece: i for i, piece in enumerate(side)}))
    (root / "source.spm").write_bytes(vocabulary.src)
    (root / "target.spm").write_bytes(vocabulary.tgt)
    settings = {"source_lang": "en", "target_lang": "de", "separate_vocabs": not is_shared}
    if not is_shared:
        settings["target_vocab_file"] = str(root / "target_vocab.json")
    (root / "tokenizer_config.json").write_text(json.dumps(settings))


# ------------------------------------------------------------------- hostile files


class Touch:
    """What a pickle may do when it is read."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


STRANGE = [None, True, -1, 0, 1, 10**9, 10**30, 0.5, float("nan"), "", "x", "../../etc/passwd", "/etc/passwd", [], [[]],
           [1, "a"], {}, {"a": 1}, "9" * 5000]  # fmt: skip


def spoil(root: Path, rng: random.Random, mark: Path) -> str:
    """Spoil one file of a model in one way; the answer says which. A pickle that is run makes the file `mark`."""
    path = rng.choice(sorted(path for path in root.iterdir() if path.name != "README.md"))
    content = path.read_bytes()
    ways = ["cut", "bytes", "bytes", "gone", "empty", "link", "directory", "random", "twice"]
    if path.suffix == ".json":
        ways += ["json"] * 20
    if path.suffix == ".yml":
        ways += ["yaml"] * 20
    if path.suffix in (".bin", ".npz", ".safetensors"):
        ways += ["tensors"] * 12 + ["pickle"] * 4
    way = rng.choice(ways)
    if way in ("gone", "link", "directory"):
        path.unlink()
        path.symlink_to("/etc/passwd") if way == "link" else path.mkdir() if way == "directory" else None
    elif way == "json":
        path.write_text(json.dumps(spoil_table(json.loads(content), rng)))
    elif way == "yaml":
        lines = content.decode().split("\n")
        place = rng.randrange(len(lines))
        lines[place] = rng.choice(
            [f"{lines[place].split(':')[0]}: {rng.choice(STRANGE)}", "- - x", "x: y", "\t", "  - ../x", ""]
        )
        path.write_text("\n".join(lines))
    elif way == "pickle":
        path.write_bytes(pickle.dumps(Touch(mark)) if rng.random() < 0.5 else zip_with_pickle(path, mark))
    elif way == "tensors":
        spoil_tensors(path, rng, mark)
    else:
        spoilt = bytearray(content)
        for _ in range(rng.choice([1, 3, 30])):
            if spoilt:
                spoilt[min(int(rng.expovariate(8 / len(spoilt))), len(spoilt) - 1)] = rng.randrange(256)
        path.write_bytes({
            "cut": content[: rng.randrange(len(content) or 1)], "bytes": bytes(spoilt), "empty": b"",
            "random": rng.randbytes(999), "twice": content * 2,
        }[way])  # fmt: skip
    return f"{path.name}: {way}"


def spoil_table(table: Any, rng: random.Random) -> Any:
    """A table with a value, a key or a place of another kind."""
    if rng.random() < 0.05 or not table:
        return rng.choice(STRANGE)
    key = rng.choice(list(table))
    match rng.randrange(4):
        case 0:
            del table[key]
        case 1:
            table[rng.choice(["auto_map", "quantization_config", "x" * 9999, "rope_scaling"])] = rng.choice(STRANGE)
        case 2:
            value = table[key]
            table[key] = [value] if rng.random() < 0.3 else value + rng.choice([-1, 1]) if type(value) is int else None
        case _:
            table[key] = rng.choice(STRANGE)
    return table


def zip_with_pickle(path: Path, mark: Path) -> bytes:
    """What torch.load and numpy.load would run, if they were asked to."""
    content = io.BytesIO()
    if path.suffix == ".npz":
        np.savez(content, Wemb=np.array([Touch(mark)], dtype=object))
    else:
        torch.save({"model.shared.weight": Touch(mark)}, content)
    return content.getvalue()


def spoil_tensors(path: Path, rng: random.Random, mark: Path) -> None:
    """Another shape, kind, name or number of one tensor."""
    tensors = {name: torch.from_numpy(array) for name, array in np.load(path).items()} if path.suffix == ".npz" else (
        safetensors.torch.load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    )  # fmt: skip
    name = rng.choice(list(tensors))
    old = tensors[name]
    changes = [
        lambda: old.T.contiguous(), lambda: old[:-1].contiguous(), lambda: old.flatten(), lambda: old.to(torch.int32),
        lambda: old.double() * float("nan") if old.is_floating_point() else old, lambda: torch.zeros(0),
        lambda: torch.tensor(1.0),
        lambda: torch.zeros(1).expand(10**6, 10**3) if path.suffix == ".bin" else torch.zeros(3),
        lambda: old.to_sparse() if path.suffix == ".bin" else old.to(torch.bool),
    ]  # fmt: skip
    match rng.randrange(4):
        case 0:
            del tensors[name]
        case 1:
            tensors[rng.choice(["model.encoder.layers.0.adapter.weight", "Wpos", "x", "../x"])] = torch.zeros(3)
        case _:
            tensors[name] = rng.choice(changes)()
    if path.suffix == ".npz":
        np.savez(path, **{name: tensor.numpy() for name, tensor in tensors.items()})
    elif path.suffix == ".safetensors":
        safetensors.torch.save_file(tensors, path)
    else:
        torch.save(tensors, path)
