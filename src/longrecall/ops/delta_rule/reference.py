"""The definition of the delta rules, one step at a time, in the dtype it is given.

Shapes throughout: B batch, T time, H heads, K key width, V value width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longrecall.ops.shapes import decay_factors, repeat_heads, stack_steps


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor, scale: float, state: Tensor
) -> tuple[Tensor, Tensor]:
    r"""Gated delta rule (Yang et al. 2025, equation 10); without decay the delta rule (Yang et al. 2024b).

    .. math:: S_t = (I - \beta_t k_t k_t^\top) \, \mathrm{diag}(e^{g_t}) S_{t-1} + \beta_t k_t v_t^\top, \qquad
              o_t = \mathrm{scale} \cdot q_t S_t

    `q`, `k` ``[B, T, G, K]`` with G dividing H; `v` ``[B, T, H, V]``; `log_decay` ``[B, T, H]``, ``[B, T, G, K]`` (Kimi
    Delta Attention) or None; `beta` ``[B, T, H]``; `state` ``[B, H, K, V]``. Keys are taken as given. Returns outputs
    ``[B, T, H, V]`` and the final state.
    """
    heads = v.shape[2]
    q, k = repeat_heads(q, heads), repeat_heads(k, heads)
    decay = decay_factors(log_decay, heads)
    outputs = []
    for t in range(q.shape[1]):
        if decay is not None:
            state = decay[:, t] * state
        predicted = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        correction = beta[:, t, :, None] * (v[:, t] - predicted)
        state = state + k[:, t, :, :, None] * correction[:, :, None, :]
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return stack_steps(outputs, v), state


def generalised_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    removal: Tensor,
    replacement: Tensor,
    scale: float,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    r"""Generalised delta rule (RWKV-7: Peng et al. 2025, section 4, with rows for columns).

    .. math:: S_t = (\mathrm{diag}(e^{g_t}) - b_t^\top a_t) S_{t-1} + k_t^\top v_t, \qquad
              o_t = \mathrm{scale} \cdot q_t S_t

    The removal key a reads the state before the token, and what it reads is subtracted at the replacement key b. Shapes
    as above; `log_decay`, `removal` and `replacement` ``[B, T, G, K]``.
    """
    q, k, log_decay, removal, replacement = (
        repeat_heads(x, v.shape[2]) for x in (q, k, log_decay, removal, replacement)
    )
    outputs = []
    for t in range(q.shape[1]):
        removed = torch.einsum("bhk,bhkv->bhv", removal[:, t], state)
        state = (
            log_decay[:, t].exp()[..., None] * state
            - replacement[:, t, :, :, None] * removed[:, :, None, :]
            + k[:, t, :, :, None] * v[:, t, :, None, :]
        )
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return stack_steps(outputs, v), state
