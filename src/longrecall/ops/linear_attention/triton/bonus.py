"""The outputs of RWKV's linear attention: its reads shifted by one token, plus the token itself times the bonus.

It is one pass over memory, forward and backward. The gradient of the bonus is a sum over tokens: every program adds up
its own tokens, and torch adds up the programs. No atomics: two runs agree to the bit.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from longrecall.ops.kernels.launch import kernel, on_device, why_not_tensors
from longrecall.ops.norms.triton.rms_norm import WIDEST, programs, sizes


@triton.jit
def _load(x, rows, head, column, there, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """Tokens `rows` of one head of ``[N, HEADS, WIDTH]``, 0 outside of the tensor."""
    mask = there & (column < WIDTH)
    return tl.load(x + (rows * HEADS + head) * WIDTH + column, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(x, value, rows, head, column, there, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    place = x + (rows * HEADS + head) * WIDTH + column
    tl.store(place, value.to(x.dtype.element_ty), mask=there & (column < WIDTH))


@kernel
def bonus_kernel(
    reads, first, r, k, v, bonus, out, N, T,
    HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    ROWS: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of tokens of one head."""
    head = tl.program_id(1)
    rows = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    key, value = tl.arange(0, KEY_BLOCK)[None, :], tl.arange(0, VALUE_BLOCK)[None, :]
    inside, begins = rows < N, rows % T == 0
    weight = tl.load(bonus + head * KEYS + key, mask=key < KEYS, other=0.0).to(tl.float32)
    match = _load(r, rows, head, key, inside, HEADS, KEYS) * _load(k, rows, head, key, inside, HEADS, KEYS)
    read = _load(reads, rows - 1, head, value, inside & (begins == 0), HEADS, VALUES)
    read += _load(first, rows // T, head, value, inside & begins, HEADS, VALUES)
    y = read + tl.sum(match * weight, 1)[:, None] * _load(v, rows, head, value, inside, HEADS, VALUES)
    _store(out, y, rows, head, value, inside, HEADS, VALUES)


@kernel
def bonus_backward_kernel(
    r, k, v, bonus, d_out, d_reads, d_first, d_r, d_k, d_v, sums, N, T,
    HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    ROWS: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Every `num_programs`-th tile of one head; `sums` float32 ``[programs, HEADS, KEYS]``."""
    start, head = tl.program_id(0), tl.program_id(1)
    key, value = tl.arange(0, KEY_BLOCK)[None, :], tl.arange(0, VALUE_BLOCK)[None, :]
    weight = tl.load(bonus + head * KEYS + key, mask=key < KEYS, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, KEY_BLOCK], tl.float32)
    for tile in range(start, tl.cdiv(N, ROWS), tl.num_programs(0)):
        rows = (tile * ROWS + tl.arange(0, ROWS).to(tl.int64))[:, None]
        inside = rows < N
        d = _load(d_out, rows, head, value, inside, HEADS, VALUES)
        # A read is part of the output of the next token.
        after = _load(d_out, rows + 1, head, value, inside & (rows % T + 1 < T), HEADS, VALUES)
        _store(d_reads, after, rows, head, value, inside, HEADS, VALUES)
        _store(d_first, d, rows // T, head, value, inside & (rows % T == 0), HEADS, VALUES)
        asks, answers = _load(r, rows, head, key, inside, HEADS, KEYS), _load(k, rows, head, key, inside, HEADS, KEYS)
        match = asks * answers
        _store(d_v, tl.sum(match * weight, 1)[:, None] * d, rows, head, value, inside, HEADS, VALUES)
        to_match = tl.sum(d * _load(v, rows, head, value, inside, HEADS, VALUES), 1)[:, None]
        total += to_match * match
        _store(d_r, to_match * weight * answers, rows, head, key, inside, HEADS, KEYS)
        _store(d_k, to_match * weight * asks, rows, head, key, inside, HEADS, KEYS)
    tl.store(sums + (start * HEADS + head) * KEYS + key, tl.sum(total, 0)[None, :], mask=key < KEYS)


def why_not(reads: Tensor, first: Tensor, r: Tensor, k: Tensor, v: Tensor, bonus: Tensor) -> str | None:
    """Why the kernels cannot serve `add_bonus` for these tensors, in words; None = they can."""
    widest = max(r.shape[-1], v.shape[-1])
    if widest > WIDEST:
        return f"heads of {widest} channels are too wide; the kernels hold up to {WIDEST}"
    return why_not_tensors(reads, first, r, k, v, bonus)


def add_bonus(reads: Tensor, first: Tensor, r: Tensor, k: Tensor, v: Tensor, bonus: Tensor) -> Tensor:
    """`ops.linear_attention.bonus.add_bonus`."""
    return cast(Tensor, _AddBonus.apply(*(x.contiguous() for x in (reads, first, r, k, v, bonus))))


def _constants(r: Tensor, v: Tensor) -> dict[str, int]:
    heads, keys = r.shape[2:]
    tile = sizes(max(keys, v.shape[3]))
    return {
        "HEADS": heads,
        "KEYS": keys,
        "VALUES": v.shape[3],
        "ROWS": tile["ROWS"],
        "KEY_BLOCK": triton.next_power_of_2(keys),
        "VALUE_BLOCK": triton.next_power_of_2(v.shape[3]),
        "num_warps": tile["num_warps"],
    }


class _AddBonus(torch.autograd.Function):
    """Reads, first, r, k, v, bonus, contiguous -> as v."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        reads, first, r, k, v, bonus = inputs
        ctx.save_for_backward(r, k, v, bonus)
        ctx.dtypes = reads.dtype, first.dtype
        constants, tokens = _constants(r, v), r.shape[0] * r.shape[1]
        out = torch.empty_like(v)
        with on_device(v):
            bonus_kernel[(triton.cdiv(tokens, constants["ROWS"]), r.shape[2])](
                reads, first, r, k, v, bonus, out, tokens, r.shape[1], **constants
            )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, ...]:
        r, k, v, bonus = ctx.saved_tensors
        constants, tokens, heads = _constants(r, v), r.shape[0] * r.shape[1], r.shape[2]
        count = max(1, programs(v, tokens, constants["ROWS"]) // heads)
        d_reads, d_v = torch.empty_like(v, dtype=ctx.dtypes[0]), torch.empty_like(v)
        d_first = torch.empty_like(v[:, :1], dtype=ctx.dtypes[1], memory_format=torch.contiguous_format)
        d_r, d_k = torch.empty_like(r), torch.empty_like(k)
        sums = torch.empty((count, heads, r.shape[3]), device=v.device, dtype=torch.float32)
        with on_device(v):
            bonus_backward_kernel[(count, heads)](
                r, k, v, bonus, d_out.contiguous(), d_reads, d_first, d_r, d_k, d_v, sums, tokens, r.shape[1],
                **constants,
            )  # fmt: skip
        return d_reads, d_first, d_r, d_k, d_v, sums.sum(0).to(bonus.dtype)
