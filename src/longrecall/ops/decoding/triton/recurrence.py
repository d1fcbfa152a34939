"""The recurrences of one decoding step: every head's state read, decayed, written to and read out, in place.

At batch 64 and more a step takes as long as to read and write the states. So a program loads one tile of a state, uses
it for everything, and stores it. All sizes are constants of the compiled kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from longrecall.ops.decoding.hopper import recurrence as hopper_decoding
from longrecall.ops.decoding.op import STEP
from longrecall.ops.kernels.dependent_launch import wait_for_previous, wait_if_prefetching, wait_unless_prefetching
from longrecall.ops.kernels.launch import interpreting, kernel, processors, why_not_tensors
from longrecall.ops.readable import check_numbers

GATES = {None: 0, "fixed": 1, "delta": 2, "channel": 3, "step": 4}
"""Kinds of log decay: none; given per head; -exp(A) softplus(a + b); log sigmoid per channel; Mamba-2's."""


LOG2E = tl.constexpr(1.4426950408889634)

MOST_KEYS = 1024
"""Keys of a state that a program of the delta rule holds at most."""


def why_not(state: Tensor) -> str | None:
    """Why a state ``[B, H, K, V]`` cannot be served, in words; None = it can."""
    if state.shape[2] > MOST_KEYS:
        return f"a state has at most {MOST_KEYS} keys, not {state.shape[2]}"
    return why_not_tensors(state)


@triton.jit
def _exp(x):
    return tl.exp2(x * LOG2E)


@triton.jit
def _softplus(x):
    """max(x, 0) + log(1 + e), e = exp(-|x|). A polynomial gives log(1 + e) / e with an error of at most 3e-8."""
    e = _exp(-tl.abs(x))
    p = e * 5.23250307e-3 - 2.95044725e-2
    p = p * e + 7.82247039e-2
    p = p * e - 1.36631399e-1
    p = p * e + 1.9105957e-1
    p = p * e - 2.48429695e-1
    p = p * e + 3.33190952e-1
    p = p * e - 4.99994931e-1
    p = p * e + 0.99999997
    return tl.maximum(x, 0.0) + p * e


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + _exp(-x))


@triton.jit
def _sums(a, b, c, d):
    return a + c, b + d


@triton.jit
def _three_sums(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _decay(raw, bias, A_log, low, high, GATE: tl.constexpr):
    """The decay of a head and, for Mamba-2, the time step that multiplies its values."""
    if GATE == 1:
        decay = _exp(raw.to(tl.float32))
        step = 1.0
    else:
        step = _softplus(raw.to(tl.float32) + bias.to(tl.float32))
        if GATE == 4:
            step = tl.minimum(tl.maximum(step, low), high)
        decay = _exp(-_exp(A_log.to(tl.float32)) * step)
    return decay, step


@triton.jit
def _log2(x, FAST: tl.constexpr):
    """log2(x). FAST: one instruction, with an error of at most 2^-22 for x from 1 to 2."""
    if FAST:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@triton.jit
def _channel_decay(rate, divisor, FAST: tl.constexpr):
    """The decay per channel as a power of two. Every thread computes the decays of all keys that it holds."""
    x = rate.to(tl.float32) * -LOG2E
    return tl.exp2((tl.maximum(x, 0.0) + _log2(1.0 + tl.exp2(-tl.abs(x)), FAST)) * (-1.0 / divisor))


@triton.jit
def _wide(raw, PAIRS: tl.constexpr, ONCE: tl.constexpr):
    """A tile in float32. PAIRS: it is bfloat16, two in a register, and one instruction extracts each.

    ONCE: the tile is used once. If it is used twice it is converted twice, to save the registers in between.
    """
    if PAIRS:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=&r,=&r,r", [raw],
            dtype=tl.float32, is_pure=ONCE, pack=2,
        )  # fmt: skip
    else:
        return raw.to(tl.float32)


