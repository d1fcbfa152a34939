"""Causal depthwise convolution with long filters, by fast Fourier transforms. Its state is the inputs so far.

On a GPU texts that are not too long are multiplied by Toeplitz matrices instead (triton/long.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longrecall.ops.backends import Op, Presumed, declare, kernel
from longrecall.ops.execution import context, with_context
from longrecall.ops.neighbours import inputs_after, inputs_before, inputs_so_far
from longrecall.ops.padding import is_at_the_end

LONG_CONVOLUTION = declare(Op("long_convolution", kernels="convolution.triton.long", compiler_fuses=True))


def _presumed(x: Tensor, taps: Tensor, *_: Any) -> Presumed:
    return (("taps", taps, x.shape[-1] * taps.shape[-1]),)


_long_convolution_kernel = kernel("convolution.triton.long", "convolve", presumes=_presumed)


def long_convolution(
    x: Tensor,
    taps: Tensor,
    *,
    history: Tensor | None = None,
    mask: Tensor | None = None,
    grow: bool = True,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Convolve each channel with all inputs so far, :math:`y_t = \sum_{l < L} taps_l x_{t-l}`.

    Time is O((S + T) log(S + T)), memory O(S + T); a single token costs one sum over the history. Sums are formed in
    float32 (float64 for float64), under autocast too: half-precision transforms lose what the filter's tail adds. On a
    GPU a short text without a history is multiplied by the Toeplitz matrix of its taps, in time O(T^2). Those products
    have the precision that torch was told to use for float32 (`torch.set_float32_matmul_precision`).

    Args:
        x: ``[B, T, C]``.
        taps: ``[C, L]`` by lag: ``taps[:, 0]`` weighs the newest input; inputs older than L - 1 tokens do not count.
        history: ``[B, S, C]``: the inputs before x, the newest last; a row that has read less than S tokens has zeros
            in front. None = none (S = 0).
        mask: bool ``[B, T]``; False marks padding: it is skipped as if it were not there (its outputs are arbitrary).
        grow: return a history of S + T inputs; False = the last S, which is enough when L <= S + 1.
        backend: "triton" or "reference"; None chooses.

    Returns:
        ``[B, T, C]`` and the new history ``[B, S + T, C]`` or ``[B, S, C]``, both in the dtype of `x`.

    Raises:
        ValueError: the kernel was asked for by name and cannot serve the call.

    >>> y, history = long_convolution(torch.ones(1, 3, 1), torch.ones(1, 100))
    >>> y[0, :, 0].round(decimals=3), history.shape
    (tensor([1., 2., 3.]), torch.Size([1, 3, 1]))
    """
    if context() is not None:
        return _of_a_piece(x, taps, history, mask, grow, backend)
    batch, length, channels = x.shape
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    history = x.new_zeros((batch, 0, channels)) if history is None else history.to(x.dtype)
    order = None
    if mask is not None and not is_at_the_end(mask):
        order = real_tokens_first(mask)
        x = reorder(x, order)
    if mask is not None:
        # A Fourier transform would carry what is no number there to the tokens before.
        real = mask if order is None else torch.arange(length, device=x.device) < mask.sum(1)[:, None]
        x = x.masked_fill(~real[..., None], 0.0)
    inputs = torch.cat([history, x], dim=1) if history.shape[1] else x
    with torch.autocast(x.device.type, enabled=False):
        if LONG_CONVOLUTION.on_kernels({"x": inputs, "taps": taps}, backend, length=length):
            y = _long_convolution_kernel(x, taps)
        else:
            y = _convolve(inputs.to(wide), taps[:, : inputs.shape[1]].to(wide), length).to(x.dtype)
    kept = inputs.shape[1] if grow else history.shape[1]
    if mask is None:
        return y, inputs[:, inputs.shape[1] - kept :]
    if order is not None:
        y = torch.empty_like(y).scatter(1, order[..., None].expand_as(y), y)
    # The last `kept` real inputs of every row; zeros stand before the first one.
    padded = torch.cat([x.new_zeros(batch, length, channels), inputs], dim=1)
    start = mask.sum(1)[:, None] + inputs.shape[1] - kept
    return y, reorder(padded, start + torch.arange(kept, device=x.device))


def _of_a_piece(
    x: Tensor, taps: Tensor, history: Tensor | None, mask: Tensor | None, grow: bool, backend: str | None
) -> tuple[Tensor, Tensor]:
    """`long_convolution` of this rank's piece: of as many inputs before it as the taps need."""
    if history is not None and not grow:
        before = inputs_before(x, history, mask)
        with with_context(None):
            y, last = long_convolution(x, taps, history=before, mask=mask, grow=False, backend=backend)
        return inputs_after(y, last, mask)
    before, own, whole = inputs_so_far(x, history, mask)
    with with_context(None):
        y, _ = long_convolution(own, taps, history=before, mask=mask, backend=backend)
    return y, whole if grow else whole[:, :0]


def lags_so_far(x: Tensor, history: Tensor | None) -> int:
    """Taps that the outputs for x ``[B, T, C]`` after a history ``[B, S, C]`` and the pieces of earlier ranks need."""
    group = context()
    pieces = 1 if group is None else group.rank + 1
    return pieces * x.shape[1] + (0 if history is None else history.shape[1])


def real_tokens_first(mask: Tensor) -> Tensor:
    """Columns int64 ``[B, T]`` of a bool ``[B, T]`` mask, the real ones first, each kind in its order."""
    return torch.argsort((~mask).to(torch.int8), dim=1, stable=True)


def reorder(x: Tensor, order: Tensor) -> Tensor:
    """Columns `order` ``[B, S]`` of x ``[B, T, C]`` -> ``[B, S, C]``."""
    return x.gather(1, order[..., None].expand(-1, -1, x.shape[2]))


def _convolve(inputs: Tensor, taps: Tensor, length: int) -> Tensor:
    """The last `length` outputs for inputs ``[B, S, C]`` and taps ``[C, L]``, L <= S."""
    total, lags = inputs.shape[1], taps.shape[1]
    if length == 1:
        newest: Tensor = (inputs[:, total - lags :] * taps.flip(1).t()).sum(1, keepdim=True)
        return newest
    if not inputs.shape[0]:  # which no Fourier transform takes
        return inputs[:, total - length :] * taps[:, 0]
    # Outputs that the circular convolution mixes lie before those that are kept.
    size = 1 << (max(total, length + lags - 1) - 1).bit_length()
    signal = torch.fft.rfft(inputs.transpose(1, 2), n=size)
    product = signal * torch.fft.rfft(taps, n=size)
    y: Tensor = torch.fft.irfft(product, n=size)[..., total - length : total].transpose(1, 2)
    return y
