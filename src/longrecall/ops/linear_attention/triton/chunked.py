r"""Chunked gated linear attention in Triton: one decay per channel, per head or none; grouped or merged heads.

The mathematics is that of ../chunked.py (Yang et al. 2024, section 4; Dao and Gu 2024, section 6). Merged heads
(StateX, equation 4, with a mixing matrix M) are ordinary attention with wide keys: value head h' reads the keys of all
heads side by side with the queries :math:`M_{hh'} q_h`. Nothing is repeated for the value heads: the scores of a chunk
are computed once per key head and then mixed, and states are computed block by block.

States between chunks are stored in the dtype of the products, to which the products would round them anyway. The
backward pass computes them again, a segment of the sequence at a time. So the only memory that grows with T is that of
the inputs, the scores and one state per segment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from longrecall.ops.kernels import launch
from longrecall.ops.kernels.launch import Arithmetic, arithmetic, block, why_not_tensors
from longrecall.ops.linear_attention.chunked import STRONGEST_DECAY
from longrecall.ops.linear_attention.triton import backward as backward_kernels
from longrecall.ops.linear_attention.triton import forward as forward_kernels
from longrecall.ops.linear_attention.triton.plan import Plan, plan_of

CHUNK = 64
SUB_BLOCK = 16
# Bytes of a buffer of states between chunks: several thousand programs per launch, and little of a GPU's memory.
SEGMENT_BYTES = 2**30
FLOOR = STRONGEST_DECAY[torch.float32]


def why_not(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, mixing: Tensor | None = None, **_: Any
) -> str | None:
    """Why these inputs cannot be served, in words; None = they can."""
    reason = why_not_tensors(q, k, v)
    if reason:
        return reason
    width, values = q.shape[3], v.shape[3]
    if width > 1024 or values > 1024:
        return f"heads are at most 1024 wide; got keys of {width}, values of {values}"
    return None


def gated_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, scale: float, state: Tensor, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """The contract of `reference.gated_linear_attention` for bfloat16, float16 and float32 on a GPU.

    Products round their operands to the dtype of q (launch.py says how); states and decays are float32. The output has
    the dtype of v. `chunk` is a power of two, 16 or more; None = `CHUNK`.
    """
    return _run(q, k, v, log_decay, None, scale, state, chunk)


def merged_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    mixing: Tensor,
    scale: float,
    state: Tensor,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The contract of `reference.merged_linear_attention`; dtypes as in `gated_linear_attention`."""
    return _run(q, k, v, log_decay, mixing, scale, state, chunk)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    mixing: Tensor | None,
    scale: float,
    state: Tensor,
    chunk: int | None,
) -> tuple[Tensor, Tensor]:
    out, final = _LinearAttention.apply(q, k, v, log_decay, mixing, state, scale, chunk or CHUNK)
    return out, final


class _LinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        mixing: Tensor | None,
        state: Tensor,
        scale: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        q, k, state = (x.contiguous() for x in (q, k, state))
        kind, v = v.dtype, _operand(v, arithmetic(q.dtype))
        log_decay = None if log_decay is None else log_decay.contiguous()
        mixing = None if mixing is None else mixing.float().contiguous()
        plan = plan_of(q, v, log_decay, mixing, chunk)
        decays, early, late = _decays(plan, q, k, log_decay)
        scores = _scores(plan, q, k, decays)
        out, starts = torch.empty_like(v, dtype=kind), [state]
        for first, count in plan.segments(SEGMENT_BYTES):
            states, final = _states(plan, late, v, decays, starts[-1], first, count)
            _outputs(plan, early, v, decays, scores, mixing, states, out, scale, first, count)
            starts.append(final)
        final = starts.pop().view_as(state)
        ctx.save_for_backward(q, k, v, log_decay, mixing, scores, *starts)
        ctx.plan, ctx.scale, ctx.kind = plan, scale, kind
        return out, final

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_final: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, log_decay, mixing, scores, *starts = ctx.saved_tensors
        d_out = _operand(d_out, ctx.plan.numbers)
        gradients = _backward(ctx.plan, ctx.scale, q, k, v, log_decay, mixing, scores, starts, d_out, d_final, ctx.kind)
        return (*gradients, None, None)


