r"""The linear recurrence :math:`h_t = e^{g_t} h_{t-1} + x_t` in Triton, in either direction of time.

A sequence is cut into chunks. Where there are several, one launch walks through all of them side by side from a state
of zeros and keeps what each ends with and the product of its decays; a second one makes the states at their beginnings
of these. The last launch walks through all chunks again, from those states, and writes h. x and the decays are read
twice, and a GPU is full for one row too. Two runs agree to the bit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longrecall.ops.kernels.launch import kernel, on_device, why_not_tensors
from longrecall.ops.linear_recurrence.gradient import differentiable

CHUNK = 64
"""Tokens that a program walks through: long enough that their states are few, short enough that programs are many."""

CHANNELS = 64
"""Channels of a program, one warp: two for each thread."""

LOG2_E = tl.constexpr(1.4426950408889634)


def why_not(*tensors: Tensor | None, **named: Tensor | None) -> str | None:
    """Why these inputs cannot be served, in words; None = they can."""
    return why_not_tensors(*(tensor for tensor in (*tensors, *named.values()) if tensor is not None))


def linear_recurrence(x: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The contract of `reference.linear_recurrence` in float32, on a GPU; T at least 1."""
    return differentiable(scan, x, log_decay, state)


@triton.jit
def _token(x, decay, row, t, T, C, c, real, left, REVERSE: tl.constexpr):
    """x and the decay from one token to the next, in the order of the walk, at its t-th; zeros if none are left."""
    inside = real & (tl.zeros_like(c) + left > 0)
    token = T - 1 - t if REVERSE else t
    # Backwards a token is multiplied by the decay of the one after it.
    of = token + 1 if REVERSE else token
    decay_t = tl.load(decay + (row * T + of) * C + c, mask=inside & (tl.zeros_like(c) + of < T), other=0.0)
    return tl.load(x + (row * T + token) * C + c, mask=inside, other=0.0), tl.exp2(decay_t * LOG2_E)


@triton.jit
def _place(blocks, chunks, C, BC: tl.constexpr):
    """Row (int64), chunk and channels of a program, and which of these there are."""
    program = tl.program_id(0)
    chunk, block = program % chunks, (program // chunks) % blocks
    c = block * BC + tl.arange(0, BC)
    return (program // (chunks * blocks)).to(tl.int64), chunk, c, c < C


@kernel
def _ends_kernel(
    x, decay, ends, products, T, C, blocks, chunks, SIZE: tl.constexpr, BC: tl.constexpr, REVERSE: tl.constexpr
):  # fmt: skip
    """What every chunk ends with from a state of zeros, and the product of its decays: ``[B, chunks, C]``."""
    row, chunk, c, real = _place(blocks, chunks, C, BC)
    h, product = tl.zeros([BC], tl.float32), tl.zeros([BC], tl.float32) + 1.0
    begin, count = chunk * SIZE, tl.minimum(SIZE, T - chunk * SIZE)
    x_t, decay_t = _token(x, decay, row, begin, T, C, c, real, count, REVERSE)
    for s in range(count):
        following = _token(x, decay, row, begin + s + 1, T, C, c, real, count - s - 1, REVERSE)
        h = decay_t * h + x_t
        product *= decay_t
        x_t, decay_t = following
    tl.store(ends + (row * chunks + chunk) * C + c, h, mask=real)
    tl.store(products + (row * chunks + chunk) * C + c, product, mask=real)


@kernel
def _starts_kernel(ends, products, state, starts, C, blocks, chunks, BC: tl.constexpr):
    """The states at the beginnings of the chunks ``[B, chunks, C]``; a program for each row and block of channels."""
    row, _, c, real = _place(blocks, 1, C, BC)
    h = tl.load(state + row * C + c, mask=real, other=0.0)
    for chunk in range(chunks):
        place = (row * chunks + chunk) * C + c
        tl.store(starts + place, h, mask=real)
        h = tl.load(products + place, mask=real, other=0.0) * h + tl.load(ends + place, mask=real, other=0.0)


@kernel
def _walk_kernel(
    x, decay, starts, out, T, C, blocks, chunks, SIZE: tl.constexpr, BC: tl.constexpr, REVERSE: tl.constexpr
):  # fmt: skip
    row, chunk, c, real = _place(blocks, chunks, C, BC)
    h = tl.load(starts + (row * chunks + chunk) * C + c, mask=real, other=0.0)
    begin, count = chunk * SIZE, tl.minimum(SIZE, T - chunk * SIZE)
    x_t, decay_t = _token(x, decay, row, begin, T, C, c, real, count, REVERSE)
    for s in range(count):
        following = _token(x, decay, row, begin + s + 1, T, C, c, real, count - s - 1, REVERSE)
        h = decay_t * h + x_t
        token = T - 1 - begin - s if REVERSE else begin + s
        tl.store(out + (row * T + token) * C + c, h, mask=real)
        x_t, decay_t = following


def scan(x: Tensor, log_decay: Tensor, state: Tensor, *, reverse: bool = False) -> Tensor:
    """The contract of `gradient.Scan` in float32."""
    x, log_decay = x.contiguous(), log_decay.contiguous()
    state = torch.zeros_like(state) if reverse else state.contiguous()
    rows, length, channels = x.shape
    width = min(CHANNELS, triton.next_power_of_2(channels))
    blocks, chunks = triton.cdiv(channels, width), triton.cdiv(length, CHUNK)
    sizes: dict[str, Any] = {"SIZE": CHUNK, "BC": width, "REVERSE": reverse, "num_warps": 1}
    out = torch.empty_like(x)
    with on_device(x):
        if chunks == 1:
            starts = state
        else:
            ends, products, starts = (x.new_empty((rows, chunks, channels)) for _ in range(3))
            _ends_kernel[(rows * blocks * chunks,)](
                x, log_decay, ends, products, length, channels, blocks, chunks, **sizes
            )
            _starts_kernel[(rows * blocks,)](
                ends, products, state, starts, channels, blocks, chunks, BC=width, num_warps=1
            )
        _walk_kernel[(rows * blocks * chunks,)](x, log_decay, starts, out, length, channels, blocks, chunks, **sizes)
    return out
