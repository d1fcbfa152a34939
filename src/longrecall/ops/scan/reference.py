"""The definition of the selective scan, one step at a time, in the dtype it is given."""

from __future__ import annotations

import torch
from torch import Tensor

from longrecall.ops.shapes import stack_steps


def selective_scan(x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    r"""Selective scan (Gu and Dao 2023, section 3.2), without the skip connection.

    .. math:: h_{t,n,i} = e^{\Delta_{t,i} A_{in}} h_{t-1,n,i} + \Delta_{t,i} B_{t,n} x_{t,i}, \qquad
              y_{t,i} = \sum_n C_{t,n} h_{t,n,i}

    `x` and the time steps `step` ``[B, T, I]``; `a` ``[I, N]``; `b`, `c` ``[B, T, N]``; `state` ``[B, N, I]``.
    Returns outputs ``[B, T, I]`` and the final state.
    """
    outputs = []
    for t in range(x.shape[1]):
        decay = (step[:, t, None] * a.mT).exp()
        state = decay * state + b[:, t, :, None] * (step[:, t] * x[:, t])[:, None]
        outputs.append(torch.einsum("bn,bni->bi", c[:, t], state))
    return stack_steps(outputs, x), state
