"""Launches of the gated delta rule's walks in Gluon, and when they serve better than the plain ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from longrecall.ops.kernels import hopper, launch

if TYPE_CHECKING:
    from longrecall.ops.delta_rule.triton.plan import Plan

WIDTH = 128
"""Key and value channels of the states that these kernels hold."""

FEWEST = 3
"""One state for so many multiprocessors is enough for whole states to be as fast as halves and segments: measured."""


def serve(plan: Plan, *tensors: Tensor) -> bool:
    """Whether walks that read these bfloat16 tensors, v first, by asynchronous copies run here."""
    fits = plan.key_width == WIDTH and plan.value_width == WIDTH
    return fits and hopper.why_not(*tensors) is None


def serve_forward(plan: Plan, *tensors: Tensor) -> bool:
    """As `serve`, and there are enough states for a walk forward.

    A program holds a whole state. Where most multiprocessors would have none, plain kernels keep more of them busy:
    they hold halves, and walk forward in segments side by side. No walk back has segments.
    """
    return plan.rows * plan.heads * FEWEST > launch.processors(tensors[0]) and serve(plan, *tensors)


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
