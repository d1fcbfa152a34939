"""Random numbers for surgery: how large fresh weights are, drawn in float32 from a generator that is passed in.

Two sizes are known. `usual` is what a newly built torch layer has: uniform within fan_in**-0.5 for a linear layer and
width**-0.5 for a depthwise convolution (facts of the toy-scale study were measured with it). `measured` is uniform with
the root mean square of the rows that the layer already has, so that a fresh channel is as loud as a trained one.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


USUAL = "usual"
MEASURED = "measured"
SIZES = (MEASURED, USUAL)


def layer_generator(seed: int, layer: int, earlier_surgeries: int) -> torch.Generator:
    """Return a CPU generator for one layer, independent of which other layers are edited and in which order.

    `earlier_surgeries` (how many records the checkpoint already has) enters because a second growth with the same seed
    would otherwise repeat the first one's numbers: channels that start as twins get equal gradients and never diverge.
    """
    import torch

    digest = hashlib.sha256(f"longrecall surgery {seed} {layer} {earlier_surgeries}".encode()).digest()
    # manual_seed takes 64 bits; 63 keep it positive on every platform.
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def uniform(shape: tuple[int, ...], bound: float, generator: torch.Generator) -> Tensor:
    """Return a float32 tensor of `shape`, uniform in [-bound, bound)."""
    import torch

    return (2.0 * torch.rand(shape, generator=generator, dtype=torch.float32) - 1.0) * bound


def usual_bound(fan_in: int) -> float:
    """Return the bound of a new linear layer (fan_in inputs) or depthwise convolution (fan_in = width)."""
    return float(fan_in**-0.5)


def measured_bound(rows: Tensor) -> float:
    """Return the bound at which uniform numbers have the root mean square of `rows` (any shape and float dtype)."""
    # The standard deviation of a uniform distribution in [-b, b) is b / sqrt(3).
    return float(rows.double().square().mean().sqrt()) * math.sqrt(3.0)


def xavier_bound(shape: tuple[int, ...], gain: float) -> float:
    """Return the xavier-uniform bound of a weight [outputs, inputs] (Glorot and Bengio 2010)."""
    outputs, inputs = shape
    return float(gain * (6.0 / (inputs + outputs)) ** 0.5)
