"""Models of other engines: the same numbers, the same pieces, and nothing that a file could do."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import random
import shutil
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import sentencepiece
import torch

import diglot
from conftest import Torture
from diglot import checkpoint
from diglot.checkpoint import StoredModel, load_model
from diglot.config import LanguagesConfig, ModelConfig, ModelSpec, SearchConfig
from diglot.engines.torch import TorchEngine
from diglot.errors import ConversionError, DiglotError
from diglot.evaluate import evaluate
from diglot.interop import ctranslate2, marian, marian_hf, weights
from diglot.interop.convert import export_model, import_model
from diglot.interop.probe import Comparison, draw_texts
from diglot.model import Transformer, padding_mask
from diglot.subwords import Subwords, learn
from diglot.training import train
from foreign_models import PHRASES, Vocabulary, draw_marian_mt, learn_spm, liven, spoil, texts_of
from training_runs import small_recipe, write_pairs

MARIAN_BASE = weights.marian_base(32)
NETWORKS: dict[str, dict[str, Any]] = {
    "the paper's": {},
    "all biases, swish": {"attention_bias": True, "output_bias": True, "activation": "swish"},
    "two matrices, gelu": {"tie": "output", "activation": "gelu"},
    "three matrices": {"tie": "none", "num_encoder_layers": 3},
    "learnt positions": {"positions": "learned", "max_positions": 150},
    "Marian's positions": {"position_base": MARIAN_BASE},
}


@pytest.fixture(scope="session")
def make_model(subwords: Subwords, tmp_path_factory: pytest.TempPathFactory):
    """Write a small model with random weights."""

    def make(tags: tuple[str, ...] = (), tgt_subwords: Subwords = subwords, **options: Any) -> Path:
        sizes = {"d_model": 32, "d_ff": 64, "num_heads": 4, "num_encoder_layers": 2, "num_decoder_layers": 1}
        config = ModelConfig(**sizes | options)
        torch.manual_seed(3)
        model = Transformer(config, subwords.num_pieces, tgt_subwords.num_pieces)
        liven(model)
        files = checkpoint.model_files(
            ModelSpec(config, LanguagesConfig("en", "de", tags)),
            checkpoint.weights_of(model),
            subwords,
            tgt_subwords,
            "",
        )
        path = tmp_path_factory.mktemp("model") / "model"
        checkpoint.write_directory(path, files)
        return path

    return make


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory):
    """A small model that was trained to some use, by its norm and the base of its positions."""
    made: dict[tuple[str, float], Path] = {}

    def find(norm: str, base: float = 10_000.0) -> Path:
        if (norm, base) not in made:
            root = tmp_path_factory.mktemp("run")
            for name, num, seed in (("train", 2000, 1), ("valid", 8, 2)):
                write_triples(root, name, num, seed)
            made[norm, base] = train(
                small_recipe(
                    root, "run", f"model.norm={norm}", f"model.position_base={base!r}", "train.max_updates=800",
                    "train.valid_every=800", "train.update_pieces=1500", "data.micro_batch=3000", "model.d_model=64",
                    "model.d_ff=128", "train.warmup_steps=150", "train.log_every=400", "model.dropout=0.0",
                ), quiet=True,
            ).model  # fmt: skip
        return made[norm, base]

    return find


def write_triples(root: Path, name: str, num: int, seed: int) -> None:
    """Lines that are long enough for BLEU: three pairs in one."""
    write_pairs(root, name, 3 * num, seed)
    for side in ("en", "de"):
        lines = (root / f"{name}.{side}").read_text().split("\n")
        joined = (" and ".join(lines[3 * i : 3 * i + 3]) + "\n" for i in range(num))
        (root / f"{name}.{side}").write_text("".join(joined))


def real_lines(data: Path, num: int) -> list[str]:
    """Lines of Multi30k's training text."""
    return (data / "multi30k" / "train.en").read_text(encoding="utf-8").split("\n")[:num]


# ------------------------------------------------------------------- MarianMT


