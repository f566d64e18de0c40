"""Attention as it is handed out: equal to an independent computation, in every form; alignment; pictures."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import re
import xml.etree.ElementTree as ET
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from diglot import cli
from diglot.alignment import Links, align, align_pairs, alignment_error, choose_heads, from_pharaoh, to_pharaoh
from diglot.attend import fit_page, read_frames, to_json, to_page, to_text, write_frame
from diglot.checkpoint import StoredModel, weights_of
from diglot.config import AlignmentConfig, LanguagesConfig, ModelConfig, ModelSpec, Recipe, SearchConfig
from diglot.drawing import Picture, choose_picture, draw_lines, draw_map, draw_masks, draw_positions, draw_schedule
from diglot.model import MultiHeadAttention, Transformer, read_attention
from diglot.subwords import Subwords, word_spans
from diglot.training import train
from diglot.translator import Attention, Translator
from training_runs import small_recipe, write_pairs

DOCS = Path(__file__).parents[1] / "docs"
PARTS = ("encoder", "decoder", "cross")
NETWORKS = {
    "post": {"norm": "post"},
    "pre": {"norm": "pre", "activation": "gelu", "attention_bias": True},
    "learned": {"positions": "learned", "tie": "none", "d_k": 5, "num_decoder_layers": 3},
}
TEXTS = ["two hundred one", "the first of May eleven hundred, half past six", "ten"]


def translator_of(
    subwords: Subwords, seed: int = 1, languages: LanguagesConfig | None = None, **options: Any
) -> Translator:
    """A network that was never trained, with attention that is far from uniform."""
    torch.manual_seed(seed)
    shape = {
        "d_model": 32,
        "d_ff": 48,
        "num_heads": 4,
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "dropout": 0.3,
    }
    config = ModelConfig(**(shape | options))
    model = Transformer(config, subwords.num_pieces, subwords.num_pieces)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "w_q" in name or "w_k" in name:
                parameter.mul_(2.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.1)
    spec = ModelSpec(config, languages or LanguagesConfig("en", "de"), SearchConfig(max_extra=4))
    return Translator([StoredModel(Path("a model"), spec, model, subwords, subwords)], device="cpu")


# ------------------------------------------------------------------- the numbers


def softmax(scores: NDArray[Any]) -> NDArray[Any]:
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


class Paper:
    """The network once more, with loops over heads and positions, in double precision: no batch, no padding, no mask
    but the range of a loop. It keeps the weights of each head."""

    def __init__(self, translator: Translator):
        (model,) = translator.engine.models
        self.config = model.config
        self.w = {name: weight.double().numpy() for name, weight in weights_of(model).items()}
        self.read: dict[str, NDArray[Any]] = {}

    def project(self, name: str, x: NDArray[Any]) -> NDArray[Any]:
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0.0)

    def look(self, name: str, x: NDArray[Any], memory: NDArray[Any], only_back: bool) -> NDArray[Any]:
        H = self.config.num_heads
        q, k, v = (self.project(f"{name}.w_{which}", y) for which, y in (("q", x), ("k", memory), ("v", memory)))
        d_k, d_v = q.shape[1] // H, v.shape[1] // H
        kept = self.read[name] = np.zeros((H, len(x), len(memory)))
        heads = np.zeros((len(x), H * d_v))
        for h in range(H):
            for t in range(len(x)):
                seen = t + 1 if only_back else len(memory)
                scores = k[:seen, h * d_k : (h + 1) * d_k] @ q[t, h * d_k : (h + 1) * d_k] / math.sqrt(d_k)
                kept[h, t, :seen] = softmax(scores)
                heads[t, h * d_v : (h + 1) * d_v] = kept[h, t, :seen] @ v[:seen, h * d_v : (h + 1) * d_v]
        return self.project(f"{name}.w_o", heads)

    def norm(self, name: str, x: NDArray[Any]) -> NDArray[Any]:
        mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        return (x - mean) / np.sqrt(var + 1e-6) * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]

    def around(self, name: str, x: NDArray[Any], sublayer: Any) -> NDArray[Any]:
        if self.config.norm == "post":
            return self.norm(f"{name}.norm", x + sublayer(x))
        return x + sublayer(self.norm(f"{name}.norm", x))

    def feed(self, name: str, x: NDArray[Any]) -> NDArray[Any]:
        inner = self.project(f"{name}.w_1", x)
        if self.config.activation == "relu":
            inner = np.maximum(inner, 0)
        else:
            inner = inner * (1 + np.vectorize(math.erf)(inner / math.sqrt(2))) / 2
        return self.project(f"{name}.w_2", inner)

    def place(self, side: str, x: NDArray[Any]) -> NDArray[Any]:
        if self.config.positions == "learned":
            return x + self.w[f"{side}_positions.table"][: len(x)]
        D = x.shape[1]
        angle = [[pos / 10000 ** (i // 2 * 2 / D) for i in range(D)] for pos in range(len(x))]
        # what the network adds is the table in single precision
        table = [[(math.sin, math.cos)[i % 2](a) for i, a in enumerate(row)] for row in angle]
        return x + np.array(table, dtype=np.float32).astype(np.float64)

    def run(self, src: list[int], tgt: list[int]) -> None:
        scale = math.sqrt(self.config.d_model)
        tgt_table = self.w.get("tgt_embedding.weight", self.w["src_embedding.weight"])
        x = self.place("src", self.w["src_embedding.weight"][src] * scale)
        for i in range(self.config.num_encoder_layers):
            at = f"encoder.layers.{i}"
            x = self.around(f"{at}.residual_1", x, lambda y, at=at: self.look(f"{at}.self_attention", y, y, False))
            x = self.around(f"{at}.residual_2", x, lambda y, at=at: self.feed(f"{at}.feed_forward", y))
        x = self.norm("encoder.norm", x) if self.config.norm == "pre" else x
        y = self.place("tgt", np.concatenate([np.zeros((1, x.shape[1])), tgt_table[tgt[:-1]] * scale]))
        for i in range(self.config.num_decoder_layers):
            at = f"decoder.layers.{i}"
            y = self.around(f"{at}.residual_1", y, lambda z, at=at: self.look(f"{at}.self_attention", z, z, True))
            y = self.around(f"{at}.residual_2", y, lambda z, at=at: self.look(f"{at}.cross_attention", z, x, False))
            y = self.around(f"{at}.residual_3", y, lambda z, at=at: self.feed(f"{at}.feed_forward", z))

    def weights(self, src: list[int], tgt: list[int]) -> dict[str, NDArray[Any]]:
        self.run(src, tgt)
        kinds = {"encoder": r"encoder.*self", "decoder": r"decoder.*self", "cross": r"decoder.*cross"}
        return {
            part: np.stack([w for name, w in self.read.items() if re.match(kind, name)]) for part, kind in kinds.items()
        }


def ids_of(subwords: Subwords, pieces: tuple[str, ...]) -> list[int]:
    names = {name: i for i, name in enumerate(subwords.words(list(range(subwords.num_pieces))))}
    return [names[piece] for piece in pieces]


def numbers_in_page(page: str) -> list[dict[str, NDArray[Any]]]:
    """What the page holds, read as docs/attention.md says it is packed."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    data = json.loads(found[1])
    items: list[dict[str, NDArray[Any]]] = []
    for item in data["items"]:
        S, T = len(item["src"]), len(item["tgt"])
        sizes = {"encoder": (S, S), "decoder": (T, T), "cross": (T, S)}
        read: dict[str, NDArray[Any]] = {}
        for part, size in sizes.items():
            raw = zlib.decompress(base64.b64decode(data["blocks"][item[part]]))
            high, middle, low = np.frombuffer(raw, np.uint8).reshape(3, -1).astype(np.int64)
            read[part] = ((high * 256 + middle) * 256 + low).reshape(*data["shapes"][part], *size) / (2**24 - 1)
        items.append(read)
    return items


