"""Mamba-2's values around the recurrence: times the time step before it, and added after it, times D."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from longrecall.ops.backends import Op, Presumed, declare, kernel

STEPPED_VALUES = declare(Op("stepped_values", kernels="linear_attention.triton.stepped_values", compiler_fuses=True))


def _presumed(values: Tensor, step: Tensor, skip: Tensor, *_: Any) -> Presumed:
    return ("step", step, values.shape[:3].numel()), ("skip", skip, values.shape[2])


_stepped_values_kernel = kernel("linear_attention.triton.stepped_values", "stepped_values", presumes=_presumed)

Recurrence = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Values ``[B, T, H, P]`` -> outputs ``[B, T, H, P]`` of their dtype, and the final state."""


def stepped_values(
    values: Tensor, step: Tensor, skip: Tensor, attend: Recurrence, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    r""":math:`y = \mathrm{attend}(\Delta x) + D x` (Dao and Gu 2024, section 7; Gu and Dao 2023, algorithm 2).

    Args:
        values: x ``[B, T, H, P]``, any float dtype.
        step: the time steps :math:`\Delta` ``[B, T, H]``, float32 (float64 for float64 values).
        skip: D ``[H]``, in the dtype of `step`.
        attend: the recurrence, called once with ``[B, T, H, P]`` in the dtype of `step`.
        backend: "triton" or "reference"; None chooses. On a GPU kernels make one pass before the recurrence, one after
            it, and one for all gradients.

    Returns:
        y ``[B, T, H, P]`` in the dtype of `step`, and the final state as `attend` returned it.

    Raises:
        ValueError: the kernel was asked for by name and cannot serve the call.
    """
    if STEPPED_VALUES.on_kernels({"values": values, "step": step, "skip": skip}, backend):
        found: tuple[Tensor, Tensor] = _stepped_values_kernel(values, step, skip, attend)
        return found
    y, final = attend(values * step[..., None])
    return torch.addcmul(y, values, skip[:, None]), final
