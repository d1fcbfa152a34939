"""The linear recurrence in plain torch: chunks of time side by side, then what each hands on to the next.

A sequence of T tokens is cut into about sqrt(T) chunks. All walk through their tokens together from a state of zeros,
then the states at their beginnings follow one from another, and each token adds what is left of its chunk's. That
makes 2 sqrt(T) small steps in the place of T. No exponent is positive.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from longrecall.ops.linear_recurrence.gradient import differentiable
from longrecall.ops.linear_recurrence.reference import NOTHING, join_state, split_state

LinearRecurrence = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def linear_recurrence(x: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Same contract as `reference.linear_recurrence`; all tensors in the accumulation dtype, T at least 1."""
    return _uncompiled(x, log_decay, state)


def _differentiable(x: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    return differentiable(_scan, x, log_decay, state)


# A compiler would unroll the loops over time; it calls the scan as it is instead.
_uncompiled: LinearRecurrence = torch.compiler.disable(_differentiable)


def chunk_length(length: int) -> int:
    """Tokens of a chunk: as many as there are chunks."""
    return max(1, math.isqrt(length))


def _scan(x: Tensor, log_decay: Tensor, state: Tensor, *, reverse: bool = False) -> Tensor:
    if reverse:
        # A token is multiplied by the decay of the one after it; the last one has none after it.
        shifted = F.pad(log_decay[:, 1:], (0, 0, 0, 1))
        return _scan(x.flip(1), shifted.flip(1), torch.zeros_like(state)).flip(1)
    length = x.shape[1]
    size = chunk_length(length)
    h, decay = in_chunks(x, size), in_chunks(log_decay, size).exp()
    for t in range(1, size):
        h[t].addcmul_(decay[t], h[t - 1])
    left = torch.cumprod(decay, dim=0)
    starts = torch.empty_like(h[0])
    for chunk in range(h.shape[2]):
        starts[:, chunk] = state
        state = torch.addcmul(h[-1, :, chunk], left[-1, :, chunk], state)
    return joined(h.addcmul_(left, starts), length)


def weighted_average(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    bonus: Tensor,
    state: Tensor,
    recurrence: LinearRecurrence = linear_recurrence,
) -> tuple[Tensor, Tensor]:
    r"""Same contract as `reference.weighted_average`, T at least 1, by a linear recurrence.

    With the log weights :math:`l_t` of all sums and :math:`p_t = \sigma(k_t - l_{t-1} - w)` the share of a token, the
    average follows :math:`a_t = (1 - p_t) a_{t-1} + p_t v_t`.
    """
    average, weight = split_state(state)
    weights = log_weights(k, log_decay, weight)
    before = torch.cat([weight[:, None], weights[:, :-1]], dim=1)
    ahead = k - (before + log_decay)
    averages, average = recurrence(ahead.sigmoid() * v, F.logsigmoid(-ahead), average)
    earlier = torch.cat([split_state(state)[0][:, None], averages[:, :-1]], dim=1)
    out = torch.lerp(earlier, v, torch.sigmoid(k + bonus - before))
    return out, join_state(average, weights[:, -1])


def log_weights(k: Tensor, log_decay: Tensor, weight: Tensor) -> Tensor:
    """l_t = log(exp(l_{t-1} + w_t) + exp(k_t)), ``[B, T, C]``, from l_0 `weight` ``[B, C]``; chunks as above."""
    length = k.shape[1]
    size = chunk_length(length)
    keys, decay = in_chunks(k, size, fill=NOTHING), in_chunks(log_decay, size)
    local = [keys[0]]
    for t in range(1, size):
        local.append(torch.logaddexp(local[-1] + decay[t], keys[t]))
    passed = decay.cumsum(0)
    starts = []
    for chunk in range(keys.shape[2]):
        starts.append(weight)
        weight = torch.logaddexp(weight + passed[-1, :, chunk], local[-1][:, chunk])
    return joined(torch.logaddexp(torch.stack(starts, dim=1) + passed, torch.stack(local)), length)


def in_chunks(x: Tensor, size: int, fill: float = 0.0) -> Tensor:
    """``[B, T, C]`` -> a new ``[size, B, chunks, C]``: time within a chunk first; `fill` after the end."""
    missing = -x.shape[1] % size
    padded = F.pad(x, (0, 0, 0, missing), value=fill) if missing else x
    chunks: Tensor = padded.unflatten(1, (-1, size)).permute(2, 0, 1, 3)
    return chunks.clone(memory_format=torch.contiguous_format)


def joined(chunks: Tensor, length: int) -> Tensor:
    """The inverse of `in_chunks`: ``[size, B, chunks, C]`` -> ``[B, length, C]``."""
    return chunks.permute(1, 2, 0, 3).flatten(1, 2)[:, :length]
