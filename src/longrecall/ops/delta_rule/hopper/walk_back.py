"""`walk_back_kernel` of the gated delta rule (ops/delta_rule/triton/backward.py) in Gluon.

The state's gradient is held transposed in registers, with value channels along the rows. Every product of the chain
gradient -> U bar -> X bar -> gradient can then take its left operand from the registers where the product before left
it, and keys, queries and the inverse from shared memory. So no thread waits for another. A factor of a token is then a
factor of a column. The two warp groups have 64 value channels each. The next chunk is loaded meanwhile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from longrecall.ops.delta_rule.hopper.chunks import (
    CHUNK,
    COLUMN,
    ONTO_STATE,
    ONTO_TOKENS,
    SQUARE,
    STATE,
    TILE,
    TOKENS,
    WIDTH,
    across,
    copy_rows,
    copy_square,
    decay_between,
    heads_of,
    line,
    lines_of,
    write_out,
)
from longrecall.ops.kernels.gluon import barrier, gluon_kernel


@gluon.jit
def _buffers():
    """Shared memory: two of every tile that is loaded (queries, keys, O bar, P); scores; S bar and X bar to store."""
    rings = (
        gl.allocate_shared_memory(gl.bfloat16, [2, CHUNK, WIDTH], TILE),
        gl.allocate_shared_memory(gl.bfloat16, [2, CHUNK, WIDTH], TILE),
        gl.allocate_shared_memory(gl.bfloat16, [2, CHUNK, WIDTH], TILE),
        gl.allocate_shared_memory(gl.bfloat16, [2, CHUNK, CHUNK], TILE),
    )
    weighed = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, CHUNK], TILE)
    cells = gl.allocate_shared_memory(gl.bfloat16, [WIDTH, WIDTH], TILE)
    return rings, weighed, cells, gl.allocate_shared_memory(gl.bfloat16, [CHUNK, WIDTH], TILE)


@gluon.jit
def _send(rings, slot, sources, state_row, b, n, group, value_head, T, chunks,
          KEY_HEADS: gl.constexpr, VALUE_HEADS: gl.constexpr):  # fmt: skip
    """Start copying queries, keys, O bar and P of a chunk: one group of copies, empty before the first chunk."""
    if n >= 0:
        start = n * CHUNK
        first = (b * T + start) * (KEY_HEADS * WIDTH) + group * WIDTH
        copy_rows(rings[0].index(slot), sources[0] + first, start, T, KEY_HEADS * WIDTH)
        copy_rows(rings[1].index(slot), sources[1] + first, start, T, KEY_HEADS * WIDTH)
        first = (b * T + start) * (VALUE_HEADS * WIDTH) + value_head * WIDTH
        copy_rows(rings[2].index(slot), sources[2] + first, start, T, VALUE_HEADS * WIDTH)
        copy_square(rings[3].index(slot), sources[3] + (state_row * chunks + n) * (CHUNK * CHUNK))
    async_copy.commit_group()


@gluon.jit
def _begin(d_S, queries, keys, d_o, cells, reading, kept):
    """Start the products that need no scores: (U bar, its operand), scores, O bar, (part of S bar, its operand)."""
    rounded = d_S.to(gl.bfloat16)
    d_U = gl.zeros([WIDTH, CHUNK], gl.float32, TOKENS)
    left = gl.convert_layout(rounded, ONTO_TOKENS)
    seen = d_o.permute((1, 0)).load(TOKENS)
    faded = seen.to(gl.float32) * reading.load(COLUMN)[None, :]
    faded = gl.convert_layout(faded.to(gl.bfloat16), ONTO_STATE)
    d_S = d_S * kept
    d_U = warpgroup_mma(left, keys.permute((1, 0)), d_U, use_acc=False, is_async=True)
    scores = gl.zeros([CHUNK, CHUNK], gl.float32, SQUARE)
    scores = warpgroup_mma(queries, keys.permute((1, 0)), scores, use_acc=False, is_async=True)
    cells.permute((1, 0)).store(rounded)
    d_S = warpgroup_mma(faded, queries, d_S, is_async=True)
    return d_U, left, scores, seen, d_S, faded


@gluon_kernel
def walk_back_kernel(
    q, k, beta, weights, cumulative, inverse, d_out, d_final, d_initial, d_states, d_targets,
    scale, T, chunks,
    KEY_HEADS: gl.constexpr, HEADS: gl.constexpr, SUBHEADS: gl.constexpr, VALUE_HEADS: gl.constexpr,
):  # fmt: skip
    """`walk_back_kernel` of triton/backward.py for bfloat16 and K = V = 128; one program of 8 warps per state."""
    rings, weighed, cells, targets = _buffers()
    gates, to_end, reading, erasing = line(), line(), line(), line()
    state_row, b, head, group, value_head, sub = heads_of(HEADS, KEY_HEADS, SUBHEADS)
    sources = (q, k, d_out, inverse)
    _send(rings, 0, sources, state_row, b, chunks - 1, group, value_head, T, chunks, KEY_HEADS, VALUE_HEADS)
    factor = scale * gl.load(weights + value_head * SUBHEADS + sub)
    G, last, strength = lines_of(cumulative, beta, state_row, b, head, chunks - 1, T, chunks, HEADS)
    d_S = gl.zeros([WIDTH, WIDTH], gl.float32, STATE) if d_final is None else gl.load(d_final + across(state_row))
    slot = 0
    for step in range(chunks):
        n = chunks - 1 - step
        here = state_row * chunks + n
        gates.store(G)
        to_end.store(gl.exp(last - G))
        a = gl.exp(G)
        reading.store(a * factor)
        erasing.store(-a * strength)
        kept = gl.exp(last)
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        queries, keys, P = rings[0].index(slot), rings[1].index(slot), rings[3].index(slot)
        d_U, left, scores, seen, d_S, faded = _begin(d_S, queries, keys, rings[2].index(slot), cells, reading, kept)
        slot = 1 - slot
        _send(rings, slot, sources, state_row, b, n - 1, group, value_head, T, chunks, KEY_HEADS, VALUE_HEADS)
        before = gl.maximum(n - 1, 0)
        G, last, strength = lines_of(cumulative, beta, state_row, b, head, before, T, chunks, HEADS)
        decay = decay_between(gates) * factor
        d_U, left, scores = warpgroup_mma_wait(1, deps=[d_U, left, scores])
        weighed.store((scores * decay).to(gl.bfloat16))
        d_U = d_U * to_end.load(COLUMN)[None, :]
        fence_async_shared()
        barrier()
        seen = gl.convert_layout(seen, ONTO_TOKENS)
        d_U = warpgroup_mma(seen, weighed, d_U, is_async=True)
        write_out(d_states + here * (WIDTH * WIDTH), cells, WIDTH, WIDTH, WIDTH)
        d_U, seen, d_S, faded = warpgroup_mma_wait(0, deps=[d_U, seen, d_S, faded])
        left = gl.convert_layout(d_U.to(gl.bfloat16), ONTO_TOKENS)
        d_X = gl.zeros([WIDTH, CHUNK], gl.float32, TOKENS)
        d_X = warpgroup_mma(left, P, d_X, use_acc=False, is_async=True)
        d_X, left = warpgroup_mma_wait(0, deps=[d_X, left])
        erased = d_X * erasing.load(COLUMN)[None, :]
        erased = gl.convert_layout(erased.to(gl.bfloat16), ONTO_STATE)
        d_S = warpgroup_mma(erased, keys, d_S, is_async=True)
        targets.permute((1, 0)).store(d_X.to(gl.bfloat16))
        barrier()
        write_out(d_targets + here * (CHUNK * WIDTH), targets, CHUNK, WIDTH, CHUNK)
        d_S, erased = warpgroup_mma_wait(0, deps=[d_S, erased])
    if d_initial is not None:
        gl.store(d_initial + across(state_row), d_S)
