"""MarianMT, as Hugging Face's transformers reads and writes it: the form in which OPUS-MT models are spread.

config.json                                what the network is; unknown keys are refused
model.safetensors | pytorch_model.bin      the weights, by the names below
source.spm, target.spm                     two SentencePiece models, for their splits alone
vocab.json, or with target_vocab.json      the numbers of the pieces, of both languages in one or apart
generation_config.json                     how it searches
tokenizer_config.json                      languages, names of special pieces

MarianMT is post-norm, has all biases, and LayerNorm's epsilon is 1e-5. Its decoder begins with a piece whose row is
zero, padding where that is so.
"""

from __future__ import annotations

import dataclasses
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor

from diglot.batching import pad
from diglot.checkpoint import StoredModel
from diglot.config import ModelConfig, ModelSpec, from_dict
from diglot.errors import ConversionError
from diglot.interop import files, pieces, probe, weights
from diglot.interop.pieces import Special
from diglot.model import padding_mask, positional_encoding
from diglot.subwords import Subwords
from diglot.translator import TAG

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"
SOURCE, TARGET, VOCABULARY, TARGET_VOCABULARY = "source.spm", "target.spm", "vocab.json", "target_vocab.json"

# ours: theirs, in model.encoder.layers.N and model.decoder.layers.N
ENCODER = {
    "self_attention.w_q": "self_attn.q_proj",
    "self_attention.w_k": "self_attn.k_proj",
    "self_attention.w_v": "self_attn.v_proj",
    "self_attention.w_o": "self_attn.out_proj",
    "residual_1.norm": "self_attn_layer_norm",
    "feed_forward.w_1": "fc1",
    "feed_forward.w_2": "fc2",
    "residual_2.norm": "final_layer_norm",
}
DECODER = ENCODER | {
    "cross_attention.w_q": "encoder_attn.q_proj",
    "cross_attention.w_k": "encoder_attn.k_proj",
    "cross_attention.w_v": "encoder_attn.v_proj",
    "cross_attention.w_o": "encoder_attn.out_proj",
    "residual_2.norm": "encoder_attn_layer_norm",
    "residual_3.norm": "final_layer_norm",
}
SHARED, SRC, TGT, OUT = (
    "model.shared.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight",
)  # fmt: skip
BIAS = "final_logits_bias"  # (1, V)
POSITIONS = {
    "src_positions.table": "model.encoder.embed_positions.weight",
    "tgt_positions.table": "model.decoder.embed_positions.weight",
}
ACTIVATIONS = {"relu": "relu", "swish": "swish", "silu": "swish", "gelu": "gelu"}

# what config.json means where it is silent
DEFAULTS: dict[str, Any] = {
    "vocab_size": 58101, "decoder_vocab_size": None, "d_model": 1024, "max_position_embeddings": 1024,
    "encoder_layers": 12, "decoder_layers": 12, "encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096,
    "encoder_attention_heads": 16, "decoder_attention_heads": 16, "activation_function": "gelu", "dropout": 0.1,
    "attention_dropout": 0.0, "activation_dropout": 0.0, "scale_embedding": False,
    "share_encoder_decoder_embeddings": True, "tie_word_embeddings": True, "pad_token_id": 58100, "eos_token_id": 0,
    "decoder_start_token_id": 58100, "num_beams": 1, "length_penalty": 1.0, "bad_words_ids": None,
    "suppress_tokens": None, "forced_eos_token_id": 0,
}  # fmt: skip
# keys that may have this value alone: any other is another network or another search
FIXED: dict[str, Any] = {
    "model_type": "marian", "is_encoder_decoder": True, "is_decoder": False, "add_cross_attention": False,
    "tie_encoder_decoder": False, "normalize_before": False, "normalize_embedding": False,
    "add_final_layer_norm": False, "add_bias_logits": False, "static_position_embeddings": True,
    "chunk_size_feed_forward": 0, "pruned_heads": {}, "cross_attention_hidden_size": None,
    "do_sample": False, "min_length": 0, "min_new_tokens": None, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0, "num_beam_groups": 1,
    "diversity_penalty": 0.0, "forced_bos_token_id": None, "begin_suppress_tokens": None, "sequence_bias": None,
    "exponential_decay_length_penalty": None, "guidance_scale": None, "penalty_alpha": None, "force_words_ids": None,
    "constraints": None, "watermarking_config": None, "num_return_sequences": 1,
}  # fmt: skip
# keys that change nothing of what a piece's probability is
INERT = frozenset(
    """_name_or_path _from_model_config _num_labels architectures bos_token_id classif_dropout classifier_dropout
    decoder_layerdrop dtype early_stopping encoder_layerdrop extra_pos_embeddings finetuning_task gradient_checkpointing
    id2label init_std label2id max_length max_new_tokens num_hidden_layers num_labels output_attentions
    output_hidden_states output_scores prefix problem_type remove_invalid_values renormalize_logits return_dict
    return_dict_in_generate sep_token_id task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p
    torch_dtype torchscript transformers_version typical_p use_bfloat16 use_cache""".split()
)