def error_of_logits(theirs: Any, stored: StoredModel, seed: int) -> float:
    """How far the logits of random pieces by transformers' network and by ours are apart, to the largest of them."""
    generator = torch.Generator().manual_seed(seed)
    num = theirs.config.decoder_vocab_size
    src = torch.randint(2, theirs.config.vocab_size - 1, (4, 13), generator=generator)
    tgt = torch.randint(2, num - 1, (4, 11), generator=generator)
    mask = padding_mask(torch.tensor([13, 9, 5, 1]))
    shifted = torch.cat((torch.full((4, 1), theirs.config.decoder_start_token_id), tgt[:, :-1]), 1)
    with torch.inference_mode():
        one = theirs(input_ids=src, attention_mask=mask.long(), decoder_input_ids=shifted).logits
        two = stored.model.eval().project(stored.model(src, mask, tgt))[..., :num]
    return ((one - two).abs().max() / one.abs().max()).item()


def check_logits(root: Path, seed: int, vocabulary: Vocabulary, **options: Any) -> None:
    """In single precision networks that do not magnify rounding, in double precision those that do, are ours."""
    calm = draw_marian_mt(root / "calm", seed, vocabulary, most=1.0, **options)
    assert error_of_logits(calm, marian_hf.read(root / "calm"), seed) < 1e-5
    lively = draw_marian_mt(root / "lively", seed, vocabulary, **options)
    stored = marian_hf.read(root / "lively")
    stored.model.double()
    error = error_of_logits(lively.double(), stored, seed)
    assert error < (1e-11 if lively.config.scale_embedding else 1e-5)  # where ours scales, the weights are rounded


@pytest.mark.slow
def test_random_marian_mts_are_ours(torture: Torture, data: Path, tmp_path: Path):
    num_lines = torture.times(1000) * (1 if torture.is_full else 2)
    for seed in range(torture.times(20)):
        vocabulary = Vocabulary.draw(
            seed, is_shared=seed % 3 != 0, tags=("fra", "deu_Latn") if seed % 6 == 1 else (),
            lines=(real_lines(data, 3000), texts_of(learn_spm([two for _, two in PHRASES], 200))) if seed % 2 else (),
        )  # fmt: skip
        check_logits(tmp_path / f"{seed}", seed, vocabulary, tie_word_embeddings=seed % 5 != 4)
        found = import_model(
            tmp_path / f"{seed}" / "lively", tmp_path / f"ours{seed}", {}, texts=real_lines(data, num_lines)
        )
        stored = load_model(tmp_path / f"ours{seed}")
        assert found is not None
        assert not found.ties
        drawn = Comparison(stored, marian_hf.Peer(tmp_path / f"{seed}" / "lively", stored))
        assert not drawn.run(draw_texts(stored.src_subwords, num_lines, seed=seed)).ties


