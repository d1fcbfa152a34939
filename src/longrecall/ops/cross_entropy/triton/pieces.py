"""The loss of a linear head, a piece of the tokens at a time: losses and the logits' gradients in one kernel."""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from longrecall.ops.cross_entropy.op import gradient_scale, piece_tokens
from longrecall.ops.kernels.launch import kernel, on_device, why_not_tensors

BLOCK = 4096
"""Logits of a row that a program holds at a time."""


@kernel
def losses_kernel(
    logits, labels, losses, V, IGNORED: tl.constexpr, GRADIENTS: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr
):  # fmt: skip
    """A row: its loss and, with GRADIENTS, SCALE (softmax(logits) - one-hot(label)) in the place of the logits.

    The second walk over the row finds it in the cache.
    """
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    place = logits + row * V
    columns = tl.arange(0, BLOCK)
    if label == IGNORED:
        tl.store(losses + row, 0.0)
        if GRADIENTS:
            for first in range(0, V, BLOCK):
                nothing = tl.zeros([BLOCK], logits.dtype.element_ty)
                tl.store(place + first + columns, nothing, mask=first + columns < V)
    else:
        largest = tl.full([BLOCK], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        for first in range(0, V, BLOCK):
            inside = first + columns < V
            x = tl.load(place + first + columns, mask=inside, other=0.0).to(tl.float32)
            # Far below all logits, yet finite: the difference of two infinities is no number.
            x = tl.where(inside, x, -1e30)
            risen = tl.maximum(largest, x)
            total = total * tl.exp(largest - risen) + tl.exp(x - risen)
            largest = risen
        top = tl.max(largest, 0)
        total = tl.sum(total * tl.exp(largest - top), 0)
        known = (label >= 0) & (label < V)
        own = tl.load(place + label, mask=known, other=float("nan")).to(tl.float32)
        tl.store(losses + row, top + tl.log(total) - own)
        if GRADIENTS:
            for first in range(0, V, BLOCK):
                inside = first + columns < V
                x = tl.load(place + first + columns, mask=inside, other=0.0).to(tl.float32)
                share = tl.exp(x - top) / total - (first + columns == label).to(tl.float32)
                tl.store(place + first + columns, (SCALE * share).to(logits.dtype.element_ty), mask=inside)


def why_not(states: Tensor, weight: Tensor) -> str | None:
    """Why the kernel cannot serve a call, in words; None = it can."""
    return why_not_tensors(states, weight)


def linear_cross_entropy(states: Tensor, weight: Tensor, labels: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of the losses of labels ``[N]``, -100 = none, from ``[N, d]`` and ``[vocab, d]``; products in `dtype`."""
    gradients = torch.is_grad_enabled() and (states.requires_grad or weight.requires_grad)
    return cast(Tensor, _InPieces.apply(gradients, dtype, states, weight, labels.contiguous()))


class _InPieces(torch.autograd.Function):
    """Whether there will be gradients, the dtype of products, states, weight, labels.

    The gradients are made in the forward pass, which has the logits; the backward pass scales them.
    """

    @staticmethod
    def forward(
        ctx: Any, gradients: bool, dtype: torch.dtype, states: Tensor, weight: Tensor, labels: Tensor
    ) -> Tensor:
        x, matrix = states.detach().to(dtype).contiguous(), weight.detach().to(dtype)
        losses = torch.empty(len(x), device=x.device, dtype=torch.float32)
        d_states = torch.empty_like(x) if gradients and ctx.needs_input_grad[2] else None
        wide = torch.empty_like(matrix, dtype=torch.float32) if gradients and ctx.needs_input_grad[3] else None
        size = piece_tokens(len(x), len(matrix), dtype.itemsize)
        room = x.new_empty((size, len(matrix)))
        with torch.autocast(x.device.type, enabled=False):
            for begin in range(0, len(x), size):
                rows = slice(begin, min(begin + size, len(x)))
                logits = torch.mm(x[rows], matrix.t(), out=room[: len(x[rows])])
                with on_device(x):
                    losses_kernel[(len(logits),)](
                        logits, labels[rows], losses[rows], len(matrix),
                        IGNORED=-100, GRADIENTS=gradients, BLOCK=min(BLOCK, triton.next_power_of_2(len(matrix))),
                        SCALE=gradient_scale(dtype), num_warps=8,
                    )  # fmt: skip
                if d_states is not None:
                    torch.mm(logits, matrix, out=d_states[rows])
                if wide is not None:
                    _add_product(wide, logits, x[rows], begin == 0)
        ctx.save_for_backward(d_states, wide)
        ctx.dtypes, ctx.scale = (states.dtype, weight.dtype), gradient_scale(dtype)
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_total: Tensor) -> tuple[Tensor | None, ...]:
        d_states, d_weight = ctx.saved_tensors
        d_total = d_total if ctx.scale == 1.0 else d_total / ctx.scale
        # The factor is small: rounded to bfloat16 it would change the length of the whole gradient.
        if d_states is not None:
            d_states = (d_states.float() * d_total).to(ctx.dtypes[0])
        if d_weight is not None:
            d_weight = (d_weight * d_total).to(ctx.dtypes[1])
        return None, None, d_states, d_weight, None


def _add_product(total: Tensor, gradients: Tensor, x: Tensor, first: bool) -> None:
    """Add gradients^T x to `total`, float32; the `first` product is written over what is there."""
    if not total.is_cuda or x.dtype == torch.float32:
        product = gradients.t().float() @ x.float()
        total.copy_(product) if first else total.add_(product)
    elif first:
        torch.mm(gradients.t(), x, out_dtype=torch.float32, out=total)
    else:
        torch.addmm(total, gradients.t(), x, out_dtype=torch.float32, out=total)
