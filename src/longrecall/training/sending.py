"""Copies of a batch to a GPU that the process does not wait for."""

from __future__ import annotations

import torch
from torch import Tensor


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on `device`.

    A copy out of ordinary memory would wait until the GPU has done all that was asked of it before, and the GPU then
    for the process. Out of pinned memory it takes its turn. torch keeps that memory until the copy is made.
    """
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