START = "<start>"  # the row that their decoder begins with, where our padding has a row that was learnt
FILL = "<fill{}>"  # rows that make two vocabularies equally long
IMPOSSIBLE = -1e9  # the bias of such rows
CLOSE = 2e-3  # tables of positions are the same: half precision does not tell them better apart

CARD = """# A diglot model for transformers

```python
from transformers import MarianMTModel, MarianTokenizer

tokenizer, model = (kind.from_pretrained("DIRECTORY") for kind in (MarianTokenizer, MarianMTModel))
tokenizer.batch_decode(model.generate(**tokenizer(["TEXT"], return_tensors="pt")), skip_special_tokens=True)
```

Weights and pieces are the same, and greedy translations were compared when this was written. What differs:

- transformers divides the log-probability of a hypothesis by its length to the power of `length_penalty`; diglot, as
  Wu et al. (2016), by ((5 + length) / 6) to that power. So beam search may prefer another length.
- Its beam search ends by another rule (`early_stopping`), and counts the piece that the decoder begins with.
- LayerNorm's epsilon is 1e-5 in MarianMT, and 1e-6 in a model that diglot trained.
- The tokenizer finds the names of special pieces, as `</s>`, in a text, too; diglot takes them as text, and brings
  text into NFC first.
- A long line is translated at once, up to the positions that the model has, where diglot splits it at sentence ends.
"""


# ------------------------------------------------------------------- reading


def is_one(root: Path) -> bool:
    """Whether a directory holds a MarianMT."""
    return (root / CONFIG).exists() and (root / SOURCE).exists()


def read(root: Path) -> StoredModel:
    """A MarianMT model as ours."""
    table = read_config(root)
    tokenizer = files.read_json(root, TOKENIZER) if (root / TOKENIZER).exists() else {}
    special = read_special(root, tokenizer)
    protos = [pieces.check(files.read_bytes(root, name), str(root / name)) for name in (SOURCE, TARGET)]
    names = [read_vocabulary(root, VOCABULARY, special)]
    names.append(read_vocabulary(root, TARGET_VOCABULARY, special) if tokenizer.get("separate_vocabs") else names[0])
    check_ids(root, table, names, special)
    tensors = read_tensors(root)
    spec = to_spec(root, table, tokenizer, names[0])
    names = [side[: len(side) - sum(map(is_filling, side))] for side in names]
    spec, found = to_ours(root, spec, table, tensors, [len(side) for side in names])
    stored = weights.number_pieces(root, spec, found, list(zip(protos, names, strict=True)), special)
    check_bans(root, table, stored.tgt_subwords)
    return stored


def read_config(root: Path) -> dict[str, Any]:
    """All settings with their defaults; unknown keys, and values that mean another computation, are refused."""
    given = files.read_json(root, CONFIG)
    if (root / GENERATION).exists():
        given |= files.read_json(root, GENERATION)
    table = DEFAULTS | given
    wrong = [f"{key} is unknown" for key in sorted(given.keys() - DEFAULTS.keys() - FIXED.keys() - INERT)]
    wrong += [
        f"{key} = {given.get(key)!r} is not {value!r}"
        for key, value in FIXED.items()
        if given.get(key) not in (value, None) or (key == "model_type" and key not in given)
    ]
    for key in ("attention_heads", "ffn_dim"):
        one, two = table[f"encoder_{key}"], table[f"decoder_{key}"]
        wrong += [f"encoder_{key} = {one!r} is not decoder_{key} = {two!r}"] if one != two else []
    table["decoder_vocab_size"] = table["decoder_vocab_size"] or table["vocab_size"]
    for key in ("vocab_size", "decoder_vocab_size", "pad_token_id", "eos_token_id", "decoder_start_token_id"):
        wrong += [f"{key} = {table[key]!r} is no number"] if type(table[key]) is not int else []
    for key in ("share_encoder_decoder_embeddings", "tie_word_embeddings", "scale_embedding"):
        wrong += [f"{key} = {table[key]!r} is neither true nor false"] if type(table[key]) is not bool else []
    if table["activation_function"] not in ACTIVATIONS:
        wrong.append(f"activation_function = {table['activation_function']!r} is none of {', '.join(ACTIVATIONS)}")
    if wrong:
        raise ConversionError(f"{root / CONFIG} tells of another network or search than diglot's: {'; '.join(wrong)}.")
    return table


