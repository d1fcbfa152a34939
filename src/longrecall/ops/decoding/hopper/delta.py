"""The delta rule's decoding step in Gluon: a tile of a state is copied to shared memory and read from there twice.

So a thread needs few registers, and many programs share a multiprocessor and wait for memory at the same time. The
small inputs are loaded meanwhile. Norms scale the sums of a tile, not the keys: every thread holds many keys.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from longrecall.ops.decoding.hopper.parts import channel_decay, head_decay, heads_of, sigmoid, wait_for_previous, wide
from longrecall.ops.kernels.gluon import async_load, barrier, gluon_kernel


@gluon.jit
def _sums(a, b, c, d):
    return a + c, b + d


@gluon.jit
def _three_sums(a, b, c, d, e, f):
    return a + d, b + e, c + f


@gluon.jit
def _faded(raw, decay, GATE: gl.constexpr):
    """A tile in float32 times the decay, which is one per key or one for all."""
    if GATE == 0:
        S = wide(raw)
    elif GATE == 3:
        S = wide(raw) * decay[:, None]
    else:
        S = wide(raw) * decay
    return S


@gluon_kernel
def delta_step_kernel(
    q, k, v, gate, bias, A_log, D, beta, state, out,
    scale, divisor, low, high, beta_factor, eps,
    q_row, k_row, v_row, gate_row, beta_row,
    HEADS: gl.constexpr, KEY_HEADS: gl.constexpr, SHARE: gl.constexpr, VALUE_HEADS: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, GATE: gl.constexpr, NORMALISE: gl.constexpr, SKIP: gl.constexpr,
    BV: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr, EARLY: gl.constexpr = 0,
):  # fmt: skip
    """All keys of BV values of a state; arguments as in triton/recurrence.py. ROWS: neighbouring keys of a thread."""
    if EARLY != 0:
        wait_for_previous()
    UNITS: gl.constexpr = BV // 8
    TILE: gl.constexpr = gl.BlockedLayout([ROWS, 8], [32 // UNITS, UNITS], [WARPS, 1], [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    KEYS: gl.constexpr = gl.SliceLayout(1, TILE)
    BLOCKS: gl.constexpr = V // BV
    keys = gl.arange(0, K, layout=KEYS)
    values = gl.program_id(0) % BLOCKS * BV + gl.arange(0, BV, layout=gl.SliceLayout(0, TILE))
    place = gl.program_id(0) // BLOCKS
    tile = state + place.to(gl.int64) * (K * V) + keys[:, None] * V + values[None, :]
    room = gl.allocate_shared_memory(gl.bfloat16, [K, BV], gl.SwizzledSharedLayout(8, 1, 1, [1, 0]))
    async_load(room, tile)
    async_copy.commit_group()
    row, head, key_head, value_head = heads_of(place, HEADS, KEY_HEADS, SHARE, VALUE_HEADS)
    query = gl.load(q + row * q_row + key_head * K + keys).to(gl.float32)
    key = gl.load(k + row * k_row + key_head * K + keys).to(gl.float32)
    value = gl.load(v + row * v_row + value_head * V + values).to(gl.float32)
    decay = 1.0
    if GATE == 3:
        rate = gl.load(gate + row * gate_row + key_head * K + gl.arange(0, K, layout=LINE))
        decay = gl.convert_layout(channel_decay(rate, divisor), KEYS)
    elif GATE != 0:
        decay, _ = head_decay(gate + row * gate_row, bias, A_log, head, low, high, GATE)
    strength = beta_factor * sigmoid(gl.load(beta + row * beta_row + head).to(gl.float32))
    squares, key_squares, both = gl.reduce((query * query, key * key, query * key), 0, _three_sums)
    query_scale, key_scale = scale, 1.0
    if NORMALISE:
        query_scale, key_scale = scale * gl.rsqrt(squares + eps), gl.rsqrt(key_squares + eps)
    async_copy.wait_group(0)
    barrier()
    # Both sums use the old state: q S' = q S + (q k) written, so no second pass over it is needed.
    S = _faded(room.load(TILE), decay, GATE if GATE == 3 else 0)
    seen, asked = gl.reduce((S * key[:, None], S * query[:, None]), 0, _sums)
    if GATE != 3:
        seen, asked = seen * decay, asked * decay
    written = (strength * key_scale) * (value - key_scale * seen)
    y = query_scale * (asked + both * written)
    # Read again from shared memory: to keep it since the sums would take too many registers.
    barrier()
    S = _faded(room.load(TILE), decay, GATE) + key[:, None] * written[None, :]
    gl.store(tile, S.to(gl.bfloat16))
    if SKIP:
        y += value * gl.load(D + head).to(gl.float32)
    gl.store(out + place.to(gl.int64) * V + values, y)
