"""CTranslate2: written through its own specification, which knows what has to be set; read by CTranslate2 alone.

model.bin, config.json, *_vocabulary.json; beside them our SentencePiece models, since CTranslate2 takes pieces.

It begins with the zero vector as we do, if told, and takes any table of positions. It knows of no pieces that must not
be written, so these get a bias that no other piece falls below; padding's row is zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diglot.checkpoint import StoredModel
from diglot.errors import ConversionError
from diglot.interop import files, pieces, probe, weights
from diglot.model import positional_encoding

NEVER_WRITTEN = -1e9  # a bias
LONGEST = 4096  # positions
ACTIVATIONS = {"relu": "RELU", "swish": "SWISH", "gelu": "GELU"}

# ours: theirs, in encoder.layer[N] and decoder.layer[N]; several of ours become one of theirs, one below the other
ENCODER = {
    ("self_attention.w_q", "self_attention.w_k", "self_attention.w_v"): "self_attention.linear_0",
    ("self_attention.w_o",): "self_attention.linear_1",
    ("residual_1.norm",): "self_attention.layer_norm",
    ("feed_forward.w_1",): "ffn.linear_0",
    ("feed_forward.w_2",): "ffn.linear_1",
    ("residual_2.norm",): "ffn.layer_norm",
}
DECODER = ENCODER | {
    ("cross_attention.w_q",): "attention.linear_0",
    ("cross_attention.w_k", "cross_attention.w_v"): "attention.linear_1",
    ("cross_attention.w_o",): "attention.linear_2",
    ("residual_2.norm",): "attention.layer_norm",
    ("residual_3.norm",): "ffn.layer_norm",
}

CARD = """# A diglot model for CTranslate2

```python
import ctranslate2, sentencepiece

translator = ctranslate2.Translator("DIRECTORY")
src, tgt = (sentencepiece.SentencePieceProcessor(model_file=f"DIRECTORY/{side}.model") for side in ("source", "target"))
found = translator.translate_batch([src.encode("TEXT", out_type=str)])
tgt.decode(found[0].hypotheses[0])
```

Greedy translations in fp32 were compared piece by piece when this was written. What differs:

- CTranslate2 divides the log-probability of a hypothesis by its length to the power of `length_penalty`, 1 if you say
  nothing; diglot, as Wu et al. (2016), by ((5 + length) / 6) to that power. So beam search may prefer another length.
- Pieces that must not be written have a bias of -1e9 here, so their share of the probability falls to the others.
- Its beam ends when the best hypothesis has ended, or by `patience`.
- It writes at least `min_decoding_length` pieces, 1 if you say nothing, where diglot may write none.
- It translates at most `max_decoding_length` pieces, 256 if you say nothing, and cuts a source off after
  `max_input_length`, 1024.
- diglot brings text into NFC and splits long lines at sentence ends first.
"""


def write(stored: StoredModel, root: Path, quantization: str = "float32") -> None:
    """Write one of our models for CTranslate2, with weights of 32 or 8 bits."""
    specs = probe.need("ctranslate2").specs
    config, subwords = stored.spec.model, stored.tgt_subwords
    if config.d_k not in (0, config.d_model // config.num_heads):
        raise ConversionError(f"CTranslate2 has no heads with model.d_k = {config.d_k}.")
    found = {name: weight.detach().numpy() for name, weight in weights.complete(stored).items()}
    found["output.bias"] = found["output.bias"].copy()
    found["output.bias"][subwords.unwritable()] = NEVER_WRITTEN
    if subwords.pad_id != subwords.eos_id:
        for side, table in ((stored.src_subwords, "src_embedding"), (subwords, "tgt_embedding"), (subwords, "output")):
            found[f"{table}.weight"] = found[f"{table}.weight"].copy()
            found[f"{table}.weight"][side.pad_id] = 0
    spec = specs.TransformerSpec.from_config(
        (config.num_encoder_layers, config.num_decoder_layers), config.num_heads, pre_norm=config.norm == "pre",
        activation=getattr(specs.Activation, ACTIVATIONS[config.activation]),
    )  # fmt: skip
    spec.decoder.start_from_zero_embedding = True
    spec.encoder.embeddings[0].weight = found["src_embedding.weight"]
    spec.decoder.embeddings.weight = found["tgt_embedding.weight"]
    spec.encoder.position_encodings.encodings = places(stored, "src_positions.table")
    spec.decoder.position_encodings.encodings = places(stored, "tgt_positions.table")
    put(spec.decoder.projection, found, ["output"], has_bias=True)
    for stack, table in (("encoder", ENCODER), ("decoder", DECODER)):
        for i, layer in enumerate(getattr(spec, stack).layer):
            for ours, theirs in table.items():
                place = layer
                for word in theirs.split("."):
                    name, _, number = word.rpartition("_")
                    place = (
                        getattr(place, name)[int(number)]
                        if isinstance(getattr(place, name, None), list)
                        else getattr(place, word)
                    )
                names = [f"{stack}.layers.{i}.{name}" for name in ours]
                put(place, found, names, has_bias=config.attention_bias or "attention" not in ours[0])
        if config.norm == "pre":
            put(getattr(spec, stack).layer_norm, found, [f"{stack}.norm"], has_bias=True)
    for side, register in (
        (stored.src_subwords, spec.register_source_vocabulary),
        (subwords, spec.register_target_vocabulary),
    ):
        register(pieces.names_of(side, stored.spec.languages.tags))
    special = pieces.read_special(subwords.proto)
    spec.config.layer_norm_epsilon = config.norm_epsilon
    spec.config.add_source_eos = True
    spec.config.unk_token, spec.config.eos_token = special.unk, special.eos
    spec.config.decoder_start_token = special.eos  # any: the decoder begins with the zero vector
    spec.validate()
    spec.optimize(quantization)
    spec.save(str(root))
    files.write_files(root, {
        "source.model": stored.src_subwords.proto, "target.model": subwords.proto, "README.md": CARD.encode()
    })  # fmt: skip


def put(place: Any, found: Mapping[str, NDArray[np.float32]], names: Sequence[str], *, has_bias: bool) -> None:
    """Set a matrix and its bias, or a norm."""
    weight, bias = (np.concatenate([found[f"{name}.{kind}"] for name in names]) for kind in ("weight", "bias"))
    if names[0].endswith("norm"):
        place.gamma, place.beta = weight, bias
        return
    place.weight = weight
    if has_bias:
        place.bias = bias


def places(stored: StoredModel, name: str) -> NDArray[np.float32]:
    """The table of positions; sines for twice as many as any text has, since CTranslate2's end with the table."""
    config = stored.spec.model
    if config.positions == "learned":
        return dict(stored.model.named_parameters())[name].detach().numpy()
    return positional_encoding(max(LONGEST, config.max_positions), config.d_model, config.position_base).numpy()


class Peer:
    """CTranslate2 with such a directory."""

    name = "CTranslate2"

    def __init__(self, root: Path, compute_type: str = "float32"):
        self.translator: Any = probe.need("ctranslate2").Translator(str(root), device="cpu", compute_type=compute_type)

    def split(self, text: str) -> None:
        """It takes pieces."""

    def greedy(self, sources: Sequence[Sequence[str]], max_extra: int) -> list[list[str]]:
        """The translations of pieces, as pieces."""
        bound = max(map(len, sources)) + 1 + max_extra
        options = {"max_decoding_length": bound, "min_decoding_length": 0, "max_input_length": 0}
        found = self.translator.translate_batch(sources, beam_size=1, **options)
        return [one.hypotheses[0] for one in found]
