"""`walk_kernel` of the gated delta rule (ops/delta_rule/triton/forward.py) in Gluon.

The state is held transposed in registers, with value channels along the rows, for the reasons in walk_back.py.
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
def _buffers(READ: gl.constexpr):
    """Shared memory: two of every tile that is loaded (queries if READ, keys, values, P), and two for results.

    These two hold outputs and scores, or corrections and the state; outputs and corrections are transposed.
    """
    rings = (
        gl.allocate_shared_memory(gl.bfloat16, [2 if READ else 1, CHUNK, WIDTH], TILE),
        gl.allocate_shared_memory(gl.bfloat16, [2, CHUNK, WIDTH], TILE),
        gl.allocate_shared_memory(gl.bfloat16, [2, CHUNK, WIDTH], TILE),
        gl.allocate_shared_memory(gl.bfloat16, [2, CHUNK, CHUNK], TILE),
    )
    tokens = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, WIDTH], TILE)
    SIZE: gl.constexpr = CHUNK if READ else WIDTH
    return rings, tokens, gl.allocate_shared_memory(gl.bfloat16, [SIZE, SIZE], TILE)


@gluon.jit
def _send(rings, slot, sources, state_row, b, n, group, value_head, T, chunks,
          KEY_HEADS: gl.constexpr, VALUE_HEADS: gl.constexpr, READ: gl.constexpr):  # fmt: skip
    """Start copying keys, values, P and, if READ, queries of a chunk: one group, empty past the last chunk."""
    if n < chunks:
        start = n * CHUNK
        first = (b * T + start) * (KEY_HEADS * WIDTH) + group * WIDTH
        copy_rows(rings[1].index(slot), sources[1] + first, start, T, KEY_HEADS * WIDTH)
        if READ:
            copy_rows(rings[0].index(slot), sources[0] + first, start, T, KEY_HEADS * WIDTH)
        first = (b * T + start) * (VALUE_HEADS * WIDTH) + value_head * WIDTH
        copy_rows(rings[2].index(slot), sources[2] + first, start, T, VALUE_HEADS * WIDTH)
        copy_square(rings[3].index(slot), sources[3] + (state_row * chunks + n) * (CHUNK * CHUNK))
    async_copy.commit_group()


@gluon.jit
def _read_from_state(left, queries, keys):
    """Start the products of the queries with the state and with the keys."""
    o = gl.zeros([WIDTH, CHUNK], gl.float32, TOKENS)
    o = warpgroup_mma(left, queries.permute((1, 0)), o, use_acc=False, is_async=True)
    scores = gl.zeros([CHUNK, CHUNK], gl.float32, SQUARE)
    return o, warpgroup_mma(queries, keys.permute((1, 0)), scores, use_acc=False, is_async=True)


@gluon.jit
def _keep_lines(lines, G, last, strength):
    """Write G, the decays to the end of the chunk and from its start, and betas to shared memory.

    Returns the decay of the state over the whole chunk.
    """
    lines[0].store(G)
    lines[1].store(gl.exp(last - G))
    lines[2].store(gl.exp(G))
    lines[3].store(strength)
    return gl.exp(last)


@gluon.jit
def _correct(known, new, lines, P):
    """Start the product for U from what the keys read of the state; return it and its operand X."""
    X = (new - known * lines[2].load(COLUMN)[None, :]) * lines[3].load(COLUMN)[None, :]
    X = gl.convert_layout(X.to(gl.bfloat16), ONTO_TOKENS)
    U = gl.zeros([WIDTH, CHUNK], gl.float32, TOKENS)
    return warpgroup_mma(X, P.permute((1, 0)), U, use_acc=False, is_async=True), X


@gluon_kernel
def walk_kernel(
    q, k, v, beta, weights, cumulative, inverse, initial, out, final, states, corrections,
    scale, T, chunks, B,
    KEY_HEADS: gl.constexpr, HEADS: gl.constexpr, SUBHEADS: gl.constexpr, VALUE_HEADS: gl.constexpr,
    READ: gl.constexpr,
):  # fmt: skip
    """`walk_kernel` of triton/forward.py for PART = 1, one segment, bfloat16 and K = V = 128; a program per state."""
    rings, tokens, cells = _buffers(READ)
    lines = (line(), line(), line(), line())
    state_row, b, head, group, value_head, sub = heads_of(HEADS, KEY_HEADS, SUBHEADS)
    sources = (q, k, v, inverse)
    _send(rings, 0, sources, state_row, b, 0, group, value_head, T, chunks, KEY_HEADS, VALUE_HEADS, READ)
    factor = scale * gl.load(weights + value_head * SUBHEADS + sub)
    G, last, strength = lines_of(cumulative, beta, state_row, b, head, 0, T, chunks, HEADS)
    S = gl.zeros([WIDTH, WIDTH], gl.float32, STATE) if initial is None else gl.load(initial + across(state_row))
    slot = 0
    for n in range(chunks):
        kept = _keep_lines(lines, G, last, strength)
        rounded = S.to(gl.bfloat16)
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        keys, P, seen = rings[1].index(slot), rings[3].index(slot), rings[2].index(slot)
        left = gl.convert_layout(rounded, ONTO_TOKENS)
        known = gl.zeros([WIDTH, CHUNK], gl.float32, TOKENS)
        known = warpgroup_mma(left, keys.permute((1, 0)), known, use_acc=False, is_async=True)
        if READ:
            o, scores = _read_from_state(left, rings[0].index(slot), keys)
        else:
            cells.permute((1, 0)).store(rounded)
        slot = 1 - slot
        _send(rings, slot, sources, state_row, b, n + 1, group, value_head, T, chunks, KEY_HEADS, VALUE_HEADS, READ)
        after = gl.minimum(n + 1, chunks - 1)
        G, last, strength = lines_of(cumulative, beta, state_row, b, head, after, T, chunks, HEADS)
        new = seen.permute((1, 0)).load(TOKENS).to(gl.float32)
        known = warpgroup_mma_wait(2 if READ else 0, deps=[known])
        U, X = _correct(known, new, lines, P)
        S = S * kept
        if READ:
            decay = decay_between(lines[0])
            o, left, scores = warpgroup_mma_wait(1, deps=[o, left, scores])
            cells.store((scores * decay).to(gl.bfloat16))
            o = o * lines[2].load(COLUMN)[None, :]
            fence_async_shared()
            barrier()
        else:
            barrier()
            write_out(states + (state_row * chunks + n) * (WIDTH * WIDTH), cells, WIDTH, WIDTH, WIDTH)
        U, X = warpgroup_mma_wait(0, deps=[U, X])
        faded = gl.convert_layout((U * lines[1].load(COLUMN)[None, :]).to(gl.bfloat16), ONTO_STATE)
        if READ:
            U = gl.convert_layout(U.to(gl.bfloat16), ONTO_TOKENS)
            o = warpgroup_mma(U, cells.permute((1, 0)), o, is_async=True)
            S = warpgroup_mma(faded, keys, S, is_async=True)
            o, U = warpgroup_mma_wait(1, deps=[o, U])
            tokens.permute((1, 0)).store((o * factor).to(gl.bfloat16))
            place = out + ((sub * B + b) * T + n * CHUNK) * (VALUE_HEADS * WIDTH) + value_head * WIDTH
        else:
            S = warpgroup_mma(faded, keys, S, is_async=True)
            tokens.permute((1, 0)).store(U.to(gl.bfloat16))
            place = corrections + (state_row * chunks + n) * (CHUNK * WIDTH)
        barrier()
        WIDTH_OUT: gl.constexpr = VALUE_HEADS * WIDTH if READ else WIDTH
        write_out(place, tokens, T - n * CHUNK if READ else CHUNK, WIDTH_OUT, CHUNK)
        S, faded = warpgroup_mma_wait(0, deps=[S, faded])
    if READ:
        gl.store(final + across(state_row), S)
