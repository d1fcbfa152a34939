"""Values times time steps, and values times D added to outputs: one pass over memory each, and one for all gradients.

The gradient of D is a sum over tokens: every program adds up its own, and torch adds up the programs. No atomics: two
runs agree to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from longrecall.ops.kernels.launch import kernel, on_device, why_not_tensors
from longrecall.ops.norms.triton.rms_norm import WIDEST, programs, sizes


@triton.jit
def _tile(tile, head, N, row, HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Tokens of a tile; offsets of a head's numbers in `values`, with rows `row` apart, and elsewhere; a mask."""
    rows = (tile * ROWS + tl.arange(0, ROWS).to(tl.int64))[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (rows < N) & (columns < WIDTH)
    within = head * WIDTH + columns
    return rows, rows * row + within, rows * (HEADS * WIDTH) + within, inside


@triton.jit
def _load(x, place, inside):
    return tl.load(x + place, mask=inside, other=0.0).to(tl.float32)


@kernel
def step_kernel(
    values, step, out, N, row, HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """A tile of tokens of one head, times their time steps."""
    head = tl.program_id(1)
    rows, given, place, inside = _tile(tl.program_id(0), head, N, row, HEADS, WIDTH, ROWS, BLOCK)
    tl.store(out + place, _load(values, given, inside) * _load(step, rows * HEADS + head, rows < N), mask=inside)


@kernel
def skip_kernel(
    y, values, skip, out, N, row, HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """A tile of outputs of one head, plus its values times D."""
    head = tl.program_id(1)
    _rows, given, place, inside = _tile(tl.program_id(0), head, N, row, HEADS, WIDTH, ROWS, BLOCK)
    share = tl.load(skip + head).to(tl.float32)
    tl.store(out + place, _load(y, place, inside) + share * _load(values, given, inside), mask=inside)


@kernel
def values_gradient_kernel(
    values, step, skip, d_stepped, d_y, d_values, d_step, sums, N, row,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every `num_programs`-th tile of one head; `sums` float32 ``[programs, HEADS]``."""
    first, head = tl.program_id(0), tl.program_id(1)
    share = tl.load(skip + head).to(tl.float32)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in range(first, tl.cdiv(N, ROWS), tl.num_programs(0)):
        rows, given, place, inside = _tile(tile, head, N, row, HEADS, WIDTH, ROWS, BLOCK)
        x, late = _load(values, given, inside), _load(d_y, place, inside)
        early = _load(d_stepped, place, inside)
        factor = _load(step, rows * HEADS + head, rows < N)
        tl.store(d_values + place, (early * factor + late * share).to(d_values.dtype.element_ty), mask=inside)
        tl.store(d_step + rows * HEADS + head, tl.sum(early * x, 1)[:, None], mask=rows < N)
        total += late * x
    tl.store(sums + first * HEADS + head, tl.sum(total))


def why_not(values: Tensor, step: Tensor, skip: Tensor) -> str | None:
    """Why the kernels cannot take values ``[B, T, H, P]``, in words; None = they can."""
    if values.shape[-1] > WIDEST:
        return f"heads of {values.shape[-1]} channels are too wide; the kernels hold up to {WIDEST}"
    if step.dtype != torch.float32 or skip.dtype != torch.float32:
        return f"time steps and D must be float32, not {step.dtype} and {skip.dtype}"
    return why_not_tensors(values, step, skip)


def stepped_values(
    values: Tensor, step: Tensor, skip: Tensor, attend: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """`ops.linear_attention.stepped_values.stepped_values`."""
    width = values.shape[3]
    even = values.shape[0] == 1 or values.stride(0) == values.shape[1] * values.stride(1)
    values = values if even and values.stride()[2:] == (width, 1) else values.contiguous()
    skip = skip.contiguous()
    stepped, skipped = cast(tuple[Tensor, Tensor], _Step.apply(values, step.contiguous(), skip))
    y, final = attend(stepped)
    return cast(Tensor, _AddSkip.apply(y.contiguous(), skipped, values.detach(), skip.detach())), final


def _sizes(values: Tensor) -> tuple[int, int, dict[str, int]]:
    """Tokens, their distance in memory, and the constants of a launch."""
    heads, width = values.shape[2:]
    return values.shape[0] * values.shape[1], values.stride(1), {"HEADS": heads, "WIDTH": width, **sizes(width)}


class _Step(torch.autograd.Function):
    """Values ``[B, T, H, P]`` with rows at equal distances, steps ``[B, T, H]``, D ``[H]`` -> two of the values' shape.

    The first result is the values times the steps. The second stands for the values times D, which `_AddSkip` computes.
    It has a shape and a gradient but no memory, so that one pass computes all gradients.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, step: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(values, step, skip)
        tokens, row, constants = _sizes(values)
        out = torch.empty(values.shape, device=values.device, dtype=torch.float32)
        with on_device(values):
            step_kernel[(triton.cdiv(tokens, constants["ROWS"]), constants["HEADS"])](
                values, step, out, tokens, row, **constants
            )
        return out, out.new_empty(()).expand(values.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_stepped: Tensor, d_y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values, step, skip = ctx.saved_tensors
        tokens, row, constants = _sizes(values)
        heads = constants["HEADS"]
        count = max(1, programs(values, tokens, constants["ROWS"]) // heads)
        d_values = torch.empty(values.shape, device=values.device, dtype=values.dtype)
        d_step, sums = torch.empty_like(step), step.new_empty((count, heads))
        with on_device(values):
            values_gradient_kernel[(count, heads)](
                values, step, skip, d_stepped.contiguous(), d_y.contiguous(), d_values, d_step, sums, tokens, row,
                **constants,
            )  # fmt: skip
        return d_values, d_step, sums.sum(0)


class _AddSkip(torch.autograd.Function):
    """Outputs y float32 ``[B, T, H, P]``, the second result of `_Step`, values, D -> y + D * values."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, skipped: Tensor, values: Tensor, skip: Tensor) -> Tensor:
        tokens, row, constants = _sizes(values)
        out = torch.empty_like(y)
        with on_device(y):
            skip_kernel[(triton.cdiv(tokens, constants["ROWS"]), constants["HEADS"])](
                y, values, skip, out, tokens, row, **constants
            )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        return d_out, d_out, None, None
