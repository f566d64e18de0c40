"""The native kernels of a training step on a CPU, called with tensors: src/native/kernels.h says what each does.

They are compiled when the package is installed. Where they could not be, `why_not` says why, and training goes through
`model.py` alone, which computes the same, more slowly.
"""

from __future__ import annotations

import ctypes
import importlib.util
from ctypes import Structure, byref, c_float, c_int64, c_void_p, sizeof
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

VECTOR = 16  # of which the widths of rows have to be multiples
KINDS = "relu", "swish", "gelu"


class Drop(Structure):
    """How a dropout of the network drops; the salt tells it from the others."""

    _fields_ = (("threshold", c_int64), ("salt", c_int64), ("scale", c_float))


def drop(p: float, number: int) -> Drop:
    """The dropout that has this number in the network, as `model.Dropout` does it."""
    return Drop(round(p * 2**16) - 2**15, number << 40, 1 / (1 - p) if p else 1.0)


@dataclass(frozen=True)
class Rows:
    """What the packed rows of one side of a micro-batch are of. Rows after the last sentence fill up."""

    starts: Tensor  # (B + 1,) the first row of each sentence, and the end of the last
    samples: Tensor  # (B,) the key of each sentence's dropout
    keys: Tensor  # (N,) the same for each row
    places: Tensor  # (N,) a row's position in its sentence
    num: int  # of the rows that are a sentence's

    def fields(self, drop: Drop) -> dict[str, Any]:
        """As structures hold them."""
        return {"keys": self.keys.data_ptr(), "places": self.places.data_ptr(), "drop": drop}


def of(tensor: Tensor | None) -> int | None:
    """Where a tensor lies."""
    return None if tensor is None else tensor.data_ptr()


def shape(x: Tensor) -> dict[str, int]:
    """Number, width and type of rows that lie one below the other."""
    if not x.is_contiguous():
        raise ValueError(f"rows must lie one below the other, not with strides {x.stride()}")
    return {"num": len(x), "width": x.size(1), "is_bf16": x.dtype == torch.bfloat16}


def structure(integers: str, pointers: str, *others: tuple[str, Any]) -> type[Structure]:
    """One of kernels.h: its integers, its pointers, and what comes after them."""
    fields = [(name, c_int64) for name in integers.split()], [(name, c_void_p) for name in pointers.split()]
    return type("Argument", (Structure,), {"_fields_": (*fields[0], *fields[1], *others)})


DROP, SHAPE = ("drop", Drop), "num width is_bf16"
AddNorm = structure(SHAPE, "x o y gain bias stats keys places", DROP, ("epsilon", c_float))
AddNormBackward = structure(SHAPE, "dy s more ds d_o gain stats d_gain d_bias keys places", DROP)
Activation = structure(SHAPE + " kind", "x y dy keys places", DROP)
ColumnSums = structure(SHAPE, "x sums")
Attention = structure(
    "num is_bf16 is_causal num_heads key_width value_width q_stride k_stride v_stride",
    "q_starts k_starts q k v out d_out dq dk dv keys", DROP,
)  # fmt: skip
Embed = structure(SHAPE, "pieces table positions y dy d_table d_positions keys places", DROP, ("scale", c_float))
Loss = structure(SHAPE, "logits targets losses", ("smoothing", c_float))


STRUCTURES = AddNorm, AddNormBackward, Activation, ColumnSums, Attention, Embed, Loss


@cache
def library() -> Any:
    """The compiled library, or a sentence on why there is none."""
    found = importlib.util.find_spec("diglot._kernels")
    if found is None or found.origin is None:
        return "they were not compiled when diglot was installed (pip install -v shows why; g++ or clang is needed)"
    try:
        opened = ctypes.CDLL(found.origin)
        sizes = (c_int64 * len(STRUCTURES))()
        opened.diglot_sizes(sizes)
    except (OSError, AttributeError) as error:
        return f"they cannot be opened ({error}): install diglot again"
    if list(sizes) != [sizeof(one) for one in STRUCTURES]:
        return f"{found.origin} is of another version: install diglot again"
    return opened


def are_there() -> bool:
    """Whether they can be used."""
    return not isinstance(library(), str)


def why_not() -> str:
    """Why they cannot."""
    return "" if are_there() else library()


def call(name: str, argument: Structure) -> None:
    """Run a kernel, on as many threads as PyTorch has."""
    if getattr(library(), f"diglot_{name}")(byref(argument), torch.get_num_threads()):
        raise MemoryError("a kernel of the training step got no memory")


# ------------------------------------------------------------------- residual, dropout, norm


def add(x: Tensor, o: Tensor, rows: Rows, drop: Drop) -> Tensor:
    """x + dropout(o), which takes the place of o."""
    call("add_norm", AddNorm(**shape(x), x=of(x), o=of(o), **rows.fields(drop)))
    return o


def add_norm(
    x: Tensor, o: Tensor | None, gain: Tensor, bias: Tensor, epsilon: float, rows: Rows, drop: Drop
) -> tuple[Tensor, Tensor]:
    """norm(x + dropout(o)), of which the sum takes the place of o; and mean and 1 / deviation of each row."""
    y, stats = torch.empty_like(x), torch.empty(len(x), 2)
    call("add_norm", AddNorm(
        **shape(x), x=of(x), o=of(o), y=of(y), gain=of(gain), bias=of(bias), stats=of(stats), **rows.fields(drop),
        epsilon=epsilon))  # fmt: skip
    return y, stats


