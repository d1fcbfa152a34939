r"""Chunked gated delta rule in plain torch (Yang et al. 2025, section 3.3; the WY form of Yang et al. 2024b).

Write the update as :math:`S_t = e^{g_t} S_{t-1} + k_t^\top u_t` with :math:`u_t = \beta_t (v_t - e^{g_t} k_t S_{t-1})`. Within a
chunk, with cumulative log decay G and the state S before it, the corrections solve a unit lower-triangular system

.. math:: (I + L) U = \beta V - \beta e^{G} K S, \qquad L_{tj} = \beta_t e^{G_t - G_j} k_t k_j^\top \; (j < t)

so that with :math:`P = (I + L)^{-1}` the chunk needs only matrix products. The inverse has its own backward
(:math:`\bar L = -P^\top \bar P P^\top`), which is cheaper than differentiating through the triangular solve.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longrecall.ops.chunked_linear import STRONGEST_DECAY, from_chunks, to_chunks
from longrecall.ops.shapes import repeat_heads

SEGMENT = 1024


class _UnitLowerInverse(torch.autograd.Function):
    """(I + L)^-1 for strictly lower triangular L ``[..., C, C]``."""

    @staticmethod
    def forward(ctx: Any, lower: Tensor) -> Tensor:
        identity = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
        inverse = torch.linalg.solve_triangular(
            lower + identity, identity.expand_as(lower), upper=False, unitriangular=True
        )
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        transposed = inverse.transpose(-1, -2)
        return -(transposed @ grads[0] @ transposed).tril(-1)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor, scale: float, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Same contract as `reference.gated_delta_rule`; all tensors in the accumulation dtype."""
    heads = v.shape[2]
    q, k = repeat_heads(q, heads) * scale, repeat_heads(k, heads)
    if log_decay is not None:
        log_decay = log_decay.clamp(min=STRONGEST_DECAY[log_decay.dtype])
    outputs = []
    for start in range(0, q.shape[1], SEGMENT):
        piece = slice(start, start + SEGMENT)
        decay = None if log_decay is None else log_decay[:, piece]
        out, state = _segment(q[:, piece], k[:, piece], v[:, piece], decay, beta[:, piece], state)
        outputs.append(out)
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)), state


def _segment(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    length = q.shape[1]
    q, k, v = to_chunks(q), to_chunks(k), to_chunks(v)
    beta = to_chunks(beta[..., None])
    size = q.shape[-2]
    ones = torch.ones(size, size, dtype=torch.bool, device=q.device)
    keys_beta, queries, keys_out, total = k * beta, q, k, None
    lower = (keys_beta @ k.transpose(-1, -2)).masked_fill(ones.triu(), 0.0)
    scores = (q @ k.transpose(-1, -2)).masked_fill(ones.triu(1), 0.0)
    if log_decay is not None:
        cumulative = to_chunks(log_decay[..., None]).cumsum(-2)
        between = (cumulative - cumulative.transpose(-1, -2)).masked_fill(ones.triu(1), 0.0).exp()
        lower, scores = lower * between, scores * between
        decay_in = cumulative.exp()
        keys_beta, queries = keys_beta * decay_in, q * decay_in
        keys_out = k * (cumulative[..., -1:, :] - cumulative).exp()
        total = decay_in[..., -1:, :]
    inverse = _UnitLowerInverse.apply(lower)
    fresh, stale = inverse @ (v * beta), inverse @ keys_beta
    corrections, before, state = _run(fresh, stale, keys_out.transpose(-1, -2), total, state)
    return from_chunks(scores @ corrections + queries @ before, length), state


def _run(
    fresh: Tensor, stale: Tensor, keys: Tensor, total: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk the chunks: U = fresh - stale S and S' = e^total S + keys U. Returns all U, all S before a chunk, the last S."""
    corrections, before = [], []
    decays = [None] * fresh.shape[2] if total is None else total.unbind(2)
    for fresh_n, stale_n, keys_n, decay in zip(fresh.unbind(2), stale.unbind(2), keys.unbind(2), decays, strict=True):
        update = fresh_n - stale_n @ state
        corrections.append(update)
        before.append(state)
        kept = state if decay is None else state * decay
        state = kept + keys_n @ update
    return torch.stack(corrections, dim=2), torch.stack(before, dim=2), state
