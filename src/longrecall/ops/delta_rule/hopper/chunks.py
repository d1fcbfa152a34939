"""What both walks of the gated delta rule in Gluon share: layouts, copies to and from shared memory, decays.

States and corrections are held transposed in registers, with value channels along the rows: walk_back.py says why.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from longrecall.ops.kernels.gluon import async_load

CHUNK = gl.constexpr(64)
WIDTH = gl.constexpr(128)
WARPS = gl.constexpr(8)

STATE = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 128, 16]))
TOKENS = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 64, 16]))
SQUARE = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 32, 16]))
ONTO_STATE = gl.constexpr(gl.DotOperandLayout(0, STATE.value, 2))
ONTO_TOKENS = gl.constexpr(gl.DotOperandLayout(0, TOKENS.value, 2))
COLUMN = gl.constexpr(gl.SliceLayout(0, TOKENS.value))
TILE = gl.constexpr(gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16))
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0]))
NARROW = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))


@gluon.jit
def copy_rows(to, x, start, T, width: gl.constexpr):
    """Start copying the rows ``[64, 128]`` of a chunk, from row `start` on, to shared memory; 0 past row T."""
    row = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, WIDE))[:, None]
    channel = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, WIDE))[None, :]
    async_load(to, x + row * width + channel, mask=row < T - start)


@gluon.jit
def copy_square(to, x):
    """Start copying a matrix ``[64, 64]`` to shared memory."""
    row = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, NARROW))[:, None]
    column = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, NARROW))[None, :]
    async_load(to, x + row * CHUNK + column)


@gluon.jit
def write_out(x, shared, left, width: gl.constexpr, ROWS: gl.constexpr):
    """Copy ``[ROWS, 128]`` from shared memory to rows of that width, the first `left` of them."""
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, WIDE))[:, None]
    channel = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, WIDE))[None, :]
    gl.store(x + row * width + channel, shared.load(WIDE), mask=row < left)


@gluon.jit
def heads_of(HEADS: gl.constexpr, KEY_HEADS: gl.constexpr, SUBHEADS: gl.constexpr):
    """State, row of the batch and state head of this program, and the key head, value head and subhead of that head."""
    state_row = gl.program_id(0).to(gl.int64)
    head = gl.program_id(0) % HEADS
    REPEATS: gl.constexpr = HEADS // KEY_HEADS
    group = head // REPEATS
    return state_row, state_row // HEADS, head, group, (group // SUBHEADS) * REPEATS + head % REPEATS, group % SUBHEADS


@gluon.jit
def across(state_row):
    """Offsets in memory of the numbers of a state ``[128, 128]``, transposed."""
    v_row = gl.arange(0, WIDTH, layout=gl.SliceLayout(1, STATE))[:, None]
    k_column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, STATE))[None, :]
    return state_row * (WIDTH * WIDTH) + k_column * WIDTH + v_row


@gluon.jit
def lines_of(cumulative, beta, state_row, b, head, n, T, chunks, HEADS: gl.constexpr):
    """Cumulative log decays of a chunk, the last of them, and betas, 0 past token T."""
    i = gl.arange(0, CHUNK, layout=LINE)
    first = (state_row * chunks + n) * CHUNK
    t = n * CHUNK + i
    strength = gl.load(beta + (b * T + t) * HEADS + head, mask=t < T, other=0.0)
    return gl.load(cumulative + first + i), gl.load(cumulative + first + CHUNK - 1), strength


@gluon.jit
def line():
    """Shared memory for one number per token. Each use gets its own: stores to a shared one would need a barrier."""
    return gl.allocate_shared_memory(gl.float32, [CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def decay_between(gates):
    """e^(G_i - G_j) for query i and key j <= i, 0 elsewhere."""
    later = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, SQUARE))[:, None]
    sooner = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, SQUARE))[None, :]
    between = gates.load(gl.SliceLayout(1, SQUARE))[:, None] - gates.load(gl.SliceLayout(0, SQUARE))[None, :]
    # Where a query reads nothing the factor is e^(-inf) = 0; elsewhere the exponent is never positive.
    return gl.exp(gl.where(later >= sooner, between, float("-inf")))
