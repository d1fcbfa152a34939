"""`keys_kernel` of the gated delta rule's backward (triton/backward.py) in Gluon, at the speed of memory.

A program takes one pair of a chunk and a state after the other. Blocks of 64 value channels, 56 KiB each, are copied
into a ring of three buffers. This goes on while the products of one block run, and while the pair before is finished.
The two warp groups share every product: each has all tokens and half of the channels.
"""

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from longrecall.ops.kernels.gluon import async_load, barrier, gluon_kernel

CHUNK = gl.constexpr(64)
WIDTH = gl.constexpr(128)
"""Channels of keys and of values."""

BLOCK = gl.constexpr(64)
"""Value channels of a block."""

RING = gl.constexpr(3)
"""Blocks in shared memory."""

WARPS = gl.constexpr(8)

BLOCK_COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
"""Which thread copies which 16 bytes of a block."""

TILE_COPY = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0]))
"""The same of queries and keys."""

LINE = gl.constexpr(gl.BlockedLayout([2], [32], [8], [0]))
"""One number per token: every warp holds all of them."""

SQUARE = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 32, 16]))
"""Scores of a chunk ``[64, 64]``: each warp group has half of the columns."""

WIDE = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 64, 16]))
"""Rows of a chunk ``[64, 128]``, in the same way."""


@gluon.jit
def _place(pair, chunks, HEADS: gl.constexpr):
    """Chunk, row of the batch, value head, key head and state head of a pair.

    Pairs that differ only by the subhead follow each other, as they read the same gradient of the outputs. `HEADS`:
    the numbers of key heads, state heads, subheads and value heads.
    """
    REPEATS: gl.constexpr = HEADS[1] // HEADS[0]
    sub, n, row = pair % HEADS[2], (pair // HEADS[2]) % chunks, pair // HEADS[2] // chunks
    b, value_head = row // HEADS[3], row % HEADS[3]
    group = (value_head // REPEATS) * HEADS[2] + sub
    return n, b.to(gl.int64), value_head, group, group * REPEATS + value_head % REPEATS


@gluon.jit
def _fetch_block(sources, ring, slot, column: gl.constexpr, pair, pairs, T, chunks, HEADS: gl.constexpr):
    """Start copying 64 value channels of a pair (O bar, U, X bar, S, S bar): one group, empty past the last pair."""
    d_out, corrections, d_targets, states, d_states = sources
    if pair < pairs:
        n, b, value_head, _, head = _place(pair, chunks, HEADS)
        here = (b * HEADS[1] + head) * chunks + n
        row = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, BLOCK_COPY))[:, None]
        channel = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, BLOCK_COPY))[None, :] + column
        d_out += (b * T + n * CHUNK) * (HEADS[3] * WIDTH) + value_head * WIDTH
        place = row * (HEADS[3] * WIDTH) + channel
        async_load(ring[0].index(slot), d_out + place, mask=row < T - n * CHUNK)
        place = row * WIDTH + channel
        first = here * (CHUNK * WIDTH)
        async_load(ring[1].index(slot), corrections + first + place)
        async_load(ring[2].index(slot), d_targets + first + place)
        place = gl.arange(0, WIDTH, layout=gl.SliceLayout(1, BLOCK_COPY))[:, None] * WIDTH + channel
        first = here * (WIDTH * WIDTH)
        async_load(ring[3].index(slot), states + first + place)
        async_load(ring[4].index(slot), d_states + first + place)
    async_copy.commit_group()


