r"""Linear attention of RWKV-5 and RWKV-6, in which the current token has a weight of its own.

An output reads the state before its own token, which is the state after the token before. So the queries are shifted by
one token: then gated linear attention computes every read but the first, and nothing is ever divided by a decay.

.. math:: q_t = r_{t+1} \;\Rightarrow\; q_t S_t = r_{t+1} S_t, \qquad o_0 = r_0 S_{-1} + \ldots

where :math:`S_{-1}` is the initial state. The current token adds :math:`\big(\sum_d r_{td} u_d k_{td}\big) v_t`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longrecall.ops.backends import Op, Presumed, declare, kernel
from longrecall.ops.borders import state_after, state_before, whole_sequences
from longrecall.ops.linear_attention.op import gated_linear_attention
from longrecall.ops.packing import check_boundaries, pack, unpack
from longrecall.ops.shapes import accumulation_dtype, check_attention_inputs, prepare_state

ADD_BONUS = declare(Op("add_bonus", kernels="linear_attention.triton.bonus", compiler_fuses=True))


def _presumed(reads: Tensor, first: Tensor, r: Tensor, k: Tensor, v: Tensor, bonus: Tensor) -> Presumed:
    return (("bonus", bonus, r.shape[2] * r.shape[3]),)


_add_bonus_kernel = kernel("linear_attention.triton.bonus", "add_bonus", presumes=_presumed)


def bonus_linear_attention(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    bonus: Tensor,
    *,
    initial_state: Tensor | None = None,
    backend: str | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Linear attention that reads before it decays and writes, and adds the current token with the weight u.

    .. math:: o_t = r_t (S_{t-1} + \mathrm{diag}(u) k_t^\top v_t), \qquad
              S_t = \mathrm{diag}(e^{g_t}) S_{t-1} + k_t^\top v_t

    Source: Peng et al. 2024 (Eagle and Finch), equations 8 and 9, with a decay for every token as in section 4.2.

    Args:
        r, k: ``[B, T, H, K]``.
        v: ``[B, T, H, V]``.
        log_decay: natural logarithm, <= 0, ``[B, T, H, K]``.
        bonus: u, ``[H, K]``.
        initial_state: ``[B, H, K, V]``; None = zeros. With `cu_seqlens` B is the number of documents.
        backend: as in `gated_linear_attention`; None chooses.
        cu_seqlens: int ``[documents + 1]``: B = 1 holds documents side by side, each with a state of its own.

    Returns:
        Outputs ``[B, T, H, V]`` in the dtype of `v` and the final state ``[B, H, K, V]`` in float32 (float64 for
        float64 inputs). Gradients reach every input, the initial state included.

    Raises:
        ValueError: shapes that do not fit, or an unknown backend.

    >>> r, k, v, g = torch.ones(4, 1, 6, 2, 4)
    >>> o, state = bonus_linear_attention(r, k, v, -g, torch.zeros(2, 4))
    >>> o[0, 0, 0]                                                # with u = 0 the first token reads an empty state
    tensor([0., 0., 0., 0.])
    """
    check_attention_inputs(r, k, v, log_decay)
    if tuple(bonus.shape) != tuple(r.shape[2:]) or log_decay.shape != r.shape or r.shape[2] != v.shape[2]:
        raise ValueError(
            f"the bonus must be [H, K], and r, k and log_decay have the H heads of v. Got bonus {list(bonus.shape)}, "
            f"r {list(r.shape)}, log_decay {list(log_decay.shape)}, v {list(v.shape)}"
        )
    if cu_seqlens is not None:
        if v.shape[0] != 1:
            raise ValueError(f"cu_seqlens packs documents into one row: B must be 1, got {v.shape[0]}")
        check_boundaries(cu_seqlens, v.shape[1])
        r, k, v, log_decay = (unpack(x, cu_seqlens) for x in (r, k, v, log_decay))
        out, final = bonus_linear_attention(r, k, v, log_decay, bonus, initial_state=initial_state, backend=backend)
        return pack(out, cu_seqlens), final
    dtype = accumulation_dtype(r, k, v, log_decay, bonus, initial_state)
    state = prepare_state(initial_state, (v.shape[0], v.shape[2], r.shape[3], v.shape[3]), v, dtype)
    state = state_before(state, r, k, v, log_decay, bonus)
    # The state crosses here; the recurrence inside must not send it once more.
    with torch.autocast(v.device.type, enabled=False), whole_sequences():
        r, k, values = r.to(dtype), k.to(dtype), v.to(dtype)
        ahead = torch.cat([r[:, 1:], torch.zeros_like(r[:, :1])], dim=1)
        reads, final = gated_linear_attention(
            ahead, k, values, log_decay, scale=1.0, initial_state=state, backend=backend
        )
        first = torch.einsum("bthk,bhkv->bthv", r[:, :1], state)
        out = add_bonus(reads, first, r, k, values, bonus.to(dtype))
    return state_after(out.to(v.dtype), final)


def add_bonus(
    reads: Tensor, first: Tensor, r: Tensor, k: Tensor, v: Tensor, bonus: Tensor, *, backend: str | None = None
) -> Tensor:
    r"""Reads shifted back by one token, plus :math:`\big(\sum_d r_{td} u_d k_{td}\big) v_t`; all of one dtype.

    Args:
        reads: ``[B, T, H, V]``: row t is what token t + 1 reads; the last row is not used.
        first: ``[B, 1, H, V]``: what the first token reads.
        r, k, v, bonus: those of `bonus_linear_attention`.
        backend: "triton" or "reference"; None chooses.

    Raises:
        ValueError: the kernel was asked for by name and cannot serve the call.
    """
    inputs: dict[str, Tensor | None] = {"reads": reads, "first": first, "r": r, "k": k, "v": v, "bonus": bonus}
    if ADD_BONUS.on_kernels(inputs, backend):
        out: Tensor = _add_bonus_kernel(reads, first, r, k, v, bonus)
        return out
    current = (r * k * bonus).sum(-1, keepdim=True)
    return torch.addcmul(torch.cat([first, reads[:, :-1]], dim=1), current, v)
