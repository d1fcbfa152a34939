"""Causal depthwise short convolution with a state: the last W - 1 inputs of every channel.

On a GPU a kernel of one pass over memory takes four taps with SiLU (triton/short.py) and another one up to four
taps without (triton/depthwise.py); else it is a sum over taps.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from longrecall.ops.backends import Op, Presumed, declare, kernel
from longrecall.ops.execution import context
from longrecall.ops.neighbours import inputs_after, inputs_before
from longrecall.ops.packing import check_boundaries, document_mask, pack, unpack
from longrecall.ops.padding import ends, is_at_the_end, newest

SHORT_CONVOLUTION = declare(Op("short_convolution", kernels="convolution.triton.short", compiler_fuses=True))
DEPTHWISE_CONVOLUTION = declare(
    Op("depthwise_convolution", kernels="convolution.triton.depthwise", compiler_fuses=True)
)
GATED_CONVOLUTION = declare(
    Op("gated_convolution", kernels="convolution.triton.gated", compiler_fuses=True, covers=("depthwise_convolution",))
)


def _presumed(x: Tensor, weight: Tensor, bias: Tensor | None, *_: Any) -> Presumed:
    return ("weight", weight, x.shape[-1] * weight.shape[-1]), ("bias", bias, x.shape[-1])


_short_convolution_kernel = kernel("convolution.triton.short", "short_convolution", presumes=_presumed)
_depthwise_convolution_kernel = kernel("convolution.triton.depthwise", "convolve", presumes=_presumed)
_gated_convolution_kernel = kernel("convolution.triton.gated", "convolve", presumes=_presumed)


class _Taps(torch.autograd.Function):
    """The sum over taps by shift and add: ``[B, T + W - 1, C]``, ``[C, W]`` -> ``[B, T, C]``.

    Memory traffic takes most of the time. The sum is formed in place, so that no product of a tap is written and read
    again, as it would be by plain autograd.
    """

    @staticmethod
    def forward(ctx: Any, history: Tensor, taps: Tensor) -> Tensor:
        ctx.save_for_backward(history, taps)
        length = history.shape[1] - taps.shape[1] + 1
        y = history[:, :length] * taps[:, 0]
        for tap in range(1, taps.shape[1]):
            y.addcmul_(history[:, tap : tap + length], taps[:, tap])
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        history, taps = ctx.saved_tensors
        (gradient,) = gradients
        length = gradient.shape[1]
        to_history, product, to_taps = torch.zeros_like(history), torch.empty_like(gradient), []
        for tap in range(taps.shape[1]):
            piece = slice(tap, tap + length)
            to_history[:, piece].addcmul_(gradient, taps[:, tap])
            to_taps.append(torch.mul(gradient, history[:, piece], out=product).sum((0, 1)))
        return to_history, torch.stack(to_taps, dim=1)


def _sum_of_taps(history: Tensor, taps: Tensor) -> Tensor:
    """As `_Taps`; under torch.compile in plain operations, which the compiler fuses as well.

    (torch 2.11 compiles `_Taps` wrongly, with a gradient of zero.)
    """
    if not torch.compiler.is_compiling():
        return cast(Tensor, _Taps.apply(history, taps))
    length = history.shape[1] - taps.shape[1] + 1
    pieces = [history[:, tap : tap + length] * taps[:, tap] for tap in range(taps.shape[1])]
    return sum(pieces[1:], start=pieces[0])


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    state: Tensor | None = None,
    mask: Tensor | None = None,
    activation: str | None = "silu",
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Convolve each channel with its W last inputs, :math:`y_t = \sum_w weight_w x_{t-W+1+w} + bias`, then SiLU.

    Args:
        x: ``[B, T, C]``.
        weight: ``[C, W]``, the newest input last.
        bias: ``[C]`` or None.
        state: ``[B, C, W - 1]``: the inputs before x; None = zeros.
        mask: bool ``[B, T]``; False marks padding: it is skipped as if it were not there (its outputs are arbitrary).
        activation: "silu" or None.
        cu_seqlens: int ``[N + 1]``: B = 1 holds N documents, each with a state of its own (``[N, C, W - 1]``).
        backend: "triton" or "reference"; None chooses.

    Returns:
        ``[B, T, C]`` and the new state ``[B, C, W - 1]``, both in the dtype of `x`.

    Raises:
        ValueError: the kernel was asked for by name and cannot serve the call.

    >>> x = torch.arange(4.0).view(1, 4, 1)
    >>> y, state = short_convolution(x, torch.tensor([[1.0, 1.0]]), activation=None)
    >>> y[0, :, 0], state[0, 0]                                   # sums of two neighbours; the last input
    (tensor([0., 1., 3., 5.]), tensor([3.]))
    """
    if cu_seqlens is not None:
        check_boundaries(cu_seqlens, x.shape[1])
        y, new_state = short_convolution(
            unpack(x, cu_seqlens), weight, bias,
            state=state, mask=document_mask(cu_seqlens), activation=activation, backend=backend,
        )  # fmt: skip
        return pack(y, cu_seqlens), new_state
    width, given = weight.shape[1], state
    state = x.new_zeros((len(x), width - 1, x.shape[2])).transpose(1, 2) if state is None else state
    if context() is not None:
        state = given = inputs_before(x, state.transpose(1, 2), mask).transpose(1, 2)
    order = None
    if mask is not None and not is_at_the_end(mask):
        # Real tokens are moved to the front, in order. Padding after them disturbs nothing.
        order = torch.argsort((~mask).to(torch.int8), dim=1, stable=True)
        x = x.gather(1, order[..., None].expand_as(x))
    before = state.to(x.dtype).transpose(1, 2)
    plain = activation is None
    options = {} if plain else {"activation": activation}
    op = DEPTHWISE_CONVOLUTION if plain else SHORT_CONVOLUTION
    if op.on_kernels({"x": x, "weight": weight}, backend, **options):
        y = _depthwise(x, weight, bias, given) if plain else _short_convolution_kernel(x, weight, bias, state)
        # The last inputs are picked without a copy of all inputs.
        recent = None if mask is None else newest(mask, width - 1)
        last = x[:, 1 - width :] if recent is None else _picked(x, recent.tokens)
        history, places = torch.cat([before, last], dim=1), None if recent is None else recent.inputs
    else:
        history = torch.cat([before, x], dim=1)
        y, places = _convolved(history, weight, bias, activation), None if mask is None else ends(mask, width - 1)
    if order is not None:
        y = torch.empty_like(y).scatter(1, order[..., None].expand_as(y), y)
    new_state = history[:, history.shape[1] - width + 1 :] if places is None else _picked(history, places)
    y, new_state = inputs_after(y, new_state, mask)
    return y, new_state.transpose(1, 2)


