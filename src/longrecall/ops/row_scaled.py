"""Weights of one byte a number: what torchao's weight-only int8 and fp8 put in the place of a layer's weight.

Such a weight is a tensor of 8-bit numbers and a float32 scale for each of its rows. The number that a layer multiplies
with is their product. Kernels of a decoding step read the bytes and multiply each finished sum by its row's scale, so a
token reads half of what it would read in bfloat16. Weights of other kinds (groups of columns, one scale for all,
quantised activations, four bits) are for torchao's own product.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

_NUMBERS = {"Int8Tensor": torch.int8, "Float8Tensor": torch.float8_e4m3fn}
"""Classes of torchao by name, and the dtype of their numbers that is served. Who has not imported it has none."""

LEAST_CAPABILITY = (8, 9)
"""The first GPUs that convert float8 by themselves."""


_capability = functools.cache(torch.cuda.get_device_capability)


class RowScaled(NamedTuple):
    """The parts of such a weight.

    Attributes:
        numbers: int8 or float8_e4m3fn ``[n, d]``, row after row in memory.
        scales: float32 ``[n]``; row i stands for ``numbers[i] * scales[i]``.
        dtype: of the products with it, and of the weight that it was made of.
    """

    numbers: Tensor
    scales: Tensor
    dtype: torch.dtype


def is_quantised(weight: Tensor) -> bool:
    """Whether a tensor is of a class of torchao's that may be row-scaled."""
    kind = type(weight)
    return kind.__name__ in _NUMBERS and kind.__module__.partition(".")[0] == "torchao"


def row_scaled(weight: Tensor) -> RowScaled | None:
    """The parts of a row-scaled weight; None of every other tensor, plain ones included."""
    if not is_quantised(weight) or why_not_row_scaled(weight) is not None:
        return None
    parts: Any = weight
    return RowScaled(parts.qdata, parts.scale.view(-1), weight.dtype)


def why_not_row_scaled(weight: Tensor) -> str | None:
    """Return why kernels cannot read a quantised weight, in words that follow "it"; None when they can.

    An offset of the numbers (`zero_point`) is not looked at: it is zero of weights made by torchao's configurations,
    and torchao's own product leaves it out as well.
    """
    parts: Any = weight
    numbers, scale = parts.qdata, parts.scale
    if getattr(parts, "act_quant_kwargs", None) is not None or getattr(parts, "act_pre_scale", None) is not None:
        return "quantises activations too, not weights alone"
    if numbers.dtype != _NUMBERS[type(weight).__name__]:
        return f"has numbers of {str(numbers.dtype).removeprefix('torch.')}; kernels read int8 and float8_e4m3fn"
    if numbers.dim() != 2 or not numbers.is_contiguous():
        return "does not lie row after row in memory"
    if scale.shape != (len(numbers), 1) or scale.dtype != torch.float32 or not scale.is_contiguous():
        return f"has scales {list(scale.shape)} in {scale.dtype}; kernels read one float32 for each row (PerRow)"
    if numbers.dtype == torch.float8_e4m3fn and numbers.is_cuda:
        found = _capability(numbers.device)
        if found < LEAST_CAPABILITY:
            return f"is float8, which needs compute capability 8.9 or later; the GPU has {found[0]}.{found[1]}"
    return None
