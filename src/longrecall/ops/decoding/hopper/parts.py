"""Common functions of the kernels of one decoding step in Gluon: heads of a program, decays, waiting."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def add(a, b):
    """a + b, for reductions."""
    return a + b


@gluon.jit
def sigmoid(x):
    """The sigmoid of a float32."""
    return 1.0 / (1.0 + gl.exp2(x * -LOG2E))


@gluon.jit
def softplus(x):
    """max(x, 0) + log(1 + e), e = exp(-|x|), as 2 artanh(s), s = e / (2 + e) <= 1/3, precise for small e too."""
    e = gl.exp2(-gl.maximum(x, -x) * LOG2E)
    s = e / (2.0 + e)
    squared = s * s
    # s + s^3 / 3 + ... + s^15 / 15. The next term is at most 1.4e-9 of the sum.
    p = squared * (1.0 / 15.0)
    for n in gl.static_range(6):
        p = (p + 1.0 / (13 - 2 * n)) * squared
    return gl.maximum(x, 0.0) + 2.0 * s * (p + 1.0)


@gluon.jit
def channel_decay(rate, divisor):
    """sigmoid(rate)^(1 / divisor), as a power of two."""
    x = rate.to(gl.float32) * -LOG2E
    # One instruction with an error of at most 2^-22 for numbers from 1 to 2.
    log = gl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + gl.exp2(-gl.maximum(x, -x))],
        dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip
    return gl.exp2((gl.maximum(x, 0.0) + log) * (-1.0 / divisor))


@gluon.jit
def wide(raw):
    """bfloat16 as float32. A register holds two bfloat16; one instruction extracts each."""
    return gl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=&r,=&r,r", [raw],
        dtype=gl.float32, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def wait_for_previous():
    """Wait for the kernel before, then let the next one start (see ops/kernels/dependent_launch.py)."""
    gdc_wait()
    gdc_launch_dependents()


@gluon.jit
def heads_of(place, HEADS: gl.constexpr, KEY_HEADS: gl.constexpr, SHARE: gl.constexpr, VALUE_HEADS: gl.constexpr):
    """Row, state head, key head and value head of the state with this number.

    State heads are ordered by key head, then subhead, then value head of that key head. Subheads share the values.
    """
    REPEATS: gl.constexpr = HEADS // KEY_HEADS
    head = place % HEADS
    value_head = ((head // (SHARE * REPEATS)) * REPEATS + head % REPEATS) % VALUE_HEADS
    return (place // HEADS).to(gl.int64), head, head // REPEATS, value_head


@gluon.jit
def head_decay(gate, bias, A_log, head, low, high, GATE: gl.constexpr):
    """The decay of a head and, for Mamba-2, the time step that multiplies its values. `gate` points to its row."""
    step = 1.0
    if GATE == 1:
        decay = gl.exp2(gl.load(gate + head).to(gl.float32) * LOG2E)
    else:
        step = softplus(gl.load(gate + head).to(gl.float32) + gl.load(bias + head).to(gl.float32))
        if GATE == 4:
            step = gl.minimum(gl.maximum(step, low), high)
        decay = gl.exp2(gl.exp2(gl.load(A_log + head).to(gl.float32) * LOG2E) * step * -LOG2E)
    return decay, step