def _tiles(plan: Plan, constants: dict[str, Any]) -> int:
    """Programs for one state."""
    return int(triton.cdiv(plan.key_width, constants["BK"]) * triton.cdiv(plan.value_width, constants["BV"]))


def _operand(x: Tensor, numbers: Arithmetic) -> Tensor:
    """An operand in the dtype to which products round it: the same results, and half the memory traffic in bfloat16."""
    return (x.to(numbers.dtype) if x.dtype.itemsize > numbers.dtype.itemsize else x).contiguous()


def _decays(plan: Plan, q: Tensor, k: Tensor, log_decay: Tensor | None) -> tuple[Tensor | None, Tensor, Tensor]:
    """Cumulative log decays inside each chunk, float32 ``[B, N * C, W]``; queries and keys for products with states."""
    if log_decay is None:
        return None, q, k
    decays = log_decay.new_empty(plan.batch, plan.chunks * plan.chunk, plan.decays, dtype=torch.float32)
    width = block(plan.decays, 64)
    grid = (plan.batch * plan.chunks, triton.cdiv(plan.decays, width))
    sizes, constants = (plan.length, plan.chunks, plan.decays, FLOOR), {"C": plan.chunk, "BW": width, "num_warps": 4}
    if plan.mode == 1:
        forward_kernels.cumulative_kernel[grid](log_decay, decays, *sizes, **constants)
        return decays, q, k
    early, late = (torch.empty_like(decays, dtype=plan.numbers.dtype) for _ in range(2))
    forward_kernels.decayed_kernel[grid](q, k, log_decay, decays, early, late, *sizes, **constants)
    return decays, early, late


