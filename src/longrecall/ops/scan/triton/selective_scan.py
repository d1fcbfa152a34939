r"""The selective scan of Mamba-1 in Triton: a program walks over time with the states of a few channels in registers.

The mathematics is that of ops/scan/blocked.py (Gu and Dao 2023, section 3.2). The decay differs for every channel and
key, so no matrix product can compute a block of steps. Only rows of the batch and blocks of channels run in parallel, a
warp for each: a step is short, and one warp waits for no other. A few rows with many tokens do not fill a GPU.

A forward that has a backward keeps the state before every `CHUNK` tokens. The backward takes the last chunk first. It
walks forward through the chunk and stores the state before each token in a workspace, then walks back. All channels
share B and C; their gradients are written for each block of channels and added up afterwards. No atomics: two runs
agree to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from longrecall.ops.kernels.launch import kernel, on_device, why_not_tensors

CHUNK = 32
"""Tokens between kept states: these are N / 32 as large as x, and the workspace of the backward stays small."""

MOST_KEYS = 64
# Numbers of a state tile, and the widest state. A thread has 16 numbers of a tile; the backward has six tiles.
TILE, WIDEST = 512, 32
# Bytes of the workspace of a launch of the backward: enough for several thousand programs, little of a GPU's memory.
WORKSPACE = 2**28

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


def why_not(
    x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor | None = None, **_: Any
) -> str | None:
    """Why these inputs cannot be served, in words; None = they can."""
    reason = why_not_tensors(x, step, a, b, c, *(() if skip is None else (skip,)))
    if reason is None and a.shape[1] > MOST_KEYS:
        return f"a channel has at most {MOST_KEYS} numbers; got {a.shape[1]}"
    return reason


def selective_scan(
    x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The contract of `reference.selective_scan` and the skip connection, on a GPU; T at least 1.

    Each input may be bfloat16, float16 or float32. The state ``[B, N, I]`` and all arithmetic are float32.
    Returns outputs in the dtype of x and the final state in float32.
    """
    inputs = (x, step, a, b, c, skip, state)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs):
        y, final = _SelectiveScan.apply(*inputs)
        return y, final
    y, final, _ = _forward(_Operands.of(x, step, a, b, c, skip), state, keep=False)
    return y, final


@triton.jit
def _token(x, step, b, c, token, I, i, n, real_i, real_n, b_row, c_row, left):
    """x and step of the channels i, B and C of the keys n at one token, in float32; zeros if none are left."""
    own = real_i & (tl.zeros_like(i) + left > 0)
    shared = real_n & (tl.zeros_like(n) + left > 0)
    return (
        tl.load(x + token * I + i, mask=own, other=0.0).to(tl.float32),
        tl.load(step + token * I + i, mask=own, other=0.0).to(tl.float32),
        tl.load(b + token * b_row + n, mask=shared, other=0.0).to(tl.float32),
        tl.load(c + token * c_row + n, mask=shared, other=0.0).to(tl.float32),
    )


