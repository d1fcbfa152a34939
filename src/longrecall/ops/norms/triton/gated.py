"""Products with a gate in one pass over memory, forward and backward: the mixers' gated output norm, and SwiGLU's.

The norms have the layout of rms_norm.py. Only the two factors are kept for the backward pass. Activations, norms and
the SwiGLU product, which autograd would keep for the next matrix product, are computed again.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from longrecall.ops.kernels.launch import kernel, on_device, why_not_tensors
from longrecall.ops.norms.triton import rms_norm as normalisation
from longrecall.ops.norms.triton.rms_norm import _places

BLOCK = 2048
"""Numbers that a program of the SwiGLU kernels works on."""

BACKWARD_TILE, BACKWARD_PROGRAMS = 2048, 4
"""`rms_norm.TILE` and `rms_norm.PROGRAMS` for the backward of the gated norm, which reads and writes most."""

GATES = {"silu": 0, "sigmoid": 1, "silu_before": 2}
"""Numbers by which the kernels know a gate: its activation, and whether it comes after or before the norm."""


@triton.jit
def _gate(raw, GATE: tl.constexpr):
    """The activated gate and its derivative."""
    s = 1.0 / (1.0 + tl.exp(-raw))
    if GATE == 1:
        return s, s * (1.0 - s)
    return raw * s, s * (1.0 + raw * (1.0 - s))


@kernel
def gated_norm_kernel(
    x, gate, weight, out, scale, N, gate_row, eps,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, GATE: tl.constexpr, SCALE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of rows of one group: norm(x) * weight * gate, or norm(x * gate) * weight."""
    group = tl.program_id(1)
    rows, columns, inside = _places(tl.program_id(0), N, ROWS, WIDTH, BLOCK)
    place = (rows * GROUPS + group) * WIDTH + columns
    wide = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    raw = tl.load(gate + rows * gate_row + group * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(weight + group * WIDTH + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    activated, _slope = _gate(raw, GATE)
    if GATE == 2:
        wide *= activated
    inverse = tl.rsqrt(tl.sum(wide * wide, 1) / WIDTH + eps)[:, None]
    y = wide * inverse * factor
    if GATE != 2:
        y *= activated
    tl.store(out + place, y.to(out.dtype.element_ty), mask=inside)
    if SCALE:
        tl.store(scale + rows * GROUPS + group, inverse, mask=rows < N)


@kernel
def gated_norm_backward_kernel(
    x, gate, weight, scale, d_out, d_x, d_gate, d_weight, out, N, gate_row,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, GATE: tl.constexpr, OUT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every `num_programs`-th tile of one group; the gate's gradient is stored contiguously.

    With OUT the result of the forward pass is written too; it may overwrite its own gradient.
    """
    first, group = tl.program_id(0), tl.program_id(1)
    width = tl.arange(0, BLOCK)[None, :]
    factor = tl.load(weight + group * WIDTH + width, mask=width < WIDTH, other=0.0).to(tl.float32)
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in range(first, tl.cdiv(N, ROWS), tl.num_programs(0)):
        rows, columns, inside = _places(tile, N, ROWS, WIDTH, BLOCK)
        place = (rows * GROUPS + group) * WIDTH + columns
        wide = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        raw = tl.load(gate + rows * gate_row + group * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(scale + rows * GROUPS + group, mask=rows < N, other=0.0)
        d = tl.load(d_out + place, mask=inside, other=0.0).to(tl.float32)
        activated, slope = _gate(raw, GATE)
        if GATE == 2:
            normed = wide * activated * inverse
            result = normed * factor
            sums += d * normed
            d *= factor
            d = inverse * (d - normed * (tl.sum(d * normed, 1) / WIDTH)[:, None])
            to_gate = d * wide * slope
            d *= activated
        else:
            normed = wide * inverse
            result = normed * factor * activated
            to_gate = d * normed * factor * slope
            d *= activated
            sums += d * normed
            d *= factor
            d = inverse * (d - normed * (tl.sum(d * normed, 1) / WIDTH)[:, None])
        tl.store(d_x + place, d.to(d_x.dtype.element_ty), mask=inside)
        tl.store(d_gate + place, to_gate.to(d_gate.dtype.element_ty), mask=inside)
        if OUT:
            tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)
    place = d_weight + (first * GROUPS + group) * WIDTH + width
    tl.store(place, tl.sum(sums, 0)[None, :], mask=width < WIDTH)


@triton.jit
def _product(gate, up, place, inside):
    """silu(gate), rounded as torch rounds it, and up, both float32; and the slope of silu."""
    raw = tl.load(gate + place, mask=inside, other=0.0)
    activated, slope = _gate(raw.to(tl.float32), 0)
    return activated.to(raw.dtype).to(tl.float32), slope, tl.load(up + place, mask=inside, other=0.0).to(tl.float32)


@kernel
def silu_product_kernel(gate, up, out, count, BLOCK: tl.constexpr):
    """silu(gate) * up of neighbouring numbers."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    activated, _slope, factor = _product(gate, up, place, inside)
    tl.store(out + place, (activated * factor).to(out.dtype.element_ty), mask=inside)


@kernel
def silu_product_backward_kernel(gate, up, d_out, d_gate, d_up, out, count, OUT: tl.constexpr, BLOCK: tl.constexpr):
    """The gradients of both factors; with OUT also the product itself, which may overwrite its own gradient."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    activated, slope, factor = _product(gate, up, place, inside)
    d = tl.load(d_out + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(d_gate + place, (d * factor * slope).to(d_gate.dtype.element_ty), mask=inside)
    tl.store(d_up + place, (d * activated).to(d_up.dtype.element_ty), mask=inside)
    if OUT:
        tl.store(out + place, (activated * factor).to(out.dtype.element_ty), mask=inside)


def why_not_norm(x: Tensor, gate: Tensor, weight: Tensor, groups: int = 1) -> str | None:
    """Why the kernels cannot norm x ``[..., groups * width]`` and multiply it by a gate, in words; None = they can."""
    return normalisation.why_not(x, weight, groups) or why_not_tensors(gate)


def why_not(gate: Tensor, up: Tensor) -> str | None:
    """Why the SwiGLU kernels cannot take these tensors, in words; None = they can."""
    if gate.dtype != up.dtype:
        return f"gate and up must have one dtype, not {gate.dtype} and {up.dtype}"
    return why_not_tensors(gate, up)


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, kind: str, dtype: torch.dtype, groups: int = 1
) -> Tensor:
    """The norm of x times its gate; see `ops.norms.op.gated_rms_norm`. `kind` is one of `GATES`."""
    return _gated_norm(x, gate, weight, None, eps, kind, dtype, groups).view(x.shape)


def gated_norm_projection(
    x: Tensor, gate: Tensor, weight: Tensor, matrix: Tensor, eps: float, kind: str, dtype: torch.dtype, groups: int = 1
) -> Tensor:
    """The same, gate ``[..., n]``, times a matrix ``[d, n]`` of `dtype` -> ``[..., d]``; normed rows are not kept."""
    return _gated_norm(x, gate, weight, matrix, eps, kind, dtype, groups).view(*gate.shape[:-1], len(matrix))


def _gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    matrix: Tensor | None,
    eps: float,
    kind: str,
    dtype: torch.dtype,
    groups: int,
) -> Tensor:
    size = weight.shape[0]
    flat, gates = x.reshape(-1, size).contiguous(), gate.reshape(-1, size)
    # Rows that are part of a wider projection are read in place.
    gates = gates if gates.stride(1) == 1 else gates.contiguous()
    gradients = torch.is_grad_enabled() and any(t.requires_grad for t in (x, gate, weight, matrix) if t is not None)
    weight = weight.contiguous()
    return cast(Tensor, _GatedNorm.apply(eps, groups, GATES[kind], dtype, gradients, flat, gates, weight, matrix))


class _GatedNorm(torch.autograd.Function):
    """Eps, groups, gate, dtype, whether there will be gradients; x, gate ``[N, G * D]``, weight ``[G * D]``, matrix.

    The matrix may be None. It multiplies one row of x, or several rows side by side.
    """

    @staticmethod
    def forward(ctx: Any, eps: float, groups: int, how: int, dtype: torch.dtype, gradients: bool, *inputs: Any) -> Any:
        x, gate, weight, matrix = inputs
        width = x.shape[1] // groups
        tile = normalisation.sizes(width)
        out = torch.empty_like(x, dtype=dtype)
        scale = x.new_empty((len(x), groups), dtype=torch.float32) if gradients else out
        with on_device(x):
            gated_norm_kernel[(triton.cdiv(len(x), tile["ROWS"]), groups)](
                x, gate, weight, out, scale, len(x), gate.stride(0), eps,
                WIDTH=width, GROUPS=groups, GATE=how, SCALE=gradients, **tile,
            )  # fmt: skip
        if gradients:
            ctx.groups, ctx.how = groups, how
            ctx.save_for_backward(x, gate, weight, scale, matrix)
        return out if matrix is None else torch.nn.functional.linear(out.view(-1, matrix.shape[1]), matrix)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight, scale, matrix = ctx.saved_tensors
        width = x.shape[1] // ctx.groups
        tile = normalisation.sizes(width, BACKWARD_TILE)
        count = normalisation.programs(x, len(x), tile["ROWS"], BACKWARD_PROGRAMS)
        d_x, d_gate = torch.empty_like(x), x.new_empty(x.shape, dtype=gate.dtype)
        d_weight = x.new_empty((count, x.shape[1]), dtype=torch.float32)
        # As in SwiGLU, the product overwrites its own gradient.
        d_rows = d_out.contiguous() if matrix is None else d_out @ matrix
        with on_device(x):
            gated_norm_backward_kernel[(count, ctx.groups)](
                x, gate, weight, scale, d_rows, d_x, d_gate, d_weight, d_rows, len(x), gate.stride(0),
                WIDTH=width, GROUPS=ctx.groups, GATE=ctx.how, OUT=matrix is not None, **tile,
            )  # fmt: skip
        d_matrix = d_out.t() @ d_rows if matrix is not None and ctx.needs_input_grad[8] else None
        return None, None, None, None, None, d_x, d_gate, d_weight.sum(0).to(weight.dtype), d_matrix


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up ``[...]``, both of one dtype."""
    return cast(Tensor, _SiluProduct.apply(gate.contiguous(), up.contiguous()))


def gated_projection(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """(silu(gate) * up) W^T of ``[..., n]`` and ``[d, n]``, all of one dtype; the product is not kept."""
    return cast(Tensor, _GatedProjection.apply(gate.contiguous(), up.contiguous(), weight))


def _multiply(gate: Tensor, up: Tensor) -> Tensor:
    out = torch.empty_like(gate)
    with on_device(gate):
        silu_product_kernel[(triton.cdiv(gate.numel(), BLOCK),)](gate, up, out, gate.numel(), BLOCK=BLOCK, num_warps=4)
    return out


def _factors(gate: Tensor, up: Tensor, d_out: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up from that of their product, and the product itself, written to `out`."""
    d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
    with on_device(gate):
        silu_product_backward_kernel[(triton.cdiv(gate.numel(), BLOCK),)](
            gate, up, d_out, d_gate, d_up, d_out if out is None else out, gate.numel(),
            OUT=out is not None, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return d_gate, d_up


class _SiluProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _multiply(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return _factors(gate, up, d_out.contiguous(), None)


class _GatedProjection(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        return torch.nn.functional.linear(_multiply(gate, up), weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        rows = d_out.reshape(-1, d_out.shape[-1])
        product = rows @ weight
        # The product overwrites its own gradient: one buffer less at the peak.
        d_gate, d_up = _factors(gate, up, product, product)
        d_weight = rows.t() @ product if ctx.needs_input_grad[2] else None
        return d_gate, d_up, d_weight
