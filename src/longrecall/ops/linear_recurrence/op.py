"""The linear recurrence and RWKV-4's weighted average: check the inputs, choose a backend, run it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from longrecall.ops.backends import CHUNKED, REFERENCE, TRITON, Inputs, Op, declare, kernel, recurrence_functions
from longrecall.ops.borders import state_after, state_before
from longrecall.ops.linear_recurrence import chunked, reference
from longrecall.ops.packing import check_boundaries, document_mask, pack, unpack
from longrecall.ops.recurrence import SHORTEST_CHUNKED
from longrecall.ops.shapes import accumulation_dtype, prepare_state


def _too_short(inputs: Inputs) -> str | None:
    x = next(iter(inputs.values()))
    assert x is not None
    # In plain torch every step launches a kernel, so that kernels win early.
    short = x.shape[1] <= SHORTEST_CHUNKED
    return f"sequences of up to {SHORTEST_CHUNKED} tokens are left to plain torch" if short else None


def _plain_for(inputs: Inputs) -> str:
    return CHUNKED if _too_short(inputs) is None else REFERENCE


_kernel = kernel("linear_recurrence.triton.scan", "linear_recurrence")

LINEAR_RECURRENCE = declare(
    Op(
        "linear_recurrence",
        kernels="linear_recurrence.triton.scan",
        functions=recurrence_functions(
            "linear_recurrence",
            reference=reference.linear_recurrence,
            chunked=chunked.linear_recurrence,
            triton=_kernel,
        ),
        plain=(REFERENCE, CHUNKED),
        slow=_too_short,
        plain_for=_plain_for,
    )
)
WEIGHTED_AVERAGE = declare(
    Op(
        "weighted_average",
        kernels="linear_recurrence.triton.scan",
        functions=recurrence_functions(
            "weighted_average",
            reference=reference.weighted_average,
            chunked=chunked.weighted_average,
            triton=partial(chunked.weighted_average, recurrence=_kernel),
        ),
        plain=(REFERENCE, CHUNKED),
        slow=_too_short,
        plain_for=_plain_for,
    )
)


def linear_recurrence(
    x: Tensor,
    log_decay: Tensor,
    *,
    initial_state: Tensor | None = None,
    backend: str | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Independent channels, each with its own decay: :math:`h_t = e^{g_t} h_{t-1} + x_t`.

    Source: De et al. 2024 (Griffin), equation 4, without its gates; also the recurrence of HGRN and of S4D-like layers
    with real eigenvalues that depend on the token.

    Args:
        x: ``[B, T, C]``.
        log_decay: natural logarithm, <= 0, ``[B, T, C]``.
        initial_state: ``[B, C]``; None = zeros. With `cu_seqlens` B is the number of documents.
        backend: "reference", "chunked" or "triton"; None chooses.
        cu_seqlens: int ``[documents + 1]``: B = 1 holds documents side by side, each with a state of its own.

    Returns:
        h ``[B, T, C]`` in the dtype of `x` and the final state ``[B, C]`` in float32 (float64 for float64 inputs).
        Gradients reach every input, the initial state included.

    Raises:
        ValueError: shapes that do not fit, an unknown backend, or one that cannot serve this call.

    >>> half = torch.full((1, 3, 1), 0.5).log()
    >>> h, state = linear_recurrence(torch.ones(1, 3, 1), half)
    >>> h[0, :, 0]
    tensor([1.0000, 1.5000, 1.7500])
    """
    if x.dim() != 3 or log_decay.shape != x.shape:
        raise ValueError(f"x and log_decay must be [B, T, C]; got {list(x.shape)} and {list(log_decay.shape)}")
    tensors = {"x": x, "log_decay": log_decay}
    return _run(LINEAR_RECURRENCE, tensors, {}, x, (x.shape[2],), initial_state, backend, cu_seqlens)


