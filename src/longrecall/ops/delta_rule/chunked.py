r"""Chunked gated delta rule in plain torch (Yang et al. 2025, section 3.3; the WY form of Yang et al. 2024b).

Write the update as :math:`S_t = e^{g_t} S_{t-1} + \beta_t k_t^\top w_t` with :math:`w_t = v_t - e^{g_t} k_t S_{t-1}`.
Take a chunk of C tokens with inclusive cumulative log decay G, :math:`a = e^G`, :math:`b = e^{G_C - G}`,
:math:`D_{ij} = e^{G_i - G_j}` for j <= i and 0 above, and the state S before it. Keys and queries are stacked,
:math:`R = [K; Q]` (2C rows; Q is already scaled), so that one product serves both:

.. math:: [L; M] = R K^\top \circ D \beta^\top, \qquad [Y; Z] = (a R) S, \qquad W = P (V - Y), \qquad
          O = Z + M W, \qquad S' = e^{G_C} S + (\beta b K)^\top W

with L strictly lower triangular and :math:`P = (I + L)^{-1}`, formed once per chunk by substitution in blocks.

Backward, from the last chunk to the first; :math:`\bar x` is the gradient of x and :math:`X = V - Y`:

.. math:: \bar X = P^\top (M^\top \bar O + \beta b K \bar S'), \qquad F = [-\bar X; \bar O], \qquad
          \bar S = e^{G_C} \bar S' + (a R)^\top F

Because :math:`\bar L = -P^\top (\bar W X^\top) P^\top = -\bar X W^\top`, one product gives both scores' gradients,
:math:`E = F W^\top \circ D` (no diagonal in its upper half), and the other gradients have no order in time:

.. math:: \bar R = (E \beta^\top) K + a \circ F S^\top, \qquad
          H = E^\top R + b \circ W \bar S'^\top, \qquad \bar V = \bar X, \qquad \bar\beta = H \cdot K

(row by row) where H is the gradient of :math:`\beta K`, and R passes its gradient on to K and Q. G only enters as the
factor :math:`e^{G}` of rows of R, as the factor :math:`e^{-G}` of rows of :math:`\beta K`, and in S'. Therefore
:math:`\bar G = \bar R \cdot R - \beta \bar\beta`, plus :math:`\langle \bar S', S' \rangle` at the chunk's last token.
The forward keeps P, M, W and the states between chunks, and the backward computes the rest again. No exponent is ever
positive. The control flow depends on shapes only, so that a CUDA graph can record both passes.

The kernels in triton/ multiply the values by beta first: their X and U are beta times X and W here, and their inverse
is :math:`\beta P \beta^{-1}`.

N chunks of E = B * H matrices each are stored chunk after chunk, ``[N E, ...]``, so a segment is a slice of them.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from longrecall.ops.delta_rule import chunked_generalised
from longrecall.ops.linear_attention.chunked import CHUNK, SEGMENT_CHUNKS, STRONGEST_DECAY
from longrecall.ops.shapes import repeat_heads

# Numbers of K or V in a segment on a CPU, 1 MiB in float32: the operands of its products then stay in the caches, and
# there is enough work for two threads.
SEGMENT_NUMBERS_CPU = 2**18
# The size of the blocks that are inverted by substitution.
SUBSTITUTION = 16
# exp(-60) = 9e-27 changes no sum in float32, and exponentials that underflow take twenty times as long.
LOWEST_EXPONENT = {torch.float32: -60.0, torch.float64: -700.0}


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
    size = _chunk_size(length)
    # A padded token has no key, no beta and no decay: it leaves the state as it is.
    inputs = tuple(_pad(x, size) for x in (q, k, v, decay[..., None], beta[..., None]))
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*inputs, state)):
        out, final = _GatedDeltaRule.apply(state, scale, size, *inputs)
    else:
        out, final, _ = _forward(inputs, state, scale, size, keep=False)
    return (out if out.shape[1] == length else out[:, :length]), final


class _Kept(NamedTuple):
    """What the forward keeps for the backward: it would take long to compute again."""

    inverse: Tensor
    """P ``[N E, C, C]``."""
    scores: Tensor
    """M ``[N E, C, C]``."""
    errors: Tensor
    """W ``[N E, C, V]``."""
    states: Tensor
    """The state before every chunk and after the last, ``[(N + 1) E, K, V]``."""

    def part(self, first: int, last: int, heads: int) -> _Kept:
        """The matrices from `first` to `last`, and the states around them."""
        inverse, scores, errors = (x[first:last] for x in self[:3])
        return _Kept(inverse, scores, errors, self.states[first : last + heads])


class _Gates(NamedTuple):
    """Decays and betas of N chunks."""

    cumulative: Tensor
    """G ``[N E, C, 1]``."""
    beta: Tensor
    """``[N E, C, 1]``."""
    rows: Tensor
    """a, twice ``[N E, 2C, 1]``."""
    keys: Tensor
    """b ``[N E, C, 1]``."""
    written: Tensor
    """beta b ``[N E, C, 1]``."""
    total: Tensor
    """The decay of a whole chunk, ``[N E, 1, 1]``."""

    def part(self, first: int, last: int) -> _Gates:
        return _Gates(*(x[first:last] for x in self))


class _Chunks(NamedTuple):
    """One segment of n chunks, laid out for batched products."""

    rows: Tensor
    """R ``[n E, 2C, K]``."""
    keys: Tensor
    """K ``[n E, C, K]``, the upper half of the rows."""
    decay: Tensor
    """D ``[n E, 1, C, C]``."""
    rows_in: Tensor
    """a R ``[n E, 2C, K]``."""
    keys_out: Tensor
    """beta b K ``[n E, C, K]``."""


class _GatedDeltaRule(torch.autograd.Function):
    """The whole sequence as one node: state, scale, C, then q, k, v, log decay, beta -> outputs, final state."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, scale: float, size: int, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        out, final, kept = _forward(inputs, state, scale, size, keep=True)
        ctx.scale, ctx.size = scale, size
        ctx.save_for_backward(*inputs, *kept)
        return out, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Read once: under gradient checkpointing every access recomputes.
        saved = ctx.saved_tensors
        # Outside of autocast, as the forward: under it the products would have a narrower dtype than their sums.
        kind = grads[0].device.type
        with torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext():
            d_state, gradients = _backward(saved[:5], ctx.scale, ctx.size, _Kept(*saved[5:]), *grads)
        return (d_state, None, None, *gradients)


