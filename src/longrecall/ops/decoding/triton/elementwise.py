"""Kernels of one decoding step: everything between the matrix products of a layer, for one token of every sequence.

They write states in place, so only a decoding step that owns its buffers may call them (inference/step.py); everywhere
else a state is never changed. Numbers are rounded to the model's dtype at the same places as in the layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from longrecall.ops.kernels.dependent_launch import wait_for_previous, wait_if_prefetching, wait_unless_prefetching
from longrecall.ops.kernels.launch import kernel
from longrecall.ops.readable import check_numbers


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@kernel
def _add_norm_kernel(
    stream, update, weight, out, size, eps, offset,
    UPDATE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr = 0,
):  # fmt: skip
    wait_unless_prefetching(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    norm = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32) + offset
    wait_if_prefetching(EARLY)
    x = tl.load(stream + row * size + columns, mask=inside, other=0.0)
    if UPDATE:
        added = x.to(tl.float32) + tl.load(update + row * size + columns, mask=inside, other=0.0).to(tl.float32)
        x = added.to(x.dtype)
        tl.store(stream + row * size + columns, x, mask=inside)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    y = x * scale * norm
    tl.store(out + row * size + columns, y.to(out.dtype.element_ty), mask=inside)


def add_norm(
    stream: Tensor, update: Tensor | None, weight: Tensor, eps: float, out: Tensor, offset: float = 0.0
) -> Tensor:
    """stream ``[B, d]`` += update (in place), out = RMS norm of the sum * (weight + offset); returns `out`."""
    batch, size = stream.shape
    check_numbers("add_norm", ("weight", weight, size), ("update", update, batch * size))
    block = triton.next_power_of_2(size)
    _add_norm_kernel[(batch,)](
        stream,
        stream if update is None else update,
        weight,
        out,
        size,
        eps,
        offset,
        UPDATE=update is not None,
        BLOCK=block,
        num_warps=4 if block <= 2048 else 8,
    )
    return out


@kernel
def _silu_product_kernel(gate, up, out, count, BLOCK: tl.constexpr, EARLY: tl.constexpr = 0):
    wait_for_previous(EARLY)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    x = tl.load(gate + place, mask=inside, other=0.0)
    activated = (x.to(tl.float32) * _sigmoid(x.to(tl.float32))).to(x.dtype)
    y = activated.to(tl.float32) * tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=inside)


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, elementwise."""
    out = torch.empty_like(gate)
    _silu_product_kernel[(triton.cdiv(gate.numel(), 1024),)](gate, up, out, gate.numel(), BLOCK=1024, num_warps=4)
    return out


