"""How kernels in Gluon are compiled and launched. They share the cheaper launches of `ops.kernels.launch`."""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon._runtime import GluonJITFunction

from longrecall.ops.kernels.launch import VARYING, Kernel


class GluonKernel(Kernel, GluonJITFunction):  # type: ignore[misc]
    """A kernel in Gluon that remembers its launches."""


def gluon_kernel(function: Any) -> GluonKernel:
    """gluon.jit with cheaper launches, and without a new compilation for other values of the sizes in `VARYING`."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return GluonKernel(function, do_not_specialize=[name for name in VARYING if name in names])