@pytest.mark.parametrize("name", NETWORKS)
def test_every_form_holds_the_numbers_of_an_independent_computation(name: str, subwords: Subwords):
    translator = translator_of(subwords, **NETWORKS[name])
    paper = Paper(translator)
    for text in TEXTS:
        found = translator.attend(text, attribution=False)
        assert len(found) == 4  # the beam
        in_json = json.loads(to_json(found, AlignmentConfig()))["hypotheses"]
        in_page = numbers_in_page(to_page(found, AlignmentConfig()))
        in_bulk = list(translator.attend_pairs([(text, one.text) for one in found] + [("ten", "zehn")]))  # padded
        for i, one in enumerate(found):
            expected = paper.weights(ids_of(subwords, one.src), ids_of(subwords, one.tgt))
            for part in PARTS:
                assert np.abs(getattr(one, part) - expected[part]).max() < 1e-9
                assert np.abs(np.array(in_json[i][part]) - expected[part]).max() < 1e-8
                assert np.abs(in_page[i][part] - expected[part]).max() < 1e-7
                assert in_page[i][part].shape == expected[part].shape
                if in_bulk[i].tgt == one.tgt:  # a text may have other pieces than a search wrote it with
                    assert np.abs(getattr(in_bulk[i], part) - expected[part]).max() < 1e-5
                assert np.abs(expected[part].sum(-1) - 1).max() < 1e-12


