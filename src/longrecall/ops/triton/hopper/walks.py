"""Launches of the gated delta rule's walks in Gluon, and when they serve better than the plain ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from longrecall.ops.triton import hopper, launch

if TYPE_CHECKING:
    from longrecall.ops.triton.delta_rule import _Plan

WIDTH = 128
"""Key and value channels of the states that these kernels hold."""

FEWEST = 3
"""One state for so many multiprocessors is enough for whole states to be as fast as halves and segments: measured."""


def serve(plan: _Plan, *tensors: Tensor) -> bool:
    """Whether walks that read these bfloat16 tensors, v first, by asynchronous copies run here.

    A program holds a whole state, so they are half as many as the plain kernels' programs. With so few states that most
    multiprocessors would have none, the plain kernels' halves and segments keep more of them busy.
    """
    if plan.key_width != WIDTH or plan.value_width != WIDTH:
        return False
    states = plan.rows * plan.heads
    return states * FEWEST > launch.processors(tensors[0]) and hopper.declines(*tensors) is None


def walk(plan: _Plan, tensors: tuple[Tensor, ...], read: bool) -> None:
    """Launch `walk_kernel` for one segment; `tensors`: its arguments, from q to corrections."""
    from longrecall.ops.triton.hopper.delta_walk import walk_kernel

    walk_kernel[(plan.rows * plan.heads,)](
        *tensors, plan.scale, plan.length, plan.chunks, plan.rows,
        **plan.heads_of, **plan.sharing, READ=read, num_warps=8,
    )  # fmt: skip


def walk_back(plan: _Plan, tensors: tuple[Tensor, ...]) -> None:
    """Launch `walk_back_kernel`; `tensors`: its arguments, from q to d_targets."""
    from longrecall.ops.triton.hopper.delta_walk_back import walk_back_kernel

    walk_back_kernel[(plan.rows * plan.heads,)](
        *tensors, plan.scale, plan.length, plan.chunks, **plan.heads_of, **plan.sharing, num_warps=8
    )