@pytest.mark.parametrize("seed", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_marian_mt_is_ours(seed: int, tmp_path: Path):
    check_logits(tmp_path, seed, Vocabulary.draw(seed, is_shared=seed != 3))
    stored = marian_hf.read(tmp_path / "lively")
    drawn = Comparison(stored, marian_hf.Peer(tmp_path / "lively", stored))
    assert drawn.run(draw_texts(stored.src_subwords, 20, longest=10)).num_lines == 20


def test_the_networks_of_these_tests_look_at_their_source(make_model: Any):
    stored = load_model(make_model())
    found = greedy(stored, draw_texts(stored.src_subwords, 50))
    assert len({tuple(one[:10]) for one in found}) > 25
    assert len({piece for one in found for piece in one}) > 50


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_text_is_split_as_before_whatever_has_a_number(kind: str, data: Path, tmp_path: Path, torture: Torture):
    lines = real_lines(data, 2000)
    sides = [learn_spm(lines, 900, kind), learn_spm([two for _, two in PHRASES], 200, kind)]
    rng = random.Random(5)
    names = sorted({text for side in sides for text in texts_of(side)})
    kept = rng.sample(names, len(names) - 100)  # some that text is split into have no number
    draw_marian_mt(tmp_path / "theirs", 1, Vocabulary(*sides, [["</s>", "<unk>", *kept, "é", "好", "<pad>"]] * 2))
    stored = marian_hf.read(tmp_path / "theirs")
    peer = Comparison(stored, marian_hf.Peer(tmp_path / "theirs", stored))
    for number, text in enumerate([*lines, "é", "好", "café 好好 好 ☃é☃", " a  b "]):
        peer.split(number, text)  # which is an error where the pieces are not theirs
    split = [stored.src_subwords.encode(text) for text in lines]
    assert any(piece >= len(kept) + 5 for line in split for piece in line)  # pieces that had no number
    assert stored.src_subwords.number("好") in stored.src_subwords.encode("好")  # which only the other language knows


def test_the_old_file_of_weights_is_read(tmp_path: Path):
    model = draw_marian_mt(tmp_path / "theirs", 1, Vocabulary.draw(1))
    new = marian_hf.read(tmp_path / "theirs")
    (tmp_path / "theirs" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "theirs" / "pytorch_model.bin")  # with every matrix under all its names
    old = marian_hf.read(tmp_path / "theirs")
    assert same_weights(old, new)
    torch.save({k: v.half() for k, v in model.state_dict().items()}, tmp_path / "theirs" / "pytorch_model.bin")
    half = marian_hf.read(tmp_path / "theirs")
    assert half.spec == new.spec
    assert not same_weights(half, new)


def same_weights(one: StoredModel, two: StoredModel) -> bool:
    a, b = checkpoint.weights_of(one.model), checkpoint.weights_of(two.model)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_ours_to_marian_mt_to_ours_is_every_weight(network: dict[str, Any], make_model: Any, tmp_path: Path):
    ours = load_model(make_model(**network))
    (tmp_path / "theirs").mkdir()
    marian_hf.write(ours, tmp_path / "theirs")
    again = marian_hf.read(tmp_path / "theirs")
    assert same_weights(ours, again)
    assert (ours.src_subwords, ours.tgt_subwords) == (again.src_subwords, again.tgt_subwords)
    assert dataclasses.replace(again.spec.model, norm_epsilon=ours.spec.model.norm_epsilon) == ours.spec.model
    assert again.spec.languages == ours.spec.languages


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_ours_translates_the_same_in_transformers(network: dict[str, Any], make_model: Any, tmp_path: Path):
    found = export_model(make_model(**network), tmp_path / "theirs", "transformers")
    assert found is not None
    assert not found.ties


@pytest.mark.slow
def test_separate_vocabularies_of_two_lengths_survive(make_model: Any, tmp_path: Path):
    ours = load_model(make_model(tie="output", tgt_subwords=learn([two for _, two in PHRASES], 380)))
    assert ours.src_subwords.num_pieces != ours.tgt_subwords.num_pieces
    (tmp_path / "theirs").mkdir()
    marian_hf.write(ours, tmp_path / "theirs")
    again = marian_hf.read(tmp_path / "theirs")
    assert same_weights(ours, again)
    assert (ours.src_subwords, ours.tgt_subwords) == (again.src_subwords, again.tgt_subwords)
    assert Comparison(ours, marian_hf.Peer(tmp_path / "theirs", ours)).run(draw_texts(ours.src_subwords, 20)).num_lines


@pytest.mark.slow
def test_what_we_write_is_used_as_transformers_are(make_model: Any, tmp_path: Path):
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    export_model(make_model(tags=("de", "fr")), tmp_path / "theirs", "transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it recommends sacremoses, which it does not call
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "theirs")
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "theirs")
    inputs = tokenizer([">>fr<< the number", ">>de<< twenty"], return_tensors="pt", padding=True)
    found = model.generate(**inputs, num_beams=1, max_new_tokens=15)
    texts = tokenizer.batch_decode(found, skip_special_tokens=True)
    import_model(tmp_path / "theirs", tmp_path / "ours", {}, is_checked=False)
    ours = diglot.load(tmp_path / "ours")
    expected = ours.translate([">>fr<< the number", ">>de<< twenty"], method="greedy", max_extra=50)
    assert [text.strip()[:9] for text in texts] == [one.text.strip()[:9] for one in expected]


# ------------------------------------------------------------------- CTranslate2


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_ours_to_ctranslate2(norm: str, make_model: Any, tmp_path: Path):
    found = export_model(make_model(norm=norm), tmp_path / "theirs", "ctranslate2", is_int8=True)
    assert found is not None
    assert not found.ties


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_other_networks_to_ctranslate2(network: dict[str, Any], make_model: Any, tmp_path: Path):
    for norm in ("post", "pre"):
        model = make_model(norm=norm, tags=("de", "fr"), **network)
        found = export_model(model, tmp_path / norm, "ctranslate2")
        assert found is not None
        assert not found.ties


