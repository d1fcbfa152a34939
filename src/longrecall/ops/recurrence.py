"""The steps that every recurrence with queries, keys and values takes around its backend.

Packed documents get a row each, the initial state is prepared, and a backend is chosen and run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longrecall.ops.backends import CHUNKED, REFERENCE, Inputs, Op
from longrecall.ops.borders import state_after, state_before
from longrecall.ops.packing import check_boundaries, pack, unpack
from longrecall.ops.products import product_dtype
from longrecall.ops.shapes import accumulation_dtype, prepare_state

SHORTEST_CHUNKED = 4
"""Up to this many steps the plain loop does less work than one padded chunk."""

SHORTEST_TRITON = 16
"""On a GPU launches take most of the time of a shorter sequence, and the plain loops make fewer of them."""


def too_short(inputs: Inputs) -> str | None:
    """Why kernels are not faster for values v ``[B, T, H, V]``, in words; None = they are."""
    v = inputs["v"]
    assert v is not None
    short = v.shape[1] < SHORTEST_TRITON
    return f"sequences of fewer than {SHORTEST_TRITON} tokens are left to plain torch" if short else None


def plain_for(inputs: Inputs) -> str:
    """The faster of the two in plain torch for values v ``[B, T, H, V]``."""
    v = inputs["v"]
    assert v is not None
    return REFERENCE if v.shape[1] <= SHORTEST_CHUNKED else CHUNKED


def run(
    op: Op,
    tensors: dict[str, Any],
    state_shape: tuple[int, int, int],
    scale: float | None,
    initial_state: Tensor | None,
    backend: str | None,
    cu_seqlens: Tensor | None,
    mixing: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs and final state of `op`; the arguments are those of its public function, checked."""
    v: Tensor = tensors["v"]
    if cu_seqlens is not None:
        if v.shape[0] != 1:
            raise ValueError(f"cu_seqlens packs documents into one row: B must be 1, got {v.shape[0]}")
        check_boundaries(cu_seqlens, v.shape[1])
        tensors = {name: None if x is None else unpack(x, cu_seqlens) for name, x in tensors.items()}
    q, padded = tensors["q"], tensors["v"]
    dtype = accumulation_dtype(*tensors.values(), initial_state, mixing)
    state = prepare_state(initial_state, (padded.shape[0], *state_shape), v, dtype)
    state = state_before(state, *tensors.values(), mixing)
    inputs = tensors if mixing is None else {**tensors, "mixing": mixing}
    chosen = op.chosen({**inputs, "state": state}, backend)
    if chosen in op.plain:
        inputs = {name: None if x is None else x.to(dtype) for name, x in inputs.items()}
    low = op.low_products and chosen == CHUNKED
    options = {"products": product_dtype(q, tensors["k"], v, dtype)} if low else {}
    scale = q.shape[3] ** -0.5 if scale is None else scale
    with torch.autocast(v.device.type, enabled=False):
        out, final = (
            op.functions[chosen](**inputs, scale=scale, state=state, **options) if padded.numel() else (padded, state)
        )
    out, final = state_after(out.to(v.dtype), final)
    return (out if cu_seqlens is None else pack(out, cu_seqlens)), final