def read_special(root: Path, tokenizer: Mapping[str, Any]) -> Special:
    """How the special pieces are called; a setting that would split text otherwise is refused."""
    names = [tokenizer.get(f"{role}_token") or getattr(Special(), role) for role in ("unk", "eos", "pad")]
    names = [cast("dict[str, Any]", name).get("content") if isinstance(name, dict) else name for name in names]
    if tokenizer.get("sp_model_kwargs") or not all(isinstance(name, str) for name in names):
        raise ConversionError(
            f"{root / TOKENIZER} splits text otherwise than diglot can: sp_model_kwargs = "
            f"{tokenizer.get('sp_model_kwargs')!r}, special pieces {names}."
        )
    return Special(*cast("list[str]", names))


def read_vocabulary(root: Path, name: str, special: Special) -> list[str]:
    """The pieces of a vocabulary in the order of their numbers."""
    found = files.read_json(root, name)
    numbers = list(found.values())
    is_whole = all(type(number) is int for number in numbers) and sorted(numbers) == list(range(len(found)))
    if not is_whole or "" in found or not {special.unk, special.eos} <= found.keys():
        raise ConversionError(
            f"{root / name} does not number {len(found):,} pieces from 0 without a gap, {special.unk} and "
            f"{special.eos} among them."
        )
    return sorted(found, key=lambda piece: found[piece])


def check_ids(root: Path, table: Mapping[str, Any], names: Sequence[Sequence[str]], special: Special) -> None:
    """Compare what the configuration says of the vocabularies with what they hold."""
    said = {key: table[key] for key in ("vocab_size", "decoder_vocab_size", "eos_token_id", "decoder_start_token_id")}
    start = table["decoder_start_token_id"]
    found = [*map(len, names), *(side.index(special.eos) for side in names)]
    if found != [*list(said.values())[:2], *[table["eos_token_id"]] * 2] or not 0 <= start < len(names[1]):
        settings = ", ".join(f"{key} = {value}" for key, value in said.items())
        raise ConversionError(
            f"{root / CONFIG} does not fit its vocabularies, which have {found[0]:,} and {found[1]:,} pieces and "
            f"{special.eos} at {found[2]} and {found[3]}: {settings}."
        )


def check_bans(root: Path, table: Mapping[str, Any], subwords: Subwords) -> None:
    """Refuse a search that must not write what ours may."""
    bans = cast("list[Any]", table["bad_words_ids"] or [])
    single: list[Any] = [ban[0] if isinstance(ban, list) and len(cast("list[Any]", ban)) == 1 else ban for ban in bans]
    single += cast("list[Any]", table["suppress_tokens"] or [])
    allowed: list[Any] = [*subwords.unwritable(), *range(subwords.num_pieces, table["decoder_vocab_size"])]
    left = [ban for ban in single if ban not in allowed]
    if left:
        raise ConversionError(f"{root / GENERATION}: diglot cannot keep the ban of the pieces {left}.")


