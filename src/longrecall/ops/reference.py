"""The definition of every recurrence, one step at a time, in the dtype it is given.

Every faster backend is tested against these loops. They are differentiable and need T steps.
Shapes throughout: B batch, T time, H heads, K key width, V value width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longrecall.ops.shapes import repeat_heads


def gated_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, scale: float, state: Tensor
) -> tuple[Tensor, Tensor]:
    r"""Gated linear attention (Yang et al. 2024, equation 3; StateX, equation 2).

    .. math:: S_t = \mathrm{diag}(e^{g_t}) S_{t-1} + k_t^\top v_t, \qquad o_t = \mathrm{scale} \cdot q_t S_t

    `q`, `k` ``[B, T, G, K]`` with G dividing H; `v` ``[B, T, H, V]``; `log_decay` ``[B, T, G, K]``, ``[B, T, H]`` or
    None; `state` ``[B, H, K, V]``. Returns outputs ``[B, T, H, V]`` and the final state.
    """
    heads = v.shape[2]
    q, k = repeat_heads(q, heads), repeat_heads(k, heads)
    decay = _per_key_decay(log_decay, heads)
    outputs = []
    for t in range(q.shape[1]):
        if decay is not None:
            state = decay[:, t] * state
        state = state + k[:, t, :, :, None] * v[:, t, :, None, :]
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return _stack(outputs, v), state


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor, scale: float, state: Tensor
) -> tuple[Tensor, Tensor]:
    r"""Gated delta rule (Yang et al. 2025, equation 10); without decay the delta rule (Yang et al. 2024b).

    .. math:: S_t = (I - \beta_t k_t k_t^\top) \, \mathrm{diag}(e^{g_t}) S_{t-1} + \beta_t k_t v_t^\top, \qquad
              o_t = \mathrm{scale} \cdot q_t S_t

    Shapes as above; `log_decay` ``[B, T, H]``, ``[B, T, G, K]`` (Kimi Delta Attention) or None, `beta` ``[B, T, H]``.
    Keys are taken as given.
    """
    heads = v.shape[2]
    q, k = repeat_heads(q, heads), repeat_heads(k, heads)
    decay = _per_key_decay(log_decay, heads)
    outputs = []
    for t in range(q.shape[1]):
        if decay is not None:
            state = decay[:, t] * state
        predicted = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        correction = beta[:, t, :, None] * (v[:, t] - predicted)
        state = state + k[:, t, :, :, None] * correction[:, :, None, :]
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return _stack(outputs, v), state


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

    What the removal key a reads of the state before the token is taken away at the replacement key b. Shapes as above;
    `log_decay`, `removal` and `replacement` ``[B, T, G, K]``.
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
    return _stack(outputs, v), state


def merged_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, mixing: Tensor, scale: float, state: Tensor
) -> tuple[Tensor, Tensor]:
    r"""Gated linear attention whose key heads each write the values of all heads (StateX, equation 4, and a mixing).

    .. math:: S_t[h, h'] = \mathrm{diag}(e^{g_{t,h}}) S_{t-1}[h, h'] + k_{t,h}^\top v_{t,h'}, \qquad
              o_{t,h'} = \mathrm{scale} \sum_h M[h, h'] \, q_{t,h} S_t[h, h']

    `mixing` M is ``[H, H]``; the identity gives the unmerged layer, ones give StateX's single merged head.
    `state` is ``[B, H, K, H * V]``: key head h, then the values of all heads side by side.
    """
    batch, length, heads, width = v.shape
    shared = v.reshape(batch, length, 1, heads * width).expand(-1, -1, heads, -1)
    per_key_head, state = gated_linear_attention(q, k, shared, log_decay, scale, state)
    blocks = per_key_head.reshape(batch, length, heads, heads, width)
    return torch.einsum("ij,btijv->btjv", mixing.to(blocks.dtype), blocks), state


def bonus_linear_attention(
    r: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, bonus: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    r"""Linear attention of RWKV-5 and RWKV-6 (Peng et al. 2024, equations 8 and 9 and section 4.2).

    .. math:: o_t = r_t (S_{t-1} + \mathrm{diag}(u) k_t^\top v_t), \qquad
              S_t = \mathrm{diag}(e^{g_t}) S_{t-1} + k_t^\top v_t

    `r`, `k`, `log_decay` ``[B, T, H, K]``, `bonus` u ``[H, K]``; `v` and `state` as above.
    """
    outputs = []
    for t in range(r.shape[1]):
        written = k[:, t, :, :, None] * v[:, t, :, None, :]
        outputs.append(torch.einsum("bhk,bhkv->bhv", r[:, t], state + bonus[..., None] * written))
        state = log_decay[:, t].exp()[..., None] * state + written
    return _stack(outputs, v), state


def selective_scan(x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    r"""Selective scan (Gu and Dao 2023, section 3.2), without the skip connection.

    .. math:: h_{t,n,i} = e^{\Delta_{t,i} A_{in}} h_{t-1,n,i} + \Delta_{t,i} B_{t,n} x_{t,i}, \qquad
              y_{t,i} = \sum_n C_{t,n} h_{t,n,i}

    `x` and the time steps `step` ``[B, T, I]``; `a` ``[I, N]``; `b`, `c` ``[B, T, N]``; `state` ``[B, N, I]``.
    Returns outputs ``[B, T, I]`` and the final state.
    """
    outputs = []
    for t in range(x.shape[1]):
        decay = (step[:, t, None] * a.mT).exp()
        state = decay * state + b[:, t, :, None] * (step[:, t] * x[:, t])[:, None]
        outputs.append(torch.einsum("bn,bni->bi", c[:, t], state))
    return _stack(outputs, x), state


def _per_key_decay(log_decay: Tensor | None, heads: int) -> Tensor | None:
    """exp(log decay) as ``[B, T, H, K or 1, 1]``."""
    if log_decay is None:
        return None
    if log_decay.dim() == 3:
        return log_decay.exp()[..., None, None]
    return repeat_heads(log_decay, heads).exp()[..., None]


def _stack(outputs: list[Tensor], v: Tensor) -> Tensor:
    return torch.stack(outputs, dim=1) if outputs else v.new_zeros(v.shape)
