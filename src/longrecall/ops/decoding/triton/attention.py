"""Kernels of one decoding step of softmax attention: a cache with room for tokens to come, read by many programs.

How many columns of the cache are in use lies on the device, so the launches are the same for every token and can be
captured in a CUDA graph. The keys of one row and key head are split among programs, whose softmaxes a second launch
merges.
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
"""Width of a head; query heads of one key head, which share a program."""

PROGRAMS = 2
"""Programs for each multiprocessor, as far as there are keys for them."""

MOST_SPLITS = 128
"""Parts of a cache: one program merges them."""


class Cache(NamedTuple):
    """A layer's cache of `room` columns, written round and round."""

    key: Tensor
    """``[B, room, G, P]``, rotated."""
    value: Tensor
    """``[B, room, G, P]``."""
    places: Tensor
    """int64 ``[B, room]``: the position of the token in each column; -1 = padding, or nothing yet."""
    offset: Tensor
    """int64 ``[1]``: the column of row 0's token at position p is p + offset, and that of all rows' newest."""


@triton.jit
def _rotation(frequency, at, d, D: tl.constexpr):
    """Cosine and signed sine ``[BD]`` of the rotation at position `at`, the half that each channel turns with."""
    HALF: tl.constexpr = D // 2
    angle = at.to(tl.float64) * tl.load(frequency + d % HALF, mask=d < D, other=0.0)
    # Turns are taken off in float64; what is left is small enough for float32.
    turn: tl.constexpr = 6.283185307179586
    angle = (angle - tl.floor(angle / turn) * turn).to(tl.float32)
    return tl.cos(angle), tl.where(d < HALF, -tl.sin(angle), tl.sin(angle))


@triton.jit
def _turned(x, place, partner, inside, cosine, sine):
    """The numbers at `place`, rotated with those at `partner`, in float32."""
    own = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    return own * cosine + tl.load(x + partner, mask=inside, other=0.0).to(tl.float32) * sine


