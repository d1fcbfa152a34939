r"""Chunked gated delta rule in plain torch (Yang et al. 2025, section 3.3; the WY form of Yang et al. 2024b).

Write the update as :math:`S_t = e^{g_t} S_{t-1} + k_t^\top u_t` with :math:`u_t = \beta_t (v_t - e^{g_t} k_t S_{t-1})`.
Take a chunk of C tokens with inclusive cumulative log decay G, :math:`a = e^G`, :math:`w = e^{G_C - G}`,
:math:`D_{ij} = e^{G_i - G_j}` for j <= i and 0 above, and the state S before it. The rows that write stand over those
that read, :math:`R = [\beta K; \mathrm{scale}\, Q]` (2C rows), so that one product serves both:

.. math:: [L; M] = R K^\top \circ D, \qquad [Y; Z] = (a R) S, \qquad U = P (\beta V - Y), \qquad
          O = Z + M U, \qquad S' = e^{G_C} S + (w K)^\top U

with L strictly lower triangular and :math:`P = (I + L)^{-1}`, formed once per chunk by substitution.

Backward, from the last chunk to the first; :math:`\bar x` is the gradient of x and :math:`X = \beta V - Y`:

.. math:: \bar X = P^\top (M^\top \bar O + w K \bar S'), \qquad F = [-\bar X; \bar O], \qquad
          \bar S = e^{G_C} \bar S' + (a R)^\top F

Because :math:`\bar L = -P^\top (\bar U X^\top) P^\top = -\bar X U^\top`, one product gives both scores' gradients,
:math:`E = F U^\top \circ D` (no diagonal in its upper half), and what is left has no order in time:

.. math:: \bar R = E K + a \circ F S^\top, \qquad \bar K = E^\top R + w \circ U \bar S'^\top

:math:`\bar V = \beta \bar X`, and R passes its gradient on to K, beta and Q. G only enters as :math:`e^{G}` beside
rows of R and :math:`e^{-G}` beside rows of K, or in S', so that :math:`\bar G = \bar R \cdot R - \bar K \cdot K` row
by row, plus :math:`\langle \bar S', S' \rangle` at the chunk's last token. The forward keeps P, U and the states
between chunks, and the backward computes the rest again. No exponent is ever positive, and the control flow depends on
shapes alone, so that a CUDA graph can hold both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from longrecall.ops import chunked_generalised
from longrecall.ops.chunked_linear import STRONGEST_DECAY, chunk_size, segment_chunks
from longrecall.ops.shapes import repeat_heads


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor, scale: float, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Same contract as `reference.gated_delta_rule`; all tensors in the accumulation dtype."""
    if log_decay is not None and log_decay.dim() == 4:
        return chunked_generalised.gated_delta_rule(q, k, v, log_decay, beta, scale, state)
    heads, length = v.shape[2], v.shape[1]
    q, k = repeat_heads(q, heads), repeat_heads(k, heads)
    if log_decay is None:
        log_decay = torch.zeros_like(beta)
    decay = log_decay.clamp(min=STRONGEST_DECAY[log_decay.dtype])
    size = chunk_size(length)
    # A padded token has no key, no beta and no decay: it leaves the state as it is.
    inputs = tuple(_pad(x, size) for x in (q, k, v, decay[..., None], beta[..., None]))
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*inputs, state)):
        out, final = _GatedDeltaRule.apply(state, scale, size, *inputs)
    else:
        out, final, _ = _forward(inputs, state, scale, size, keep=False)
    return (out if out.shape[1] == length else out[:, :length]), final


class _Kept(NamedTuple):
    """What the backward of one segment needs and would be dear to compute again. N chunks; E = B * H."""

    inverse: Tensor
    """P ``[N, E, C, C]``."""
    corrections: Tensor
    """U ``[N, E, C, V]``."""
    states: Tensor
    """The state before every chunk and after the last, ``[N + 1, E, K, V]``."""


class _Chunks(NamedTuple):
    """One segment, laid out for batched products."""

    rows: Tensor
    """R ``[N, E, 2C, K]``."""
    keys: Tensor
    """K ``[N, E, C, K]``."""
    beta: Tensor
    """``[N, E, C, 1]``."""
    decay: Tensor
    """D ``[N, E, C, C]``."""
    decay_in: Tensor
    """a, for both halves of the rows, ``[N, E, 2C, 1]``."""
    decay_out: Tensor
    """w ``[N, E, C, 1]``."""

    def scores(self) -> Tensor:
        """[L; M] ``[N, E, 2C, C]``; the diagonal of L is not cleared."""
        return self.decayed(self.rows @ self.keys.transpose(2, 3))

    def decayed(self, scores: Tensor) -> Tensor:
        """Multiply both halves of `scores` by D in place."""
        scores.unflatten(2, (2, -1)).mul_(self.decay[:, :, None])
        return scores


