"""How kernels in Gluon are compiled and launched. They share the cheaper launches of `ops.kernels.launch`."""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from longrecall.ops.kernels.launch import VARYING, Kernel

async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
"""Start a copy of the numbers at pointers into shared memory: ``async_load(shared, pointers, mask=None)``.

Triton has renamed this function and the next two since 3.6. The kernels take whichever name there is.
"""

barrier = getattr(gl, "barrier", None) or gl.thread_barrier
"""Wait until every thread of the program is here: ``barrier()``."""

_SHARED = gl.shared_memory_descriptor
reinterpret = getattr(_SHARED, "reinterpret", None) or _SHARED._reinterpret
"""The same shared memory as other numbers: ``reinterpret(shared, dtype, shape, layout)``."""


class GluonKernel(Kernel, GluonJITFunction):  # type: ignore[misc]
    """A kernel in Gluon that remembers its launches."""


def gluon_kernel(function: Any) -> GluonKernel:
    """gluon.jit with cheaper launches, and without a new compilation for other values of the sizes in `VARYING`."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return GluonKernel(function, do_not_specialize=[name for name in VARYING if name in names])
