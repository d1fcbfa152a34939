"""Rotary position embeddings (Su et al. 2021), half-rotation layout: a head's channels are turned in pairs."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from longrecall.layers.descriptions.rotary import DYNAMIC, Rotation


class Turns(NamedTuple):
    """Cosine and sine of every pair's angle, ``[B, T, 1, pairs]`` each, in float32 or float64."""

    cos: Tensor
    sin: Tensor


def radians_of(rotation: Rotation, device: torch.device) -> Tensor:
    """`Rotation.radians` as float64 ``[1 or 2, pairs]`` on a device.

    Numbers that are a formula of the pair's number are made on the device; others are copied there once, since a copy
    makes the CPU wait.
    """
    if rotation.scaling is None:
        exponents = -torch.arange(rotation.pairs, device=device, dtype=torch.float64) / (rotation.dim / 2)
        return (rotation.theta**exponents)[None]
    if torch.compiler.is_compiling():
        return torch.tensor(rotation.radians(), dtype=torch.float64, device=device)
    found = _copied(rotation, device)
    if type(found) is not Tensor:
        _copied.cache_clear()
    return found


@functools.lru_cache(maxsize=256)
def _copied(rotation: Rotation, device: torch.device) -> Tensor:
    # Made in inference mode it could not take part in training later.
    with torch.inference_mode(False):
        return torch.tensor(rotation.radians(), dtype=torch.float64, device=device)


def turns(rotation: Rotation, positions: Tensor, dtype: torch.dtype, radians: Tensor | None = None) -> Turns:
    """How tokens at `positions` ``[B, T]`` are turned, for heads in `dtype`.

    `radians`: `radians_of` the rotation, where they are at hand.

    Angles are formed in float64: at position 10^6 float32 would already be wrong in the second digit.
    """
    rows = radians_of(rotation, positions.device) if radians is None else radians
    position = positions[..., None].to(torch.float64)
    scaling, own = rotation.scaling, rows[0]
    if scaling is not None and scaling.rope_type == DYNAMIC:
        most = scaling.number("max_position_embeddings")
        longer = (position + 1).clamp(min=most) * (scaling.stretch / most) - (scaling.stretch - 1)
        own = own * longer ** rows[1]
    elif len(rows) == 2 and scaling is not None:
        own = torch.where(position + 1 > scaling.number("original_max_position_embeddings"), rows[1], own)
    angle = position * own
    wide = dtype if dtype == torch.float64 else torch.float32
    cos, sin = angle.cos(), angle.sin()
    if rotation.magnitude != 1.0:
        cos, sin = cos * rotation.magnitude, sin * rotation.magnitude
    return Turns(cos.to(wide)[:, :, None], sin.to(wide)[:, :, None])


def turned(x: Tensor, by: Turns) -> Tensor:
    """x ``[B, T, H, P]`` with its first channels turned in pairs (i, i + pairs); the others stay as they are."""
    pairs = by.cos.shape[-1]
    wide = by.cos.dtype
    first, second = x[..., :pairs].to(wide), x[..., pairs : 2 * pairs].to(wide)
    parts = [first * by.cos - second * by.sin, second * by.cos + first * by.sin]
    if 2 * pairs < x.shape[-1]:
        parts.append(x[..., 2 * pairs :].to(wide))
    return torch.cat(parts, dim=-1).to(x.dtype)


def apply_rotary(x: Tensor, position: Tensor, theta: float) -> Tensor:
    """Rotate pairs (i, i + P/2) of x ``[B, T, H, P]`` by ``position [B, T] * theta ** (-2 i / P)``."""
    return turned(x, turns(Rotation(x.shape[-1], theta), position, x.dtype))


def token_positions(start: Tensor, length: int, mask: Tensor | None) -> Tensor:
    """Position of every token ``[B, T]``: `start` ``[B]`` real tokens came before, padding does not count."""
    if mask is None:
        return start[:, None] + torch.arange(length, device=start.device)
    return start[:, None] + (mask.long().cumsum(1) - 1).clamp(min=0)
