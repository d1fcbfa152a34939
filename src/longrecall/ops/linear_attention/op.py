"""Gated linear attention, and with merged heads."""

from __future__ import annotations

from torch import Tensor

from longrecall.ops.backends import CHUNKED, REFERENCE, Op, declare, kernel, recurrence_functions
from longrecall.ops.linear_attention import chunked, reference
from longrecall.ops.recurrence import plain_for, run, too_short
from longrecall.ops.shapes import check_attention_inputs

GATED_LINEAR_ATTENTION, MERGED_LINEAR_ATTENTION = (
    declare(
        Op(
            name,
            kernels="linear_attention.triton.chunked",
            functions=recurrence_functions(
                name,
                reference=getattr(reference, name),
                chunked=getattr(chunked, name),
                triton=kernel("linear_attention.triton.chunked", name, on="v"),
            ),
            plain=(REFERENCE, CHUNKED),
            slow=too_short,
            plain_for=plain_for,
            low_products=name == "gated_linear_attention",
        )
    )
    for name in ("gated_linear_attention", "merged_linear_attention")
)


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

    >>> q, k, v = torch.ones(3, 1, 6, 2, 4)                       # each [B, T, H, K]
    >>> o, state = gated_linear_attention(q, k, v, torch.full((1, 6, 2), -0.1))
    >>> o.shape, state.shape
    (torch.Size([1, 6, 2, 4]), torch.Size([1, 2, 4, 4]))
    >>> more, state = gated_linear_attention(q, k, v, None, initial_state=state)     # the text goes on
    """
    check_attention_inputs(q, k, v, log_decay)
    tensors = {"q": q, "k": k, "v": v, "log_decay": log_decay}
    state_shape = (v.shape[2], q.shape[3], v.shape[3])
    return run(GATED_LINEAR_ATTENTION, tensors, state_shape, scale, initial_state, backend, cu_seqlens)


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

    >>> q, k, v = torch.ones(3, 1, 6, 2, 4)
    >>> o, state = merged_linear_attention(q, k, v, None, torch.eye(2))              # M = I: the layer before the merge
    >>> state.shape, torch.equal(o, gated_linear_attention(q, k, v, None)[0])
    (torch.Size([1, 2, 4, 8]), True)
    """
    check_attention_inputs(q, k, v, log_decay)
    heads = v.shape[2]
    if q.shape[2] != heads or tuple(mixing.shape) != (heads, heads):
        raise ValueError(
            f"merged heads need H key heads and mixing [H, H]; got q {list(q.shape)}, mixing {list(mixing.shape)}"
        )
    tensors = {"q": q, "k": k, "v": v, "log_decay": log_decay}
    state_shape = (heads, q.shape[3], heads * v.shape[3])
    return run(MERGED_LINEAR_ATTENTION, tensors, state_shape, scale, initial_state, backend, cu_seqlens, mixing)
