r"""Chunked delta rules with one decay per key channel, in plain torch: Kimi Delta Attention's and RWKV-7's.

Both are :math:`S_t = e^{g_t} S_{t-1} + b_t^\top x_t + k_t^\top v_t` (rows of S scaled by channel), where :math:`x_t`
depends on the state before the token. Take a chunk of C tokens with inclusive cumulative log decay G, exclusive
:math:`G^- = G - g`, and the state S before it. Write :math:`(a, b)_{ij}` for the sum over channels of
:math:`a_{id} b_{jd} e^{G^-_{id} - G_{jd}}` where j < i, and :math:`(q, b)_{ij}` for that of
:math:`q_{id} b_{jd} e^{G_{id} - G_{jd}}` where j <= i. Then

.. math:: X = (I + (a, b))^{-1} (Y - a e^{G^-} S), \qquad O = q e^{G} S + (q, b) X + (q, k) V, \qquad
          S' = e^{G_C} S + (b e^{G_C - G})^\top X + (k e^{G_C - G})^\top V

* gated delta rule: b = k, :math:`a = \beta k e^{g}`, Y = :math:`\beta v`, no second pair (k, v);
* generalised delta rule: a the removal keys, b the replacement keys, Y = -(a, k) V.

This is the WY form of Yang et al. 2024b with a decay per channel. No exponent is ever positive: a block of scores is
halved again and again. The lower left quarter of every block is a product of two factors whose decays are measured from
the middle of the block. Autograd differentiates these formulas, a few chunks at a time. A segment keeps its inputs and
computes the rest again, so memory grows linearly with T.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from longrecall.ops.linear_attention.chunked import CHUNK, STRONGEST_DECAY, from_chunks, segment_chunks, to_chunks
from longrecall.ops.shapes import repeat_heads

# Blocks of this size are summed channel by channel; larger ones are halved.
EXPLICIT_BLOCK = 4


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, scale: float, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Same contract as `reference.gated_delta_rule`, `log_decay` ``[B, T, G, K]``; all in the accumulation dtype."""
    log_decay = repeat_heads(log_decay.clamp(min=STRONGEST_DECAY[log_decay.dtype]), v.shape[2])
    q, k = repeat_heads(q, v.shape[2]), repeat_heads(k, v.shape[2])
    beta = beta[..., None]
    return _over_segments((log_decay, q * scale, beta * k * log_decay.exp(), k, beta * v), state)


def generalised_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    removal: Tensor,
    replacement: Tensor,
    scale: float,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """Same contract as `reference.generalised_delta_rule`; all tensors in the accumulation dtype."""
    log_decay = log_decay.clamp(min=STRONGEST_DECAY[log_decay.dtype])
    inputs = (repeat_heads(x, v.shape[2]) for x in (log_decay, q * scale, removal, replacement))
    return _over_segments((*inputs, v, repeat_heads(k, v.shape[2])), state)


def _over_segments(inputs: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
    """g, q, a, b, v and perhaps k ``[B, T, H, ...]``, `state` ``[B, H, K, V]`` -> outputs, final state."""
    # split, not slices: the backward of a slice writes a gradient of the whole length.
    pieces = zip(*(x.split(CHUNK * segment_chunks(x), dim=1) for x in inputs), strict=True)
    differentiate = torch.is_grad_enabled() and any(x.requires_grad for x in (*inputs, state))
    outputs = []
    for piece in pieces:
        if differentiate:
            out, state = checkpoint(_segment, state, *piece, use_reentrant=False, preserve_rng_state=False)
        else:
            out, state = _segment(state, *piece)
        outputs.append(out)
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)), state


