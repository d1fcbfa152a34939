"""The definition of attention over chosen chunks, one query at a time, in the dtype it is given."""

from __future__ import annotations

import torch
from torch import Tensor


def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, chunks: Tensor, weights: Tensor | None, chunk: int, scale: float
) -> Tensor:
    r"""Softmax attention of every query over the tokens of the chunks chosen for it.

    .. math:: o_t = \frac{\sum_{c \in I_t} \sum_{j \in c} e^{\ell_{tj}} v_j}
                         {\sum_{c \in I_t} \sum_{j \in c} e^{\ell_{tj}} + N}, \qquad
              \ell_{tj} = \mathrm{scale}\, q_t k_j^\top + w_{tc}

    with w = 0 and N = 0 when `weights` is None (the cross-attention of RESONA, section 3.1, algorithm 3), else w the
    chunks' logits and N = `chunk`: a null chunk, whose tokens have logit 0 and value 0. A query without chunks gets 0.

    `q` ``[B, T, H, P]``; `k`, `v` ``[B, S, G, P]`` with G dividing H; `chunks` int ``[B, T, C]``, -1 = none; `weights`
    ``[B, T, C]`` or None. Returns ``[B, T, H, P]``.
    """
    heads, groups = q.shape[2], k.shape[2]
    rows = []
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            for h in range(heads):
                rows.append(_one(b, t, h, h * groups // heads, (q, k, v), (chunks, weights), chunk, scale))
    return torch.stack(rows).view(q.shape) if rows else torch.zeros_like(q)


def _one(
    b: int,
    t: int,
    h: int,
    g: int,
    tensors: tuple[Tensor, Tensor, Tensor],
    selection: tuple[Tensor, Tensor | None],
    chunk: int,
    scale: float,
) -> Tensor:
    q, k, v = tensors
    chunks, weights = selection
    logits, values = [], []
    for slot, index in enumerate(chunks[b, t].tolist()):
        for j in range(index * chunk, (index + 1) * chunk) if index >= 0 else ():
            logit = scale * (q[b, t, h] * k[b, j, g]).sum()
            logits.append(logit if weights is None else logit + weights[b, t, slot])
            values.append(v[b, j, g])
    if not logits:
        return torch.zeros_like(q[b, t, h])
    if weights is not None:
        logits += [logits[0].new_zeros(())] * chunk
        values += [torch.zeros_like(values[0])] * chunk
    return torch.softmax(torch.stack(logits), 0) @ torch.stack(values)
