r"""The walk of the gated delta rule cut into segments that run side by side, for calls with few states.

A program of `walk_kernel` (forward.py) goes from chunk to chunk. One row of 8 heads has only 16 programs, so most of a
GPU would have nothing to do. Over any stretch of tokens the state changes by an affine map, :math:`S' = A S + B`, where
A ``[K, K]`` depends on keys, betas and decays only. So the sequence is cut into segments:

1. `pieces_kernel` walks over them side by side without queries: from a state of zeros for B, and from the identity,
   without values, for A.
2. `starts_kernel` goes from segment to segment with one product each, and stores the state before every segment.
   `starts_in_memory_kernel` does so where a map does not fit into registers, or where the precision of float32 is
   wanted.
3. `walk_kernel` reads all segments side by side, each from its own state.

The first segment is walked from the true state and needs no A; the last one needs neither A nor B. The rounding is that
of a walk in one piece: A is computed like a state, in float32, and products with it are far more precise than the walk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton.language as tl
from torch import Tensor

from longrecall.ops.delta_rule.triton.forward import (
    CHUNK,
    carried,
    corrections_of,
    dot,
    exact_dot,
    numbers_of,
    rows_of,
    tile,
)
from longrecall.ops.kernels.launch import kernel

if TYPE_CHECKING:
    from longrecall.ops.delta_rule.triton.plan import Plan

WIDEST_IN_REGISTERS = 128
"""The most key channels of a map A that a program can hold as an operand."""


@kernel
def pieces_kernel(
    k, v, beta, cumulative, inverse, initial, ends, maps, T, chunks, segments,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, SUBHEADS: tl.constexpr, VALUE_HEADS: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """BV columns of B ``[rows, HEADS, segments - 1, K, V]`` or of A ``[rows, HEADS, segments - 2, K, K]``, float32.

    B of the first segment is the state after it. Blocks of columns are numbered segment by segment, those of B first.
    """
    block, state_row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    of_values = (segments - 1) * (V // BV)
    mapping = block >= of_values
    place = tl.where(mapping, block - of_values, block)
    blocks = tl.where(mapping, K // BV, V // BV)
    segment, first = place // blocks + tl.where(mapping, 1, 0), (place % blocks) * BV
    b, head = state_row // HEADS, state_row % HEADS
    group = head // (HEADS // KEY_HEADS)
    value_head = (group // SUBHEADS) * (HEADS // KEY_HEADS) + head % (HEADS // KEY_HEADS)
    square, channels, columns = tile(CHUNK, CHUNK, CHUNK, 0), tl.arange(0, K)[:, None], tl.arange(0, BV)[None, :]
    given = (channels < tl.where(segment == 0, K, 0)) & (columns < BV)
    S = tl.load(initial + state_row * K * V + tile(K, BV, V, first), mask=given, other=0.0).to(tl.float32)
    S += tl.where(channels == columns + tl.where(mapping, first, K), 1.0, 0.0)
    # For A the values are zeros: all their rows are taken to lie outside of the sequence.
    columns_of_v, tokens = tl.where(mapping, 0, first), tl.where(mapping, 0, T)
    per = (chunks + segments - 1) // segments
    for n in range(segment * per, (segment + 1) * per):
        start, here = n * CHUNK, state_row * chunks + n
        keys = rows_of(k, b, start, T, group, KEY_HEADS, K, 0, CHUNK, K)
        t = start + tl.arange(0, CHUNK)
        at = (b * T + t)[:, None] * (VALUE_HEADS * V) + value_head * V + columns_of_v + columns
        values = tl.load(v + at, mask=t[:, None] < tokens, other=0.0).to(tl.float32)
        strength = numbers_of(beta, b, start, T, head, HEADS, CHUNK)
        G = tl.load(cumulative + here * CHUNK + tl.arange(0, CHUNK))
        last = tl.load(cumulative + here * CHUNK + CHUNK - 1)
        P = tl.load(inverse + here * CHUNK * CHUNK + square)
        U = corrections_of(keys, values, strength, G, P, S, MODE)
        S = carried(keys, U, G, last, S, MODE)
    if mapping:
        A = maps + (state_row * (segments - 2) + segment - 1) * K * K
        tl.store(A + tile(K, BV, K, first), S)
    else:
        tl.store(ends + (state_row * (segments - 1) + segment) * K * V + tile(K, BV, V, first), S)


@kernel
def starts_kernel(
    ends, maps, initial, starts, segments,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """BV columns of the state before every segment, ``[rows, HEADS, segments, K, V]``, by S' = A S + B one by one.

    The state stays in registers while the next map is loaded. MODE "bf16" (or "bf16 wide"): both operands are split
    into a bfloat16 and a remainder, also bfloat16. The product of the two remainders is left out, which is an error of
    2^-16.
    """
    first, state_row = tl.program_id(0) * BV, tl.program_id(1).to(tl.int64)
    wide, square = tile(K, BV, V, first), tile(K, K, K, 0)
    ends += state_row * (segments - 1) * K * V
    maps += state_row * (segments - 2) * K * K
    starts += state_row * segments * K * V
    tl.store(starts + wide, tl.load(initial + state_row * K * V + wide))
    S = tl.load(ends + wide)
    tl.store(starts + K * V + wide, S)
    for s in range(1, segments - 1):
        A, B = tl.load(maps + (s - 1) * K * K + square), tl.load(ends + s * K * V + wide)
        high, coarse = A.to(tl.bfloat16), S.to(tl.bfloat16)
        low, fine = A - high.to(tl.float32), S - coarse.to(tl.float32)
        S = B + (dot(low, coarse, MODE) + dot(high, fine, MODE)) + dot(high, coarse, MODE)
        tl.store(starts + (s + 1) * K * V + wide, S)


@kernel
def starts_in_memory_kernel(
    ends, maps, initial, starts, segments,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """The same with the precision of float32, for any K.

    The state is written to memory, and the next product reads it back in blocks of BK rows.
    """
    first, state_row = tl.program_id(0) * BV, tl.program_id(1).to(tl.int64)
    wide = tile(K, BV, V, first)
    ends += state_row * (segments - 1) * K * V
    maps += state_row * (segments - 2) * K * K
    starts += state_row * segments * K * V
    tl.store(starts + wide, tl.load(initial + state_row * K * V + wide))
    tl.store(starts + K * V + wide, tl.load(ends + wide))
    for s in range(1, segments - 1):
        tl.debug_barrier()
        S = tl.load(ends + s * K * V + wide)
        for column in range(0, K, BK):
            A = tl.load(maps + (s - 1) * K * K + tile(K, BK, K, column))
            before = tl.load(starts + s * K * V + column * V + tile(BK, BV, V, first))
            S += exact_dot(A, before, MODE)
        tl.store(starts + (s + 1) * K * V + wide, S)


def starts(plan: Plan, inputs: tuple[Tensor, ...], solved: tuple[Tensor, Tensor], count: int) -> Tensor:
    """The state before each of `count` segments, two at least: ``[B, H, count, K, V]``, float32.

    `inputs` and `solved` as in `delta_rule._walk`. A segment has ceil(chunks / count) chunks, the last one the rest.
    """
    _, k, v, _, beta, _, state = inputs
    inverse, cumulative = solved
    heads, widths = (plan.rows, plan.heads), (plan.key_width, plan.value_width)
    ends = state.new_empty((*heads, count - 1, *widths))
    maps = state.new_empty((*heads, count - 2, plan.key_width, plan.key_width))
    # Two of these programs fit a multiprocessor, even with the constants that begin loads earlier.
    walking = {**plan.walking(), **ahead(plan, 1, 1)}
    # A GPU's blocks of values divide the keys as well; the interpreter has smaller heads.
    block = min(walking["BV"], plan.key_width)
    blocks = (count - 1) * (plan.value_width // block) + (count - 2) * (plan.key_width // block)
    pieces_kernel[(blocks, plan.rows * plan.heads)](
        k, v, beta, cumulative, inverse, state, ends, maps, plan.length, plan.chunks, count,
        **{**walking, "BV": block},
    )  # fmt: skip
    found = state.new_empty((*heads, count, *widths))
    _join(plan, (ends, maps, state, found), count)
    return found


def ahead(plan: Plan, programs: int, processors: int) -> dict[str, Any]:
    """Constants of a walk of so many programs: one that is alone on its multiprocessor begins its loads earlier."""
    alone = programs <= processors and plan.kept == torch.bfloat16 and plan.key_width <= WIDEST_IN_REGISTERS
    return {"num_stages": 3} if alone else {}


def _join(plan: Plan, tensors: tuple[Tensor, ...], count: int) -> None:
    """Launch one of the two kernels that go from segment to segment."""
    sizes = {"K": plan.key_width, "V": plan.value_width}
    states = plan.rows * plan.heads
    if plan.key_width <= WIDEST_IN_REGISTERS and not plan.mode.startswith(("tf32x3", "ieee")):
        # float16 is multiplied as tf32, with ten bits; two bfloat16 are more precise.
        mode = plan.mode if plan.kept == torch.bfloat16 else "bf16"
        columns = min(plan.value_width, 64)
        starts_kernel[(plan.value_width // columns, states)](
            *tensors, count, **sizes, BV=columns, MODE=mode,
            num_warps=8 if plan.key_width > 64 else 4, num_stages=3,
        )  # fmt: skip
        return
    columns, channels = min(plan.value_width, 32), min(plan.key_width, 64 if plan.key_width <= 128 else 32)
    starts_in_memory_kernel[(plan.value_width // columns, states)](
        *tensors, count, **sizes, BK=channels, BV=columns, MODE=plan.mode, num_warps=4, num_stages=1
    )
