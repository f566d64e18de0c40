"""Pictures as SVG, for papers and docs: one head as a map or as lines, and what the network is made of.

What teaches is drawn from the functions that the network and its training call: `positional_encoding`, `causal_mask`,
`padding_mask`, `lrate`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

import numpy as np
import torch
from rich.cells import cell_len

from diglot.config import AlignmentConfig, Recipe
from diglot.errors import ConfigError
from diglot.model import causal_mask, padding_mask, positional_encoding
from diglot.schedule import lrate
from diglot.translator import Attention, Weights

PARTS = ("encoder", "decoder", "cross")
START = "<start>"
# lightness changes in one direction along the first, and from the middle outwards in the second
BLUES = ("#ffffff", "#d6e8f5", "#93c3e6", "#4a93cc", "#155f9e", "#04274d")
ORANGE_TO_BLUE = ("#7f3b08", "#c9721a", "#f3c58c", "#ffffff", "#9ec9ea", "#2f7fc1", "#053061")
LEVELS = 64  # shades
INK, SOFT, LINE = "#1b1f24", "#565d67", "#0a4d8c"
SIZE = 13  # of text
MARGIN = 12
SHOWN_POSITIONS = 64
WARMUPS = 0.5, 1, 2  # times that of the recipe


class Drawing:
    """Parts of an SVG, and how large it has become."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.width = self.height = 0.0

    def text(self, x: float, y: float, text: str, how: str = "", *, fill: str = INK, size: float = SIZE) -> None:
        """A line of text, whose attributes `how` places it otherwise than from x to the right."""
        clean = escape("".join(c if c.isprintable() else "\ufffd" for c in text))
        self.parts.append(f'<text x="{x:g}" y="{y:g}" fill="{fill}" font-size="{size:g}" {how}>{clean}</text>')
        self.reach(x + (0 if "end" in how or "rotate" in how else text_width(text, size)), y + size / 2)

    def path(self, d: str, how: str) -> None:
        """A path."""
        self.parts.append(f'<path d="{d}" {how}/>')

    def reach(self, x: float, y: float) -> None:
        """Make room up to here."""
        self.width, self.height = max(self.width, x), max(self.height, y)

    def map(self, x: float, y: float, values: Weights, cell: tuple[float, float], ramp: Sequence[str]) -> None:
        """Numbers from 0 to 1 as shades; equal neighbours in a column are one."""
        shades: dict[int, list[str]] = defaultdict(list)
        levels = np.round(np.clip(values, 0, 1) * (LEVELS - 1)).astype(int)
        for j in range(levels.shape[1]):
            starts = [0, *(np.flatnonzero(np.diff(levels[:, j])) + 1).tolist()]
            for start, end in zip(starts, [*starts[1:], len(levels)], strict=True):
                shades[int(levels[start, j])].append(f"M{j} {start}h1v{end - start}h-1z")
        width, height = cell
        right, below = levels.shape[1] * width, levels.shape[0] * height
        place = f"translate({x:g} {y:g}) scale({width:g} {height:g})"
        self.parts.append(f'<g transform="{place}" shape-rendering="crispEdges">')
        for level, cells in sorted(shades.items()):
            self.path("".join(cells), f'fill="{shade(ramp, level / (LEVELS - 1))}"')
        self.parts.append("</g>")
        self.path(f"M{x:g} {y:g}h{right:g}v{below:g}h-{right:g}z", f'fill="none" stroke="{SOFT}" stroke-width="0.75"')
        self.reach(x + right, y + below)

    def legend(self, x: float, y: float, ramp: Sequence[str], low: str, high: str) -> None:
        """What the shades mean."""
        self.text(x, y + 8, low, fill=SOFT)
        start = x + text_width(low) + 8
        self.map(start, y, np.linspace(0, 1, LEVELS)[None], (1.5, 9), ramp)
        self.text(start + 1.5 * LEVELS + 6, y + 8, high, fill=SOFT)

    def svg(self, title: str) -> str:
        """The whole, on white."""
        width, height = self.width + MARGIN, self.height + MARGIN
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" font-family="system-ui, \'Noto Sans\', sans-serif" role="img">'
            f'\n<title>{escape(title)}</title>\n<rect width="100%" height="100%" fill="#ffffff"/>\n'
            + "\n".join(self.parts)
            + "\n</svg>\n"
        )