class _GatedDeltaRule(torch.autograd.Function):
    """The whole sequence as one node: state, scale, C, then q, k, v, log decay, beta -> outputs, final state."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, scale: float, size: int, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        out, final, kept = _forward(inputs, state, scale, size, keep=True)
        ctx.scale, ctx.size = scale, size
        ctx.save_for_backward(*inputs, *(tensor for segment in kept for tensor in segment))
        return out, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Read once: under gradient checkpointing every access recomputes.
        saved = ctx.saved_tensors
        inputs, flat = saved[:5], saved[5:]
        kept = [_Kept(*flat[i : i + 3]) for i in range(0, len(flat), 3)]
        d_state, gradients = _backward(inputs, ctx.scale, ctx.size, kept, *grads)
        return (d_state, None, None, *gradients)


def _pad(x: Tensor, size: int) -> Tensor:
    """Zeros at the end of the time axis of ``[B, T, H, D]`` up to a multiple of C."""
    missing = -x.shape[1] % size
    return F.pad(x, (0, 0, 0, 0, 0, missing)) if missing else x


def _by_chunk(x: Tensor, size: int) -> Tensor:
    """``[B, T, H, D]`` -> a view ``[N, B, H, C, D]``."""
    view: Tensor = x.unflatten(1, (-1, size)).permute(1, 0, 3, 2, 4)
    return view


def _segments(views: list[Tensor]) -> list[tuple[Tensor, ...]]:
    """Cut views ``[N, ...]`` into segments of a few chunks."""
    count = segment_chunks(views[0])
    return list(zip(*(x.split(count) for x in views), strict=True))


def _product(x: Tensor, factor: Tensor | float, out: Tensor) -> None:
    """Write x * factor from a view ``[N, B, H, C, D]`` into `out` ``[N, E, C, D]``."""
    torch.mul(x, factor, out=out.unflatten(1, x.shape[1:3]))


def _forward(
    inputs: tuple[Tensor, ...], state: Tensor, scale: float, size: int, keep: bool
) -> tuple[Tensor, Tensor, list[_Kept]]:
    """Outputs, final state, and with `keep` what the backward needs of every segment."""
    out, kept = torch.empty_like(inputs[2], memory_format=torch.contiguous_format), []
    shape, state = state.shape, state.flatten(0, 1)
    for q_n, k_n, v_n, g_n, beta_n, out_n in _segments([_by_chunk(x, size) for x in (*inputs, out)]):
        chunks = _lay_out(q_n, k_n, g_n, beta_n, scale)
        segment = _run(chunks, (v_n * beta_n).flatten(1, 2).contiguous(), state, out_n)
        state = segment.states[-1]
        if keep:
            kept.append(segment)
    # A copy: the final state outlives the segment's states.
    return out, state.reshape(shape).clone(), kept


def _lay_out(q: Tensor, k: Tensor, log_decay: Tensor, beta: Tensor, scale: float) -> _Chunks:
    """Views ``[N, B, H, C, D]`` of one segment -> what its products need."""
    size = k.shape[3]
    keys, beta, log_decay = (x.flatten(1, 2).contiguous() for x in (k, beta, log_decay))
    rows = keys.new_empty((*keys.shape[:2], 2 * size, keys.shape[3]))
    torch.mul(keys, beta, out=rows[:, :, :size])
    _product(q, scale, rows[:, :, size:])
    cumulative = log_decay.cumsum(2)
    above = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    decay = (cumulative - cumulative.transpose(2, 3)).masked_fill_(above, float("-inf")).exp_()
    return _Chunks(
        rows,
        keys,
        beta,
        decay,
        decay_in=cumulative.exp().repeat(1, 1, 2, 1),
        decay_out=(cumulative[:, :, -1:] - cumulative).exp_(),
    )


def _run(chunks: _Chunks, targets: Tensor, state: Tensor, out: Tensor) -> _Kept:
    """Walk the chunks of a segment. `targets` is beta V and becomes X; `out` is the view that receives O."""
    count, size = targets.shape[0], targets.shape[2]
    scores = chunks.scores()
    inverse = _unit_lower_inverse(scores[:, :, :size])
    rows, keys = chunks.rows * chunks.decay_in, (chunks.keys * chunks.decay_out).transpose(2, 3)
    total = chunks.decay_in[:, :, -1:]
    corrections, states = torch.empty_like(targets), state.new_empty((count + 1, *state.shape))
    read = targets.new_empty((*rows.shape[:3], targets.shape[3]))
    states[0] = state
    for n in range(count):
        torch.bmm(rows[n], states[n], out=read[n])
        torch.bmm(inverse[n], targets[n].sub_(read[n, :, :size]), out=corrections[n])
        torch.mul(states[n], total[n], out=states[n + 1])
        states[n + 1].baddbmm_(keys[n], corrections[n])
    inner = scores[:, :, size:] @ corrections
    torch.add(*(x.unflatten(1, out.shape[1:3]) for x in (inner, read[:, :, size:])), out=out)
    return _Kept(inverse, corrections, states)


def _unit_lower_inverse(lower: Tensor) -> Tensor:
    """(I + L)^-1 of ``[..., C, C]``, where L is what lies below the diagonal. Substitution is stable for any keys."""
    identity = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    inverse: Tensor = torch.linalg.solve_triangular(lower, identity.expand_as(lower), upper=False, unitriangular=True)
    return inverse.contiguous()


def _backward(
    inputs: tuple[Tensor, ...], scale: float, size: int, kept: list[_Kept], d_out: Tensor, d_final: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Gradients of the initial state, and of q, k, v, log decay and beta; the segments from last to first."""
    gradients = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
    views = [_by_chunk(x, size) for x in (*inputs, d_out, *gradients)]
    d_state = d_final.flatten(0, 1)
    for segment, (q, k, v, log_decay, beta, d_o, *out) in zip(reversed(kept), reversed(_segments(views)), strict=True):
        chunks = _lay_out(q, k, log_decay, beta, scale)
        scores = chunks.scores()
        factors, d_states = _walk_back(chunks, scores[:, :, size:], segment.inverse, d_o, d_state)
        d_rows, d_keys = _rows_and_keys(chunks, segment, factors, d_states)
        # F holds the gradient of beta V with its sign turned.
        d_written, d_read, d_targets = d_rows[:, :, :size], d_rows[:, :, size:], factors[:, :, :size]
        written = _dot(d_written, chunks.keys)
        d_cumulative = chunks.beta * written + _dot(d_read, chunks.rows[:, :, size:]) - _dot(d_keys, chunks.keys)
        d_cumulative[:, :, -1] += _dot(d_states[1:].flatten(2), segment.states[1:].flatten(2))
        # G is a cumulative sum of the log decays: its gradient is summed from the end of the chunk.
        d_decay = d_cumulative.flip(2).cumsum(2).flip(2)
        d_targets, d_written, d_read, d_keys, d_decay, written, beta = (
            x.unflatten(1, q.shape[1:3]) for x in (d_targets, d_written, d_read, d_keys, d_decay, written, chunks.beta)
        )
        torch.mul(d_read, scale, out=out[0])
        torch.addcmul(d_keys, d_written, beta, out=out[1])
        torch.mul(d_targets, -beta, out=out[2])
        out[3].copy_(d_decay)
        torch.sub(written, _dot(d_targets, v), out=out[4])
        d_state = d_states[0]
    return d_state.reshape(d_final.shape).clone(), gradients


