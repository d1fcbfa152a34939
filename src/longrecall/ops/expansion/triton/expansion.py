"""Head-wise expansion, and its product, short convolution, SiLU and L2 norm in one launch.

A product and then a convolution would write and read the result of the expansion, which is E times as large as
everything else. On Hopper the backward is one launch and two products (see hopper/expansion.py). Elsewhere the backward
needs the inputs of the convolution in memory, so the forward before it (`forward`) computes them by a product.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from longrecall.ops.convolution.triton import short as convolution
from longrecall.ops.convolution.triton.short import convolve_heads, laid_out
from longrecall.ops.expansion.hopper import expansion as hopper
from longrecall.ops.expansion.hopper_kernels import EXPANSION
from longrecall.ops.expansion.triton.forward import TOKENS, forward_kernel
from longrecall.ops.kernels.launch import arithmetic, interpreting, on_device, processors, why_not_tensors

WIDTHS = (64, 128)
"""Widths of heads that the kernels are built for: a weight of 256 x 256 would fill the shared memory."""

STREAMS = 8
"""Parts of the text that a program walks along: 8 tokens of each are the 64 rows of Hopper's product."""

LONGEST = 16
"""The most tiles of a program. It also computes one tile before them, for the inputs before its first token."""

PROGRAMS = 4
"""With fewer programs per multiprocessor each gets fewer tiles."""


class Kept(NamedTuple):
    """What `forward` keeps for `backward`, and for which kernels."""

    on_hopper: bool
    """Whether the forward ran on the kernels in Gluon, which the backward then does too."""
    tensor: Tensor | None
    """On Hopper the norms, None if there is no norm; elsewhere the inputs of the convolution."""


@torch.no_grad()
def expand_and_convolve(
    y: Tensor,
    weight: Tensor,
    grafted: Tensor | None,
    taps: Tensor,
    state: Tensor,
    *,
    normalise: bool,
    eps: float = 1e-6,
) -> Tensor:
    """`convolve_heads` of `expand`, without a gradient.

    It is one launch where a kernel serves the call (`why_not`), else one launch after the other. Either way the
    expansion is rounded to the dtype of y before the convolution, and the result is rounded at the end. The kernels add
    up the product in different orders, so the first rounding sometimes differs in the last digit.

    Args:
        y: ``[B, T, H, D]``, after the activation.
        weight: ``[H, D, F]``, F = E * D, or (E - 1) * D with a grafted head; in the dtype of y.
        grafted: ``[B, T, H, D]``, the first subhead of every head as it is; None = all are made.
        taps: ``[H * E * D, 4]``, the newest input last.
        state: ``[B, H * E * D, 3]``, the convolution's inputs before the first token.
        normalise: whether to divide every subhead by its L2 norm.
        eps: keeps the norm of a subhead of zeros finite.

    Returns:
        ``[B, T, H * E, D]`` in the dtype of y.
    """
    if why_not(y, weight) is not None:
        return convolve_heads(expand(y, weight, grafted), taps, state, normalise=normalise, eps=eps)
    y, weight, taps = y.contiguous(), weight.contiguous(), taps.contiguous()
    grafted = grafted if grafted is None else grafted.contiguous()
    before = _before(y, state)
    if serves_on_hopper(y, weight, grafted):
        return hopper.forward(y, weight, grafted, taps, before, normalise, eps)[0]
    heads, width = y.shape[2:]
    factor = weight.shape[2] // width + (grafted is not None)
    out = y.new_empty((*y.shape[:2], heads * factor, width))
    grid, chunks = _launch(y, heads * factor)
    with on_device(y):
        forward_kernel[grid](
            y, weight, y if grafted is None else grafted, taps, before, out, y.shape[1], chunks, eps,
            HEADS=heads, E=factor, D=width, GRAFTED=grafted is not None, NORMALISE=normalise, GROUPS=STREAMS, STAGES=2,
            num_warps=4, **arithmetic(y.dtype).constants(),
        )  # fmt: skip
    return out


@torch.no_grad()
def forward(
    y: Tensor,
    weight: Tensor,
    grafted: Tensor | None,
    taps: Tensor,
    state: Tensor,
    *,
    normalise: bool,
    eps: float = 1e-6,
    on_hopper: bool | None = None,
) -> tuple[Tensor, Kept]:
    """`expand_and_convolve`, and what `backward` needs of it. The arguments are the same, contiguous but for the state.

    `on_hopper` is the answer of `serves_on_hopper`, if the caller has asked already.
    """
    if serves_on_hopper(y, weight, grafted) if on_hopper is None else on_hopper:
        out, norms = hopper.forward(y, weight, grafted, taps, _before(y, state), normalise, eps, keep=True)
        return out, Kept(True, norms)
    z = expand(y, weight, grafted)
    out = convolution.forward(z, taps, laid_out(state.to(z.dtype)), normalise=normalise, eps=eps)
    return out, Kept(False, z)


