"""How kernels in Gluon are made and launched: as plain ones are (see `ops.kernels.launch`), from another source."""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon._runtime import GluonJITFunction

from longrecall.ops.kernels.launch import VARYING, Kernel


class GluonKernel(Kernel, GluonJITFunction):  # type: ignore[misc]
    """A kernel in Gluon that remembers its launches."""


def gluon_kernel(function: Any) -> GluonKernel:
    """gluon.jit without compiling anew for other values of the sizes in `VARYING`, and with cheaper launches."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return GluonKernel(function, do_not_specialize=[name for name in VARYING if name in names])
