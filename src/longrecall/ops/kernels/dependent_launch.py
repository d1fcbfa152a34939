"""Programmatic dependent launch: a kernel's programs start while the kernel launched before it is still at work.

Launching a kernel and ending it take a microsecond or two, as long as a small kernel computes. On Hopper the programs
of the next kernel may be started early. They then wait (`wait_for_previous`) until the kernel before has ended and what
it wrote can be read; only after that do they allow the kernel after them to start. So at any time at most two kernels
of such a chain are on the GPU: one that works and one that waits.

A kernel takes part when its signature has the constant `EARLY`, which `launch.Kernel` fills in at the launch:

- 0: it is launched in the ordinary way and waits for nothing.
- WAITING: it waits before it reads anything.
- PREFETCHING: it first asks for what the kernel right before it does not write (weights, its own state), then waits.
  Whether that is safe is for the caller who launches the chain to promise: `execution.prefetching`.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longrecall.ops.execution import EARLY as EARLY_SWITCH
from longrecall.ops.execution import early_launches_wanted

CONSTANT = "EARLY"
"""Name of the constant in a kernel's signature."""

WAITING, PREFETCHING = 1, 2

CAPABILITY = (9, 0)
"""Compute capability for which dependent launches were measured. Later GPUs have them too."""

SWITCH = EARLY_SWITCH
"""Environment variable: 0, set before the first launch, launches every kernel in the ordinary way."""


def options(device: int, *, prefetch: bool) -> dict[str, int | bool]:
    """Constants and options with which a kernel that takes part is launched on the CUDA device of this number."""
    if not early_launches_wanted() or not serves(device):
        return {}
    return {CONSTANT: PREFETCHING if prefetch else WAITING, "launch_pdl": True}


@functools.cache
def serves(device: int) -> bool:
    """Whether kernels are launched early on the CUDA device of this number."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) == CAPABILITY


@triton.jit
def wait_for_previous(EARLY: tl.constexpr):
    """Wait for the kernel before, then let the next one start: the first call of a kernel that does not prefetch."""
    if EARLY != 0:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def wait_unless_prefetching(EARLY: tl.constexpr):
    """`wait_for_previous`, unless the kernel was launched to prefetch: the first call of a kernel that can prefetch."""
    if EARLY == 1:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def wait_if_prefetching(EARLY: tl.constexpr):
    """`wait_for_previous`, if the kernel was launched to prefetch: the call after it has prefetched."""
    if EARLY == 2:
        gdc_wait()
        gdc_launch_dependents()