@triton.jit
def _delta_rule(
    raw, q, k, rate, value, decay, strength, divisor, eps,
    GATE: tl.constexpr, NORMALISE: tl.constexpr, PAIRS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """A tile with all keys of a head -> the new tile, and what the query reads from it."""
    key = k.to(tl.float32)
    query = q.to(tl.float32)
    squares, key_squares, both = tl.reduce((query * query, key * key, query * key), 0, _three_sums)
    # The sums of the tile are scaled, not the keys: every thread holds many keys.
    query_scale, key_scale = 1.0, 1.0
    if NORMALISE:
        query_scale, key_scale = tl.rsqrt(squares + eps), tl.rsqrt(key_squares + eps)
    # Both sums use the old state: q S' = q S + (q k) written, so no second pass over it is needed.
    S = _wide(raw, PAIRS, False)
    if GATE == 3:
        fade = _channel_decay(rate, divisor, FAST)
        seen, asked = tl.reduce((S * (key * fade)[:, None], S * (query * fade)[:, None]), 0, _sums)
        kept = _wide(raw, PAIRS, False) * fade[:, None]
    else:
        seen, asked = tl.reduce((S * key[:, None], S * query[:, None]), 0, _sums)
        kept = _wide(raw, PAIRS, False) * decay
    written = strength * key_scale * (value - decay * key_scale * seen)
    return kept + key[:, None] * written[None, :], query_scale * (decay * asked + both * written)


@triton.jit
def _gated_rule(
    raw, q, k, rate, written, decay, divisor, GATE: tl.constexpr, PAIRS: tl.constexpr, FAST: tl.constexpr
):  # fmt: skip
    """The new tile, and what the query reads from it."""
    S = _wide(raw, PAIRS, True)
    if GATE == 3:
        S *= _channel_decay(rate, divisor, FAST)[:, None]
    else:
        S *= decay
    S += k.to(tl.float32)[:, None] * written[None, :]
    return S, tl.sum(S * q.to(tl.float32)[:, None], 0)


@triton.jit
def _tile_at(state, first, values, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr):
    """Pointers to BK keys from `first` on of one head's state, and a mask of those that exist."""
    keys = first + tl.arange(0, BK)[:, None]
    return state + keys * V + values[None, :], (keys < K) & (values < V)[None, :]


@kernel
def _recurrence_kernel(
    q, k, v, gate, bias, A_log, D, beta, state, out,
    scale, divisor, low, high, beta_factor, eps,
    q_row, k_row, v_row, gate_row, beta_row,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, SHARE: tl.constexpr, VALUE_HEADS: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, GATE: tl.constexpr, DELTA: tl.constexpr, NORMALISE: tl.constexpr,
    SKIP: tl.constexpr, FAST: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PREFETCH: tl.constexpr, EARLY: tl.constexpr = 0,
):  # fmt: skip
    """A block of values of one head's state; neighbouring programs have neighbouring blocks.

    PREFETCH: for few programs; each may load its tile of the state before it waits for the kernel before. Many programs
    have enough loads under way without it.
    """
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    REPEATS: tl.constexpr = HEADS // KEY_HEADS
    place = tl.program_id(0) // BLOCKS
    row = (place // HEADS).to(tl.int64)
    head = place % HEADS
    key_head = head // REPEATS
    # State heads are ordered by key head, then subhead, then value head of that key head. Subheads share the values.
    value_head = ((head // (SHARE * REPEATS)) * REPEATS + head % REPEATS) % VALUE_HEADS
    values = (tl.program_id(0) % BLOCKS) * BV + tl.arange(0, BV)
    in_values = values < V
    state += (row * HEADS + head) * K * V
    q, k = q + row * q_row + key_head * K, k + row * k_row + key_head * K
    channels = gate + row * gate_row + key_head * K
    # A tile of one number holds no pair.
    PAIRS: tl.constexpr = FAST and state.dtype.element_ty == tl.bfloat16 and BK * BV > 1
    if PREFETCH:
        wait_unless_prefetching(EARLY)
        tile, inside = _tile_at(state, 0, values, K, V, BK)
        held = tl.load(tile, mask=inside, other=0.0)
        wait_if_prefetching(EARLY)
    else:
        wait_for_previous(EARLY)
    rate, bias_of, A_of = 0.0, 0.0, 0.0
    if GATE == 1 or GATE == 2 or GATE == 4:
        rate = tl.load(gate + row * gate_row + head)
    if GATE == 2 or GATE == 4:
        bias_of, A_of = tl.load(bias + head), tl.load(A_log + head)
    value = tl.load(v + row * v_row + value_head * V + values, mask=in_values, other=0.0)
    if DELTA:
        strength = tl.load(beta + row * beta_row + head)
    y = tl.zeros([BV], tl.float32)
    for first in range(0, K, BK):
        keys = first + tl.arange(0, BK)
        in_keys = keys < K
        tile, inside = _tile_at(state, first, values, K, V, BK)
        raw = held if PREFETCH else tl.load(tile, mask=inside, other=0.0)
        key = tl.load(k + keys, mask=in_keys, other=0.0)
        query = tl.load(q + keys, mask=in_keys, other=0.0)
        rates = tl.load(channels + keys, mask=in_keys, other=0.0) if GATE == 3 else rate
        # Without this barrier a thread would wait for the first small load before it starts the others.
        tl.debug_barrier()
        new = value.to(tl.float32)
        decay, step = 1.0, 1.0
        if GATE == 1 or GATE == 2 or GATE == 4:
            decay, step = _decay(rate, bias_of, A_of, low, high, GATE)
        if DELTA:
            share = beta_factor * _sigmoid(strength.to(tl.float32))
            S, read = _delta_rule(raw, query, key, rates, new, decay, share, divisor, eps, GATE, NORMALISE, PAIRS, FAST)
        else:
            S, read = _gated_rule(raw, query, key, rates, new * step, decay, divisor, GATE, PAIRS, FAST)
        tl.store(tile, S.to(state.dtype.element_ty), mask=inside)
        y += read
    y *= scale
    if SKIP:
        y += value.to(tl.float32) * tl.load(D + head).to(tl.float32)
    tl.store(out + (row * HEADS + head) * V + values, y, mask=in_values)


def _tile(K: int, V: int, *, delta: bool, few: bool) -> tuple[int, int, int]:
    """Keys and values of one program, and its warps.

    The delta rule needs all keys at a time. With `few` programs no other work hides a load, so their tiles are narrow.

    Measured on an H200 (benchmarks/gpu_decoding.py).
    """
    keys, values = triton.next_power_of_2(K), triton.next_power_of_2(V)
    if delta:
        BK, BV = keys, min(values, 16 if few else 64, max(16, 8192 // keys))
    else:
        BK, BV = min(keys, 256), min(values, 16 if few else 64)
    return BK, BV, 4 if few or BK * BV > 8192 else 2


@dataclass(frozen=True)
class Gate:
    """The inputs of a step's decay: its kind (see GATES), the raw projection and its parameters."""

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
    same values (H = Hv * E; merged heads: Hv = 1). With `beta` ``[B, H]``, before its sigmoid, it is the delta rule;
    `normalise` then divides q and k by their L2 norm. `skip` ``[H]`` adds D * v. `tile`: keys and values of a program
    of the Triton kernel, and its warps; None chooses them, and between this kernel and the one for Hopper. Returns
    float32 ``[B, H, V]``.
    """
    batch, heads, K, V = state.shape
    check_numbers("recurrence", ("bias", gate.bias, heads), ("A_log", gate.A_log, heads), ("skip", skip, heads))
    out = torch.empty(batch, heads, V, device=state.device, dtype=torch.float32)
    busy = processors(state)
    few = batch * heads * triton.cdiv(V, 64) <= busy
    arguments = (
        q, k, v,
        *(state if x is None else x for x in (gate.raw, gate.bias, gate.A_log, skip, beta)),
        state, out,
        scale, gate.divisor, gate.low, gate.high, beta_factor, eps,
        q.stride(0), k.stride(0), v.stride(0),
        0 if gate.raw is None or gate.raw.dim() == 1 else gate.raw.stride(0),
        0 if beta is None else beta.stride(0),
    )  # fmt: skip
    constants = {
        "HEADS": heads, "KEY_HEADS": key_heads, "SHARE": share, "VALUE_HEADS": value_heads, "K": K, "V": V,
        "GATE": GATES[gate.kind], "DELTA": beta is not None, "NORMALISE": normalise, "SKIP": skip is not None,
    }  # fmt: skip
    if tile is None and not few and STEP.serves(state, keys=K, values=V, states=batch * heads, processors=busy):
        hopper_decoding.launch(arguments, batch * heads, constants)
        return out
    BK, BV, warps = tile or _tile(K, V, delta=beta is not None, few=few)
    _recurrence_kernel[(batch * heads * triton.cdiv(V, BV),)](
        *arguments, **constants, FAST=not interpreting(), BK=BK, BV=BV, PREFETCH=few and BK >= K, num_warps=warps
    )
    return out
