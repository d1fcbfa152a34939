"""The kernels in Gluon for Hopper GPUs: which Triton kernel each replaces, and for which launches.

A family declares its own (`declare`). Whoever launches asks the declaration which of the two kernels runs
(`HopperKernel.serves`), and nothing else: sizes, dtypes, devices, addresses and the environment are looked at here.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import Tensor

Inputs = Mapping[str, Tensor | None]
"""The tensors of a call by name; the first one is not None."""


@dataclass(frozen=True, eq=False)
class HopperKernel:
    """A kernel in Gluon for Hopper GPUs, which computes what one Triton kernel of some ops computes."""

    name: str
    ops: tuple[str, ...]
    """Names of the ops whose kernels launch it."""
    sizes: Callable[..., str | None]
    """Why it is not built for the sizes of a launch, or gains nothing for them, in words; None = it is and does."""
    sizes_of: Callable[[Inputs, Mapping[str, Any]], dict[str, Any] | None]
    """Inputs and options of a call of such an op -> the arguments of `sizes`; None = the call does not launch it."""

    def why_not(self, *tensors: Tensor, **sizes: Any) -> str | None:
        """Why the Triton kernel runs in its place, in words; None = this one does. Asked before every launch.

        `tensors` are those that it reads or writes by asynchronous copies: their dtype, device and addresses count.
        """
        reason: str | None = self.sizes(**sizes) or _machine().why_not(*tensors)
        return reason

    def serves(self, *tensors: Tensor, **sizes: Any) -> bool:
        """Whether it runs, and not the Triton kernel; arguments as `why_not`."""
        return self.sizes(**sizes) is None and _machine().why_not(*tensors) is None


HOPPER_KERNELS: dict[str, HopperKernel] = {}
"""Every one by its name, from the declarations; complete once `longrecall.ops` is imported."""


def declare(one: HopperKernel) -> HopperKernel:
    """Enter a kernel into the registry."""
    if one.name in HOPPER_KERNELS:
        raise ValueError(f'there is a kernel "{one.name}" for Hopper already')
    HOPPER_KERNELS[one.name] = one
    return one


def inside(op: str, inputs: Inputs, options: Mapping[str, Any]) -> dict[str, str | None]:
    """Of every kernel that a call of an op could launch, why the Triton kernel runs in its place; None = it runs.

    `inputs` may be tensors without memory: addresses are not looked at.
    """
    found = {}
    for one in HOPPER_KERNELS.values():
        sizes = one.sizes_of(inputs, options) if op in one.ops else None
        if sizes is not None:
            found[one.name] = one.sizes(**sizes) or _machine().why_not(next(iter(inputs.values())), addresses=False)
    return found


def why_none_here() -> str | None:
    """Why none of them runs on this machine, which has Triton, in words; None = they can."""
    why: str | None = _machine().why_not_here()
    return why


@functools.cache
def _machine() -> ModuleType:
    """What they need of tensors and of the machine; importing it imports Triton."""
    return importlib.import_module("longrecall.ops.kernels.hopper")
