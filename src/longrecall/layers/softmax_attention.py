"""Queries against cached keys: who sees whom, the softmax of the scores, and the mean of the values."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from longrecall.layers.stepping.cache import PADDING_POSITION

QUERY_BLOCK = 1024
FLASH_DTYPES = (torch.bfloat16, torch.float16)
"""What torch's flash attention serves on a GPU: twice as fast without a mask, and linear in memory in one piece."""

FEW_QUERIES = 16
"""Up to so many queries those of a key head are multiplied as one matrix: no key is copied for each query head."""


class Scoring(NamedTuple):
    """What becomes of the products of queries and keys."""

    scale: float
    window: int | None = None
    """Tokens that a token sees, itself included; None = all before it."""
    soft_cap: float | None = None
    always: int = 0
    """The first so many keys are seen by every query, whatever their positions."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    key_positions: Tensor,
    scoring: Scoring,
    *,
    in_order: bool = False,
    by_group: bool = False,
) -> Tensor:
    """Blocks of queries against the keys they may see, so that memory is linear in the context: ``[B, T, H, V]``.

    Args:
        q: ``[B, T, H, P]``.
        k: ``[B, M + S, G, P]``, G a divisor of H, after M keys that are `always` seen.
        v: ``[B, M + S, G, V]``.
        positions: int64 ``[B, T]``.
        key_positions: int64 ``[B, S]``; -1 = none may see it.
        scoring: see there.
        in_order: columns hold the tokens one after the other without gaps; the queries are those of the last T keys.
            Keys that no query of a block can see are left out then.
        by_group: never copy a key for each of the query heads that share it.
    """
    q, k, v = (y.transpose(1, 2) for y in (q, k, v))
    outputs, before = [], key_positions.shape[1] - q.shape[2]
    for start in range(0, q.shape[2], QUERY_BLOCK):
        own, first, last = slice(start, start + QUERY_BLOCK), 0, key_positions.shape[1]
        if in_order and not scoring.always:
            last = min(last, before + start + QUERY_BLOCK)
            first = 0 if scoring.window is None else max(0, before + start + 1 - scoring.window)
        visible = _visible(positions[:, own], key_positions[:, first:last], scoring)
        keys = slice(first, scoring.always + last)
        outputs.append(_weighed(q[:, :, own], k[:, :, keys], v[:, :, keys], visible, scoring, by_group))
    return torch.cat(outputs, dim=2).transpose(1, 2)


def attend_causally(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """q ``[B, T, H, P]``, k, v ``[B, S, G, P]``: every token to itself and those before it, in one piece.

    The queries are those of the last T keys.
    """
    q, k, v = (y.transpose(1, 2) for y in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    if q.shape[2] != k.shape[2]:
        if grouped and k.shape[3] != v.shape[3]:
            # Of the kernels that know where such queries begin only flash knows groups, for values as wide as keys.
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
            grouped = False
        mask: Any = causal_lower_right(q.shape[2], k.shape[2])
        found: Tensor = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=grouped, scale=scale)
        return found.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped, scale=scale).transpose(1, 2)


def _visible(positions: Tensor, key_positions: Tensor, scoring: Scoring) -> Tensor:
    """Which keys each query sees: bool ``[B, T, M + S]``."""
    places, keys = positions[:, :, None], key_positions[:, None]
    visible = (keys <= places) & (keys != PADDING_POSITION)
    if scoring.window is not None:
        visible &= keys > places - scoring.window
    # A padded query may see nothing; let it see everything, since its output is never used.
    visible |= ~visible.any(-1, keepdim=True)
    return F.pad(visible, (scoring.always, 0), value=True)


def _weighed(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scoring: Scoring, by_group: bool) -> Tensor:
    """q ``[B, H, T, P]``, k ``[B, G, S, P]``, v ``[B, G, S, V]``, visible ``[B, T, S]`` -> ``[B, H, T, V]``."""
    grouped = q.shape[1] != k.shape[1]
    if by_group or scoring.soft_cap is not None or (grouped and q.is_cuda and q.shape[2] <= FEW_QUERIES):
        return _weighed_by_group(q, k, v, visible, scoring)
    if grouped and q.is_cuda:
        # With a mask no kernel of torch's knows groups.
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        grouped = False
    return F.scaled_dot_product_attention(q, k, v, visible[:, None], scale=scoring.scale, enable_gqa=grouped)


def _weighed_by_group(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scoring: Scoring) -> Tensor:
    """As written: the scores of all pairs, their softmax in float32, and the mean of the values.

    q ``[B, H, T, P]``, k ``[B, G, S, P]``, v ``[B, G, S, V]``, visible ``[B, T, S]`` -> ``[B, H, T, V]``.
    """
    groups, (rows, heads, length, _) = k.shape[1], q.shape
    # The query heads of a key head and the tokens side by side: one product for all of them.
    together = q.reshape(rows, groups, heads // groups * length, q.shape[3])
    scores = (together @ k.transpose(2, 3)).unflatten(2, (-1, length))
    scores = scores.to(torch.float64 if q.dtype == torch.float64 else torch.float32) * scoring.scale
    if scoring.soft_cap is not None:
        scores = scoring.soft_cap * (scores / scoring.soft_cap).tanh()
    shares = scores.masked_fill(~visible[:, None, None], float("-inf")).softmax(-1).to(v.dtype)
    read: Tensor = shares.flatten(2, 3) @ v
    return read.view(rows, heads, length, v.shape[3])