def backward(
    y: Tensor,
    weight: Tensor,
    grafted: Tensor | None,
    taps: Tensor,
    state: Tensor,
    kept: Kept,
    d_out: Tensor,
    d_before: Tensor,
    *,
    normalise: bool,
    eps: float = 1e-6,
    into: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Gradients of y, weight, grafted heads and taps, given the gradient of `forward`'s result and what it kept.

    The gradient of the taps comes in parts ``[parts, 4, H * E * D]`` in float32, which add up to it; `parts` says how
    many. The gradient of the state is written to `d_before`, ``[B, 3, H * E * D]`` in the dtype of y. `into`:
    contiguous tensors for the gradients of y, weight and taps; None makes them.
    """
    if into is None:
        shape = (parts(y, taps, kept.on_hopper), convolution.WIDTH, len(taps))
        into = (torch.empty_like(y), torch.empty_like(weight), y.new_empty(shape, dtype=torch.float32))
    d_y, d_weight, d_taps = into
    if kept.on_hopper:
        rest = (taps, _before(y, state), kept.tensor, d_out, d_before, d_taps, normalise)
        d_z = hopper.backward(y, weight, grafted, *rest)
    else:
        z, d_z = cast(Tensor, kept.tensor), torch.empty_like(d_out)
        found = (d_out, d_z, d_before, d_taps)
        convolution.backward(z, taps, laid_out(state.to(z.dtype)), *found, normalise=normalise, eps=eps)
    d_wide, first = d_z.unflatten(2, (y.shape[2], -1)).flatten(3), 0 if grafted is None else y.shape[3]
    _expanded_backward(d_wide[..., first:], weight, y, d_y, d_weight)
    return d_y, d_weight, d_wide[..., :first] if first else None, d_taps


def serves_on_hopper(y: Tensor, weight: Tensor, grafted: Tensor | None) -> bool:
    """Whether the kernels in Gluon serve `forward`, whose first arguments these are, and its `backward`."""
    copied = (y,) if grafted is None else (y, grafted)
    return EXPANSION.serves(*copied, width=y.shape[3], dtype=y.dtype, weight_dtype=weight.dtype)


def parts(y: Tensor, taps: Tensor, on_hopper: bool) -> int:
    """Number of parts of the taps' gradient that `backward` writes; `on_hopper`: the answer of `serves_on_hopper`."""
    if on_hopper:
        return hopper.parts(y, len(taps) // y.shape[3])
    return convolution.parts(y)


def _before(y: Tensor, state: Tensor) -> Tensor:
    """``[B, SIZE, 3]`` -> ``[B, 3, SIZE]`` in the dtype of y: neighbouring channels side by side, as in the result."""
    return state.to(y.dtype).transpose(1, 2).contiguous()


def why_not(y: Tensor, weight: Tensor) -> str | None:
    """Why the kernels cannot expand y ``[B, T, H, D]`` with a weight ``[H, D, F]``, in words; None = they can."""
    if y.shape[3] not in WIDTHS:
        return f"heads must be {' or '.join(map(str, WIDTHS))} wide, not {y.shape[3]}"
    if y.dtype != torch.bfloat16 and not interpreting():
        return f"the product is built for bfloat16, not for {str(y.dtype).removeprefix('torch.')}"
    if weight.dtype != y.dtype:
        return "the heads and the expansion have different dtypes"
    return why_not_tensors(y)


def expand(y: Tensor, weight: Tensor, grafted: Tensor | None) -> Tensor:
    """The grafted head, if any, and y @ weight side by side; gradients reach all three.

    Equations 8 and 9 of "Scaling up the State Size of RNN LLMs for Long-Context Scenarios".

    Args:
        y: ``[B, T, H, D]``, after the activation.
        weight: ``[H, D, F]``, F a multiple of D, in the dtype of y.
        grafted: ``[B, T, H, D]`` or None.

    Returns:
        ``[B, T, H * E, D]`` in the dtype of y, with the E subheads of a head beside each other.
    """
    wide = _Expand.apply(y, weight, grafted)
    return cast(Tensor, wide.unflatten(-1, (-1, y.shape[3])).flatten(2, 3))


class _Expand(torch.autograd.Function):
    """y ``[B, T, H, D]``, weight ``[H, D, F]``, head as y or None -> ``[B, T, H, E * D]``.

    einsum would put heads outermost in memory, and a kernel that reads all heads of a token would need a copy. Joining
    the grafted head to the others would be one more copy.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, weight: Tensor, head: Tensor | None) -> Tensor:
        ctx.save_for_backward(y, weight)
        ctx.before = before = 0 if head is None else head.shape[3]
        out = y.new_empty((*y.shape[:3], before + weight.shape[2]))
        if head is not None:
            out[..., :before] = head
        torch.bmm(_by_head(y), weight, out=_by_head(out[..., before:]))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        y, weight = ctx.saved_tensors
        d_out = grads[0].contiguous()
        d_made = d_out[..., ctx.before :]
        d_y, d_weight = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (y, weight))
        _expanded_backward(d_made, weight, y, d_y, d_weight)
        return d_y, d_weight, d_out[..., : ctx.before] if ctx.before else None


def _expanded_backward(d_made: Tensor, weight: Tensor, y: Tensor, d_y: Tensor, d_weight: Tensor) -> None:
    """Write the gradients of y and of the weight, both contiguous, from that of y @ weight ``[B, T, H, F]``."""
    torch.bmm(_by_head(d_made), weight.transpose(1, 2), out=_by_head(d_y))
    torch.bmm(_by_head(y).transpose(1, 2), _by_head(d_made), out=d_weight)


def _by_head(x: Tensor) -> Tensor:
    """``[B, T, H, D]`` -> a view ``[H, B * T, D]``."""
    view: Tensor = x.flatten(0, 1).transpose(0, 1)
    return view


def _launch(y: Tensor, subheads: int) -> tuple[tuple[int, int, int], int]:
    """The grid, and the tiles of a program, whose streams cover every row."""
    rows, tokens = y.shape[:2]
    tiles = triton.cdiv(tokens, STREAMS * TOKENS.value)
    most = max(1, rows * subheads * tiles // (PROGRAMS * processors(y)))
    chunks = min(LONGEST, tiles, most)
    return (subheads, triton.cdiv(tiles, chunks), rows), chunks