def test_padding_is_zero_for_ctranslate2_and_every_weight_is_set(make_model: Any, tmp_path: Path):
    path = make_model()
    export_model(path, tmp_path / "theirs", "ctranslate2")
    ours = load_model(path)
    matrix = ours.model.src_embedding.weight.detach().clone()
    stored = (tmp_path / "theirs" / "model.bin").read_bytes()
    assert matrix.numpy().tobytes() not in stored
    matrix[ours.src_subwords.pad_id] = 0
    assert matrix.numpy().tobytes() in stored
    for name, weight in checkpoint.weights_of(ours.model).items():
        if "embedding" not in name:
            assert weight.numpy().tobytes() in stored, name


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_a_trained_model_translates_the_same_in_ctranslate2(norm: str, trained: Any, tmp_path: Path):
    write_triples(tmp_path, "test", 1000, seed=3)
    sources, references = ((tmp_path / f"test.{side}").read_text().split("\n")[:-1] for side in ("en", "de"))
    found = export_model(trained(norm), tmp_path / "fp32", "ctranslate2", sources)
    assert found is not None
    assert not found.ties
    export_model(trained(norm), tmp_path / "int8", "ctranslate2", is_int8=True, is_checked=False)
    stored = load_model(trained(norm))
    written = [stored.src_subwords.words(stored.src_subwords.encode(text)) for text in sources]
    scores: list[float] = []
    for name, compute_type in (("fp32", "float32"), ("int8", "int8")):
        theirs = ctranslate2.Peer(tmp_path / name, compute_type).greedy(written, max_extra=20)
        texts = [stored.tgt_subwords.decode([stored.tgt_subwords.number(piece) for piece in one]) for one in theirs]
        scores.append(evaluate(texts, references)[0].value)
    assert scores[0] > 20  # it has learnt something
    assert abs(scores[0] - scores[1]) < 0.3


# ------------------------------------------------------------------- Marian


def train_marian(root: Path, num_updates: int, **options: Any) -> Path:
    """A model that Marian trains; the answer is its decoder.yml."""
    root.mkdir()
    for side, lines in zip(("src", "tgt"), zip(*PHRASES, strict=True), strict=True):
        (root / side).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    learnt = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text for pair in PHRASES for text in pair]), model_writer=learnt, vocab_size=300,
        bos_id=-1, eos_id=0, unk_id=1, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    (root / "vocab.spm").write_bytes(learnt.getvalue())
    size = Subwords(learnt.getvalue()).num_pieces
    recipe = {
        "type": "transformer", "model": "model.npz", "train_sets": ["src", "tgt"], "vocabs": ["vocab.spm", "vocab.spm"],
        "dim_vocabs": [size, size], "enc_depth": 2, "dec_depth": 1, "dim_emb": 32, "transformer_heads": 4,
        "transformer_dim_ffn": 64, "after_batches": num_updates, "mini_batch": 64, "cpu_threads": 1, "workspace": 300,
        "learn_rate": 0.003, "seed": 1, "max_length": 60, "disp_freq": 1000, "log_level": "off", "quiet": "",
    } | options  # fmt: skip
    code = "import json, sys, pymarian; pymarian.Trainer(**json.load(sys.stdin)).train()"
    subprocess.run([sys.executable, "-c", code], input=json.dumps(recipe), text=True, cwd=root, check=True,
                   capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip
    decoder = (root / "model.npz.decoder.yml").read_text().replace("relative-paths: false", "relative-paths: true")
    (root / "decoder.yml").write_text(decoder)
    (root / "model.npz.decoder.yml").unlink()
    return root / "decoder.yml"


def needs_pymarian() -> None:
    if find_spec("pymarian") is None:
        pytest.skip("pymarian is not installed: there is one for Linux and Python 3.12 at most, of a gigabyte")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"tied_embeddings_all": "true"}, {"tied_embeddings": "true", "transformer_ffn_activation": "relu"},
     {"tied_embeddings_src": "true", "output_omit_bias": "true"}, {}],
    ids=["one matrix", "two matrices, relu", "two others", "three matrices"],
)  # fmt: skip
def test_what_marian_trains_translates_the_same_here(options: dict[str, str], torture: Torture, tmp_path: Path):
    needs_pymarian()
    path = train_marian(tmp_path / "theirs", 200 if torture.is_full else 30, **options)
    lines = [one for one, _ in PHRASES][: torture.times(1000)]
    found = import_model(path, tmp_path / "ours", {"src": "en", "tgt": "de"}, texts=lines)
    assert found is not None
    assert len(found.ties) <= 5, found.ties


