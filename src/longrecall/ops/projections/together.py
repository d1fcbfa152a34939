"""Products of one input with several weights, whose gradients add up in one buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F


def project_together(x: Tensor, weights: Sequence[Tensor], joined: int = 0) -> tuple[Tensor, ...]:
    """x ``[..., d]`` times each weight ``[n, d]`` -> ``[..., n]`` each; all of one dtype.

    Autograd would write one gradient of x for every product, then read and add up these gradients in pairs. Here each
    product adds to what the products before it have written.

    Args:
        x: what all weights multiply.
        weights: the weights.
        joined: how many of the last weights become one product. Every product reads x twice, and reads and writes its
            gradient. For narrow weights that takes most of the time, so one product for all of them is faster. Their
            results are parts of wider rows.
    """
    if joined < 2:
        return cast(tuple[Tensor, ...], _ProjectTogether.apply(x, *weights))
    narrow = weights[-joined:]
    *outs, wide = cast(tuple[Tensor, ...], _ProjectTogether.apply(x, *weights[:-joined], torch.cat(list(narrow))))
    return *outs, *wide.split([len(weight) for weight in narrow], dim=-1)


class _ProjectTogether(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        wanted_x, *wanted = ctx.needs_input_grad
        rows, d_x = x.reshape(-1, x.shape[-1]), None
        d_weights: list[Tensor | None] = []
        for grad, weight, of_weight in zip(grads, weights, wanted, strict=True):
            if grad is None:
                d_weights.append(None)
                continue
            flat = grad.reshape(-1, grad.shape[-1])
            if wanted_x:
                d_x = flat @ weight if d_x is None else d_x.addmm_(flat, weight)
            d_weights.append(flat.t() @ rows if of_weight else None)
        return None if d_x is None else d_x.view_as(x), *d_weights
