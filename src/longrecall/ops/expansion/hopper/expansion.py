"""Head-wise expansion, short convolution, SiLU and L2 norm on Hopper: launches of the forward and of the backward."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from longrecall.ops.kernels.launch import on_device

FORWARDS, BACKWARDS = 2, 2
"""Programs of either kernel that share a multiprocessor: what they wait for is hidden by each other."""

REGISTERS = 256
"""Registers that a multiprocessor has for each thread of 8 warps."""


def forward(
    y: Tensor,
    weight: Tensor,
    grafted: Tensor | None,
    taps: Tensor,
    before: Tensor,
    normalise: bool,
    eps: float,
    *,
    keep: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`expansion.expand_and_convolve`, whose arguments these are; `before` is its state as ``[B, 3, H * E * D]``.

    Also what `backward` needs of it, `keep`: -1 / norm ``[B, T, H * E]`` in float32, of log2 e times SiLU; None where
    there is no norm. Before it is rounded, SiLU is right to about 2^-20 of itself, down to -42.
    """
    from longrecall.ops.expansion.hopper.forward import forward_kernel
    from longrecall.ops.expansion.hopper.streams import STREAMS, plan

    rows, tokens, heads, width = y.shape
    subheads = len(taps) // width
    out = y.new_empty((rows, tokens, subheads, width))
    norms = y.new_empty(out.shape[:3], dtype=torch.float32) if keep and normalise else None
    segments, chunks = plan(y, subheads, each=FORWARDS)
    with on_device(y):
        forward_kernel[(subheads, triton.cdiv(rows * segments, STREAMS))](
            y, y if grafted is None else grafted, weight, taps, before, out, out if norms is None else norms,
            rows, tokens, segments, chunks, eps,
            HEADS=heads, E=subheads // heads, D=width, GRAFTED=grafted is not None, NORMALISE=normalise,
            KEEP=norms is not None, num_warps=STREAMS, maxnreg=REGISTERS // FORWARDS // 8 * 8,
        )  # fmt: skip
    return out, norms


def backward(
    y: Tensor,
    weight: Tensor,
    grafted: Tensor | None,
    taps: Tensor,
    before: Tensor,
    norms: Tensor | None,
    d_out: Tensor,
    d_before: Tensor,
    d_taps: Tensor,
    normalise: bool,
) -> Tensor:
    """The gradient of the convolution's inputs, given that of `forward`'s result and its norms; as d_out.

    Parts of the taps' are written to `d_taps`, ``[parts, 4, H * E * D]`` in float32, and add up to it; `parts` says how
    many. That of the state is written to `d_before`. The gradients of y and of the weight are left to products with
    what is returned.
    """
    from longrecall.ops.expansion.hopper.backward import backward_kernel
    from longrecall.ops.expansion.hopper.streams import STREAMS, plan

    rows, tokens, heads, width = y.shape
    subheads = len(taps) // width
    segments, chunks = plan(y, subheads, each=BACKWARDS)
    d_z = torch.empty_like(d_out)
    with on_device(y):
        backward_kernel[(subheads, triton.cdiv(rows * segments, STREAMS))](
            y, y if grafted is None else grafted, weight, taps, before, d_taps if norms is None else norms, d_out,
            d_z, d_before, d_taps, rows, tokens, segments, chunks,
            HEADS=heads, E=subheads // heads, D=width, GRAFTED=grafted is not None, NORMALISE=normalise,
            num_warps=STREAMS, maxnreg=REGISTERS // BACKWARDS // 8 * 8,
        )  # fmt: skip
    return d_z


def parts(y: Tensor, subheads: int) -> int:
    """Parts of the taps' gradient that `backward` writes: one for every stream of its programs."""
    from longrecall.ops.expansion.hopper.streams import STREAMS, plan

    segments, _ = plan(y, subheads, each=BACKWARDS)
    return int(triton.cdiv(len(y) * segments, STREAMS)) * STREAMS