@kernel
def _forward_kernel(
    x, step, a, b, c, skip, state, y, starts, final, b_row, c_row, T, I, chunks,
    KEYS: tl.constexpr, BN: tl.constexpr, BI: tl.constexpr, C: tl.constexpr, SKIP: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """States are tiles [BN, BI], channels last as in memory. The decay is 2^(step * rate), rate = a / ln 2."""
    blocks = tl.cdiv(I, BI)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    n, i = tl.arange(0, BN), (tl.program_id(0) % blocks) * BI + tl.arange(0, BI)
    real_n, real_i = n < KEYS, i < I
    inside = real_n[:, None] & real_i[None, :]
    place = n[:, None] * I + i[None, :]
    rate = tl.load(a + i[None, :] * KEYS + n[:, None], mask=inside, other=0.0).to(tl.float32) * LOG2_E
    h = tl.load(state + row * (KEYS * I) + place, mask=inside, other=0.0)
    passed = tl.zeros([BI], tl.float32)
    if SKIP:
        passed = tl.load(skip + i, mask=real_i, other=0.0).to(tl.float32)
    x_t, step_t, b_t, c_t = _token(x, step, b, c, row * T, I, i, n, real_i, real_n, b_row, c_row, T)
    for chunk in range(chunks):
        if KEEP:
            tl.store(starts + (row * chunks + chunk) * (KEYS * I) + place, h, mask=inside)
        for t in range(chunk * C, tl.minimum(chunk * C + C, T)):
            token = row * T + t
            # The next token is loaded before this one is computed, so that nothing waits for memory.
            ahead = _token(x, step, b, c, token + 1, I, i, n, real_i, real_n, b_row, c_row, T - t - 1)
            h = tl.exp2(step_t[None, :] * rate) * h + b_t[:, None] * (step_t * x_t)[None, :]
            y_t = tl.sum(c_t[:, None] * h, 0) + passed * x_t
            tl.store(y + token * I + i, y_t.to(y.dtype.element_ty), mask=real_i)
            x_t, step_t, b_t, c_t = ahead
    tl.store(final + row * (KEYS * I) + place, h, mask=inside)


@triton.jit
def _lay_aside(
    x, step, b, c, h, rate, aside, token, count, I, i, n, real_i, real_n, b_row, c_row,
    BN: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """Write the states before each of `count` tokens, h before the first; return the one after the last."""
    x_t, step_t, b_t, _ = _token(x, step, b, c, token, I, i, n, real_i, real_n, b_row, c_row, count)
    for s in range(count):
        ahead = _token(x, step, b, c, token + s + 1, I, i, n, real_i, real_n, b_row, c_row, count - s - 1)
        tl.store(aside + s * (BN * BI), h)
        h = tl.exp2(step_t[None, :] * rate) * h + b_t[:, None] * (step_t * x_t)[None, :]
        x_t, step_t, b_t, _ = ahead
    return h


@kernel
def _backward_kernel(
    x, step, a, b, c, skip, starts, d_y, d_final, aside, d_x, d_step, d_bc, d_a, d_state,
    b_row, c_row, first, B, T, I, chunks,
    KEYS: tl.constexpr, BN: tl.constexpr, BI: tl.constexpr, C: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    """Rows from `first` on. d_bc [blocks, 2, B, T, N] has a part per block, d_a [B, N + 1, I] one per row, D's last."""
    blocks = tl.cdiv(I, BI)
    block, row = tl.program_id(0) % blocks, (tl.program_id(0) // blocks + first).to(tl.int64)
    n, i = tl.arange(0, BN), block * BI + tl.arange(0, BI)
    real_n, real_i = n < KEYS, i < I
    inside = real_n[:, None] & real_i[None, :]
    place = n[:, None] * I + i[None, :]
    rate = tl.load(a + i[None, :] * KEYS + n[:, None], mask=inside, other=0.0).to(tl.float32) * LOG2_E
    g = tl.load(d_final + row * (KEYS * I) + place, mask=inside, other=0.0).to(tl.float32)
    to_a, to_skip, passed = tl.zeros([BN, BI], tl.float32), tl.zeros([BI], tl.float32), tl.zeros([BI], tl.float32)
    if SKIP:
        passed = tl.load(skip + i, mask=real_i, other=0.0).to(tl.float32)
    aside += tl.program_id(0).to(tl.int64) * (C * BN * BI) + n[:, None] * BI + tl.arange(0, BI)[None, :]
    to_b = d_bc + (block * 2 * B + row) * T * KEYS + n
    to_c = to_b + B * T.to(tl.int64) * KEYS
    for back in range(chunks):
        begin = (chunks - 1 - back) * C
        count = tl.minimum(C, T - begin)
        h = tl.load(starts + (row * chunks + chunks - 1 - back) * (KEYS * I) + place, mask=inside, other=0.0)
        token = row * T + begin
        h = _lay_aside(x, step, b, c, h, rate, aside, token, count, I, i, n, real_i, real_n, b_row, c_row, BN, BI)
        # A thread reads states that other threads have stored, and later writes where others read: all must be done.
        tl.debug_barrier()
        token += count - 1
        x_t, step_t, b_t, c_t = _token(x, step, b, c, token, I, i, n, real_i, real_n, b_row, c_row, count)
        dy_t = tl.load(d_y + token * I + i, mask=real_i, other=0.0).to(tl.float32)
        before = tl.load(aside + (count - 1) * (BN * BI))
        for past in range(count):
            s = count - 1 - past
            ahead = _token(x, step, b, c, token - 1, I, i, n, real_i, real_n, b_row, c_row, s)
            dy_ahead = tl.load(d_y + (token - 1) * I + i, mask=real_i & (tl.zeros_like(i) + s > 0), other=0.0)
            before_ahead = tl.load(aside + tl.maximum(s - 1, 0) * (BN * BI))
            g += c_t[:, None] * dy_t[None, :]
            tl.store(to_c + (begin + s) * KEYS, tl.sum(h * dy_t[None, :], 1), mask=real_n)
            tl.store(to_b + (begin + s) * KEYS, tl.sum(g * (step_t * x_t)[None, :], 1), mask=real_n)
            to_written = tl.sum(g * b_t[:, None], 0)
            g *= tl.exp2(step_t[None, :] * rate)
            to_exponent = g * before
            to_step = tl.sum(to_exponent * rate, 0) * LN_2 + to_written * x_t
            tl.store(d_x + token * I + i, (to_written * step_t + passed * dy_t).to(d_x.dtype.element_ty), mask=real_i)
            tl.store(d_step + token * I + i, to_step.to(d_step.dtype.element_ty), mask=real_i)
            to_a += to_exponent * step_t[None, :]
            to_skip += dy_t * x_t
            h, before, dy_t, token = before, before_ahead, dy_ahead.to(tl.float32), token - 1
            x_t, step_t, b_t, c_t = ahead
        tl.debug_barrier()
    tl.store(d_state + row * (KEYS * I) + place, g, mask=inside)
    tl.store(d_a + row * ((KEYS + 1) * I) + place, to_a, mask=inside)
    tl.store(d_a + row * ((KEYS + 1) * I) + KEYS * I + i, to_skip, mask=real_i)


@dataclass(frozen=True)
class _Operands:
    """The inputs as the kernels read them; b and c may be columns of a wider tensor."""

    x: Tensor
    step: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    skip: Tensor | None

    @classmethod
    def of(cls, x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor | None) -> _Operands:
        x, step, a = x.contiguous(), step.contiguous(), a.contiguous()
        b, c = (tensor if _evenly_spaced(tensor) else tensor.contiguous() for tensor in (b, c))
        return cls(x, step, a, b, c, None if skip is None else skip.contiguous())

    @property
    def chunks(self) -> int:
        return -(-self.x.shape[1] // CHUNK)

    @property
    def tile(self) -> tuple[int, int]:
        """Keys and channels of a program, powers of two."""
        keys = int(triton.next_power_of_2(self.a.shape[1]))
        return keys, int(min(WIDEST, TILE // keys, triton.next_power_of_2(self.x.shape[2])))

    @property
    def blocks(self) -> int:
        return int(triton.cdiv(self.x.shape[2], self.tile[1]))

    def state(self, *leading: int) -> Tensor:
        """An empty float32 tensor ``[*leading, N, I]``."""
        return self.x.new_empty((*leading, self.a.shape[1], self.x.shape[2]), dtype=torch.float32)

    def pointers(self) -> tuple[Tensor, ...]:
        """The first arguments of both kernels. Without a skip connection x is passed in its place, and is not read."""
        return self.x, self.step, self.a, self.b, self.c, self.x if self.skip is None else self.skip

    def spacings(self) -> tuple[int, int]:
        """Numbers from one token to the next in b and in c."""
        b, c = ((t.stride(1) if _evenly_spaced(t) else t.shape[2]) for t in (self.b, self.c))
        return b, c

    def constants(self) -> dict[str, Any]:
        keys, channels = self.tile
        sizes = {"KEYS": self.a.shape[1], "BN": keys, "BI": channels, "C": CHUNK}
        return {**sizes, "SKIP": self.skip is not None, "num_warps": 1}


def _evenly_spaced(tensor: Tensor) -> bool:
    """Whether ``[B, T, N]`` has keys side by side and tokens at equal distances, also from one row to the next."""
    rows, length, _ = tensor.shape
    return tensor.stride(2) == 1 and (rows == 1 or tensor.stride(0) == length * tensor.stride(1))


class _SelectiveScan(torch.autograd.Function):
    """x, step, a, b, c, skip, state -> outputs and the final state."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor | None, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        operands = _Operands.of(x, step, a, b, c, skip)
        y, final, starts = _forward(operands, state, keep=True)
        ctx.save_for_backward(operands.x, operands.step, operands.a, operands.b, operands.c, operands.skip, starts)
        return y, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        *operands, starts = ctx.saved_tensors
        return _backward(_Operands(*operands), starts, *gradients)


def _forward(operands: _Operands, state: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, the final state and, if `keep`, the states before every chunk ``[B, chunks, N, I]`` (else unused)."""
    x, state = operands.x, state.contiguous()
    rows, length, channels = x.shape
    y, final = torch.empty_like(x), operands.state(rows)
    starts = operands.state(rows, operands.chunks) if keep else final
    with on_device(x):
        _forward_kernel[(rows * operands.blocks,)](
            *operands.pointers(), state, y, starts, final, *operands.spacings(), length, channels, operands.chunks,
            KEEP=keep, **operands.constants(),
        )  # fmt: skip
    return y, final, starts


def _backward(operands: _Operands, starts: Tensor, d_y: Tensor, d_final: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of x, step, a, b, c, skip and the initial state from those of the outputs and the final state."""
    x, a, skip = operands.x, operands.a, operands.skip
    rows, length, channels = x.shape
    keys, blocks, tile = a.shape[1], operands.blocks, operands.tile
    d_y, d_final = d_y.contiguous(), d_final.contiguous()
    d_x, d_step, d_state = torch.empty_like(x), torch.empty_like(operands.step), operands.state(rows)
    shared = x.new_empty((blocks, 2, rows, length, keys), dtype=torch.float32)
    own = x.new_empty((rows, keys + 1, channels), dtype=torch.float32)
    row_numbers = blocks * CHUNK * tile[0] * tile[1]
    together = min(rows, max(1, WORKSPACE // (4 * row_numbers)))
    aside = x.new_empty(together * row_numbers, dtype=torch.float32)
    with on_device(x):
        for first in range(0, rows, together):
            _backward_kernel[(min(together, rows - first) * blocks,)](
                *operands.pointers(), starts, d_y, d_final, aside, d_x, d_step, shared, own, d_state,
                *operands.spacings(), first, rows, length, channels, operands.chunks, **operands.constants(),
            )  # fmt: skip
    d_b, d_c = shared.sum(0) if blocks > 1 else shared[0]
    total = own.sum(0)
    d_skip = None if skip is None else total[keys].to(skip.dtype)
    return (
        d_x,
        d_step,
        total[:keys].t().to(a.dtype),
        d_b.to(operands.b.dtype),
        d_c.to(operands.c.dtype),
        d_skip,
        d_state,
    )