def to_spec(root: Path, table: Mapping[str, Any], tokenizer: Mapping[str, Any], names: Sequence[str]) -> ModelSpec:
    """The configuration as ours."""
    tie = "none" if not table["tie_word_embeddings"] or not table["scale_embedding"] else "output"
    if tie == "output" and table["share_encoder_decoder_embeddings"]:
        tie = "all"
    model = {
        "d_model": table["d_model"],
        "d_ff": table["encoder_ffn_dim"],
        "num_heads": table["encoder_attention_heads"],
        "num_encoder_layers": table["encoder_layers"],
        "num_decoder_layers": table["decoder_layers"],
        "dropout": table["dropout"],
        "attention_dropout": table["attention_dropout"],
        "ffn_dropout": table["activation_dropout"],
        "max_positions": table["max_position_embeddings"],
        "tie": tie,
        "activation": ACTIVATIONS[table["activation_function"]],
        "attention_bias": True,
        "output_bias": True,
        "norm_epsilon": 1e-5,
    }
    is_beam = table["num_beams"] not in (1, None)
    search = (
        {"beam_size": table["num_beams"], "length_penalty": table["length_penalty"]}
        if is_beam
        else {"method": "greedy"}
    )
    tags = [tag[1] for piece in names if (tag := TAG.fullmatch(piece))]
    languages = {"src": tokenizer.get("source_lang") or "", "tgt": tokenizer.get("target_lang") or "", "tags": tags}
    return from_dict(ModelSpec, {"model": model, "languages": languages, "search": search}, str(root / CONFIG))


def read_tensors(root: Path) -> dict[str, Tensor]:
    """The weights by their names; of the older file nothing but tensors is read, and no code is run."""
    if (root / SAFE).exists():
        try:
            return safetensors.torch.load_file(files.find_file(root, SAFE))
        except (SafetensorError, OSError) as error:
            raise ConversionError(f"{root / SAFE} is broken: {error}.") from None
    path = files.find_file(root, PICKLED)
    try:
        found = cast("dict[Any, Any]", torch.load(path, map_location="cpu", weights_only=True))
        if not all(isinstance(name, str) and is_plain(tensor) for name, tensor in found.items()):
            raise ValueError("it holds other things than tensors by name")
    except Exception as error:  # whatever a stranger's file makes of the reader: it is not what it should be
        raise ConversionError(f"{path} is no file of weights: {str(error).partition(chr(10))[0]}.") from None
    return found


def is_plain(tensor: Any) -> bool:
    """Whether something is a tensor with all its numbers."""
    return (
        isinstance(tensor, Tensor) and tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_meta
    )


def to_ours(
    root: Path, spec: ModelSpec, table: Mapping[str, Any], tensors: Mapping[str, Tensor], lengths: Sequence[int]
) -> tuple[ModelSpec, dict[str, Tensor]]:
    """Their weights by our names and in our order, of so many pieces; biases that are all zero are none."""
    where, config = root / (SAFE if (root / SAFE).exists() else PICKLED), spec.model
    weights.check_depth(where, config, tensors)
    tensors = with_all_matrices(where, table, tensors)
    num_pieces = table["vocab_size"], table["decoder_vocab_size"]
    names = name_all(config)
    loose = dataclasses.replace(config, tie="none")  # each matrix under its own name
    shapes = weights.shapes_of(loose, *num_pieces) | {"output.bias": (1, num_pieces[1])}
    tables = {ours: theirs for ours, theirs in POSITIONS.items() if theirs in tensors}
    shapes |= dict.fromkeys(tables, (config.max_positions, config.d_model))
    weights.check_tensors(where, tensors, {theirs: shapes[ours] for ours, theirs in (names | tables).items()})
    start = table["decoder_start_token_id"]
    if tensors[TGT][start].any():
        raise ConversionError(
            f"{root / CONFIG}: the row of decoder_start_token_id = {start} is not zero, and diglot's decoder begins "
            "with the zero vector alone."
        )
    found = {ours: tensors[theirs].float() for ours, theirs in (names | tables).items()}
    found = weights.from_halves(found) | {"output.bias": found["output.bias"][0]}
    for name, length in zip(("src_embedding.weight", "tgt_embedding.weight", "output.weight", "output.bias"),
                            (lengths[0], *[lengths[1]] * 3), strict=True):  # fmt: skip
        found[name] = found[name][:length]
    if not table["scale_embedding"]:
        for name in ("src_embedding.weight", "tgt_embedding.weight"):
            found[name] = found[name] / math.sqrt(config.d_model)
    config, found = read_positions(config, found)
    config = weights.without_zero_biases(config, found)
    return dataclasses.replace(spec, model=config), {name: found[name] for name in weights.shapes_of(config, *lengths)}


def name_all(config: ModelConfig) -> dict[str, str]:
    """Their names of all weights, by ours."""
    layers = weights.name_layers(config, ENCODER, DECODER, "model.{stack}.layers.{layer}.", first=0)
    names = {f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in layers.items() for kind in ("weight", "bias")}
    return names | {"src_embedding.weight": SRC, "tgt_embedding.weight": TGT, "output.weight": OUT, "output.bias": BIAS}


