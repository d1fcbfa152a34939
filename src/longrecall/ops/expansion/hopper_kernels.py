"""The expansion's kernels for Hopper: for which sizes they replace the Triton kernel.

They are launched by triton/expansion.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from longrecall.ops.hopper_kernels import HopperKernel, Inputs, declare

WIDTHS = (64, 128)
"""Widths of heads that the kernels are built for."""


def _sizes(width: int, dtype: torch.dtype, weight_dtype: torch.dtype) -> str | None:
    if width not in WIDTHS:
        return f"heads must be {' or '.join(map(str, WIDTHS))} wide, not {width}"
    return None if weight_dtype == dtype else "the heads and the expansion have different dtypes"


def _sizes_of(inputs: Inputs, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """A layer expands its queries and keys in these kernels, or not at all; its weight is cast to their dtype."""
    q = inputs["q"]
    assert q is not None
    return {"width": q.shape[3], "dtype": q.dtype, "weight_dtype": q.dtype} if options.get("expands") else None


EXPANSION = declare(HopperKernel("expansion, convolution and norm", ("expanded_delta_rule",), _sizes, _sizes_of))
"""Forward and backward: they are chosen together."""
