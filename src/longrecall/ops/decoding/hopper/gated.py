"""Gated linear attention's decoding step in Gluon: a program goes through the keys of a state, a chunk at a time.

Meanwhile the next chunks are copied into a ring of buffers in shared memory. Rows of 256 bytes are copied faster than
rows of 128.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from longrecall.ops.decoding.hopper.parts import add, channel_decay, head_decay, heads_of, wait_for_previous, wide
from longrecall.ops.kernels.gluon import async_load, barrier, gluon_kernel, reinterpret


@gluon_kernel
def gated_step_kernel(
    q, k, v, gate, bias, A_log, D, beta, state, out,
    scale, divisor, low, high, beta_factor, eps,
    q_row, k_row, v_row, gate_row, beta_row,
    HEADS: gl.constexpr, KEY_HEADS: gl.constexpr, SHARE: gl.constexpr, VALUE_HEADS: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, GATE: gl.constexpr, NORMALISE: gl.constexpr, SKIP: gl.constexpr,
    CHUNK: gl.constexpr, RING: gl.constexpr, BV: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr,
    EARLY: gl.constexpr = 0,
):  # fmt: skip
    """All keys of BV values of a state, CHUNK keys at a time; arguments as in triton/recurrence.py.

    ROWS: neighbouring keys of a thread.
    """
    if EARLY == 1:
        wait_for_previous()
    UNITS: gl.constexpr = BV // 8
    TILE: gl.constexpr = gl.BlockedLayout([ROWS, 8], [32 // UNITS, UNITS], [WARPS, 1], [1, 0])
    GROUPS: gl.constexpr = gl.BlockedLayout([1, ROWS, 8], [32 // UNITS, 1, UNITS], [WARPS, 1, 1], [2, 1, 0])
    TOTAL: gl.constexpr = gl.SliceLayout(1, GROUPS)
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    KEYS: gl.constexpr = gl.SliceLayout(1, TILE)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BLOCKS: gl.constexpr = V // BV
    CHUNKS: gl.constexpr = K // CHUNK
    values = gl.program_id(0) % BLOCKS * BV + gl.arange(0, BV, layout=gl.SliceLayout(0, TILE))
    place = gl.program_id(0) // BLOCKS
    tile = state + place.to(gl.int64) * (K * V) + gl.arange(0, CHUNK, layout=KEYS)[:, None] * V + values[None, :]
    ring = gl.allocate_shared_memory(gl.bfloat16, [RING, CHUNK, BV], gl.SwizzledSharedLayout(8, 1, 1, [1, 0]))
    for i in gl.static_range(RING):
        async_load(ring.index(i), tile + i * CHUNK * V)
        async_copy.commit_group()
    if EARLY == 2:
        wait_for_previous()
    row, head, key_head, value_head = heads_of(place, HEADS, KEY_HEADS, SHARE, VALUE_HEADS)
    line = key_head * K + gl.arange(0, K, layout=LINE)
    queries = gl.allocate_shared_memory(gl.float32, [K], FLAT, gl.load(q + row * q_row + line).to(gl.float32))
    keys = gl.allocate_shared_memory(gl.float32, [K], FLAT, gl.load(k + row * k_row + line).to(gl.float32))
    queries = reinterpret(queries, gl.float32, [CHUNKS, CHUNK], FLAT)
    keys = reinterpret(keys, gl.float32, [CHUNKS, CHUNK], FLAT)
    value = gl.load(v + row * v_row + value_head * V + values).to(gl.float32)
    written = value
    if GATE == 3:
        rate = gl.load(gate + row * gate_row + line)
        decays = gl.allocate_shared_memory(gl.float32, [K], FLAT, channel_decay(rate, divisor))
        decays = reinterpret(decays, gl.float32, [CHUNKS, CHUNK], FLAT)
    elif GATE != 0:
        decay, step = head_decay(gate + row * gate_row, bias, A_log, head, low, high, GATE)
        written = value * step
    y = gl.zeros([CHUNK // ROWS, BV], gl.float32, TOTAL)
    for i in range(CHUNKS):
        async_copy.wait_group(RING - 1)
        barrier()
        S = wide(ring.index(i % RING).load(TILE))
        if CHUNKS > RING:
            barrier()
            if i + RING < CHUNKS:
                async_load(ring.index(i % RING), tile + (i + RING) * CHUNK * V)
        async_copy.commit_group()
        if GATE == 3:
            S *= decays.index(i).load(KEYS)[:, None]
        elif GATE != 0:
            S *= decay
        S += keys.index(i).load(KEYS)[:, None] * written[None, :]
        gl.store(tile + i * CHUNK * V, S.to(gl.bfloat16))
        # The keys of one thread are added up here; threads are added up once, at the end.
        read = (S * queries.index(i).load(KEYS)[:, None]).reshape([CHUNK // ROWS, ROWS, BV])
        y += gl.reduce(gl.convert_layout(read, GROUPS, assert_trivial=True), 1, add)
    sums = scale * gl.convert_layout(gl.reduce(y, 0, add), gl.SliceLayout(0, TILE))
    if SKIP:
        sums += value * gl.load(D + head).to(gl.float32)
    gl.store(out + place.to(gl.int64) * V + values, sums)