def _walk_back(
    chunks: _Chunks, reads: Tensor, inverse: Tensor, d_out: Tensor, d_state: Tensor
) -> tuple[Tensor, Tensor]:
    """F ``[N, E, 2C, V]`` and the gradients of the state before every chunk and after the last; `reads` is M."""
    count, _, size, _ = reads.shape
    rows, keys = (chunks.rows * chunks.decay_in).transpose(2, 3), chunks.keys * chunks.decay_out
    inverse, total = inverse.transpose(2, 3), chunks.decay_in[:, :, -1:]
    factors = reads.new_empty((count, reads.shape[1], 2 * size, d_out.shape[-1]))
    _product(d_out, 1.0, factors[:, :, size:])
    d_corrections = reads.transpose(2, 3) @ factors[:, :, size:]
    d_states = d_state.new_empty((count + 1, *d_state.shape))
    d_states[count] = d_state
    for n in reversed(range(count)):
        d_corrections[n].baddbmm_(keys[n], d_states[n + 1])
        torch.neg(inverse[n] @ d_corrections[n], out=factors[n, :, :size])
        torch.mul(d_states[n + 1], total[n], out=d_states[n])
        d_states[n].baddbmm_(rows[n], factors[n])
    return factors, d_states


def _rows_and_keys(chunks: _Chunks, segment: _Kept, factors: Tensor, d_states: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of R, and of K without what it owes to R."""
    size = chunks.keys.shape[2]
    d_scores = chunks.decayed(factors @ segment.corrections.transpose(2, 3))
    d_scores[:, :, :size].diagonal(dim1=2, dim2=3).zero_()
    d_rows = (factors @ segment.states[:-1].transpose(2, 3)).mul_(chunks.decay_in)
    d_keys = (segment.corrections @ d_states[1:].transpose(2, 3)).mul_(chunks.decay_out)
    d_scores, rows, keys = (x.flatten(0, 1) for x in (d_scores, chunks.rows, chunks.keys))
    d_rows.flatten(0, 1).baddbmm_(d_scores, keys)
    d_keys.flatten(0, 1).baddbmm_(d_scores.transpose(1, 2), rows)
    return d_rows, d_keys


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Row-wise dot products, ``[..., D]`` -> ``[..., 1]``."""
    return (a * b).sum(-1, keepdim=True)
