"""The public recurrences: check the inputs, choose a backend, run it.

A backend has a function for each op that it serves, a sentence that says what it is good for and, where it cannot
serve everything, a function that says why it declines a call. Asked for by name (`backend=`, or LONGRECALL_BACKEND in
the environment) it serves the call or raises; left to choose, dispatch takes the fastest one that does not decline.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from longrecall.errors import UserError, did_you_mean
from longrecall.ops import peers, reference
from longrecall.ops.delta_rule import chunked as chunked_delta
from longrecall.ops.delta_rule import chunked_generalised
from longrecall.ops.kernels import backend as triton
from longrecall.ops.linear_attention import chunked as chunked_linear
from longrecall.ops.packing import check_boundaries, pack, unpack
from longrecall.ops.products import product_dtype
from longrecall.ops.scan import blocked as blocked_scan
from longrecall.ops.shapes import accumulation_dtype, check_attention_inputs, prepare_state

# Up to this many steps the plain loop does less work than one padded chunk.
SHORTEST_CHUNKED = 4
# On a GPU a shorter sequence is bound by launches, and the plain loops make fewer of them.
SHORTEST_TRITON = 16


@dataclass(frozen=True)
class Backend:
    """One implementation of the ops: its functions by op name and what it is good for."""

    name: str
    functions: dict[str, Callable[..., tuple[Tensor, Tensor]]]
    purpose: str
    declines: Callable[[str, dict[str, Tensor | None]], str | None] | None = None
    """(op, inputs) -> why it cannot serve the call, or None. A backend without it serves all of its ops."""
    unavailable: Callable[[], str | None] | None = None
    """Why it can serve nothing on this machine, or None."""
    kernels: bool = False
    """Takes inputs in the dtypes they have; the others get them in the accumulation dtype."""
    inside_layers: tuple[str, ...] = ()
    """What it computes beside the recurrences, chosen where it is called (ops/norms/op.py)."""
    low_products: frozenset[str] = frozenset()
    """Ops whose function takes `products`, the dtype in which matrices are multiplied."""


_KERNELS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "gated_linear_attention": triton.gated_linear_attention,
    "gated_delta_rule": triton.gated_delta_rule,
    "merged_linear_attention": triton.merged_linear_attention,
    "selective_scan": triton.selective_scan,
}


def _peer(name: str, purpose: str) -> Backend:
    ops = sorted({op for op, _ in peers.PEERS[name].functions})
    return Backend(
        name,
        {op: partial(peers.run, name, op) for op in ops},
        purpose,
        declines=partial(peers.declines, name),
        unavailable=partial(peers.unavailable, name),
        kernels=True,
    )


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend(
            "reference",
            {
                "gated_linear_attention": reference.gated_linear_attention,
                "gated_delta_rule": reference.gated_delta_rule,
                "generalised_delta_rule": reference.generalised_delta_rule,
                "merged_linear_attention": reference.merged_linear_attention,
                "selective_scan": reference.selective_scan,
            },
            "the step-by-step definition; used for one-token decoding",
        ),
        Backend(
            "chunked",
            {
                "gated_linear_attention": chunked_linear.gated_linear_attention,
                "gated_delta_rule": chunked_delta.gated_delta_rule,
                "generalised_delta_rule": chunked_generalised.generalised_delta_rule,
                "merged_linear_attention": chunked_linear.merged_linear_attention,
                "selective_scan": blocked_scan.selective_scan,
            },
            "matrix products over chunks in plain torch; CPU and GPU, any dtype",
            low_products=frozenset({"gated_linear_attention"}),
        ),
        Backend(
            "triton",
            _KERNELS,
            "fused kernels for NVIDIA GPUs; float32, float16, bfloat16",
            declines=triton.declines,
            unavailable=triton.unavailable,
            kernels=True,
            inside_layers=tuple(op for op in triton.MODULES if op not in _KERNELS),
        ),
        _peer("fla", "flash-linear-attention's kernels, where measured faster; bfloat16"),
        _peer("flash_qla", "FlashQLA's kernels, where measured faster; bfloat16, heads of 128"),
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
        backend: "reference", "chunked", "triton", "fla" or "flash_qla"; None chooses.
        cu_seqlens: int ``[N + 1]``: B = 1 holds N documents side by side, each with a state of its own.

    Returns:
        Outputs ``[B, T, H, V]`` in the dtype of `v` and the final state ``[B, H, K, V]`` in float32 (float64 for
        float64 inputs). Gradients reach every input, the initial state included.

    Raises:
        ValueError: shapes that do not fit, an unknown backend, or one that cannot serve this call.
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

    .. math:: S_t = (I - \beta_t k_t k_t^\top)\, \mathrm{diag}(e^{g_t}) S_{t-1} + \beta_t k_t v_t^\top, \qquad
              o_t = \mathrm{scale}\, q_t S_t

    Source: Yang et al. 2025 (Gated DeltaNet), equation 10; `log_decay` None gives DeltaNet (Yang et al. 2024b), one per
    key channel Kimi Delta Attention (Kimi Team 2025, section 3). Keys are taken as given: normalise outside.
    `log_decay` ``[B, T, H]``, ``[B, T, G, K]`` or None; `beta` ``[B, T, H]``; all else, and what is returned and
    raised, as in `gated_linear_attention`.
    """
    check_attention_inputs(q, k, v, log_decay, beta)
    tensors = {"q": q, "k": k, "v": v, "log_decay": log_decay, "beta": beta}
    state_shape = (v.shape[2], q.shape[3], v.shape[3])
    return _run("gated_delta_rule", tensors, state_shape, scale, initial_state, backend, cu_seqlens)


