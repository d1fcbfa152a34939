"""Kernels of one decoding step: everything between the matrix products of a layer, for one token of every sequence.

They write states in place. Only a generation loop that owns its buffers may call them (models/decoding.py); everywhere
else a state is a value. Numbers are rounded to the model's dtype at the same places as in the layers themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

GATES = {None: 0, "fixed": 1, "delta": 2, "channel": 3, "step": 4}
"""How the log decay forms: not at all; given per head; -exp(A) softplus(a + b); log sigmoid per channel; Mamba-2's."""


@triton.jit
def _softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _add_norm_kernel(stream, update, weight, out, size, eps, UPDATE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    x = tl.load(stream + row * size + columns, mask=inside, other=0.0)
    if UPDATE:
        added = x.to(tl.float32) + tl.load(update + row * size + columns, mask=inside, other=0.0).to(tl.float32)
        x = added.to(x.dtype)
        tl.store(stream + row * size + columns, x, mask=inside)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    y = x * scale * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + columns, y.to(out.dtype.element_ty), mask=inside)


def add_norm(stream: Tensor, update: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> Tensor:
    """stream ``[B, d]`` += update (in place), out = RMS norm of the sum * weight; returns `out`."""
    batch, size = stream.shape
    block = triton.next_power_of_2(size)
    _add_norm_kernel[(batch,)](
        stream,
        stream if update is None else update,
        weight,
        out,
        size,
        eps,
        UPDATE=update is not None,
        BLOCK=block,
        num_warps=4 if block <= 2048 else 8,
    )
    return out


@triton.jit
def _silu_product_kernel(gate, up, out, count, BLOCK: tl.constexpr):
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
    W: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < channels
    newest = tl.load(x + row * x_row + column, mask=inside, other=0.0)
    total = tl.load(weight + column * W + (W - 1), mask=inside, other=0.0).to(tl.float32) * newest.to(tl.float32)
    history = state + row * (W - 1) * channels + column
    for tap in tl.static_range(W - 1):
        past = tl.load(history + tap * channels, mask=inside, other=0.0)
        total += tl.load(weight + column * W + tap, mask=inside, other=0.0).to(tl.float32) * past.to(tl.float32)
        if tap > 0:
            tl.store(history + (tap - 1) * channels, past, mask=inside)
    if W > 1:
        tl.store(history + (W - 2) * channels, newest.to(state.dtype.element_ty), mask=inside)
    if BIAS:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    y = total * _sigmoid(total)
    tl.store(out + row * channels + column, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _conv_kernel(
    x0, r0, s0, w0, b0, o0, c0, x1, r1, s1, w1, b1, o1, c1, x2, r2, s2, w2, b2, o2, c2,
    blocks0, blocks1, W: tl.constexpr, BIAS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    if PARTS == 1:
        _taps(x0, r0, s0, w0, b0, o0, row, c0, block, W, BIAS, BLOCK)
    else:
        if block < blocks0:
            _taps(x0, r0, s0, w0, b0, o0, row, c0, block, W, BIAS, BLOCK)
        elif block < blocks0 + blocks1:
            _taps(x1, r1, s1, w1, b1, o1, row, c1, block - blocks0, W, BIAS, BLOCK)
        else:
            _taps(x2, r2, s2, w2, b2, o2, row, c2, block - blocks0 - blocks1, W, BIAS, BLOCK)


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


@triton.jit
def _recurrence_kernel(
    q, k, v, gate, bias, A_log, D, beta, state, out,
    scale, divisor, low, high, beta_factor, eps,
    q_row, k_row, v_row, gate_row, beta_row,
    heads, key_heads, share, value_heads, K, V,
    GATE: tl.constexpr, DELTA: tl.constexpr, NORMALISE: tl.constexpr, SKIP: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    row = (place // heads).to(tl.int64)
    head = place % heads
    repeats = heads // key_heads
    key_head = head // repeats
    # State heads: key head, then subhead, then value head of that key head; subheads share the values.
    value_head = ((head // (share * repeats)) * repeats + head % repeats) % value_heads
    values = tl.program_id(1) * BV + tl.arange(0, BV)
    in_values = values < V
    value = tl.load(v + row * v_row + value_head * V + values, mask=in_values, other=0.0).to(tl.float32)
    written = value
    decay = 1.0
    if GATE == 1:
        decay = tl.exp(tl.load(gate + row * gate_row + head).to(tl.float32))
    if GATE == 2 or GATE == 4:
        raw = tl.load(gate + row * gate_row + head).to(tl.float32) + tl.load(bias + head).to(tl.float32)
        step = _softplus(raw)
        if GATE == 4:
            step = tl.minimum(tl.maximum(step, low), high)
            written = value * step
        decay = tl.exp(-tl.exp(tl.load(A_log + head).to(tl.float32)) * step)
    y = tl.zeros([BV], tl.float32)
    for first in range(0, K, BK):
        keys = first + tl.arange(0, BK)
        in_keys = keys < K
        tile = state + ((row * heads + head) * K + keys[:, None]) * V + values[None, :]
        inside = in_keys[:, None] & in_values[None, :]
        S = tl.load(tile, mask=inside, other=0.0).to(tl.float32)
        query = tl.load(q + row * q_row + key_head * K + keys, mask=in_keys, other=0.0).to(tl.float32)
        key = tl.load(k + row * k_row + key_head * K + keys, mask=in_keys, other=0.0).to(tl.float32)
        if NORMALISE:
            query *= tl.rsqrt(tl.sum(query * query, 0) + eps)
            key *= tl.rsqrt(tl.sum(key * key, 0) + eps)
        if GATE == 3:
            rate = tl.load(gate + row * gate_row + key_head * K + keys, mask=in_keys, other=0.0).to(tl.float32)
            S *= tl.exp(-_softplus(-rate) / divisor)[:, None]
        elif GATE != 0:
            S *= decay
        if DELTA:
            # Both sums over the old state, side by side: q S' = q S + (q k) written needs no second pass.
            strength = beta_factor * _sigmoid(tl.load(beta + row * beta_row + head).to(tl.float32))
            written = strength * (value - tl.sum(S * key[:, None], 0))
        y += tl.sum(S * query[:, None], 0) + tl.sum(query * key, 0) * written
        S += key[:, None] * written[None, :]
        tl.store(tile, S.to(state.dtype.element_ty), mask=inside)
    y *= scale
    if SKIP:
        y += value * tl.load(D + head).to(tl.float32)
    tl.store(out + (row * heads + head) * V + values, y, mask=in_values)


def _tile(K: int, V: int, delta: bool) -> tuple[int, int, int]:
    """Keys and values of one program, and its warps. The delta rule needs all keys at once."""
    # Measured on an H200 (benchmarks/gpu_decoding.py): small tiles, many programs, so that loads are always under way.
    BV = min(triton.next_power_of_2(V), 64)
    if delta:
        BK = triton.next_power_of_2(K)
        return BK, min(BV, max(16, 8192 // BK)), 4
    return min(triton.next_power_of_2(K), 64), BV, 2


@dataclass(frozen=True)
class Gate:
    """What forms the decay of a step: its kind (see GATES), the raw projection and its parameters."""

    kind: str | None
    raw: Tensor | None = None
    bias: Tensor | None = None
    A_log: Tensor | None = None
    divisor: float = 1.0
    low: float = 0.0
    high: float = float("inf")


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    gate: Gate,
    *,
    scale: float,
    key_heads: int,
    value_heads: int,
    share: int = 1,
    beta: Tensor | None = None,
    beta_factor: float = 1.0,
    normalise: bool = False,
    skip: Tensor | None = None,
    eps: float = 1e-6,
    tile: tuple[int, int, int] | None = None,
) -> Tensor:
    """One step of gated linear attention or of the gated delta rule; `state` ``[B, H, K, V]`` is updated in place.

    q, k ``[B, G * K]`` of G `key_heads`, v ``[B, Hv * V]`` of Hv `value_heads`; `share` subheads E of a head write the
    same values (H = Hv * E; merged heads: Hv = 1). `beta` ``[B, H]`` before its sigmoid makes it the delta rule;
    `normalise` divides q and k by their L2 norm; `skip` ``[H]`` adds D * v. `tile`: keys
    and values that one program holds, and its warps; None chooses. Returns float32 ``[B, H, V]``.
    """
    batch, heads, K, V = state.shape
    out = torch.empty(batch, heads, V, device=state.device, dtype=torch.float32)
    BK, BV, warps = tile or _tile(K, V, delta=beta is not None)
    empty = state
    _recurrence_kernel[(batch * heads, triton.cdiv(V, BV))](
        q, k, v,
        *(empty if x is None else x for x in (gate.raw, gate.bias, gate.A_log, skip, beta)),
        state, out,
        scale, gate.divisor, gate.low, gate.high, beta_factor, eps,
        q.stride(0), k.stride(0), v.stride(0),
        0 if gate.raw is None or gate.raw.dim() == 1 else gate.raw.stride(0),
        0 if beta is None else beta.stride(0),
        heads, key_heads, share, value_heads, K, V,
        GATE=GATES[gate.kind], DELTA=beta is not None, NORMALISE=normalise, SKIP=skip is not None,
        BK=BK, BV=BV, num_warps=warps,
    )  # fmt: skip
    return out


@triton.jit
def _gated_norm_kernel(
    o, weights, gate, norm, out, terms, width, o_row, row_a, row_b, repeats, term_step, column_step,
    norm_step, gate_row, eps,
    WEIGHTED: tl.constexpr, GATED: tl.constexpr, GATE_FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
    y = total * tl.rsqrt(tl.sum(total * total, 0) / width + eps)
    y *= tl.load(norm + group * norm_step + column, mask=inside, other=0.0).to(tl.float32)
    if GATED and not GATE_FIRST:
        y *= activated
    tl.store(out + (row * groups + group) * width + column, y.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Sum:
    """Which parts of the recurrence's output ``[B, H, V]`` add up to one normed group, in steps of single numbers."""

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
    norm: Tensor,
    eps: float,
    dtype: torch.dtype,
    gate: Tensor | None = None,
    *,
    gate_first: bool = False,
) -> Tensor:
    """Sum, RMS norm of every group and silu gate: o float32 ``[B, H, V]`` -> ``[B, groups * width]`` in `dtype`.

    `norm` ``[width]`` serves every group, ``[groups * width]`` each its own. `gate` ``[B, groups * width]`` multiplies
    the normed sum, or with `gate_first` the sum (Mamba-2).
    """
    batch = o.shape[0]
    numbers = o[0].numel() if parts.terms == 1 else o[0].numel() // parts.terms
    width = numbers // groups
    out = torch.empty(batch, groups * width, device=o.device, dtype=dtype)
    block = triton.next_power_of_2(width)
    _gated_norm_kernel[(batch, groups)](
        o,
        o if parts.weights is None else parts.weights,
        o if gate is None else gate,
        norm,
        out,
        parts.terms,
        width,
        o.stride(0),
        parts.row_a,
        parts.row_b,
        parts.repeats,
        parts.term_step,
        parts.column_step,
        0 if norm.numel() == width else width,
        0 if gate is None else gate.stride(0),
        eps,
        WEIGHTED=parts.weights is not None,
        GATED=gate is not None,
        GATE_FIRST=gate_first,
        BLOCK=block,
        num_warps=1 if block <= 256 else 4 if block <= 2048 else 8,
    )
    return out
