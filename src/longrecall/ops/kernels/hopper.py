"""Kernels in Gluon, Triton's language of explicit layouts, for Hopper GPUs (compute capability 9.0).

Plain Triton leaves loads, products and elementwise work to follow each other. Here they run at the same time. Every
kernel has a plain one that takes the same tensors and means the same; that one serves all that `why_not` names.
Importing this package imports neither Gluon nor any kernel.
"""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor

from longrecall.ops.execution import GLUON, gluon_wanted
from longrecall.ops.kernels.launch import interpreting

CAPABILITY = (9, 0)
"""Warp group products and their layouts are those of this compute capability alone."""

TRITON = "3.6."
"""Gluon renames its functions from one release to the next: the one these kernels are written for."""

ALIGNED = 16
"""Bytes that an asynchronous copy moves at once, from and to addresses that are multiples of them."""

SWITCH = GLUON
"""Environment variable: 0 leaves everything to the plain kernels."""


def why_not(x: Tensor, *others: Tensor) -> str | None:
    """Why no kernel of this package can serve `x`, in words; None = device, dtype, address and Triton are fine.

    `others` are on the same device: their addresses alone are looked at. Sizes are for each kernel's declaration to
    look at. Cheap enough to be asked before every launch.
    """
    if reason := why_not_alike(x):
        return reason
    if any(one.data_ptr() % ALIGNED for one in (x, *others)):
        return f"tensors in memory must begin at multiples of {ALIGNED} bytes"
    return None


def why_not_alike(x: Tensor) -> str | None:
    """As `why_not`, for tensors like x, which may be without memory: addresses are not looked at."""
    if x.dtype != torch.bfloat16:
        return f"the kernels in Gluon are for bfloat16, not {str(x.dtype).removeprefix('torch.')}"
    if not x.is_cuda:
        return f"the tensors must be on a CUDA device, not on {x.device.type}"
    if not gluon_wanted():
        return f"{SWITCH} is 0"
    return _remembered(x.get_device())


def why_not_here() -> str | None:
    """Why none of these kernels runs on this machine, in words; None = they can, for what `why_not` lets through."""
    if not gluon_wanted():
        return f"{SWITCH} is 0"
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    return _unsuitable(None)


def _unsuitable(device: int | None) -> str | None:
    """Why the device of this number, None = the current one, or the Triton installed has no Gluon that fits."""
    if interpreting():
        return "Triton's interpreter has no Gluon"
    if unwritten := other_triton():
        return unwritten
    capability = torch.cuda.get_device_capability(device)
    if capability != CAPABILITY:
        return f"the kernels in Gluon are for compute capability 9.0, not {capability[0]}.{capability[1]}"
    return None


_remembered = functools.cache(_unsuitable)
"""For devices with a number: asked before every launch."""


def other_triton() -> str | None:
    """Why the Triton installed cannot compile these kernels, in words; None = it can."""
    if triton.__version__.startswith(TRITON):
        return None
    return f"the kernels in Gluon are written for Triton {TRITON}x, not {triton.__version__}"