def _scores(plan: Plan, q: Tensor, k: Tensor, decays: Tensor | None) -> Tensor:
    """Causal scores inside each chunk, ``[B, N * C, Hk, C]``; without the decay where it is per head."""
    shape = (plan.batch, plan.chunks * plan.chunk, plan.key_heads, plan.chunk)
    scores = q.new_empty(shape, dtype=plan.numbers.dtype)
    programs = plan.batch * plan.chunks * plan.key_heads
    sizes = (plan.length, plan.chunks, plan.key_heads, plan.key_width)
    constants = {"BK": plan.key_block, **plan.constants}
    if plan.mode == 2:
        grid = (programs * (plan.chunk // SUB_BLOCK),)
        forward_kernels.channel_scores_kernel[grid](
            q, k, decays, scores, *sizes, SUB=SUB_BLOCK, **constants, num_warps=4
        )
    else:
        forward_kernels.scores_kernel[(programs,)](q, k, scores, *sizes, **constants, num_warps=4)
    return scores


def _states(
    plan: Plan, k: Tensor, v: Tensor, decays: Tensor | None, start: Tensor, first: int, count: int
) -> tuple[Tensor, Tensor]:
    """The states before each chunk of a segment and the float32 state after it."""
    states = k.new_empty(plan.batch, count, plan.state_shape[1], dtype=plan.numbers.dtype)
    final = k.new_empty(plan.state_shape, dtype=torch.float32)
    constants = plan.walking()
    owners = plan.batch * plan.pairs * _tiles(plan, constants)
    segments = launch.segments(owners, count, launch.processors(k))
    sizes = (plan.length, plan.chunks, first, count, segments, *plan.heads())
    G, kept, ends = k if decays is None else decays, start, start
    if segments > 1:
        kept = final.new_empty(plan.batch, segments - 1, plan.pairs, plan.key_width)
        ends = final.new_empty(plan.batch, segments - 1, plan.state_shape[1])
        forward_kernels.ends_kernel[(owners * (segments - 1),)](k, v, G, kept, ends, *sizes, **constants)
    forward_kernels.states_kernel[(owners * segments,)](k, v, G, start, kept, ends, states, final, *sizes, **constants)
    return states, final


def _outputs(
    plan: Plan,
    q: Tensor,
    v: Tensor,
    decays: Tensor | None,
    scores: Tensor,
    mixing: Tensor | None,
    states: Tensor,
    out: Tensor,
    scale: float,
    first: int,
    count: int,
) -> None:
    constants = plan.reading()
    grid = (plan.batch * count * plan.value_heads, triton.cdiv(plan.value_width, constants["BV"]))
    forward_kernels.output_kernel[grid](
        q, v, q if decays is None else decays, scores, q if mixing is None else mixing, states, out, scale,
        plan.length, plan.chunks, first, count, *plan.heads(), **constants,
    )  # fmt: skip


def _backward(
    plan: Plan,
    scale: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    mixing: Tensor | None,
    scores: Tensor,
    starts: list[Tensor],
    d_out: Tensor,
    d_final: Tensor,
    kind: torch.dtype,
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, log_decay, mixing and the initial state."""
    d_out, d_state = d_out.contiguous(), d_final.float().contiguous()
    decays, early, late = _decays(plan, q, k, log_decay)
    G, M = (q if x is None else x for x in (decays, mixing))
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v, dtype=kind)
    d_scores, d_decay, d_mixing = _score_gradients(plan, v, d_out, G, scores, M, scale)
    inner = _inner_gradients(plan, q, k, G, d_scores)
    parts = _Parts.empty(plan, q, log_decay)
    for (first, count), start in zip(reversed(plan.segments(SEGMENT_BYTES)), reversed(starts), strict=True):
        states, _ = _states(plan, late, v, decays, start, first, count)
        gradients, before = torch.empty_like(states), torch.empty_like(d_state)
        sizes = (plan.length, plan.chunks, first, count, *plan.heads())
        walking, reading, gradient = plan.walking_back(), plan.reading(), plan.key_gradients()
        backward_kernels.state_gradients_kernel[(plan.batch * plan.pairs * _tiles(plan, walking),)](
            early, d_out, G, M, d_state, gradients, before, scale, *sizes, **walking
        )
        d_state = before
        value_grid = (plan.batch * count * plan.value_heads, triton.cdiv(plan.value_width, reading["BV"]))
        backward_kernels.values_kernel[value_grid](late, d_out, G, scores, M, gradients, dv, scale, *sizes, **reading)
        key_grid = (plan.batch * count * plan.key_heads * triton.cdiv(plan.key_width, gradient["BK"]),)
        backward_kernels.keys_kernel[key_grid](
            q, k, v, d_out, G if log_decay is None else log_decay, G, M, d_scores, states, gradients, *inner, dq, dk,
            parts.decay, parts.states, parts.mixing, scale, FLOOR, plan.batch, *sizes, **gradient,
        )  # fmt: skip
    if mixing is not None:
        d_mixing = d_mixing.sum((0, 1)) + parts.mixing.sum((0, 1, 2))
    d_log_decay = parts.decay_gradient(plan, d_decay, log_decay, G)
    return dq, dk, dv, d_log_decay, None if mixing is None else d_mixing, d_state.view(*starts[0].shape)


@dataclass(frozen=True)
class _Parts:
    """Gradients that are sums over blocks of key channels. Each block writes its own part; their order is fixed."""

    decay: Tensor
    """``[2, blocks, B, N * C, P]``: parts of a decay per head from queries and keys. Per channel: its gradient."""
    states: Tensor
    """``[blocks, B, N, P, BK]``: parts of the gradient of a decay per head from states; else unused."""
    mixing: Tensor
    """``[blocks, B, N, Hk, Hv]`` if merged, else unused."""

    @staticmethod
    def empty(plan: Plan, q: Tensor, log_decay: Tensor | None) -> _Parts:
        width = plan.key_block
        blocks = triton.cdiv(plan.key_width, width)
        decay = states = mixing = q
        if plan.mode == 1:
            padded = plan.chunks * plan.chunk
            decay = q.new_empty(2, blocks, plan.batch, padded, plan.pairs, dtype=torch.float32)
            states = decay.new_empty(blocks, plan.batch, plan.chunks, plan.pairs, width)
        elif log_decay is not None:
            decay = torch.empty_like(log_decay)
        if plan.merged:
            heads = (plan.key_heads, plan.value_heads)
            mixing = q.new_empty(blocks, plan.batch, plan.chunks, *heads, dtype=torch.float32)
        return _Parts(decay, states, mixing)

    def decay_gradient(self, plan: Plan, inner: Tensor, log_decay: Tensor | None, decays: Tensor) -> Tensor | None:
        """Add up the parts; where `FLOOR` replaced a stronger decay the gradient is 0."""
        if log_decay is None or plan.mode == 2:
            return None if log_decay is None else self.decay
        found, width = torch.empty_like(log_decay), block(plan.decays, 32)
        backward_kernels.decay_gradients_kernel[(plan.batch * plan.chunks, triton.cdiv(plan.decays, width))](
            log_decay, decays, self.decay, self.states.sum((0, 4)), inner, found, FLOOR,
            plan.batch, plan.length, plan.chunks, plan.pairs, plan.decays, self.decay.shape[1],
            EACH=plan.pairs // plan.decays, C=plan.chunk, BW=width, num_warps=4,
        )  # fmt: skip
        return found


def _score_gradients(
    plan: Plan, v: Tensor, d_out: Tensor, decays: Tensor, scores: Tensor, mixing: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the scores, ``[B, N * C, Hk, C]``; the parts of dg ``[B, N * C, P]`` and of dM that scores give."""
    d_scores = torch.empty_like(scores, dtype=torch.float32)
    padded = plan.chunks * plan.chunk
    d_decay = d_mixing = d_scores
    if plan.mode == 1:
        d_decay = d_scores.new_empty(plan.batch, padded, plan.pairs)
    if plan.merged:
        d_mixing = d_scores.new_empty(plan.batch, plan.chunks, plan.key_heads, plan.value_heads)
    sizes = plan.heads()
    backward_kernels.score_gradients_kernel[(plan.batch * plan.chunks * plan.key_heads,)](
        v, d_out, decays, scores, mixing, d_scores, d_decay, d_mixing, scale,
        plan.length, plan.chunks, *sizes[:4], *sizes[5:], **plan.score_gradients(),
    )  # fmt: skip
    return d_scores, d_decay, d_mixing


def _inner_gradients(plan: Plan, q: Tensor, k: Tensor, decays: Tensor, d_scores: Tensor) -> tuple[Tensor, Tensor]:
    """The parts of dq and dk from scores, float32 ``[B, N * C, Hk, K]``, for a decay per channel; else placeholders."""
    if plan.mode != 2:
        return q, k
    shape = (plan.batch, plan.chunks * plan.chunk, plan.key_heads, plan.key_width)
    dq, dk = q.new_empty(shape, dtype=torch.float32), k.new_empty(shape, dtype=torch.float32)
    width = plan.key_block
    grid = (plan.batch * plan.chunks * plan.key_heads * (plan.chunk // SUB_BLOCK), triton.cdiv(plan.key_width, width))
    sizes = (plan.length, plan.chunks, plan.key_heads, plan.key_width)
    backward_kernels.channel_gradients_kernel[grid](
        q, k, decays, d_scores, dq, dk, *sizes, SUB=SUB_BLOCK, BK=width, **plan.constants, num_warps=4
    )
    return dq, dk
