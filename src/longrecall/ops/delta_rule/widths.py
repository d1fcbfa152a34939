"""The widths of keys and values that the delta rule's kernels are built for."""

from __future__ import annotations

from longrecall.ops.execution import interpreting_triton

WIDTHS = (64, 128, 256)
"""Key and value widths the kernels are built for on a GPU."""

INTERPRETED_WIDTHS = (16, 32, *WIDTHS)
"""The same under Triton's interpreter, which has no warp groups. It is slow, so it also gets small widths."""


def built_width(width: int) -> int:
    """The least width of at least `width` channels for which there are kernels."""
    return next(built for built in (INTERPRETED_WIDTHS if interpreting_triton() else WIDTHS) if built >= width)
