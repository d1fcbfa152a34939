"""Tensors that a kernel can read: whole, in memory, and with as many numbers as it presumes.

A kernel gets an address and sizes. Of a shard (a DTensor), of a weight that was freed and of a smaller one it would
read past the end: an illegal memory access on a GPU, which ends the process without a word on which tensor it was. So
these are refused in words before the launch. A launch whose kind of arguments was seen before is not checked anew
(`ops.kernels.launch`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from longrecall.errors import UserError

WHOLE = frozenset((Tensor, nn.Parameter, type(None)))
"""The types of tensors, or of no tensor, of which all numbers are there."""

LOWEST_ADDRESS = 2**40
"""Addresses below this one are looked at. A freed tensor lies at 0, or as far from there as it lay from another one."""

_CURE = "a module's weights are there only while it is called as a module (docs/architecture.md, rule 6)"


def check_arguments(function: str, arguments: Iterable[tuple[str, Any]]) -> None:
    """Check what a kernel is launched with, by name.

    Raises:
        UserError: a tensor of another type, such as a DTensor, or one whose memory was freed.
    """
    for name, x in arguments:
        if not isinstance(x, Tensor):
            continue
        if type(x) not in WHOLE:
            raise UserError(f"{function}: {name} is a {type(x).__name__}, not a tensor that is whole; {_CURE}")
        if x.data_ptr() < LOWEST_ADDRESS and x.numel() and not x.untyped_storage().nbytes():
            raise UserError(f"{function}: {name} has {x.numel()} numbers, but its memory was freed; {_CURE}")


def check_no_shards(function: str, inputs: Mapping[str, Any]) -> None:
    """Check what an op of any backend is given, by name; other types of tensors are for torch to judge.

    Raises:
        UserError: a DTensor.
    """
    # Who has not imported it has none, and it takes seconds.
    module = sys.modules.get("torch.distributed.tensor")
    kind: Any = () if module is None else module.DTensor
    for name, x in inputs.items():
        if isinstance(x, kind):
            raise UserError(f"{function}: {name} is a DTensor, not a tensor that is whole; {_CURE}")


def check_numbers(function: str, *presumed: tuple[str, Tensor | None, int]) -> None:
    """Check how many numbers tensors have: the name, the tensor (None = there is none) and the count of each.

    Raises:
        UserError: a tensor has more or fewer.
    """
    for name, x, count in presumed:
        if x is not None and x.numel() != count:
            raise UserError(f"{function}: {name} must have {count} numbers; got {list(x.shape)}")
