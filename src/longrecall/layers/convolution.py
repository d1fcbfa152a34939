"""The explicit convolution as a module; the arithmetic is that of `ops`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrecall.ops import long_convolution, short_convolution
from longrecall.ops.convolution.short import gated_short_convolution
from longrecall.ops.execution import context

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}
"""What may follow a convolution beside SiLU, which the op itself applies."""

MOST_SHIFTED_TAPS = 16
"""Wider filters without SiLU are convolved by Fourier transforms."""


class ShortConvolution(nn.Module):
    """Causal depthwise convolution of width W, then an activation or nothing; the last W - 1 inputs are its state."""

    def __init__(self, channels: int, width: int, bias: bool = False, activation: str | None = "silu") -> None:
        super().__init__()
        self.activation = activation
        self.weight = nn.Parameter(torch.empty(channels, width))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform within 1 / sqrt(W), the default of a depthwise Conv1d."""
        bound = self.weight.shape[1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self, x: Tensor, state: Tensor | None, mask: Tensor | None = None, rows: slice | None = None
    ) -> tuple[Tensor, Tensor]:
        """x ``[B, T, C]``, state ``[B, C, W - 1]`` or None -> ``[B, T, C]`` and the new state.

        `rows`: x has these channels of the convolution alone; None = all of them.
        """
        if self.activation is None and self.weight.shape[1] > MOST_SHIFTED_TAPS:
            return self._transformed(x, state, mask)
        inside = self.activation if self.activation == "silu" else None
        taps = (
            (self.weight, self.bias)
            if rows is None
            else (self.weight[rows], None if self.bias is None else self.bias[rows])
        )
        y, after = short_convolution(x, *taps, state=state, mask=mask, activation=inside)
        return (y if self.activation in (None, inside) else ACTIVATIONS[self.activation](y)), after

    def _transformed(self, x: Tensor, state: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        kept, history = self.weight.shape[1] - 1, None if state is None else state.transpose(1, 2)
        if history is None and context() is not None:
            # So that ranks exchange these inputs and no others.
            history = x.new_zeros((x.shape[0], kept, x.shape[2]))
        # At the beginning of a text no zeros are transformed in the place of earlier inputs.
        y, inputs = long_convolution(x, self.weight.flip(1), history=history, mask=mask, grow=history is None)
        # Padding by nothing would copy all of them.
        missing = kept - inputs.shape[1]
        inputs = F.pad(inputs, (0, 0, missing, 0)) if missing > 0 else inputs[:, -kept:]
        y = y if self.bias is None else y + self.bias.to(y.dtype)
        return y, inputs.transpose(1, 2)


class GatedConvolution(ShortConvolution):
    """A convolution of three parts without an activation, the outer two of which are multiplied (Hyena)."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__(3 * channels, width, bias=True, activation=None)

    def forward(  # type: ignore[override]
        self, x: Tensor, state: Tensor | None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x ``[B, T, 3 C]`` -> the middle part and the product, ``[B, T, C]``, and the state ``[B, 3 C, W - 1]``."""
        return gated_short_convolution(x, self.weight, self.bias, state=state, mask=mask)
