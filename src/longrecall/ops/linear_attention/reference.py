"""The definitions of the kinds of linear attention, one step at a time, in the dtype of their inputs.

Shapes throughout: B batch, T time, H heads, K key width, V value width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longrecall.ops.shapes import decay_factors, repeat_heads, stack_steps


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
    decay = decay_factors(log_decay, heads)
    outputs = []
    for t in range(q.shape[1]):
        if decay is not None:
            state = decay[:, t] * state
        state = state + k[:, t, :, :, None] * v[:, t, :, None, :]
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return stack_steps(outputs, v), state


def merged_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, mixing: Tensor, scale: float, state: Tensor
) -> tuple[Tensor, Tensor]:
    r"""Gated linear attention where each key head writes the values of all heads (StateX, equation 4, with mixing).

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
    return stack_steps(outputs, v), state