def gated_short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    state: Tensor | None = None,
    mask: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The `short_convolution` of three parts without activation, the outer two of which are multiplied (Hyena).

    Args:
        x: ``[B, T, 3 C]``. weight: ``[3 C, W]``. bias: ``[3 C]`` or None. state and mask: as there.
        backend: "triton" or "reference"; None chooses. The kernel knows of no state and no padding.

    Returns:
        The middle part ``[B, T, C]``, the product ``[B, T, C]`` and the new state ``[B, 3 C, W - 1]``.

    Raises:
        ValueError: the kernel was asked for by name and cannot serve the call.
    """
    bare = state is None and mask is None and context() is None
    if bare and GATED_CONVOLUTION.on_kernels({"x": x, "weight": weight, "bias": bias}, backend):
        passed, product = _gated_convolution_kernel(x, weight, bias)
        return passed, product, x[:, x.shape[1] - weight.shape[1] + 1 :].transpose(1, 2)
    y, new_state = short_convolution(x, weight, bias, state=state, mask=mask, activation=None)
    left, passed, right = y.chunk(3, dim=-1)
    return passed, left * right, new_state


def _depthwise(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None) -> Tensor:
    """The kernel without activation. It takes no earlier inputs, so a state is joined to the front of x."""
    history = x if state is None else torch.cat([state.to(x.dtype).transpose(1, 2), x], dim=1)
    y: Tensor = _depthwise_convolution_kernel(history, weight, bias)
    return y[:, history.shape[1] - x.shape[1] :]


def _picked(x: Tensor, places: Tensor) -> Tensor:
    """Tokens ``[B, N]`` of x ``[B, T, C]``."""
    return x.gather(1, places[..., None].expand(-1, -1, x.shape[2]))


def _convolved(history: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """The definition, of inputs ``[B, W - 1 + T, C]``.

    The taps add up in float32 and are rounded once, as in the kernels that the published models were trained with.
    """
    wide = torch.float64 if history.dtype == torch.float64 else torch.float32
    y = _sum_of_taps(history.to(wide), weight.to(wide))
    if bias is not None:
        y = y + bias.to(wide)
    return (F.silu(y) if activation == "silu" else y).to(history.dtype)
