"""Programmatic dependent launch: kernels of a chain come onto the GPU early and wait there for the one before.

A launch and its end take a microsecond or two, as long as a small kernel's work. On Hopper a kernel's programs may come
while the last ones of the kernel before are still at work. `begin` then waits until that kernel has ended and its
writes can be read, and lets the kernel after it come. In this order, who comes early finds one kernel at work at most,
the one right before it, if that is one of these or an ordinary one.

A kernel takes part that has a constant `EARLY`, filled in at its launch (`launch.Kernel`): 0 = launched as always;
WAITING = it begins before it reads anything; AHEAD = it begins after having asked for what the kernel right before
it does not write, weights and its own state. That is for whoever launches the chain to promise (`ops/execution.py`).
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

WAITING, AHEAD = 1, 2

CAPABILITY = (9, 0)
"""Compute capability for which dependent launches were measured. Later GPUs have them too."""

SWITCH = EARLY_SWITCH
"""Environment variable: 0, set before the first launch, has every kernel wait for the end of the one before."""


def options(device: int, *, ahead: bool) -> dict[str, int | bool]:
    """What a kernel with the constant is launched with on the CUDA device of this number."""
    if not early_launches_wanted() or not serves(device):
        return {}
    return {CONSTANT: AHEAD if ahead else WAITING, "launch_pdl": True}


@functools.cache
def serves(device: int) -> bool:
    """Whether kernels are launched early on the CUDA device of this number."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) == CAPABILITY


@triton.jit
def begin(EARLY: tl.constexpr):
    """First of all in a kernel: wait for the one before, let the next one come."""
    if EARLY != 0:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def begin_unless_ahead(EARLY: tl.constexpr):
    """`begin` first of all, but for a kernel that reads ahead: it calls `begin_if_ahead` after that."""
    if EARLY == 1:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def begin_if_ahead(EARLY: tl.constexpr):
    """The `begin` of kernels that read ahead."""
    if EARLY == 2:
        gdc_wait()
        gdc_launch_dependents()
