"""One decoding step on Hopper: which states of bfloat16 the recurrence in Gluon serves, and in which tiles."""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor

from longrecall.ops.triton import hopper

KEYS = (64, 128, 256, 512)
"""Keys of a state that the kernel is built for: a tile has all of them."""

VALUES = 64
"""Values of a state come in multiples of these: rows of a tile fill lines of 128 bytes."""

SHARE = 8192
"""Numbers of a tile for each warp. With fewer a step of 64 MiB is slower by up to a tenth."""

ROWS = 8
"""Neighbouring keys that a thread holds."""


def declines(state: Tensor) -> str | None:
    """Why the kernel cannot serve a state ``[B, H, K, V]``, in words; None = it can."""
    K, V = state.shape[2:]
    if K not in KEYS or V % VALUES:
        return f"states must have {', '.join(map(str, KEYS))} keys and a multiple of {VALUES} values, not {K} x {V}"
    return hopper.declines(state)


def tile(K: int, V: int, *, delta: bool) -> tuple[int, int]:
    """Values of a program, which has all keys, and its warps.

    Measured on an H200 (benchmarks/gpu_decoding.py).
    """
    wide = V % (2 * VALUES) == 0 and (256 if delta else 64) >= K
    width = 2 * VALUES if wide else VALUES
    return width, max(1, K * width // SHARE)


def launch(arguments: tuple[Any, ...], states: int, constants: dict[str, Any]) -> None:
    """Launch the kernel with the `arguments` and `constants` of the plain one for so many states."""
    from longrecall.ops.triton.hopper.decoding_recurrence import step_kernel

    width, warps = tile(constants["K"], constants["V"], delta=constants["DELTA"])
    step_kernel[(states * triton.cdiv(constants["V"], width),)](
        *arguments, **constants, BV=width, ROWS=ROWS, WARPS=warps, num_warps=warps
    )
