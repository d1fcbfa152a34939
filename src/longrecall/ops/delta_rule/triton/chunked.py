"""The chunked gated delta rule as Triton kernels, with values shared by subheads and their outputs added up.

The forward keeps its inputs and the inverses of the chunks. The backward walks over the chunks again to get the state
before each of them. It takes a few rows of the batch at a time, so that its workspace does not grow with the batch.

Other widths than those the kernels are built for are filled up with zeros. A key channel of zeros reads and writes
nothing, and a value channel of zeros stays zero, so nothing else changes. No kernel is built for fewer than 64
channels: in products of warp groups with tiles less than 128 bytes wide, code that Triton 3.6 made for an H200 computed
wrong results or read outside of its shared memory (https://github.com/triton-lang/triton/issues/11366 is such a case).
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from longrecall.ops.delta_rule.hopper import walks
from longrecall.ops.delta_rule.hopper_kernels import INVERSE, KEYS, WALK, WALK_BACK
from longrecall.ops.delta_rule.triton import segments as delta_split
from longrecall.ops.delta_rule.triton.backward import keys_kernel, values_kernel, walk_back_kernel
from longrecall.ops.delta_rule.triton.forward import walk_kernel
from longrecall.ops.delta_rule.triton.gate_gradients import finish_gates
from longrecall.ops.delta_rule.triton.inverse import invert_kernel
from longrecall.ops.delta_rule.triton.plan import SIZE, Plan, plan_of
from longrecall.ops.delta_rule.widths import WIDTHS, built_width
from longrecall.ops.kernels import launch
from longrecall.ops.kernels.launch import on_device, why_not_tensors
from longrecall.ops.kernels.part_sums import added, part_sums
from longrecall.ops.linear_attention.chunked import STRONGEST_DECAY

WIDEST_FLOAT32_KEYS = 128
"""Products of float32 with wider keys do not fit into registers: most of the state would be in memory."""

MOST_STATES = launch.MOST_ROWS
"""The most states of a call: each has programs of its own along the second or third axis of a grid."""


def why_not(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor, **_: Any) -> str | None:
    """Why these inputs cannot be served, in words; None = they can."""
    if log_decay is not None and log_decay.dim() == 4:
        return "the kernels have one decay per head, not one per key channel"
    for name, width in (("key", q.shape[3]), ("value", v.shape[3])):
        if not 1 <= width <= WIDTHS[-1]:
            return f"the {name} width must be 1 to {WIDTHS[-1]}, not {width}"
    if q.shape[3] > WIDEST_FLOAT32_KEYS and v.dtype != torch.bfloat16:
        return f"keys of more than {WIDEST_FLOAT32_KEYS} channels, here {q.shape[3]}, are served in bfloat16 alone"
    if beta.shape[0] * beta.shape[2] > MOST_STATES:
        return f"a call has at most {MOST_STATES} states, not {beta.shape[0]} rows of {beta.shape[2]} heads"
    return why_not_tensors(q, k, v)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor, scale: float, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Same contract as `reference.gated_delta_rule`; q and k are rounded to the dtype of v, which decides the products.

    bfloat16 is multiplied in bfloat16. float16 is multiplied in tensor-float-32, which is as precise and has a wider
    range. float32 is multiplied by three products in tensor-float-32, about as precise as float32. Sums, decays and
    states are always float32.
    """
    return subhead_delta_rule(q, k, v, log_decay, beta, scale, state, None)