def test_it_is_what_the_search_looked_at_step_by_step(subwords: Subwords):
    translator = translator_of(subwords)
    engine = translator.engine
    source = subwords.encode(TEXTS[1])
    with read_attention(engine.models[0]) as read:
        ((best, *_),) = engine.search([source], translator.search_config({}))
    (exact, *_) = translator.attend(TEXTS[1], attribution=False)
    assert exact.tgt[:-1] == tuple(subwords.words(best.pieces))
    for layer in range(2):
        steps = read[f"decoder.layers.{layer}.cross_attention"]  # (rows of the beam, heads, 1, padded source)
        for t, rows in enumerate(steps[: len(exact.tgt)]):
            differences = (rows[:, :, 0, : len(exact.src)].double() - torch.from_numpy(exact.cross[layer, :, t])).abs()
            assert differences.amax((1, 2)).min() < 1e-5
            assert not rows[:, :, 0, len(exact.src) :].any()  # padding


def test_nothing_is_read_and_nothing_changes_where_nobody_looks(subwords: Subwords):
    translator = translator_of(subwords)
    before = translator.translate(TEXTS, num_best=3)
    translator.attend(TEXTS[0])
    list(translator.attend_pairs([("ten", "zehn")]))
    for model in translator.engine.models:
        assert not model.training
        assert next(model.parameters()).dtype == torch.float32
        assert all(parameter.grad is None for parameter in model.parameters())
        assert all(one.reader is None for one in model.modules() if isinstance(one, MultiHeadAttention))
        assert not any(module._forward_hooks for module in model.modules())
    assert translator.translate(TEXTS, num_best=3) == before


def test_the_target_may_be_given(subwords: Subwords):
    translator = translator_of(subwords)
    (one,) = translator.attend("ten past six", "zehn nach sechs")
    assert subwords.decode(ids_of(subwords, one.tgt)) == one.text == "zehn nach sechs"
    assert one.score == translator.score(["ten past six"], ["zehn nach sechs"])[0].score
    assert one.source == "ten past six"
    assert [subwords.decode(ids_of(subwords, one.tgt[a:b])) for a, b in one.tgt_words] == ["zehn", "nach", "sechs"]
    assert not np.triu(one.decoder, 1).any()  # the future


@pytest.mark.parametrize("text", ["", "   ", "好 ☃", "\u00a0"])
def test_any_text_can_be_looked_at(text: str, subwords: Subwords):
    translator = translator_of(subwords)
    found = translator.attend(text, "ü好")
    to_page(found, AlignmentConfig(1, (1,)))
    draw_map(found[0], Picture("cross", 1, (1, 2)))
    to_text(found[0], Picture("encoder", 1, (1,)), AlignmentConfig(1, (1,)))


def test_a_tag_is_shown_by_its_name_and_belongs_to_no_word(subwords: Subwords):
    languages = LanguagesConfig("en", "", ("de", "fr"))
    (one,) = translator_of(subwords, languages=languages).attend("two hundred", "zweihundert", to="fr")
    assert one.src[0] == ">>fr<<"
    assert one.src_words[0][0] == 1
    assert all(i < 2 for i, _ in align(one, AlignmentConfig(1, (1,))))