def shade(ramp: Sequence[str], share: float) -> str:
    """The colour so far along a ramp."""
    at = share * (len(ramp) - 1)
    low = min(int(at), len(ramp) - 2)
    one, two = ([int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in (ramp[low], ramp[low + 1]))
    return "#" + "".join(f"{round(a + (at - low) * (b - a)):02x}" for a, b in zip(one, two, strict=True))


def text_width(text: str, size: float = SIZE) -> float:
    """About how wide a text is: fonts differ."""
    return 0.6 * size * cell_len(text)


# ------------------------------------------------------------------- attention


@dataclass(frozen=True)
class Picture:
    """Which weights one picture shows: the mean of some heads of a layer."""

    part: str = "cross"
    layer: int = 1
    heads: tuple[int, ...] = ()

    def weights(self, attention: Attention) -> Weights:
        """(T, S), or as the part has it."""
        return getattr(attention, self.part)[self.layer - 1, [head - 1 for head in self.heads]].mean(0)

    def __str__(self) -> str:
        heads = " ".join(map(str, self.heads))
        named = f"head {heads}" if len(self.heads) == 1 else f"mean of heads {heads}"
        part = "cross attention" if self.part == "cross" else self.part
        return f"{part}, layer {self.layer}, {named}"


def choose_picture(
    attention: Attention, config: AlignmentConfig, part: str = "cross", layer: int = 0, heads: Sequence[int] = ()
) -> Picture:
    """The picture that is asked for; where nothing is said, what aligns words, or else all heads of the last layer."""
    if part not in PARTS:
        raise ConfigError(f"'{part}' is no part of the network; choose from: {', '.join(PARTS)}.")
    num_layers, num_heads = getattr(attention, part).shape[:2]
    aligns = part == "cross" and not heads and layer in (0, config.layer)
    if not layer:
        layer = config.layer if aligns and config.layer else num_layers
    if not heads:
        heads = config.heads if aligns and config.layer else tuple(range(1, num_heads + 1))
    if not 1 <= layer <= num_layers or not all(1 <= head <= num_heads for head in heads):
        raise ConfigError(
            f"there is no layer {layer} with head {', '.join(map(str, heads))}: the {part} has {num_layers} layers of "
            f"{num_heads} heads, counted from 1."
        )
    return Picture(part, layer, tuple(heads))


def names_of(attention: Attention, part: str) -> tuple[list[str], list[str]]:
    """What stands beside the rows and above the columns of a part's pictures."""
    looked_at = {"encoder": attention.src, "decoder": (START, *attention.tgt[:-1]), "cross": attention.src}[part]
    return list(attention.src if part == "encoder" else attention.tgt), list(looked_at)


def draw_map(attention: Attention, picture: Picture) -> str:
    """One picture of attention: a row looks at the columns."""
    rows, columns = names_of(attention, picture.part)
    drawing, weights = Drawing(), picture.weights(attention)
    left = MARGIN + max(map(text_width, rows)) + 6
    above = MARGIN + SIZE + max(map(text_width, columns)) + 14
    cell = 18.0 if max(weights.shape) <= 60 else 9.0
    size = min(SIZE, cell - 1)
    drawing.text(MARGIN, MARGIN + SIZE, caption(picture), fill=SOFT)
    for i, name in enumerate(rows):
        drawing.text(left - 6, above + (i + 0.5) * cell + size / 3, name, 'text-anchor="end"', size=size)
    for j, name in enumerate(columns):
        x, y = left + (j + 0.5) * cell + size / 3, above - 6
        drawing.text(x, y, name, f'transform="rotate(-90 {x:g} {y:g})"', size=size)
    drawing.map(left, above, np.sqrt(weights), (cell, cell), BLUES)
    drawing.legend(left, drawing.height + 10, BLUES, "0", "1, small weights raised (square root)")
    return drawing.svg(caption(picture))


def draw_lines(attention: Attention, picture: Picture) -> str:
    """The same as the paper's figures 3 to 5 have it: a line for each weight, as dark as the weight is large."""
    rows, columns = names_of(attention, picture.part)
    drawing, weights = Drawing(), picture.weights(attention)
    step, top, gap = 22.0, MARGIN + 2.5 * SIZE, 180.0
    left = MARGIN + max(map(text_width, rows)) + 8
    drawing.text(MARGIN, MARGIN + SIZE, caption(picture, "left", "right"), fill=SOFT)
    for i, j in np.argwhere(weights > 0.01).tolist():
        start, end = top + (i + 0.5) * step, top + (j + 0.5) * step
        curve = (
            f"M{left:g} {start:g}C{left + gap * 0.4:g} {start:g} {left + gap * 0.6:g} {end:g} {left + gap:g} {end:g}"
        )
        opacity = float(weights[i, j]) ** 0.5
        drawing.path(
            curve, f'fill="none" stroke="{LINE}" stroke-opacity="{opacity:.2f}" stroke-width="{3 * opacity:.2f}"'
        )
    for i, name in enumerate(rows):
        drawing.text(left - 8, top + (i + 0.5) * step + SIZE / 3, name, 'text-anchor="end"')
    for j, name in enumerate(columns):
        drawing.text(left + gap + 8, top + (j + 0.5) * step + SIZE / 3, name)
    return drawing.svg(caption(picture, "left", "right"))


def caption(picture: Picture, one: str = "rows", two: str = "columns") -> str:
    """What a picture shows, in words."""
    says = {
        "encoder": f"the source ({one}) looks at itself ({two})",
        "decoder": f"the translation ({one}) looks at what is written of it ({two})",
        "cross": f"the translation ({one}) looks at the source ({two})",
    }
    return f"{str(picture).capitalize()}: {says[picture.part]}"


# ------------------------------------------------------------------- what the network is made of


def draw_positions(recipe: Recipe) -> str:
    """3.5: the positional encoding, and how alike the encodings of two positions are."""
    drawing, config = Drawing(), recipe.model
    table = positional_encoding(SHOWN_POSITIONS, config.d_model).double()
    drawing.text(MARGIN, 24, f"Section 3.5: the positional encoding, d_model = {config.d_model}", size=16)
    left, above, cell = MARGIN + 30, 64, 5
    below, wide = above + cell * SHOWN_POSITIONS, 2 * 250 / config.d_model
    for place, name in enumerate(("sin: dimensions 0, 2, 4 ...", "cos: dimensions 1, 3, 5 ...")):
        start = left + 262 * place
        drawing.text(start, above - 8, name, fill=SOFT)
        drawing.map(start, above, (table[:, place::2].numpy() + 1) / 2, (wide, cell), ORANGE_TO_BLUE)
        for dimension in range(place, config.d_model, config.d_model // 4):
            drawing.text(start + wide * dimension / 2, below + 14, str(dimension), fill=SOFT, size=11)
    for position in range(0, SHOWN_POSITIONS, 16):
        drawing.text(left - 6, above + cell * position + 8, str(position), 'text-anchor="end"', fill=SOFT, size=11)
    drawing.legend(left, below + 26, ORANGE_TO_BLUE, "−1", "1")
    products = table @ table.T / (config.d_model / 2)  # sin² + cos² = 1, so many times
    right = left + 2 * 262 + 40
    drawing.text(right, above - 8, "dot products of positions, over d_model / 2", fill=SOFT)
    drawing.map(right, above, products.clamp(0, 1).numpy(), (cell, cell), BLUES)
    drawing.legend(right, below + 26, BLUES, "0", "1: a position with itself")
    top = below + 90
    drawing.text(left, top - 34, "The product depends on the distance alone: three curves, one upon another", fill=SOFT)
    middle = SHOWN_POSITIONS // 2
    curves: dict[str, list[float]] = {
        f"from position {start}": products[start, start : start + middle].tolist() for start in (0, middle - 16, middle)
    }
    draw_curves(drawing, left, top, curves, "distance")
    return drawing.svg("The positional encoding and the dot products of positions")


def draw_masks(recipe: Recipe) -> str:
    """3.2.3: who may attend to what, for two sentences of five and three pieces."""
    drawing = Drawing()
    cell, lengths = 26.0, [5, 3]
    src, tgt = ["Ein", "Hund", "rennt", ".", "</s>"], ["A", "dog", "runs", ".", "</s>"]
    padding = padding_mask(torch.tensor(lengths))  # (B, S)
    drawing.text(MARGIN, 24, "Section 3.2.3: which position (row) may attend to which (column)", size=16)
    drawing.text(MARGIN, 44, "blue: may; white: may not, its score becomes −∞ before the softmax", fill=SOFT)
    short = ["Ja", ".", "</s>", "pad", "pad"]
    pictures = [
        ("encoder: all of the source", src, src, padding[0].expand(5, 5)),
        ("decoder: what is already written", tgt, ["start", *tgt[:-1]], causal_mask(5)),
        ("decoder on encoder: all of the source", tgt, src, padding[0].expand(5, 5)),
        ("a shorter source in the same batch: no padding", short, short, padding[1].expand(5, 5)),
    ]  # fmt: skip
    for number, (title, rows, columns, mask) in enumerate(pictures):
        left, above = MARGIN + 48 + number % 2 * 320, 128 + number // 2 * 230
        drawing.text(left - 48, above - 50, title, fill=INK)
        drawing.map(left, above, mask.double().numpy() * 0.6, (cell, cell), BLUES)
        for i in range(6):
            grid = f"M{left:g} {above + i * cell:g}h{5 * cell:g}M{left + i * cell:g} {above:g}v{5 * cell:g}"
            drawing.path(grid, f'stroke="{SOFT}" stroke-width="0.5"')
        for i, name in enumerate(rows):
            drawing.text(left - 6, above + (i + 0.65) * cell, name, 'text-anchor="end"', size=12)
        for j, name in enumerate(columns):
            x, y = left + (j + 0.65) * cell, above - 5
            drawing.text(x, y, name, f'transform="rotate(-60 {x:g} {y:g})"', size=12)
    drawing.reach(MARGIN + 640, 0)
    return drawing.svg("The masks as the network sees them")


def draw_schedule(recipe: Recipe) -> str:
    """5.3: the learning rate at every update, for this warm-up, half of it and twice it."""
    drawing, model, train = Drawing(), recipe.model, recipe.train
    warmup = train.warmup_steps
    scale = train.learning_rate_scale
    times = "" if scale == 1 else f", times {scale:g}"
    drawing.text(MARGIN, 24, f"Section 5.3: the learning rate, d_model = {model.d_model}{times}", size=16)
    steps = np.linspace(1, 6 * warmup, 241).round().astype(int).tolist()
    curves = {
        f"warmup_steps = {round(warmup * times):,}": [
            lrate(step, model.d_model, round(warmup * times), scale) for step in steps
        ]
        for times in WARMUPS
    }
    peak = lrate(warmup, model.d_model, warmup, scale)
    said = f"rises to {peak:.2e} at update {warmup:,}, then falls with the square root of the update"
    drawing.text(MARGIN, 44, said, fill=SOFT)
    draw_curves(drawing, MARGIN + 50, 70, curves, "update", ends=(1, 6 * warmup))
    return drawing.svg("The learning rate")


def draw_curves(
    drawing: Drawing, left: float, top: float, curves: dict[str, list[float]], name: str,
    ends: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """Curves of as many points from left to right, told apart by colour and by dashes."""
    width, height = 640.0, 180.0
    values = [value for curve in curves.values() for value in curve]
    low, high = min(0.0, min(values)), max(values)
    looks = [("#0a4d8c", ""), ("#c2410c", "7 4"), ("#3f7d20", "2 4")]
    drawing.path(f"M{left:g} {top:g}v{height:g}h{width:g}", f'fill="none" stroke="{SOFT}"')
    for number, ((label, curve), (colour, dashes)) in enumerate(zip(curves.items(), looks, strict=True)):
        points = (
            f"{left + width * i / (len(curve) - 1):.1f} {top + height * (high - value) / (high - low):.1f}"
            for i, value in enumerate(curve)
        )
        drawing.path(
            "M" + "L".join(points), f'fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"'
        )
        y = top + 12 + 20 * number
        drawing.path(
            f"M{left + width - 190:g} {y:g}h28", f'stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"'
        )
        drawing.text(left + width - 154, y + 4, label)
    first, last = ends or (0, len(values) // len(curves) - 1)
    drawing.text(left, top + height + 16, f"{first:,}", fill=SOFT, size=11)
    drawing.text(left + width / 2, top + height + 16, name, 'text-anchor="middle"', fill=SOFT, size=11)
    drawing.text(left + width, top + height + 16, f"{last:,}", 'text-anchor="end"', fill=SOFT, size=11)
    drawing.text(left - 4, top + 10, f"{high:.2g}", 'text-anchor="end"', fill=SOFT, size=11)
    drawing.text(left - 4, top + height, f"{low:.2g}", 'text-anchor="end"', fill=SOFT, size=11)
