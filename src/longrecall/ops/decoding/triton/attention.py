"""Kernels of one decoding step of softmax attention, over a cache of fixed size.

The number of columns in use is stored on the GPU. So the launches are the same for every token and can be captured in a
CUDA graph. The keys of one row and key head are split among programs; a second launch merges their softmaxes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longrecall.ops.kernels.dependent_launch import wait_for_previous
from longrecall.ops.kernels.launch import arithmetic, block, kernel, processors, product, product_block, softmax_step

WIDEST_HEAD, MOST_HEADS = 256, 128
"""The widest head, and the most query heads per key head: they share a program."""

PROGRAMS = 2
"""Programs per multiprocessor, if there are enough keys for them."""

MOST_SPLITS = 128
"""The most parts of a cache: one program merges them."""


class Cache(NamedTuple):
    """A layer's cache of `room` columns. After the last column the first one is written again."""

    key: Tensor
    """``[B, room, G, P]``, rotated."""
    value: Tensor
    """``[B, room, G, P]``."""
    places: Tensor
    """int64 ``[B, room]``: the position of the token in each column; -1 = padding, or nothing yet."""
    offset: Tensor
    """int64 ``[1]``: row 0's token at position p is in column p + offset. All rows write the newest to one column."""


class QueryKeyNorm(NamedTuple):
    """RMS norms of every query and key head, before they are turned."""

    query: Tensor
    """``[P]``."""
    key: Tensor
    """``[P]``."""
    eps: float
    offset: bool
    """Whether the scale is 1 + weight."""