def add_backward(dy: Tensor, rows: Rows, drop: Drop) -> Tensor:
    """The gradient of o in x + dropout(o)."""
    d_o = torch.empty_like(dy)
    call("add_norm_backward", AddNormBackward(**shape(dy), dy=of(dy), d_o=of(d_o), **rows.fields(drop)))
    return d_o


def add_norm_backward(
    dy: Tensor, s: Tensor, more: Tensor | None, gain: Tensor, stats: Tensor, rows: Rows, drop: Drop
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of s, to which `more` is added, of o, of gain and of bias. Where nothing is dropped, the first two
    are one tensor."""
    ds, d_gain, d_bias = torch.empty_like(dy), torch.empty_like(gain), torch.empty_like(gain)
    d_o = torch.empty_like(dy) if drop.scale != 1 else None
    call("add_norm_backward", AddNormBackward(
        **shape(dy), dy=of(dy), s=of(s), more=of(more), ds=of(ds), d_o=of(d_o), gain=of(gain), stats=of(stats),
        d_gain=of(d_gain), d_bias=of(d_bias), **rows.fields(drop)))  # fmt: skip
    return ds, ds if d_o is None else d_o, d_gain, d_bias


# ------------------------------------------------------------------- feed-forward


def activation(kind: str, x: Tensor, rows: Rows, drop: Drop) -> Tensor:
    """dropout(f(x))."""
    y = torch.empty_like(x)
    call("activation", Activation(
        **shape(x), kind=KINDS.index(kind), x=of(x), y=of(y), **rows.fields(drop)))  # fmt: skip
    return y


def activation_backward(kind: str, x: Tensor, dy: Tensor, rows: Rows, drop: Drop) -> Tensor:
    """The gradient of x, which takes the place of dy."""
    call("activation", Activation(
        **shape(x), kind=KINDS.index(kind), x=of(x), y=of(dy), dy=of(dy), **rows.fields(drop)))  # fmt: skip
    return dy


def column_sums(x: Tensor) -> Tensor:
    """The sum of the rows."""
    sums = torch.empty(x.size(1))
    call("column_sums", ColumnSums(**shape(x), x=of(x), sums=of(sums)))
    return sums


# ------------------------------------------------------------------- attention


QKV = tuple[Tensor, Tensor, Tensor]  # which may be columns of wider rows


@dataclass(frozen=True)
class Look:
    """Of the heads of some rows at a memory, which may be the rows themselves."""

    num_heads: int
    key_width: int
    value_width: int
    rows: Rows
    memory: Rows
    is_causal: bool
    drop: Drop

    def fields(self, qkv: QKV) -> dict[str, Any]:
        """As the structure holds them."""
        found = {f"{name}_stride": tensor.stride(0) for name, tensor in zip("qkv", qkv, strict=True)}
        found |= {name: tensor.data_ptr() for name, tensor in zip("qkv", qkv, strict=True)}
        return found | {
            "num": len(self.rows.samples), "is_bf16": qkv[0].dtype == torch.bfloat16, "is_causal": self.is_causal,
            "num_heads": self.num_heads, "key_width": self.key_width, "value_width": self.value_width,
            "q_starts": of(self.rows.starts), "k_starts": of(self.memory.starts), "keys": of(self.rows.samples),
            "drop": self.drop,
        }  # fmt: skip


def attend(look: Look, qkv: QKV) -> Tensor:
    """What each row reads: (N, heads * value width)."""
    out = qkv[0].new_empty(len(qkv[0]), look.num_heads * look.value_width)
    out[look.rows.num :] = 0
    call("attend", Attention(**look.fields(qkv), out=of(out)))
    return out


def attend_backward(look: Look, d_out: Tensor, qkv: QKV, gradients: QKV) -> None:
    """Write the gradients of q, k and v, which have the strides of these. Rows that fill up get none."""
    for gradient, rows in zip(gradients, (look.rows, look.memory, look.memory), strict=True):
        gradient[rows.num :] = 0
    dq, dk, dv = gradients
    if not d_out.is_contiguous():
        raise ValueError(f"rows must lie one below the other, not with strides {d_out.stride()}")
    call("attend_backward", Attention(
        **look.fields(qkv), d_out=of(d_out), dq=of(dq), dk=of(dk), dv=of(dv)))  # fmt: skip


# ------------------------------------------------------------------- embedding and loss


def embed(
    pieces: Tensor, table: Tensor, positions: Tensor, scale: float, dtype: torch.dtype, rows: Rows, drop: Drop
) -> Tensor:
    """dropout(scale * table[piece] + positions[place]); a negative piece stands for the zero vector."""
    y = table.new_empty(len(pieces), table.size(1), dtype=dtype)
    call("embed", Embed(
        **shape(y), pieces=of(pieces), table=of(table), positions=of(positions), y=of(y), **rows.fields(drop),
        scale=scale))  # fmt: skip
    return y


def embed_backward(
    pieces: Tensor, dy: Tensor, d_table: Tensor, d_positions: Tensor | None, scale: float, rows: Rows, drop: Drop
) -> None:
    """Add to the gradients of the table and, if they are learnt, of the positions."""
    call("embed_backward", Embed(
        **shape(dy), pieces=of(pieces), dy=of(dy), d_table=of(d_table), d_positions=of(d_positions),
        **rows.fields(drop), scale=scale))  # fmt: skip


def loss(logits: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """(N, 2): the smoothed loss and the negative log-likelihood of each row; the gradient of the first takes the place
    of the logits. A negative target counts for nothing."""
    losses = torch.empty(len(logits), 2, dtype=torch.float64)
    call("loss", Loss(
        **shape(logits), logits=of(logits), targets=of(targets), losses=of(losses), smoothing=smoothing))  # fmt: skip
    return losses
