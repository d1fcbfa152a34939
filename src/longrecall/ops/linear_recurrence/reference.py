"""The definition of the linear recurrence and of RWKV-4's weighted average, one step at a time, in the given dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from longrecall.ops.shapes import stack_steps


def linear_recurrence(x: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    r"""Every channel by itself: :math:`h_t = e^{g_t} h_{t-1} + x_t`.

    `x` and `log_decay` g ``[B, T, C]``, `state` ``[B, C]``. Returns h ``[B, T, C]`` and the last one ``[B, C]``.
    """
    outputs = []
    for t in range(x.shape[1]):
        state = log_decay[:, t].exp() * state + x[:, t]
        outputs.append(state)
    return stack_steps(outputs, x), state


def weighted_average(k: Tensor, v: Tensor, log_decay: Tensor, bonus: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    r"""RWKV-4's average of the values so far, with weights that fade (Peng et al. 2023, section 3.1).

    .. math:: o_t = \frac{\sum_{i<t} e^{(t-1-i) w + k_i} v_i + e^{u + k_t} v_t}
                         {\sum_{i<t} e^{(t-1-i) w + k_i} + e^{u + k_t}}

    The state is the average without the bonus and the logarithm of the sum of its weights: neither overflows.

    `k`, `v` and `log_decay` w ``[B, T, C]``; `bonus` u ``[C]``; `state` ``[B, 3, C]``: average, log weight, and 1 where
    a token was read (0: the other two count for nothing). Returns o ``[B, T, C]`` and the final state.
    """
    average, weight = split_state(state)
    outputs = []
    for t in range(k.shape[1]):
        outputs.append(torch.lerp(average, v[:, t], torch.sigmoid(k[:, t] + bonus - weight)))
        faded = weight + log_decay[:, t]
        average = torch.lerp(average, v[:, t], torch.sigmoid(k[:, t] - faded))
        weight = torch.logaddexp(faded, k[:, t])
    return stack_steps(outputs, v), join_state(average, weight)


NOTHING = -1e30
"""The log weight of no token; finite, so that no gradient is infinity less infinity."""


def split_state(state: Tensor) -> tuple[Tensor, Tensor]:
    """Average and log weight ``[B, C]`` of a state ``[B, 3, C]``."""
    average, weight, read = state.unbind(1)
    return torch.where(read > 0, average, 0.0), torch.where(read > 0, weight, NOTHING)


def join_state(average: Tensor, weight: Tensor) -> Tensor:
    """The inverse of `split_state`; zeros where the weight is that of no token."""
    read = weight > NOTHING / 2
    return torch.stack([torch.where(read, average, 0.0), torch.where(read, weight, 0.0), read.to(weight.dtype)], dim=1)