@gluon.jit
def _fetch_keys(sources, tiles, numbers, pair, T, chunks, HEADS: gl.constexpr):
    """Start copying queries, keys, G and beta of a pair: one group of copies."""
    q, k, cumulative, beta = sources
    n, b, _, group, head = _place(pair, chunks, HEADS)
    row = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, TILE_COPY))[:, None]
    channel = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, TILE_COPY))[None, :]
    first = (b * T + n * CHUNK) * (HEADS[0] * WIDTH) + group * WIDTH
    place = row * (HEADS[0] * WIDTH) + channel
    async_load(tiles[0], q + first + place, mask=row < T - n * CHUNK)
    async_load(tiles[1], k + first + place, mask=row < T - n * CHUNK)
    i = gl.arange(0, CHUNK, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    cumulative += ((b * HEADS[1] + head) * chunks + n) * CHUNK
    async_load(numbers[0], cumulative + i)
    beta += (b * T + n * CHUNK) * HEADS[1] + head
    async_load(numbers[1], beta + i * HEADS[1], mask=i < T - n * CHUNK)
    async_copy.commit_group()


@gluon.jit
def _by_warp_group(x):
    """Row sums of ``[64, 128]`` over each warp group's half of the channels ``[64, 2]``."""
    return gl.sum(x.reshape([CHUNK, 2, WIDTH // 2]), 2)


@gluon.jit
def _both(partial):
    """The sums over both halves ``[64]``."""
    one, other = gl.split(partial.load(gl.BlockedLayout([2, 2], [32, 1], [WARPS, 1], [1, 0])))
    return gl.convert_layout(one + other, LINE, assert_trivial=True)


@gluon.jit
def _exp(x):
    """e^x in two instructions, not five: results below 2^-126 are 0."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 p; mul.f32 p, $1, 0f3FB8AA3B; ex2.approx.ftz.f32 $0, p; }",
        "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _add(x, y):
    """The sum of two numbers, for scans along a chunk."""
    return x + y


@gluon.jit
def _keep_scores(reads, writes, same, numbers, scores, scale):
    """Store the gradients of both kinds of scores, rounded, and the second kind times beta, which the keys need.

    Returns the sums of the diagonal of `same` by row and warp group ``[64, 2]``.
    """
    i = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, SQUARE))[:, None]
    j = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, SQUARE))[None, :]
    G_i = numbers[0].load(gl.SliceLayout(1, SQUARE))[:, None]
    G_j = numbers[0].load(gl.SliceLayout(0, SQUARE))[None, :]
    strength = numbers[1].load(gl.SliceLayout(1, SQUARE))[:, None]
    decay = gl.where(i >= j, _exp(G_i - G_j), 0.0)
    writes *= gl.where(i > j, -decay, 0.0)
    scores[0].store((reads * (decay * scale)).to(gl.bfloat16))
    scores[1].store(writes.to(gl.bfloat16))
    scores[2].store((writes * strength).to(gl.bfloat16))
    return gl.sum(gl.where(i == j, same, 0.0).reshape([CHUNK, 2, CHUNK // 2]), 2)


@gluon.jit
def _finish(read, written, kept, product, tiles, numbers, scores, sums, weight, last, scale):
    """The gradients of queries and keys ``[64, 128]``; their sums over rows go to `sums`.

    `read`, `written` and `kept` are the products with the states, for the queries, the writes and the keys of the
    chunk. `product` ``[64, 2]`` adds up to <S bar, S>.
    """
    queries, keys = tiles
    G = numbers[0].load(gl.SliceLayout(1, WIDE))[:, None]
    strength = numbers[1].load(gl.SliceLayout(1, WIDE))[:, None]
    d_k = gl.zeros([CHUNK, WIDTH], gl.float32, WIDE)
    d_k = warpgroup_mma(scores[0].permute((1, 0)), queries, d_k, use_acc=False, is_async=True)
    a = _exp(G)
    d_q = warpgroup_mma(scores[0], keys, read * (a * scale), is_async=True)
    d_written = warpgroup_mma(scores[1], keys, written * -a, is_async=True)
    kept *= _exp(last - G)
    key = keys.load(WIDE).to(gl.float32)
    after = _by_warp_group(kept * key)
    sums[3].store(after + _exp(last) * gl.convert_layout(product, after.type.layout, assert_trivial=True))
    d_k = warpgroup_mma_wait(2, deps=[d_k])
    # The weight is not rounded with the scores. So what a token reads of itself cancels in the decay's gradient.
    d_k = warpgroup_mma(scores[2].permute((1, 0)), keys, d_k * weight + kept, is_async=True)
    d_q = warpgroup_mma_wait(2, deps=[d_q])
    sums[0].store(_by_warp_group(d_q * queries.load(WIDE).to(gl.float32)))
    d_written = warpgroup_mma_wait(1, deps=[d_written])
    sums[1].store(_by_warp_group(d_written * key))
    d_k = warpgroup_mma_wait(0, deps=[d_k])
    sums[2].store(_by_warp_group(d_k * key))
    return d_q * weight, d_k + strength * d_written


@gluon.jit
def _store_tiles(d_queries, d_keys, tiles, first, tokens, HEADS: gl.constexpr):
    """Copy two tiles from shared memory to `tokens` rows ``[HEADS, 128]``, from row `first` on."""
    row = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, TILE_COPY))[:, None]
    place = row * (HEADS * WIDTH) + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, TILE_COPY))[None, :]
    gl.store(d_queries + first + place, tiles[0].load(TILE_COPY), mask=row < tokens)
    gl.store(d_keys + first + place, tiles[1].load(TILE_COPY), mask=row < tokens)


@gluon.jit
def _store_numbers(results, sums, strength, weight, first, tokens, here, HEADS: gl.constexpr):
    """Write the gradients of the gates and the weight, from the sums over rows."""
    _, _, d_beta, d_decay, d_weights = results
    by_read, by_written, by_key, after = _both(sums[0]), _both(sums[1]), _both(sums[2]), _both(sums[3])
    i = gl.arange(0, CHUNK, layout=LINE)
    d_G = strength * by_written + weight * by_read - by_key
    d_G += gl.where(i == CHUNK - 1, gl.sum(after, 0), 0.0)
    # G is a cumulative sum of the log decays: its gradient is summed from the end of the chunk.
    d_g = gl.associative_scan(d_G, 0, _add, reverse=True)
    gl.store(d_beta + first + i * HEADS, by_written, mask=i < tokens)
    gl.store(d_decay + first + i * HEADS, d_g, mask=i < tokens)
    gl.store(d_weights + here, gl.sum(by_read, 0), mask=tokens > 0)


@gluon.jit
def _buffers():
    """Shared memory: the ring, queries and keys, G and beta, three kinds of scores, sums over rows.

    Each is a buffer of its own: between a write and another access to the same buffer the compiler puts a barrier.
    """
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, BLOCK], gl.bfloat16)
    ONE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    TWO: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    d_o = gl.allocate_shared_memory(gl.bfloat16, [RING, CHUNK, BLOCK], TILE)
    U = gl.allocate_shared_memory(gl.bfloat16, [RING, CHUNK, BLOCK], TILE)
    d_X = gl.allocate_shared_memory(gl.bfloat16, [RING, CHUNK, BLOCK], TILE)
    S = gl.allocate_shared_memory(gl.bfloat16, [RING, WIDTH, BLOCK], TILE)
    d_S = gl.allocate_shared_memory(gl.bfloat16, [RING, WIDTH, BLOCK], TILE)
    queries = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, WIDTH], TILE)
    keys = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, WIDTH], TILE)
    G = gl.allocate_shared_memory(gl.float32, [CHUNK], ONE)
    strength = gl.allocate_shared_memory(gl.float32, [CHUNK], ONE)
    reads = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, CHUNK], TILE)
    writes = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, CHUNK], TILE)
    stronger = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, CHUNK], TILE)
    by_read = gl.allocate_shared_memory(gl.float32, [CHUNK, 2], TWO)
    by_written = gl.allocate_shared_memory(gl.float32, [CHUNK, 2], TWO)
    by_key = gl.allocate_shared_memory(gl.float32, [CHUNK, 2], TWO)
    by_kept = gl.allocate_shared_memory(gl.float32, [CHUNK, 2], TWO)
    ring, tiles, numbers = (d_o, U, d_X, S, d_S), (queries, keys), (G, strength)
    return ring, tiles, numbers, (reads, writes, stronger), (by_read, by_written, by_key, by_kept)


@gluon.jit
def _multiply(ring, slot, sums, MORE: gl.constexpr):
    """Start the 7 products over the value channels of a block. `MORE`: add to the sums of the blocks before."""
    reads, writes, same, read, written, kept = sums
    d_o, U, d_X = ring[0].index(slot), ring[1].index(slot), ring[2].index(slot)
    S, d_S = ring[3].index(slot), ring[4].index(slot)
    reads = warpgroup_mma(d_o, U.permute((1, 0)), reads, use_acc=MORE, is_async=True)
    writes = warpgroup_mma(d_X, U.permute((1, 0)), writes, use_acc=MORE, is_async=True)
    read = warpgroup_mma(d_o, S.permute((1, 0)), read, use_acc=MORE, is_async=True)
    written = warpgroup_mma(d_X, S.permute((1, 0)), written, use_acc=MORE, is_async=True)
    kept = warpgroup_mma(U, d_S.permute((1, 0)), kept, use_acc=MORE, is_async=True)
    # <S bar, S> is the sum of this product's diagonal. To read and unpack the states would take longer.
    half, d_half = S.slice(0, CHUNK, 0), d_S.slice(0, CHUNK, 0)
    same = warpgroup_mma(half, d_half.permute((1, 0)), same, use_acc=MORE, is_async=True)
    half, d_half = S.slice(CHUNK, CHUNK, 0), d_S.slice(CHUNK, CHUNK, 0)
    same = warpgroup_mma(half, d_half.permute((1, 0)), same, is_async=True)
    return reads, writes, same, read, written, kept


@gluon_kernel
def keys_kernel(
    q, k, beta, weights, cumulative, d_out, states, corrections, d_states, d_targets,
    d_queries, d_keys, d_beta, d_decay, d_weights, scale, B, T, chunks,
    KEY_HEADS: gl.constexpr, STATE_HEADS: gl.constexpr, SUBHEADS: gl.constexpr, VALUE_HEADS: gl.constexpr,
):  # fmt: skip
    """The gradients of q and k ``[B, T, STATE_HEADS, 128]`` and of the gates, without the part v . X bar of beta's.

    `d_queries` and `d_keys` may be q and k themselves if no two pairs share them. `d_beta` and `d_decay` are float32
    ``[B, T, STATE_HEADS]``, `d_weights` ``[B, STATE_HEADS, chunks]``. All else is as in `keys_kernel` of
    triton/backward.py. The grid may have any number of programs.
    """
    HEADS: gl.constexpr = (KEY_HEADS, STATE_HEADS, SUBHEADS, VALUE_HEADS)
    ring, tiles, numbers, scores, sums = _buffers()
    blocks, rows = (d_out, corrections, d_targets, states, d_states), (q, k, cumulative, beta)
    results = (d_queries, d_keys, d_beta, d_decay, d_weights)
    pairs, step = B * STATE_HEADS * chunks, gl.num_programs(0)
    for c in gl.static_range(3):
        _fetch_block(blocks, ring, c, (c % 2) * BLOCK, gl.program_id(0) + (c // 2) * step, pairs, T, chunks, HEADS)
    slot = 0
    # The results of the pair before are copied out during the products of this one. The first pair has none before it.
    first, weight = gl.program_id(0).to(gl.int64), gl.load(weights)
    here, tokens = first, T * 0
    for pair in range(gl.program_id(0), pairs, step):
        # Both blocks of this pair have arrived: the one group of copies still under way is the next pair's first block.
        async_copy.wait_group(1)
        barrier()
        fence_async_shared()
        small, large = gl.zeros([CHUNK, CHUNK], gl.float32, SQUARE), gl.zeros([CHUNK, WIDTH], gl.float32, WIDE)
        products = _multiply(ring, slot, (small, small, small, large, large, large), False)
        products = _multiply(ring, (slot + 1) % RING, products, True)
        _store_tiles(d_queries, d_keys, tiles, first * WIDTH, tokens, STATE_HEADS)
        strength = numbers[1].load(LINE)
        barrier()
        _fetch_keys(rows, tiles, numbers, pair, T, chunks, HEADS)
        products = warpgroup_mma_wait(7, deps=products)
        barrier()
        _fetch_block(blocks, ring, slot, BLOCK, pair + step, pairs, T, chunks, HEADS)
        slot = (slot + 1) % RING
        _store_numbers(results, sums, strength, weight, first, tokens, here, STATE_HEADS)
        n, b, value_head, group, head = _place(pair, chunks, HEADS)
        first, tokens = (b * T + n * CHUNK) * STATE_HEADS + head, T - n * CHUNK
        here = (b * STATE_HEADS + head) * chunks + n
        weight = gl.load(weights + value_head * SUBHEADS + group % SUBHEADS)
        last = gl.load(cumulative + here * CHUNK + CHUNK - 1)
        reads, writes, same, read, written, kept = warpgroup_mma_wait(0, deps=products)
        async_copy.wait_group(1)
        barrier()
        _fetch_block(blocks, ring, slot, 0, pair + 2 * step, pairs, T, chunks, HEADS)
        slot = (slot + 1) % RING
        product = _keep_scores(reads, writes, same, numbers, scores, scale)
        fence_async_shared()
        barrier()
        d_q, d_k = _finish(read, written, kept, product, tiles, numbers, scores, sums, weight, last, scale)
        barrier()
        tiles[0].store(d_q.to(gl.bfloat16))
        tiles[1].store(d_k.to(gl.bfloat16))
    barrier()
    _store_tiles(d_queries, d_keys, tiles, first * WIDTH, tokens, STATE_HEADS)
    _store_numbers(results, sums, numbers[1].load(LINE), weight, first, tokens, here, STATE_HEADS)


def keys_backward(tensors: tuple[Tensor, ...], scale: float, processors: int) -> None:
    """Launch `keys_kernel` on its tensors, in their order: a program per multiprocessor, at most one per pair."""
    q, beta, weights = tensors[0], tensors[2], tensors[3]
    rows, length, heads = beta.shape
    chunks = tensors[4].shape[2] // CHUNK.value
    sizes: dict[str, Any] = {"KEY_HEADS": q.shape[2], "STATE_HEADS": heads, "SUBHEADS": weights.shape[1]}
    keys_kernel[(min(processors, rows * heads * chunks),)](
        *tensors, scale, rows, length, chunks, **sizes, VALUE_HEADS=len(weights), num_warps=WARPS.value
    )
