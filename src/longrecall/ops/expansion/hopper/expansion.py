"""Head-wise expansion, short convolution, SiLU and L2 norm on Hopper: launches of the forward and of the backward."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from longrecall.ops.kernels.launch import on_device

FORWARDS, BACKWARDS = 2, 2
"""Programs of each kernel that share a multiprocessor: one computes while another one waits."""

REGISTERS = 256
"""Registers that each thread has if a multiprocessor runs 8 warps."""


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

    With `keep` it also returns what `backward` needs: -1 / norm ``[B, T, H * E]`` of log2 e times SiLU in float32, None
    where there is no norm. Before rounding, SiLU has a relative error of about 2^-20 for inputs down to -42.
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
    """The gradient of the convolution's inputs, in the shape of d_out, the gradient of `forward`'s result.

    Parts of the gradient of the taps are written to `d_taps`, ``[parts, 4, H * E * D]`` in float32; they add up to it,
    and `parts` says how many there are. The gradient of the state is written to `d_before`. The caller computes the
    gradients of y and of the weight by products with the result.
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
    """Number of parts of the taps' gradient that `backward` writes: one for every stream of its programs."""
    from longrecall.ops.expansion.hopper.streams import STREAMS, plan

    segments, _ = plan(y, subheads, each=BACKWARDS)
    return int(triton.cdiv(len(y) * segments, STREAMS)) * STREAMS
