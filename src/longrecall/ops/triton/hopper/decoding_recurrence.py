"""The recurrences of one decoding step in Gluon: a tile of a state comes through shared memory, and is read from there.

It has few registers of a thread at a time, so many programs share a multiprocessor and wait for memory at once.
What is small comes meanwhile, and norms scale a tile's sums, not the keys, of which every thread holds many.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from longrecall.ops.triton.hopper.launch import gluon_kernel

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _sum(a, b):
    return a + b


@gluon.jit
def _sums(a, b, c, d):
    return a + c, b + d


@gluon.jit
def _three_sums(a, b, c, d, e, f):
    return a + d, b + e, c + f


@gluon.jit
def _sigmoid(x):
    return 1.0 / (1.0 + gl.exp2(x * -LOG2E))


@gluon.jit
def _softplus(x):
    """max(x, 0) + log(1 + e), e = exp(-|x|), as 2 artanh(s), s = e / (2 + e) <= 1/3: right also where e is small."""
    e = gl.exp2(-gl.maximum(x, -x) * LOG2E)
    s = e / (2.0 + e)
    squared = s * s
    # s + s^3 / 3 + ... + s^15 / 15: the next term is 1.4e-9 of the sum at most.
    p = squared * (1.0 / 15.0)
    for n in gl.static_range(6):
        p = (p + 1.0 / (13 - 2 * n)) * squared
    return gl.maximum(x, 0.0) + 2.0 * s * (p + 1.0)


@gluon.jit
def _channel_decay(rate, divisor):
    """sigmoid(rate)^(1 / divisor), as a power of two."""
    x = rate.to(gl.float32) * -LOG2E
    # One instruction, off by 2^-22 at most for numbers of 1 to 2.
    log = gl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + gl.exp2(-gl.maximum(x, -x))],
        dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip
    return gl.exp2((gl.maximum(x, 0.0) + log) * (-1.0 / divisor))


@gluon.jit
def _wide(raw):
    """float32 of bfloat16, two in a register, each taken out by one instruction."""
    return gl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=&r,=&r,r", [raw],
        dtype=gl.float32, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _faded(raw, decay, GATE: gl.constexpr):
    """float32 of a tile times the decay, of each key or of all."""
    if GATE == 0:
        S = _wide(raw)
    elif GATE == 3:
        S = _wide(raw) * decay[:, None]
    else:
        S = _wide(raw) * decay
    return S


@gluon_kernel
def step_kernel(
    q, k, v, gate, bias, A_log, D, beta, state, out,
    scale, divisor, low, high, beta_factor, eps,
    q_row, k_row, v_row, gate_row, beta_row,
    HEADS: gl.constexpr, KEY_HEADS: gl.constexpr, SHARE: gl.constexpr, VALUE_HEADS: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, GATE: gl.constexpr, DELTA: gl.constexpr, NORMALISE: gl.constexpr,
    SKIP: gl.constexpr, BV: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """All keys of BV values of a state, with the plain kernel's arguments. ROWS: neighbouring keys of a thread."""
    UNITS: gl.constexpr = BV // 8
    TILE: gl.constexpr = gl.BlockedLayout([ROWS, 8], [32 // UNITS, UNITS], [WARPS, 1], [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    KEYS: gl.constexpr = gl.SliceLayout(1, TILE)
    BLOCKS: gl.constexpr = V // BV
    REPEATS: gl.constexpr = HEADS // KEY_HEADS
    keys = gl.arange(0, K, layout=KEYS)
    values = gl.program_id(0) % BLOCKS * BV + gl.arange(0, BV, layout=gl.SliceLayout(0, TILE))
    place = gl.program_id(0) // BLOCKS
    tile = state + place.to(gl.int64) * (K * V) + keys[:, None] * V + values[None, :]
    room = gl.allocate_shared_memory(gl.bfloat16, [K, BV], gl.SwizzledSharedLayout(8, 1, 1, [1, 0]))
    async_copy.async_copy_global_to_shared(room, tile)
    async_copy.commit_group()
    row, head, key_head = (place // HEADS).to(gl.int64), place % HEADS, place % HEADS // REPEATS
    # State heads: key head, then subhead, then value head of that key head; subheads share the values.
    value_head = ((head // (SHARE * REPEATS)) * REPEATS + head % REPEATS) % VALUE_HEADS
    query = gl.load(q + row * q_row + key_head * K + keys).to(gl.float32)
    key = gl.load(k + row * k_row + key_head * K + keys).to(gl.float32)
    value = gl.load(v + row * v_row + value_head * V + values).to(gl.float32)
    decay, written = 1.0, value
    if GATE == 1:
        decay = gl.exp2(gl.load(gate + row * gate_row + head).to(gl.float32) * LOG2E)
    elif GATE == 3:
        rate = gl.load(gate + row * gate_row + key_head * K + gl.arange(0, K, layout=LINE))
        decay = gl.convert_layout(_channel_decay(rate, divisor), KEYS)
    elif GATE != 0:
        step = _softplus(gl.load(gate + row * gate_row + head).to(gl.float32) + gl.load(bias + head).to(gl.float32))
        if GATE == 4:
            step = gl.minimum(gl.maximum(step, low), high)
            written = value * step
        decay = gl.exp2(gl.exp2(gl.load(A_log + head).to(gl.float32) * LOG2E) * step * -LOG2E)
    y = 0.0
    if DELTA:
        strength = beta_factor * _sigmoid(gl.load(beta + row * beta_row + head).to(gl.float32))
        squares, key_squares, both = gl.reduce((query * query, key * key, query * key), 0, _three_sums)
        query_scale, key_scale = scale, 1.0
        if NORMALISE:
            query_scale, key_scale = scale * gl.rsqrt(squares + eps), gl.rsqrt(key_squares + eps)
        async_copy.wait_group(0)
        gl.thread_barrier()
        # Both sums over the old state: q S' = q S + (q k) written needs no second pass.
        S = _faded(room.load(TILE), decay, GATE if GATE == 3 else 0)
        seen, asked = gl.reduce((S * key[:, None], S * query[:, None]), 0, _sums)
        if GATE != 3:
            seen, asked = seen * decay, asked * decay
        written = (strength * key_scale) * (value - key_scale * seen)
        y = query_scale * (asked + both * written)
        # Read again, and not held in registers from the sums to here.
        gl.thread_barrier()
        S = _faded(room.load(TILE), decay, GATE) + key[:, None] * written[None, :]
        gl.store(tile, S.to(gl.bfloat16))
    else:
        async_copy.wait_group(0)
        gl.thread_barrier()
        S = _faded(room.load(TILE), decay, GATE) + key[:, None] * written[None, :]
        gl.store(tile, S.to(gl.bfloat16))
        y = scale * gl.reduce(S * query[:, None], 0, _sum)
    if SKIP:
        y += value * gl.load(D + head).to(gl.float32)
    gl.store(out + place.to(gl.int64) * V + values, y)
