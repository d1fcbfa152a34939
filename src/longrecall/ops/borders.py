"""Where a recurrence meets the ranks before and after its own: every op with a state comes by here.

Without a context group all functions return what they were given, and torch.distributed is not imported.
"""

from __future__ import annotations

import contextlib

from torch import Tensor

from longrecall.ops import execution


def state_before(state: Tensor, *read: Tensor | None) -> Tensor:
    """The state before this rank's piece: `state`, which is that before the first piece, or the last rank's handed on.

    `read`: the other inputs of the op. `state` and the result have one shape and dtype.
    """
    if execution.context() is None:
        return state
    from longrecall.ops.context.exchange import received

    return received(state, *read)


def state_after(out: Tensor, final: Tensor) -> tuple[Tensor, Tensor]:
    """Hand the state after this rank's piece on to the next rank; returns `out` and `final`, to be used instead."""
    if execution.context() is None:
        return out, final
    from longrecall.ops.context.exchange import hand_on

    return hand_on(out, final)


def inputs_of_previous(last: Tensor, start: Tensor) -> Tensor:
    """The last inputs of a convolution on the rank before, where `last` are this rank's; `start` on the first rank."""
    if execution.context() is None:
        return start
    from longrecall.ops.context.exchange import from_previous

    return from_previous(last, start)


def sum_of_pieces(x: Tensor) -> Tensor:
    """The sum of the ranks' tensors, for a term of the loss that all ranks compute alike; x for whole sequences."""
    if execution.context() is None:
        return x
    from longrecall.ops.context.exchange import summed

    return summed(x)


def whole_sequences() -> contextlib.AbstractContextManager[None]:
    """Inside, ops read sequences that are not cut: for an op that is part of another one, whose state crosses."""
    return contextlib.nullcontext() if execution.context() is None else execution.with_context(None)