def _segment(
    state: Tensor, log_decay: Tensor, q: Tensor, a: Tensor, b: Tensor, v: Tensor, k: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Walk the chunks of one segment; a padded token has no keys and no decay and leaves the state as it is."""
    length = q.shape[1]
    cumulative = to_chunks(log_decay).cumsum(-2)
    q, a, b, v = (to_chunks(x) for x in (q, a, b, v))
    k = None if k is None else to_chunks(k)
    before = F.pad(cumulative[..., :-1, :], (0, 0, 1, 0))
    last = cumulative[..., -1:, :]
    to_end = (last - cumulative).exp()
    (read_b, removed_b), *others = _pair_scores(q, a, (b,) if k is None else (b, k), cumulative)
    inverse = _unit_lower_inverse(removed_b)
    written = (b * to_end).transpose(-1, -2)
    if k is None:
        targets, increments = v, None
    else:
        targets, increments = -(others[0][1] @ v), (k * to_end).transpose(-1, -2) @ v
    removal, total = a * before.exp(), last.exp().transpose(-1, -2)
    states, corrections = [], []
    for n in range(q.shape[2]):
        states.append(state)
        corrections.append(inverse[:, :, n] @ (targets[:, :, n] - removal[:, :, n] @ state))
        state = total[:, :, n] * state + written[:, :, n] @ corrections[-1]
        if increments is not None:
            state = state + increments[:, :, n]
    out = (q * cumulative.exp()) @ torch.stack(states, dim=2) + read_b @ torch.stack(corrections, dim=2)
    if k is not None:
        out = out + others[0][0] @ v
    return from_chunks(out, length), state


def _pair_scores(q: Tensor, a: Tensor, columns: tuple[Tensor, ...], cumulative: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(q, c) and (a, c) ``[..., C, C]`` for each of `columns`, as the formulas above define them."""
    # Row i of `a` is moved to the place of row i - 1, as its decay ends one token earlier. Its first row meets no
    # column.
    rows = torch.stack([q, F.pad(a[..., 1:, :], (0, 0, 0, 1))])[:, None]
    scores = causal_scores(rows, torch.stack(columns)[None], cumulative)
    shifted = F.pad(scores[1, ..., :-1, :], (0, 0, 1, 0))
    return list(zip(scores[0], shifted, strict=True))


def causal_scores(rows: Tensor, columns: Tensor, cumulative: Tensor) -> Tensor:
    r""":math:`A_{ij} = \sum_d r_{id} c_{jd} e^{G_{id} - G_{jd}}` for j <= i, zero above the diagonal.

    `rows`, `columns` and the inclusive cumulative log decay G (never rising) are ``[..., C, K]``. Their leading
    dimensions broadcast. Returns ``[..., C, C]``.
    """
    size = cumulative.shape[-2]
    if size <= EXPLICIT_BLOCK or size % 2:
        causal = torch.ones(size, size, dtype=torch.bool, device=rows.device).tril()[..., None]
        distance = cumulative[..., :, None, :] - cumulative[..., None, :, :]
        weight = distance.masked_fill(~causal, float("-inf")).exp()
        return torch.einsum("...ijd,...jd->...ij", rows[..., :, None, :] * weight, columns)
    rows, columns, cumulative = (x.unflatten(-2, (2, -1)) for x in (rows, columns, cumulative))
    upper, lower = causal_scores(rows, columns, cumulative).unbind(-3)
    middle = cumulative[..., 0, -1:, :]
    late = rows[..., 1, :, :] * (cumulative[..., 1, :, :] - middle).exp()
    early = columns[..., 0, :, :] * (middle - cumulative[..., 0, :, :]).exp()
    below = late @ early.transpose(-1, -2)
    half = size // 2
    return torch.cat([F.pad(upper, (0, half)), torch.cat([below, lower], dim=-1)], dim=-2)


def _unit_lower_inverse(lower: Tensor) -> Tensor:
    """(I + L)^-1 of a strictly lower triangular L ``[..., C, C]``, by substitution, stable for any keys."""
    identity = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    inverse: Tensor = torch.linalg.solve_triangular(lower, identity.expand_as(lower), upper=False, unitriangular=True)
    return inverse