@pytest.mark.slow
def test_ours_translates_the_same_in_marian(trained: Any, torture: Torture, tmp_path: Path):
    needs_pymarian()
    model = trained("post", weights.marian_base(64))
    write_triples(tmp_path, "test", torture.times(1000), seed=3)
    lines = (tmp_path / "test.en").read_text().split("\n")[:-1]
    found = export_model(model, tmp_path / "theirs", "marian", lines)
    assert found is not None
    assert len(found.ties) <= 5, found.ties
    ours, texts = diglot.load(model), lines[:20]
    options = {"config": "decoder.yml", "beam_size": 1, "cpu_threads": 1, "log_level": "off"}
    done = subprocess.run([sys.executable, "-c", marian.WORKER], input=json.dumps([[options, texts]]), text=True,
                          cwd=tmp_path / "theirs", capture_output=True, check=True)  # fmt: skip
    expected = ours.translate(texts, method="greedy", max_segment=200, max_extra=200)
    assert json.loads(done.stdout.split("\n")[-2])[0] == [one.text for one in expected]  # text in, text out


@pytest.mark.slow
@pytest.mark.parametrize(
    "network",
    [{"tie": "output", "output_bias": True}, {"tie": "none", "attention_bias": True, "activation": "swish"},
     {"tags": ("de", "fr")}],
    ids=["two matrices", "three matrices", "two languages"],
)  # fmt: skip
def test_other_networks_of_ours_in_marian(network: dict[str, Any], make_model: Any, tmp_path: Path):
    needs_pymarian()
    found = export_model(make_model(position_base=MARIAN_BASE, **network), tmp_path / "theirs", "marian")
    assert found is not None
    assert not found.ties


@pytest.mark.parametrize("tie", ["all", "output", "none"])
def test_what_we_write_for_marian_is_read_again(tie: str, make_model: Any, tmp_path: Path):
    ours = load_model(make_model(tie=tie, position_base=MARIAN_BASE, attention_bias=True, output_bias=True))
    (tmp_path / "theirs").mkdir()
    marian.write(ours, tmp_path / "theirs")
    again = marian.read(tmp_path / "theirs" / "decoder.yml")
    special = ours.tgt_subwords.unwritable()
    again.model.output.bias.data[special] = ours.model.output.bias.data[special]
    assert same_weights(ours, again)
    assert ours.src_subwords == again.src_subwords
    assert again.spec.model == dataclasses.replace(ours.spec.model, dropout=again.spec.model.dropout)


def test_a_release_with_numbers_beside_its_sentencepiece_models_is_read(make_model: Any, tmp_path: Path):
    ours, root = load_model(make_model(position_base=MARIAN_BASE)), tmp_path / "theirs"
    root.mkdir()
    marian.write(ours, root)
    names = ours.src_subwords.words(range(ours.src_subwords.num_pieces))
    order = random.Random(1).sample(range(len(names)), len(names))
    lines = [f"{json.dumps(names[i], ensure_ascii=i % 2 == 0)}: {place}\n" for place, i in enumerate(order)]
    (root / "numbers.vocab.yml").write_text("".join(lines), encoding="utf-8")
    (root / "vocab.spm").rename(root / "source.spm")
    shutil.copy(root / "source.spm", root / "target.spm")
    decoder = (root / "decoder.yml").read_text()
    (root / "decoder.yml").write_text(decoder.replace("vocab.spm", "numbers.vocab.yml"))
    arrays = marian.read_npz(root, "model.npz")
    arrays["Wemb"], arrays["decoder_ff_logit_out_b"] = arrays["Wemb"][order], arrays["decoder_ff_logit_out_b"][:, order]
    (root / "model.npz").write_bytes(marian.write_npz(arrays))
    again = marian.read(root / "decoder.yml")
    texts = [one for one, _ in PHRASES[:20]]
    for text in texts:
        assert again.src_subwords.words(again.src_subwords.encode(text)) == ours.src_subwords.words(
            ours.src_subwords.encode(text)
        )
    assert greedy(again, texts) == greedy(ours, texts)


def greedy(stored: StoredModel, texts: list[str]) -> list[list[str]]:
    """What a model writes, as pieces."""
    engine = TorchEngine([stored.model], pad_id=stored.tgt_subwords.pad_id, eos_id=stored.tgt_subwords.eos_id,
                         unwritable=stored.tgt_subwords.unwritable())  # fmt: skip
    sources = [stored.src_subwords.encode(text) for text in texts]
    found = engine.search(sources, SearchConfig(method="greedy", max_extra=20))
    return [stored.tgt_subwords.words(hypotheses[0].pieces) for hypotheses in found]


# ------------------------------------------------------------------- what is wrong is told, and leaves nothing


