"""The gated delta rule of a layer with subheads: E states per head share its values, and their outputs are added up.

Plain torch repeats the values and adds up E outputs; the kernels (triton/chunked.py) do neither. State heads are
ordered by key head, then subhead, then value head of that key head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longrecall.ops.backends import BACKENDS, CHUNKED, REFERENCE, Op, declare, kernel
from longrecall.ops.borders import state_after, state_before
from longrecall.ops.delta_rule.op import gated_delta_rule
from longrecall.ops.execution import backend_from_environment
from longrecall.ops.recurrence import too_short
from longrecall.ops.shapes import prepare_state

SUBHEAD_DELTA_RULE = declare(
    Op(
        "subhead_delta_rule",
        kernels="delta_rule.triton.chunked",
        plain=(REFERENCE, CHUNKED),
        slow=too_short,
        covers=("gated_delta_rule",),
    )
)

_subhead_kernels = kernel("delta_rule.triton.chunked", "subhead_delta_rule", on="v")


def share_values(v: Tensor, key_heads: int, subheads: int) -> Tensor:
    """v ``[B, T, Hv, V]`` -> ``[B, T, Hv * E, V]``: every subhead of a head writes the same values."""
    if subheads == 1:
        return v
    grouped = v.unflatten(2, (key_heads, 1, -1))
    shared: Tensor = grouped.expand(-1, -1, -1, subheads, -1, -1).flatten(2, 4)
    return shared


def sum_subheads(o: Tensor, key_heads: int, subheads: int, weights: Tensor | None) -> Tensor:
    """o ``[B, T, Hv * E, V]``, times `weights` ``[Hv, E]`` or 1, -> sums ``[B, T, Hv, V]`` in at least float32."""
    if subheads == 1 and weights is None:
        return o
    wide = o if o.dtype == torch.float64 else o.float()
    grouped: Tensor = wide.unflatten(2, (key_heads, subheads, -1))
    if weights is not None:
        # [Hv, E] -> [H, E, Hv / H, 1]: the order of the state heads.
        grouped = grouped * weights.to(grouped.dtype).unflatten(0, (key_heads, -1)).transpose(1, 2)[..., None]
    return grouped.sum(3).flatten(2, 3)


def subhead_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    weights: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Gated delta rule with E states per value head, which all write the same values.

    :math:`o_t = \sum_e w_e \, o_t^{(e)}`, each :math:`o^{(e)}` as in `gated_delta_rule`. Source: "Scaling up the State
    Size of RNN LLMs for Long-Context Scenarios", section 4.2, equations 9 and 10.

    Args:
        q, k: ``[B, T, H * E, K]``, H key heads.
        v: ``[B, T, Hv, V]``, Hv a multiple of H.
        log_decay: ``[B, T, Hv * E]``, natural logarithm, <= 0; None = no decay.
        beta: ``[B, T, Hv * E]``; its heads per value head are E.
        scale: factor of the outputs; None = ``K ** -0.5``.
        initial_state: ``[B, Hv * E, K, V]``; None = zeros.
        weights: ``[Hv, E]``, factors of the subheads' outputs; None = ones.
        backend: as in `gated_delta_rule`; None chooses.

    Returns:
        The sums ``[B, T, Hv, V]`` (float64 for float64 values, else the dtype of v or float32) and the final state
        ``[B, Hv * E, K, V]`` in float32 (float64 for float64).

    Raises:
        ValueError: shapes that do not fit, or a backend that is unknown or cannot take them.
    """
    heads, value_heads = beta.shape[2], v.shape[2]
    subheads = heads // value_heads
    if heads != subheads * value_heads or q.shape[2] % subheads or value_heads % (q.shape[2] // subheads):
        raise ValueError(
            f"beta needs E heads for each of the {value_heads} value heads, and q E for each key head; "
            f"got beta {list(beta.shape)}, q {list(q.shape)}"
        )
    if weights is not None and tuple(weights.shape) != (value_heads, subheads):
        raise ValueError(f"weights must be {[value_heads, subheads]}; got {list(weights.shape)}")
    key_heads = q.shape[2] // subheads
    inputs = {"q": q, "k": k, "v": v, "log_decay": log_decay, "beta": beta}
    # Another package takes the path below, which repeats the values.
    named = BACKENDS.get(backend or backend_from_environment() or "")
    theirs = named is not None and named.peer
    if not theirs and SUBHEAD_DELTA_RULE.on_kernels({**inputs, "state": initial_state}, backend) and v.numel():
        state = prepare_state(initial_state, (v.shape[0], heads, q.shape[3], v.shape[3]), v, torch.float32)
        state = state_before(state, *inputs.values(), weights)
        scale = q.shape[3] ** -0.5 if scale is None else scale
        with torch.autocast(v.device.type, enabled=False):
            out, after = _subhead_kernels(**inputs, scale=scale, state=state, weights=weights)
        return state_after(out, after)
    shared = share_values(v, key_heads, subheads)
    o, final = gated_delta_rule(
        q, k, shared, log_decay, beta, scale=scale, initial_state=initial_state, backend=backend
    )
    return sum_subheads(o, key_heads, subheads, weights), final