def _chunk_size(length: int) -> int:
    """`CHUNK`, or for a shorter sequence the least size that halves down to `SUBSTITUTION`."""
    size = SUBSTITUTION
    while size < min(length, CHUNK):
        size *= 2
    return size


def _pad(x: Tensor, size: int) -> Tensor:
    """Zeros at the end of the time axis of ``[B, T, H, D]`` up to a multiple of C."""
    missing = -x.shape[1] % size
    return F.pad(x, (0, 0, 0, 0, 0, missing)) if missing else x


def _by_chunk(x: Tensor, size: int) -> Tensor:
    """``[B, T, H, D]`` -> a view ``[N, B, H, C, D]``."""
    view: Tensor = x.unflatten(1, (-1, size)).permute(1, 0, 3, 2, 4)
    return view


def _segments(k: Tensor, v: Tensor, size: int) -> list[range]:
    """The chunks of every segment. Those of one segment are computed together."""
    batch, length, heads, width = k.shape
    count = SEGMENT_CHUNKS
    if k.device.type == "cpu":
        count = max(1, SEGMENT_NUMBERS_CPU // max(1, batch * heads * size * max(width, v.shape[-1])))
    chunks = range(length // size)
    return [chunks[start : start + count] for start in chunks[::count]]


def _gates(log_decay: Tensor, beta: Tensor, size: int) -> _Gates:
    """Log decays and betas ``[B, T, H, 1]`` -> what the chunks need of them."""
    cumulative, beta = (_by_chunk(x, size).flatten(0, 2).contiguous() for x in (log_decay, beta))
    cumulative = cumulative.cumsum(1)
    lowest = LOWEST_EXPONENT[cumulative.dtype]
    decay = cumulative.clamp(min=lowest).exp_()
    keys = (cumulative[:, -1:] - cumulative).clamp_(min=lowest).exp_()
    return _Gates(cumulative, beta, torch.cat([decay, decay], dim=1), keys, beta * keys, decay[:, -1:])


def _lay_out(q: Tensor, k: Tensor, scale: float, gates: _Gates) -> _Chunks:
    """Views ``[n, B, H, C, K]`` of one segment -> what its products need."""
    *outer, size, width = k.shape
    rows = k.new_empty((gates.beta.shape[0], 2 * size, width))
    halves = rows.view(*outer, 2 * size, width)
    halves[..., :size, :].copy_(k)
    torch.mul(q, scale, out=halves[..., size:, :])
    keys = rows[:, :size]
    # Exponents above the diagonal are positive: they are set to 0 first, and their results are removed after.
    decay = (gates.cumulative - gates.cumulative.transpose(1, 2)).clamp_(LOWEST_EXPONENT[k.dtype], 0).exp_().tril_()
    return _Chunks(rows, keys, decay[:, None], rows * gates.rows, keys * gates.written)


def _scores(a: Tensor, b: Tensor, decay: Tensor) -> Tensor:
    """a b^T with D beside both halves of its rows, ``[n E, 2C, C]``."""
    scores = torch.bmm(a, b.transpose(1, 2))
    scores.view(scores.shape[0], 2, *decay.shape[2:]).mul_(decay)
    return scores


def _forward(
    inputs: tuple[Tensor, ...], state: Tensor, scale: float, size: int, keep: bool
) -> tuple[Tensor, Tensor, _Kept]:
    """Outputs, final state, and with `keep` what the backward needs of all chunks."""
    q, k, v, log_decay, beta = inputs
    heads = k.shape[0] * k.shape[2]
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    gates = _gates(log_decay, beta, size)
    views, segments = [_by_chunk(x, size) for x in (q, k, v, out)], _segments(k, v, size)
    room = _room(gates.beta.shape[0] if keep else heads * len(segments[0]), state, size)
    final = state.flatten(0, 1)
    for chunks in segments:
        first, last = heads * chunks.start, heads * chunks.stop
        kept = room.part(first, last, heads) if keep else room.part(0, last - first, heads)
        if chunks.start == 0 or not keep:
            kept.states[:heads].copy_(final)
        q_n, k_n, v_n, out_n = (x[chunks.start : chunks.stop] for x in views)
        part = gates.part(first, last)
        _run(_lay_out(q_n, k_n, scale, part), part, v_n, kept, out_n)
        final = kept.states[-heads:]
    # A copy, as the caller keeps the final state longer than the others.
    return out, final.reshape(state.shape).clone(), room


def _room(count: int, state: Tensor, size: int) -> _Kept:
    """Memory for what is kept of `count` matrices; `state` is ``[B, H, K, V]``."""
    batch, heads, width, value_width = state.shape
    square, states = (count, size, size), (count + batch * heads, width, value_width)
    return _Kept(*(state.new_empty(shape) for shape in (square, square, (count, size, value_width), states)))


def _run(chunks: _Chunks, gates: _Gates, v: Tensor, kept: _Kept, out: Tensor) -> None:
    """Walk the chunks of a segment from the first of its states; fills the rest of `kept` and the view `out`."""
    size, heads = chunks.keys.shape[1], kept.states.shape[0] - kept.errors.shape[0]
    scores = _scores(chunks.rows, chunks.keys, chunks.decay).mul_(gates.beta.transpose(1, 2))
    _invert(scores[:, :size], out=kept.inverse)
    before, after = kept.states[:-heads], kept.states[heads:]
    targets = torch.empty_like(kept.errors)
    targets.view(v.shape).copy_(v)
    rows_in, keys_out = chunks.rows_in[:, :size], chunks.keys_out.transpose(1, 2)
    by_step = (rows_in, keys_out, gates.total, targets, kept.inverse, kept.errors, before, after)
    for rows, keys, total, target, inverse, errors, old, new in zip(*(x.split(heads) for x in by_step), strict=True):
        torch.bmm(inverse, target.baddbmm_(rows, old, alpha=-1), out=errors)
        torch.mul(old, total, out=new).baddbmm_(keys, errors)
    # A copy, as half of `scores` is not needed for the backward.
    kept.scores.copy_(scores[:, size:])
    read = torch.bmm(chunks.rows_in[:, size:], before, out=targets).baddbmm_(kept.scores, kept.errors)
    out.copy_(read.view(out.shape))


def _invert(lower: Tensor, out: Tensor) -> None:
    """Write (I + L)^-1 into `out`, L the strictly lower triangle of `lower` ``[M, C, C]``; the rest is not used.

    Blocks on the diagonal are inverted by substitution, which is stable for any keys. Then two neighbours X and Y
    become one block of twice their size: its lower left quarter is -Y^-1 B X^-1, where B is the block of L there.
    """
    size = SUBSTITUTION
    identity = torch.eye(size, dtype=lower.dtype, device=lower.device)
    blocks = _diagonal_blocks(lower, size)
    solved = torch.linalg.solve_triangular(blocks, identity.expand_as(blocks), upper=False, unitriangular=True)
    _diagonal_blocks(out.zero_(), size).copy_(solved)
    while size < out.shape[1]:
        for middle in range(size, out.shape[1], 2 * size):
            first, second = slice(middle - size, middle), slice(middle, middle + size)
            corner = torch.bmm(lower[:, second, first], out[:, first, first])
            # Not into the view at once: a product into memory that is not contiguous takes its matrices one by one.
            torch.neg(torch.bmm(out[:, second, second], corner), out=out[:, second, first])
        size *= 2


def _diagonal_blocks(x: Tensor, size: int) -> Tensor:
    """``[M, C, C]`` -> a view of its blocks on the diagonal ``[M, C / size, size, size]``."""
    blocks: Tensor = x.unflatten(2, (-1, size)).unflatten(1, (-1, size))
    return blocks.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)


def _backward(
    inputs: tuple[Tensor, ...], scale: float, size: int, kept: _Kept, d_out: Tensor, d_final: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Gradients of the initial state, and of q, k, v, log decay and beta; the segments from last to first."""
    q, k, v, log_decay, beta = inputs
    heads = k.shape[0] * k.shape[2]
    gradients = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
    gates = _gates(log_decay, beta, size)
    views = [_by_chunk(x, size) for x in (q, k, d_out, *gradients)]
    by_row, d_beta = torch.empty_like(gates.rows), torch.empty_like(gates.beta)
    by_state, d_state = torch.empty_like(gates.total), d_final.flatten(0, 1)
    for steps in reversed(_segments(k, v, size)):
        here = slice(heads * steps.start, heads * steps.stop)
        q_n, k_n, d_out_n, d_q, d_k, d_v = (x[steps.start : steps.stop] for x in views[:6])
        part, segment = gates.part(here.start, here.stop), kept.part(here.start, here.stop, heads)
        chunks = _lay_out(q_n, k_n, scale, part)
        d_targets, factors, d_states = _walk_back(chunks, part, segment, d_out_n, d_state)
        d_rows, d_keys = _rows_and_keys(chunks, part, segment, factors, d_states)
        halves = d_rows.view(*k_n.shape[:3], 2 * size, -1)
        torch.mul(halves[..., size:, :], scale, out=d_q)
        torch.addcmul(halves[..., :size, :], d_keys.view(k_n.shape), part.beta.view(*k_n.shape[:4], 1), out=d_k)
        d_v.copy_(d_targets.view(d_v.shape))
        # In place: what is not read again needs no memory of its own.
        torch.sum(d_rows.mul_(chunks.rows), dim=-1, keepdim=True, out=by_row[here])
        torch.sum(d_keys.mul_(chunks.keys), dim=-1, keepdim=True, out=d_beta[here])
        d_after = d_states[heads:].mul_(segment.states[heads:])
        torch.sum(d_after.flatten(1), dim=-1, keepdim=True, out=by_state[here, 0])
        d_state = d_states[:heads]
    d_cumulative = by_row[:, :size] + by_row[:, size:] - gates.beta * d_beta
    d_cumulative[:, -1:] += by_state
    # G is a cumulative sum of the log decays: its gradient is summed from the end of the chunk.
    d_decay = d_cumulative.flip(1).cumsum(1).flip(1)
    views[6].copy_(d_decay.view(views[6].shape))
    views[7].copy_(d_beta.view(views[7].shape))
    return d_state.reshape(d_final.shape).clone(), gradients


def _walk_back(
    chunks: _Chunks, gates: _Gates, kept: _Kept, d_out: Tensor, d_state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of X ``[n E, C, V]``, F ``[n E, 2C, V]``, and the gradients of the states as `_Kept` has them."""
    (count, size, _), heads, width = chunks.keys.shape, d_state.shape[0], d_out.shape[-1]
    factors = d_state.new_empty((count, 2 * size, width))
    factors.view(*d_out.shape[:3], 2 * size, width)[..., size:, :].copy_(d_out)
    d_errors = torch.bmm(kept.scores.transpose(1, 2), factors[:, size:])
    d_states = d_state.new_empty((count + heads, *d_state.shape[1:]))
    d_states[count:] = d_state
    d_targets = torch.empty_like(d_errors)
    rows, solve = chunks.rows_in.transpose(1, 2), kept.inverse.transpose(1, 2)
    by_step = (rows, chunks.keys_out, gates.total, solve, d_errors, d_targets, factors[:, :size], factors)
    states = d_states[:-heads], d_states[heads:]
    steps = list(zip(*(x.split(heads) for x in (*by_step, *states)), strict=True))
    for rows_n, keys, total, solve_n, d_error, d_target, half, factor, before, after in reversed(steps):
        # Not into the view at once: a product into memory that is not contiguous takes its matrices one by one.
        torch.neg(torch.bmm(solve_n, d_error.baddbmm_(keys, after), out=d_target), out=half)
        torch.mul(after, total, out=before).baddbmm_(rows_n, factor)
    return d_targets, factors, d_states


def _rows_and_keys(
    chunks: _Chunks, gates: _Gates, kept: _Kept, factors: Tensor, d_states: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of R ``[n E, 2C, K]`` and H ``[n E, C, K]``."""
    size, heads = chunks.keys.shape[1], kept.states.shape[0] - kept.errors.shape[0]
    d_scores = _scores(factors, kept.errors, chunks.decay)
    d_scores[:, :size].diagonal(dim1=1, dim2=2).zero_()
    d_keys = torch.bmm(kept.errors, d_states[heads:].transpose(1, 2)).mul_(gates.keys)
    d_keys.baddbmm_(d_scores.transpose(1, 2), chunks.rows)
    d_rows = torch.bmm(factors, kept.states[:-heads].transpose(1, 2)).mul_(gates.rows)
    d_rows.baddbmm_(d_scores.mul_(gates.beta.transpose(1, 2)), chunks.keys)
    return d_rows, d_keys
