"""The selective scan of Mamba: check the inputs, choose a backend, run it."""

from __future__ import annotations

import torch
from torch import Tensor

from longrecall.ops.backends import CHUNKED, REFERENCE, Inputs, Op, declare, kernel, recurrence_functions
from longrecall.ops.borders import state_after, state_before
from longrecall.ops.packing import check_boundaries, pack, unpack
from longrecall.ops.recurrence import SHORTEST_CHUNKED
from longrecall.ops.scan import blocked, reference
from longrecall.ops.shapes import accumulation_dtype, prepare_state


def _too_short(inputs: Inputs) -> str | None:
    x = inputs["x"]
    assert x is not None
    # In plain torch the scan launches kernels for every step, so its own kernel is faster from fewer tokens on than
    # others.
    short = x.shape[1] <= SHORTEST_CHUNKED
    return f"sequences of up to {SHORTEST_CHUNKED} tokens are left to plain torch" if short else None


def _plain_for(inputs: Inputs) -> str:
    x = inputs["x"]
    assert x is not None
    return REFERENCE if x.shape[1] <= SHORTEST_CHUNKED else CHUNKED


SELECTIVE_SCAN = declare(
    Op(
        "selective_scan",
        kernels="scan.triton.selective_scan",
        functions=recurrence_functions(
            "selective_scan",
            reference=reference.selective_scan,
            chunked=blocked.selective_scan,
            triton=kernel("scan.triton.selective_scan", "selective_scan"),
        ),
        plain=(REFERENCE, CHUNKED),
        slow=_too_short,
        plain_for=_plain_for,
    )
)


def selective_scan(
    x: Tensor,
    step: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    backend: str | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Selective scan: a decay of its own for every channel i and key n.

    .. math:: h_{t,n,i} = e^{\Delta_{t,i} A_{in}} h_{t-1,n,i} + \Delta_{t,i} B_{t,n} x_{t,i}, \qquad
              y_{t,i} = \sum_n C_{t,n} h_{t,n,i} + D_i x_{t,i}

    Source: Gu and Dao 2023 (Mamba), section 3.2 and algorithm 2, with their simplified discretisation of B.

    Args:
        x: ``[B, T, I]``.
        step: the time steps, >= 0, ``[B, T, I]``; 0 leaves the state as it was.
        a: ``[I, N]``, <= 0.
        b, c: ``[B, T, N]``, shared by all channels.
        skip: D, ``[I]``; None = no skip connection.
        initial_state: ``[B, N, I]``; None = zeros. With `cu_seqlens` B is the number of documents.
        backend: "reference", "chunked" or "triton"; None chooses.
        cu_seqlens: int ``[documents + 1]``: B = 1 holds documents side by side, each with a state of its own.

    Returns:
        Outputs ``[B, T, I]`` in the dtype of `x` and the final state ``[B, N, I]`` in float32 (float64 for float64
        inputs). Gradients reach every input, the initial state included.

    Raises:
        ValueError: shapes that do not fit, an unknown backend, or one that cannot serve this call.

    >>> x, step = torch.ones(2, 1, 3, 4)
    >>> b = c = torch.ones(1, 3, 2)
    >>> y, state = selective_scan(x, step, torch.zeros(4, 2), b, c)
    >>> y[0, :, 0], state.shape                                   # a = 0 forgets nothing
    (tensor([2., 4., 6.]), torch.Size([1, 2, 4]))
    """
    _check(x, step, a, b, c, skip)
    if cu_seqlens is not None:
        if x.shape[0] != 1:
            raise ValueError(f"cu_seqlens packs documents into one row: B must be 1, got {x.shape[0]}")
        check_boundaries(cu_seqlens, x.shape[1])
        x, step, b, c = (unpack(tensor, cu_seqlens) for tensor in (x, step, b, c))
    dtype = accumulation_dtype(x, step, a, b, c, skip, initial_state)
    state = prepare_state(initial_state, (x.shape[0], a.shape[1], a.shape[0]), x, dtype)
    state = state_before(state, x, step, a, b, c, skip)
    inputs = {"x": x, "step": step, "a": a, "b": b, "c": c}
    chosen = SELECTIVE_SCAN.chosen({**inputs, "skip": skip, "state": state}, backend)
    function = SELECTIVE_SCAN.functions[chosen]
    with torch.autocast(x.device.type, enabled=False):
        if not x.numel():
            y, final = x, state
        elif chosen not in SELECTIVE_SCAN.plain:
            y, final = function(**inputs, skip=skip, state=state)
        else:
            wide = {name: tensor.to(dtype) for name, tensor in inputs.items()}
            y, final = function(**wide, state=state)
            y = y if skip is None else torch.addcmul(y, wide["x"], skip.to(dtype))
    y, final = state_after(y.to(x.dtype), final)
    return (y if cu_seqlens is None else pack(y, cu_seqlens)), final


def _check(x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor | None) -> None:
    tensors = {"x": x, "step": step, "a": a, "b": b, "c": c} | ({} if skip is None else {"skip": skip})
    got = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
    if x.dim() != 3 or a.dim() != 2:
        raise ValueError(f"x must be [B, T, I] and a [I, N]; got {got}")
    batch, length, channels = x.shape
    keys = (batch, length, a.shape[1])
    fits = step.shape == x.shape and a.shape[0] == channels and tuple(b.shape) == keys == tuple(c.shape)
    if not fits or (skip is not None and tuple(skip.shape) != (channels,)):
        raise ValueError(f"step must be like x [B, T, I], a [I, N], b and c [B, T, N] and skip [I]; got {got}")