@triton.jit
def _absorbed(
    query, key, value, visible, scale, largest, total, mixed,
    DOT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The running softmax after more keys and values ``[BN, BD]``, of which some are visible."""
    logits = tl.zeros([query.shape[0], key.shape[0]], tl.float32)
    logits = product(query, tl.trans(key), logits, DOT, UPCAST, PRECISION) * scale
    logits = tl.where(visible[None, :], logits, float("-inf"))
    return softmax_step(logits, value, largest, total, mixed, DOT, UPCAST, PRECISION)


@kernel
def _attend_kernel(
    q, k, v, q_row, k_row, v_row, key, value, places, offset, position, frequency, meta_key, meta_value,
    out, sums, scale, room, window,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, META: tl.constexpr, SPLITS: tl.constexpr,
    BH: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
    DOT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr = 0,
):  # fmt: skip
    """One row, key head and part of the keys; the part with the newest token's column writes it."""
    wait_for_previous(EARLY)
    split, g, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    h, d, n = tl.arange(0, BH), tl.arange(0, BD), tl.arange(0, BN)
    own, channel = h < H // G, d < D
    kind = key.dtype.element_ty
    at = tl.load(position + b)
    column = tl.load(position) + tl.load(offset)
    used = tl.minimum(column + 1, room).to(tl.int32)
    newest = (column % room).to(tl.int32)
    cosine, sine = _rotation(frequency, at, d, D)
    partner = tl.where(d < D // 2, d + D // 2, d - D // 2)
    head = g * (H // G) + h
    inside = own[:, None] & channel[None, :]
    row = b * q_row + head[:, None] * D
    query = _turned(q, row + d[None, :], row + partner[None, :], inside, cosine[None, :], sine[None, :]).to(kind)
    new_key = _turned(k, b * k_row + g * D + d, b * k_row + g * D + partner, channel, cosine, sine).to(kind)
    new_value = tl.load(v + b * v_row + g * D + d, mask=channel, other=0.0)
    first = split * tl.cdiv(tl.cdiv(used, SPLITS), BN) * BN
    last = tl.minimum(used, first + tl.cdiv(tl.cdiv(used, SPLITS), BN) * BN)
    # The newest token's column is not read: one part begins with what is written there.
    writes = (newest >= first) & (newest < last)
    logit = tl.sum(query.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * scale
    largest = tl.where(writes, logit, float("-inf"))
    total = tl.where(writes, 1.0, 0.0) + tl.zeros([BH], tl.float32)
    mixed = tl.where(writes, new_value.to(tl.float32)[None, :], 0.0) + tl.zeros([BH, BD], tl.float32)
    if META:  # noqa: SIM102 (without meta tokens nothing of this is compiled)
        if split == SPLITS - 1:
            for start in range(0, META, BN):
                there = start + n < META
                place = ((start + n)[:, None] * G + g) * D + d[None, :]
                some = there[:, None] & channel[None, :]
                keys = tl.load(meta_key + place, mask=some, other=0.0)
                values = tl.load(meta_value + place, mask=some, other=0.0)
                largest, total, mixed = _absorbed(
                    query, keys, values, there, scale, largest, total, mixed, DOT, UPCAST, PRECISION
                )
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
            query, keys, values, visible, scale, largest, total, mixed, DOT, UPCAST, PRECISION
        )
    if writes:
        place = ((b * room + newest) * G + g) * D + d
        tl.store(key + place, new_key, mask=channel)
        tl.store(value + place, new_value, mask=channel)
        if g == 0:
            tl.store(places + b * room + newest, at)
    part = (b * H + head) * SPLITS + split
    mixed /= tl.where(total == 0, 1.0, total)[:, None]
    tl.store(out + part[:, None] * D + d[None, :], mixed.to(out.dtype.element_ty), mask=inside)
    if SPLITS > 1:
        tl.store(sums + part, largest + tl.log(total), mask=own)


@kernel
def _merge_kernel(
    parts, sums, out, SPLITS: tl.constexpr, BS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    EARLY: tl.constexpr = 0,
):  # fmt: skip
    """One head of one row: the mean of its parts ``[SPLITS, D]``, weighed by the softmax of their sums' logarithms."""
    wait_for_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    split, d = tl.arange(0, BS), tl.program_id(1) * BD + tl.arange(0, BD)
    weight = tl.load(sums + row * SPLITS + split, mask=split < SPLITS, other=float("-inf"))
    weight = tl.exp(weight - tl.max(weight, 0))
    place = parts + (row * SPLITS + split)[:, None] * D + d[None, :]
    part = tl.load(place, mask=(split < SPLITS)[:, None] & (d < D)[None, :], other=0.0)
    mixed = tl.sum(part * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + row * D + d, mixed.to(out.dtype.element_ty), mask=d < D)


class _Plan(NamedTuple):
    """Parts of the keys, keys and channels of a block, blocks under way at once, warps of a program."""

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
    # As many as leave shared memory for a second program on a multiprocessor.
    stages = 1 if not narrow else 3 if keys * columns <= 8192 else 2
    return _Plan(splits, keys, columns, stages, 4)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: Cache,
    position: Tensor,
    frequency: Tensor,
    window: int | None,
    meta: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Append one token per row to the cache, in place, and attend from it: ``[B, H * P]``.

    q ``[B, H * P]``, k, v ``[B, G * P]``, none of them rotated; `position` int64 ``[B]``. `frequency` float64
    ``[P / 2]``: radians a token. `window`: tokens that a token sees, itself included; None = all. `meta`: keys and
    values ``[M, G, P]``, rotated, that every token sees besides.
    """
    rows, room, groups, width = cache.key.shape
    heads, dtype = q.shape[1] // width, cache.key.dtype
    plan = _plan(rows * groups, room, width, dtype, processors(q))
    splits = plan.splits
    out = q.new_empty((rows, heads * width))
    parts = out if splits == 1 else q.new_empty((rows, heads, splits, width), dtype=torch.float32)
    sums = q.new_empty((rows, heads, splits) if splits > 1 else 1, dtype=torch.float32)
    _attend_kernel[(splits, groups, rows)](
        q, k, v, q.stride(0), k.stride(0), v.stride(0), *cache, position, frequency,
        *(meta or (cache.key, cache.value)), parts, sums, width**-0.5, room, 1 << 30 if window is None else window,
        H=heads, G=groups, D=width, META=0 if meta is None else meta[0].shape[0], SPLITS=splits,
        BH=block(heads // groups, MOST_HEADS), BN=plan.keys, BD=plan.columns, STAGES=plan.stages,
        num_warps=plan.warps, **arithmetic(dtype).constants(),
    )  # fmt: skip
    if splits > 1:
        BS = triton.next_power_of_2(splits)
        BD = max(16, min(triton.next_power_of_2(width), 4096 // BS))
        _merge_kernel[(rows * heads, triton.cdiv(width, BD))](
            parts, sums, out, SPLITS=splits, BS=BS, D=width, BD=BD, num_warps=4
        )
    return out
