r"""The gradient of the linear recurrence, which is the same recurrence backwards in time.

With :math:`g_t` the gradient of :math:`h_t` and :math:`\bar y_t` that of the output,

.. math:: g_t = \bar y_t + a_{t+1} g_{t+1}, \qquad \frac{\partial}{\partial x_t} = g_t, \qquad
          \frac{\partial}{\partial \log a_t} = g_t a_t h_{t-1}

so that a backend has to offer one function, a scan in either direction.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Scan(Protocol):
    """h ``[B, T, C]`` of x and log_decay ``[B, T, C]`` from the state ``[B, C]``.

    `reverse`: from the last token to the first, :math:`h_t = x_t + a_{t+1} h_{t+1}` with zeros after the end; the state
    is not read.
    """

    def __call__(self, x: Tensor, log_decay: Tensor, state: Tensor, *, reverse: bool = False) -> Tensor: ...


def differentiable(scan: Scan, x: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The contract of `reference.linear_recurrence`, T at least 1, by a scan whose gradient autograd does not know."""
    inputs = (x, log_decay, state)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        h: Tensor = _Recurrence.apply(scan, *inputs)
    else:
        h = scan(*inputs)
    # A state that was a part of h would keep all of it.
    return h, h[:, -1].clone()


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scan: Scan, x: Tensor, log_decay: Tensor, state: Tensor) -> Tensor:
        h = scan(x, log_decay, state)
        ctx.scan = scan
        ctx.save_for_backward(log_decay, state, h)
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_h: Tensor) -> tuple[Tensor | None, ...]:
        log_decay, state, h = ctx.saved_tensors
        g = ctx.scan(to_h, log_decay, state, reverse=True)
        kept = log_decay.exp() * g
        before = torch.cat([state[:, None], h[:, :-1]], dim=1)
        return None, g, kept * before, kept[:, 0]