def weighted_average(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    bonus: Tensor,
    *,
    initial_state: Tensor | None = None,
    backend: str | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""RWKV-4's average of the values so far, with weights that fade with time (the WKV operator).

    .. math:: o_t = \frac{\sum_{i<t} e^{(t-1-i) w + k_i} v_i + e^{u + k_t} v_t}
                         {\sum_{i<t} e^{(t-1-i) w + k_i} + e^{u + k_t}}

    Source: Peng et al. 2023 (RWKV), section 3.1. A key of -1e30 has no weight: with a decay of 0, padding.

    Args:
        k, v: ``[B, T, C]``.
        log_decay: w, natural logarithm, <= 0, ``[B, T, C]``, or ``[C]`` where all tokens have the same.
        bonus: u, ``[C]``.
        initial_state: ``[B, 3, C]``: the average without a bonus, the logarithm of the sum of its weights, and 1 where
            a token was read. None = zeros, the state before the first token.
        backend, cu_seqlens: as in `linear_recurrence`.

    Returns:
        o ``[B, T, C]`` in the dtype of `v` and the final state ``[B, 3, C]`` in float32 (float64 for float64 inputs).
        Gradients reach every input, the initial state included.

    Raises:
        ValueError: shapes that do not fit, an unknown backend, or one that cannot serve this call.

    >>> k, g = torch.zeros(2, 1, 3, 1)
    >>> v = torch.tensor([3.0, 6.0, 9.0]).view(1, 3, 1)
    >>> o, state = weighted_average(k, v, g, torch.zeros(1))
    >>> o[0, :, 0]                                                # equal keys, no decay: the mean so far
    tensor([3.0000, 4.5000, 6.0000])
    """
    fits = v.dim() == 3 and k.shape == v.shape and tuple(bonus.shape) == tuple(v.shape[2:])
    if not fits or log_decay.shape not in (v.shape, bonus.shape):
        raise ValueError(
            "k and v must be [B, T, C], bonus [C] and log_decay one of the two; got "
            f"k {list(k.shape)}, v {list(v.shape)}, log_decay {list(log_decay.shape)}, bonus {list(bonus.shape)}"
        )
    tensors = {"k": k, "v": v, "log_decay": log_decay.expand_as(v)}
    return _run(WEIGHTED_AVERAGE, tensors, {"bonus": bonus}, v, (3, v.shape[2]), initial_state, backend, cu_seqlens)


def _run(
    op: Op,
    tensors: dict[str, Tensor],
    constants: dict[str, Tensor],
    like: Tensor,
    state_shape: tuple[int, ...],
    initial_state: Tensor | None,
    backend: str | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Outputs in the dtype of `like` and the final state; `tensors` ``[B, T, C]`` are cut at `cu_seqlens`."""
    if cu_seqlens is not None:
        if like.shape[0] != 1:
            raise ValueError(f"cu_seqlens packs documents into one row: B must be 1, got {like.shape[0]}")
        check_boundaries(cu_seqlens, like.shape[1])
        tensors = _unpacked(tensors, cu_seqlens)
    rows = next(iter(tensors.values()))
    dtype = accumulation_dtype(*tensors.values(), *constants.values(), initial_state)
    state = prepare_state(initial_state, (rows.shape[0], *state_shape), like, dtype)
    state = state_before(state, *tensors.values(), *constants.values())
    inputs: dict[str, Any] = tensors | constants
    chosen = op.chosen({**inputs, "state": state}, backend)
    assert chosen in (*op.plain, TRITON)
    with torch.autocast(like.device.type, enabled=False):
        # The kernel reads and writes the dtype that it adds up in, as plain torch does.
        wide = {name: tensor.to(dtype) for name, tensor in inputs.items()}
        out, final = op.functions[chosen](**wide, state=state) if rows.numel() else (like, state)
    out, final = state_after(out.to(like.dtype), final)
    return (out if cu_seqlens is None else pack(out, cu_seqlens)), final


def _unpacked(tensors: dict[str, Tensor], cu_seqlens: Tensor) -> dict[str, Tensor]:
    """A row for each document, whose end is filled so that its state stays as it is: x and decays 0, keys -1e30."""
    rows = {name: unpack(tensor, cu_seqlens) for name, tensor in tensors.items()}
    if "k" in rows:
        rows["k"] = torch.where(document_mask(cu_seqlens)[..., None], rows["k"], reference.NOTHING)
    return rows
