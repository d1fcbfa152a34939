"""The recurrences of one decoding step: every head's state read, decayed, written to and read out, in place.

At batch 64 and more a step costs what it takes to read and write the states, so a program holds one tile of a state,
goes over it once, and knows all sizes when it is compiled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from longrecall.ops.triton.launch import kernel, processors

GATES = {None: 0, "fixed": 1, "delta": 2, "channel": 3, "step": 4}
"""How the log decay forms: not at all; given per head; -exp(A) softplus(a + b); log sigmoid per channel; Mamba-2's."""


@triton.jit
def _softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _sums(a, b, c, d):
    return a + c, b + d


@triton.jit
def _three_sums(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _decay(gate, bias, A_log, row, head, gate_row, low, high, GATE: tl.constexpr):
    """The decay of a head and, for Mamba-2, the step that its values are multiplied by."""
    raw = tl.load(gate + row * gate_row + head).to(tl.float32)
    if GATE == 1:
        decay = tl.exp(raw)
        step = 1.0
    else:
        step = _softplus(raw + tl.load(bias + head).to(tl.float32))
        if GATE == 4:
            step = tl.minimum(tl.maximum(step, low), high)
        decay = tl.exp(-tl.exp(tl.load(A_log + head).to(tl.float32)) * step)
    return decay, step


@triton.jit
def _channel_decay(gate, place, inside, divisor):
    rate = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    return tl.exp(-_softplus(-rate) / divisor)


@triton.jit
def _delta_rule(
    S, q, k, channels, keys, value, decay, strength, divisor, eps,
    GATE: tl.constexpr, NORMALISE: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """A tile with all keys of a head: the new one, and what the query reads from it."""
    in_keys = keys < K
    key = tl.load(k + keys, mask=in_keys, other=0.0).to(tl.float32)
    query = tl.load(q + keys, mask=in_keys, other=0.0).to(tl.float32)
    squares, key_squares, both = tl.reduce((query * query, key * key, query * key), 0, _three_sums)
    if NORMALISE:
        query_scale, key_scale = tl.rsqrt(squares + eps), tl.rsqrt(key_squares + eps)
        query *= query_scale
        key *= key_scale
        both *= query_scale * key_scale
    if GATE == 3:
        S *= _channel_decay(channels, keys, in_keys, divisor)[:, None]
    # Both sums over the old state, side by side: q S' = q S + (q k) written needs no second pass.
    seen, asked = tl.reduce((S * key[:, None], S * query[:, None]), 0, _sums)
    written = strength * (value - decay * seen)
    return S * decay + key[:, None] * written[None, :], decay * asked + both * written


@triton.jit
def _gated_rule(
    state, q, k, channels, values, written, decay, divisor,
    GATE: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """A block of values, BK keys at a time, in place: what the query reads from the new state."""
    y = tl.zeros([BV], tl.float32)
    for first in range(0, K, BK):
        keys = first + tl.arange(0, BK)
        in_keys = keys < K
        tile = state + keys[:, None] * V + values[None, :]
        inside = in_keys[:, None] & (values < V)[None, :]
        S = tl.load(tile, mask=inside, other=0.0).to(tl.float32)
        query = tl.load(q + keys, mask=in_keys, other=0.0).to(tl.float32)
        key = tl.load(k + keys, mask=in_keys, other=0.0).to(tl.float32)
        if GATE == 3:
            S *= _channel_decay(channels, keys, in_keys, divisor)[:, None]
        else:
            S *= decay
        S += key[:, None] * written[None, :]
        tl.store(tile, S.to(state.dtype.element_ty), mask=inside)
        y += tl.sum(S * query[:, None], 0)
    return y


@kernel
def _recurrence_kernel(
    q, k, v, gate, bias, A_log, D, beta, state, out,
    scale, divisor, low, high, beta_factor, eps,
    q_row, k_row, v_row, gate_row, beta_row,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, SHARE: tl.constexpr, VALUE_HEADS: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr,
    GATE: tl.constexpr, DELTA: tl.constexpr, NORMALISE: tl.constexpr, SKIP: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """A block of values of one head's state; neighbouring programs have neighbouring blocks."""
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    REPEATS: tl.constexpr = HEADS // KEY_HEADS
    place = tl.program_id(0) // BLOCKS
    row = (place // HEADS).to(tl.int64)
    head = place % HEADS
    key_head = head // REPEATS
    # State heads: key head, then subhead, then value head of that key head; subheads share the values.
    value_head = ((head // (SHARE * REPEATS)) * REPEATS + head % REPEATS) % VALUE_HEADS
    values = (tl.program_id(0) % BLOCKS) * BV + tl.arange(0, BV)
    in_values = values < V
    state += (row * HEADS + head) * K * V
    q += row * q_row + key_head * K
    k += row * k_row + key_head * K
    channels = gate + row * gate_row + key_head * K
    if DELTA:
        # The state's load is under way while everything else is fetched.
        keys = tl.arange(0, BK)
        tile = state + keys[:, None] * V + values[None, :]
        inside = (keys < K)[:, None] & in_values[None, :]
        S = tl.load(tile, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(v + row * v_row + value_head * V + values, mask=in_values, other=0.0).to(tl.float32)
    decay = 1.0
    written = value
    if GATE == 1 or GATE == 2 or GATE == 4:
        decay, step = _decay(gate, bias, A_log, row, head, gate_row, low, high, GATE)
        if GATE == 4:
            written = value * step
    if DELTA:
        strength = beta_factor * _sigmoid(tl.load(beta + row * beta_row + head).to(tl.float32))
        S, y = _delta_rule(S, q, k, channels, keys, value, decay, strength, divisor, eps, GATE, NORMALISE, K)
        tl.store(tile, S.to(state.dtype.element_ty), mask=inside)
    else:
        y = _gated_rule(state, q, k, channels, values, written, decay, divisor, GATE, K, V, BK, BV)
    y *= scale
    if SKIP:
        y += value * tl.load(D + head).to(tl.float32)
    tl.store(out + (row * HEADS + head) * V + values, y, mask=in_values)


def _tile(
    K: int, V: int, rows: int, processors: int, *, delta: bool, channel: bool, narrow: bool
) -> tuple[int, int, int]:
    """Keys and values of one program, and its warps, for `rows` states, `narrow` ones in 16 bits.

    The delta rule needs all keys at once.

    Measured on an H200 (benchmarks/gpu_decoding.py).
    """
    keys, values = triton.next_power_of_2(K), triton.next_power_of_2(V)
    if delta:
        size, warps = (4096, 2) if narrow else (8192, 4)
        return keys, min(values, 64, max(16, size // keys)), warps
    if rows * triton.cdiv(V, 64) <= processors:
        # Too few programs to hide a load behind others: narrow ones, which read all their keys at once.
        return min(keys, 256), min(values, 16), 4
    if channel:
        # A row of a merged state holds the values of several heads.
        merged = values >= 1024
        if keys >= 256 and not narrow:
            return 256, min(values, 64 if merged else 32), 4
        return min(keys, 128 if merged and keys >= 256 else 64), min(values, 64), 2
    return min(keys, 128), min(values, 64), 4


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
    its option `normalise` divides q and k by their L2 norm. `skip` ``[H]`` adds D * v. `tile`: keys and values that
    one program holds, and its warps; None chooses. Returns float32 ``[B, H, V]``.
    """
    batch, heads, K, V = state.shape
    out = torch.empty(batch, heads, V, device=state.device, dtype=torch.float32)
    delta = beta is not None
    kind = {"delta": delta, "channel": gate.kind == "channel", "narrow": state.dtype.itemsize == 2}
    BK, BV, warps = tile or _tile(K, V, batch * heads, processors(state), **kind)
    _recurrence_kernel[(batch * heads * triton.cdiv(V, BV),)](
        q, k, v,
        *(state if x is None else x for x in (gate.raw, gate.bias, gate.A_log, skip, beta)),
        state, out,
        scale, gate.divisor, gate.low, gate.high, beta_factor, eps,
        q.stride(0), k.stride(0), v.stride(0),
        0 if gate.raw is None or gate.raw.dim() == 1 else gate.raw.stride(0),
        0 if beta is None else beta.stride(0),
        HEADS=heads, KEY_HEADS=key_heads, SHARE=share, VALUE_HEADS=value_heads, K=K, V=V,
        GATE=GATES[gate.kind], DELTA=delta, NORMALISE=normalise, SKIP=skip is not None,
        BK=BK, BV=BV, num_warps=warps,
    )  # fmt: skip
    return out