@triton.jit
def _taps(
    x, x_row, state, weight, bias, out, row, channels, block,
    W: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < channels
    total = tl.zeros([BLOCK], tl.float32)
    history = state + row * (W - 1) * channels + column
    wait_unless_prefetching(EARLY)
    last = tl.load(weight + column * W + (W - 1), mask=inside, other=0.0).to(tl.float32)
    for tap in tl.static_range(W - 1):
        past = tl.load(history + tap * channels, mask=inside, other=0.0)
        total += tl.load(weight + column * W + tap, mask=inside, other=0.0).to(tl.float32) * past.to(tl.float32)
    wait_if_prefetching(EARLY)
    newest = tl.load(x + row * x_row + column, mask=inside, other=0.0)
    total = last * newest.to(tl.float32) + total
    # All threads must have read before one writes: a thread may store numbers that another one loads.
    tl.debug_barrier()
    for tap in tl.static_range(W - 2):
        past = tl.load(history + (tap + 1) * channels, mask=inside, other=0.0)
        tl.debug_barrier()
        tl.store(history + tap * channels, past, mask=inside)
    if W > 1:
        tl.store(history + (W - 2) * channels, newest.to(state.dtype.element_ty), mask=inside)
    if BIAS:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    y = total * _sigmoid(total)
    tl.store(out + row * channels + column, y.to(out.dtype.element_ty), mask=inside)


@kernel
def _conv_kernel(
    x0, r0, s0, w0, b0, o0, c0, x1, r1, s1, w1, b1, o1, c1, x2, r2, s2, w2, b2, o2, c2,
    blocks0, blocks1, W: tl.constexpr, BIAS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr = 0,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    if PARTS == 1:
        _taps(x0, r0, s0, w0, b0, o0, row, c0, block, W, BIAS, BLOCK, EARLY)
    else:
        if block < blocks0:
            _taps(x0, r0, s0, w0, b0, o0, row, c0, block, W, BIAS, BLOCK, EARLY)
        elif block < blocks0 + blocks1:
            _taps(x1, r1, s1, w1, b1, o1, row, c1, block - blocks0, W, BIAS, BLOCK, EARLY)
        else:
            _taps(x2, r2, s2, w2, b2, o2, row, c2, block - blocks0 - blocks1, W, BIAS, BLOCK, EARLY)


def convolve(parts: list[tuple[Tensor, Tensor, Tensor, Tensor | None]]) -> list[Tensor]:
    """Short convolution and SiLU of one token, one or three tensors in one launch.

    A part is x ``[B, C]``, its state ``[B, W - 1, C]`` (updated in place), weight ``[C, W]`` and bias ``[C]`` or None.
    """
    outs = [torch.empty(x.shape, device=x.device, dtype=x.dtype) for x, *_ in parts]
    width, has_bias = parts[0][2].shape[1], parts[0][3] is not None
    block = 256
    counts = [triton.cdiv(x.shape[1], block) for x, *_ in parts]
    arguments: list[object] = []
    for (x, state, weight, bias), out in zip(parts, outs, strict=True):
        check_numbers("convolve", ("weight", weight, x.shape[1] * width), ("bias", bias, x.shape[1]))
        arguments += [x, x.stride(0), state, weight, weight if bias is None else bias, out, x.shape[1]]
    while len(arguments) < 21:
        arguments += arguments[:7]
    _conv_kernel[(parts[0][0].shape[0], sum(counts))](
        *arguments,
        counts[0],
        counts[1] if len(counts) > 1 else 0,
        W=width,
        BIAS=has_bias,
        PARTS=len(parts),
        BLOCK=block,
        num_warps=4,
    )
    return outs


@kernel
def _gated_norm_kernel(
    o, weights, gate, norm, out, terms, width, o_row, row_a, row_b, repeats, term_step, column_step,
    norm_step, gate_row, eps,
    WEIGHTED: tl.constexpr, GATED: tl.constexpr, GATE_FIRST: tl.constexpr, NORMED: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr = 0,
):  # fmt: skip
    wait_for_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    groups = tl.num_programs(1)
    column = tl.arange(0, BLOCK)
    inside = column < width
    first = o + row * o_row + (group // repeats) * row_a + (group % repeats) * row_b + group * column_step
    total = tl.zeros([BLOCK], tl.float32)
    for term in range(terms):
        x = tl.load(first + term * term_step + column, mask=inside, other=0.0)
        if WEIGHTED:
            x *= tl.load(weights + term * groups + group).to(tl.float32)
        total += x
    if GATED:
        z = tl.load(gate + row * gate_row + group * width + column, mask=inside, other=0.0).to(tl.float32)
        activated = z * _sigmoid(z)
        if GATE_FIRST:
            total *= activated
    y = total
    if NORMED:
        y *= tl.rsqrt(tl.sum(total * total, 0) / width + eps)
        y *= tl.load(norm + group * norm_step + column, mask=inside, other=0.0).to(tl.float32)
    if GATED and not GATE_FIRST:
        y *= activated
    tl.store(out + (row * groups + group) * width + column, y.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Sum:
    """Which parts of the recurrence's output ``[B, H, V]`` add up to a group of the norm; steps count numbers."""

    terms: int = 1
    row_a: int = 0
    row_b: int = 0
    repeats: int = 1
    term_step: int = 0
    column_step: int = 0
    weights: Tensor | None = None
    """``[terms, groups]``; None = ones."""


def gated_norm(
    o: Tensor,
    groups: int,
    parts: Sum,
    norm: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    gate: Tensor | None = None,
    *,
    gate_first: bool = False,
) -> Tensor:
    """Sum, RMS norm of every group and silu gate: o float32 ``[B, H, V]`` -> ``[B, groups * width]`` in `dtype`.

    `norm`: ``[width]`` is one weight for all groups, ``[groups * width]`` one for each; None = no norm. `gate`
    ``[B, groups * width]`` multiplies the normed sum or, with `gate_first`, the sum before the norm (Mamba-2).
    """
    batch = o.shape[0]
    numbers = o[0].numel() if parts.terms == 1 else o[0].numel() // parts.terms
    width = numbers // groups
    each = width if norm is None or norm.numel() == width else numbers
    check_numbers("gated_norm", ("norm", norm, each), ("gate", gate, batch * numbers))
    out = torch.empty(batch, groups * width, device=o.device, dtype=dtype)
    block = triton.next_power_of_2(width)
    _gated_norm_kernel[(batch, groups)](
        o,
        o if parts.weights is None else parts.weights,
        o if gate is None else gate,
        o if norm is None else norm,
        out,
        parts.terms,
        width,
        o.stride(0),
        parts.row_a,
        parts.row_b,
        parts.repeats,
        parts.term_step,
        parts.column_step,
        0 if norm is None or norm.numel() == width else width,
        0 if gate is None else gate.stride(0),
        eps,
        WEIGHTED=parts.weights is not None,
        GATED=gate is not None,
        GATE_FIRST=gate_first,
        NORMED=norm is not None,
        BLOCK=block,
        num_warps=1 if block <= 256 else 4 if block <= 2048 else 8,
    )
    return out