def generalised_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    removal: Tensor,
    replacement: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    backend: str | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Generalised delta rule: a decay per key channel, and separate keys for removing and replacing.

    .. math:: S_t = (\mathrm{diag}(e^{g_t}) - b_t^\top a_t) S_{t-1} + k_t^\top v_t, \qquad
              o_t = \mathrm{scale}\, q_t S_t

    Source: Peng et al. 2025 (RWKV-7), section 4, with rows for columns. `removal` a, `replacement` b and `log_decay`
    ``[B, T, G, K]``; all else, and what is returned and raised, as in `gated_linear_attention`.
    """
    check_attention_inputs(q, k, v, log_decay)
    for name, x in (("log_decay", log_decay), ("removal", removal), ("replacement", replacement)):
        if x.shape != k.shape:
            raise ValueError(f"{name} must be {list(k.shape)} as the keys; got {list(x.shape)}")
    tensors = {"q": q, "k": k, "v": v, "log_decay": log_decay, "removal": removal, "replacement": replacement}
    state_shape = (v.shape[2], q.shape[3], v.shape[3])
    return _run("generalised_delta_rule", tensors, state_shape, scale, initial_state, backend, cu_seqlens)


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
    inputs = tensors if mixing is None else {**tensors, "mixing": mixing}
    chosen = choose_backend(backend, op, {**inputs, "state": state})
    if not chosen.kernels:
        inputs = {name: None if x is None else x.to(dtype) for name, x in inputs.items()}
    options = {"products": product_dtype(q, tensors["k"], v, dtype)} if op in chosen.low_products else {}
    scale = q.shape[3] ** -0.5 if scale is None else scale
    with torch.autocast(v.device.type, enabled=False):
        out, final = (
            chosen.functions[op](**inputs, scale=scale, state=state, **options) if padded.numel() else (padded, state)
        )
    out = out.to(v.dtype)
    return (out if cu_seqlens is None else pack(out, cu_seqlens)), final


def choose_backend(name: str | None, op: str, inputs: dict[str, Tensor | None]) -> Backend:
    """The backend of this name for a call, or with None the fastest; UserError where it cannot serve the call."""
    asked = name
    name = name or os.environ.get("LONGRECALL_BACKEND") or None
    if name is None:
        return _fastest(op, inputs)
    cure = "" if asked else ". LONGRECALL_BACKEND names it; without it every call takes what serves it best"
    if name not in BACKENDS:
        near = did_you_mean(name, BACKENDS)
        raise UserError(f'unknown backend "{name}"; there are {", ".join(BACKENDS)}{cure}.{near}')
    backend = BACKENDS[name]
    reason = None if backend.declines is None else backend.declines(op, inputs)
    if reason is not None:
        raise UserError(f'backend "{name}" cannot serve this call of {op}: {reason}{cure}')
    return backend


def _fastest(op: str, inputs: dict[str, Tensor | None]) -> Backend:
    # In plain torch the selective scan launches kernels for every step, so that its own kernel wins sooner.
    scan = op == "selective_scan"
    tokens = inputs["x" if scan else "v"]
    assert tokens is not None
    length = tokens.shape[1]
    if length <= SHORTEST_CHUNKED:
        return BACKENDS["reference"]
    if not tokens.is_cuda or not (scan or length >= SHORTEST_TRITON):
        return BACKENDS["chunked"]
    own = "triton" if triton.declines(op, inputs) is None else "chunked"
    return BACKENDS[peers.faster(op, inputs) or own]
