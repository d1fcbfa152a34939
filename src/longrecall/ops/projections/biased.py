"""Several linear maps with biases of one input, and the sums over rows that are the gradients of biases.

The gradients that the maps give the input add up in one buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from longrecall.ops.backends import Op, declare, kernel

COLUMN_SUMS = declare(Op("column_sums", kernels="projections.triton.column_sums", compiler_fuses=True))

_column_sums_kernel = kernel("projections.triton.column_sums", "column_sums")


def project_with_biases(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """x ``[..., d]`` times each weight ``[n, d]`` plus its bias ``[n]`` -> ``[..., n]`` each; all of one dtype.

    Gradients reach all of them, but cannot be differentiated again. On a GPU a kernel sums the gradients of the biases:
    torch is slow at such sums where a matrix is tall and narrow.
    """
    return cast(tuple[Tensor, ...], _Project.apply(len(weights), x, *weights, *biases))


def column_sums(x: Tensor, *, backend: str | None = None) -> Tensor:
    """x ``[N, C]`` -> ``[C]`` in the dtype of x, added up in float32 at least.

    Raises:
        ValueError: the kernel was asked for by name (`backend` "triton") and cannot serve the call.
    """
    if COLUMN_SUMS.on_kernels({"x": x}, backend):
        sums: Tensor = _column_sums_kernel(x)
        return sums.to(x.dtype)
    return x.sum(0)


class _Project(torch.autograd.Function):
    """How many; x ``[..., d]``, the weights, the biases -> ``[..., n]`` each."""

    @staticmethod
    def forward(ctx: Any, count: int, x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        weights, biases = parameters[:count], parameters[count:]
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        rows, d_x = x.reshape(-1, x.shape[-1]), None
        of_weights: list[Tensor | None] = []
        of_biases: list[Tensor | None] = []
        wanted = ctx.needs_input_grad[2:]
        for index, (grad, weight) in enumerate(zip(grads, weights, strict=True)):
            flat = None if grad is None else grad.reshape(-1, grad.shape[-1])
            if flat is not None and ctx.needs_input_grad[1]:
                d_x = flat @ weight if d_x is None else d_x.addmm_(flat, weight)
            of_weights.append(flat.t() @ rows if flat is not None and wanted[index] else None)
            of_biases.append(column_sums(flat) if flat is not None and wanted[len(weights) + index] else None)
        return None, None if d_x is None else d_x.view_as(x), *of_weights, *of_biases