def with_all_matrices(where: Path, table: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with each matrix of pieces under its own name, where the file may have what is one under any."""
    is_shared, is_tied = table["share_encoder_decoder_embeddings"], table["tie_word_embeddings"]
    tied = [SHARED, SRC, TGT, OUT] if is_shared and is_tied else [TGT, OUT] if is_tied else []
    found = {BIAS: torch.zeros(1, table["decoder_vocab_size"]), **tensors}  # older files have no bias
    first, *others = [name for name in tied if name in tensors] or [""]
    for name in others:
        if tensors[name].dtype != tensors[first].dtype or not torch.equal(tensors[name], tensors[first]):
            raise ConversionError(f"{where}: {name} is not {first}, although the configuration makes them one.")
    found |= {name: tensors[first] for name in tied if first}
    if is_shared and SHARED in found:
        shared = found.pop(SHARED)
        found = {SRC: shared, TGT: shared} | found  # where nothing is tied these are others, if they are there
    return found


def read_positions(config: ModelConfig, found: dict[str, Tensor]) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Tables of positions in the file are the sines that we compute, or else were learnt."""
    tables = {name: found.pop(name) for name in POSITIONS if name in found}
    bases = 10_000.0, weights.marian_base(config.d_model)
    sines = [positional_encoding(config.max_positions, config.d_model, base) for base in bases]
    for base, table in zip(bases, sines, strict=True):
        if all(torch.allclose(table, other, rtol=0, atol=CLOSE) for other in tables.values()):
            return dataclasses.replace(config, position_base=base), found
    return dataclasses.replace(config, positions="learned"), found | dict.fromkeys(POSITIONS, sines[0]) | tables


def is_filling(piece: str) -> bool:
    """Whether a piece is one that `write` adds, for a row that we do not have."""
    return piece == START or re.fullmatch(FILL.replace("{}", r"\d+"), piece) is not None


# ------------------------------------------------------------------- writing


def write(stored: StoredModel, root: Path) -> None:
    """Write one of our models as MarianMT."""
    config, languages = stored.spec.model, stored.spec.languages
    check_expressible(config)
    subwords = stored.src_subwords, stored.tgt_subwords
    names = [pieces.names_of(side, languages.tags) for side in subwords]
    special, pad_id, eos_id = pieces.read_special(subwords[1].proto), subwords[1].pad_id, subwords[1].eos_id
    found = weights.complete(stored)
    start_id = pad_id
    if found["tgt_embedding.weight"][pad_id].any():  # a row that was learnt: they begin with another, which is zero
        start_id = max(map(len, names))
        names = [[*side, *map(FILL.format, range(start_id - len(side))), START] for side in names]
        found = with_filling(found, start_id + 1)
    search = stored.spec.search
    settings = {
        "architectures": ["MarianMTModel"], "model_type": "marian", "is_encoder_decoder": True,
        "d_model": config.d_model, "encoder_layers": config.num_encoder_layers,
        "decoder_layers": config.num_decoder_layers, "encoder_ffn_dim": config.d_ff, "decoder_ffn_dim": config.d_ff,
        "encoder_attention_heads": config.num_heads, "decoder_attention_heads": config.num_heads,
        "activation_function": config.activation, "dropout": config.dropout,
        "attention_dropout": config.attention_dropout, "activation_dropout": config.ffn_dropout,
        "max_position_embeddings": config.max_positions, "scale_embedding": True,
        "share_encoder_decoder_embeddings": config.tie == "all", "tie_word_embeddings": config.tie != "none",
        "vocab_size": len(names[0]), "decoder_vocab_size": len(names[1]), "pad_token_id": pad_id,
        "eos_token_id": eos_id, "forced_eos_token_id": eos_id, "decoder_start_token_id": start_id,
    }  # fmt: skip
    generation = {
        "num_beams": search.beam_size if search.method == "beam" else 1, "length_penalty": search.length_penalty,
        "max_length": min(512, config.max_positions), "suppress_tokens": subwords[1].unwritable(),
        **{key: settings[key] for key in
           ("pad_token_id", "eos_token_id", "forced_eos_token_id", "decoder_start_token_id")},
    }  # fmt: skip
    tokenizer = {
        "tokenizer_class": "MarianTokenizer", "source_lang": languages.src, "target_lang": languages.tgt,
        "unk_token": special.unk, "eos_token": special.eos, "pad_token": special.pad,
        "separate_vocabs": names[0] != names[1], **({"bos_token": START} if start_id != pad_id else {}),
    }  # fmt: skip
    vocabularies = dict(zip((VOCABULARY, TARGET_VOCABULARY), names, strict=True))
    if names[0] == names[1]:
        del vocabularies[TARGET_VOCABULARY]
    files.write_files(root, {
        CONFIG: files.write_json(settings),
        GENERATION: files.write_json(generation),
        TOKENIZER: files.write_json(tokenizer),
        **{name: files.write_json({piece: i for i, piece in enumerate(side)}) for name, side in vocabularies.items()},
        SOURCE: subwords[0].proto,
        TARGET: subwords[1].proto,
        SAFE: safetensors.torch.save(to_theirs(config, found), {"format": "pt"}),
        "README.md": CARD.encode(),
    })  # fmt: skip


def check_expressible(config: ModelConfig) -> None:
    """Refuse what MarianMT cannot compute."""
    refused = ["model.norm = 'pre' (--to ctranslate2 has it)"] if config.norm == "pre" else []
    if config.d_k not in (0, config.d_model // config.num_heads):
        refused.append(f"model.d_k = {config.d_k}")
    if refused:
        raise ConversionError(f"transformers' MarianMT has no {' and no '.join(refused)}.")


def with_filling(found: Mapping[str, Tensor], num_pieces: int) -> dict[str, Tensor]:
    """The weights with zero rows behind the others, which are never written."""
    new = dict(found)
    for name in ("src_embedding.weight", "tgt_embedding.weight", "output.weight"):
        new[name] = F.pad(found[name], (0, 0, 0, num_pieces - len(found[name])))
    new["output.bias"] = F.pad(found["output.bias"], (0, num_pieces - len(found["output.bias"])), value=IMPOSSIBLE)
    return new


def to_theirs(config: ModelConfig, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our weights by their names and in their order, each once."""
    names = name_all(config)
    if config.positions == "learned" or config.position_base != 10_000:
        sines = positional_encoding(config.max_positions, config.d_model, config.position_base)
        found, names = dict.fromkeys(POSITIONS, sines) | found, names | POSITIONS
    if config.tie != "none":
        del names["output.weight"]
    if config.tie == "all":
        del names["tgt_embedding.weight"]
        names["src_embedding.weight"] = SHARED
    found = weights.to_halves(found)
    found["output.bias"] = found["output.bias"][None]
    return {theirs: found[ours].contiguous().clone() for ours, theirs in names.items()}


# ------------------------------------------------------------------- comparing


class Peer:
    """transformers with such a directory."""

    name = "transformers"

    def __init__(self, root: Path, stored: StoredModel):
        transformers = probe.need("transformers")
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it recommends a package that it does not call
            self.tokenizer: Any = transformers.MarianTokenizer.from_pretrained(str(root), local_files_only=True)
        load = transformers.MarianMTModel.from_pretrained
        self.model: Any = load(str(root), local_files_only=True, dtype=torch.float32).eval()
        self.unwritable = stored.tgt_subwords.unwritable()

    def split(self, text: str) -> list[str]:
        """A source text as pieces."""
        return self.tokenizer.tokenize(text)

    def greedy(self, sources: Sequence[Sequence[str]], max_extra: int) -> list[list[str]]:
        """The translations of pieces, as pieces."""
        numbers: dict[str, int] = self.tokenizer.encoder
        unk, eos = numbers[self.tokenizer.unk_token], self.model.config.eos_token_id
        found: list[list[str]] = []
        rows, lengths = pad([[*[numbers.get(p, unk) for p in one], eos] for one in sources], eos)
        src = torch.from_numpy(rows)
        bans = [i for i in self.unwritable if i < self.model.config.decoder_vocab_size]
        out = self.model.generate(
            input_ids=src, attention_mask=padding_mask(torch.from_numpy(lengths), src.size(1)).long(), num_beams=1,
            do_sample=False, max_new_tokens=int(lengths.max()) + max_extra, max_length=None, forced_eos_token_id=None,
            suppress_tokens=bans,
        )  # fmt: skip
        for row in cast("list[list[int]]", out[:, 1:].tolist()):
            end = row.index(eos) if eos in row else len(row)
            found.append([self.tokenizer.decoder[i] for i in row[:end]])
        return found