@triton.jit
def _rotation(frequency, magnitude, at, d, ROTATED: tl.constexpr):
    """Cosine, signed sine and partner of each channel ``[BD]``; channels from ROTATED on are not rotated."""
    partner = tl.where(d < ROTATED // 2, d + ROTATED // 2, tl.where(d < ROTATED, d - ROTATED // 2, d))
    cosine, sine = tl.full(d.shape, 1.0, tl.float32), tl.zeros(d.shape, tl.float32)
    if ROTATED:
        HALF: tl.constexpr = ROTATED // 2
        angle = at.to(tl.float64) * tl.load(frequency + d % HALF, mask=d < ROTATED, other=0.0)
        # Whole turns are subtracted in float64; the rest is small enough for float32.
        turn: tl.constexpr = 6.283185307179586
        angle = (angle - tl.floor(angle / turn) * turn).to(tl.float32)
        cosine = tl.where(d < ROTATED, tl.cos(angle) * magnitude, 1.0)
        sine = tl.where(d < HALF, -tl.sin(angle), tl.where(d < ROTATED, tl.sin(angle), 0.0)) * magnitude
    return cosine, sine, partner


@triton.jit
def _turned(
    x, place, partner, inside, weight, d, with_d, eps, cosine, sine,
    D: tl.constexpr, AXIS: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """The numbers at `place`, channels `d` along AXIS, normed and turned with those at `partner`, in float32."""
    own = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(x + partner, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        least = 1.0 / tl.sqrt(tl.sum(own * own, AXIS, keep_dims=True) / D + eps)
        scale = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
        with_scale = tl.load(weight + with_d, mask=d < D, other=0.0).to(tl.float32)
        if OFFSET:
            scale += 1.0
            with_scale += 1.0
        own, other = own * least * scale, other * least * with_scale
    return own * cosine + other * sine


@triton.jit
def _capped(logits, cap, CAPPED: tl.constexpr):
    """cap * tanh(logits / cap)."""
    if CAPPED:
        logits = cap * (2.0 / (1.0 + tl.exp(logits * (-2.0 / cap))) - 1.0)
    return logits


@triton.jit
def _opening(gate, inside):
    """How far a gate is open, in float32."""
    return tl.sigmoid(tl.load(gate, mask=inside, other=0.0).to(tl.float32))


@triton.jit
def _absorbed(
    query, key, value, visible, scale, cap, largest, total, mixed,
    CAPPED: tl.constexpr, DOT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The running softmax after more keys and values ``[BN, BD]``, of which some are visible."""
    logits = tl.zeros([query.shape[0], key.shape[0]], tl.float32)
    logits = _capped(product(query, tl.trans(key), logits, DOT, UPCAST, PRECISION) * scale, cap, CAPPED)
    logits = tl.where(visible[None, :], logits, float("-inf"))
    return softmax_step(logits, value, largest, total, mixed, DOT, UPCAST, PRECISION)


@triton.jit
def _with_meta(
    query, meta_key, meta_value, g, scale, cap, largest, total, mixed,
    G: tl.constexpr, D: tl.constexpr, META: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    CAPPED: tl.constexpr, DOT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The running softmax after the META keys and values of key head `g` that every token sees."""
    d, n = tl.arange(0, BD), tl.arange(0, BN)
    for start in range(0, META, BN):
        there = start + n < META
        place = ((start + n)[:, None] * G + g) * D + d[None, :]
        some = there[:, None] & (d < D)[None, :]
        keys = tl.load(meta_key + place, mask=some, other=0.0)
        values = tl.load(meta_value + place, mask=some, other=0.0)
        largest, total, mixed = _absorbed(
            query, keys, values, there, scale, cap, largest, total, mixed, CAPPED, DOT, UPCAST, PRECISION
        )
    return largest, total, mixed


@kernel
def _attend_kernel(
    q, k, v, gate, q_row, q_head, k_row, v_row, gate_row, gate_head, q_weight, k_weight, eps,
    key, value, places, offset, position, frequency, magnitude, meta_key, meta_value,
    out, sums, scale, cap, room, window,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, META: tl.constexpr, SPLITS: tl.constexpr,
    ROTATED: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr, GATED: tl.constexpr, CAPPED: tl.constexpr,
    BH: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
    DOT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr = 0,
):  # fmt: skip
    """One row, key head and part of the keys; the part with the newest token's column writes it."""
    wait_for_previous(EARLY)
    split, g, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    h, d, n = tl.arange(0, BH), tl.arange(0, BD), tl.arange(0, BN)
    own, channel = h < H // G, d < D
    at = tl.load(position + b)
    column = tl.load(position) + tl.load(offset)
    used = tl.minimum(column + 1, room).to(tl.int32)
    newest = (column % room).to(tl.int32)
    cosine, sine, partner = _rotation(frequency, magnitude, at, d, ROTATED)
    head = g * (H // G) + h
    inside = own[:, None] & channel[None, :]
    row = b * q_row + head[:, None] * q_head
    query = _turned(
        q, row + d[None, :], row + partner[None, :], inside, q_weight, d[None, :], partner[None, :], eps,
        cosine[None, :], sine[None, :], D, 1, NORM, OFFSET,
    ).to(key.dtype.element_ty)  # fmt: skip
    row_of_key = b * k_row + g * D
    new_key = _turned(
        k, row_of_key + d, row_of_key + partner, channel, k_weight, d, partner, eps, cosine, sine, D, 0, NORM, OFFSET
    ).to(key.dtype.element_ty)
    new_value = tl.load(v + b * v_row + g * D + d, mask=channel, other=0.0)
    first = split * tl.cdiv(tl.cdiv(used, SPLITS), BN) * BN
    last = tl.minimum(used, first + tl.cdiv(tl.cdiv(used, SPLITS), BN) * BN)
    # The column of the newest token is not read: the part that writes it begins with these numbers.
    writes = (newest >= first) & (newest < last)
    logit = _capped(tl.sum(query.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * scale, cap, CAPPED)
    largest = tl.where(writes, logit, float("-inf"))
    total = tl.where(writes, 1.0, 0.0) + tl.zeros([BH], tl.float32)
    mixed = tl.where(writes, new_value.to(tl.float32)[None, :], 0.0) + tl.zeros([BH, BD], tl.float32)
    if META:  # noqa: SIM102 (without meta tokens nothing of this is compiled)
        if split == SPLITS - 1:
            largest, total, mixed = _with_meta(
                query, meta_key, meta_value, g, scale, cap, largest, total, mixed,
                G, D, META, BN, BD, CAPPED, DOT, UPCAST, PRECISION,
            )  # fmt: skip
    for start in tl.range(first, last, BN, num_stages=STAGES):
        where = start + n
        old = (where < last) & (where != newest)
        seen = tl.load(places + b * room + where, mask=old, other=-1)
        place = ((b * room + where)[:, None] * G + g) * D + d[None, :]
        some = old[:, None] & channel[None, :]
        keys = tl.load(key + place, mask=some, other=0.0)
        values = tl.load(value + place, mask=some, other=0.0)
        visible = (seen >= 0) & (seen <= at) & (seen > at - window)
        largest, total, mixed = _absorbed(
            query, keys, values, visible, scale, cap, largest, total, mixed, CAPPED, DOT, UPCAST, PRECISION
        )
    if writes:
        place = ((b * room + newest) * G + g) * D + d
        tl.store(key + place, new_key, mask=channel)
        tl.store(value + place, new_value, mask=channel)
        if g == 0:
            tl.store(places + b * room + newest, at)
    part = (b * H + head) * SPLITS + split
    mixed /= tl.where(total == 0, 1.0, total)[:, None]
    if GATED and SPLITS == 1:
        mixed *= _opening(gate + b * gate_row + head[:, None] * gate_head + d[None, :], inside)
    tl.store(out + part[:, None] * D + d[None, :], mixed.to(out.dtype.element_ty), mask=inside)
    if SPLITS > 1:
        tl.store(sums + part, largest + tl.log(total), mask=own)


@kernel
def _merge_kernel(
    parts, sums, gate, gate_row, gate_head, out,
    H: tl.constexpr, SPLITS: tl.constexpr, BS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, GATED: tl.constexpr,
    EARLY: tl.constexpr = 0,
):  # fmt: skip
    """One head of one row: the mean of its parts ``[SPLITS, D]``, weighted by the softmax of their sums' logarithms."""
    wait_for_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    split, d = tl.arange(0, BS), tl.program_id(1) * BD + tl.arange(0, BD)
    weight = tl.load(sums + row * SPLITS + split, mask=split < SPLITS, other=float("-inf"))
    weight = tl.exp(weight - tl.max(weight, 0))
    place = parts + (row * SPLITS + split)[:, None] * D + d[None, :]
    part = tl.load(place, mask=(split < SPLITS)[:, None] & (d < D)[None, :], other=0.0)
    mixed = tl.sum(part * weight[:, None], 0) / tl.sum(weight, 0)
    if GATED:
        mixed *= _opening(gate + row // H * gate_row + row % H * gate_head + d, d < D)
    tl.store(out + row * D + d, mixed.to(out.dtype.element_ty), mask=d < D)


class _Plan(NamedTuple):
    """Parts of the keys, keys and channels of a block, blocks that are loaded at a time, and warps of a program."""

    splits: int
    keys: int
    columns: int
    stages: int
    warps: int


def _plan(heads: int, room: int, width: int, dtype: torch.dtype, processors: int) -> _Plan:
    """How to read `heads` caches of `room` columns and `width` channels."""
    narrow = dtype == torch.bfloat16
    columns = product_block(width, WIDEST_HEAD, dtype)
    keys = max(64 if narrow else 32, min(128, (8192 if narrow else 4096) // columns))
    splits = min(max(1, PROGRAMS * processors // heads), triton.cdiv(room, keys), MOST_SPLITS)
    # As many as leave shared memory for a second program per multiprocessor.
    stages = 1 if not narrow else 3 if keys * columns <= 8192 else 2
    return _Plan(splits, keys, columns, stages, 4)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: Cache,
    position: Tensor,
    *,
    frequency: Tensor | None = None,
    magnitude: float = 1.0,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    meta: tuple[Tensor, Tensor] | None = None,
    norms: QueryKeyNorm | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """Append one token per row to the cache, in place, and attend from it: ``[B, H * P]``.

    Args:
        q: ``[B, H, P]``, neither normed nor turned; its last dimension is contiguous, as that of k and v.
        k: ``[B, G * P]``, as q.
        v: ``[B, G * P]``.
        cache: in which column the token goes.
        position: int64 ``[B]``.
        frequency: float64 ``[R / 2]``: radians a token of each pair among the first R channels; None = none is turned.
        magnitude: what turned channels are multiplied by.
        scale: of the scores; None = P ** -0.5.
        window: tokens that a token sees, itself included; None = all.
        soft_cap: scores s become soft_cap * tanh(s / soft_cap); None = they stay.
        meta: keys (turned) and values ``[M, G, P]`` that every token sees besides.
        norms: of queries and keys; None = they have none.
        gate: ``[B, H, P]``: its sigmoid multiplies the result; None = nothing does.
    """
    rows, room, groups, width = cache.key.shape
    heads, dtype = q.shape[1], cache.key.dtype
    plan = _plan(rows * groups, room, width, dtype, processors(q))
    splits = plan.splits
    out = q.new_empty((rows, heads * width))
    parts = out if splits == 1 else q.new_empty((rows, heads, splits, width), dtype=torch.float32)
    sums = q.new_empty((rows, heads, splits) if splits > 1 else 1, dtype=torch.float32)
    opened = q if gate is None else gate
    own = QueryKeyNorm(q, k, 0.0, False) if norms is None else norms
    _attend_kernel[(splits, groups, rows)](
        q, k, v, opened, q.stride(0), q.stride(1), k.stride(0), v.stride(0), opened.stride(0), opened.stride(1),
        own.query, own.key, own.eps, *cache, position, position if frequency is None else frequency, magnitude,
        *(meta or (cache.key, cache.value)), parts, sums, width**-0.5 if scale is None else scale,
        1.0 if soft_cap is None else float(soft_cap), room, 1 << 30 if window is None else window,
        H=heads, G=groups, D=width, META=0 if meta is None else meta[0].shape[0], SPLITS=splits,
        ROTATED=0 if frequency is None else 2 * frequency.shape[0], NORM=norms is not None, OFFSET=own.offset,
        GATED=gate is not None, CAPPED=soft_cap is not None,
        BH=block(heads // groups, MOST_HEADS), BN=plan.keys, BD=plan.columns, STAGES=plan.stages,
        num_warps=plan.warps, **arithmetic(dtype).constants(),
    )  # fmt: skip
    if splits > 1:
        BS = triton.next_power_of_2(splits)
        BD = max(16, min(triton.next_power_of_2(width), 4096 // BS))
        _merge_kernel[(rows * heads, triton.cdiv(width, BD))](
            parts, sums, opened, opened.stride(0), opened.stride(1), out,
            H=heads, SPLITS=splits, BS=BS, D=width, BD=BD, GATED=gate is not None, num_warps=4,
        )  # fmt: skip
    return out