def subhead_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor,
    scale: float,
    state: Tensor,
    weights: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The contract of `subheads.subhead_delta_rule`; repeated values and subhead outputs are not stored."""
    keys, values = state.shape[2:]
    more_keys, more_values = built_width(keys) - keys, built_width(values) - values
    if more_keys or more_values:
        q, k, v = F.pad(q, (0, more_keys)), F.pad(k, (0, more_keys)), F.pad(v, (0, more_values))
        state = F.pad(state, (0, more_values, 0, more_keys))
    out, final = cast(
        tuple[Tensor, Tensor],
        _DeltaRule.apply(
            scale,
            q.to(v.dtype).contiguous(),
            k.to(v.dtype).contiguous(),
            *complete(v, log_decay, beta, weights, state),
        ),
    )
    if more_keys or more_values:
        out, final = out[..., :values].contiguous(), final[:, :, :keys, :values].contiguous()
    return out, final


def complete(
    v: Tensor, log_decay: Tensor | None, beta: Tensor, weights: Tensor | None, state: Tensor | None
) -> tuple[Any, ...]:
    """v, log decay, beta, weights and state as the kernels read them: contiguous, and in float32 except for v.

    Decay and weights that are None get their values. A state that is None, zeros, is neither made nor read.
    """
    value_heads = v.shape[2]
    if weights is None:
        weights = torch.ones(value_heads, beta.shape[2] // value_heads, device=v.device)
    if log_decay is None:
        log_decay = torch.zeros_like(beta, dtype=torch.float32)
    found = (v, log_decay.float(), beta.float(), weights.float())
    return (*(x.contiguous() for x in found), None if state is None else state.float().contiguous())


class _DeltaRule(torch.autograd.Function):
    """Scale, q, k, v, log decay, beta, weights, state or None -> outputs, final state."""

    @staticmethod
    def forward(ctx: Any, scale: float, *inputs: Any) -> tuple[Tensor, Tensor]:
        ctx.scale = scale
        ctx.set_materialize_grads(False)
        with on_device(inputs[0]):
            out, final, *solved = forward(scale, *inputs)
        ctx.save_for_backward(*solved, *inputs)
        return out, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        inverse, cumulative, *inputs = ctx.saved_tensors
        with on_device(inputs[0]):
            return (None, *backward(ctx.scale, tuple(inputs), (inverse, cumulative), *grads))


def _invert(plan: Plan, k: Tensor, log_decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """P ``[B, H, chunks * C, C]`` and the cumulative log decays ``[B, H, chunks * C]``."""
    shape = (plan.rows, plan.heads, plan.chunks * SIZE)
    cumulative = log_decay.new_empty(shape)
    inverse = k.new_empty((*shape, SIZE), dtype=plan.kept)
    if INVERSE.serves(k):
        from longrecall.ops.delta_rule.hopper import inverse as on_hopper

        on_hopper.invert_kernel[(plan.chunks * plan.heads, plan.rows)](
            k, log_decay, beta, inverse, cumulative, plan.length, STRONGEST_DECAY[torch.float32],
            **plan.heads_of, K=plan.key_width, num_warps=1,
        )  # fmt: skip
        return inverse, cumulative
    invert_kernel[(plan.chunks, plan.rows * plan.heads)](
        k, log_decay, beta, inverse, cumulative, plan.length, STRONGEST_DECAY[torch.float32],
        **plan.heads_of, K=plan.key_width, BK=min(plan.key_width, 32), MODE=plan.mode,
        num_warps=1 if plan.kept == torch.bfloat16 else 2,
    )  # fmt: skip
    return inverse, cumulative


def _walk(
    plan: Plan, inputs: tuple[Any, ...], solved: tuple[Tensor, Tensor], read: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Partial sums of outputs ``[parts, B, T, Hv, V]`` and final states, or every chunk's state and U (see kernel)."""
    q, k, v, _, beta, weights, state = inputs
    inverse, cumulative = solved
    processors = launch.processors(q)
    parts = plan.parts(processors) if read else plan.subheads
    grid = (plan.value_width // plan.value_block, plan.rows * plan.value_heads)
    whole = WALK.serves(v, q, k, inverse, **plan.widths, states=plan.rows * plan.heads, processors=processors)
    segments = 1 if whole else launch.segments(grid[0] * grid[1] * parts, plan.chunks, processors, products=True)
    # Without queries one more chunk can be loaded early.
    walking = plan.walking(2 if read or plan.kept == torch.float32 else 3)
    if segments > 1:
        first = beta.new_zeros(plan.states) if state is None else state
        state = delta_split.starts(plan, (*inputs[:-1], first), solved, segments)
        walking |= delta_split.ahead(plan, grid[0] * grid[1] * parts * segments, processors)
    out = final = states = corrections = beta
    if read:
        # Where every subhead has a part of its own, nothing is added up: outputs are rounded as they are written.
        kind = v.dtype if plan.subheads == 1 or plan.kept == torch.bfloat16 else torch.float32
        out, final = v.new_empty((parts, *v.shape), dtype=kind), beta.new_empty(plan.states)
    else:
        heads = (plan.rows, plan.heads)
        states = k.new_empty((*heads, plan.chunks, plan.key_width, plan.value_width), dtype=plan.kept)
        corrections = k.new_empty((*heads, plan.chunks * SIZE, plan.value_width), dtype=plan.kept)
    tensors = (q, k, v, beta, weights, cumulative, inverse, state, out, final, states, corrections)
    if whole:
        walks.walk(plan, tensors, read)
        return out, final, states, corrections
    walk_kernel[(*grid, parts * segments)](
        *tensors, plan.scale, plan.length, plan.chunks, plan.rows,
        PART=plan.subheads // parts, READ=read, **walking,
    )  # fmt: skip
    return out, final, states, corrections


def forward(scale: float, *inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outputs ``[B, T, Hv, V]`` in the dtype of v, the final state, float32, and what `_invert` found for the backward.

    Inputs as `_DeltaRule`.
    """
    q, k, v, log_decay, beta, _, _ = inputs
    plan = plan_of(q, v, beta, scale)
    solved = _invert(plan, k, log_decay, beta)
    out, final, _, _ = _walk(plan, inputs, solved, read=True)
    return part_sums(out, v.dtype), final, *solved


def backward(
    scale: float, inputs: tuple[Any, ...], solved: tuple[Tensor, Tensor], d_out: Tensor | None, d_final: Tensor | None
) -> list[Tensor | None]:
    """The gradients of q, k, v, log decay, beta, weights and state, a group of rows of the batch at a time.

    `d_out` and `d_final` None = zeros. The gradient of a state that requires none is None.
    """
    q, k, v, log_decay, beta, weights, state = inputs
    plan = plan_of(q, v, beta, scale)
    gradients = [*(torch.empty_like(x) for x in (q, k, v, log_decay, beta)), room(state)]
    d_weights: list[Tensor | None] = []
    d_out, d_final = given(v, d_out, d_final)
    step = plan.group_rows(launch.processors(q))
    for first in range(0, plan.rows, step):
        rows = slice(first, first + step)
        group = (q[rows], k[rows], v[rows], log_decay[rows], beta[rows], weights, of_rows(state, rows))
        found = (solved[0][rows], solved[1][rows])
        into = [of_rows(x, rows) for x in gradients]
        d_weights.append(group_backward(scale, group, found, d_out[rows], of_rows(d_final, rows), into))
    return [*gradients[:5], added(d_weights), gradients[5]]


def given(v: Tensor, d_out: Tensor | None, d_final: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The gradients of outputs and final state as the kernels read them; for outputs None becomes zeros."""
    d_out = torch.zeros_like(v) if d_out is None else d_out.contiguous()
    return d_out, None if d_final is None else d_final.contiguous()


def room(state: Tensor | None) -> Tensor | None:
    """Memory for the gradient of the first state; None where it requires none."""
    return None if state is None or not state.requires_grad else torch.empty_like(state)


def of_rows(x: Tensor | None, rows: slice) -> Tensor | None:
    """These rows of x, if there is any."""
    return None if x is None else x[rows]


def rows_at_a_time(q: Tensor, v: Tensor, beta: Tensor) -> int:
    """Rows of the batch for each call of `group_backward`, for a caller who also holds q, k, v and their sources.

    Only the shape of q ``[B, T, H * E, K]`` is used.
    """
    return plan_of(q, v, beta, 1.0).group_rows(launch.processors(v), more=4 * q[0].numel() + 3 * v[0].numel())


def group_backward(
    scale: float,
    inputs: tuple[Any, ...],
    solved: tuple[Tensor, Tensor],
    d_out: Tensor,
    d_final: Tensor | None,
    into: list[Any],
) -> Tensor | None:
    """Write the gradients of q, k, v, log decay, beta and state of some rows to `into`.

    The first three tensors of `into` may be q, k and v themselves, which are then overwritten. The last one is None for
    a state that requires no gradient. `solved` is what `_invert` returned. `d_final` None = zeros. Returns the gradient
    of the weights, None where they require none.
    """
    q, k, v, _, beta, weights, _ = inputs
    _, _, d_v, _, d_beta, d_state = into
    inverse, cumulative = solved
    plan = plan_of(q, v, beta, scale)
    _, _, states, corrections = _walk(plan, inputs, solved, read=False)
    d_states, d_targets = torch.empty_like(states), torch.empty_like(corrections)
    tensors = (q, k, beta, weights, cumulative, inverse, d_out, d_final, d_state, d_states, d_targets)
    if WALK_BACK.serves(v, q, k, d_out, inverse, **plan.widths):
        walks.walk_back(plan, tensors)
    else:
        walk_back_kernel[(plan.value_width // plan.value_block, plan.rows * plan.heads)](
            *tensors, plan.scale, plan.length, plan.chunks, **plan.walking(1 if plan.kept == torch.float32 else 2)
        )
    values_kernel[(triton.cdiv(plan.length, 32), plan.rows * plan.value_heads)](
        v, beta, d_targets, d_v, d_beta, plan.length, plan.chunks,
        **plan.heads_of, **plan.sharing, V=plan.value_width, ROWS=32, num_warps=4,
    )  # fmt: skip
    d_weights = _keys_backward(plan, inputs, (cumulative, d_out, states, corrections, d_states, d_targets), into)
    if not weights.requires_grad:
        return None
    # [Hkey, E, R] -> [Hkey, R, E]: from the order of the state heads to that of the weights.
    by_head = d_weights.sum((0, 1, 3)).unflatten(0, (-1, plan.subheads, plan.heads // plan.key_heads))
    by_value_head: Tensor = by_head.transpose(1, 2).reshape(weights.shape)
    return by_value_head


def _keys_backward(plan: Plan, inputs: tuple[Any, ...], walked: tuple[Tensor, ...], into: list[Any]) -> Tensor:
    """Write the gradients of q, k, log decay and the rest of beta's; return the weights' ``[blocks, B, H, chunks]``."""
    q, k, _, log_decay, beta, weights, _ = inputs
    d_q, d_k, _, d_log_decay, d_beta, _ = into
    block = plan.key_tile
    explicit = KEYS.serves(q, k, d_q, d_k, *walked, **plan.widths)
    blocks = 1 if explicit else plan.key_width // block
    # Value heads of one key head share its queries and keys: their gradients are added up afterwards, in float32.
    shared = plan.heads // plan.key_heads
    shape = (*q.shape[:2], plan.heads, plan.key_width)
    d_queries, d_keys = (x if shared == 1 else beta.new_empty(shape) for x in (d_q, d_k))
    sums = beta.new_empty((2, blocks, *beta.shape))
    d_weights: Tensor = beta.new_empty((blocks, plan.rows, plan.heads, plan.chunks))
    tensors = (q, k, beta, weights, *walked, d_queries, d_keys, sums[0], sums[1], d_weights)
    if explicit:
        from longrecall.ops.delta_rule.hopper import keys as delta_keys

        delta_keys.keys_backward(tensors, plan.scale, launch.processors(q))
    else:
        keys_kernel[(blocks * plan.chunks, plan.rows * plan.heads)](
            *tensors, plan.scale, plan.length, plan.chunks,
            **plan.heads_of, **plan.sharing, K=plan.key_width, V=plan.value_width, BK=block,
            BV=plan.value_tile, MODE=plan.mode, num_warps=4, num_stages=plan.tile_stages,
        )  # fmt: skip
    if shared > 1:
        for total, parts in ((d_q, d_queries), (d_k, d_keys)):
            total.copy_(parts.unflatten(2, (plan.key_heads, shared)).sum(3))
    finish_gates(sums[0], sums[1], log_decay, d_beta, d_log_decay, STRONGEST_DECAY[torch.float32])
    return d_weights
