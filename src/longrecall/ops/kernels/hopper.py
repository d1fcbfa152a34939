"""Kernels in Gluon, Triton's language of explicit layouts, for Hopper GPUs (compute capability 9.0).

In plain Triton loads, products and elementwise work follow each other. In Gluon they run at the same time. Each of
these kernels replaces a Triton kernel that takes the same tensors and computes the same. The Triton kernel runs
wherever `why_not` gives a reason. Importing this module imports neither Gluon nor any kernel.
"""

from __future__ import annotations

import functools
import importlib

import torch
import triton
from torch import Tensor

from longrecall.ops.execution import GLUON, gluon_wanted
from longrecall.ops.kernels.launch import interpreting

CAPABILITY = (9, 0)
"""Only this compute capability has these warp group products and their layouts."""

ALIGNED = 16
"""Bytes that an asynchronous copy moves at once. Both addresses must be multiples of this number."""

SWITCH = GLUON
"""Environment variable: with 0, Triton kernels run everywhere."""


def why_not(x: Tensor, *others: Tensor, addresses: bool = True) -> str | None:
    """Why no kernel in Gluon can serve `x`, in words; None = dtype, device, address and Triton are fine.

    `others` are on the same device, so only their addresses are checked. Without `addresses`, x may be a tensor without
    memory. Sizes are checked by the declaration of each kernel (ops/hopper_kernels.py). This is cheap enough to be
    asked before every launch.
    """
    if x.dtype != torch.bfloat16:
        return f"the kernels in Gluon are for bfloat16, not {str(x.dtype).removeprefix('torch.')}"
    if not x.is_cuda:
        return f"the tensors must be on a CUDA device, not on {x.device.type}"
    if not gluon_wanted():
        return f"{SWITCH} is 0"
    if addresses and any(one.data_ptr() % ALIGNED for one in (x, *others)):
        return f"tensors in memory must begin at multiples of {ALIGNED} bytes"
    return _remembered(x.get_device())


def why_not_here() -> str | None:
    """Why none of these kernels can run on this machine, in words; None = they can."""
    if not gluon_wanted():
        return f"{SWITCH} is 0"
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    return _unsuitable(None)


def _unsuitable(device: int | None) -> str | None:
    """Why a device or the installed Triton does not fit, in words; `device`: its number, None = the current one."""
    if interpreting():
        return "Triton's interpreter has no Gluon"
    if unwritten := other_triton():
        return unwritten
    capability = torch.cuda.get_device_capability(device)
    if capability != CAPABILITY:
        return f"the kernels in Gluon are for compute capability 9.0, not {capability[0]}.{capability[1]}"
    return None


_remembered = functools.cache(_unsuitable)
"""The same, remembered for each device number, as it is asked before every launch."""


def other_triton() -> str | None:
    """Why the installed Triton cannot compile these kernels, in words; None = it can."""
    try:
        # It names all that has another name in another release.
        importlib.import_module("longrecall.ops.kernels.gluon")
    except (ImportError, AttributeError) as error:
        return f"Triton {triton.__version__} lacks what the kernels in Gluon are made of: {error}"
    return None
