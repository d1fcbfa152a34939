"""Root-mean-square norms in one pass over memory, forward and backward, optionally with the residual sum before them.

Between two large products the time goes into memory traffic. A program takes a tile of whole rows. So every number is
read once and written once, and float32 numbers exist in registers only. What is kept for the backward pass has the
dtype of the model: the input itself or, where the residual stream is wider, the normed rows before the weight.

The gradient of the weight is a sum over rows: every program adds up those of its own tiles, and torch adds up the
programs. No atomics: two runs agree to the bit.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from longrecall.ops.kernels.launch import kernel, on_device, processors, why_not_tensors

WIDEST = 8192
"""The widest row: a program holds whole rows in registers."""

TILE = 1024
"""Numbers that a program works on at a time, rows times their width; at least one row. Larger tiles were slower."""

PROGRAMS = 8
"""Programs of a backward launch for each multiprocessor: enough to keep memory busy, few partial sums."""


@triton.jit
def _places(tile, N, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Rows and columns of a tile, and which of them are inside."""
    rows = (tile * ROWS + tl.arange(0, ROWS).to(tl.int64))[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    return rows, columns, (rows < N) & (columns < WIDTH)


@kernel
def norm_kernel(
    x, update, weight, stream, out, kept, scale, N, eps,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, UPDATE: tl.constexpr, KEEP: tl.constexpr, SCALE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Norm a tile of rows of one group; with UPDATE the sum of x and the update is stored and normed."""
    group = tl.program_id(1)
    rows, columns, inside = _places(tl.program_id(0), N, ROWS, WIDTH, BLOCK)
    place = (rows * GROUPS + group) * WIDTH + columns
    wide = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if UPDATE:
        total = (wide + tl.load(update + place, mask=inside, other=0.0).to(tl.float32)).to(stream.dtype.element_ty)
        tl.store(stream + place, total, mask=inside)
        wide = total.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 1) / WIDTH + eps)[:, None]
    normed = wide * inverse
    factor = tl.load(weight + group * WIDTH + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    tl.store(out + place, (normed * factor).to(out.dtype.element_ty), mask=inside)
    if KEEP:
        tl.store(kept + place, normed.to(kept.dtype.element_ty), mask=inside)
    if SCALE:
        tl.store(scale + rows * GROUPS + group, inverse, mask=rows < N)


@kernel
def norm_backward_kernel(
    kept, scale, weight, d_out, d_stream, d_x, d_update, d_weight, N,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, NORMED: tl.constexpr, STREAM: tl.constexpr, UPDATE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every `num_programs`-th tile of one group. `kept` are normed rows, or without NORMED the inputs of the norm."""
    first, group = tl.program_id(0), tl.program_id(1)
    width = tl.arange(0, BLOCK)[None, :]
    factor = tl.load(weight + group * WIDTH + width, mask=width < WIDTH, other=0.0).to(tl.float32)
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in range(first, tl.cdiv(N, ROWS), tl.num_programs(0)):
        rows, columns, inside = _places(tile, N, ROWS, WIDTH, BLOCK)
        place = (rows * GROUPS + group) * WIDTH + columns
        normed = tl.load(kept + place, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(scale + rows * GROUPS + group, mask=rows < N, other=0.0)
        if not NORMED:
            normed *= inverse
        d = tl.load(d_out + place, mask=inside, other=0.0).to(tl.float32)
        sums += d * normed
        d *= factor
        d = inverse * (d - normed * (tl.sum(d * normed, 1) / WIDTH)[:, None])
        if STREAM:
            d += tl.load(d_stream + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(d_x + place, d.to(d_x.dtype.element_ty), mask=inside)
        if UPDATE:
            tl.store(d_update + place, d.to(d_update.dtype.element_ty), mask=inside)
    place = d_weight + (first * GROUPS + group) * WIDTH + width
    tl.store(place, tl.sum(sums, 0)[None, :], mask=width < WIDTH)


def why_not(x: Tensor, weight: Tensor, groups: int = 1, update: Tensor | None = None) -> str | None:
    """Why the kernels cannot norm x ``[..., groups * width]`` or x + update, in words; None = they can."""
    width = x.shape[-1] // groups
    if width > WIDEST:
        return f"rows of {width} numbers are too wide; the kernels hold up to {WIDEST}"
    return why_not_tensors(x, weight, *(() if update is None else (update,)))


def add_rms_norm(
    x: Tensor, update: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype, groups: int = 1
) -> tuple[Tensor, Tensor]:
    """The sum of x and `update`, and its norm in `dtype`; see `ops.norms.op.add_rms_norm`."""
    shape, width = x.shape, x.shape[-1]
    inputs = [None if t is None else t.reshape(-1, width).contiguous() for t in (x, update)]
    gradients = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, update, weight))
    weight = weight.contiguous()
    stream, out = cast(tuple[Tensor, Tensor], _AddNorm.apply(eps, groups, dtype, gradients, *inputs, weight))
    return stream.view(shape), out.view(shape)


def sizes(width: int, tile: int | None = None) -> dict[str, int]:
    """The tile of rows of `width` numbers, `TILE` numbers in all if not told, and the warps that work on it."""
    block = triton.next_power_of_2(width)
    return {"ROWS": max(1, (tile or TILE) // block), "BLOCK": block, "num_warps": max(4, block // 512)}


def programs(x: Tensor, rows: int, tile: int, each: int | None = None) -> int:
    """Programs of a backward launch over tiles of `tile` rows, up to `each` (`PROGRAMS`) a multiprocessor."""
    return int(max(1, min((each or PROGRAMS) * processors(x), triton.cdiv(rows, tile))))


class _AddNorm(torch.autograd.Function):
    """Eps, groups, dtype, whether there will be gradients; x ``[N, G * D]``, update or None, weight ``[G * D]``."""

    @staticmethod
    def forward(ctx: Any, eps: float, groups: int, dtype: torch.dtype, gradients: bool, *inputs: Any) -> Any:
        x, update, weight = inputs
        width = x.shape[1] // groups
        tile = sizes(width)
        stream = x if update is None else torch.empty_like(x)
        out = torch.empty_like(x, dtype=dtype)
        # A residual stream in a wider dtype is not kept: its normed rows in the model's dtype are half as large.
        ctx.normed = x.dtype != dtype
        kept = torch.empty_like(out) if gradients and ctx.normed else stream
        scale = x.new_empty((len(x), groups), dtype=torch.float32) if gradients else x
        with on_device(x):
            norm_kernel[(triton.cdiv(len(x), tile["ROWS"]), groups)](
                x, x if update is None else update, weight, stream, out, kept, scale, len(x), eps,
                WIDTH=width, GROUPS=groups, UPDATE=update is not None, KEEP=gradients and ctx.normed,
                SCALE=gradients, **tile,
            )  # fmt: skip
        if gradients:
            ctx.groups, ctx.dtypes = groups, (x.dtype, None if update is None else update.dtype)
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(kept, scale, weight)
        return stream, out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_stream: Tensor | None, d_out: Tensor | None) -> tuple[Tensor | None, ...]:
        kind, update_kind = ctx.dtypes
        if d_out is None:
            d_update = None if d_stream is None or update_kind is None else d_stream.to(update_kind)
            return None, None, None, None, d_stream, d_update, None
        kept, scale, weight = ctx.saved_tensors
        width = kept.shape[1] // ctx.groups
        tile = sizes(width)
        count = programs(kept, len(kept), tile["ROWS"])
        d_x = torch.empty_like(kept, dtype=kind)
        apart = update_kind not in (None, kind)
        d_update = torch.empty_like(kept, dtype=update_kind) if apart else d_x
        d_weight = kept.new_empty((count, kept.shape[1]), dtype=torch.float32)
        d_stream = None if d_stream is None else d_stream.contiguous()
        with on_device(kept):
            norm_backward_kernel[(count, ctx.groups)](
                kept, scale, weight, d_out.contiguous(), d_x if d_stream is None else d_stream, d_x, d_update, d_weight,
                len(kept), WIDTH=width, GROUPS=ctx.groups, NORMED=ctx.normed, STREAM=d_stream is not None,
                UPDATE=apart, **tile,
            )  # fmt: skip
        return None, None, None, None, d_x, None if update_kind is None else d_update, d_weight.sum(0).to(weight.dtype)