@pytest.fixture(scope="session")
def spoilable(make_model: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A whole model of each format."""
    root = tmp_path_factory.mktemp("whole")
    draw_marian_mt(root / "marian_hf", 1, Vocabulary.draw(1))
    shutil.copytree(root / "marian_hf", root / "old marian_hf")
    tensors = safetensors.torch.load_file(root / "marian_hf" / "model.safetensors")
    (root / "old marian_hf" / "model.safetensors").unlink()
    torch.save(tensors, root / "old marian_hf" / "pytorch_model.bin")
    (root / "marian").mkdir()
    marian.write(load_model(make_model(position_base=MARIAN_BASE)), root / "marian")
    return {path.name: path for path in root.iterdir()}


@pytest.mark.parametrize("name", ["marian_hf", "old marian_hf", "marian"])
def test_spoilt_files_do_nothing(name: str, spoilable: dict[str, Path], tmp_path: Path, torture: Torture):
    import_model(spoilable[name], tmp_path / "whole", {}, is_checked=False)
    num_refused, num = 0, torture.times(200)
    for seed in range(num):
        root, rng = tmp_path / f"spoilt{seed}", random.Random(seed)
        shutil.copytree(spoilable[name], root)
        what = spoil(root, rng, tmp_path / "executed")
        out = tmp_path / f"out{seed}"
        try:
            import_model(root, out, {}, is_checked=False)
        except DiglotError:
            num_refused += 1
            assert not out.exists(), what
        except BaseException as error:
            raise AssertionError(f"{seed} {what}") from error
        assert not (tmp_path / "executed").exists(), what
        assert not list(tmp_path.glob(".writing-*"))
        shutil.rmtree(root)
    assert num_refused > num / 2


def test_a_difference_is_named_and_leaves_nothing(make_model: Any, tmp_path: Path):
    ours = make_model(norm_epsilon=1e-2)  # which MarianMT cannot be told
    with pytest.raises(ConversionError, match=r"translate line \d+ of the comparison in different ways: piece \d+ is"):
        export_model(ours, tmp_path / "theirs", "transformers")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_commands_go_there_and_back(make_model: Any, write: Any, tmp_path: Path):
    model, text = make_model(), write("text.en", "the number twenty\n\nthirteen\n")
    for words in (
        ("export", model, "--to", "ctranslate2", "--int8", "--out", tmp_path / "ct2", "--probe", text),
        ("export", model, "--to", "transformers", "--out", tmp_path / "hf"),
        ("import", tmp_path / "hf", "--out", tmp_path / "ours", "--src-lang", "en", "--probe", text),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "diglot", *map(str, words)], capture_output=True, text=True, check=True
        )
        assert done.stderr.startswith("Both engines translate 10")
    assert "With 8 bits" not in done.stderr
    assert same_weights(load_model(model), load_model(tmp_path / "ours"))


# ------------------------------------------------------------------- going on with an imported model


@pytest.mark.slow
def test_new_pieces_change_nothing_of_old_text_and_are_learnt(tmp_path: Path):
    draw_marian_mt(tmp_path / "theirs", 1, Vocabulary.draw(1))
    import_model(tmp_path / "theirs", tmp_path / "ours", {}, is_checked=False)
    import_model(tmp_path / "ours", tmp_path / "grown", {}, ["ŋ", "zwölf-drei", ">>nds<<"])
    old, new = load_model(tmp_path / "ours"), load_model(tmp_path / "grown")
    texts = [one for one, _ in PHRASES[:30]]
    assert greedy(old, texts) == greedy(new, texts)
    assert new.src_subwords.num_pieces == old.src_subwords.num_pieces + 3
    for side in (new.src_subwords, new.tgt_subwords):
        assert side.words(side.encode("a ŋ zwölf-dreizehn"))[-2:] != side.words(side.encode("x"))
        assert {"ŋ", "zwölf-drei"} < set(side.words(side.encode("aŋ zwölf-dreizehn")))
        assert side.decode(side.encode("ŋ")) == "ŋ"
    init = f"train.init={json.dumps(str(tmp_path / 'grown'))}"
    summary = train(small_recipe(tmp_path, "run", init, "train.max_updates=3"), quiet=True)
    tuned = load_model(summary.model)
    assert (tuned.src_subwords, tuned.tgt_subwords) == (new.src_subwords, new.tgt_subwords)
    assert not same_weights(tuned, new)
