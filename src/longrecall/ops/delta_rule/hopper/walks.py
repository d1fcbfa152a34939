"""Launches of the gated delta rule's walks in Gluon."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from longrecall.ops.delta_rule.triton.plan import Plan


def walk(plan: Plan, tensors: tuple[Tensor | None, ...], read: bool) -> None:
    """Launch `walk_kernel` for one segment; `tensors`: its arguments, from q to corrections."""
    from longrecall.ops.delta_rule.hopper.walk import walk_kernel

    walk_kernel[(plan.rows * plan.heads,)](
        *tensors, plan.scale, plan.length, plan.chunks, plan.rows,
        **plan.heads_of, **plan.sharing, READ=read, num_warps=8,
    )  # fmt: skip


def walk_back(plan: Plan, tensors: tuple[Tensor | None, ...]) -> None:
    """Launch `walk_back_kernel`; `tensors`: its arguments, from q to d_targets."""
    from longrecall.ops.delta_rule.hopper.walk_back import walk_back_kernel

    walk_back_kernel[(plan.rows * plan.heads,)](
        *tensors, plan.scale, plan.length, plan.chunks, **plan.heads_of, **plan.sharing, num_warps=8
    )
