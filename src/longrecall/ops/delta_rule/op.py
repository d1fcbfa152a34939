"""The gated delta rule, and its generalisation in RWKV-7."""

from __future__ import annotations

from torch import Tensor

from longrecall.ops.backends import CHUNKED, REFERENCE, Op, declare, kernel, recurrence_functions
from longrecall.ops.delta_rule import chunked, chunked_generalised, reference
from longrecall.ops.recurrence import plain_for, run, too_short
from longrecall.ops.shapes import check_attention_inputs

GATED_DELTA_RULE = declare(
    Op(
        "gated_delta_rule",
        kernels="delta_rule.triton.chunked",
        functions=recurrence_functions(
            "gated_delta_rule",
            reference=reference.gated_delta_rule,
            chunked=chunked.gated_delta_rule,
            triton=kernel("delta_rule.triton.chunked", "gated_delta_rule", on="v"),
        ),
        plain=(REFERENCE, CHUNKED),
        slow=too_short,
        plain_for=plain_for,
    )
)
GENERALISED_DELTA_RULE = declare(
    Op(
        "generalised_delta_rule",
        functions=recurrence_functions(
            "generalised_delta_rule",
            reference=reference.generalised_delta_rule,
            chunked=chunked_generalised.generalised_delta_rule,
        ),
        plain=(REFERENCE, CHUNKED),
        plain_for=plain_for,
    )
)


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

    >>> k = torch.eye(2)[[0, 1, 0]].view(1, 3, 1, 2)              # the third token writes under the key of the first
    >>> v = torch.tensor([5.0, 6.0, 7.0]).view(1, 3, 1, 1)
    >>> o, state = gated_delta_rule(k, k, v, None, torch.ones(1, 3, 1))
    >>> state[0, 0]                                               # 7 has taken the place of 5
    tensor([[7.],
            [6.]])
    """
    check_attention_inputs(q, k, v, log_decay, beta)
    tensors = {"q": q, "k": k, "v": v, "log_decay": log_decay, "beta": beta}
    state_shape = (v.shape[2], q.shape[3], v.shape[3])
    return run(GATED_DELTA_RULE, tensors, state_shape, scale, initial_state, backend, cu_seqlens)


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

    >>> k = torch.eye(2)[[0, 1, 0]].view(1, 3, 1, 2)
    >>> v = torch.tensor([5.0, 6.0, 7.0]).view(1, 3, 1, 1)
    >>> o, state = generalised_delta_rule(k, k, v, torch.zeros_like(k), k, k)        # a = b = k: the delta rule
    >>> state[0, 0, :, 0]
    tensor([7., 6.])
    """
    check_attention_inputs(q, k, v, log_decay)
    for name, x in (("log_decay", log_decay), ("removal", removal), ("replacement", replacement)):
        if x.shape != k.shape:
            raise ValueError(f"{name} must be {list(k.shape)} as the keys; got {list(x.shape)}")
    tensors = {"q": q, "k": k, "v": v, "log_decay": log_decay, "removal": removal, "replacement": replacement}
    state_shape = (v.shape[2], q.shape[3], v.shape[3])
    return run(GENERALISED_DELTA_RULE, tensors, state_shape, scale, initial_state, backend, cu_seqlens)
