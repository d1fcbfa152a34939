"""Looking up rows of a table. Its gradient stays fast where one token fills most of a batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from longrecall.ops.backends import Op, declare, kernel

LOOK_UP = declare(Op("look_up", kernels="projections.triton.embedding", compiler_fuses=True))

_look_up_kernel = kernel("projections.triton.embedding", "look_up")


def look_up(ids: Tensor, table: Tensor, *, backend: str | None = None) -> Tensor:
    """Rows of `table`: int64 ``[...]`` and ``[V, d]`` -> ``[..., d]``.

    The kernel's gradient sorts the ids and adds up rows of one id in a fixed order, so that two runs agree to the bit.

    Args:
        ids: from 0 to V - 1.
        table: any float dtype.
        backend: "triton" or "reference"; None chooses.

    Raises:
        ValueError: the kernel was asked for by name and cannot serve the call.
    """
    wanted = torch.is_grad_enabled() and table.requires_grad
    if (wanted or backend is not None) and LOOK_UP.on_kernels({"table": table}, backend, ids=ids):
        rows: Tensor = _look_up_kernel(ids, table)
        return rows
    return F.embedding(ids, table)