@pytest.mark.parametrize("options", [{}, {"norm": "pre", "tie": "none"}])
def test_attribution_is_the_slope_along_each_embedding(options: dict[str, Any], subwords: Subwords):
    """Gradient times input is what log P of a piece gains as an embedding is made longer, by a difference quotient."""
    translator = translator_of(subwords, **options)
    (one,) = translator.attend("ten past six", "zehn nach sechs")
    src, tgt = (torch.tensor([ids_of(subwords, side)]) for side in (one.src, one.tgt))
    model = Transformer(translator.spec.model, subwords.num_pieces, subwords.num_pieces).double().eval()
    model.load_state_dict({k: v.double() for k, v in translator.engine.models[0].state_dict().items()}, strict=False)

    def log_probs(side: int, position: int, longer: float) -> torch.Tensor:
        calls: list[int] = []

        def stretch(module: Any, arguments: Any, embedded: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            if len(calls) - 1 == side:
                embedded = embedded.clone()
                embedded[:, position] *= longer
            return embedded

        hooks = [one.register_forward_hook(stretch) for one in {model.src_embedding, model.tgt_embedding}]
        with torch.no_grad():
            hidden = model(src, torch.ones_like(src, dtype=torch.bool), tgt)
            found = model.project(hidden).log_softmax(-1).gather(2, tgt[:, :, None])[0, :, 0]
        for hook in hooks:
            hook.remove()
        return found

    assert one.src_attribution is not None
    assert one.tgt_attribution is not None
    assert not one.tgt_attribution[:, 0].any()  # the start is the zero vector
    for side, attribution in ((0, one.src_attribution), (1, one.tgt_attribution[:, 1:])):
        for position in range(attribution.shape[1]):
            slope = (log_probs(side, position, 1 + 1e-5) - log_probs(side, position, 1 - 1e-5)) / 2e-5
            np.testing.assert_allclose(attribution[:, position], slope.numpy(), rtol=1e-4, atol=1e-7)


# ------------------------------------------------------------------- alignment


def made(src: str, tgt: str, *heads: NDArray[Any], languages: tuple[str, str] = ("", "")) -> Attention:
    """An attention of one layer whose cross attention is given; blanks in the texts separate the pieces."""
    pieces = [(*text.split(), "</s>") for text in (src, tgt)]
    spans = [tuple(word_spans(side[:-1], language)) for side, language in zip(pieces, languages, strict=True)]
    S, T = map(len, pieces)
    return Attention(
        pieces[0], pieces[1], spans[0], spans[1], np.full((1, 1, S, S), 1 / S), np.tril(np.ones((1, 1, T, T))),
        np.stack(heads)[None],
    )  # fmt: skip


def looking(rows: list[int], num: int) -> NDArray[Any]:
    """Each row looks at one column most."""
    weights = np.full((len(rows), num), 0.2 / num)
    weights[range(len(rows)), rows] += 0.8
    return weights


def test_an_alignment_by_hand():
    one = made("▁a ▁b b ▁c", "▁x x ▁y ▁z", looking([3, 3, 0, 2, 4], 5))
    # the pieces x-c, y-a and z-b choose each other; of the words each then has a partner
    assert to_pharaoh(align(one, AlignmentConfig(1, (1,)))) == "0-1 1-2 2-0"
    alone = made("▁a ▁b", "▁x", looking([0, 2], 3))
    assert to_pharaoh(align(alone, AlignmentConfig(1, (1,)))) == "0-0 1-0"  # no word is left without one


def test_where_a_language_has_no_spaces_a_piece_is_a_word():
    one = made("▁a ▁b", "▁好 的 吧", looking([0, 1, 1, 2], 3), languages=("en", "zh"))
    assert len(one.tgt_words) == 3
    assert {j for _, j in align(one, AlignmentConfig(1, (1,)))} == {0, 1, 2}


def test_the_heads_that_are_chosen_are_those_that_look_at_what_is_translated():
    rng = np.random.default_rng(1)
    pairs: list[Attention] = []
    true: list[Links] = []
    for _ in range(60):
        words = rng.permutation(12)[: rng.integers(3, 9)].tolist()
        order = rng.permutation(len(words)).tolist()
        src, tgt = " ".join(f"▁s{w}" for w in words), " ".join(f"▁t{words[i]}" for i in order)
        end, size = len(words), len(words) + 1
        right = looking([*order, end], size)
        late = looking([end, *order], size)  # at what the piece before stands for
        at_end = looking([end] * size, size)
        diagonal = looking(list(range(size)), size)
        random = looking(rng.integers(0, size, size).tolist(), size)
        blurred = np.where(right > 0.5, 0.5, right) + 0.3 / size
        pairs.append(made(src, tgt, late, at_end, diagonal, random, right, blurred))
        true.append(frozenset((i, j) for j, i in enumerate(order)))
    config = choose_heads(pairs)
    assert {5, 6} <= set(config.heads)
    assert alignment_error([align(pair, config) for pair in pairs], true) == 0
    for head in (1, 2, 3, 4):  # none of which would do
        assert alignment_error([align(pair, AlignmentConfig(1, (head,))) for pair in pairs], true) > 0.5


def test_the_error_of_an_alignment_by_hand():
    true = [from_pharaoh("0-0 1-2 2-1"), from_pharaoh("")]
    assert alignment_error(true, true) == 0
    assert alignment_error([from_pharaoh("0-0 1-1"), from_pharaoh("")], true) == pytest.approx(1 - 2 / 5)
    assert alignment_error([from_pharaoh("0-1"), from_pharaoh("0-0")], true) == 1
    assert to_pharaoh(from_pharaoh("2-1 0-0 10-3")) == "0-0 2-1 10-3"


def test_links_come_for_each_pair_and_name_words_that_are_there(subwords: Subwords, phrases: list[tuple[str, str]]):
    translator = translator_of(subwords)
    pairs = [*phrases[:30], ("", ""), ("ten", "")]
    found = list(align_pairs(translator, iter(pairs), choose=True))
    assert len(found) == len(pairs)
    for (src, tgt), links in zip(pairs, found, strict=True):
        if src and tgt:
            assert {i for i, _ in links} == set(range(len(src.split())))
            assert {j for _, j in links} == set(range(len(tgt.split())))
    assert found[-2:] == [frozenset(), frozenset()]


# ------------------------------------------------------------------- pictures


def test_a_picture_is_chosen_as_it_is_said():
    one = made("▁a", "▁x", looking([0, 1], 2), looking([1, 1], 2))
    assert choose_picture(one, AlignmentConfig()) == Picture("cross", 1, (1, 2))
    assert choose_picture(one, AlignmentConfig(1, (2,))) == Picture("cross", 1, (2,))
    assert choose_picture(one, AlignmentConfig(1, (2,)), "cross", 1, (1,)) == Picture("cross", 1, (1,))
    assert str(Picture("cross", 1, (2,))) == "cross attention, layer 1, head 2"
    np.testing.assert_allclose(Picture("cross", 1, (1, 2)).weights(one)[0], [0.5, 0.5])


HOSTILE = [
    "<script>alert(1)</script>",
    "]]>",
    '"><svg onload=alert(1)>',
    "&lt;&amp;",
    "\x00\x1b[31m",
    "\u202e",
    "💥" * 40,
    "'",
]


def test_an_svg_is_xml_whatever_the_pieces_are():
    names = tuple(f"▁{text}" for text in HOSTILE)
    size = len(names) + 1
    one = dataclasses.replace(
        made(" ".join("a" * 1 for _ in names), " ".join("b" for _ in names), looking(list(range(size)), size)),
        src=(*names, "</s>"), tgt=(*names, "</s>"),
    )  # fmt: skip
    for draw in (draw_map, draw_lines):
        root = ET.fromstring(draw(one, Picture("cross", 1, (1,))))
        assert {element.tag.split("}")[1] for element in root.iter()} <= {"svg", "title", "rect", "g", "path", "text"}
        texts = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
        assert names[0] in texts
        assert not any(re.match("on|href|style", name) for element in root.iter() for name in element.attrib)


def test_a_map_has_a_cell_for_each_weight_as_dark_as_it_is_large():
    weights = np.array([[1.0, 0.0, 0.0], [0.25, 0.25, 0.5]])
    one = made("▁a ▁b", "▁x", weights)
    root = ET.fromstring(draw_map(one, Picture("cross", 1, (1,))))
    shades: dict[tuple[int, int], str] = {}
    group = next(root.iter("{http://www.w3.org/2000/svg}g"))
    for path in group:
        for x, y, height in re.findall(r"M(\d+) (\d+)h1v(\d+)h-1z", path.attrib["d"]):
            for row in range(int(y), int(y) + int(height)):
                shades[row, int(x)] = path.attrib["fill"]
    assert set(shades) == {(i, j) for i in range(2) for j in range(3)}

    def lightness(colour: str) -> int:
        return sum(int(colour[i : i + 2], 16) for i in (1, 3, 5))

    ordered = sorted(shades, key=lambda place: weights[place])
    assert [lightness(shades[place]) for place in ordered] == sorted(
        (lightness(c) for c in shades.values()), reverse=True
    )
    assert shades[0, 1] == "#ffffff"


@pytest.mark.parametrize(
    ("name", "draw"), [("positions", draw_positions), ("masks", draw_masks), ("schedule", draw_schedule)]
)
def test_the_pictures_of_the_docs_are_those_that_the_code_draws(name: str, draw: Any):
    assert (DOCS / f"{name}.svg").read_text(encoding="utf-8") == draw(Recipe())


def test_the_terminal_shows_a_row_a_piece_and_what_it_looks_at_most():
    one = made("▁a ▁b", "▁x \x1b[31m", looking([1, 0, 2], 3))
    lines = to_text(one, Picture("cross", 1, (1,)), AlignmentConfig(1, (1,))).split("\n")
    assert [line.split()[-2:] for line in lines if line.endswith("0.87")] == [
        ["▁b", "0.87"],
        ["▁a", "0.87"],
        ["</s>", "0.87"],
    ]
    assert lines[-1] == "alignment 0-0 1-0"
    assert all(line.isprintable() for line in lines)


# ------------------------------------------------------------------- a film


def test_what_training_kept_is_read_back(tmp_path: Path, subwords: Subwords):
    translator = translator_of(subwords)
    kept = {update: translator.attend("ten", "zehn", attribution=False)[0] for update in (5, 10, 1_000_000)}
    for update, one in kept.items():
        write_frame(tmp_path, update, one)
    found = read_frames(tmp_path)
    assert [update for update, _ in found] == list(kept)
    for update, one in found:
        assert (one.src, one.tgt, one.src_words, one.text) == tuple(
            getattr(kept[update], name) for name in ("src", "tgt", "src_words", "text")
        )
        assert np.abs(one.cross - kept[update].cross).max() < 1e-7


def test_a_film_that_is_too_large_is_thinned_and_keeps_its_ends(subwords: Subwords, monkeypatch: pytest.MonkeyPatch):
    (one,) = translator_of(subwords).attend(" ".join(TEXTS), "zehn nach sechs, eintausend", attribution=False)
    rng = np.random.default_rng(1)
    frames = [
        (n, dataclasses.replace(one, cross=rng.dirichlet(np.ones(len(one.src)), one.cross.shape[:3])))
        for n in range(40)
    ]
    whole, num = fit_page(frames, AlignmentConfig())
    assert num == 40
    monkeypatch.setattr("diglot.attend.LARGEST", len(whole) // 3)
    page, num = fit_page(frames, AlignmentConfig())
    updates = [int(n) for n in re.findall(r'"update": (\d+)', page)]
    assert len(page.encode()) <= len(whole) // 3
    assert len(updates) == num > 5
    assert (updates[0], updates[-1]) == (0, 39)


def test_training_keeps_a_film_of_the_watched_line_and_names_the_heads_that_align(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    write_pairs(tmp_path, "train", 60, seed=1)
    write_pairs(tmp_path, "valid", 24, seed=2)
    train(small_recipe(tmp_path, "run", "train.watch=2", "train.max_updates=4", "train.valid_every=2"), quiet=True)
    frames = read_frames(tmp_path / "run")
    assert [update for update, _ in frames] == [2, 4]
    assert {one.source for _, one in frames} == {(tmp_path / "valid.en").read_text().split("\n")[1]}
    assert {one.text for _, one in frames} == {(tmp_path / "valid.de").read_text().split("\n")[1]}
    assert np.abs(frames[0][1].cross - frames[1][1].cross).max() > 0

    def said(*words: str) -> str:
        monkeypatch.setattr("sys.argv", ["diglot", *words])
        cli.app(standalone_mode=False)
        return capfd.readouterr().out

    run, page = str(tmp_path / "run"), tmp_path / "film.html"
    said("attend", run, "-o", str(page))
    assert len(numbers_in_page(page.read_text(encoding="utf-8"))) == 2
    assert len(said("align", run, str(tmp_path / "valid.en"), str(tmp_path / "valid.de")).split("\n")) == 25
    assert json.loads(said("attend", run, "ten", "--json"))["hypotheses"][0]["alignment"] is not None
    assert said("attend", run, "ten", "--target", "zehn").startswith("zehn    (score ")
    for words in (("attend", run, "ten", "-o"), ("attend", "--schedule", "-o"), ("attend", run, "--schedule", "-o")):
        said(*words, str(tmp_path / "picture.svg"))
        ET.parse(tmp_path / "picture.svg")
    assert "warmup_steps = 20" in (tmp_path / "picture.svg").read_text(encoding="utf-8")


def test_no_film_is_kept_where_no_line_is_watched(tmp_path: Path):
    train(small_recipe(tmp_path, "run", "train.max_updates=1", "train.valid_every=1"), quiet=True)
    assert not (tmp_path / "run" / "attention").exists()
