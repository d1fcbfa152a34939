"""Numbers of the host on their way to a device, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(values: Sequence[int] | Sequence[float], device: torch.device, dtype: torch.dtype = torch.long) -> Tensor:
    """A tensor of these numbers ``[n]``. An ordinary copy would wait until a GPU has done all it was given before."""
    return sent(torch.tensor(values, dtype=dtype), device)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on this device; the same one for a CPU."""
    if device.type != "cuda" or not tensor.numel():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
