"""One decoding step on Hopper: in which tiles the recurrences in Gluon hold states of bfloat16."""

from __future__ import annotations

from typing import Any

import triton

from longrecall.ops.decoding.op import VALUES

ROWS = 8
"""Neighbouring keys that a thread holds."""

SHARE = 8192
"""Numbers of a delta rule's tile per warp. With fewer, a step on 64 MiB of states is up to a tenth slower."""

WIDEST = 256
"""The most keys with which a tile of the delta rule may have 2 * VALUES values."""


def width(K: int, V: int, *, delta: bool) -> int:
    """Values of a program. A program has all keys."""
    return 2 * VALUES if V % (2 * VALUES) == 0 and (not delta or K <= WIDEST) else VALUES


def delta_warps(K: int, width: int) -> int:
    """Warps of a program of the delta rule."""
    return max(1, K * width // SHARE)


def chunks(K: int, width: int) -> tuple[int, int, int]:
    """Keys of a chunk of gated linear attention, chunks of the ring of buffers, and warps.

    Measured on an H200 (benchmarks/gpu_decoding.py).
    """
    if width > VALUES:
        chunk, ring, warps = 64, 3, 4
    else:
        chunk, ring, warps = 32, 3 if K <= 128 else 8, 1
    return chunk, min(ring, K // chunk), warps


def launch(arguments: tuple[Any, ...], states: int, constants: dict[str, Any]) -> None:
    """Launch a kernel for so many states, with the `arguments` and `constants` of the Triton kernel."""
    from longrecall.ops.decoding.hopper.delta import delta_step_kernel
    from longrecall.ops.decoding.hopper.gated import gated_step_kernel

    K, V, delta = constants["K"], constants["V"], constants["DELTA"]
    BV = width(K, V, delta=delta)
    grid = (states * triton.cdiv(V, BV),)
    sizes = {name: value for name, value in constants.items() if name != "DELTA"} | {"BV": BV, "ROWS": ROWS}
    if delta:
        warps = delta_warps(K, BV)
        delta_step_kernel[grid](*arguments, **sizes, WARPS=warps, num_warps=warps)
        return
    chunk, ring, warps = chunks(K, BV)
    gated_step_kernel[grid](*arguments, **sizes, CHUNK=chunk, RING=ring, WARPS=warps, num_warps=warps)
