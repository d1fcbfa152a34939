"""The public recurrences: check the inputs, choose a backend, run it in the accumulation dtype.

A backend has one function per op, and a sentence that says what it is good for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longrecall.errors import did_you_mean
from longrecall.ops import chunked_delta, chunked_linear, reference
from longrecall.ops.packing import check_boundaries, pack, unpack
from longrecall.ops.shapes import accumulation_dtype, check_attention_inputs, prepare_state

# Up to this many steps the plain loop does less work than one padded chunk.
SHORTEST_CHUNKED = 4


@dataclass(frozen=True)
class Backend:
    """One implementation of every op: its functions by op name and what it is good for."""

    name: str
    functions: dict[str, Callable[..., tuple[Tensor, Tensor]]]
    purpose: str


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend(
            "reference",
            {
                "gated_linear_attention": reference.gated_linear_attention,
                "gated_delta_rule": reference.gated_delta_rule,
                "merged_linear_attention": reference.merged_linear_attention,
            },
            "the step-by-step definition; used for one-token decoding",
        ),
        Backend(
            "chunked",
            {
                "gated_linear_attention": chunked_linear.gated_linear_attention,
                "gated_delta_rule": chunked_delta.gated_delta_rule,
                "merged_linear_attention": chunked_linear.merged_linear_attention,
            },
            "matrix products over chunks in plain torch; CPU and GPU, any dtype",
        ),
    )
}


def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    backend: str | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Gated linear attention.

    .. math:: S_t = \mathrm{diag}(e^{g_t}) S_{t-1} + k_t^\top v_t, \qquad o_t = \mathrm{scale}\, q_t S_t

    Source: Yang et al. 2024 (GLA), equation 3; StateX, equation 2. With one decay per head it is RetNet and Mamba-2.

    Args:
        q, k: ``[B, T, G, K]``; G divides H and head h reads group ``h // (H / G)`` (G = H is the usual case).
        v: ``[B, T, H, V]``.
        log_decay: natural logarithm, <= 0: ``[B, T, G, K]`` per key channel, ``[B, T, H]`` per head, None for no decay.
        scale: factor of the outputs; None = ``K ** -0.5``.
        initial_state: ``[B, H, K, V]``; None = zeros. With `cu_seqlens` B is the number of documents.
        backend: "reference" or "chunked"; None chooses.
        cu_seqlens: int ``[N + 1]``: B = 1 holds N documents side by side, each with a state of its own.

    Returns:
        Outputs ``[B, T, H, V]`` in the dtype of `v` and the final state ``[B, H, K, V]`` in float32 (float64 for
        float64 inputs). Gradients reach every input, the initial state included.

    Raises:
        ValueError: shapes that do not fit, or an unknown backend.
    """
    check_attention_inputs(q, k, v, log_decay)
    tensors = {"q": q, "k": k, "v": v, "log_decay": log_decay}
    state_shape = (v.shape[2], q.shape[3], v.shape[3])
    return _run("gated_linear_attention", tensors, state_shape, scale, initial_state, backend, cu_seqlens)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    backend: str | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Gated delta rule.

    .. math:: S_t = e^{g_t}(I - \beta_t k_t k_t^\top) S_{t-1} + \beta_t k_t v_t^\top, \qquad
              o_t = \mathrm{scale}\, q_t S_t

    Source: Yang et al. 2025 (Gated DeltaNet), equation 10; `log_decay` None gives DeltaNet (Yang et al. 2024b).
    Keys are taken as given: normalise outside. `log_decay` ``[B, T, H]`` or None; `beta` ``[B, T, H]``; all else, and
    what is returned and raised, as in `gated_linear_attention`.
    """
    check_attention_inputs(q, k, v, log_decay, beta)
    if log_decay is not None and log_decay.dim() != 3:
        raise ValueError(f"the gated delta rule has one decay per head, [B, T, H]; got {list(log_decay.shape)}")
    tensors = {"q": q, "k": k, "v": v, "log_decay": log_decay, "beta": beta}
    state_shape = (v.shape[2], q.shape[3], v.shape[3])
    return _run("gated_delta_rule", tensors, state_shape, scale, initial_state, backend, cu_seqlens)


def merged_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    mixing: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    backend: str | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Merged heads: every key head writes the values of all heads, and a matrix mixes what the queries read.

    :math:`o_{t,h'} = \mathrm{scale} \sum_h M_{hh'} q_{t,h} S_t[h, h']`. Source: StateX, section 4.1 (M of ones is its
    merged head, M = I the layer before the merge). `mixing` ``[H, H]``, q, k and v have H heads, the state is
    ``[B, H, K, H * V]``; all else as in `gated_linear_attention`.
    """
    check_attention_inputs(q, k, v, log_decay)
    heads = v.shape[2]
    if q.shape[2] != heads or tuple(mixing.shape) != (heads, heads):
        raise ValueError(
            f"merged heads need H key heads and mixing [H, H]; got q {list(q.shape)}, mixing {list(mixing.shape)}"
        )
    tensors = {"q": q, "k": k, "v": v, "log_decay": log_decay}
    state_shape = (heads, q.shape[3], heads * v.shape[3])
    return _run("merged_linear_attention", tensors, state_shape, scale, initial_state, backend, cu_seqlens, mixing)


def _run(
    op: str,
    tensors: dict[str, Any],
    state_shape: tuple[int, int, int],
    scale: float | None,
    initial_state: Tensor | None,
    backend: str | None,
    cu_seqlens: Tensor | None,
    mixing: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    v: Tensor = tensors["v"]
    if cu_seqlens is not None:
        if v.shape[0] != 1:
            raise ValueError(f"cu_seqlens packs documents into one row: B must be 1, got {v.shape[0]}")
        check_boundaries(cu_seqlens, v.shape[1])
        tensors = {name: None if x is None else unpack(x, cu_seqlens) for name, x in tensors.items()}
    q, padded = tensors["q"], tensors["v"]
    dtype = accumulation_dtype(*tensors.values(), initial_state, mixing)
    state = prepare_state(initial_state, (padded.shape[0], *state_shape), v, dtype)
    inputs = {name: None if x is None else x.to(dtype) for name, x in tensors.items()}
    if mixing is not None:
        inputs["mixing"] = mixing.to(dtype)
    function = _choose(backend, padded.shape[1]).functions[op]
    scale = q.shape[3] ** -0.5 if scale is None else scale
    with torch.autocast(v.device.type, enabled=False):
        out, final = function(**inputs, scale=scale, state=state) if padded.shape[1] else (padded, state)
    out = out.to(v.dtype)
    return (out if cu_seqlens is None else pack(out, cu_seqlens)), final


def _choose(name: str | None, length: int) -> Backend:
    if name is None:
        return BACKENDS["chunked" if length > SHORTEST_CHUNKED else "reference"]
    if name not in BACKENDS:
        raise ValueError(f'unknown backend "{name}"; there are {", ".join(BACKENDS)}.{did_you_mean(name, BACKENDS)}')
    return BACKENDS[name]
